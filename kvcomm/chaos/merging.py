"""``MergingWorkload`` and its judge: do counters and sets keep what was acknowledged, whatever faults happen?

Clients add to counters, add unique elements to sets, remove some that they have seen, and read, through the
shipped ``MergePlane``, ``StatePlane`` and ``L3Tier``.  Records are not deleted, so a running total is oracle
enough.  Promised, of what all disks together have at the end, and of the last reads where quorums meet:

* **nothing acknowledged is lost**: every acknowledged add is in the sum once, every acknowledged element is
  there unless somebody removed it;
* **"refused" is true**: such an add is not in the sum, such an element is nowhere;
* **unknown means once or never**: some subset of the unknown adds explains the rest of the sum;
* **removed means removed**: an element that an acknowledged remove had seen is gone;
* **nothing is made up**: every element was added by somebody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from kvcomm.chaos.eventual import DEADLINE_SLACK_S, Ending, joined
from kvcomm.chaos.history import History, Invoked, Operation, Returned, Seen, Write
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Act
from kvcomm.mergeplane import MergePlane
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, SET

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess

MIX = (("add", 5), ("collect", 3), ("drop", 1), ("sum", 2), ("members", 2))
NAME = "sim"
SUBSETS_MAX = 1 << 14
"""Sums of unknown adds that are told apart; of more, only the range is checked."""


def merging_plan(plan: Plan) -> Plan:
    """The same world without strong operations: one in which nobody did anything else may lose records."""
    return replace(plan, strong_percent=0)


class MergingWorkload:
    """See the module."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._keys = [f"key{index}" for index in range(plan.keys)]
        self._operations, self._elements = count(), count()
        self._known: dict[tuple[str, str], list[str]] = {}
        """By client and key, the elements that it saw last."""

    def act(self, client: ClientProcess, at: float) -> Act:
        kind, key = client.draw.weighted(MIX), client.draw.choice(self._keys)
        if kind in ("sum", "members"):
            return self._read(client, at, kind, [key])
        if kind == "add":
            return self._write(client, at, kind, key, str(client.draw.between(-3, 9)))
        known = self._known.get((client.host.name, key), [])
        if kind == "drop" and known:
            return self._write(client, at, kind, key, client.draw.choice(known))
        return self._write(client, at, "collect", key, f"e{next(self._elements)}")

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return tuple(self._read(client, at, kind, self._keys) for kind in ("sum", "members"))

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return ()  # the policies for syncing allow losses

    def check(self, history: History, ending: Ending) -> list[Violation]:
        return list(check_merging(self._plan, history, ending))

    def _read(self, client: ClientProcess, at: float, kind: str, keys: Sequence[str]) -> Act:
        plane, number = MergePlane(client.plane), next(self._operations)
        resolver: Any = COUNTER if kind == "sum" else SET

        def returned(at: float, result: object) -> Returned:
            assert isinstance(result, list)
            seen = [Seen(_texts(each.value), dict(each.context), each.degraded) for each in result]
            if kind == "members":
                for key, each in zip(keys, seen, strict=True):
                    self._known[client.host.name, key] = each.values
            return Returned(at, client.host.name, number, "ok", seen=seen)

        return Act(
            Invoked(at, client.host.name, number, kind, list(keys)),
            lambda: plane.get(resolver, NAME, keys),
            returned,
        )

    def _write(self, client: ClientProcess, at: float, kind: str, key: str, value: str) -> Act:
        plane, number = MergePlane(client.plane), next(self._operations)
        resolver: Any = COUNTER if kind == "add" else SET
        delta: Any = int(value) if kind == "add" else FieldsDelta()
        if kind == "collect":
            delta = FieldsDelta({value.encode(): b""})
        elif kind == "drop":
            delta = FieldsDelta({}, [value.encode()])
        return Act(
            Invoked(at, client.host.name, number, kind, [key], [Write(key, value)]),
            lambda: plane.change(resolver, NAME, [(key, delta)]),
            lambda at, result: Returned(at, client.host.name, number, "ok"),
        )


