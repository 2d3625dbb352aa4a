"""``View``: the rows in force, computed from the rows fed and the events alone; and when each was visible.

Who generates keeps a view (``kvcomm.streams.session``); who replays computes it again from the log, and any
difference is ``Corrupt``, never a warning: a rollout whose events were lost looks like a noisy one.

Row ``q`` attends row ``k`` if and only if ``k <= q`` and ``q`` lies in one of ``k``'s half-open visibility
intervals ``[birth, death)``.  Evicting closes the last interval, restoring opens another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvcomm.errors import Corrupt
from kvcomm.streams.events import ROOT_DIGEST, Event, SlotRange, SpanId, ViewDigest, next_digest


@dataclass(slots=True)
class View:
    """``rows[slot]`` is the row that stands there; ``next_row`` the row that is fed next."""

    rows: array[int] = field(default_factory=lambda: array("q"))
    next_row: int = 0
    digest: ViewDigest = ROOT_DIGEST
    weights_version: int = 0
    archived: dict[SpanId, array[int]] = field(default_factory=dict)
    """Rows that can be restored."""

    @property
    def slot_count(self) -> int:
        return len(self.rows)

    def copy(self) -> View:
        return View(self.rows[:], self.next_row, self.digest, self.weights_version, dict(self.archived))

    def feed(self, count: int) -> None:
        """``count`` more rows are computed under this view and stand at its end."""
        assert count >= 0
        self.rows.extend(range(self.next_row, self.next_row + count))
        self.next_row += count

    def stamped(self, event: Event) -> Event:
        """``event`` with the digest that it will have here; the view stays as it is.

        Raises:
            Corrupt: it cannot happen here.
        """
        after = self._rows_after(event)[0]
        return replace(event, view_digest=next_digest(self.digest, event, after))

    def apply(self, event: Event) -> array[int]:
        """The event happens, and the rows that it takes out or brings back are returned.

        Raises:
            Corrupt: it cannot happen here, or its digest is not the one that it has here: an event before it
            is missing, doubled, changed or out of order.  Nothing is changed then.
        """
        after, moved = self._rows_after(event)
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
        self.rows, self.digest, self.weights_version = after, digest, event.weights_version
        return moved

    def _rows_after(self, event: Event) -> tuple[array[int], array[int]]:
        """(the view after it, the rows that moved)."""
        if event.at_row != self.next_row:
            raise Corrupt(f"an event at row {event.at_row} after {self.next_row} rows")
        if event.kind != "weights" and event.weights_version != self.weights_version:
            raise Corrupt(f"weights {event.weights_version} without an event that brought them")
        if event.kind == "evict":
            return self._without(event.ranges, event.span)
        if event.kind == "restore":
            return self._with(event.span, event.insert_at)
        return self.rows, array("q")

    def _without(self, ranges: Sequence[SlotRange], span: SpanId) -> tuple[array[int], array[int]]:
        if ranges[-1].end > len(self.rows):
            raise Corrupt(f"a cut up to slot {ranges[-1].end} of a view of {len(self.rows)}")
        if span in self.archived:
            raise Corrupt("a span is archived already")
        kept, gone, at = array("q"), array("q"), 0
        for start, end in ranges:
            kept += self.rows[at:start]
            gone += self.rows[start:end]
            at = end
        return kept + self.rows[at:], gone

    def _with(self, span: SpanId, insert_at: int) -> tuple[array[int], array[int]]:
        back = self.archived.get(span)
        if back is None:
            raise Corrupt("a restore of rows that were not archived, or are back already")
        if insert_at > len(self.rows):
            raise Corrupt(f"a restore at slot {insert_at} of a view of {len(self.rows)}")
        return self.rows[:insert_at] + back + self.rows[insert_at:], back


@dataclass(frozen=True, slots=True)
class Visibility:
    """When each row of a finished rollout was in view."""

    row_count: int
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    """By row: ``[birth, death)`` in rows that attend it, ascending.  A row in view at the end dies at
    ``row_count``."""

    @property
    def interval_count(self) -> int:
        """Most intervals of one row; 0 without rows."""
        return max(map(len, self.intervals), default=0)

    def sees(self, query: int, key: int) -> bool:
        """Whether row ``query`` attends row ``key``."""
        return key <= query and any(birth <= query < death for birth, death in self.intervals[key])


def visibility(row_count: int, events: Sequence[Event]) -> Visibility:
    """From the number of rows and the events alone.

    Raises:
        Corrupt: see :meth:`View.apply`; or an event is behind the last row.
    """
    view = View()
    intervals = [[(row, row_count)] for row in range(row_count)]
    for event in events:
        if not view.next_row <= event.at_row <= row_count:
            raise Corrupt(f"an event at row {event.at_row} of {row_count}, after row {view.next_row}")
        view.feed(event.at_row - view.next_row)
        for row in view.apply(event):
            if event.kind == "evict":
                intervals[row][-1] = (intervals[row][-1][0], event.at_row)
            else:
                intervals[row].append((event.at_row, row_count))
    return Visibility(row_count, tuple(tuple(each) for each in intervals))
