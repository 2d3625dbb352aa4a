"""Views from events, and what happens to a log on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import Corrupt, TooLarge
from kvcomm.streams.events import Event, Run, SlotRange, SpanId
from kvcomm.streams.view import View, visibility, weights_runs
from tests.kvcomm.streams.life import ToyEngine

SPAN = SpanId(b"s" * 32)


def happened(view: View, event: Event) -> Event:
    stamped = view.stamped(event)
    view.apply(stamped)
    view.check()
    return stamped


def fed(count: int) -> View:
    view = View()
    view.feed(count)
    return view


@pytest.mark.slow
@given(data=st.data())
def test_a_view_in_runs_is_the_list_of_its_rows(data: st.DataObject) -> None:
    view, rows, spans, next_row = View(), list[int](), dict[SpanId, list[int]](), 0
    for step in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["feed", "unfeed", "evict", "restore", "copy"]))
        if kind == "feed":
            count = data.draw(st.integers(0, 5))
            view.feed(count)
            rows += range(next_row, next_row + count)
            next_row += count
        elif kind == "unfeed":
            view.feed(3)
            view.unfeed(2)
            rows.append(next_row)
            next_row += 1
        elif kind == "evict" and rows:
            borders = sorted(data.draw(st.sets(st.integers(0, len(rows)), min_size=2, max_size=6)))
            cut = [SlotRange(*pair) for pair in zip(borders[::2], borders[1::2], strict=False)]
            span = SpanId(bytes([step]) * 32)
            happened(view, Event("evict", next_row, tuple(cut), span))
            spans[span] = [row for start, end in cut for row in rows[start:end]]
            rows = [row for row in rows if row not in spans[span]]
        elif kind == "restore" and spans:
            span, at = data.draw(st.sampled_from(sorted(spans))), data.draw(st.integers(0, len(rows)))
            happened(view, Event("restore", next_row, span=span, insert_at=at))
            rows[at:at] = spans.pop(span)
        elif kind == "copy":
            view.copy().feed(9)
        if data.draw(st.booleans()):
            assert list(view.rows) == rows
        view.check()
        assert (view.slot_count, view.next_row) == (len(rows), next_row)
        start = data.draw(st.integers(0, len(rows)))
        assert list(view.rows_from(start)) == rows[start:]
    assert list(view.rows) == rows


def test_rows_that_a_cut_brings_together_are_one_run() -> None:
    view = fed(12)
    happened(view, Event("evict", 12, (SlotRange(4, 8),), SPAN))
    happened(view, Event("restore", 12, span=SPAN, insert_at=8))
    assert view.runs == [Run(0, 4), Run(8, 4), Run(4, 4)]
    happened(view, Event("evict", 12, (SlotRange(4, 8),), SPAN))
    assert view.runs == [Run(0, 8)]
    happened(view, Event("restore", 12, span=SPAN, insert_at=8))
    assert view.runs == [Run(0, 12)]
    happened(view, Event("evict", 12, (SlotRange(0, 4), SlotRange(8, 12)), SPAN))
    happened(view, Event("restore", 12, span=SPAN, insert_at=0))
    assert view.runs == [Run(0, 4), Run(8, 4), Run(4, 4)]


IMPOSSIBLE: dict[str, Event] = {
    "row": Event("evict", 7, (SlotRange(0, 4),)),
    "slot": Event("evict", 8, (SlotRange(4, 12),)),
    "archived already": Event("evict", 8, (SlotRange(0, 4),), SPAN),
    "not archived": Event("restore", 8, span=SpanId(b"t" * 32), insert_at=0),
    "restore at slot": Event("restore", 8, span=SPAN, insert_at=9),
    "weights": Event("evict", 8, (SlotRange(0, 4),), weights_version=2),
}


@pytest.mark.parametrize(("why", "event"), IMPOSSIBLE.items())
def test_what_cannot_happen_changes_nothing(why: str, event: Event) -> None:
    view = fed(12)
    happened(view, Event("evict", 12, (SlotRange(0, 4),), SPAN))
    before = view.copy()
    late = replace(event, at_row=event.at_row + 4)
    for act in (view.stamped, view.apply):
        with pytest.raises(Corrupt, match=why):
            act(late)
    assert view == before


def test_visibility_has_no_interval_in_which_no_row_ran() -> None:
    view, events = fed(8), list[Event]()
    evict, restore = Event("evict", 8, (SlotRange(0, 4),), SPAN), Event("restore", 8, span=SPAN, insert_at=0)
    for event in (evict, restore, evict):
        events.append(happened(view, event))
    assert visibility(8, events).intervals[0] == ((0, 8),)
    assert visibility(10, events).intervals[0] == ((0, 8),)
    view.feed(2)
    late = [replace(event, at_row=10) for event in (restore, evict, restore)]
    events += [happened(view, event) for event in late]
    assert visibility(10, events).intervals[0] == ((0, 8),)
    found = visibility(11, events)
    assert found.intervals[0] == ((0, 8), (10, 11))
    assert visibility(11, events[:-1]).intervals[0] == ((0, 8),)
    assert visibility(0, []).intervals == ()


def test_a_log_that_cuts_rows_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred bytes a time, and every row has another interval."""
    view, events = fed(8), list[Event]()
    for _ in range(3):
        row = view.next_row
        events.append(happened(view, Event("evict", row, (SlotRange(0, 8),), SPAN)))
        view.feed(1)
        events.append(happened(view, Event("restore", row + 1, span=SPAN, insert_at=0)))
        view.feed(1)
    monkeypatch.setattr("kvcomm.streams.view.CUT_ROWS_MAX", 3 * 8)
    assert visibility(view.next_row, events).intervals[0][-1] == (13, 14)
    monkeypatch.setattr("kvcomm.streams.view.CUT_ROWS_MAX", 3 * 8 - 1)
    with pytest.raises(TooLarge, match="cut 24 rows"):
        visibility(view.next_row, events)


