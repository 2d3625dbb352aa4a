"""What is measured of a story, and by which judge.

Every measure is a number with a meaning (``MEASURES``); a scenario's promises are limits of some of them.
``None``: there was nothing to measure; ``NEVER``: what was waited for did not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Final

from kvcomm.chaos.eventual import check_eventual
from kvcomm.chaos.history import Operation
from kvcomm.chaos.observed import UNTYPED, WRONG, Call, Episode, Observed, calls_of
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import KINDS, UNDECIDED, check_strong
from kvcomm.chaos.watch import Violation

if TYPE_CHECKING:
    from kvcomm.chaos.scenario import Scenario

NEVER: Final = inf
REQUEST_TIMEOUT_S: Final = 0.5
"""Of the clusters that stories are told on; below the shipped 2 s, for shorter stories."""
CALM_S: Final = 5.0
"""After it was hurt a host may be suspect for so long."""
SLACK_S = 0.3
"""That a call may be late where processes share two cores."""

MEASURES: dict[str, str] = {
    "eventual_broken": "eventual records: acknowledged writes that are lost or came back, values that nobody "
    "wrote, refusals that were lies, sessions and quorums that were broken",
    "strong_broken": "strong records: histories that no order of their operations explains, refusals that "
    "were lies, registers that cannot be read at the end",
    "strong_undecided": "strong records whose history was too hard to judge",
    "wrong_bytes": "fetches that returned other bytes than were published",
    "untyped_errors": "calls that raised something else than a documented error",
    "late_calls": f"calls that came back more than {SLACK_S:g} s and lag_s after their deadline, or never",
    "first_failure_s": "from the first fault to the first call that was not answered",
    "first_good_s": "from the last heal until every kind of call has had an answer on every node",
    "equal_s": "from the last heal until all replicas of every record written before were equal, without "
    "anybody reading or writing those",
    "strong_gap_s": "longest time without a good strong call during a fault, on the side with most nodes, of "
    "the records that have a majority of replicas there; without a partition: anywhere",
    "strong_wrong_side": "strong calls that were done on a side without a majority of the record's replicas",
    "strong_refusal_s": "longest time until a strong call was refused on such a side",
    "eventual_share": "during faults, once noticed: answered share of the eventual calls whose record has a "
    "replica on the caller's side",
    "strong_share": "during faults, once noticed: answered share of the strong calls whose record has a "
    "majority of replicas on the caller's side",
    "eventual_failed": "eventual calls that were refused or of unknown outcome, in the whole story",
    "strong_failed": "strong calls likewise",
    "failed_share": "share of the calls of records that were not answered, in the whole story",
    "eventual_answered": "eventual calls that were answered during faults",
    "strong_answered": "strong calls likewise",
    "key_stop_s": "longest time for which one record was not answered, from the begin of the first call that "
    "was not to the end of the next that was, or of a single slow call",
    "p99_ratio": "99th percentile of the time of answered calls during faults and orders, over the quiet one "
    "before",
    "epochs_doubled": "epochs of the ring under which two nodes had different maps",
    "terms_doubled": "terms of the controllers under which two leaders were named",
    "epochs": "epochs of the ring that were seen",
    "leader_changes": "times that the controllers' leader was another one than before",
    "false_alarms": "hosts that the controllers' leader called suspect or dead though they were not hurt"
    f" in the last {CALM_S:g} s, outside partitions",
    "leader_back_s": "from the first fault until some controller names a leader of a later term, or the same "
    "again",
    "lag_s": "longest time for which a process of clients was late by itself, for want of processor time: "
    "other times are not worth more than this",
    "orders_open": "orders that were neither carried out nor taken back by the end of the story",
    "orders_undone": "orders that were taken back, or failed",
    "orders_refused": "orders that were refused",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers, and in words what was broken."""

    values: dict[str, float | None]
    violations: tuple[Violation, ...]
    calls: tuple[Call, ...]


def measure(scenario: Scenario, observed: Observed) -> Measured:
    """Everything that can be measured of ``observed``."""
    violations = list(_violations(scenario, observed))
    calls = calls_of(observed.history.operations())
    judged = _Judged(scenario, observed, calls)
    values = {name: look(judged) for name, look in _LOOKS.items()} | _counted(violations, calls)
    assert set(values) == set(MEASURES), set(values) ^ set(MEASURES)
    return Measured(values, tuple(violations), tuple(calls))


