"""The bookkeeping of one rollout, case by case; stories of many sessions are in ``test_stories``."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.block import block_keys
from kvcomm.errors import Corrupt, PoolFull, Refused, TokenError
from kvcomm.streams.events import Event, Run, SlotRange, SpanId
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session, Turn
from kvcomm.streams.view import visibility, weights_runs
from tests.kvcomm.streams.life import ToyEngine
from tests.namespaces import namespace

NAME = b"n" * 32


def started(row_count: int, block_tokens: int = 4, block_count: int = 64) -> tuple[ToyEngine, Session]:
    """A session whose token at row ``i`` is ``i % 100``."""
    engine = ToyEngine(block_count, block_tokens)
    session = engine.session()
    if row_count:
        engine.feed(session, [row % 100 for row in range(row_count)])
    return engine, session


def keys_of(session: Session) -> list[bytes | None]:
    return [session.pool.key_of(block) for block in session.table]


# -- rows and cuts


def test_edge_05_a_cut_between_two_chunks_of_a_prompt() -> None:
    engine, session = started(8)
    session.evict([(0, 4)])
    engine.feed(session, [1, 2, 3])
    found = visibility(session.next_row, session.events)
    assert [found.sees(query, 0) for query in (6, 7, 8)] == [True, True, False]
    assert list(session.view.rows) == [4, 5, 6, 7, 8, 9, 10]


def test_edge_05_two_cuts_at_one_row_each_count_slots_before_themselves() -> None:
    _, session = started(16)
    session.evict([(0, 4)])
    session.evict([(4, 8)])
    assert list(session.view.rows) == [4, 5, 6, 7, 12, 13, 14, 15]
    session.check()


def test_edge_05_a_cut_and_its_restore_at_one_row_change_nothing() -> None:
    engine, session = started(12)
    event = session.evict([(4, 8)], archive=True)
    session.restore(event.span, 4)
    engine.feed(session, [1])
    assert visibility(13, session.events) == visibility(13, [])
    assert list(session.view.rows) == list(range(13))


def test_edge_07_exactly_one_block_stays() -> None:
    engine, session = started(12)
    session.evict([(0, 8)])
    assert list(session.view.rows) == [8, 9, 10, 11]
    engine.feed(session, [1])
    session.evict([(0, 4)])
    assert list(session.view.rows) == [12]
    session.check()


def test_edge_07_and_then_none() -> None:
    engine, session = started(8)
    session.evict([(0, 8)])
    assert session.table == [] and session.slot_count == 0
    engine.feed(session, [1])
    assert list(session.view.rows) == [8]
    session.check()


def test_edge_09_a_token_sampled_before_the_cut_is_the_first_row_after_it() -> None:
    engine, session = started(8)
    session.sampled(42)
    event = session.evict([(0, 4)])
    assert (session.pending, event.at_row) == (42, 8)
    with pytest.raises(ValueError, match="42"):
        session.plan([41])
    engine.feed(session, [42])
    assert session.pending is None and session.tokens[8] == 42
    assert not visibility(9, session.events).sees(8, 3)


def test_one_token_is_sampled_a_row() -> None:
    _, session = started(0)
    with pytest.raises(ValueError, match="one token"):
        session.sampled(1)
    _, session = started(1)
    session.sampled(1)
    with pytest.raises(ValueError, match="one token"):
        session.sampled(1)
    _, session = started(1)
    feed = session.plan([1])
    with pytest.raises(ValueError, match="under way"):
        session.sampled(1)
    session.abandon(feed)


def test_edge_12_the_limit_counts_rows_and_not_slots() -> None:
    engine = ToyEngine(8, 4)
    session = Session(engine.pool, engine.namespace, rows_max=10)
    engine.feed(session, [1] * 9)
    session.evict([(0, 8)])
    assert session.slot_count == 1
    with pytest.raises(Refused, match="begin a new session"):
        session.plan([1, 1])
    with pytest.raises(Refused):
        session.adopt_prefix([1, 1])
    engine.feed(session, [1])
    session.check()


def test_edge_25_ranges_that_are_no_cut() -> None:
    _, session = started(18)
    session.protect(3)
    cuts: list[tuple[str, list[tuple[int, int]]]] = [
        ("whole blocks", [(4, 6)]),
        ("whole blocks", [(5, 9)]),
        ("not empty", [(4, 4)]),
        ("not empty", [(8, 4)]),
        ("ascend", [(8, 12), (4, 8)]),
        ("disjoint", [(4, 12), (8, 16)]),
        ("protected", [(0, 4)]),
        ("protected", [(-4, 4)]),
        ("full blocks", [(16, 20)]),
        ("full blocks", [(20, 24)]),
        ("nothing", []),
    ]
    for why, ranges in cuts:
        with pytest.raises(ValueError, match=why):
            session.evict(ranges)
    assert session.events == [] and session.slot_count == 18
    session.check()


def test_neighbouring_ranges_are_one_cut() -> None:
    events = []
    for ranges in ([(0, 8)], [(0, 4), (4, 8)]):
        _, session = started(12)
        events.append(session.evict(ranges))
    assert events[0] == events[1] and events[0].ranges == (SlotRange(0, 8),)


def test_edge_21_wrong_guesses_were_never_fed() -> None:
    engine, session = started(6)
    feed = session.plan([10, 11, 12, 13, 14, 15, 16, 17])
    engine.compute(session, feed)
    session.commit(feed, 3)
    assert session.tokens[6:] == [10, 11, 12] and session.slot_count == 9
    assert engine.pool.free_count == 64 - 3
    engine.feed(session, [1, 2, 3])
    plain = ToyEngine(8)
    plain.feed(told := plain.session(), [0, 1, 2, 3, 4, 5, 10, 11, 12, 1, 2, 3])
    assert engine.in_view(session) == plain.in_view(told)
    assert keys_of(session) == keys_of(told)
    with pytest.raises(ValueError, match="full blocks"):
        session.evict([(12, 16)])


@pytest.mark.parametrize("count", [-1, 4])
def test_no_more_is_kept_than_was_planned(count: int) -> None:
    _, session = started(2)
    feed = session.plan([1, 2, 3])
    with pytest.raises(ValueError, match="of 3 planned"):
        session.commit(feed, count)
    session.commit(feed, 0)
    assert session.next_row == 2
    session.check()


def test_a_sampled_token_of_which_no_row_was_kept_is_still_to_be_fed() -> None:
    engine, session = started(2)
    session.sampled(7)
    session.commit(session.plan([7, 8]), 0)
    assert session.pending == 7
    with pytest.raises(ValueError, match="7 was sampled"):
        session.plan([8])
    engine.feed(session, [7])
    assert session.pending is None


def test_a_feed_that_failed_never_was() -> None:
    engine, session = started(5)
    before = (list(session.view.rows), session.table[:], engine.pool.free_count)
    feed = session.plan([1] * 9)
    with pytest.raises(ValueError, match="commit or abandon"):
        session.plan([1])
    session.abandon(feed)
    assert (list(session.view.rows), session.table, engine.pool.free_count) == before
    with pytest.raises(ValueError, match="not under way"):
        session.commit(feed)


def test_what_cannot_be_fed() -> None:
    engine, session = started(4, block_count=2)
    with pytest.raises(ValueError, match="at least one"):
        session.plan([])
    with pytest.raises(TokenError):
        session.plan([100])
    with pytest.raises(PoolFull):
        session.plan([1] * 5)
    assert engine.pool.free_count == 1
    session.close()
    with pytest.raises(Refused, match="closed"):
        session.plan([1])


# -- turns

turn_ends = st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(sorted)


@pytest.mark.slow
@given(ends=turn_ends, places=st.sets(st.integers(0, 9), min_size=1), back=st.integers(0, 9))
def test_turns_keep_to_their_rows(ends: list[int], places: set[int], back: int) -> None:
    _, session = started(41)
    session.turns = [Turn(start, end) for start, end in pairwise(ends)]
    rows = list(session.view.rows)
    told = [set(rows[start:end]) for start, end in session.turns]
    event = session.evict([(4 * place, 4 * place + 4) for place in sorted(places)], archive=True)
    cut = {row for start, end in event.ranges for row in rows[start:end]}
    kept = [each - cut for each in told if each - cut]
    assert [set(session.view.rows[start:end]) for start, end in session.turns] == kept
    session.check()
    at = min(4 * back, session.full_slots)
    within = [start < at < end for start, end in session.turns]
    session.restore(event.span, at)
    found = [set(session.view.rows[start:end]) for start, end in session.turns]
    if not any(within):
        found.remove(cut)  # it is a turn of its own
    assert [each - cut for each in found] == kept
    assert [each & cut for each in found] == [cut if inside else set() for inside in within]
    session.check()


def test_a_turn_begins_behind_the_one_before() -> None:
    _, session = started(6)
    session.end_turn(2)
    for start in (5, 6):
        with pytest.raises(ValueError, match="a turn"):
            session.end_turn(start)
    assert session.turns == [(2, 6)]


def test_turns_are_dropped_by_where_they_stand_and_counted() -> None:
    _, session = started(12)
    for start, end in ((0, 3), (3, 6), (7, 9)):
        session.end_turn(start, end)
    assert session.drop_turns(1, 8) == 1
    assert session.turns == [(0, 3), (7, 9)]
    assert session.drop_turns(3, 7) == 0
    assert session.drop_turns(0, 12) == 2
    assert session.turns == []


def test_what_is_protected_stays_so() -> None:
    _, session = started(16)
    for slots, protected in ((5, 8), (3, 8), (0, 8), (9, 12)):
        session.protect(slots)
        assert session.protected == protected
    with pytest.raises(ValueError, match="protected prefix of 12"):
        session.evict([(8, 12)])


# -- faults of other implementations


def test_fault_b00_a_rollout_cut_short_is_refused_with_events_behind_its_end() -> None:
    engine, session = started(12)
    session.evict([(0, 4)])
    engine.feed(session, [1, 2, 3])
    for row_count in range(12):
        with pytest.raises(Corrupt):
            visibility(row_count, session.events)
        with pytest.raises(Corrupt):
            Session.recovered(
                engine.pool, engine.namespace, session.tokens[:row_count], session.events, rows_max=100
            )


def test_fault_b03_rows_and_slots_agree_slot_by_slot_behind_an_unaligned_prompt() -> None:
    engine, session = started(50, block_tokens=16)
    session.protect(50)
    assert session.protected == 64
    engine.feed(session, list(range(50)))
    session.evict([(64, 80)])
    rows = [*range(64), *range(80, 100)]
    assert list(session.view.rows) == rows
    plain = ToyEngine(64, 16)
    plain.feed(other := plain.session(), session.tokens)
    assert engine.in_view(session) == [plain.in_view(other)[row] for row in rows]


def test_fault_b04_a_partial_block_is_never_cut() -> None:
    """Window 64, stride 16, prompt 50: the first block behind the prompt is full at 80 rows, not at 65."""
    engine, session = started(50, block_tokens=16)
    session.protect(50)
    while session.slot_count < 80:
        with pytest.raises(ValueError, match="full blocks"):
            session.evict([(64, 80)])
        engine.feed(session, [session.next_row])
    session.evict([(64, 80)])
    assert session.slot_count == 64


def test_fault_b05_positions_stay_unique_over_chained_cuts() -> None:
    engine, session = started(48, block_tokens=16)
    for _ in range(5):
        session.evict([(16, 32)])
        engine.feed(session, [7] * 16)
        assert len(set(session.view.rows)) == session.slot_count
    assert list(session.view.rows) == [*range(16), *range(96, 128)]


def test_fault_b06_a_second_request_goes_on_counting_rows() -> None:
    _, session = started(12)
    session.evict([(4, 8)])
    feed = session.plan([1, 2])
    assert (feed.first_row, feed.first_slot) == (12, 8)
    session.commit(feed)
    assert list(session.view.rows)[-2:] == [12, 13]


def test_fault_b11_a_sibling_that_goes_on_takes_no_name_away() -> None:
    engine = ToyEngine(16)
    first, second = engine.session(), engine.session()
    for session in (first, second):
        engine.feed(session, [1] * 8)  # each computed its own
    first.evict([(4, 8)])
    engine.feed(first, [2] * 8)
    first.close()
    third = engine.session()
    assert engine.admit(third, [1] * 9) == 8
    second.close()
    third.close()
    assert engine.admit(engine.session(), [1] * 9) == 8


def test_fault_b12_adopted_rows_are_born_where_they_stand() -> None:
    """Rows taken over at an admission behind a cut and a restore: the log says what they saw, exactly."""
    engine, session = started(12)
    event = session.evict([(4, 8)], archive=True)
    engine.feed(session, [1] * 4)
    session.restore(event.span, 4)
    twin = engine.fork(session, NAME)
    engine.feed(session, [2] * 9)
    assert engine.admit(twin, [2] * 9) == 8
    assert engine.in_view(twin) == engine.in_view(session)
    assert twin.table[-3:-1] == session.table[-3:-1]
    found = visibility(twin.next_row, twin.events)
    assert found == visibility(session.next_row, session.events)
    assert [found.sees(16, key) for key in (5, 15, 16)] == [True, True, True]
    assert not found.sees(13, 5)


def test_s2_17_a_window_of_4096_cut_by_512() -> None:
    session = Session(BlockPool(300), namespace(block_tokens=16), rows_max=5_000)
    session.commit(session.plan([1] * 4097))
    session.protect(64)
    session.evict([(64, 576)])
    assert session.slot_count == 3585
    shifts = [row - slot for slot, row in enumerate(session.view.rows)]
    assert shifts == [0] * 64 + [512] * (3585 - 64)


# -- blocks that are there already


def test_a_new_session_takes_the_blocks_of_another_and_computes_the_rest() -> None:
    engine, first = started(10)
    computed = engine.computed_rows
    second = engine.session()
    assert second.adopt_prefix(first.tokens) == 8
    assert second.table == first.table[:2]
    engine.feed(second, first.tokens[8:])
    assert engine.computed_rows == computed + 2
    assert engine.in_view(second) == engine.in_view(first)
    second.check()


@pytest.mark.parametrize(("row_count", "taken"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 8)])
def test_one_token_at_least_is_computed(row_count: int, taken: int) -> None:
    engine, _ = started(10)
    tokens = [*range(10), *[50] * 30][:row_count]
    assert engine.session().adopt_prefix(tokens) == taken


def test_no_block_is_taken_up_in_the_middle_of_one() -> None:
    engine, first = started(9)
    second = engine.session()
    engine.feed(second, [0])
    assert second.adopt_prefix(first.tokens[1:]) == 0


def test_ordinary_blocks_have_ordinary_keys() -> None:
    _, session = started(13)
    assert keys_of(session)[:3] == block_keys(session.namespace, session.tokens)
    assert session.next_keys([1, 2, 3]) == block_keys(session.namespace, [*session.tokens, 1, 2, 3])[3:]


def test_the_next_blocks_are_named_also_while_the_bytes_are_elsewhere() -> None:
    _, session = started(13)
    names = session.next_keys([1, 2, 3])
    session.swap_out()
    assert session.next_keys([1, 2, 3]) == names
    session.close()
    with pytest.raises(Refused, match="closed"):
        session.next_keys([1, 2, 3])


def test_a_pending_token_may_come_from_a_block() -> None:
    engine, first = started(12)
    second = engine.session()
    engine.feed(second, first.tokens[:4])
    second.sampled(4)
    with pytest.raises(ValueError, match="4 was sampled"):
        second.adopt_prefix([5] * 9)
    assert second.adopt_prefix(first.tokens[4:]) == 4 and second.pending is None


def test_edge_16_the_same_ids_behind_another_history_are_other_blocks() -> None:
    engine, first = started(12)
    first.evict([(4, 8)])
    second = engine.session()
    engine.feed(second, [*range(4), 9, 9, 9, 9, *range(8, 12)])
    second.evict([(4, 8)])
    third = engine.session()
    engine.feed(third, list(range(12)))
    for session in (first, second, third):
        engine.feed(session, [1] * 4)
    assert len({keys_of(session)[-1] for session in (first, second, third)}) == 3
    assert len({engine.in_view(session)[-1] for session in (first, second, third)}) == 3


def test_edge_16_the_same_history_gives_the_same_blocks() -> None:
    """Siblings that were never forked from each other, but lived the same."""
    engine, first = started(12)
    second = engine.session()
    engine.admit(second, list(range(12)))
    for session in (first, second):
        session.evict([(4, 8)])
    engine.feed(first, [1] * 9)
    assert engine.admit(second, [1] * 9) == 8
    assert engine.in_view(second) == engine.in_view(first)


def test_edge_14_a_cut_drops_this_sessions_hold_of_a_shared_block() -> None:
    engine, first = started(12)
    second = engine.session()
    engine.admit(second, list(range(12)))
    shared = first.table[1]
    assert engine.pool.holder_count(shared) == 2
    content = engine.payload(shared)
    first.evict([(4, 8)])
    engine.feed(first, [5] * 20)
    assert engine.pool.holder_count(shared) == 1
    assert engine.payload(shared) == content and second.table[1] == shared


# -- forks


def test_edge_15_a_child_inherits_the_events_and_goes_its_own_way() -> None:
    engine, parent = started(14)
    parent.end_turn(4)
    parent.evict([(4, 8)], archive=True)
    parent.protect(4)
    parent.sampled(7)
    journal: list[Event] = []
    child = engine.fork(parent, NAME, journal.append)
    assert journal == child.events == [*parent.events, child.events[-1]]
    assert (child.turns, child.protected, child.pending) == (parent.turns, 4, 7)
    assert child.table[:2] == parent.table[:2] and child.table[2] != parent.table[2]
    engine.feed(child, [7, 8])
    engine.feed(parent, [7, 9])
    child.restore(next(iter(child.archive)))
    assert parent.archive and engine.pool.holder_count(next(iter(parent.archive.values())).blocks[0]) == 2
    for session in (parent, child):
        session.check()
        session.close()
    engine.pool.check()
    assert engine.pool.free_count == 64


def test_edge_15_what_came_after_the_fork_row_is_abandoned() -> None:
    engine, parent = started(9)
    parent.evict([(4, 8)])
    parent.end_turn(2)
    engine.feed(parent, [1] * 10)
    parent.end_turn(5)
    parent.sampled(3)
    child = engine.fork(parent, NAME, at_row=13)
    assert child.tokens == parent.tokens[:13] and child.pending is None
    assert child.turns == [(2, 5)] and list(child.view.rows) == [0, 1, 2, 3, 8, 9, 10, 11, 12]
    assert engine.in_view(child) == engine.in_view(parent)[:9]
    engine.feed(child, [2, 2, 2])
    twin = engine.fork(parent, b"m" * 32, at_row=13)
    engine.feed(twin, [2, 2, 2])
    assert keys_of(child) == keys_of(twin)
    assert None not in keys_of(child)
    child.evict([(4, 8)])
    fresh = ToyEngine(16)
    fresh.feed(same := fresh.session(), parent.tokens[:9])
    same.evict([(4, 8)])
    fresh.feed(same, child.tokens[9:])
    same.evict([(4, 8)])
    assert child.lineage == same.lineage and fresh.in_view(same) == engine.in_view(child)
    for row in (8, 20):
        with pytest.raises(ValueError, match="fork at row"):
            parent.fork(NAME, at_row=row)
    child.check()


def test_a_fork_that_fails_holds_nothing() -> None:
    engine, parent = started(10, block_count=4)
    parent.evict([(0, 4)], archive=True)
    free = engine.pool.free_count

    def broken(event: Event) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        parent.fork(NAME, broken)
    with pytest.raises(ValueError, match="32 bytes"):
        parent.fork(b"short")
    assert engine.pool.free_count == free
    parent.fork(NAME)
    with pytest.raises(PoolFull):
        parent.fork(NAME)
    engine.pool.check()


# -- weights


def test_edge_17_rows_carry_the_weights_that_computed_them() -> None:
    engine, session = started(6)
    session.set_weights(3)
    engine.feed(session, [1] * 4)
    session.set_weights(4)
    session.evict([(0, 4)])
    engine.feed(session, [1])
    assert weights_runs(11, session.events) == [(0, Run(0, 6)), (3, Run(6, 4)), (4, Run(10, 1))]
    assert session.events[-1].weights_version == 4
    for version in (4, -1, 1 << 63):
        with pytest.raises(ValueError, match="no change"):
            session.set_weights(version)
    with pytest.raises(ValueError, match="32 bytes, not 3"):
        session.set_weights(5, digest=b"new")


def test_edge_17_weights_of_one_number_and_two_digests_are_two() -> None:
    engine, _ = started(0)
    admitted = []
    for digest in (b"", b"a" * 32, b"b" * 32, b"a" * 32):
        session = engine.session()
        session.set_weights(1, digest=digest)
        admitted.append(engine.admit(session, list(range(9))))
        assert session.view.weights_digest == digest
        assert (
            Session.recovered(
                engine.pool, engine.namespace, session.tokens, session.events, rows_max=100
            ).view
            == session.view
        )
    assert admitted == [0, 0, 0, 8]


def test_edge_17_blocks_of_other_weights_are_not_found() -> None:
    engine, _ = started(9)
    late, later = engine.session(), engine.session()
    for session in (late, later):
        session.set_weights(1)
    assert engine.admit(late, list(range(9))) == 0
    assert engine.admit(later, list(range(9))) == 8
    assert weights_runs(9, later.events) == [(1, Run(0, 9))]


# -- archives


def test_a_span_comes_back_from_elsewhere_into_other_blocks() -> None:
    engine, session = started(13)
    before = engine.in_view(session)
    event = session.evict([(4, 12)], archive=True)
    archived = session.archive[event.span]
    payloads = [engine.payload(block) for block in archived.blocks]
    session.drop_archived(event.span, moved=True)
    with pytest.raises(ValueError, match="fetch its bytes"):
        session.restore(event.span)
    blocks = engine.pool.take(2)
    for block, payload in zip(blocks, payloads, strict=True):
        engine.load(block, payload)
    session.restore(event.span, 4, blocks)
    assert engine.in_view(session) == before
    assert tuple(map(engine.pool.key_of, blocks)) == archived.keys
    session.evict([(4, 8)])
    session.check()


def test_a_span_that_comes_back_from_elsewhere_lets_go_of_its_own_memory() -> None:
    engine, session = started(8)
    event = session.evict([(0, 4)], archive=True)
    (own,) = session.archive[event.span].blocks
    (copy,) = engine.pool.take(1)
    engine.load(copy, engine.payload(own))
    session.restore(event.span, 0, [copy])
    assert (engine.pool.holder_count(own), engine.pool.holder_count(copy)) == (0, 1)


def test_a_span_is_named_by_its_content_and_dropped_once() -> None:
    spans = []
    for tokens in ([1] * 8, [1] * 8, [2] * 8):
        engine = ToyEngine(4)
        engine.feed(session := engine.session(), tokens)
        spans.append(session.evict([(0, 4)], archive=True).span)
        session.drop_archived(spans[-1], moved=False)
        for act in (lambda: session.drop_archived(spans[-1], moved=True), lambda: session.restore(spans[-1])):
            with pytest.raises(ValueError, match="no such span"):
                act()
    assert spans[0] == spans[1] != spans[2]


def test_a_span_never_comes_back_into_the_protected_prefix() -> None:
    _, session = started(16)
    session.protect(5)
    event = session.evict([(8, 12)], archive=True)
    for slot in (4, 9, 13, 16):
        with pytest.raises(ValueError, match="border"):
            session.restore(event.span, slot)
    session.restore(event.span)
    assert list(session.view.rows) == list(range(16))


# -- crashes


def test_edge_28_the_journal_has_the_event_before_anything_changes() -> None:
    engine, session = started(13)
    log: list[Event] = []

    def crash(event: Event) -> None:
        log.append(event)
        raise OSError("power cut")

    session.journal = crash
    with pytest.raises(OSError, match="power cut"):
        session.evict([(4, 8)], archive=True)
    assert session.slot_count == 13 and not session.archive and not session.events
    session.check()
    # Who reads the log has one cut too many, under which no row ran: it changes no row's view.
    assert visibility(13, log) == visibility(13, [])
    payloads = [engine.payload(block) for block in session.table]
    again = Session.recovered(engine.pool, engine.namespace, session.tokens, log, rows_max=100)
    assert list(again.view.rows) == [*range(4), *range(8, 13)]
    kept = [payloads[0], *payloads[2:]]
    again.swap_in(lambda place, block: engine.load(block, kept[place]))
    session.journal = log.append
    session.evict([(4, 8)], archive=True)
    for each in (session, again):
        engine.feed(each, [1, 2, 3])
    assert engine.in_view(again) == engine.in_view(session)
    assert keys_of(again) == keys_of(session)


def test_edge_28_a_cut_too_few_would_be_noticed() -> None:
    engine, session = started(12)
    session.evict([(4, 8)])
    engine.feed(session, [1])
    session.evict([(4, 8)])
    with pytest.raises(Corrupt, match="another history"):
        Session.recovered(engine.pool, engine.namespace, session.tokens, session.events[1:], rows_max=100)


def test_a_log_of_other_blocks_is_refused() -> None:
    engine, session = started(12)
    event = session.evict([(4, 8)], archive=True)
    session.restore(event.span, 4)
    with pytest.raises(Corrupt, match="blocks of 16"):
        Session.recovered(
            engine.pool, namespace(vocab_size=100), session.tokens, session.events, rows_max=100
        )
    with pytest.raises(Refused):
        Session.recovered(engine.pool, engine.namespace, session.tokens, session.events, rows_max=11)


def test_a_log_whose_span_has_another_name_is_refused() -> None:
    engine, session = started(12)
    forged = session.view.stamped(Event("evict", 12, (SlotRange(4, 8),), SpanId(b"s" * 32)))
    visibility(12, [forged])
    with pytest.raises(Corrupt, match="not named by what was cut"):
        Session.recovered(engine.pool, engine.namespace, session.tokens, [forged], rows_max=100)


def test_edge_13_memory_goes_and_comes_back() -> None:
    engine, session = started(10, block_count=4)
    session.evict([(0, 4)])
    session.sampled(3)
    before, names = engine.in_view(session), keys_of(session)
    payloads = [engine.payload(block) for block in session.table]
    session.swap_out()
    assert engine.pool.free_count == 4
    for act in (lambda: session.plan([3]), lambda: session.evict([(0, 4)]), lambda: session.fork(NAME)):
        with pytest.raises(Refused, match="swap it in"):
            act()
    engine.feed(other := engine.session(), [9] * 14)
    free = engine.pool.free_count
    with pytest.raises(PoolFull):
        session.swap_in(lambda place, block: None)
    assert engine.pool.free_count == free
    other.close()

    def broken(place: int, block: int) -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        session.swap_in(broken)
    assert engine.pool.free_count == 4
    session.swap_in(lambda place, block: engine.load(block, payloads[place]))
    assert (engine.in_view(session), keys_of(session)) == (before, names)
    with pytest.raises(ValueError, match="in memory"):
        session.swap_in(broken)
    session.check()
    session.swap_out()
    session.close()
    with pytest.raises(Refused, match="closed"):
        session.swap_in(broken)
    with pytest.raises(Refused, match="closed"):
        session.attach([])
    assert engine.pool.free_count == 4


def test_blocks_that_nobody_took_meanwhile_are_not_loaded_again() -> None:
    engine, session = started(10)
    before = engine.in_view(session)
    tail = engine.payload(session.table[2])
    session.swap_out()
    loaded: list[int] = []

    def load(place: int, block: BlockId) -> None:
        loaded.append(place)
        engine.load(block, tail)

    session.swap_in(load)
    assert loaded == [2] and engine.in_view(session) == before


# -- cost


def lines_and_bytes(act: Callable[[], object]) -> tuple[int, int]:
    """Lines of the session's code that ran, and memory that was needed meanwhile."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        if not frame.f_globals["__name__"].startswith("kvcomm."):  # a collector's callback, for one
            return None
        lines += event == "line"
        return trace

    outer = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        act()
    finally:
        sys.settrace(outer)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return lines, peak_bytes


