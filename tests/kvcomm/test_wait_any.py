"""``WaitAny`` means the same to the blocking and to the asyncio driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcomm.rpc import AsyncPeers, Peers, run_async, run_blocking
from kvcomm.steps import Answer, Ask, Call, Steps, Submit, Wait, WaitAny
from kvcomm.wire.messages import BlockGet, Failure, RecordPut, RingGet
from tests.peers import IDENTITY, KeyValues, Served, served, soon

UNANSWERED = RecordPut(1, [])
Run = Callable[[Steps[Any]], Any]


def blocking(steps: Steps[Any]) -> Any:
    peers = Peers(IDENTITY)
    try:
        return run_blocking(steps, peers, soon())
    finally:
        peers.close()


def in_loop(steps: Steps[Any]) -> Any:
    async def main() -> Any:
        peers = AsyncPeers(IDENTITY)
        try:
            return await run_async(steps, peers, soon())
        finally:
            await peers.close()

    return asyncio.run(main())


@pytest.fixture(params=[blocking, in_loop], ids=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    driver: Run = request.param
    return driver


@pytest.fixture
def server() -> Iterator[Served]:
    with served(KeyValues()) as running:
        yield running


def test_the_one_that_is_done_is_told_and_the_others_go_on(run: Run, server: Served) -> None:
    def steps() -> Steps[tuple[int, Answer, Call | None, Answer]]:
        calls: list[Call] = yield Submit(
            [
                Ask(server.address, UNANSWERED, timeout_s=0.2),
                Ask(server.address, RingGet()),
                Ask(server.address, BlockGet(0, [b"big"])),
            ]
        )
        done: Call = yield WaitAny(calls[:2])
        first = yield Wait(done)
        third: Call | None = yield WaitAny([calls[2], calls[0]], 30.0)
        last = yield Wait(calls[0])
        return calls.index(done), first, third, last

    index, first, third, last = run(steps())
    assert index == 1 and not isinstance(first.message, Failure)
    assert third is not None and third.ask.message == BlockGet(0, [b"big"])
    assert isinstance(last.message, Failure), "its own time limit still holds"


def test_nobody_in_time_is_none_and_a_later_wait_has_the_answer(run: Run, server: Served) -> None:
    def steps() -> Steps[tuple[Call | None, float, Answer]]:
        [silent] = yield Submit([Ask(server.address, UNANSWERED, timeout_s=0.2)])
        began = time.monotonic()
        done = yield WaitAny([silent], 0.02)
        waited_s = time.monotonic() - began
        return done, waited_s, (yield Wait(silent))

    done, waited_s, answer = run(steps())
    assert done is None and waited_s >= 0.02 and isinstance(answer.message, Failure)


def test_a_call_that_runs_out_of_its_own_time_is_done(run: Run, server: Served) -> None:
    def steps() -> Steps[bool]:
        [silent] = yield Submit([Ask(server.address, UNANSWERED, timeout_s=0.02)])
        done = yield WaitAny([silent])
        return done is silent

    assert run(steps())


def test_what_has_come_meanwhile_is_seen_without_waiting(run: Run, server: Served) -> None:
    """Whoever drives an operation may have been away for longer than the time limit."""

    def steps() -> Steps[bool]:
        [asked] = yield Submit([Ask(server.address, RingGet())])
        yield Wait(asked)  # so that the connection stands
        [again, silent] = yield Submit(
            [Ask(server.address, RingGet()), Ask(server.address, UNANSWERED, timeout_s=0.2)]
        )
        while (done := (yield WaitAny([again, silent], 0.0))) is None:
            assert time.monotonic() < limit
        return bool(done is again)

    limit = soon()
    assert run(steps())
