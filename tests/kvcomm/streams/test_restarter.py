"""Streams that take over from others, with the text that a policy keeps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.full import Full
from kvcomm.streams.policies.heavy_hitter import HeavyHitter
from kvcomm.streams.policies.restarts import Reprefill, Summary
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.restarter import Carry, Restarter
from kvcomm.streams.session import Session
from tests.kvcomm.streams.dialogue import Dialogue
from tests.kvcomm.streams.symbolic import END, NEWLINE, prefilled


class Moving(Dialogue):
    """A dialogue that never cuts and moves to another stream instead."""

    def __init__(self, policy: Reprefill, *, filler: int | None = 9) -> None:
        super().__init__(Full(), filler=filler)
        self.restarter = Restarter(self.conversation, policy)
        self.carried: list[Carry] = []
        self.computed_again = 0

    def move(self, carry: Carry | None) -> None:
        if carry is None:
            return
        self.carried.append(carry)
        old, self.session = self.session, self.engine.session()
        self.engine.feed(self.session, carry.tokens)
        self.computed_again += len(carry.tokens)
        self.restarter = self.restarter.moved(self.session, carry)
        self.conversation = self.restarter.conversation
        old.close()
        self.compactor.session = self.session
        self.session.check()
        self.engine.pool.check()

    def admit(self, *messages: Sequence[int], **rest: Sequence[int]) -> None:
        self.move(self.restarter.at_admission())
        super().admit(*messages, **rest)


@pytest.mark.parametrize("filler", [9, None])
def test_the_text_that_is_kept_is_that_of_the_cutting_policy_and_nothing_of_the_rest_is_left(filler):
    policy = WholeTurns(4, 2)
    cut, again = Dialogue(policy, filler=filler), Moving(Reprefill(policy), filler=filler)
    for talk in (cut, again):
        talk.admit(talk.message(30 if filler is None else 20), prefix=())
        for turn in range(9):
            talk.turn(10 + turn, 12)
    assert cut.live_turns == again.live_turns
    if filler is not None:
        assert [cut.session.tokens[row] for row in cut.session.view.rows] == again.session.tokens
        assert cut.session.turns == again.session.turns
    assert len(again.carried) == 3
    assert again.computed_again == sum(len(carry.tokens) for carry in again.carried)
    assert again.engine.kv(again.session) == prefilled(again.session.tokens, range(again.session.next_row))
    assert again.session.events == []
    assert cut.engine.kv(cut.session) != again.engine.kv(again.session)


def test_turns_that_are_not_padded_leave_no_parts_behind():
    talk = Moving(Reprefill(WholeTurns(2, 1)), filler=None)
    talk.admit(talk.message(20), prefix=())
    for _ in range(3):
        talk.turn(20, 13)
    assert [carry.turns for carry in talk.carried] == [((22, 61),)]
    assert talk.session.turns == [(22, 61), (61, 100)]


def test_filler_and_what_ends_where_go_along():
    talk = Moving(Reprefill(WholeTurns(2, 1)))
    talk.admit(talk.message(20), prefix=())
    for _ in range(5):
        talk.turn(10, 12)
    assert all(talk.session.tokens[row] == 9 for row in talk.conversation.filler_rows)
    assert talk.session.tokens.count(9) == len(talk.conversation.filler_rows)
    assert talk.conversation.message_count == 11
    assert talk.session.protected == 32
    assert not talk.conversation.in_message


def test_a_window_moves_in_the_middle_of_a_message_and_takes_the_pending_token_along():
    talk = Moving(Reprefill(WindowFifo(96, 32)))
    talk.admit(talk.message(14), talk.message(40))
    token = 0
    while not talk.carried:
        (token,) = talk.text(1)
        if talk.session.pending is not None:
            talk.engine.feed(talk.session, [talk.session.pending])
            talk.conversation.scan()
        talk.session.sampled(token)
        carry = talk.restarter.after_forward()
        if carry:
            assert carry.rows == (*range(16), *range(48, 97))
            assert carry.pending == token
            assert carry.dropped_rows == 32
        talk.move(carry)
    assert talk.session.pending == token
    assert talk.conversation.in_message
    talk.engine.feed(talk.session, [token, END, NEWLINE])
    assert talk.conversation.scan() == 1
    assert talk.session.turns == [(16, 68)]


def test_a_stream_that_stopped_goes_on_until_the_next_message():
    talk = Moving(Reprefill(WindowFifo(96, 32)))
    talk.admit(talk.message(110), prefix=())
    talk.restarter.stop()
    assert talk.restarter.after_forward() is None
    talk.session.sampled(500)
    with pytest.raises(ValueError, match="finish its message first"):
        talk.restarter.at_admission()


def test_a_summary_stands_behind_the_prefix_and_gives_way_to_the_next_one():
    asked: list[tuple[int, list[int]]] = []

    def write(session: Session, dropped: Sequence[int]) -> list[int]:
        """Ask the stream itself: the question and the answer are its rows."""
        talk.engine.feed(session, [11, 12, 13])
        asked.append((session.next_row, list(dropped)))
        return [900 + len(asked)] * 5

    talk = Moving(Summary(WholeTurns(3, 2), write))
    talk.admit(talk.message(20), prefix=())
    said: list[list[int]] = []
    for turn in range(7):
        before = talk.session.next_row
        talk.turn(10, 12 + turn)
        said.append(talk.session.tokens[before:])
    assert len(asked) == len(talk.carried) == 2
    first, second = talk.carried
    assert first.inserted == second.inserted == SlotRange(32, 37)
    assert second.tokens[32:37] == (902,) * 5
    assert 901 not in second.tokens
    assert asked[1][1][:5] == [901] * 5, "the old summary is among what the new one is made of"
    assert 11 not in [*second.tokens[:37]], "what was fed to write it stays behind"
    assert first.turns[0][0] == second.turns[0][0] == 37
    assert talk.live_turns[1:] == [0, 1, 2, 1, 2, 1, 2]


def test_what_is_said_to_write_a_summary_is_no_part_of_the_conversation():
    """Whatever the number of messages that it takes, whether they end or not."""

    def write(session: Session, dropped: Sequence[int]) -> list[int]:
        talk.feed(talk.conversation.admit([talk.message(4)] * 2, (11,)))
        talk.session.sampled(500)
        talk.feed(talk.conversation.finish())
        return [900, END, NEWLINE]

    talk = Moving(Summary(WholeTurns(2, 1), write))
    talk.admit(talk.message(20), prefix=())
    for _ in range(6):
        talk.turn(10, 12)
    assert talk.live_turns[1:] == [0, 1, 1, 1, 1, 1]
    assert talk.conversation.message_count == 13
    assert all(talk.session.tokens[row] == 9 for row in talk.conversation.filler_rows)


def test_a_stream_that_is_cut_while_its_summary_is_written_is_an_error():
    def write(session: Session, dropped: Sequence[int]) -> list[int]:
        session.evict([session.turns[0]])
        return [1]

    talk = Moving(Summary(WholeTurns(1, 1), write))
    talk.admit(talk.message(20), prefix=())
    talk.turn(10, 12)
    with pytest.raises(ValueError, match="was cut while its summary was written"):
        talk.admit(talk.message(3))


def test_a_new_stream_with_other_tokens_is_refused():
    talk = Moving(Reprefill(WholeTurns(1, 1)))
    talk.admit(talk.message(20), prefix=())
    talk.turn(10, 12)
    carry = talk.restarter.at_admission()
    assert carry is not None
    other = talk.engine.session()
    talk.engine.feed(other, [*carry.tokens[:-1], 500])
    with pytest.raises(ValueError, match=r"feed carry.tokens into a new session first"):
        talk.restarter.moved(other, carry)
    cut = talk.engine.session()
    talk.engine.feed(cut, carry.tokens)
    cut.evict([(16, 32)], archive=True)
    with pytest.raises(ValueError, match=r"and nothing else"):
        talk.restarter.moved(cut, carry)
    with pytest.raises(ValueError, match="rows are fed and 32 were carried over"):
        talk.conversation.moved(talk.engine.session(), carry.rows)


def test_attention_of_another_stream_chooses_nothing():
    with pytest.raises(ConfigError, match="'heavy_hitter' goes by attention, and a new stream has none"):
        Reprefill(HeavyHitter(256, 16))
    assert Summary(WholeTurns(2, 1), lambda session, dropped: []).name == "summary turns"