# -- the judges


def plan_of(scenario: Scenario, quorums: tuple[int, int, int] | None = None, lag_s: float = 0.0) -> Plan:
    """The plan that the judges of the simulator go by.

    Args:
        quorums: replicas, write quorum, read quorum; else majorities of the scenario's replicas.
        lag_s: how late the clients were by themselves.
    """
    copies = min(scenario.replicas, scenario.shards or scenario.nodes)
    replicas, write_quorum, read_quorum = quorums or (copies, copies // 2 + 1, copies // 2 + 1)
    return Plan(
        seed=0,
        shards=max(replicas, scenario.shards or scenario.nodes),
        replicas=replicas,
        write_quorum=write_quorum,
        read_quorum=read_quorum,
        operation_timeout_s=scenario.load.deadline_s + SLACK_S + lag_s,
        ask_timeout_s=REQUEST_TIMEOUT_S,
        request_timeout_s=0.75 * REQUEST_TIMEOUT_S,
    )


def _violations(scenario: Scenario, observed: Observed) -> Iterator[Violation]:
    lag_s = max((sample.late_s for sample in observed.samples), default=0.0)
    plan = plan_of(scenario, observed.quorums, lag_s)
    records, _ = observed.history.parted([*KINDS, *_EVENTUAL])
    strong, eventual = records.parted(KINDS)
    if observed.ending is not None:
        yield from check_eventual(plan, eventual, observed.ending)
    else:
        yield Violation(UNSEEN, "not every shard told what it keeps at last, so nobody knows what is lost")
    yield from check_strong(plan, strong)
    if observed.equal_s is None:
        yield from (Violation("unequal", text) for text in observed.unequal)
    yield from (Violation("order", text) for text in observed.orders_open)
    for operation in observed.history.operations():
        yield from _of_call(operation)


UNSEEN = "unseen"
_EVENTUAL = ("get", "put", "blind", "delete", "batch")


def _of_call(operation: Operation) -> Iterator[Violation]:
    invoked, returned = operation.invoked, operation.returned
    if returned is None:
        return
    if any(WRONG in seen.values for seen in returned.seen):
        yield Violation("bytes", f"{invoked.client} fetched {invoked.keys} and got other bytes")
    if returned.error.startswith(UNTYPED):
        yield Violation(UNTYPED, f"{invoked.client}'s {invoked.kind}: {returned.error}")


_EVENTUAL_PROMISES = (
    "lost",
    "came back",
    "refused",
    "made up",
    "dots",
    "siblings",
    "quorums",
    "sessions",
    UNSEEN,
)
_STRONG_PROMISES = ("linearizable", "versions", "back")


def _counted(violations: Sequence[Violation], calls: Sequence[Call]) -> dict[str, float | None]:
    def count(*promises: str) -> float:
        return float(sum(violation.promise in promises for violation in violations))

    failed = [call for call in calls if not call.answered]
    return {
        "eventual_broken": count(*_EVENTUAL_PROMISES),
        "strong_broken": count(*_STRONG_PROMISES),
        "strong_undecided": count(UNDECIDED),
        "wrong_bytes": count("bytes"),
        "untyped_errors": count(UNTYPED),
        "late_calls": count("deadlines"),
        "eventual_failed": float(sum(call.kind == "eventual" for call in failed)),
        "strong_failed": float(sum(call.kind == "strong" for call in failed)),
        "failed_share": _failed_share(calls),
    }


def _failed_share(calls: Sequence[Call]) -> float | None:
    share = _share([call for call in calls if call.kind != "blocks"])
    return None if share is None else 1.0 - share


# -- the clocks


class _Judged:
    """A story with its calls sorted out."""

    def __init__(self, scenario: Scenario, observed: Observed, calls: Sequence[Call]) -> None:
        self.scenario, self.observed, self.calls = scenario, observed, calls
        self.ended = sorted(
            (call for call in calls if call.end is not None), key=lambda call: call.end or 0.0
        )
        self.first_fault = min((episode.begin for episode in observed.episodes), default=None)

    def during(self, kind: str, *, noticed: bool = False) -> Iterator[tuple[Episode, Call]]:
        """Calls that began in an episode, and in time to end in it."""
        settle_s = self.scenario.detect_s if noticed else 0.0
        for call in self.calls:
            if call.kind != kind:
                continue
            for episode in self.observed.episodes:
                until = episode.end - (self.scenario.load.deadline_s if noticed and episode.parted else 0.0)
                if episode.begin + settle_s <= call.begin < max(until, episode.begin + settle_s):
                    yield episode, call

    def replicas_here(self, episode: Episode, call: Call) -> tuple[int, int] | None:
        """(replicas of the call's record on its side, all of them)."""
        owners = self.observed.owners.get(call.key)
        if owners is None:
            return None
        side = episode.side_of(call.node)
        return sum(owner in side for owner in owners), len(owners)

    def majority_here(self, episode: Episode, call: Call) -> bool | None:
        found = self.replicas_here(episode, call)
        return None if found is None else 2 * found[0] > found[1]


def _share(calls: Sequence[Call]) -> float | None:
    return sum(call.answered for call in calls) / len(calls) if calls else None


def _first_failure_s(judged: _Judged) -> float | None:
    if judged.first_fault is None:
        return None
    for call in judged.ended:
        if not call.answered and call.end is not None and call.end >= judged.first_fault:
            return call.end - judged.first_fault
    return None


def _first_good_s(judged: _Judged) -> float | None:
    """The last of all first answers."""
    healed_at = judged.observed.healed_at
    if healed_at is None:
        return None
    first: dict[tuple[str, str], float] = {}
    for call in judged.ended:
        if call.answered and call.end is not None and call.end >= healed_at:
            first.setdefault((call.node, call.kind), call.end - healed_at)
    wanted = {(call.node, call.kind) for call in judged.calls if call.begin < healed_at}
    return max((first.get(each, NEVER) for each in wanted), default=None)


def _equal_s(judged: _Judged) -> float | None:
    return NEVER if judged.observed.equal_s is None else judged.observed.equal_s


def _strong_gap_s(judged: _Judged) -> float | None:
    gaps: list[float] = []
    if not any(call.kind == "strong" for call in judged.calls):
        return None
    for episode in judged.observed.episodes:
        side = max(episode.sides, key=len)
        if 2 * len(side) <= len(judged.observed.nodes):
            continue
        good = [
            call.end
            for call in judged.ended
            if call.kind == "strong" and call.answered and call.node in side and call.end is not None
            and episode.begin <= call.end < episode.end
            and judged.majority_here(episode, call) is not False
        ]  # fmt: skip
        edges = [episode.begin, *good, episode.end]
        gaps.append(max(after - before for before, after in pairwise(edges)))
    return max(gaps, default=None)


def _strong_wrong_side(judged: _Judged) -> float | None:
    return float(
        sum(
            call.answered and call.end is not None and call.end < episode.end
            and judged.majority_here(episode, call) is False
            for episode, call in judged.during("strong")
            if episode.parted and _closed(episode)
        )
    )  # fmt: skip


def _strong_refusal_s(judged: _Judged) -> float | None:
    return max(
        (
            call.end - call.begin
            for episode, call in judged.during("strong", noticed=True)
            if episode.parted and _closed(episode) and not call.answered and call.end is not None
            and judged.majority_here(episode, call) is False
        ),
        default=None,
    )  # fmt: skip


def _closed(episode: Episode) -> bool:
    """Whether its sides have nothing to do with each other; else a third one may help."""
    return all(
        (a, b) in episode.cuts and (b, a) in episode.cuts
        for side in episode.sides
        for a in side
        for other in episode.sides
        if other != side
        for b in other
    )


def _eventual_share(judged: _Judged) -> float | None:
    def served(episode: Episode, call: Call) -> bool:
        here = judged.replicas_here(episode, call)
        return here is None or here[0] > 0

    return _share(
        [call for episode, call in judged.during("eventual", noticed=True) if served(episode, call)]
    )


def _strong_share(judged: _Judged) -> float | None:
    during = judged.during("strong", noticed=True)
    return _share([call for episode, call in during if judged.majority_here(episode, call) is not False])


def _answered(kind: str) -> Callable[[_Judged], float | None]:
    def look(judged: _Judged) -> float | None:
        if not judged.observed.episodes:
            return None
        return float(sum(call.answered for _, call in judged.during(kind)))

    return look


def _key_stop_s(judged: _Judged) -> float | None:
    """Of the records, the longest."""
    longest, down_since = 0.0, dict[str, float]()
    for call in judged.ended:
        if call.kind == "blocks" or call.end is None:
            continue
        if not call.answered:
            down_since.setdefault(call.key, call.begin)
            continue
        since = min(call.begin, down_since.pop(call.key, call.begin))
        longest = max(longest, call.end - since)
    return longest if judged.ended else None


def _p99_ratio(judged: _Judged) -> float | None:
    first = judged.first_fault
    if first is None:
        first = min((mark.at for mark in judged.observed.marks if mark.kind == "order"), default=None)
    if first is None:
        return None
    last = judged.observed.healed_at or judged.observed.end
    answered = [call for call in judged.ended if call.answered and call.end is not None]
    quiet = [call.end - call.begin for call in answered if call.end is not None and call.end < first]
    hurt = [call.end - call.begin for call in answered if call.end is not None and first <= call.end < last]
    return p99(hurt) / p99(quiet) if quiet and hurt else None


def p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def _epochs_doubled(judged: _Judged) -> float | None:
    maps: dict[int, set[str]] = {}
    for sample in judged.observed.samples:
        if sample.epoch:
            maps.setdefault(sample.epoch, set()).add(sample.ring)
    return float(sum(len(each) > 1 for each in maps.values())) if maps else None


def _terms_doubled(judged: _Judged) -> float | None:
    leaders: dict[int, set[str]] = {}
    for sample in judged.observed.samples:
        if sample.leader:
            leaders.setdefault(sample.term, set()).add(sample.leader)
    return float(sum(len(each) > 1 for each in leaders.values())) if leaders else None


def _epochs(judged: _Judged) -> float | None:
    return float(len({sample.epoch for sample in judged.observed.samples if sample.epoch})) or None


def _leader_changes(judged: _Judged) -> float | None:
    """By terms: each new one is a change."""
    terms = {sample.term for sample in judged.observed.samples if sample.leader}
    return float(len(terms) - 1) if terms else None


def _leader_back_s(judged: _Judged) -> float | None:
    named = [sample for sample in judged.observed.samples if sample.leader]
    if judged.first_fault is None or not named:
        return None
    before = max((each.term for each in named if each.at < judged.first_fault), default=0)
    later = [each.at for each in named if each.at >= judged.first_fault and each.term > before]
    stayed = [each.at for each in named if each.at >= judged.first_fault + 8.0]
    if not later and not stayed:
        return NEVER
    return min(later, default=judged.first_fault) - judged.first_fault


def _false_alarms(judged: _Judged) -> float | None:
    observed, alarmed, seen = judged.observed, set[str](), False
    for sample in observed.samples:
        lately = [each for each in observed.episodes if each.begin <= sample.at <= each.end + CALM_S]
        if sample.suspects is None or any(each.cuts for each in lately):
            continue
        seen = True
        alarmed |= set(sample.suspects).difference(*(each.hurt for each in lately))
    return float(len(alarmed)) if seen else None


def _lag_s(judged: _Judged) -> float | None:
    return max((sample.late_s for sample in judged.observed.samples), default=None)


def _orders_open(judged: _Judged) -> float | None:
    observed = judged.observed
    ended = observed.orders_done + observed.orders_undone
    return float(observed.orders_taken - ended) if observed.orders_taken else None


def _orders_undone(judged: _Judged) -> float | None:
    observed = judged.observed
    return float(observed.orders_undone) if observed.orders_taken else None


def _orders_refused(judged: _Judged) -> float | None:
    observed = judged.observed
    return float(observed.orders_refused) if observed.orders_taken + observed.orders_refused else None


_LOOKS: dict[str, Callable[[_Judged], float | None]] = {
    "first_failure_s": _first_failure_s,
    "first_good_s": _first_good_s,
    "equal_s": _equal_s,
    "strong_gap_s": _strong_gap_s,
    "strong_wrong_side": _strong_wrong_side,
    "strong_refusal_s": _strong_refusal_s,
    "eventual_share": _eventual_share,
    "strong_share": _strong_share,
    "eventual_answered": _answered("eventual"),
    "strong_answered": _answered("strong"),
    "key_stop_s": _key_stop_s,
    "p99_ratio": _p99_ratio,
    "epochs_doubled": _epochs_doubled,
    "terms_doubled": _terms_doubled,
    "epochs": _epochs,
    "leader_changes": _leader_changes,
    "false_alarms": _false_alarms,
    "leader_back_s": _leader_back_s,
    "lag_s": _lag_s,
    "orders_open": _orders_open,
    "orders_undone": _orders_undone,
    "orders_refused": _orders_refused,
}
