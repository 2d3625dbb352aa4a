"""Messages, turns, filler, and the feed that completes an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError, Refused
from kvcomm.streams.conversation import Chunk, Conversation, Markup, filler_id
from kvcomm.streams.policies.full import Full
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from tests.kvcomm.streams.dialogue import PREFIX, Dialogue
from tests.kvcomm.streams.symbolic import END, FILLER, NEWLINE, SymbolicEngine, cuts, prefilled


def messages(tokens: Sequence[int], rows: Sequence[int], filler: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row of each message among ``rows``, with all its markers: told from the ids alone."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    for row in rows:
        if row in filler:
            continue
        start = row if start is None else start
        if tokens[row] == NEWLINE and row and tokens[row - 1] == END:
            found.append((start, row))
            start = None
    if start is not None:
        found.append((start, rows[-1]))
    return found


# ------------------------------------------------------------------------------------------------- turns


def test_live_turns_go_up_and_down_like_a_saw():
    talk = Dialogue(WholeTurns(4, 2))
    talk.admit(talk.message(20), prefix=())
    for _ in range(9):
        talk.turn(10, 12)
    assert talk.live_turns[1:] == [0, 1, 2, 3, 2, 3, 2, 3, 2]
    assert [event.reason for event in talk.session.events] == ["turns"] * 3


def test_the_first_message_is_the_protected_prefix_and_two_more_are_a_turn():
    talk = Dialogue(Full())
    talk.admit(talk.message(20), talk.message(5))
    assert talk.session.protected == 32
    assert talk.session.turns == []
    talk.answer(3)
    assert talk.session.turns == [(32, 64)]
    assert talk.conversation.message_count == 3
    assert not talk.conversation.in_message


def test_whole_turns_that_come_in_one_feed_are_turns():
    """A history that an agent brings along."""
    talk = Dialogue(Full(), chunk=7)
    talk.admit(*[talk.message(length) for length in (20, 3, 30, 14, 4)], prefix=())
    assert talk.session.turns == [(32, 80), (80, 112)]
    assert talk.conversation.filler_rows == [*range(22, 32), *range(37, 48), *range(102, 112)]


def test_an_unfinished_message_is_in_no_turn():
    talk = Dialogue(WholeTurns(1, 1))
    talk.admit(talk.message(20), talk.message(5))
    talk.answer(3, end=False)
    assert talk.session.turns == []
    assert talk.conversation.in_message
    with pytest.raises(ValueError, match=r"has not ended: feed finish\(end=...\) first"):
        talk.conversation.admit([talk.message(4)])
    talk.feed(talk.conversation.finish(end=END))
    assert talk.session.turns == [(32, 80)], "the rows that were filled up already stay where they are"
    assert [talk.session.tokens[row] for row in (64, 65)] == [END, NEWLINE]


def test_an_answer_cut_short_is_ended_in_the_same_feed():
    talk = Dialogue(Full())
    talk.admit(talk.message(20), talk.message(5))
    talk.session.sampled(500)
    before = talk.session.next_row
    talk.feed(talk.conversation.finish(end=END))
    assert talk.session.tokens[before : before + 4] == [500, END, NEWLINE, FILLER]
    assert talk.session.turns == [(32, 64)]
    assert talk.engine.feeds[-1] == 64 - before


def test_a_turn_that_a_window_has_eaten_into_starts_where_what_is_left_of_it_does():
    talk = Dialogue(WindowFifo(96, 32))
    talk.admit(talk.message(14), prefix=())
    talk.turn(40, 60)
    assert talk.session.events
    (turn,) = talk.session.turns
    assert turn == (16, talk.session.slot_count)
    talk.turn(10, 90)
    assert [talk.session.view.rows[turn.start] for turn in talk.session.turns][-1] >= 16
    assert talk.session.turns[-1].end == talk.session.slot_count


def test_scanning_reads_the_new_rows_only():
    talk = Dialogue(Full())
    talk.admit(talk.message(200))

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, at):
            assert isinstance(at, SupportsIndex), "a slice of all tokens"
            Counted.reads += 1
            return list.__getitem__(self, at)

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("reads all tokens")

    talk.session.tokens = Counted(talk.session.tokens)
    for _ in range(10):
        talk.session.sampled(500)
        talk.engine.feed(talk.session, [500])
        Counted.reads = 0
        talk.conversation.scan()
        assert Counted.reads == 1
    assert talk.conversation.scan() == 0


# --------------------------------------------------------------------------------- filler and finish commit


def test_edge_01_a_padded_turn_ends_on_a_block_border():
    """Claim S2-07: after an answer every token of it has K/V in a full, named block."""
    talk = Dialogue(WholeTurns(2, 1))
    talk.admit(talk.message(20), prefix=())
    for asked, answered in [(3, 1), (40, 17), (29, 12), (1, 13), (14, 14)]:
        talk.turn(asked, answered)
        assert talk.session.slot_count % 16 == 0
        assert all(talk.engine.pool.key_of(block) for block in talk.session.table)
        assert talk.session.pending is None
    assert len(talk.session.events) == 3


def test_edge_01_a_turn_that_is_not_padded_leaves_parts_of_blocks_and_counts_no_more():
    talk = Dialogue(WholeTurns(2, 1), filler=None)
    talk.admit(talk.message(20), prefix=())
    for _ in range(6):
        talk.turn(20, 13)
    assert talk.live_turns[1:] == [0, 1, 1, 1, 1, 1]
    assert talk.conversation.filler_rows == []
    assert cuts(talk.session.events)[0] == (100, ((32, 48),)), "of [22, 61): what is whole blocks of it"
    rows = list(talk.session.view.rows)
    assert rows[:32] == list(range(32))
    assert rows[32:45] == list(range(48, 61)), "the end of the turn that was cut"
    talk.session.check()


@pytest.mark.parametrize("filler", [FILLER, None])
def test_edge_01_blocks_of_one_token_need_no_filler(filler: int | None):
    talk = Dialogue(WholeTurns(2, 1), block_tokens=1, filler=filler)
    talk.admit(talk.message(20), prefix=())
    for _ in range(5):
        talk.turn(7, 5)
    assert talk.conversation.filler_rows == []
    assert FILLER not in talk.session.tokens
    assert list(talk.session.view.rows) == [*range(22), *range(22 + 3 * 18, 22 + 5 * 18)]


def test_edge_02_turns_shorter_than_a_block_are_dropped_without_an_event():
    talk = Dialogue(WholeTurns(3, 1), filler=None)
    talk.admit(talk.message(16), prefix=())
    for _ in range(8):
        talk.turn(1, 1)
    assert talk.live_turns[1:] == [0, 1, 2, 2, 2, 2, 2, 2]
    inside = [each for _, ranges in cuts(talk.session.events) for each in ranges]
    assert all(end - start == 16 for start, end in inside)
    assert len(inside) < 4, "a turn has 9 rows: most hold no whole block"
    talk.session.check()
    kept = talk.session.view.rows
    assert set(range(talk.session.next_row)) - set(kept) == {
        row
        for event in talk.session.events
        for row in range(talk.session.next_row)
        if row not in kept and row < event.at_row
    }


def test_edge_02_one_short_turn_makes_no_event():
    talk = Dialogue(WholeTurns(1, 1), filler=None)
    talk.admit(talk.message(16), prefix=())
    talk.turn(1, 1)
    before = list(talk.session.view.rows)
    talk.admit(talk.message(1))
    assert talk.session.events == []
    assert list(talk.session.view.rows)[: len(before)] == before
    assert talk.live_turns[-1] == 0


def test_claim_s2_08_no_message_is_ever_split_by_a_cut_of_padded_turns():
    talk = Dialogue(WholeTurns(3, 2))
    talk.admit(talk.message(37), prefix=())
    whole: set[tuple[int, int]] = set()
    for at in range(12):
        talk.turn(3 + 7 * at % 31, 5 + 11 * at % 23)
        filler = talk.conversation.filler_rows
        whole |= set(messages(talk.session.tokens, range(talk.session.next_row), filler))
        seen = messages(talk.session.tokens, list(talk.session.view.rows), filler)
        assert set(seen) <= whole
        assert seen[0] == (0, 38)
    assert len(talk.session.events) == 5


def test_claim_s2_08_a_window_does_split_messages():
    """The check above can fail."""
    talk = Dialogue(WindowFifo(96, 16))
    talk.admit(talk.message(14), prefix=())
    for _ in range(4):
        talk.turn(30, 30)
    filler = talk.conversation.filler_rows
    whole = set(messages(talk.session.tokens, range(talk.session.next_row), filler))
    assert not set(messages(talk.session.tokens, list(talk.session.view.rows), filler)) <= whole


def test_the_finish_commit_is_one_feed_before_any_cut():
    talk = Dialogue(WholeTurns(1, 1))
    talk.admit(talk.message(20), talk.message(5))
    talk.answer(4)
    chunk = 5
    last = talk.session.next_row - talk.engine.feeds[-1]
    assert talk.session.tokens[last : last + 2] == [END, NEWLINE]
    assert set(talk.session.tokens[last + 2 :]) == {FILLER}
    assert len(talk.engine.feeds) == 1 + chunk, "the prompt, four tokens of text, then all the rest"
    assert talk.session.events == [], "the turn is over the limit, and is cut when the next message comes"
    talk.admit(talk.message(3))
    assert [event.at_row for event in talk.session.events] == [last + talk.engine.feeds[-2]]


def test_fault_b08_the_filled_block_is_what_a_fresh_prefill_of_its_rows_computes():
    talk = Dialogue(Full())
    talk.admit(talk.message(20), talk.message(5))
    talk.answer(4)
    assert talk.engine.kv(talk.session) == prefilled(talk.session.tokens, range(talk.session.next_row))


def test_fault_b08_also_behind_a_cut():
    talk = Dialogue(WholeTurns(1, 1))
    talk.admit(talk.message(20), prefix=())
    talk.turn(5, 30)
    talk.turn(5, 30)
    (event,) = talk.session.events
    seen = [*range(32), *range(event.at_row, talk.session.next_row)]
    assert talk.engine.kv(talk.session) == prefilled(talk.session.tokens, seen)


def test_fault_b09_the_first_token_is_drawn_from_the_view_that_the_others_see():
    talk = Dialogue(WholeTurns(2, 1), chunk=9)
    talk.admit(talk.message(20), prefix=())
    for _ in range(4):
        talk.turn(25, 6)
        first, *others = [talk.engine.seen[row] for row, _ in talk.sampled[-7:]]
        assert all(first < other for other in others)
        new = {*range(min(others[-1] - first), talk.session.next_row)}
        assert all(other - first <= new for other in others)
    by_hand = Dialogue(Full())
    by_hand.admit(by_hand.message(20), prefix=())
    for turn in range(4):
        if turn > 1:
            by_hand.session.evict([by_hand.session.turns[0]])
        by_hand.turn(25, 6)
    assert talk.engine.kv(talk.session) == by_hand.engine.kv(by_hand.session)


def test_edge_18_filler_is_known_by_its_row_and_not_by_its_id():
    talk = Dialogue(WholeTurns(2, 1))
    talk.admit([FILLER] * 3 + talk.message(15), prefix=())
    talk.admit([100, FILLER, 101, END, NEWLINE])
    talk.session.sampled(FILLER)
    talk.engine.feed(talk.session, [FILLER])
    talk.conversation.scan()
    talk.answer(3)
    filler = talk.conversation.filler_rows
    text = [row for row in range(talk.session.next_row) if talk.session.tokens[row] == FILLER]
    assert sorted(set(text) - set(filler)) == [0, 1, 2, 33, 50]
    assert talk.conversation.text_rows == talk.session.next_row - len(filler)
    assert talk.session.turns == [(32, 64)]


def test_edge_18_filler_that_was_not_fed_as_laid_out_is_an_error():
    talk = Dialogue(Full())
    chunk = talk.conversation.admit([talk.message(20)])
    tokens = list(chunk.tokens)
    tokens[chunk.filler[0]] = 500
    talk.engine.feed(talk.session, tokens)
    with pytest.raises(ValueError, match="row 22 was laid out as filler and is token 500"):
        talk.conversation.scan()


def test_edge_19_an_answer_without_tokens():
    talk = Dialogue(WholeTurns(1, 1))
    talk.admit(talk.message(20), talk.message(5))
    talk.compactor.stop()
    assert talk.session.pending is None
    chunk = talk.conversation.finish()
    assert chunk == Chunk((FILLER,) * 14, tuple(range(14))), "48 slots and the generation prefix are fed"
    talk.feed(chunk)
    assert talk.session.turns == []
    assert talk.conversation.finish() == Chunk(())


def test_edge_19_an_answer_whose_only_token_is_its_end():
    talk = Dialogue(WholeTurns(1, 1))
    talk.admit(talk.message(20), prefix=())
    talk.turn(5, 0)
    assert len(talk.sampled) == 1
    assert talk.session.turns == [(32, 64)]


def test_a_budget_for_filler_ends_in_messages_without_filler():
    talk = Dialogue(WholeTurns(2, 1), filler_rows_max=30)
    talk.admit(talk.message(20), prefix=())
    for _ in range(8):
        talk.turn(6, 9)
    assert len(talk.conversation.filler_rows) <= 30
    assert talk.conversation.unfilled_count > 8
    assert talk.live_turns[1:] == [0, 1, 1, 1, 1, 1, 1, 1]
    talk.session.check()


def test_where_the_model_s_rows_end_the_text_goes_before_filler():
    talk = Dialogue(Full(), rows_max=60)
    talk.admit(talk.message(20), talk.message(5))
    assert talk.session.slot_count == 50
    talk.answer(6)
    assert talk.session.next_row == 58
    assert talk.conversation.unfilled_count == 1
    assert talk.session.turns == [(32, 58)]


def test_where_the_model_s_rows_end_no_filler_takes_the_room_of_what_is_still_to_be_fed():
    messages = [Dialogue(Full()).message(20)] * 2
    for rows_max, filler in ((46, 0), (49, 0), (50, 4), (55, 4), (56, 10), (66, 20)):
        chunk = Dialogue(Full(), rows_max=rows_max).conversation.admit(messages, PREFIX)
        assert (len(chunk.tokens), len(chunk.filler)) == (46 + filler, filler)


def test_where_no_row_is_left_the_last_token_stays_without_kv():
    talk = Dialogue(Full(), rows_max=51)
    talk.admit(talk.message(20), talk.message(5))
    talk.session.sampled(500)
    talk.engine.feed(talk.session, [500])
    talk.conversation.scan()
    talk.session.sampled(END)
    assert talk.conversation.finish() == Chunk(())
    assert talk.session.turns == []
    with pytest.raises(Refused, match="begin a new session"):
        talk.engine.feed(talk.session, [END])


def test_filler_goes_behind_the_separator_and_never_behind_the_generation_prefix():
    talk = Dialogue(Full())
    chunk = talk.conversation.admit([talk.message(3), talk.message(14), talk.message(20)], PREFIX)
    tokens = chunk.tokens
    assert chunk.filler == (*range(5, 16), *range(54, 64))
    assert [tokens[at] for at in (3, 4, 5, 15)] == [END, NEWLINE, FILLER, FILLER]
    assert tokens[30:33] == (END, NEWLINE, tokens[32])
    assert tokens[64:] == PREFIX


def test_the_layout_of_a_conversation_depends_on_nothing_else():
    """So prefixes are found again: with a message more, what came before stays as it was."""
    talk = Dialogue(Full())
    history = [talk.message(length) for length in (3, 14, 20)]
    short = Dialogue(Full()).conversation.admit(history[:2]).tokens
    assert Dialogue(Full()).conversation.admit(history).tokens[: len(short)] == short


def test_the_first_message_is_protected_before_a_window_can_cut_it():
    talk = Dialogue(WindowFifo(160, 64), chunk=48)
    talk.admit(talk.message(250))
    assert talk.session.protected == 256
    assert talk.session.events == []


def test_a_chunk_may_end_between_an_end_and_what_belongs_to_it():
    for chunk in range(1, 40):
        talk = Dialogue(Full(), chunk=chunk)
        talk.admit(*[talk.message(length) for length in (20, 3, 30)], prefix=())
        assert talk.session.turns == [(32, 80)]


def test_a_turn_that_is_brought_back_is_cut_again_in_its_order():
    """Of no turn, it would stay for good, and every restore would make the view longer."""
    talk = Dialogue(WholeTurns(3, 1))
    talk.compactor.archive = True
    talk.admit(talk.message(20), prefix=())
    for _ in range(4):
        talk.turn(10, 12)
    (cut,) = talk.session.events
    rows = talk.session.archive[cut.span].rows
    talk.session.restore(cut.span)
    assert talk.session.turns[0] == (32, 32 + len(rows)) and len(talk.session.turns) == 4
    talk.turn(10, 12)
    assert len(talk.session.turns) == 3
    assert not {*rows} & {*talk.session.view.rows}
    talk.session.check()


def test_edge_22_text_that_is_read_again_makes_no_messages_and_is_a_turn_of_its_own():
    talk = Dialogue(WholeTurns(2, 1))
    talk.admit(talk.message(20), prefix=())
    talk.turn(10, 12)
    half = talk.session.tokens[40:60]
    assert END in half
    before = talk.conversation.message_count
    talk.engine.feed(talk.session, half)
    talk.conversation.repeated(20)
    assert talk.conversation.message_count == before
    assert talk.session.turns == [(32, 64), (64, 84)]
    talk.turn(10, 12)
    assert talk.session.events[0].ranges == ((32, 64),)
    assert talk.session.turns == [(32, 52), (52, 80)]
    assert not talk.conversation.in_message


def test_edge_22_inside_a_message_it_belongs_to_it():
    talk = Dialogue(Full())
    talk.admit(talk.message(20), talk.message(5))
    talk.session.sampled(500)
    talk.engine.feed(talk.session, [500, 600, END, NEWLINE, 700])
    talk.conversation.repeated(4)
    assert talk.conversation.in_message
    assert talk.conversation.message_count == 2
    talk.answer(3)
    assert talk.session.turns == [(32, 64)]
    with pytest.raises(ValueError, match="3 rows are repeated and 0 are new"):
        talk.conversation.repeated(3)


# ---------------------------------------------------------------------------------------- wrong use


def test_rows_that_were_cut_before_they_were_read_are_an_error():
    talk = Dialogue(Full())
    talk.engine.feed(talk.session, talk.text(48))
    talk.session.evict([(0, 16)])
    with pytest.raises(ValueError, match="rows from 0 on were cut before they were read: scan after every"):
        talk.conversation.scan()


def test_what_was_laid_out_is_fed_or_withdrawn_before_more_is():
    talk = Dialogue(Full())
    first = talk.conversation.admit([talk.message(20)])
    with pytest.raises(ValueError, match="32 rows were laid out and are not fed"):
        talk.conversation.admit([talk.message(20)])
    talk.conversation.withdraw()
    assert talk.conversation.filler_rows == []
    assert talk.conversation.admit([talk.message(20)]).filler == first.filler


def test_rows_that_were_not_read_are_an_error():
    talk = Dialogue(Full())
    talk.engine.feed(talk.session, [500])
    with pytest.raises(ValueError, match="were committed and not read"):
        talk.conversation.finish()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "a message ends with an end-of-message id and the separator"),
        ([100, END], "a message ends with"),
        ([100, NEWLINE], "a message ends with"),
        ([100, 101, 102], r"a message ends with .* this one ends with \[101, 102\]"),
        ([100, END, 101, END, NEWLINE], "contains the id of another: escape it"),
    ],
)
def test_a_message_that_is_not_one_is_refused(message: list[int], why: str):
    with pytest.raises(ValueError, match=why):
        Dialogue(Full()).conversation.admit([message])


def test_only_an_end_ends_a_message():
    talk = Dialogue(Full())
    with pytest.raises(ValueError, match="token 500 ends no message"):
        talk.conversation.finish(end=500)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"ends": frozenset()}, "name the ids that end a message"),
        ({"ends": frozenset({7}), "filler": 7}, "filler 7 ends a message"),
        ({"ends": frozenset({7}), "separator": (8, 7)}, "contains none"),
    ],
)
def test_markup_that_contradicts_itself_is_refused(settings, why: str):
    with pytest.raises(ConfigError, match=why):
        Markup(**settings)


def test_filler_is_the_pad_token_unless_that_ends_messages():
    assert filler_id(100, pad=3, ends={7}, used=range(98)) == 3
    assert filler_id(100, pad=7, ends={7}, used=range(98)) == 99
    assert filler_id(100, ends={99}, used=range(98)) == 98
    assert filler_id(100, pad=100, ends={99}, used=range(98)) == 98, (
        "a pad token that the model has no row for"
    )
    assert filler_id(100, pad=7, ends={7}, used=range(100), spare=[7, 200, 5, 6]) == 5
    with pytest.raises(ConfigError, match="all 100 ids are in use"):
        filler_id(100, pad=7, ends={7}, used=range(100), spare=[7])


@pytest.mark.slow
@given(
    size=st.sampled_from([1, 4, 16]),
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 25)), max_size=8),
    chunk=st.integers(1, 60),
    filler=st.sampled_from([FILLER, None]),
    budget=st.sampled_from([None, 20]),
    policy=st.sampled_from([WholeTurns(3, 2), WholeTurns(1, 1), WindowFifo(96, 32), Full()]),
)
def test_any_dialogue_ends_in_whole_messages_and_honest_books(size, turns, chunk, filler, budget, policy):
    talk = Dialogue(
        policy, block_tokens=size, chunk=chunk, filler=filler, filler_rows_max=budget, rows_max=3_000
    )
    talk.admit(talk.message(20), prefix=())
    for asked, answered in turns:
        talk.turn(asked, answered)
    session, conversation = talk.session, talk.conversation
    assert conversation.message_count == 1 + 2 * len(turns)
    assert [session.tokens[row] for row in conversation.filler_rows] == [filler] * len(
        conversation.filler_rows
    )
    told = messages(session.tokens, range(session.next_row), conversation.filler_rows)
    assert len(told) == 1 + 2 * len(turns)
    if filler is not None and budget is None:
        assert all(start % size == 0 for start, _ in told)
        assert session.slot_count % size == 0
    if policy in (WholeTurns(3, 2), WholeTurns(1, 1)):
        assert len(session.turns) <= policy.max_turns
    if isinstance(policy, Full):
        borders = [start for start, _ in told[1::2]] + [session.next_row]
        assert session.turns == list(pairwise(borders))


def known_to(conversation: Conversation) -> dict[str, object]:
    """What decides what it does next."""
    books = ("message_count", "filler_rows", "repeated_rows", "in_message", "text_rows")
    names = (*books, "_border", "_turn", "_scanned")
    return {name: copy(getattr(conversation, name)) for name in names}


@pytest.mark.parametrize("known", [True, False])
def test_a_stream_with_a_past_is_read_once_more_without_its_turns(known: bool):
    """Cut rows too; filler is told from its place where nobody says."""
    talk = Dialogue(WholeTurns(2, 1))
    talk.admit(talk.message(20), prefix=())
    for _ in range(4):
        talk.turn(10, 12)
    talk.admit(talk.message(4))
    turns, events = list(talk.session.turns), list(talk.session.events)
    again = Conversation.resumed(
        talk.session,
        talk.conversation.markup,
        filler_rows=talk.conversation.filler_rows if known else None,
    )
    assert known_to(again) == known_to(talk.conversation)
    assert again.in_message
    assert (talk.session.turns, talk.session.events) == (turns, events)
    talk.conversation = again
    talk.answer(3)
    assert len(talk.session.turns) == len(turns) + 1


def test_edge_15_a_fork_goes_on_with_the_conversation_from_any_row():
    talk = Dialogue(Full())
    talk.admit(talk.message(20), talk.message(5))
    row = talk.session.next_row
    before = known_to(talk.conversation)
    talk.answer(7)
    talk.turn(3, 4)
    earlier = talk.conversation.forked(talk.session.fork(bytes(32), at_row=row))
    assert known_to(earlier) == before
    assert earlier.session.turns == []
    now = talk.conversation.forked(talk.session.fork(bytes(32)))
    assert known_to(now) == known_to(talk.conversation)
    assert now.session.turns == talk.session.turns


def test_edge_15_a_fork_between_a_message_and_its_filler_has_the_turn_too():
    """Else its rows would be of no turn, and never cut."""
    talk = Dialogue(WholeTurns(2, 1))
    talk.admit(talk.message(20), prefix=())
    talk.turn(10, 7)
    (turn,) = talk.session.turns
    ended = max(row for row in range(turn.end) if talk.session.tokens[row] == NEWLINE) + 1
    assert talk.conversation.filler_rows[-1] == turn.end - 1 >= ended
    for row in range(ended - 1, turn.end + 1):
        child = talk.session.fork(bytes(32), at_row=row)
        conversation = talk.conversation.forked(child)
        assert child.turns == [(turn.start, row)]
        assert (conversation.message_count, conversation.in_message) == (3, False)
        child.check()
    inside = talk.session.fork(bytes(32), at_row=ended - 2)
    assert talk.conversation.forked(inside).in_message and inside.turns == []


@pytest.mark.parametrize("row_count", [20, 25])
def test_edge_22_who_reads_a_stream_once_more_takes_repeated_text_for_no_messages(row_count: int):
    """Adopted, or forked: with an odd number of ends among them, the turns would be other pairs from then
    on."""
    talk = Dialogue(Full())
    talk.admit(talk.message(20), prefix=())
    for _ in range(2):
        talk.turn(10, 12)
    text = talk.session.tokens[40 : 40 + row_count]
    assert text.count(END) == (1 if row_count == 20 else 2)
    talk.engine.feed(talk.session, text)
    talk.conversation.repeated(row_count)
    again = Conversation.resumed(
        talk.session,
        talk.conversation.markup,
        filler_rows=talk.conversation.filler_rows,
        repeated_rows=talk.conversation.repeated_rows,
    )
    assert known_to(again) == known_to(talk.conversation)
    before = talk.session.next_row - row_count
    for row in (talk.session.next_row, talk.session.next_row - 3, before):
        child = talk.session.fork(bytes(32), at_row=row)
        forked = talk.conversation.forked(child)
        assert (forked.message_count, forked.in_message) == (5, False)
        assert forked.repeated_rows == [*range(before, row)]
        assert child.turns == [*talk.session.turns[:2], *([(before, row)] if row > before else [])]
    talk.turn(10, 12)
    talk.conversation = Conversation.resumed(
        talk.session, talk.conversation.markup, filler_rows=talk.conversation.filler_rows,
        repeated_rows=again.repeated_rows,
    )  # fmt: skip
    turns = [*talk.session.turns]
    talk.turn(10, 12)
    assert talk.session.turns == [*turns, (turns[-1].end, talk.session.slot_count)]


def test_rows_that_are_adopted_instead_of_computed_are_read_like_others():
    first, second = Dialogue(Full()), Dialogue(Full())
    second.engine = first.engine
    second.session = second.conversation.session = first.engine.session()
    second.compactor.session = second.session
    history = [first.message(length) for length in (20, 30, 40, 3)]
    first.admit(*history)
    chunk = second.conversation.admit(history, PREFIX)
    adopted = second.session.adopt_prefix(chunk.tokens)
    assert adopted == 128
    assert second.conversation.scan() == 3
    second.engine.feed(second.session, chunk.tokens[adopted:])
    second.conversation.scan()
    assert known_to(second.conversation) == known_to(first.conversation)
    assert second.session.turns == first.session.turns == [(32, 112)]


def test_a_stream_that_brings_rows_along_is_read_from_its_first_row():
    engine = SymbolicEngine()
    session = engine.session()
    engine.feed(session, [*range(100, 114), END, NEWLINE, 200, END, NEWLINE, 300, END, NEWLINE])
    conversation = Conversation(session, Markup(frozenset({END}), (NEWLINE,)))
    assert conversation.scan() == 3
    assert session.turns == [(16, 22)]
