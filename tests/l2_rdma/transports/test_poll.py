"""One thread polls for all that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.poll import PollLoop
from l2_rdma.transports.port import Operation
from tests.peers import PATIENCE_S, soon, until


class Wire:
    """Ends what it is told to, and what is overdue; counts how many threads poll."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.changed = threading.Condition()
        self.ready: list[Operation] = []
        self.pollers: set[int] = set()
        self.polling = 0
        self.polled = 0

    def post(self, deadline: float | None = None) -> Operation:
        operation = Operation(soon() if deadline is None else deadline)
        with self.changed:
            self.operations.append(operation)
            self.changed.notify_all()  # the leader's time may be shorter now
        return operation

    def finish(self, *operations: Operation) -> None:
        with self.changed:
            self.ready += operations
            self.changed.notify_all()

    def poll(self, timeout_s: float) -> None:
        with self.changed:
            self.polling += 1
            assert self.polling == 1, "two threads poll at once"
            self.pollers.add(threading.get_ident())
            self.polled += 1
            self.changed.notify_all()
            if not self.ready:
                first = min((each.deadline for each in self.operations), default=time.monotonic() + timeout_s)
                self.changed.wait(max(0.0, min(timeout_s, first - time.monotonic())))
            for operation in self.ready:
                self.operations.remove(operation)
                operation.complete()
            self.ready.clear()
            for operation in [each for each in self.operations if each.deadline <= time.monotonic()]:
                self.operations.remove(operation)
                operation.fail(Unavailable("its time is over"))
            self.polling -= 1


class Waiting(threading.Thread):
    def __init__(self, loop: PollLoop, *operations: Operation) -> None:
        super().__init__(daemon=True)
        self._loop, self._operations = loop, operations
        self.start()

    def run(self) -> None:
        self._loop.wait(self._operations)

    def done(self) -> None:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        assert all(operation.done for operation in self._operations)


def test_what_is_done_is_not_waited_for():
    def poll(timeout_s: float) -> None:
        raise AssertionError("nobody needs it")

    operation = Operation(soon())
    operation.complete()
    loop = PollLoop(poll)

    loop.wait([])
    loop.wait([operation])


def test_a_single_waiter_polls_in_its_own_thread():
    wire = Wire()
    operation = wire.post()
    wire.finish(operation)

    PollLoop(wire.poll).wait([operation])

    assert wire.pollers == {threading.get_ident()}


def test_the_poll_is_given_the_time_that_is_left_and_never_less_than_none():
    given = []
    now = iter([5.0, 9.5, 30.0])
    operation = Operation(deadline=10.0)

    def poll(timeout_s: float) -> None:
        given.append(timeout_s)
        if len(given) == 3:
            operation.fail(Unavailable("its time is over"))

    PollLoop(poll, clock=lambda: next(now)).wait([operation])

    assert given == [5.0, 0.5, 0.0]


def test_one_of_many_polls_for_all():
    wire = Wire()
    loop = PollLoop(wire.poll)
    operations = [wire.post() for _ in range(6)]
    threads = [Waiting(loop, operation) for operation in operations]
    until(lambda: loop._follower_count == 5)

    wire.finish(*operations)

    for thread in threads:
        thread.done()
    assert len(wire.pollers) == 1


def test_the_lead_goes_to_another_when_the_leader_has_what_it_wants():
    wire = Wire()
    loop = PollLoop(wire.poll)
    first, second = wire.post(), wire.post()
    leading = Waiting(loop, first)
    until(lambda: wire.polled > 0)
    following = Waiting(loop, second)
    until(lambda: loop._follower_count == 1)

    wire.finish(first)
    leading.done()
    until(lambda: len(wire.pollers) == 2)
    wire.finish(second)

    following.done()


def test_a_follower_is_kept_to_its_own_deadline():
    wire = Wire()
    loop = PollLoop(wire.poll)
    long, short = wire.post(soon(60)), wire.post(soon(0.05))
    leading = Waiting(loop, long)
    until(lambda: wire.polled > 0)
    Waiting(loop, short).done()

    assert isinstance(short.error, Unavailable)
    assert not long.done
    wire.finish(long)
    leading.done()


def test_a_poll_that_fails_gives_the_lead_up():
    wire = Wire()
    operation = wire.post()
    broken = [True]

    def poll(timeout_s: float) -> None:
        if broken:
            broken.clear()
            raise OSError("the wire is gone")
        wire.poll(timeout_s)

    loop = PollLoop(poll)
    with pytest.raises(OSError, match="gone"):
        loop.wait([operation])
    wire.finish(operation)

    loop.wait([operation])


def test_who_is_interrupted_when_it_takes_the_lead_does_not_keep_it(monkeypatch):
    wire = Wire()
    operation = wire.post()
    wire.finish(operation)
    loop = PollLoop(wire.poll)
    lead = loop._lead

    def interrupted(*arguments):
        assert lead(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_lead", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.wait([operation])
    monkeypatch.undo()

    Waiting(loop, operation).done()


def test_who_is_interrupted_keeps_no_lock(monkeypatch):
    """A condition that is entered itself runs Python code that a signal can end, with its lock held."""
    wire = Wire()
    operation = wire.post()
    loop = PollLoop(wire.poll)
    enter = threading.Condition.__enter__

    def interrupted(condition):
        enter(condition)
        assert condition is not loop._changed
        return True

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    wire.finish(operation)
    loop.wait([operation])


def test_a_follower_without_a_deadline_follows():
    wire = Wire()
    loop = PollLoop(wire.poll)
    first, endless = wire.post(), wire.post(float("inf"))
    leading = Waiting(loop, first)
    until(lambda: wire.polled > 0)
    following = Waiting(loop, endless)
    until(lambda: loop._follower_count == 1)

    wire.finish(first, endless)

    leading.done()
    following.done()


class Watched(Operation):
    """Calls ``looked`` whenever somebody finds it not done, and answers what was true before."""

    def __init__(self, deadline: float) -> None:
        self.looked: Callable[[], None] | None = None
        super().__init__(deadline)

    @property
    def done(self) -> bool:
        was: bool = self._done
        if not was and self.looked is not None:
            self.looked()
        return was

    @done.setter
    def done(self, value: bool) -> None:
        self._done = value


def test_an_operation_that_ends_while_its_follower_looks_wakes_it():
    """Not a moment of the follower's is lost: the leader has something else to wait for, for long."""
    wire = Wire()
    loop = PollLoop(wire.poll)
    long = wire.post(soon(60))
    leading = Waiting(loop, long)
    until(lambda: wire.polled == 1)

    watched, looks = Watched(soon(60)), []

    def looked() -> None:
        looks.append(1)
        if len(looks) < 2:  # the first look is before it follows, the second is the follower's
            return
        watched.looked = None
        wire.finish(watched)
        begun = time.monotonic()
        while wire.polled < 2 and time.monotonic() < begun + 0.2:  # until the leader has gone on, if it can
            time.sleep(0.001)

    watched.looked = looked
    with wire.changed:
        wire.operations.append(watched)
    following = Waiting(loop, watched)

    following.done()
    assert len(looks) == 2
    wire.finish(long)
    leading.done()
