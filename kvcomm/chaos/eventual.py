"""``check_eventual``: were the promises of eventual records kept?

Judges a history and what is left on the disks, without a line of the code that made them.

The judge keeps *histories of values* where the code keeps vectors: every value is unique, so what a client
had seen when it wrote is a set of values, and a write may replace exactly those.  From the last states of
the replicas it takes two plain facts, which dots each has seen and which it holds, and joins them by the
definition: a write lives while no replica has seen it without holding it.

Promised (a replica that nobody reads or writes may lag where nobody repairs, see
:func:`check_converged`):

* **nothing acknowledged is lost**: all replicas together have seen every acknowledged dot, and the value is
  there unless somebody who had seen it wrote over it;
* **nothing comes back**: what an acknowledged write replaced is gone, its author's last write with it where
  write quorums meet and no replica was moved or damaged;
* **"refused" is true**: such a write is nowhere;
* **nothing is made up**: every value that is read or left was written to that record;
* **quorums meet**: with R + W > N and unmoved, undamaged replicas, a read that does not say ``degraded`` has
  seen every write that was acknowledged before it began;
* **sessions**: with unmoved, undamaged replicas, what a client reads has seen all that the same client has
  read or written of the record before, unless it says ``degraded`` (what was shown without having been
  acknowledged may go with a disk, or with a move: where controllers move records, only what was acknowledged
  counts);
* **every operation ends** by its deadline;
* **siblings** are at most the bound for each replica incarnation, and their contexts name incarnations only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcomm.chaos.history import History, Operation, Outcome, Write
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation

Dot = tuple[str, int]

DEADLINE_SLACK_S = 0.01


@dataclass(frozen=True, slots=True)
class Replica:
    """What one disk has of one record at the end."""

    seen: Mapping[str, int]
    """Every dot of each replica id up to the counter."""
    held: Mapping[Dot, str | None]
    """The writes that it has not seen replaced; ``None`` = a delete."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left when everything is quiet."""

    records: Mapping[str, Mapping[str, Replica]]
    """By key, then by node."""
    intact: bool
    """No disk, record or owner was lost or moved: quorums meet."""
    owners: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By key, the nodes that should have it."""


class Known(NamedTuple):
    """Which attempts a client has seen, or knows to be replaced by what it has seen."""

    may: frozenset[int] = frozenset()
    """A put may replace these ..."""
    must: frozenset[int] = frozenset()
    """... and must replace these.  The difference: a client's own write that its context cannot cover is
    named by its dot; where write quorums do not meet, the next coordinator may not find it, and it stays."""


@dataclass(eq=False, slots=True)
class _Attempt:
    """One write of one record."""

    operation: Operation
    index: int
    """In its operation."""
    write: Write
    seen: Known
    dot: Dot | None = None
    """Where it was acknowledged."""

    @property
    def outcome(self) -> Outcome:
        return self.operation.outcome_of_write(self.index)

    def describe(self) -> str:
        invoked = self.operation.invoked
        what = f"{self.write.key} = {self.write.value!r}"
        return f"{what} ({self.outcome}, {self.dot}) of {invoked.client} at {invoked.at}"


@dataclass(eq=False, slots=True)
class _Record:
    attempts: list[_Attempt] = field(default_factory=list)
    by_value: dict[str, int] = field(default_factory=dict)

    def known(self, values: list[str]) -> Known:
        """By somebody who was shown ``values``."""
        may: set[int] = set()
        must: set[int] = set()
        for value in values:
            number = self.by_value.get(value)
            if number is not None:
                may |= {number} | self.attempts[number].seen.may
                must |= {number} | self.attempts[number].seen.must
        return Known(frozenset(may), frozenset(must))


def check_eventual(plan: Plan, history: History, ending: Ending) -> list[Violation]:
    """The broken promises, in no particular order of weight."""
    return list(_Judge(plan, history, ending).judge())


def check_converged(ending: Ending) -> list[Violation]:
    """Where somebody repairs and scrubs: all owners of a record have the same, and can read it, without
    anybody having read it."""
    found: list[Violation] = []
    for key, owners in sorted(ending.owners.items()):
        replicas = ending.records.get(key, {})
        states = [(node, replicas.get(node)) for node in owners]
        if any(state != states[0][1] for _, state in states):
            found.append(Violation("converged", f"the owners of {key} differ: {states}"))
    return found


class _Judge:
    def __init__(self, plan: Plan, history: History, ending: Ending) -> None:
        self._plan, self._ending = plan, ending
        self._operations = history.operations()
        self._records: dict[str, _Record] = {}
        self._made_up: list[Violation] = []
        self._finds = ending.intact and 2 * plan.write_quorum > plan.copies
        """Whoever coordinates a put finds the write that it replaces."""
        self._replay()

    def judge(self) -> Iterator[Violation]:
        yield from self._made_up
        yield from self._deadlines()
        for key, record in sorted(self._records.items()):
            yield from self._judge_record(key, record)
        if not self._ending.intact or self._plan.burial_age_s is not None:
            return  # with a tombstone goes what it had seen
        yield from self._sessions()
        if self._plan.read_quorum + self._plan.write_quorum > self._plan.copies:
            yield from self._quorums()

    # -- what was seen when

    def _replay(self) -> None:
        """Walk through each client's operations in its order, keeping what it has seen of each record."""
        events: list[tuple[float, int, int, Operation]] = []
        for operation in self._operations:
            number = operation.invoked.operation
            events.append((operation.invoked.at, 1, number, operation))
            if operation.returned is not None:
                events.append((operation.returned.at, 0, number, operation))
        known: dict[tuple[str, str], Known] = {}
        mine: dict[tuple[int, int], tuple[_Record, int]] = {}
        for _, invokes, number, operation in sorted(events, key=lambda event: event[:3]):
            if invokes:
                self._invoke(operation, known, mine)
            elif operation.outcome == "ok" or (operation.returned is not None and operation.returned.each):
                self._return(number, operation, known, mine)

    def _invoke(
        self,
        operation: Operation,
        known: dict[tuple[str, str], Known],
        mine: dict[tuple[int, int], tuple[_Record, int]],
    ) -> None:
        for index, write in enumerate(operation.invoked.writes):
            record = self._records.setdefault(write.key, _Record())
            seen = Known() if write.blind else known.get((operation.invoked.client, write.key), Known())
            number = len(record.attempts)
            record.attempts.append(_Attempt(operation, index, write, seen))
            if write.value is not None:
                record.by_value[write.value] = number
            mine[operation.invoked.operation, index] = (record, number)

    def _return(
        self,
        number: int,
        operation: Operation,
        known: dict[tuple[str, str], Known],
        mine: dict[tuple[int, int], tuple[_Record, int]],
    ) -> None:
        assert operation.returned is not None
        client = operation.invoked.client
        for key, seen in zip(operation.invoked.keys, operation.returned.seen, strict=False):
            record = self._records.setdefault(key, _Record())
            for value in seen.values:
                if value not in record.by_value:
                    self._made_up.append(
                        Violation("made up", f"{client} read {value!r} of {key}, never written")
                    )
            known[client, key] = record.known(seen.values)
        for index, stored in enumerate(operation.returned.stored):
            if stored is None:
                continue
            record, attempt_number = mine[number, index]
            attempt = record.attempts[attempt_number]
            attempt.dot = (stored.replica, stored.counter)
            covered = stored.context.get(stored.replica, 0) >= stored.counter
            itself = frozenset({attempt_number})
            known[client, attempt.write.key] = Known(
                attempt.seen.may | itself if covered or stored.own else attempt.seen.may,
                attempt.seen.must | itself if covered or (stored.own and self._finds) else attempt.seen.must,
            )

    # -- promises

    def _deadlines(self) -> Iterator[Violation]:
        for operation in self._operations:
            invoked, returned = operation.invoked, operation.returned
            if returned is None:
                yield Violation(
                    "deadlines", f"{invoked.client}'s {invoked.kind} of {invoked.at} never returned"
                )
            elif returned.at - invoked.at > self._plan.operation_timeout_s + DEADLINE_SLACK_S:
                took_s = returned.at - invoked.at
                yield Violation(
                    "deadlines", f"{invoked.client}'s {invoked.kind} of {invoked.at}: {took_s:.3f} s"
                )

    def _sessions(self) -> Iterator[Violation]:
        """A client does one thing after the other, so its returns are in its order."""
        seen_by: dict[tuple[str, str], dict[str, int]] = {}
        ended = [operation for operation in self._operations if operation.returned is not None]
        for operation in sorted(ended, key=lambda each: each.returned.at if each.returned else 0.0):
            assert operation.returned is not None
            client, returned = operation.invoked.client, operation.returned
            for key, seen in zip(operation.invoked.keys, returned.seen, strict=False):
                before = seen_by.setdefault((client, key), {})
                missing = {dot for dot in before.items() if seen.context.get(dot[0], 0) < dot[1]}
                if self._plan.controllers:
                    missing = {dot for dot in missing if self._acknowledged(key, dot, seen.context)}
                if missing and not seen.degraded:
                    what = f"{client} read {key} at {operation.invoked.at}"
                    yield Violation("sessions", f"{what} without {sorted(missing)}, seen before")
                _raise(before, seen.context)
            for write, stored in zip(operation.invoked.writes, returned.stored, strict=False):
                if stored is None:
                    continue  # of a batch that failed: this write was not done, or nobody knows
                before = seen_by.setdefault((client, write.key), {})
                _raise(before, stored.context)
                _raise(before, {stored.replica: stored.counter})

    def _acknowledged(self, key: str, dot: Dot, context: Mapping[str, int]) -> bool:
        """Whether a write up to ``dot`` that ``context`` has not seen was acknowledged."""
        replica, counter = dot
        dots = [attempt.dot for attempt in self._records[key].attempts if attempt.dot is not None]
        return any(each[0] == replica and context.get(replica, 0) < each[1] <= counter for each in dots)

    def _judge_record(self, key: str, record: _Record) -> Iterator[Violation]:
        replicas = self._ending.records.get(key, {})
        seen, living = joined(replicas)
        values = {value for value in living.values() if value is not None}
        replaceable: set[int] = set()
        replaced_by: dict[int, _Attempt] = {}
        for attempt in record.attempts:
            if attempt.outcome != "refused":
                replaceable |= attempt.seen.may
            if attempt.outcome == "ok":
                replaced_by.update(dict.fromkeys(sorted(attempt.seen.must), attempt))
        for made_up in sorted(values - record.by_value.keys()):
            yield Violation("made up", f"{key} holds {made_up!r}, which nobody wrote")
        for number, attempt in enumerate(record.attempts):
            value, outcome, dot = attempt.write.value, attempt.outcome, attempt.dot
            there, what = value is not None and value in values, attempt.describe()
            if outcome == "refused" and there:
                yield Violation("refused", f"{what} was refused and is there")
            buried = self._plan.burial_age_s is not None and (value is None or number in replaceable)
            if dot is not None and seen.get(dot[0], 0) < dot[1] and not buried:
                yield Violation("lost", f"{what}: no replica has seen it")
            if value is not None and outcome == "ok" and not there and number not in replaceable:
                yield Violation("lost", f"{what} is gone, and nobody who had seen it wrote")
            if there and number in replaced_by:
                yield Violation("came back", f"{what} is there: {replaced_by[number].describe()} replaced it")
            if there and dot is not None and dot not in living:
                yield Violation("dots", f"{what} is there under another dot")
        yield from _sizes(key, replicas)

    def _quorums(self) -> Iterator[Violation]:
        """Every acknowledged dot is covered by the contexts of the reads that began later."""
        acknowledged: dict[str, list[tuple[float, Dot]]] = {}
        for operation in self._operations:
            if operation.returned is not None:
                writes = zip(operation.invoked.writes, operation.returned.stored, strict=False)
                for write, stored in writes:
                    if stored is None:
                        continue
                    entry = (operation.returned.at, (stored.replica, stored.counter))
                    acknowledged.setdefault(write.key, []).append(entry)
        for operation in self._operations:
            if operation.returned is None:
                continue
            for key, seen in zip(operation.invoked.keys, operation.returned.seen, strict=False):
                if seen.degraded:
                    continue
                for at, (replica, counter) in acknowledged.get(key, []):
                    if at < operation.invoked.at and seen.context.get(replica, 0) < counter:
                        yield Violation(
                            "quorums",
                            f"{operation.invoked.client} read {key} at {operation.invoked.at} and did not "
                            f"see ({replica}, {counter}), acknowledged at {at}",
                        )


