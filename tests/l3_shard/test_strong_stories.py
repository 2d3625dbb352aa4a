"""Two stories too rare for random runs, told message by message: with the rule that forbids the end, and with
the rule planted away, where the end is a broken promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcomm.wire.messages import StrongAccepted, StrongOrder, StrongPromised, StrongState
from l3_shard import acceptor, proposer, quorum
from l3_shard.ballot import NO_BALLOT, Ballots
from l3_shard.proposer import Accept, Again, Finished, Prepare, Proposal, Step, Turn
from l3_shard.quorum import Quorum

GROUP = Quorum((tuple("xyz"),))
CREATE_P, CREATE_Q = StrongOrder(b"k", "cas", b"", b"p"), StrongOrder(b"k", "cas", b"", b"q")


class Node:
    """An acceptor whose every vote is durable, until it loses its disk."""

    def __init__(self) -> None:
        self.state, self.entry, self.entries = acceptor.EMPTY, 1, dict[str, int]()

    def promise(self, step: Step | None) -> StrongPromised:
        assert isinstance(step, Prepare)
        if step.ballot == NO_BALLOT:
            return StrongPromised(True, self.state, self.entry, dict(self.entries))
        after = acceptor.prepare(self.state, step.ballot)
        self.state = after or self.state
        return StrongPromised(after is not None, self.state, self.entry, dict(self.entries))

    def accept(self, step: Step | None) -> StrongAccepted:
        assert isinstance(step, Accept)
        after = acceptor.accept(self.state, step.ballot, step.register, step.following)
        self.state = after or self.state
        return StrongAccepted(after is not None, self.state.promised, self.entry, dict(self.entries))

    def lose_and_enter(self, name: str, others: list[Node]) -> None:
        """As ``l3_shard.entering`` does it: the others note the entry, then tell what they have."""
        self.state, self.entry = acceptor.EMPTY, self.entry + 1
        for other in others:
            other.entries[name] = self.entry
            self.state = acceptor.learn(self.state, other.state)


def ballots_from(node: str, counter: int) -> Ballots:
    ballots = Ballots(node, 1)
    for _ in range(counter - 1):
        ballots.draw()
    return ballots


def old_promise() -> tuple[Proposal, Step | None]:
    """P has x's promise; x loses its disk and enters; Q decides with x and z under a smaller ballot; then y's
    promise reaches P."""
    x, y, z = Node(), Node(), Node()
    p = Proposal([CREATE_P], GROUP, ballots_from("p", 10))
    ask_p = p.begin()
    assert p.heard("x", x.promise(ask_p)) is None
    x.lose_and_enter("x", [y, z])
    q = Proposal([CREATE_Q], GROUP, ballots_from("q", 5))
    ask_q = q.begin()
    q.heard("x", x.promise(ask_q))
    accept_q = q.heard("z", z.promise(ask_q))
    q.heard("x", x.accept(accept_q))
    decided = q.heard("z", z.accept(accept_q))
    assert isinstance(decided, Finished) and decided.outcomes[0].code == "", "Q has created the record"
    step = p.heard("y", y.promise(ask_p))
    if step is None:
        step = p.heard("z", z.promise(ask_p))
    if isinstance(step, Accept):
        p.heard("y", y.accept(step))
        step = p.heard("z", z.accept(step))
    return p, step


def test_a_promise_from_before_a_lost_disk_does_not_create_a_record_twice():
    _, end = old_promise()
    assert isinstance(end, Finished) and (end.outcomes[0].code, end.outcomes[0].value) == ("conflict", b"q")


def test_if_such_a_promise_counted_two_would_have_created_it(monkeypatch: pytest.MonkeyPatch):
    everybody: Callable[..., list[str]] = list
    monkeypatch.setattr(quorum, "counted", everybody)
    monkeypatch.setattr(proposer, "counted", everybody)
    _, end = old_promise()
    assert isinstance(end, Finished) and end.outcomes[0].code == ""


def learned_register() -> tuple[Step | None, Step | None]:
    """A's register is on y alone.  P has promises of x and z from before.  x loses its disk and learns A's
    register from y; a reader asks x and y; then P's register is accepted by x and z."""
    x, y, z = Node(), Node(), Node()
    a = Proposal([CREATE_Q], GROUP, ballots_from("a", 3))
    ask_a = a.begin()
    a.heard("x", x.promise(ask_a))
    y.accept(a.heard("y", y.promise(ask_a)))
    p = Proposal([CREATE_P], GROUP, ballots_from("p", 7))
    ask_p = p.begin()
    p.heard("x", x.promise(ask_p))
    accept_p = p.heard("z", z.promise(ask_p))
    x.lose_and_enter("x", [y, z])
    read = Proposal([StrongOrder(b"k", "read")], GROUP, ballots_from("r", 1), looks=True)
    look = read.begin()
    read.heard("x", x.promise(look))
    seen = read.heard("y", y.promise(look))
    p.heard("x", x.accept(accept_p))
    return seen, p.heard("z", z.accept(accept_p))


def test_a_register_that_was_only_learned_is_not_read_as_decided():
    seen, end = learned_register()
    assert isinstance(seen, Turn), "the reader has to have it accepted first"
    assert isinstance(end, Finished) and end.outcomes[0].code == ""


def test_if_it_counted_as_a_vote_a_value_would_be_read_that_never_was(monkeypatch: pytest.MonkeyPatch):
    learn = acceptor.learn

    def as_a_vote(state: StrongState, other: StrongState) -> StrongState:
        learned = learn(state, other)
        return StrongState(learned.promised, learned.accepted, learned.register, True)

    monkeypatch.setattr(acceptor, "learn", as_a_vote)
    seen, end = learned_register()
    assert isinstance(seen, Finished) and seen.outcomes[0].value == b"q"
    assert isinstance(end, Finished) and end.outcomes[0].code == "", (
        "and P created the record where there was none"
    )


def late_accept() -> tuple[Step | None, Step | None]:
    """A's register is on y alone, its request to x still on the way.  P has promises of x and z from before.
    x loses what it has and learns A's register from y; then A's request reaches it, then P's.  What A and P
    end with."""
    x, y, z = Node(), Node(), Node()
    a = Proposal([CREATE_Q], GROUP, ballots_from("a", 3))
    ask_a = a.begin()
    a.heard("x", x.promise(ask_a))
    accept_a = a.heard("y", y.promise(ask_a))
    a.heard("y", y.accept(accept_a))
    p = Proposal([CREATE_P], GROUP, ballots_from("p", 7))
    ask_p = p.begin()
    p.heard("x", x.promise(ask_p))
    accept_p = p.heard("z", z.promise(ask_p))
    x.lose_and_enter("x", [y, z])
    end_a = a.heard("x", x.accept(accept_a)) or a.heard("z", z.accept(accept_a))
    p.heard("x", x.accept(accept_p))
    return end_a, p.heard("z", z.accept(accept_p))


def test_a_register_that_was_only_learned_is_not_agreed_to_when_its_request_comes():
    end_a, end_p = late_accept()
    assert isinstance(end_a, Again), "x has promised P more since"
    assert isinstance(end_p, Finished) and end_p.outcomes[0].code == ""
