"""``StrongWorkload`` and its judge: are strong records linearizable, whatever faults happen?

Clients read, set, compare-and-set, change and clear registers through the shipped ``StrongPlane`` and
``L3Tier``.  Every value is written once, so what a register holds names the operation that put it there, and
every version stands for one value.  Promised:

* **linearizable**: each register behaves as if its operations took effect one at a time, each at a moment
  between its call and its return (``linearizable.check_register``).  An operation of which nobody knows took
  effect once, at any later time, or never; a compare-and-set that failed says what it saw;
* **"refused" is true**: nobody ever sees a value whose writer was told "not done";
* **versions** stand for one value each;
* **back**: when everything is healed, and again after all machines have lost power at once, every register
  can be read; what is read then belongs to the same history, so no acknowledged change may be missing;
* **every operation ends** by its deadline.

May be lost, so worlds do not draw it: the databases of more than a minority of a register's owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from kvcomm.chaos.eventual import DEADLINE_SLACK_S, Ending
from kvcomm.chaos.history import History, Invoked, Operation, Returned, Seen, Swap, Write
from kvcomm.chaos.linearizable import Access, Ended, TooHard, check_register
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Act, EventualWorkload
from kvcomm.errors import KVCommError, OutcomeUnknown, failure_to_error
from kvcomm.steps import Ask, Steps, ask_all
from kvcomm.strongplane import NO_VERSION, StrongConflict, StrongValue
from kvcomm.wire.messages import Failure, StrongOutcomes, StrongRead

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess

READS = ("read", "final", "here")
"""``final``: when all is healed; ``here``: then, from the shard that was asked."""
KINDS = (*READS, "set", "cas", "change", "clear")
FINAL_TRIES = 2
"""Whoever coordinated before the faults ended may be passed over by the first."""
UNDECIDED = "undecided"
"""Not a broken promise: the judge gave up."""


class StrongWorkload:
    """See the module."""

    def __init__(self, plan: Plan, operations: Iterator[int] | None = None) -> None:
        self._plan = plan
        self._keys = [f"register{index}" for index in range(plan.registers)]
        self._operations = count() if operations is None else operations
        self._values = count()
        self._known: dict[tuple[str, str], StrongValue] = {}
        """By client and key, what it saw last."""

    def use(self, keys: Sequence[str]) -> None:
        """Go on with these records."""
        self._keys = list(keys)

    def act(self, client: ClientProcess, at: float) -> Act:
        kind, key = client.draw.weighted(self._plan.strong_mix), client.draw.choice(self._keys)
        if kind == "read":
            return self._read(client, at, "read", [key])
        return self._change(client, at, kind, key)

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return [self._read(client, at, "final", self._keys) for _ in range(FINAL_TRIES)]

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        """Every register by the usual way, and some of them from each of their owners."""
        from l3_shard.ring import Ring

        ring, clients = Ring.from_map(client.cluster.map), client.cluster.client_names()
        mine = self._keys[clients.index(client.host.name) :: len(clients)]
        here = [self._here(client, at, node, key) for key in mine for node in ring.replicas(key.encode())]
        return *self.last(client, at), *here

    def check(self, history: History, ending: Ending) -> list[Violation]:
        return check_strong(self._plan, history)

    # -- operations

    def _read(self, client: ClientProcess, at: float, kind: str, keys: Sequence[str]) -> Act:
        names = [key.encode() for key in keys]
        return self._reading(client, at, kind, keys, lambda: client.strong.read(names))

    def _here(self, client: ClientProcess, at: float, node: str, key: str) -> Act:
        epoch, timeout_s = client.cluster.map.epoch, self._plan.ask_timeout_s
        ask = Ask(f"tcp://{node}:1", StrongRead(epoch, [key.encode()]), timeout_s=timeout_s)
        return self._reading(client, at, "here", [key], partial(_ask_one, ask))

    def _reading(
        self,
        client: ClientProcess,
        at: float,
        kind: str,
        keys: Sequence[str],
        steps: Callable[[], Steps[list[StrongValue]]],
    ) -> Act:
        number = next(self._operations)

        def returned(at: float, result: object) -> Returned:
            assert isinstance(result, list)
            for key, value in zip(keys, result, strict=True):
                self._known[client.host.name, key] = value
            version = result[0].version.hex() if len(keys) == 1 else ""
            return Returned(
                at, client.host.name, number, "ok", seen=[_seen(value) for value in result], version=version
            )

        return Act(Invoked(at, client.host.name, number, kind, list(keys)), steps, returned)

    def _change(self, client: ClientProcess, at: float, kind: str, key: str) -> Act:
        name, number, plane = key.encode(), next(self._operations), client.strong
        value = None if kind == "clear" else f"s{next(self._values)}"
        known = self._known.get((client.host.name, key), StrongValue(None, NO_VERSION))
        expected = NO_VERSION if known.value is None else known.version
        swaps: list[Swap] = []

        def next_value(found: bytes | None) -> bytes:
            swaps.append(Swap(_text(found), f"{value}.{len(swaps)}"))
            return swaps[-1].value.encode()

        def steps() -> Steps[StrongValue]:
            match kind:
                case "cas":
                    return plane.compare_and_set(name, expected, None if value is None else value.encode())
                case "change":
                    return plane.change(name, next_value)
                case "clear":
                    return plane.delete(name)
            assert value is not None
            return plane.put(name, value.encode())

        def returned(at: float, result: object) -> Returned:
            assert isinstance(result, StrongValue)
            self._known[client.host.name, key] = result
            return Returned(
                at,
                client.host.name,
                number,
                "ok",
                version=result.version.hex(),
                swap=swaps[-1] if swaps else None,
            )

        def raised(line: Returned, error: KVCommError) -> Returned:
            line = msgspec.structs.replace(line, swap=swaps[-1] if swaps else None)
            if not isinstance(error, StrongConflict):
                return line
            self._known[client.host.name, key] = error.found
            return msgspec.structs.replace(line, seen=[_seen(error.found)], version=error.found.version.hex())

        writes = [] if kind == "change" else [Write(key, value, expected=_text(known.value))]
        return Act(Invoked(at, client.host.name, number, kind, [key], writes), steps, returned, raised)


class MixedWorkload:
    """Eventual and strong operations of the same clients, as the plan mixes them."""

    def __init__(self, plan: Plan) -> None:
        operations = count()
        self._plan = plan
        self._eventual = EventualWorkload(plan, operations)
        self._strong = StrongWorkload(plan, operations)

    def act(self, client: ClientProcess, at: float) -> Act:
        strong = client.draw.chance(self._plan.strong_percent / 100)
        return (self._strong if strong else self._eventual).act(client, at)

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        strong = self._strong.last(client, at) if self._plan.strong_percent else ()
        return *self._eventual.last(client, at), *strong

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return self._strong.after_power_cut(client, at) if self._plan.strong_percent else ()

    def check(self, history: History, ending: Ending) -> list[Violation]:
        strong, eventual = history.parted(KINDS)
        return self._eventual.check(eventual, ending) + self._strong.check(strong, ending)


def _ask_one(ask: Ask) -> Steps[list[StrongValue]]:
    (answer,) = yield from ask_all([ask])
    message = answer.message
    if isinstance(message, Failure):
        raise failure_to_error(message.code, message.text, message.detail)
    if not isinstance(message, StrongOutcomes):
        raise OutcomeUnknown(f"{ask.address} gave no answer to the question that it was asked")
    (outcome,) = message.outcomes
    if outcome.code:
        raise failure_to_error(outcome.code, outcome.text)
    return [StrongValue(outcome.value, outcome.version)]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode()


def _seen(value: StrongValue) -> Seen:
    return Seen([] if value.value is None else [value.value.decode()], {}, False)


# -- the judge


def check_strong(plan: Plan, history: History) -> list[Violation]:
    """The broken promises; ``history`` is of strong records alone."""
    return list(_judge(plan, history.operations()))


def _judge(plan: Plan, operations: Sequence[Operation]) -> Iterator[Violation]:
    accesses: dict[str, list[Access]] = {}
    refused: set[str] = set()
    for operation in operations:
        yield from _deadline(plan, operation)
        for key, access in _accesses(operation):
            accesses.setdefault(key, []).append(access)
        refused |= _refused(operation)
    yield from _back(operations)
    yield from _versions(operations)
    for key, those in sorted(accesses.items()):
        lies = sorted(refused & {access.saw for access in those if access.saw is not None})
        if lies:
            yield Violation("refused", f"{key} held {lies}, of which their writers were told: not done")
        yield from _linearizable(key, those)


def _back(operations: Sequence[Operation]) -> Iterator[Violation]:
    """The last try of each client counts."""
    finals = {each.invoked.client: each for each in operations if each.invoked.kind == "final"}
    for client, final in finals.items():
        if final.outcome != "ok":
            error = "" if final.returned is None else final.returned.error
            yield Violation("back", f"{client} cannot read: {error}")


def _linearizable(key: str, accesses: Sequence[Access]) -> Iterator[Violation]:
    try:
        unexplained = check_register(accesses)
    except TooHard:
        yield Violation(UNDECIDED, f"{key}: the history of {len(accesses)} operations is too hard to judge")
        return
    if unexplained is not None:
        yield Violation("linearizable", f"{key}: no order of its operations explains {unexplained}")


def _deadline(plan: Plan, operation: Operation) -> Iterator[Violation]:
    invoked, returned = operation.invoked, operation.returned
    if returned is None:
        yield Violation("deadlines", f"{invoked.client}'s {invoked.kind} of {invoked.at} never returned")
    elif returned.at - invoked.at > plan.operation_timeout_s + DEADLINE_SLACK_S:
        took_s = returned.at - invoked.at
        yield Violation("deadlines", f"{invoked.client}'s {invoked.kind} of {invoked.at}: {took_s:.3f} s")


def _accesses(operation: Operation) -> Iterator[tuple[str, Access]]:
    """What an operation did, or may have done, to its registers."""
    invoked, returned = operation.invoked, operation.returned
    begin, end = invoked.at, None if returned is None else returned.at
    if invoked.kind in READS:
        if returned is not None and operation.outcome == "ok":
            for key, seen in zip(invoked.keys, returned.seen, strict=True):
                yield key, Access("read", begin, end, saw=_value(seen))
        return
    (key,) = invoked.keys
    mismatch = returned is not None and bool(returned.seen)
    if operation.outcome == "refused" and not mismatch:
        return
    ended: Ended = "unknown" if operation.outcome == "unknown" else "mismatch" if mismatch else "ok"
    saw = _value(returned.seen[0]) if returned is not None and mismatch else None
    if invoked.kind in ("set", "clear"):
        yield key, Access("write", begin, end, value=invoked.writes[0].value, ended=ended)
    elif invoked.kind == "cas":
        (write,) = invoked.writes
        yield key, Access("cas", begin, end, write.value, write.expected, ended, saw)
    elif returned is not None and returned.swap is not None:
        swap = returned.swap
        yield key, Access("cas", begin, end, swap.value, swap.expected, ended, saw)


def _refused(operation: Operation) -> set[str]:
    """Values of which their writer was told that they were not written."""
    if operation.outcome != "refused" or operation.returned is None:
        return set()
    values = {write.value for write in operation.invoked.writes if write.value is not None}
    return values | ({operation.returned.swap.value} if operation.returned.swap is not None else set())


def _versions(operations: Sequence[Operation]) -> Iterator[Violation]:
    known: dict[tuple[str, str], str | None] = {}
    for operation in operations:
        returned = operation.returned
        if returned is None or not returned.version:
            continue
        (key,) = operation.invoked.keys
        value = _held(operation, returned)
        first = known.setdefault((key, returned.version), value)
        if first != value:
            yield Violation("versions", f"{key}: version {returned.version} stands for {first} and {value}")


def _held(operation: Operation, returned: Returned) -> str | None:
    """What the register held with the version that was told."""
    if returned.seen:
        return _value(returned.seen[0])
    if returned.swap is not None:
        return returned.swap.value
    return operation.invoked.writes[0].value


def _value(seen: Seen) -> str | None:
    return seen.values[0] if seen.values else None
