"""Clients that read and write while a cluster is hurt, and the judges of what they were told.

*Eventual* writers own their keys, so what a key may hold at the end follows from what its writer was told:

* the last acknowledged write, unless one of unknown outcome came after it;
* beside or instead of it, values of writes with an unknown outcome;
* never a value that was replaced or deleted by an acknowledged write, and never one that was refused.

*Strong* clients share keys; every history must be linearizable (``kvcomm.chaos.linearizable``).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvcomm.chaos.linearizable import Access, Kind, check_register
from kvcomm.client import Client
from kvcomm.errors import KVCommError, OutcomeUnknown
from kvcomm.strongplane import NO_VERSION, StrongConflict, StrongValue
from kvcomm.wire.messages import RecordState
from tests.system.conftest import eventually
from tests.system.lab import Lab

PACE_S = 0.004
"""Between two operations of one client: the machine has other things to do."""
EVENTUAL_KEYS = 6
"""Of one writer."""
GENERATION_OPERATIONS = 30
"""Strong keys are used for so many operations of a client: new ones begin with a promise, and short histories
are quick to judge."""
STRONG_KEYS = 2
DEADLINE_S = 4.0

Outcome = Literal["done", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Written:
    """One eventual write; ``None`` deletes."""

    value: bytes | None
    outcome: Outcome


@dataclass(slots=True)
class Gap:
    """The longest time without a success."""

    last_at: float
    longest_s: float = 0.0

    def success(self, now: float) -> None:
        self.longest_s = max(self.longest_s, now - self.last_at)
        self.last_at = now


@dataclass(slots=True)
class _Counts:
    done: int = 0
    refused: int = 0
    unknown: int = 0
    errors: dict[str, None] = field(default_factory=dict)
    """What was said, each once, the latest last."""

    def failed(self, error: KVCommError) -> Outcome:
        told = f"{error.code}: {error.message}"
        self.errors.pop(told, None)
        self.errors[told] = None
        if isinstance(error, OutcomeUnknown):
            self.unknown += 1
            return "unknown"
        self.refused += 1
        return "refused"


class Eventual:
    """Writers of ``kv.state(name)``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = _Counts()
        self.gap = Gap(time.monotonic())
        self._writes: dict[str, list[Written]] = defaultdict(list)

    def operate(self, kv: Client, worker: int, turn: int) -> None:
        key = f"{worker}-{turn % EVENTUAL_KEYS}"
        state = kv.state(self.name)
        value = None if turn % 7 == 6 else f"{key}/{turn}".encode()
        outcome: Outcome = "done"
        try:
            if value is None:
                state.delete(key, deadline_s=DEADLINE_S)
            else:
                state.put(key, value, deadline_s=DEADLINE_S)
        except KVCommError as error:
            outcome = self.counts.failed(error)
        else:
            self.counts.done += 1
            self.gap.success(time.monotonic())
        self._writes[key].append(Written(value, outcome))
        if outcome == "unknown":
            try:  # what was seen is replaced by the next write
                state.get(key, deadline_s=DEADLINE_S)
            except KVCommError as error:
                self.counts.failed(error)

    def attempted(self, key: str) -> set[bytes]:
        """All values that were ever sent and may have been written."""
        return {
            write.value
            for write in self._writes[key]
            if write.value is not None and write.outcome != "refused"
        }

    def keys(self) -> list[str]:
        return sorted(self._writes)

    def judge(self, lab: Lab) -> None:
        """Once all replicas are equal: each key holds what it may."""
        keys = self.keys()
        self.judge_states(keys, lab.agreed(self.name, keys))

    def judge_states(self, keys: Sequence[str], states: Sequence[RecordState | None]) -> None:
        for key, state in zip(keys, states, strict=True):
            siblings = () if state is None else state.siblings
            self.judge_key(key, {each.value for each in siblings if each.value is not None})

    def judge_key(self, key: str, values: set[bytes]) -> None:
        writes = self._writes[key]
        last = max((at for at, write in enumerate(writes) if write.outcome == "done"), default=-1)
        unknown = {write.value for write in writes if write.outcome == "unknown"}
        allowed = unknown | ({writes[last].value} if last >= 0 else set())
        assert values <= allowed, f"{key} holds {values - allowed}, which was replaced, deleted or refused"
        overtaken = any(write.outcome == "unknown" for write in writes[last + 1 :])
        if last >= 0 and writes[last].value is not None and not overtaken:
            assert writes[last].value in values, f"{key} lost {writes[last].value!r}, it has {values}"


