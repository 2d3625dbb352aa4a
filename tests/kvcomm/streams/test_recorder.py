"""What a recorder writes down beside its session."""

import pytest

from kvcomm.errors import TokenError
from kvcomm.streams.events import ROOT_DIGEST
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Sample, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace

PLAIN = Sampling()


def recorder(tokens: list[int] | None = None) -> Recorder:
    session = Session(BlockPool(50), namespace(block_tokens=4, vocab_size=100), rows_max=1_000)
    feed(session, tokens or [])
    return Recorder(session, "one")


def feed(session: Session, tokens: list[int]) -> None:
    if tokens:
        session.commit(session.plan(tokens))


def test_a_sample_is_of_the_last_row_and_its_token_is_the_next_row():
    writing = recorder([1, 2, 3])
    sample = writing.sampled(7, -0.5, Sampling(0.7, 20, 0.9))
    assert sample == Sample(2, 7, -0.5, Sampling(0.7, 20, 0.9))
    assert writing.session.pending == 7
    feed(writing.session, [7, 8])
    writing.sampled(9, -1.5, PLAIN, loss=False)
    found = writing.rollout()
    assert found.tokens == (1, 2, 3, 7, 8)
    assert [(each.query_row, each.token, each.loss) for each in found.samples] == [
        (2, 7, True),
        (4, 9, False),
    ]


def test_what_the_session_or_the_sample_refuses_is_not_recorded():
    empty = recorder()
    with pytest.raises(ValueError, match="one token is sampled a row"):
        empty.sampled(7, -0.5, PLAIN)
    writing = recorder([1])
    for logprob in (float("nan"), float("-inf"), float("inf"), 0.5):
        with pytest.raises(ValueError, match="probability"):
            writing.sampled(7, logprob, PLAIN)
    with pytest.raises(TokenError):
        writing.sampled(100, -0.5, PLAIN)
    assert writing.session.pending is None
    writing.sampled(7, -0.5, PLAIN)
    with pytest.raises(ValueError, match="one token is sampled a row"):
        writing.sampled(8, -0.5, PLAIN)
    assert not empty.samples
    assert len(writing.samples) == 1


def test_edge_18_fillers_are_marked_by_row_not_by_id():
    writing = recorder([5, 0, 5])  # 0 is text here
    writing.sampled(0, -0.5, PLAIN)
    feed(writing.session, [0, 0, 0, 0, 0])
    writing.filler(4)
    found = writing.rollout()
    assert found.filler_rows == (4, 5, 6, 7)
    assert found.text() == (5, 0, 5, 0)


def test_a_sampled_row_or_a_marked_one_is_no_filler():
    writing = recorder([1, 2])
    writing.sampled(3, -0.5, PLAIN)
    feed(writing.session, [3, 0, 0])
    for count in (3, 4, 5):
        with pytest.raises(ValueError, match="row 2 was sampled"):
            writing.filler(count)
    for count in (6, -1):
        with pytest.raises(ValueError, match="5 were fed"):
            writing.filler(count)
    writing.filler(1)
    writing.filler(0)
    for count in (1, 2):
        with pytest.raises(ValueError, match="row 4 was the last"):
            writing.repeated(count)
    assert (writing.filler_rows, writing.repeated_rows) == ([4], [])


def test_filler_may_stand_behind_each_message_of_a_chunk():
    writing = recorder([1, 2, 0, 0, 5, 6, 7, 0])
    writing.filler_at((2, 3, 7))
    assert writing.rollout().text() == (1, 2, 5, 6, 7)
    feed(writing.session, [1, 2, 3])
    for rows, says in (
        ((9, 8), "in order"),
        ((9, 9), "in order"),
        ((7,), "row 7 was the last"),
        ((11,), "11 were"),
    ):
        with pytest.raises(ValueError, match=says):
            writing.filler_at(rows)
    assert writing.filler_rows == [2, 3, 7]


def test_edge_19_a_rollout_without_a_completion_or_without_anything():
    assert recorder([1, 2, 3]).rollout().samples == ()
    nothing = recorder().rollout()
    assert (nothing.row_count, nothing.event_count, nothing.view_digest) == (0, 0, ROOT_DIGEST)
    assert nothing.visibility().intervals == ()