def decode(session: Session) -> None:
    session.sampled(1)
    session.commit(session.plan([1]))


def test_a_decode_step_costs_the_same_in_a_long_context() -> None:
    costs = []
    for row_count in (64, 64_000):
        session = Session(BlockPool(5_000), namespace(block_tokens=16), rows_max=100_000)
        session.commit(session.plan([1] * row_count))
        session.evict([(16, 32)])
        assert session.view.rows[-1] == row_count - 1  # somebody reads them, and they are kept up
        steps = [lines_and_bytes(lambda: decode(session)) for _ in range(12)]  # noqa: B023
        costs.append(steps)
    short, long = ([lines for lines, _ in steps] for steps in costs)
    assert short == long
    short, long = ([peak_bytes for _, peak_bytes in steps] for steps in costs)
    assert min(long) < min(short) + 1_000  # the least: lists grow now and then


def test_a_cut_costs_the_table_and_not_the_rows() -> None:
    costs = []
    for row_count in (640, 64_000):
        session = Session(BlockPool(5_000), namespace(block_tokens=16), rows_max=100_000)
        session.commit(session.plan([1] * row_count))
        costs.append(lines_and_bytes(lambda: session.evict([(16, 528)])))  # noqa: B023
    assert costs[0][0] == costs[1][0]
    assert costs[1][1] < costs[0][1] + 4 * 8 * (64_000 // 16)


def test_an_event_in_a_scattered_view_costs_what_it_moves() -> None:
    """Every other block is gone, so each of the others is a run of its own."""
    costs = []
    for block_count in (40, 4_000):
        session = Session(BlockPool(5_000), namespace(block_tokens=4), rows_max=100_000)
        session.commit(session.plan([1] * (4 * block_count)))
        session.evict([(place, place + 4) for place in range(4, 4 * block_count, 8)])
        assert len(session.view.runs) == block_count // 2
        cut, spans = [(12, 16), (20, 24)], []
        lines = [lines_and_bytes(lambda: spans.append(session.evict(cut, archive=True).span))[0]]  # noqa: B023
        lines.append(lines_and_bytes(lambda: session.restore(spans[0], 8))[0])  # noqa: B023
        costs.append(lines)
    assert costs[0] == costs[1]
