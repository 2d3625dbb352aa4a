"""When a policy is asked, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.conversation import Conversation, Markup
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.full import Full
from kvcomm.streams.policies.heavy_hitter import HeavyHitter
from kvcomm.streams.policies.port import Look
from kvcomm.streams.policies.random_blocks import RandomBlocks
from kvcomm.streams.policies.restarts import Reprefill
from kvcomm.streams.policies.snap import Snap
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.session import Session
from kvcomm.streams.view import visibility
from tests.kvcomm.streams.symbolic import END, SymbolicEngine, cuts, prefilled


@dataclass
class Named:
    """Names what it is told to, once."""

    ranges: list[tuple[int, int]]
    name: str = "named"
    needs_scores: bool = False

    def select(self, look: Look) -> list[SlotRange]:
        ranges, self.ranges = self.ranges, []
        return [SlotRange(*each) for each in ranges]


def stream(rows: int, protect: int = 0, block_tokens: int = 16) -> tuple[SymbolicEngine, Session]:
    engine = SymbolicEngine(block_tokens)
    session = engine.session()
    session.protect(protect)
    if rows:
        engine.feed(session, [100 + row % 800 for row in range(rows)])
    return engine, session


def test_the_example_of_the_public_window_4096_and_stride_512():
    """A prompt of 200; 4,097 slots become 3,585, and behind the prefix positions are slots + 512."""
    session = SymbolicEngine().session()
    session.protect(200)
    session.commit(session.plan([1] * 4096))
    compactor = Compactor(session, WindowFifo(4096, 512))
    assert compactor.after_forward() == []
    session.commit(session.plan([1]))
    assert cuts(compactor.after_forward()) == [(4097, ((208, 720),))]
    assert session.slot_count == 3585
    rows = session.view.rows
    assert [rows[slot] - slot for slot in (0, 207, 208, 3584)] == [0, 0, 512, 512]


def test_fault_b04_a_cut_waits_until_its_last_block_is_full():
    engine, session = stream(50, protect=50)
    compactor = Compactor(session, WindowFifo(64, 16))
    while not session.events:
        engine.feed(session, [1])
        compactor.after_forward()
    assert cuts(session.events) == [(80, ((64, 80),))]
    assert session.tokens[-1] == 1
    session.check()


def test_fault_b03_what_is_kept_is_row_by_row_what_was_fed_where_the_prompt_ends_inside_a_block():
    engine, session = stream(50, protect=50)
    compactor = Compactor(session, WindowFifo(112, 32))
    before: list[bytes] = []
    while not session.events:
        engine.feed(session, [session.next_row % 900])
        before = engine.kv(session)
        compactor.after_forward()
    at = session.events[0].at_row
    assert list(session.view.rows) == [*range(64), *range(96, at)]
    assert engine.kv(session) == before[:64] + before[96:]
    assert [session.tokens[row] for row in session.view.rows[48:66]] == [
        *[100 + row for row in (48, 49)],
        *range(50, 64),
        96,
        97,
    ]


def test_edge_03_a_prompt_longer_than_the_window_is_no_endless_loop():
    _, session = stream(200, protect=150)
    compactor = Compactor(session, WindowFifo(144, 48))
    assert compactor.after_forward() == []
    assert "160 slots are protected" in (compactor.obstacle or "")
    assert Compactor(session_with_prompt(140), WindowFifo(144, 48)).obstacle is None
    assert Compactor(session_with_prompt(140), WholeTurns(2, 1)).obstacle is None
    _, long = stream(300, protect=40)
    assert cuts(Compactor(long, WindowFifo(160, 64)).after_forward()) == [(300, ((48, 112),))] * 3
    assert long.slot_count == 108


def session_with_prompt(rows: int) -> Session:
    return stream(rows, protect=rows)[1]


def test_edge_03_the_protected_prefix_fills_the_window():
    engine, session = stream(144, protect=144)
    compactor = Compactor(session, WindowFifo(144, 48))
    for _ in range(100):
        engine.feed(session, [1])
        compactor.after_forward()
        assert 144 <= session.slot_count <= 144 + 48
    assert list(session.view.rows[:144]) == list(range(144))
    assert len(session.events) == 2


def test_edge_04_generated_tokens_in_the_last_block_of_the_prompt_are_never_cut():
    engine, session = stream(45, protect=45)
    compactor = Compactor(session, WindowFifo(144, 48))
    for _ in range(400):
        engine.feed(session, [1])
        compactor.after_forward()
    assert len(session.events) > 4
    assert list(session.view.rows[:48]) == list(range(48))


def test_edge_05_a_cut_between_the_chunks_of_a_prompt_is_seen_by_the_next_chunk_alone():
    engine, session = stream(0, protect=40)
    compactor = Compactor(session, WindowFifo(160, 64))
    for _ in range(0, 288, 48):
        engine.feed(session, [5] * 48)
        compactor.after_forward()
    assert cuts(session.events) == [(192, ((48, 112),)), (240, ((48, 112),))]
    found = visibility(session.next_row, session.events)
    for row in range(session.next_row):
        assert {key for key in range(session.next_row) if found.sees(row, key)} == engine.seen[row]
    assert 48 in engine.seen[191]
    assert 48 not in engine.seen[192]


def test_edge_05_two_cuts_and_a_restore_at_one_row():
    """Each range is in the view before its own event."""
    engine, session = stream(96, protect=16)
    compactor = Compactor(session, Named([(16, 32)]), archive=True)
    (first,) = compactor.after_forward()
    (second,) = Compactor(session, Named([(16, 48)])).after_forward()
    assert list(session.view.rows) == [*range(16), *range(64, 96)]
    session.restore(first.span)
    assert list(session.view.rows) == [*range(32), *range(64, 96)]
    assert [event.at_row for event in session.events] == [96] * 3
    assert second.ranges == ((16, 48),)
    engine.feed(session, [1])
    assert engine.seen[96] == {*range(32), *range(64, 97)}
    session.check()


def test_edge_06_fourteen_cuts_and_more_keep_the_books():
    engine, session = stream(11, protect=11, block_tokens=4)
    compactor = Compactor(session, WindowFifo(36, 12))
    while len(session.events) < 16:
        engine.feed(session, [session.next_row % 900])
        compactor.after_forward()
        assert session.slot_count <= 36
    session.check()
    assert len(set(session.view.rows)) == session.slot_count
    found = visibility(session.next_row, session.events)
    for row in range(session.next_row):
        assert {key for key in engine.seen[row] if found.sees(row, key)} == engine.seen[row]
        assert sum(found.sees(row, key) for key in range(row + 1)) == len(engine.seen[row])


def test_edge_07_exactly_one_live_block_is_left():
    engine, session = stream(80, protect=0)
    compactor = Compactor(session, WindowFifo(79, 64))
    assert cuts(compactor.after_forward()) == [(80, ((16, 80),))]
    assert len(session.table) == 1
    engine.feed(session, [1])
    assert engine.seen[80] == {*range(16), 80}
    session.check()


def test_edge_07_a_block_that_is_shared_leaves_this_view_alone():
    engine, session = stream(80, protect=0)
    child = session.fork(bytes(32))
    Compactor(session, WindowFifo(79, 64)).after_forward()
    assert list(child.view.rows) == list(range(80))
    assert [engine.pool.holder_count(block) for block in child.table] == [2, 1, 1, 1, 1]


def test_edge_08_a_stream_that_stops_in_the_step_that_would_cut_is_not_cut():
    engine, session = stream(144, protect=45)
    compactor = Compactor(session, WindowFifo(144, 48))
    engine.feed(session, [1])
    session.sampled(7)
    compactor.stop()
    assert compactor.after_forward() == []
    engine.feed(session, [7, *[9] * 14])
    assert compactor.after_forward() == []
    assert session.events == []
    assert cuts(compactor.at_admission()) == [(160, ((48, 96),))], "the next message finds the window kept"
    engine.feed(session, [1])
    assert not engine.seen[160] & {*range(48, 96)}


def test_edge_08_a_closed_stream_is_not_cut():
    _, session = stream(145, protect=45)
    session.close()
    compactor = Compactor(session, WindowFifo(144, 48))
    assert compactor.after_forward() == compactor.at_admission() == []


def test_edge_09_a_token_sampled_before_the_cut_is_the_first_row_of_the_new_view():
    engine, session = stream(145, protect=45)
    compactor = Compactor(session, WindowFifo(144, 48))
    session.sampled(3)
    (event,) = compactor.after_forward()
    assert (event.at_row, session.pending) == (145, 3)
    engine.feed(session, [3])
    assert engine.seen[145] == {*range(48), *range(96, 146)}


def test_edge_09_a_message_whose_last_token_has_no_kv_is_not_answered():
    _, session = stream(145, protect=45)
    session.sampled(3)
    compactor = Compactor(session, WholeTurns(2, 1))
    with pytest.raises(ValueError, match="token 3 was sampled and is not fed: finish its message first"):
        compactor.at_admission()


@pytest.mark.parametrize(
    "ranges",
    [[(32, 48), (16, 32)], [(16, 48), (32, 64)], [(16, 16)], [(48, 32)], [(32, 97)], [(-16, 16)]],
)
def test_edge_25_ranges_that_descend_overlap_or_leave_the_view_are_refused(ranges: list[tuple[int, int]]):
    _, session = stream(96, protect=16)
    compactor = Compactor(session, Named(ranges))
    with pytest.raises(ValueError, match="a policy names slots of the view"):
        compactor.after_forward()
    assert session.slot_count == 96
    assert session.events == []


@pytest.mark.parametrize(
    ("ranges", "cut"),
    [
        ([(0, 40)], ((16, 32),)),
        ([(20, 70)], ((32, 64),)),
        ([(90, 100)], None),
        ([(33, 63)], None),
        ([(20, 40), (40, 70)], ((32, 64),)),
        ([(20, 40), (44, 84)], ((48, 80),)),
        ([(16, 40), (64, 100)], ((16, 32), (64, 96))),
    ],
)
def test_edge_25_a_range_is_cut_where_it_covers_whole_blocks(
    ranges: list[tuple[int, int]], cut: tuple[tuple[int, int], ...] | None
):
    _, session = stream(100, protect=10)
    events = Compactor(session, Named(ranges)).after_forward()
    assert [each for _, each in cuts(events)] == ([cut] if cut else [])
    session.check()


def test_turns_that_were_named_apart_count_no_more_whatever_the_cut_left_of_them():
    _, session = stream(200, protect=16)
    for start, end in ((20, 60), (60, 100), (100, 140), (140, 190)):
        session.end_turn(start, end)
    events = Compactor(session, Named([(20, 60), (100, 140)])).after_forward()
    assert [each for _, each in cuts(events)] == [((32, 48), (112, 128))]
    assert session.turns == [(44, 84), (108, 158)]
    session.check()


def test_attention_is_asked_for_only_where_a_policy_goes_by_it():
    _, session = stream(16)
    assert Compactor(session, Full()).query_rows is None
    assert Compactor(session, HeavyHitter(64, 16, recent=16)).query_rows == 0


def test_attention_of_another_view_is_refused():
    _, session = stream(17)
    compactor = Compactor(session, HeavyHitter(64, 16, recent=16))
    with pytest.raises(
        ValueError, match="over 16 slots for a view of 17: observe a pass before the next cut"
    ):
        compactor.observe([0.0] * 16, 1)


def test_attention_that_is_no_number_is_refused_before_it_decides():
    _, session = stream(80)
    compactor = Compactor(session, HeavyHitter(64, 16, recent=16))
    compactor.observe([1.0] * 79 + [float("nan")], 80)
    with pytest.raises(ValueError, match="computed no number"):
        compactor.after_forward()


def test_a_policy_that_needs_scores_and_cannot_make_them_is_refused():
    _, session = stream(0)
    with pytest.raises(ConfigError, match="'named' needs scores"):
        Compactor(session, Named([], needs_scores=True))


def test_edge_15_a_fork_knows_what_its_blocks_are_worth():
    engine, session = stream(96)
    compactor = Compactor(session, HeavyHitter(95, 16, recent=16))
    compactor.observe([1.0 if slot // 16 != 3 else 0.1 for slot in range(96)], 96)
    child = session.fork(bytes(32))
    forked = compactor.forked(child)
    known = compactor.look("forward").scores
    assert forked.look("forward").scores == known and any(known)
    engine.feed(child, [1])
    forked.observe([9.0] * 97, 1)
    assert compactor.look("forward").scores == known, "what a child's blocks get is its own"
    engine.feed(session, [2])
    earlier = compactor.forked(session.fork(bytes(32), at_row=96))
    assert not any(earlier.look("forward").scores), "some of what is known came of rows that it does not have"
    assert [each for _, each in cuts(compactor.after_forward())] == [((48, 64),)]
    assert [each for _, each in cuts(forked.after_forward())] == [((48, 64),)]
    compactor.stop()
    assert compactor.forked(session.fork(bytes(32))).stopped


def test_a_policy_that_begins_new_streams_is_not_taken_for_one_that_cuts():
    policy: Any = Reprefill(WholeTurns(2, 1))
    with pytest.raises(
        ConfigError, match="'reprefill turns' begins new streams and cuts none: use a Restarter"
    ):
        Compactor(stream(0)[1], policy)


@pytest.mark.parametrize("policy", [WindowFifo(144, 40), RandomBlocks(144, 8), HeavyHitter(144, 24)])
def test_a_stride_that_is_not_in_whole_blocks_is_refused(policy: WindowFifo | RandomBlocks | HeavyHitter):
    _, session = stream(0)
    with pytest.raises(ConfigError, match=r"not in whole blocks of 16 tokens.*; take (16|32|48)$"):
        Compactor(session, policy)
    Compactor(stream(0, block_tokens=8)[1], policy)


def by_counting(
    window: int, stride: int, protect: int, size: int, chunks: list[int]
) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    """Cuts of a window, from numbers alone."""
    found: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    first = -(-protect // size) * size
    rows = slots = 0
    for count in chunks:
        rows, slots = rows + count, slots + count
        while first <= window < slots and slots // size * size >= first + stride:
            found.append((rows, ((first, first + stride),)))
            slots -= stride
    return found


@pytest.mark.slow
@given(
    size=st.sampled_from([1, 2, 4, 16]),
    window=st.integers(3, 9),
    stride=st.integers(1, 2),
    odd=st.integers(0, 15),
    protect=st.integers(0, 100),
    chunks=st.lists(st.integers(1, 70), max_size=20),
)
def test_a_window_cuts_where_counting_says(size, window, stride, odd, protect, chunks):
    window, stride = window * size + odd % size, stride * size
    session = SymbolicEngine(size, block_count=2_000).session()
    session.protect(protect)
    compactor = Compactor(session, WindowFifo(window, stride, first=0))
    for count in chunks:
        session.commit(session.plan([1] * count))
        compactor.after_forward()
    assert cuts(session.events) == by_counting(window, stride, protect, size, chunks)


POLICIES: list[Callable[[int], WindowFifo | RandomBlocks | HeavyHitter]] = [
    lambda size: WindowFifo(8 * size, 2 * size, first=0),
    lambda size: RandomBlocks(8 * size, 2 * size, recent=size, first=3, seed=5),
    lambda size: HeavyHitter(8 * size, 2 * size, recent=size, first=3, decay=0.9),
]


@pytest.mark.slow
@given(
    policy=st.sampled_from(POLICIES),
    size=st.sampled_from([1, 2, 4]),
    prompt=st.integers(0, 40),
    chunks=st.lists(st.integers(1, 11), min_size=1, max_size=25),
    archive=st.booleans(),
)
def test_whatever_is_fed_the_view_is_bounded_and_the_survivors_are_as_they_were(
    policy, size, prompt, chunks, archive
):
    """With K/V that tell any difference: what stays has it unchanged, whatever order and sizes of feeds."""
    engine, session = stream(0, protect=prompt, block_tokens=size)
    compactor = Compactor(session, policy(size), archive=archive)
    known: dict[int, bytes] = {}
    for count in [*([prompt] if prompt else []), *chunks]:
        engine.feed(session, [session.next_row % 900] * count)
        known |= dict(zip(session.view.rows, engine.kv(session), strict=True))
        if compactor.query_rows == 0:
            compactor.observe([1 / (1 + row) for row in session.view.rows], count)
        compactor.after_forward()
        assert [known[row] for row in session.view.rows] == engine.kv(session)
        if session.protected <= 8 * size:
            first = max(session.protected, -(-3 // size) * size)
            assert session.slot_count <= max(8 * size, first + 4 * size)
    session.check()
    if not session.events:
        assert engine.kv(session) == prefilled(session.tokens, session.view.rows)


ANY_POLICY = [
    Full(),
    WindowFifo(32, 8),
    RandomBlocks(32, 8, recent=4, seed=1),
    HeavyHitter(32, 8, recent=4, decay=0.9),
    Snap(32, 8, observed=4, pool=3),
    WholeTurns(3, 2),
    WholeTurns(1, 1),
]


@pytest.mark.slow
@given(
    policy=st.sampled_from(ANY_POLICY),
    steps=st.lists(
        st.tuples(st.sampled_from(["feed", "end", "restore", "fork", "admit"]), st.integers(1, 20)),
        max_size=40,
    ),
)
def test_any_policy_on_any_history_cuts_what_it_may_and_comes_to_an_end(policy, steps):
    """Also behind restores, which bring back what may be cut at once again."""
    engine, session = stream(0, block_tokens=4)
    compactor = Compactor(session, policy, archive=True)
    conversation = Conversation(session, Markup(frozenset({END})))
    for kind, number in steps:
        if kind in ("feed", "end"):
            engine.feed(session, [*[500] * number, *([END] if kind == "end" else [])])
            conversation.scan()
            if compactor.query_rows is not None:
                mass = [((row * 7 + number) % 11) / 10 for row in session.view.rows]
                compactor.observe(mass, number + (kind == "end"))
            compactor.after_forward()
        elif kind == "admit":
            compactor.at_admission()
        elif kind == "restore" and session.archive and session.full_slots >= session.protected:
            spans = sorted(session.archive)
            session.restore(spans[number % len(spans)])
        elif kind == "fork":
            child = session.fork(bytes(32))
            engine.adopt(session, child)
            compactor, conversation = compactor.forked(child), conversation.forked(child)
            session.close()
            session = child
        session.check()
        engine.pool.check()
    found = visibility(session.next_row, session.events)
    for row in range(session.next_row):
        assert {key for key in range(row + 1) if found.sees(row, key)} == engine.seen[row]
    for event in session.events:
        assert event.reason in (policy.name, "restore", "fork")
    session.close()
    assert engine.pool.free_count == engine.pool.block_count
