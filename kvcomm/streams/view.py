"""``View``: the rows in force, computed from the rows fed and the events alone; and when each was visible.

Who generates keeps a view (``kvcomm.streams.session``); who replays computes it again from the log, and any
difference is ``Corrupt``, never a warning: a rollout whose events were lost looks like a noisy one.

Row ``q`` attends row ``k`` if and only if ``k <= q`` and ``q`` lies in one of ``k``'s half-open visibility
intervals ``[birth, death)``.  Evicting closes the last interval, restoring opens another one.

A view is kept as runs, for it has few: rows are fed one after the other, and only events break their order.
So feeding a row costs the same however many there are, and an event costs the runs and the rows that it
moves, not those that stay.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from operator import itemgetter

from kvcomm.errors import Corrupt, TooLarge
from kvcomm.streams.events import (
    NO_SPAN,
    ROOT_DIGEST,
    Event,
    Run,
    SlotRange,
    SpanId,
    ViewDigest,
    joined,
    next_digest,
    row_runs,
    run_rows,
)

CUT_ROWS_MAX = 1 << 24
"""Most rows that the events of a log may cut, all told, where the log comes from others: two hundred bytes of
it can cut all rows once more and bring them back, and each row has another interval then."""


@dataclass(slots=True)
class View:
    """What the next row attends."""

    runs: list[Run] = field(default_factory=list)
    """The rows in view, slot by slot; see :attr:`rows`."""
    slot_count: int = 0
    next_row: int = 0
    """The row that is fed next."""
    digest: ViewDigest = ROOT_DIGEST
    weights_version: int = 0
    weights_digest: SpanId = NO_SPAN
    """Of the last weights event."""
    archived: dict[SpanId, array[int]] = field(default_factory=dict)
    """Rows that can be restored."""
    _rows: array[int] | None = field(default=None, compare=False, repr=False)

    @property
    def rows(self) -> array[int]:
        """``rows[slot]`` is the row that stands there; to be read at once, not changed, nor kept as a buffer.
        Computed anew after an event, and only continued by a feed."""
        if self._rows is None:
            self._rows = run_rows(self.runs)
        return self._rows

    def rows_from(self, slot: int) -> array[int]:
        """The rows from ``slot`` to the end, for the cost of those."""
        return run_rows(_tail(self.runs, self.slot_count - slot))

    def copy(self) -> View:
        return replace(self, runs=self.runs[:], archived=dict(self.archived), _rows=None)

    def feed(self, count: int) -> None:
        """``count`` more rows are computed under this view and stand at its end."""
        assert count >= 0
        fed = Run(self.next_row, count)
        last = self.runs.pop() if self.runs else Run(self.next_row, 0)
        self.runs += joined((last, fed))
        self.slot_count += count
        self.next_row += count
        if self._rows is not None:
            self._rows.extend(range(fed.first, self.next_row))

    def count_before(self, event: Event, row_count: int) -> int:
        """Rows that are fed before ``event``, which is one of a log of ``row_count`` rows.

        Raises:
            Corrupt: it is behind the last row, or before one that was fed.
        """
        if not self.next_row <= event.at_row <= row_count:
            raise Corrupt(f"an event at row {event.at_row} of {row_count}, after row {self.next_row}")
        return event.at_row - self.next_row

    def unfeed(self, count: int) -> None:
        """The last ``count`` rows, all fed since the last event, never were."""
        assert 0 <= count <= (self.runs[-1].length if self.runs else 0)
        if count:
            last = self.runs.pop()
            self.runs += joined((Run(last.first, last.length - count),))
            self.slot_count -= count
            self.next_row -= count
            self._rows = None

    def stamped(self, event: Event) -> Event:
        """``event`` with the digest that it will have here; the view stays as it is.

        Raises:
            Corrupt: it cannot happen here.
        """
        after = self._runs_after(event)[0]
        return replace(event, view_digest=next_digest(self.digest, event, after))

    def apply(self, event: Event) -> array[int]:
        """The event happens, and the rows that it takes out or brings back are returned.

        Raises:
            Corrupt: it cannot happen here, or its digest is not the one that it has here: an event before it
            is missing, doubled, changed or out of order.  Nothing is changed then.
        """
        after, moved = self._runs_after(event)
        digest = next_digest(self.digest, event, after)
        if digest != event.view_digest:
            raise Corrupt(
                f"the {event.kind} at row {event.at_row} was recorded over another history: events were "
                "lost, doubled, changed or reordered on the way; use the rollout as it was written"
            )
        if event.kind == "restore":
            del self.archived[event.span]
        elif event.kind == "evict" and event.span:
            self.archived[event.span] = moved
        self.runs, self.digest, self.weights_version = after, digest, event.weights_version
        if event.kind == "weights":
            self.weights_digest = event.span
        self.slot_count += {"evict": -len(moved), "restore": len(moved)}.get(event.kind, 0)
        self._rows = None
        return moved

    def check(self) -> None:
        """Assert the invariants."""
        rows = run_rows(self.runs)
        assert self.runs == joined(self.runs), "a view has one form"
        assert len(rows) == self.slot_count and (self._rows is None or self._rows == rows)
        assert len(set(rows)) == len(rows) and all(0 <= row < self.next_row for row in rows)
        assert not set(rows) & set(chain.from_iterable(self.archived.values()))

    def _runs_after(self, event: Event) -> tuple[list[Run], array[int]]:
        """(the view after it, the rows that moved)."""
        if event.at_row != self.next_row:
            raise Corrupt(f"an event at row {event.at_row} after {self.next_row} rows")
        if event.kind != "weights" and event.weights_version != self.weights_version:
            raise Corrupt(f"weights {event.weights_version} without an event that brought them")
        if event.kind == "evict":
            return self._without(event.ranges, event.span)
        if event.kind == "restore":
            return self._with(event.span, event.insert_at)
        return self.runs, array("q")

    def _without(self, ranges: Sequence[SlotRange], span: SpanId) -> tuple[list[Run], array[int]]:
        if ranges[-1].end > self.slot_count:
            raise Corrupt(f"a cut up to slot {ranges[-1].end} of a view of {self.slot_count}")
        if span in self.archived:
            raise Corrupt("a span is archived already")
        kept, gone = _divided(self.runs, chain.from_iterable(ranges))
        return kept, run_rows(gone)

    def _with(self, span: SpanId, insert_at: int) -> tuple[list[Run], array[int]]:
        back = self.archived.get(span)
        if back is None:
            raise Corrupt("a restore of rows that were not archived, or are back already")
        if insert_at > self.slot_count:
            raise Corrupt(f"a restore at slot {insert_at} of a view of {self.slot_count}")
        runs, after = _divided(self.runs, [insert_at])
        _append(runs, row_runs(back))
        _append(runs, after)
        return runs, back


def _divided(runs: Sequence[Run], borders: Iterable[int]) -> tuple[list[Run], list[Run]]:
    """The runs of the stretches between ``borders``, which are slots in ascending order: every other stretch
    from the first on, and the others.  Joined, as ``runs`` are.

    What lies between two borders is taken at once: a view of scattered blocks has thousands of runs, of which
    an event moves few.
    """
    ends = list(accumulate(map(itemgetter(1), runs)))
    stretches = pairwise((0, *borders, *ends[-1:]))
    parts: tuple[list[Run], list[Run]] = [], []
    for at, (start, end) in enumerate(stretches):
        _append(parts[at % 2], _between(runs, ends, start, end))
    return parts


def _between(runs: Sequence[Run], ends: Sequence[int], start: int, end: int) -> list[Run]:
    """The runs of the slots ``[start, end)``; run ``i`` ends at slot ``ends[i]``."""
    if start >= end:
        return []
    at, last = bisect_right(ends, start), bisect_left(ends, end)
    found = list(runs[at : last + 1])
    first, length = found[-1]
    found[-1] = Run(first, length - (ends[last] - end))
    first, length = found[0]
    before = start - (ends[at] - runs[at].length)
    found[0] = Run(first + before, length - before)
    return found


def _append(runs: list[Run], more: Sequence[Run]) -> None:
    """Both are joined, and ``runs`` is afterwards."""
    seam = joined((*runs[-1:], *more[:1]))
    runs[-1:] = seam
    runs += more[1:]


def _tail(runs: Sequence[Run], count: int) -> list[Run]:
    """The last ``count`` rows."""
    tail: list[Run] = []
    for run in reversed(runs):
        if count <= 0:
            break
        taken = min(count, run.length)
        tail.append(Run(run.first + run.length - taken, taken))
        count -= taken
    return tail[::-1]


@dataclass(frozen=True, slots=True)
class Visibility:
    """When each row of a finished rollout was in view."""

    row_count: int
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    """By row: ``[birth, death)`` in rows that attend it, ascending, none empty and none touching the next.  A
    row in view at the end dies at ``row_count``."""

    def sees(self, query: int, key: int) -> bool:
        """Whether row ``query`` attends row ``key``."""
        return key <= query and any(birth <= query < death for birth, death in self.intervals[key])


def visibility(row_count: int, events: Sequence[Event]) -> Visibility:
    """From the number of rows and the events alone.

    Raises:
        Corrupt: see :meth:`View.apply`; or an event is behind the last row.
        TooLarge: see :func:`require_bounded`.
    """
    require_bounded(row_count, events)
    view = View()
    intervals = [[(row, row_count)] for row in range(row_count)]
    for event in events:
        view.feed(view.count_before(event, row_count))
        for row in view.apply(event):
            if event.kind == "evict":
                _close(intervals[row], event.at_row)
            else:
                _open(intervals[row], event.at_row, row_count)
    lived = (tuple(each for each in row if each[0] < row_count) for row in intervals)
    return Visibility(row_count, tuple(lived))


def require_bounded(row_count: int, events: Iterable[Event]) -> None:
    """Look at what a log will cost before it is followed.  No more rows can come back than were cut, and who
    follows it stops at a cut of rows that are not there.

    Raises:
        TooLarge: its events cut more than :data:`CUT_ROWS_MAX` rows.
    """
    spans = chain.from_iterable(event.ranges for event in events)
    count = sum(each.slot_count for each in spans if each.end <= row_count)
    if count > CUT_ROWS_MAX:
        raise TooLarge(
            f"the events of this log cut {count} rows, over CUT_ROWS_MAX={CUT_ROWS_MAX}: cut and restore "
            "less often, or begin a new stream"
        )


def _close(intervals: list[tuple[int, int]], at_row: int) -> None:
    """Nobody saw it in a view in which no row was fed."""
    birth, _ = intervals.pop()
    if birth < at_row:
        intervals.append((birth, at_row))


def _open(intervals: list[tuple[int, int]], at_row: int, row_count: int) -> None:
    """Back at the row where it went: it was never away."""
    birth = intervals.pop()[0] if intervals[-1][1] == at_row else at_row
    intervals.append((birth, row_count))


def weights_runs(row_count: int, events: Sequence[Event]) -> list[tuple[int, Run]]:
    """Which weights computed which rows, ``(version, rows)`` in order: a replay with one version judges the
    rows of that version alone."""
    changes = [(0, 0), *((each.at_row, each.weights_version) for each in events if each.kind == "weights")]
    ends = [*(row for row, _ in changes[1:]), row_count]
    return [
        (version, Run(row, end - row)) for (row, version), end in zip(changes, ends, strict=True) if end > row
    ]
