"""Copies of hot records: how long, for whom, and how many."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm import hotcopies
from kvcomm.hotcopies import HotCopies
from kvcomm.tier import RecordAnswer

HOT = RecordAnswer((b"v",), {"a": 3}, False, hot=True)


def test_a_copy_lives_from_the_sending_of_its_request():
    copies = HotCopies(1.0)
    copies.keep(b"n", HOT, 10.0, 10.4)
    assert copies.get(b"n", {}, 11.0) is HOT
    assert copies.get(b"n", {}, 11.001) is None
    assert copies.get(b"n", {}, 10.5) is None, "it is gone"
    assert (copies.kept_count, copies.answered_count, copies.dropped_count, len(copies)) == (1, 1, 1, 0)


@pytest.mark.parametrize("answer", [replace(HOT, hot=False), replace(HOT, degraded=True)])
def test_only_whole_answers_about_hot_records_are_kept(answer):
    copies = HotCopies(1.0)
    copies.keep(b"n", answer, 10.0, 10.0)
    assert not copies


def test_one_that_took_longer_than_it_may_live_is_not_kept():
    copies = HotCopies(1.0)
    copies.keep(b"n", HOT, 10.0, 11.5)
    assert not copies


def test_what_has_not_seen_all_that_the_session_has_is_not_shown():
    copies = HotCopies(1.0)
    copies.keep(b"n", HOT, 10.0, 10.0)
    assert copies.get(b"n", {"a": 3}, 10.1) is HOT
    assert copies.get(b"n", {"a": 4}, 10.1) is None
    copies.keep(b"n", HOT, 10.0, 10.0)
    assert copies.get(b"n", {"b": 1}, 10.1) is None


def test_a_write_drops_the_copy_and_its_author_reads_fresh_for_a_while():
    copies = HotCopies(1.0)
    copies.keep(b"n", HOT, 10.0, 10.0)
    copies.wrote(b"n", 10.2)
    assert copies.get(b"n", {}, 10.2) is None
    copies.keep(b"n", HOT, 10.3, 10.4)
    assert not copies
    copies.keep(b"n", HOT, 11.3, 11.4)
    assert copies.get(b"n", {}, 11.5) is HOT


def test_no_age_keeps_nothing():
    copies = HotCopies(0.0)
    copies.wrote(b"n", 10.0)
    copies.keep(b"n", HOT, 10.0, 10.0)
    assert copies.get(b"n", {}, 10.0) is None and not copies
    with pytest.raises(ValueError, match="0 seconds or more"):
        HotCopies(-1.0)


def test_it_is_bounded(monkeypatch):
    monkeypatch.setattr(hotcopies, "WRITTEN_MAX", 2)
    copies = HotCopies(1.0, entries_max=2, answer_bytes_max=100)
    for name in (b"a", b"b", b"c"):
        copies.keep(name, HOT, 10.0, 10.0)
        copies.wrote(b"w" + name, 10.0)
    assert copies.get(b"a", {}, 10.0) is None and copies.get(b"c", {}, 10.0) is HOT and len(copies) == 2
    copies.keep(b"large", replace(HOT, values=(bytes(101),)), 10.0, 10.0)
    assert copies.get(b"large", {}, 10.0) is None and len(copies) == 2
    copies.keep(b"wa", HOT, 10.0, 10.0)
    assert copies.get(b"wa", {}, 10.0) is HOT, "that it was written to is forgotten"


@given(
    st.lists(
        st.tuples(
            st.sampled_from("gkw"), st.sampled_from([b"x", b"y"]), st.integers(0, 9), st.floats(0, 0.7)
        ),
        max_size=60,
    )
)
def test_whatever_happens_nothing_older_than_its_age_nor_behind_the_session_is_shown(events):
    """The oracle: what a session wrote, and when each answer was asked for."""
    copies, now = HotCopies(1.0), 0.0
    sent: dict[int, float] = {}  # by identity of the answer
    wrote: dict[bytes, float] = {}
    held: list[RecordAnswer] = []
    for what, name, counter, passed in events:
        now += passed
        if what == "k":
            answer = RecordAnswer((name,), {"a": counter}, False, hot=True)
            held.append(answer)
            sent[id(answer)] = now
            copies.keep(name, answer, now, now)
        elif what == "w":
            copies.wrote(name, now)
            wrote[name] = now
        elif (found := copies.get(name, {"a": counter}, now)) is not None:
            assert found.values == (name,) and found.context["a"] >= counter
            assert now - sent[id(found)] <= 1.0
            assert sent[id(found)] >= wrote.get(name, -10.0), "kept before our own write"
