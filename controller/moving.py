"""``Moving``: one transition between two placements, from the plan to the last record that is dropped.

::

      planned ──► copying, verifying ──► serving ──► purging ──► over
                       │        ▲            │          ▲
                       │        └── back ────┘          │
                       └────────── abandoned ───────────┘

How far it is stands in the ring map alone, and what may be done next in the shards' heartbeats, so any leader
can go on at any step.  The conditions (``l3_shard.ring`` tells what each stage means):

========= ====================================================================================================
start     every shard of the new placement is alive, works by the stable map and keeps nothing but what that
          map gives it: nobody who slept through an older move brings anything back
serve     every shard of the new placement that lives is *ready* (it has compared what it gains with so many
          old owners as meet every write quorum), all that gain live, and nothing is acknowledged any more
          under a map without the transition (``Ring.covers``)
arrive    nothing is read any more under stage copy, and strong records have changed their owners everywhere
abandon   as to arrive, when it ever was in stage serve; otherwise at any time
purged    every shard that lives keeps nothing but what the stable map gives it
========= ====================================================================================================

Who cannot be heard, but is not known to be dead, is waited for: only the dead are left behind, and only where
enough of every group is there without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from controller.liveness import State
from kvcomm.wire.messages import RingMap, ShardMove
from l3_shard.ring import Ring

Turn = Literal["start", "serve", "arrive", "back", "abandon", "purged"]
Heading = Literal["forth", "back", "back unserved"]
"""``back unserved``: it never was in stage serve."""

NAMED_MAX = 3
"""Names in one sentence."""


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What the leader knows of a shard."""

    state: State
    gone_s: float
    """For how long it has been dead, or should have been heard; negative = it lives, as far as anybody
    knows."""
    epoch: int
    told_epoch: int
    """By which it worked when it told ``move``; it may have taken a newer map since."""
    move: ShardMove

    @property
    def lives(self) -> bool:
        return self.gone_s < 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may be done now, or why nothing."""

    turn: Turn | None
    trouble: str = ""


class Moving:
    """The judgement of one moment.

    Args:
        shards: reports on all shards of the map, and on all others that run.
        target: names of the shards of the new placement, while there is no transition yet.
        patience_s: a shard that has been dead for longer is not waited for when a transition is abandoned.
    """

    def __init__(
        self,
        ring_map: RingMap,
        shards: Mapping[str, ShardReport],
        *,
        target: Sequence[str] = (),
        patience_s: float = 120.0,
    ) -> None:
        self._map, self._ring, self._shards = ring_map, Ring.from_map(ring_map), shards
        self._target, self._patience_s = target, patience_s

    def judge(self, heading: Heading) -> Verdict:
        """What may be done next with a transition that is under way."""
        transition = self._map.transition
        assert transition is not None
        if heading == "forth":
            ready = self._serve() if transition.stage == "copy" else self._settled()
            return (
                Verdict(None, ready)
                if ready
                else Verdict("serve" if transition.stage == "copy" else "arrive")
            )
        if transition.stage == "serve":
            return Verdict("back")
        waits = "" if heading == "back unserved" else self._settled(without=self._long_gone)
        return Verdict(None, waits) if waits else Verdict("abandon")

    def judge_start(self) -> Verdict:
        """Whether a transition to the target may begin."""
        return _verdict("start", self._start())

    def judge_purge(self) -> Verdict:
        """Whether everybody keeps nothing any more but what this stable map gives it."""
        unclean = [node for node in self._living if self._report(node).move.clean_epoch < self._map.epoch]
        return _verdict("purged", _waits(unclean, "drop what moved away"))

    @property
    def copied(self) -> bool:
        """Whether nothing is left to be got, as far as the shards know."""
        reports = [self._report(node) for node in self._living]
        return all(
            report.told_epoch >= self._map.epoch and report.move.records_left + report.move.blocks_left == 0
            for report in reports
        )

    @property
    def dead_gainers(self) -> list[str]:
        """Shards that are to get records and have been dead for too long to wait for, sorted."""
        gaining = self._gaining if self._ring.moving else self._target
        return [node for node in sorted(gaining) if node in self._long_gone]

    # -- conditions; each says what stands in the way, or nothing

    def _start(self) -> str:
        epoch = self._map.epoch
        missing = [node for node in self._target if self._report(node).state != "alive"]
        old = [node for node in self._target if self._report(node).epoch < epoch]
        unclean = [node for node in self._target if self._report(node).move.clean_epoch < epoch]
        return (
            self._states(missing)
            or _waits(old, f"work by epoch {epoch}")
            or _waits(unclean, "drop what an earlier move took away")
            or self._uncovered(self._living)
        )

    def _serve(self) -> str:
        transition = self._map.transition
        assert transition is not None
        missing = [node for node in self._gaining if self._report(node).state != "alive"]
        unready = [
            node.node
            for node in transition.shards
            if node.node in self._living and self._report(node.node).move.ready_epoch < self._map.epoch
        ]
        return (
            self._states(missing)
            or self._behind
            or _waits(unready, "get all that they gain")
            or self._uncovered(self._up)
        )

    def _settled(self, without: Iterable[str] = ()) -> str:
        unsettled = [node for node in self._living if self._report(node).move.strong_epoch < self._map.epoch]
        return (
            self._behind
            or self._uncovered({*self._up, *without})
            or _waits(unsettled, "settle their strong records")
        )

    # -- who

    @property
    def _behind(self) -> str:
        epoch = self._map.epoch
        return _waits(self._living - self._up, f"work by epoch {epoch}")

    @cached_property
    def _gaining(self) -> list[str]:
        return [node for node in self._ring.names if self._ring.gains(node)]

    @cached_property
    def _living(self) -> set[str]:
        """Of the map and of those that run: whoever is not dead."""
        names = {*self._ring.names, *self._shards}
        return {node for node in names if self._report(node).lives}

    @cached_property
    def _up(self) -> set[str]:
        """Who lives and works by the map."""
        return {node for node in self._living if self._report(node).epoch >= self._map.epoch}

    @cached_property
    def _long_gone(self) -> set[str]:
        names = {*self._ring.names, *self._shards}
        return {node for node in names if self._report(node).gone_s > self._patience_s}

    def _report(self, node: str) -> ShardReport:
        return self._shards.get(node, NOBODY)

    def _uncovered(self, nodes: Iterable[str]) -> str:
        there = {*nodes}
        if self._ring.covers(there):
            return ""
        missing = sorted({*self._ring.names} - there)
        return f"too few owners of some keys are there without {_named(missing)}"

    def _states(self, nodes: Sequence[str]) -> str:
        return "; ".join(f"{node} {_STATES[self._report(node).state]}" for node in sorted(nodes)[:NAMED_MAX])


NOBODY = ShardReport("unknown", -1.0, 0, 0, ShardMove())
"""Of a shard that nothing is known of: it may live."""

_STATES = {
    "alive": "is alive",
    "suspect": "has not been heard for a while",
    "dead": "is dead",
    "unknown": "has not been heard yet",
}


def _verdict(turn: Turn, trouble: str) -> Verdict:
    return Verdict(None, trouble) if trouble else Verdict(turn)


def _waits(nodes: Iterable[str], what: str) -> str:
    names = sorted(nodes)
    return f"waits for {_named(names)} to {what}" if names else ""


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" (and {more} more)" if more > 0 else "")
