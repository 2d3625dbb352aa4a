"""``Recovery``: what becomes of a split when it is over, told as one report.

A split ends, for a shard, when a peer that was silent answers again.  From then on the two hand each other
what they missed (``l3_shard.handoff``) and compare what they have (``l3_shard.comparing``) at once::

    silent ──► returned ── hints ──► comparison ── differed ──► once more ──► equal
                 ├─────────────────── the report counts ─────────────────────────┤

Peers that return while another one's recovery is under way belong to the same split.

What is merged is counted by record.  A merge in this time is one of the split's if it brings a write that was
stamped before the peer returned: by the writer's wall clock, so with skewed clocks about.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcomm.clock import Stamp, unpack
from kvcomm.resolvers import resolver_of
from kvcomm.wire.messages import RecordState, SplitReport

COMPARISONS_MAX = 2
"""With one peer: with traffic on it two replicas are never seen equal, and after the second one they differ
in nothing that is older than the first."""
RECORDS_MAX = 100_000
"""Merged records that are told apart; further ones are counted each time."""


class Recovery:
    """Of one shard.

    Args:
        name_of: the caller's key of a stored one.
    """

    def __init__(self, name_of: Callable[[bytes], bytes]) -> None:
        self._name_of = name_of
        self._waiting: dict[str, int] = {}  # comparisons with each that have come to their end
        self._report: SplitReport | None = None
        self._returned_at = 0.0
        self._before_ms = 0
        self._lasted_s = 0.0
        self._hints = self._compared = self._uncounted = 0
        self._shown: dict[bytes, bool] = {}  # merged records; whether several values are shown

    @property
    def active(self) -> bool:
        """Whether somebody who returned has not been found equal yet."""
        return bool(self._waiting)

    def returned(self, node: str, silent_s: float, now: float, wall_ms: int) -> None:
        """``node`` answers again, after ``silent_s``."""
        if not self._waiting:
            self._returned_at, self._lasted_s = now, 0.0
            self._hints = self._compared = self._uncounted = 0
            self._shown.clear()
        self._before_ms = wall_ms
        self._lasted_s = max(self._lasted_s, silent_s)
        self._waiting[node] = 0
        self._report = self._told(-1.0)

    def gone(self, node: str) -> None:
        """It is silent again, or no neighbour any more: it is not waited for."""
        self._waiting.pop(node, None)

    def handed(self, node: str, count: int) -> None:
        """So many hints for ``node`` were handed on."""
        if node in self._waiting:
            self._hints += count
            self._report = self._told(-1.0)

    def compared(self, node: str, differing_count: int, now: float) -> bool:
        """A comparison with ``node`` came to its end; whether there should be another one at once."""
        if node not in self._waiting:
            return False
        self._compared += differing_count
        self._waiting[node] += 1
        again = differing_count > 0 and self._waiting[node] < COMPARISONS_MAX
        if not again:
            del self._waiting[node]
        self._report = self._told(-1.0 if self._waiting else now - self._returned_at)
        return again

    def merged(self, key: bytes, before: RecordState, after: RecordState) -> None:
        """What a peer knew changed the stored record ``key``."""
        if not self._waiting or not self._of_the_split(before, after):
            return
        alive = sum(sibling.value is not None for sibling in after.siblings)
        shown = alive > 1 and resolver_of(self._name_of(key)) is None
        if key in self._shown or len(self._shown) < RECORDS_MAX:
            self._shown[key] = shown
        else:
            self._uncounted += 1

    def report(self) -> SplitReport | None:
        """Of the last split; ``None`` = there was none in this life."""
        return self._report

    def _of_the_split(self, before: RecordState, after: RecordState) -> bool:
        known = {(sibling.replica, sibling.counter) for sibling in before.siblings}
        return any(
            (sibling.replica, sibling.counter) not in known
            and unpack(Stamp(sibling.hlc))[0] <= self._before_ms
            for sibling in after.siblings
        )

    def _told(self, equal_after_s: float) -> SplitReport:
        return SplitReport(
            self._lasted_s,
            self._hints,
            self._compared,
            len(self._shown) + self._uncounted,
            sum(self._shown.values()),
            equal_after_s,
        )