class Strong:
    """Clients of ``kv.strong(name)``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = _Counts()
        self.gap = Gap(time.monotonic())
        self._histories: dict[str, list[Access]] = defaultdict(list)
        self._seen: dict[tuple[int, str], StrongValue] = {}

    def operate(self, kv: Client, worker: int, turn: int) -> None:
        key = f"{turn // GENERATION_OPERATIONS}-{turn % STRONG_KEYS}"
        kind: Kind = ("write", "cas", "read")[turn // STRONG_KEYS % 3]
        self._access(kv, worker, key, kind, f"{worker}/{turn}")

    def _access(self, kv: Client, worker: int, key: str, kind: Kind, value: str) -> None:
        strong, begin = kv.strong(self.name), time.monotonic()
        before = self._seen.pop((worker, key), StrongValue(None, NO_VERSION))
        expected = _text(before) if kind == "cas" else None
        ended: Literal["ok", "mismatch", "unknown"] = "ok"
        saw: str | None = None
        try:
            if kind == "read":
                found = strong.read(key, deadline_s=DEADLINE_S)
                saw = _text(found)
            elif kind == "write":
                found = strong.put(key, value.encode(), deadline_s=DEADLINE_S)
            else:
                found = strong.compare_and_set(key, before.version, value.encode(), deadline_s=DEADLINE_S)
        except StrongConflict as conflict:
            found, ended, saw = conflict.found, "mismatch", _text(conflict.found)
        except KVCommError as error:
            if self.counts.failed(error) == "unknown" and kind != "read":
                self._histories[key].append(Access(kind, begin, None, value, expected, "unknown"))
            return
        end = time.monotonic()
        self.counts.done += 1
        self.gap.success(end)
        self._seen[worker, key] = found
        self._histories[key].append(
            Access(kind, begin, end, None if kind == "read" else value, expected, ended, saw)
        )

    def judge(self, lab: Lab) -> None:
        """Read everything once more, through every shard, then find an explanation for each key."""
        with lab.client() as kv:
            for key in sorted(self._histories):
                self._read_at_last(kv, key)
        self.check()

    def _read_at_last(self, kv: Client, key: str) -> None:
        def answered() -> bool:
            count = len(self._histories[key])
            self._access(kv, -1, key, "read", "")
            return len(self._histories[key]) > count

        eventually(answered)

    def check(self) -> None:
        for key, history in self._histories.items():
            culprit = check_register(history)
            told = "\n".join(map(str, sorted(history, key=lambda access: access.begin)))
            assert culprit is None, f"nothing explains {culprit} of {key}:\n{told}"


def _text(value: StrongValue) -> str | None:
    return None if value.value is None else value.value.decode()


class Traffic:
    """Both kinds at once, each client in a thread of its own."""

    def __init__(self, lab: Lab, name: str, *, eventual: int = 2, strong: int = 3) -> None:
        self.eventual, self.strong = Eventual(name), Strong(name)
        self._lab, self._eventual, self._strong = lab, eventual, strong
        self._enough = threading.Event()
        self._broken: list[BaseException] = []
        operates: list[Callable[[Client, int, int], None]] = [self.eventual.operate] * eventual
        operates += [self.strong.operate] * strong
        self._threads = [
            threading.Thread(target=self._work, args=(worker, operate))
            for worker, operate in enumerate(operates)
        ]

    @contextmanager
    def running(self) -> Iterator[Traffic]:
        """It ends with the block; what broke in a thread is raised here."""
        for thread in self._threads:
            thread.start()
        try:
            self.goes_on()
            yield self
        finally:
            self._enough.set()
            for thread in self._threads:
                thread.join(60)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"
        if self._broken:
            raise self._broken[0]

    def goes_on(self, operations: int = 20) -> None:
        """Wait until both kinds had so many more successes."""
        eventual, strong = self.eventual.counts.done, self.strong.counts.done

        def enough() -> bool:
            assert not self._broken, self._broken
            return (self.eventual.counts.done >= eventual + operations or not self._eventual) and (
                self.strong.counts.done >= strong + operations or not self._strong
            )

        try:
            eventually(enough, within_s=60.0)
        except AssertionError as error:
            raise AssertionError(
                f"no {operations} more successes of each kind: {self._told(eventual, strong)}"
            ) from error

    def _told(self, eventual: int, strong: int) -> str:
        """What became of the operations since there were so many successes."""
        now = time.monotonic()
        return "; ".join(
            f"{kind}: {each.counts.done - before} since, the last {now - each.gap.last_at:.1f} s ago, "
            f"{each.counts.refused} refused and {each.counts.unknown} unknown in all, "
            f"the last words {list(each.counts.errors)[-3:]}"
            for kind, each, before in (("eventual", self.eventual, eventual), ("strong", self.strong, strong))
        )

    def judge(self) -> None:
        self.eventual.judge(self._lab)
        self.strong.judge(self._lab)

    def _work(self, worker: int, operate: Callable[[Client, int, int], None]) -> None:
        try:
            with self._lab.client() as kv:
                turn = 0
                while not self._enough.wait(PACE_S):
                    operate(kv, worker, turn)
                    turn += 1
        except BaseException as error:
            self._broken.append(error)
