"""``run_steps``: the third driver of ``kvcomm.steps``, in virtual time, beside the two real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvcomm.chaos.network import Peers, Request
from kvcomm.errors import KVCommError
from kvcomm.steps import Answer, Call, Park, Step, Steps, Submit, Wait, WaitAny

T = TypeVar("T")

Done = Callable[[T | None, KVCommError | None], None]
"""Called once: with the result, or with the error that the operation raised."""


def run_steps(steps: Steps[T], peers: Peers, deadline: float, done: Done[T]) -> None:
    """Run an operation; ``deadline`` is absolute seconds of the host's clock.  What it emits is dropped."""
    _Operation(steps, peers, deadline, done).resume(None)


class _Operation(Generic[T]):
    def __init__(self, steps: Steps[T], peers: Peers, deadline: float, done: Done[T]) -> None:
        self._steps, self._peers, self._deadline, self._done = steps, peers, deadline, done
        self._requests: list[Request] = []

    def resume(self, value: Any) -> None:
        """Go on until it waits for something."""
        try:
            while True:
                step: Step = self._steps.send(value)
                if isinstance(step, Submit):
                    value = self._submit(step)
                elif isinstance(step, Wait):
                    request: Request = step.call.handle
                    if request.exchange.answer is None:
                        request.then = self._answered
                        return
                    value = request.exchange.answer
                elif isinstance(step, WaitAny):
                    if (done := _done(step)) is None:
                        self._wait_any(step)
                        return
                    value = done
                elif isinstance(step, Park):
                    self._park(step)
                    return
                else:
                    value = None
        except StopIteration as end:
            self._end(end.value, None)
        except KVCommError as error:
            self._end(None, error)

    def _submit(self, step: Submit) -> list[Call]:
        started = self._peers.start(step.asks, self._deadline)
        self._requests += started
        return [Call(request.exchange.ask, request) for request in started]

    def _answered(self, answer: Answer) -> None:
        """Not at once: the connection is in the middle of something."""
        self._peers.host.soon(lambda: self.resume(answer))

    def _wait_any(self, step: WaitAny) -> None:
        waiting = True

        def wake() -> None:
            nonlocal waiting
            if waiting:
                waiting = False
                for call in step.calls:
                    call.handle.then = None
                self.resume(_done(step))

        for call in step.calls:
            call.handle.then = lambda _: self._peers.host.soon(wake)
        if step.timeout_s is not None:
            self._peers.host.after(step.timeout_s, wake)

    def _park(self, park: Park) -> None:
        left_s = self._deadline - self._peers.host.clock()
        timeout_s = left_s if park.timeout_s is None else min(left_s, park.timeout_s)
        parked = True

        def wake(done: bool) -> None:
            nonlocal parked
            if parked:
                parked = False
                self.resume(done)

        self._peers.host.after(timeout_s, lambda: wake(False))
        park.waiter.add_callback(lambda: self._peers.host.soon(lambda: wake(True)))

    def _end(self, result: T | None, error: KVCommError | None) -> None:
        for request in self._requests:
            self._peers.give_up(request, "given up by its operation")
        self._done(result, error)


def _done(step: WaitAny) -> Call | None:
    return next((call for call in step.calls if call.handle.exchange.answer is not None), None)