def test_edge_09_the_last_token_has_no_row_and_a_cut_comes_before_it():
    writing = recorder(list(range(1, 14)))
    writing.sampled(50, -0.5, PLAIN)
    writing.session.evict([(4, 8)])
    last = writing.rollout()
    assert last.samples[-1].query_row == 12 == last.row_count - 1
    feed(writing.session, [50])
    seen = writing.rollout().visibility()
    assert not seen.sees(13, 4)
    assert seen.sees(12, 4)


def test_edge_15_a_fork_inherits_samples_and_learns_from_them_once():
    parent = recorder([1, 2, 3])
    parent.sampled(4, -0.5, PLAIN)
    feed(parent.session, [4, 0])
    parent.filler(1)
    parent.sampled(6, -0.25, PLAIN)
    child_session = parent.session.fork(bytes(range(32)))
    child = parent.fork(child_session, "child", loss=False)
    feed(child_session, [6])
    child.sampled(7, -0.75, PLAIN)
    found = child.rollout()
    assert [(each.token, each.loss) for each in found.samples] == [(4, False), (6, False), (7, True)]
    assert found.filler_rows == (4,)
    assert found.events[-1].kind == "fork"
    feed(parent.session, [6])
    assert all(each.loss for each in parent.rollout().samples)
    kept = parent.fork(parent.session.fork(bytes(32)), "only", loss=True)
    assert all(each.loss for each in kept.samples)
    again = child.fork(child.session.fork(bytes(32)), "grandchild", loss=True)
    assert [each.loss for each in again.samples] == [False, False, True]


def test_edge_15_a_fork_of_an_earlier_row_forgets_what_came_after():
    parent = recorder([1, 2, 3])
    parent.sampled(4, -0.5, PLAIN)
    feed(parent.session, [4, 0])
    parent.filler(1)
    parent.sampled(6, -0.25, PLAIN)
    feed(parent.session, [6, 0])
    parent.filler(1)
    session = parent.session.fork(bytes(32), at_row=5)
    child = parent.fork(session, "repair", loss=True)
    assert [each.token for each in child.samples] == [4]
    assert child.filler_rows == [4]
    child.sampled(7, -0.5, PLAIN)  # another token than the parent's, of the same row
    feed(session, [7])
    assert child.rollout().tokens == (1, 2, 3, 4, 0, 7)


def test_a_context_that_was_adopted_brings_its_marks():
    session = recorder([1, 0, 1, 0]).session
    writing = Recorder(session, "two", filler_rows=(1, 3), repeated_rows=(2,))
    assert writing.text() == (1,)
    feed(session, [5, 0])
    writing.filler(1)
    found = writing.rollout()
    assert (found.filler_rows, found.repeated_rows, found.text()) == ((1, 3, 5), (2,), (1, 5))


def test_edge_22_rows_of_a_lost_span_are_said_to_be_repetitions():
    writing = recorder([1, 2, 3, 4])
    feed(writing.session, [1, 2])
    writing.repeated(2)
    found = writing.rollout()
    assert found.repeated_rows == (4, 5)
    assert found.text() == (1, 2, 3, 4)


def test_a_rollout_does_not_change_with_what_follows():
    writing = recorder([1, 2, 3, 4, 5, 6, 7, 8])
    before = writing.rollout()
    writing.session.evict([(0, 4)])
    writing.sampled(7, -0.5, PLAIN)
    assert before.events == ()
    assert before.samples == ()


def test_fault_b07_a_rendered_prompt_is_compared_by_ids():
    writing = recorder([1, 2, 3])
    writing.sampled(4, -0.5, PLAIN)
    feed(writing.session, [4, 0, 0])
    writing.filler(2)
    writing.sampled(9, -0.5, PLAIN)
    assert writing.rest_of([1, 2, 3, 4, 9, 5, 6]) == (5, 6)
    assert writing.rest_of([1, 2, 3, 4, 9]) == ()
    for other, at in (([1, 2, 8, 4, 9, 5], 2), ([1, 2, 3, 4], 4), ([1, 2, 3, 4, 0, 0, 9], 4), ([], 0)):
        with pytest.raises(TokenError, match=f"at token {at} of 5"):
            writing.rest_of(other)
