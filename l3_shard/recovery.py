"""``Recovery``: what becomes of a split when it is over, told as one report.

A split ends, for a shard, when a peer that was silent answers again.  From then on the two hand each other
what they missed (``l3_shard.handoff``) and compare what they have (``l3_shard.comparing``) at once::

    silent ──► returned ── hints ──► comparison ── differed ──► once more ──► equal
                 ├─────────────────── the report counts ─────────────────────────┤

Peers that return while another one's recovery is under way belong to the same split.

What is merged is counted by record.  A merge is one of the split's if it brings a write that is older than a
write ever is when it comes in time: by the writer's wall clock, so with skewed clocks about.  The other side
may notice first, and hand on before we know that it is back: what came in the last moments counts, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcomm.clock import Stamp, unpack
from kvcomm.resolvers import resolver_of
from kvcomm.wire.messages import RecordState, SplitReport

COMPARISONS_MAX = 2
"""With one peer: with traffic on it two replicas are never seen equal, and after the second one they differ
in nothing that is older than the first."""
LATE_MS = 1_000
"""Between a write and its merge: longer than a request may take on its way."""
FORETIME_S, FORETIME_MAX = 2.0, 4_096
"""Before a peer is known to be back: how far back merges count, and how many at most."""
RECORDS_MAX = 100_000
"""Merged records that are told apart; further ones are counted each time."""


class Recovery:
    """Of one shard.

    Args:
        name_of: the caller's key of a stored one.
        now: monotonic seconds.
        wall_ms: what the wall clock shows.
    """

    def __init__(
        self, name_of: Callable[[bytes], bytes], now: Callable[[], float], wall_ms: Callable[[], int]
    ) -> None:
        self._name_of, self._now, self._wall_ms = name_of, now, wall_ms
        self._away: set[str] = set()
        self._waiting: dict[str, int] = {}  # comparisons with each that have come to their end
        self._report: SplitReport | None = None
        self._returned_at = 0.0
        self._lasted_s = 0.0
        self._hints = self._compared = self._uncounted = 0
        self._early: deque[tuple[float, bytes, bool]] = deque(maxlen=FORETIME_MAX)
        self._shown: dict[bytes, bool] = {}  # merged records; whether several values are shown

    def silenced(self, node: str) -> None:
        """``node`` does not answer any more."""
        self._away.add(node)
        self._waiting.pop(node, None)

    def returned(self, node: str, silent_s: float) -> None:
        """``node`` answers again, after ``silent_s``."""
        now = self._now()
        if not self._waiting:
            self._returned_at, self._lasted_s = now, 0.0
            self._hints = self._compared = self._uncounted = 0
            self._shown = {key: shown for at, key, shown in self._early if at >= now - FORETIME_S}
            self._early.clear()
        self._away.discard(node)
        self._lasted_s = max(self._lasted_s, silent_s)
        self._waiting[node] = 0
        self._report = self._told(-1.0)

    def gone(self, node: str) -> None:
        """It is no neighbour any more, and not waited for."""
        self._away.discard(node)
        self._waiting.pop(node, None)

    def handed(self, node: str, count: int) -> None:
        """So many hints for ``node`` were handed on."""
        if node in self._waiting:
            self._hints += count
            self._report = self._told(-1.0)

    def compared(self, node: str, differing_count: int) -> bool:
        """A comparison with ``node`` came to its end; whether there should be another one at once."""
        if node not in self._waiting:
            return False
        self._compared += differing_count
        self._waiting[node] += 1
        again = differing_count > 0 and self._waiting[node] < COMPARISONS_MAX
        if not again:
            del self._waiting[node]
        self._report = self._told(-1.0 if self._waiting else self._now() - self._returned_at)
        return again

    def merged(self, key: bytes, before: RecordState, after: RecordState) -> None:
        """What a peer knew changed the stored record ``key``."""
        if not (self._waiting or self._away) or not self._came_late(before, after):
            return
        alive = sum(sibling.value is not None for sibling in after.siblings)
        shown = alive > 1 and resolver_of(self._name_of(key)) is None
        if not self._waiting:
            self._early.append((self._now(), key, shown))
        elif key in self._shown or len(self._shown) < RECORDS_MAX:
            self._shown[key] = shown
        else:
            self._uncounted += 1

    def report(self) -> SplitReport | None:
        """Of the last split; ``None`` = there was none in this life."""
        return self._report

    def _came_late(self, before: RecordState, after: RecordState) -> bool:
        before_ms = self._wall_ms() - LATE_MS
        known = {(sibling.replica, sibling.counter) for sibling in before.siblings}
        return any(
            (sibling.replica, sibling.counter) not in known and unpack(Stamp(sibling.hlc))[0] <= before_ms
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