def check_merging(plan: Plan, history: History, ending: Ending) -> Iterator[Violation]:
    """The broken promises."""
    operations = history.operations()
    yield from _deadlines(plan, operations)
    keys = sorted({key for operation in operations for key in operation.invoked.keys})
    final = {
        (kind, key): found
        for kind in ("sum", "members")
        for key in keys
        for found in [_left(kind, key, ending)]
    }
    found = [(kind, key, values, "at the end") for (kind, key), values in final.items()]
    if ending.intact and plan.read_quorum + plan.write_quorum > plan.copies:
        found += list(_last_reads(operations))
    for kind, key, values, where in found:
        writes = [each for each in operations if each.invoked.writes and each.invoked.keys == [key]]
        judge = _judge_sum if kind == "sum" else _judge_members
        yield from judge(f"{kind} of {key} {where}", writes, values)


def _left(kind: str, key: str, ending: Ending) -> list[str]:
    """What all disks together have."""
    resolver: Any = COUNTER if kind == "sum" else SET
    _, living = joined(ending.records.get(f"{resolver.name}/{NAME}/{key}", {}))
    return _texts(resolver.show([value.encode("latin-1") for value in living.values() if value is not None]))


def _last_reads(operations: Sequence[Operation]) -> Iterator[tuple[str, str, list[str], str]]:
    """Of those that began when everything else was over."""
    writes = [each for each in operations if each.invoked.writes]
    ends = [each.invoked.at if each.returned is None else each.returned.at for each in writes]
    writes_end = max(ends, default=0.0)
    for operation in operations:
        if operation.invoked.at > writes_end and operation.returned is not None:
            for key, seen in zip(operation.invoked.keys, operation.returned.seen, strict=False):
                if not seen.degraded:
                    yield operation.invoked.kind, key, seen.values, f"read by {operation.invoked.client}"


def _judge_sum(what: str, writes: Sequence[Operation], values: list[str]) -> Iterator[Violation]:
    amounts: dict[str, list[int]] = {"ok": [], "unknown": [], "refused": []}
    for operation in writes:
        if operation.invoked.kind == "add":
            amounts[operation.outcome].append(int(operation.invoked.writes[0].value or ""))
    [total] = [int(value) for value in values]
    rest, sums = total - sum(amounts["ok"]), {0}
    for amount in amounts["unknown"]:
        if len(sums) <= SUBSETS_MAX:
            sums |= {each + amount for each in sums}
    least, most = (sum(sign(amount, 0) for amount in amounts["unknown"]) for sign in (min, max))
    if not least <= rest <= most or (len(sums) <= SUBSETS_MAX and rest not in sums):
        yield Violation(
            "sum", f"{what} is {total}: {sum(amounts['ok'])} acknowledged, {amounts['unknown']} unknown"
        )


def _judge_members(what: str, writes: Sequence[Operation], values: list[str]) -> Iterator[Violation]:
    outcomes = {
        (operation.invoked.kind, operation.invoked.writes[0].value or "", operation.outcome)
        for operation in writes
    }
    added = {value: outcome for kind, value, outcome in outcomes if kind == "collect"}
    dropped = {value for kind, value, outcome in outcomes if kind == "drop" and outcome == "ok"}
    maybe = {value for kind, value, outcome in outcomes if kind == "drop" and outcome == "unknown"}
    for value in values:
        if added.get(value, "refused") == "refused":
            yield Violation("made up", f"{what} has {value}, which nobody added or which was refused")
        if value in dropped:
            yield Violation("came back", f"{what} has {value}, which was removed")
    for value in sorted(added.keys() - set(values) - dropped - maybe):
        if added[value] == "ok":
            yield Violation("lost", f"{what} has not {value}, which was added")


def _deadlines(plan: Plan, operations: Sequence[Operation]) -> Iterator[Violation]:
    for operation in operations:
        invoked, returned = operation.invoked, operation.returned
        took_s = plan.quiet_s if returned is None else returned.at - invoked.at
        if returned is None or took_s > plan.operation_timeout_s + DEADLINE_SLACK_S:
            yield Violation("deadlines", f"{invoked.client}'s {invoked.kind} of {invoked.at}: {took_s:.3f} s")


def _texts(value: int | frozenset[bytes]) -> list[str]:
    return [str(value)] if isinstance(value, int) else sorted(element.decode() for element in value)
