"""``Workload``: what clients do, and how what came of it is judged.

A workload is a class behind this port; the cluster, the faults and the history are the same for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvcomm.chaos.eventual import Ending, check_eventual
from kvcomm.chaos.history import (
    History,
    Invoked,
    Returned,
    Write,
    outcome_of,
    outcome_of_each,
    seen_of,
    stored_in_part,
    stored_of,
)
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation
from kvcomm.errors import KVCommError
from kvcomm.steps import Steps
from kvcomm.wire.messages import Dots

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess, Cluster

BATCH_MAX = 3
REFUSED_REST_S = 0.3
"""A client that could not do what it wanted does not hammer."""


@dataclass(frozen=True, slots=True)
class Act:
    """One operation, ready to run."""

    invoked: Invoked
    steps: Callable[[], Steps[object]]
    returned: Callable[[float, object], Returned]
    """(when, result of the steps) -> the line that says so."""
    raised: Callable[[Returned, KVCommError], Returned] = lambda line, error: line
    """What there is to add to the line of an error."""


class Workload(Protocol):
    """What one kind of clients does."""

    def act(self, client: ClientProcess, at: float) -> Act:
        """Draw the next operation of ``client``."""
        ...

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        """The last operations of ``client``, when everything is healed and quiet: what is to be seen then."""
        ...

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        """What ``client`` looks at after that, when all machines have lost power at once."""
        ...

    def check(self, history: History, ending: Ending) -> list[Violation]:
        """Which promises the history breaks."""
        ...


class EventualWorkload:
    """Gets, puts with and without context, deletes and batches of eventual records, every value unique."""

    def __init__(self, plan: Plan, operations: Iterator[int] | None = None) -> None:
        self._plan = plan
        self._keys = [f"key{index}" for index in range(plan.keys)]
        self._operations = count() if operations is None else operations
        self._values = count()

    def use(self, keys: Sequence[str]) -> None:
        """Go on with these records."""
        self._keys = list(keys)

    def act(self, client: ClientProcess, at: float) -> Act:
        kind = client.draw.weighted(self._plan.mix)
        number = next(self._operations)
        if kind == "get":
            return self._get(
                client, number, at, client.draw.some(self._keys, client.draw.between(1, BATCH_MAX))
            )
        keys = client.draw.some(self._keys, BATCH_MAX if kind == "batch" else 1)
        writes = [
            Write(key, None if kind == "delete" else f"v{next(self._values)}", blind=kind == "blind")
            for key in keys
        ]
        return self._put(client, number, at, kind, writes)

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return (self._get(client, next(self._operations), at, self._keys),)

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return ()  # the policies for syncing allow losses

    def check(self, history: History, ending: Ending) -> list[Violation]:
        return check_eventual(self._plan, history, ending)

    @staticmethod
    def _get(client: ClientProcess, number: int, at: float, keys: Sequence[str]) -> Act:
        def returned(at: float, result: object) -> Returned:
            assert isinstance(result, list)
            seen = [seen_of(value) for value in result]
            return Returned(at, client.host.name, number, "ok", seen=seen)

        return Act(
            Invoked(at, client.host.name, number, "get", list(keys)),
            lambda: client.plane.get([key.encode() for key in keys]),
            returned,
        )

    @staticmethod
    def _put(client: ClientProcess, number: int, at: float, kind: str, writes: list[Write]) -> Act:
        def returned(at: float, result: object) -> Returned:
            stored = [stored_of(version) for version in client.records.versions]
            return Returned(at, client.host.name, number, "ok", stored=stored)

        batch: list[tuple[bytes, bytes | None, Dots | None]] = [
            (
                write.key.encode(),
                None if write.value is None else write.value.encode(),
                {} if write.blind else None,
            )
            for write in writes
        ]
        return Act(
            Invoked(at, client.host.name, number, kind, [write.key for write in writes], writes),
            lambda: client.plane.put(batch),
            returned,
        )


class Work:
    """Keeps the clients of a cluster at work."""

    def __init__(self, cluster: Cluster, workload: Workload) -> None:
        self._cluster, self.workload = cluster, workload
        self._acts: deque[tuple[ClientProcess, Act]] = deque()
        """That are looked at in the end."""

    def begin(self) -> None:
        for client in self._cluster.clients:
            self._rest(client)

    def finish(self) -> None:
        """Let every client do its last operations."""
        self._look(self.workload.last)

    def look_again(self) -> None:
        """Let every client see what is left after the power cut."""
        self._look(self.workload.after_power_cut)

    @property
    def looking(self) -> bool:
        """Whether some of that is still to be done."""
        return bool(self._acts)

    def _look(self, acts: Callable[[ClientProcess, float], Sequence[Act]]) -> None:
        """One after the other: with nobody in the way, and nothing broken, all must be well."""
        at = round(self._cluster.world.now, 6)
        self._acts += [(client, act) for client in self._cluster.clients for act in acts(client, at)]
        self._look_on()

    def _look_on(self) -> None:
        if not self._acts:
            return
        client, act = self._acts[0]
        at = round(self._cluster.world.now, 6)

        def then(done: bool) -> None:
            self._acts.popleft()
            self._look_on()

        self.run(client, replace(act, invoked=msgspec.structs.replace(act.invoked, at=at)), then)

    def run(self, client: ClientProcess, act: Act, then: Callable[[bool], None]) -> None:
        """Run one operation and write down what came of it; ``then`` hears whether it was done."""
        history = self._cluster.history
        history.add(act.invoked)

        def done(result: object, error: KVCommError | None) -> None:
            at = round(self._cluster.world.now, 6)
            if error is None:
                history.add(act.returned(at, result))
            else:
                invoked, text = act.invoked, f"{error.code}: {error.message}"
                each, stored = outcome_of_each(error), [stored_in_part(one) for one in error.outcomes]
                line = Returned(
                    at, invoked.client, invoked.operation, outcome_of(error),
                    error=text, stored=stored, each=each,
                )  # fmt: skip
                history.add(act.raised(line, error))
            then(error is None)

        client.run(act.steps, done)

    def _rest(self, client: ClientProcess, at_least_s: float = 0.0) -> None:
        rest_s = at_least_s + client.draw.uniform(0.0, self._cluster.plan.pace_s)
        client.host.after(rest_s, lambda: self._next(client))

    def _next(self, client: ClientProcess) -> None:
        at = self._cluster.world.now
        if at < self._cluster.plan.active_s:
            act = self.workload.act(client, round(at, 6))
            self.run(client, act, lambda done: self._rest(client, 0.0 if done else REFUSED_REST_S))
