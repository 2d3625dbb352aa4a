"""What an event may say, and the one form of a list of rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import Corrupt
from kvcomm.streams.events import (
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

SPAN = SpanId(b"s" * 32)
CUT = (SlotRange(4, 8),)

CONTRADICTIONS: list[dict[str, Any]] = [
    {"kind": "forget"},
    {"kind": "evict"},
    {"kind": "evict", "ranges": CUT, "at_row": -1},
    {"kind": "evict", "ranges": CUT, "at_row": 1 << 63},
    {"kind": "evict", "ranges": CUT, "weights_version": -1},
    {"kind": "evict", "ranges": CUT, "insert_at": 4},
    {"kind": "evict", "ranges": CUT, "insert_at": -2},
    {"kind": "evict", "ranges": CUT, "span": b"short"},
    {"kind": "evict", "ranges": CUT, "view_digest": b"short"},
    {"kind": "evict", "ranges": (SlotRange(4, 4),)},
    {"kind": "evict", "ranges": (SlotRange(8, 4),)},
    {"kind": "evict", "ranges": (SlotRange(-4, 4),)},
    {"kind": "evict", "ranges": (SlotRange(4, 1 << 64),)},
    {"kind": "evict", "ranges": (SlotRange(8, 12), SlotRange(0, 4))},
    {"kind": "evict", "ranges": (SlotRange(0, 8), SlotRange(4, 12))},
    {"kind": "restore", "insert_at": 4},
    {"kind": "restore", "span": SPAN},
    {"kind": "restore", "span": SPAN, "insert_at": 1 << 63},
    {"kind": "restore", "span": SPAN, "insert_at": 4, "ranges": CUT},
    {"kind": "fork"},
    {"kind": "fork", "span": SPAN, "insert_at": 4},
    {"kind": "weights", "span": SPAN[:31]},
    {"kind": "weights", "ranges": CUT},
]


@pytest.mark.parametrize("parts", CONTRADICTIONS, ids=str)
def test_an_event_whose_parts_contradict_each_other_is_none(parts: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="not an event"):
        Event(**({"at_row": 20} | parts))


def test_what_an_event_does_has_one_form_and_why_is_no_part_of_it() -> None:
    events = [
        Event("evict", 20, CUT),
        Event("evict", 21, CUT),
        Event("evict", 20, CUT, SPAN),
        Event("evict", 20, CUT, SpanId(b"t" * 32)),
        Event("evict", 20, (SlotRange(4, 12),)),
        Event("evict", 20, (SlotRange(0, 4), SlotRange(4, 8))),
        Event("evict", 20, CUT, weights_version=1),
        Event("restore", 20, span=SPAN, insert_at=4),
        Event("restore", 20, span=SPAN, insert_at=8),
        Event("fork", 20, span=SPAN),
        Event("weights", 20, weights_version=1),
    ]
    assert len({event.content() for event in events}) == len(events)
    again = Event("evict", 20, CUT, reason="window", view_digest=ViewDigest(b"d" * 32))
    assert again.content() == events[0].content()


rows_st = st.lists(st.integers(0, 12), unique=True)


@given(rows_st)
def test_rows_become_as_few_runs_as_there_can_be(rows: list[int]) -> None:
    runs = row_runs(rows)
    assert list(run_rows(runs)) == rows
    breaks = sum(after != before + 1 for before, after in pairwise(rows))
    assert len(runs) == (breaks + 1 if rows else 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3))))
def test_joined_runs_are_the_runs_of_the_same_rows(pairs: list[tuple[int, int]]) -> None:
    runs = [Run(*pair) for pair in pairs]
    assert joined(runs) == row_runs(run_rows(runs))
    assert joined(joined(runs)) == joined(runs)


def test_a_digest_is_over_the_one_before_the_event_and_the_rows_in_view() -> None:
    """Two sides that agree about the events and not about what follows from them differ."""
    other = ViewDigest(b"d" * 32)
    digests = {
        next_digest(ROOT_DIGEST, Event("evict", 20, CUT), [Run(0, 4), Run(8, 12)]),
        next_digest(other, Event("evict", 20, CUT), [Run(0, 4), Run(8, 12)]),
        next_digest(ROOT_DIGEST, Event("evict", 21, CUT), [Run(0, 4), Run(8, 12)]),
        next_digest(ROOT_DIGEST, Event("evict", 20, CUT), [Run(8, 12), Run(0, 4)]),
        next_digest(ROOT_DIGEST, Event("evict", 20, CUT), [Run(0, 4), Run(8, 11)]),
        next_digest(ROOT_DIGEST, Event("evict", 20, CUT), []),
    }
    assert len(digests) == 6
    assert {len(digest) for digest in digests} == {32}