def test_weights_runs_are_all_rows_once() -> None:
    assert weights_runs(0, []) == []
    assert weights_runs(5, []) == [(0, Run(0, 5))]
    events = [Event("weights", row, weights_version=version) for row, version in [(0, 2), (3, 4), (3, 5)]]
    assert weights_runs(5, events) == [(2, Run(0, 3)), (5, Run(3, 2))]


# -- edge 24


def told() -> tuple[int, list[Event]]:
    """A rollout with every kind of event, two of them at one row."""
    engine = ToyEngine(64)
    session = engine.session()
    engine.feed(session, [1] * 20)
    first = session.evict([(4, 8), (12, 16)], archive=True)
    session.evict([(4, 8)])
    engine.feed(session, [1] * 9)
    session.restore(first.span, 4)
    engine.feed(session, [1] * 3)
    session.set_weights(1)
    session = engine.fork(session, b"n" * 32)
    engine.feed(session, [1] * 3)
    session.evict([(4, 8)])
    engine.feed(session, [1] * 2)
    return session.next_row, session.events


def shifted(event: Event, row_count: int) -> Event:
    return replace(event, at_row=event.at_row + row_count)


CHANGES: dict[str, Callable[[list[Event], int], list[Event]]] = {
    "lost": lambda events, at: events[:at] + events[at + 1 :],
    "doubled": lambda events, at: events[: at + 1] + events[at:],
    "swapped": lambda events, at: [*events[:at], *events[at : at + 2][::-1], *events[at + 2 :]],
    "late": lambda events, at: [*events[:at], shifted(events[at], 1), *events[at + 1 :]],
    "early": lambda events, at: [*events[:at], shifted(events[at], -1), *events[at + 1 :]],
    "repeated at the end": lambda events, at: [*events, events[at]],
}


@pytest.mark.parametrize("how", CHANGES)
def test_edge_24_a_log_that_was_changed_on_the_way_is_noticed(how: str) -> None:
    row_count, events = told()
    visibility(row_count, events)
    for at in range(len(events)):
        changed = CHANGES[how](events, at)
        if changed == events:
            continue
        if how == "lost" and at == len(events) - 1:
            visibility(row_count, changed)  # what a rollout's header is for
            continue
        with pytest.raises(Corrupt):
            visibility(row_count, changed)


def test_edge_24_a_range_one_block_off_is_noticed() -> None:
    row_count, events = told()
    for at, event in enumerate(events):
        if event.kind == "evict":
            moved = tuple(SlotRange(start - 4, end - 4) for start, end in event.ranges)
            with pytest.raises(Corrupt, match="another history"):
                visibility(row_count, [*events[:at], replace(event, ranges=moved), *events[at + 1 :]])
