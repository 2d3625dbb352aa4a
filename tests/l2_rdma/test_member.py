"""One pool through its ups and downs, with a clock that is turned by hand."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.attachment import AttachOptions, Unusable
from l2_rdma.ledger import Ledger
from l2_rdma.member import Attempt, Member
from l2_rdma.rack import BACKOFF_FIRST_S, BACKOFF_MAX_S, Pool
from l2_rdma.reader import ReaderCounters
from l2_rdma.wires import Wires
from tests.peers import IDENTITY, until


class Attached:
    """What a member needs of an attachment."""

    transport = "tcp"

    def __init__(self, *, unusable: dict[str, str] | None = None) -> None:
        self.counters = ReaderCounters()
        self.closed = threading.Event()
        self.failure: Unavailable | None = None
        self.silent = False
        self.lives = True

        self.refused = SimpleNamespace(unusable=unusable or {}, unused={"cuda": "slower"})

    def alive(self, now: float) -> bool:
        return self.lives

    def close(self) -> None:
        self.closed.set()


class World:
    """A member whose attempts end as they are told, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.outcomes: list[Any] = []
        self.ledger = Ledger()
        monkeypatch.setattr("l2_rdma.member.attach", self._attach)
        wires = Wires(("shm", "verbs", "tcp", "cuda"))
        options = AttachOptions(prefault=False)
        pool = Pool("pool-0", "unix:///nowhere")
        self.member = Member(pool, IDENTITY, wires, options, self.ledger, lambda: self.now)

    def try_once(self, outcome: Any) -> Attempt | None:
        """Make the attempt that is due, if one is, and wait for its end."""
        self.outcomes.append(outcome)
        _, attempt = self.member.current()
        until(lambda: self.member._attempt is None)
        if attempt is None:
            self.outcomes.pop()
        return attempt

    def _attach(self, *arguments: Any) -> Any:
        outcome = self.outcomes.pop()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_before_anything_it_is_alive_and_a_home(world: World) -> None:
    view = world.member.view()
    assert (view.state, view.transport, view.problem, dict(view.refused)) == ("alive", "", "", {})
    assert world.member.is_home and world.member.may_put()
    assert world.member.current(start=False) == (None, None)


def test_failed_attempts_are_spaced_and_only_the_first_is_waited_for(world: World) -> None:
    first = world.try_once(Unavailable("nobody listens"))
    assert first is not None and first.awaited
    assert not world.member.is_home and world.member.view().problem == "nobody listens"
    assert world.try_once(Unavailable("")) is None, "it is left alone"

    world.now += BACKOFF_FIRST_S
    second = world.try_once(Unavailable("still nobody"))
    assert second is not None and not second.awaited
    world.now += BACKOFF_FIRST_S
    assert world.try_once(Unavailable("")) is None, "twice as long now"

    world.now += BACKOFF_MAX_S
    attachment = Attached()
    assert world.try_once(attachment) is not None
    assert world.member.current()[0] is attachment  # type: ignore[comparison-overlap]
    assert world.member.is_home and world.member.view().problem == ""
    world.member.close()


def test_a_pool_that_ends_is_tried_again_at_once_and_one_that_is_silent_is_not(world: World) -> None:
    ended, silent = Attached(), Attached()
    world.try_once(ended)
    ended.lives = False
    again = world.try_once(silent)
    assert again is not None and again.awaited
    assert ended.closed.is_set() and world.ledger.lost_count == 1

    silent.failure, silent.silent = Unavailable("no answer in time"), True
    world.member.judge(silent)  # type: ignore[arg-type]
    world.member.judge(silent)  # type: ignore[arg-type]
    assert silent.closed.is_set() and world.ledger.lost_count == 2, "once"
    view = world.member.view()
    assert (view.state, view.problem) == ("away", "no answer in time")
    assert world.try_once(Attached()) is None


def test_an_attachment_that_has_not_failed_is_kept_and_an_old_one_says_nothing(world: World) -> None:
    old, new = Attached(), Attached()
    world.try_once(old)
    world.member.judge(old)  # type: ignore[arg-type]
    assert world.member.holds(old)  # type: ignore[arg-type]
    old.lives = False
    world.try_once(new)
    old.failure = Unavailable("late news")
    world.member.judge(old)  # type: ignore[arg-type]
    assert world.member.holds(new)  # type: ignore[arg-type]
    world.member.close()
    assert new.closed.is_set()


def test_what_is_passed_over_is_what_stands_before_and_cannot_be_used(world: World) -> None:
    attachment = Attached(unusable={"shm": "another host", "cuda": "no GPU"})
    world.try_once(attachment)

    assert world.ledger.fallbacks() == {("shm", "tcp"): 1}, "cuda comes after tcp, verbs could be used"
    view = world.member.view()
    assert view.transport == "tcp" and dict(view.refused) == {"shm": "another host", "cuda": "slower"}
    world.member.close()


def test_a_pool_that_nothing_reaches_is_counted_once_for_the_same_reasons(world: World) -> None:
    for reason in ("no GID", "no GID", "no device"):
        world.try_once(Unusable({"verbs": reason}))
        world.now += BACKOFF_MAX_S
    assert world.ledger.fallbacks() == {("verbs", "none"): 2}


def test_puts_that_are_not_answered_are_left_out_for_a_while(world: World) -> None:
    member = world.member
    member.put_answered(False)
    assert not member.may_put() and member.is_home, "its memory may be read as before"
    world.now += BACKOFF_FIRST_S
    assert member.may_put()
    member.put_answered(False)
    world.now += BACKOFF_FIRST_S
    assert not member.may_put()
    member.put_answered(True)
    assert member.may_put()


def test_a_member_that_is_closed_attaches_no_more(world: World) -> None:
    late = Attached()
    entered, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Attached:
        entered.set()
        assert go_on.wait(10)
        return late

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("l2_rdma.member.attach", slow)
        _, attempt = world.member.current()
        assert attempt is not None and entered.wait(10)
        world.member.close()
        go_on.set()
        until(late.closed.is_set)
    assert world.member.current() == (None, None)


def test_whoever_waits_for_an_attempt_is_called_once() -> None:
    attempt, called = Attempt(awaited=True), list[str]()
    attempt.add_callback(lambda: called.append("before"))
    attempt.finish()
    attempt.finish()
    attempt.add_callback(lambda: called.append("after"))
    assert called == ["before", "after"]