def _raise(seen: dict[str, int], context: Mapping[str, int]) -> None:
    for replica, counter in context.items():
        seen[replica] = max(seen.get(replica, 0), counter)


def joined(replicas: Mapping[str, Replica]) -> tuple[dict[str, int], dict[Dot, str | None]]:
    """(what all together have seen, the writes that live)."""
    seen: dict[str, int] = {}
    for replica in replicas.values():
        for name, counter in replica.seen.items():
            seen[name] = max(seen.get(name, 0), counter)
    living: dict[Dot, str | None] = {}
    for replica in replicas.values():
        for dot, value in replica.held.items():
            if all(dot in other.held or other.seen.get(dot[0], 0) < dot[1] for other in replicas.values()):
                living[dot] = value
    return seen, living


def _sizes(key: str, replicas: Mapping[str, Replica]) -> Iterator[Violation]:
    for node, replica in sorted(replicas.items()):
        values = [value for value in replica.held.values() if value is not None]
        incarnations = len(replica.seen)
        if len(values) > 16 * max(1, incarnations):
            yield Violation(
                "siblings", f"{node} holds {len(values)} values of {key} of {incarnations} replicas"
            )
        if any(replica.seen.get(name, 0) < counter for name, counter in replica.held):
            yield Violation("dots", f"{node} holds a write of {key} that it has not seen")
