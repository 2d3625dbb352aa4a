"""The asyncio client, against real servers and against peers that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvcomm.errors import ConfigError, Unauthenticated, Unavailable
from kvcomm.rpc import AsyncPeers, Identity, asynchronous, iterate_async, run_async
from kvcomm.rpc.asynchronous import WORKERS
from kvcomm.steps import Answer, Ask, Emit, Steps, Submit, Wait, Work, ask_all
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockPut,
    BlockStored,
    Done,
    Failure,
    Goodbye,
    Message,
    RecordPut,
    RingGet,
    Want,
)
from tests.peers import (
    IDENTITY,
    PATIENCE_S,
    Dialogue,
    KeyValues,
    Served,
    ask,
    dead_address,
    leaving,
    scripted,
    served,
    soon,
    until,
)

PUT = RecordPut(0, [])


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60.0))


@asynccontextmanager
async def peers_of(identity: Identity = IDENTITY, **options: Any) -> AsyncIterator[AsyncPeers]:
    peers = AsyncPeers(identity, **options)
    try:
        yield peers
    finally:
        await peers.close()


async def eventually(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition)


def code(answer: Answer) -> str:
    assert isinstance(answer.message, Failure), answer.message
    return answer.message.code


@pytest.fixture
def service() -> KeyValues:
    return KeyValues()


@pytest.fixture(params=["tcp", "unix", "name"])
def server(request: pytest.FixtureRequest, service: KeyValues, runtime_dir: Path) -> Iterator[Served]:
    addresses = {"tcp": "tcp://127.0.0.1:0", "unix": f"unix://{runtime_dir}/s", "name": "tcp://localhost:0"}
    with served(service, addresses[request.param]) as serving:
        yield serving


def test_one_connection_carries_many_operations(server: Served, service: KeyValues) -> None:
    service.values = {b"%d" % n: b"%d" % n * 1_000 for n in range(60)}

    async def main() -> None:
        async with peers_of() as peers:

            async def get(n: int) -> bytes:
                answer = await run_async(ask(Ask(server.address, BlockGet(0, [b"%d" % n]))), peers, soon())
                return b"".join(answer.payload)

            assert await asyncio.gather(*[get(n) for n in range(60)]) == [
                b"%d" % n * 1_000 for n in range(60)
            ]
            welcome = await peers.welcome(server.address, soon())
            assert (welcome.node, welcome.region) == ("n1", "/region")

    run(main())
    assert len(service.welcomed) == 1
    until(lambda: len(service.ended) == 1)


def test_both_sides_with_full_hands_do_not_lock_each_other(server: Served, service: KeyValues) -> None:
    big = os.urandom(4 << 20)
    service.values[b"big"] = big

    def steps() -> Steps[list[Answer]]:
        asks = []
        for n in range(12):
            asks.append(Ask(server.address, BlockGet(0, [b"big"])))
            asks.append(Ask(server.address, BlockPut(0, [Want(b"%d" % n, len(big))]), [big]))
        return (yield from ask_all(asks))

    async def main() -> None:
        async with peers_of() as peers:
            answers = await run_async(steps(), peers, soon(30.0))
        assert [type(answer.message) for answer in answers] == [BlockCopies, BlockStored] * 12
        assert all(b"".join(answer.payload) == big for answer in answers[::2])

    run(main())
    assert all(service.values[b"%d" % n] == big for n in range(12))


def test_a_slow_reply_does_not_hold_up_the_others(server: Served, service: KeyValues) -> None:
    async def main() -> None:
        async with peers_of() as peers:
            slow = asyncio.create_task(run_async(ask(Ask(server.address, PUT)), peers, soon()))
            await eventually(lambda: len(service.held) == 1)
            assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()
            assert not slow.done()
            await asyncio.to_thread(server.call, lambda: service.held[0](Done()))
            assert (await slow).message == Done()

    run(main())


def test_emitted_items_come_out_as_they_are_made(server: Served) -> None:
    closed = []

    def steps() -> Steps[int]:
        try:
            for n in range(3):
                yield from ask(Ask(server.address, RingGet()))
                yield Emit(n)
        finally:
            closed.append(True)
        return 5

    async def main() -> None:
        async with peers_of() as peers:
            assert [item async for item in iterate_async(steps(), peers, soon())] == [0, 1, 2]
            async with aclosing(iterate_async(steps(), peers, soon())) as items:
                assert await anext(items) == 0
            assert await run_async(steps(), peers, soon()) == 5

    run(main())
    assert closed == [True] * 3


def test_nobody_there_is_told_at_once() -> None:
    async def main() -> None:
        async with peers_of() as peers:
            begin = time.monotonic()
            answers = await run_async(
                ask_all(
                    [
                        Ask(dead_address(), PUT),
                        Ask("unix:///nowhere/s", PUT),
                        Ask("tcp://no.such.invalid:1", PUT),
                    ]
                ),
                peers,
                soon(),
            )
            assert [code(answer) for answer in answers] == ["unavailable"] * 3
            assert time.monotonic() - begin < PATIENCE_S
            with pytest.raises(Unavailable):
                await peers.welcome(dead_address(), soon())
            with pytest.raises(ConfigError):
                await run_async(ask(Ask("localhost", PUT)), peers, soon())

    run(main())


@pytest.mark.parametrize(("message", "expected"), [(RingGet(), "unavailable"), (PUT, "outcome_unknown")])
def test_a_silent_server_costs_the_deadline(message: Message, expected: str) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()
        with pytest.raises(EOFError):
            dialogue.hear()

    async def main(address: str) -> None:
        async with peers_of() as peers:
            answer = await run_async(ask(Ask(address, message)), peers, soon(0.1))
        assert code(answer) == expected

    with scripted(script) as address:
        run(main(address))


def test_one_request_s_timeout_leaves_the_others_alone(server: Served, service: KeyValues) -> None:
    async def main() -> None:
        async with peers_of() as peers:
            answers = await run_async(
                ask_all([Ask(server.address, PUT, timeout_s=0.05), Ask(server.address, RingGet())]),
                peers,
                soon(),
            )
            assert (code(answers[0]), answers[1].message) == ("outcome_unknown", Done())
            await asyncio.to_thread(server.call, lambda: service.held[0](Done()))
            assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()

    run(main())
    assert len(service.welcomed) == 1


def test_a_cancelled_operation_lets_its_destination_go_and_the_connection_stand() -> None:
    """Half of the payload has arrived when the caller loses interest; the rest must go elsewhere."""
    half, go_on = threading.Event(), threading.Event()
    destination = memoryview(bytearray(400_000))

    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        whole = b"".join(encode_frame(dialogue.hear().request, Done(), [b"1" * 400_000]))
        dialogue.socket.sendall(whole[:150_000])
        half.set()
        assert go_on.wait(PATIENCE_S)
        dialogue.socket.sendall(whole[150_000:])
        dialogue.say(dialogue.hear().request, Done())

    async def main(address: str) -> None:
        closed = []

        def steps() -> Steps[None]:
            try:
                yield from ask(Ask(address, RingGet(), sink=lambda *_: [destination]))
            finally:
                closed.append(True)

        async with peers_of() as peers:
            task = asyncio.create_task(run_async(steps(), peers, soon()))
            await asyncio.to_thread(half.wait, PATIENCE_S)
            await eventually(lambda: bytes(destination).count(b"1") > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert closed == [True]
            before = bytes(destination)
            go_on.set()
            assert (await run_async(ask(Ask(address, RingGet())), peers, soon())).message == Done()
            assert bytes(destination) == before
            assert before.count(b"1") < 400_000

    with scripted(script) as address:
        run(main(address))


def test_a_request_given_up_before_it_was_sent_is_never_sent(service: KeyValues) -> None:
    with served(service) as server:
        go_on = server.pause()

        async def main() -> None:
            async with peers_of() as peers:
                answer = await run_async(ask(Ask(server.address, PUT)), peers, soon(0.1))
                assert code(answer) == "unavailable"
                go_on.set()
                assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()

        run(main())
    assert service.handled == [RingGet()]


@pytest.mark.parametrize("message", [RingGet(), PUT])
def test_a_server_that_dies_after_a_request_on_a_fresh_connection(message: Message) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()

    async def main(address: str) -> None:
        async with peers_of() as peers:
            answer = await run_async(ask(Ask(address, message)), peers, soon())
        assert code(answer) == ("unavailable" if message.idempotent else "outcome_unknown")

    with scripted(script) as address:
        run(main(address))


def test_what_a_stopping_server_has_not_answered_was_not_done() -> None:
    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()
        dialogue.say(0, Goodbye())

    def second(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()
        dialogue.say(0, Goodbye())

    def third(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    async def main(address: str) -> None:
        async with peers_of() as peers:
            assert code(await run_async(ask(Ask(address, PUT)), peers, soon())) == "unavailable"
            for _ in range(2):  # the last of them is asked of the next process at once
                assert (await run_async(ask(Ask(address, PUT)), peers, soon())).message == Done()

    with scripted(first, second, third) as address:
        run(main(address))


def test_a_goodbye_that_lies_unread_when_sending_fails_is_heard() -> None:
    gone = threading.Event()

    async def main(address: str) -> None:
        async with peers_of() as peers:
            await peers.welcome(address, soon())
            [first] = peers.start([Ask(address, PUT)], soon())
            assert gone.wait(PATIENCE_S)  # and the loop stands still meanwhile
            for _ in range(3):  # the first is answered by a reset, and what follows cannot be sent any more
                peers.start([Ask(address, RingGet())], soon())
                time.sleep(0.02)
            assert code(await first.answer()) == "unavailable"

    with scripted(leaving(gone)) as address:
        run(main(address))


@pytest.mark.parametrize("message", [RingGet(), PUT])
def test_a_connection_that_dies_under_a_request_is_replaced_if_harmless(message: Message) -> None:
    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()

    def second(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    async def main(address: str) -> None:
        async with peers_of() as peers:
            await run_async(ask(Ask(address, RingGet())), peers, soon())
            answer = await run_async(ask(Ask(address, message)), peers, soon())
            if message.idempotent:
                assert answer.message == Done()
            else:
                assert code(answer) == "outcome_unknown"

    with scripted(first, second) as address:
        run(main(address))


def test_a_server_that_comes_back_is_found(service: KeyValues, runtime_dir: Path) -> None:
    address = f"unix://{runtime_dir}/s"

    async def main() -> None:
        async with peers_of() as peers:
            for _ in range(3):
                with served(service, address):
                    assert (await run_async(ask(Ask(address, PING)), peers, soon())).message == Done()
                assert code(await run_async(ask(Ask(address, PING)), peers, soon())) == "unavailable"

    run(main())


PING = RingGet()


def test_no_welcome_in_time() -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.hear()
        with pytest.raises(EOFError):
            dialogue.hear()

    async def main(address: str) -> None:
        async with peers_of(connect_timeout_s=0.05) as peers:
            assert code(await run_async(ask(Ask(address, PUT)), peers, soon())) == "unavailable"

    with scripted(script) as address:
        run(main(address))


def test_a_wrong_token_is_said_to_be_wrong(service: KeyValues) -> None:
    async def main(address: str) -> None:
        async with peers_of(Identity("acme:00", IDENTITY.caller)) as peers:
            assert code(await run_async(ask(Ask(address, PUT)), peers, soon())) == "unauthenticated"
            with pytest.raises(Unauthenticated):
                await peers.welcome(address, soon())

    with served(service) as server:
        run(main(server.address))


def test_garbage_from_a_peer() -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()
        dialogue.socket.sendall(b"\xff" * 64)
        with pytest.raises(EOFError):
            dialogue.hear()

    async def main(address: str) -> None:
        async with peers_of() as peers:
            assert code(await run_async(ask(Ask(address, PUT)), peers, soon())) == "outcome_unknown"

    with scripted(script) as address:
        run(main(address))


def test_closing_answers_what_is_outstanding(service: KeyValues) -> None:
    async def main(address: str) -> None:
        peers = AsyncPeers(IDENTITY)
        task = asyncio.create_task(run_async(ask(Ask(address, PUT)), peers, soon()))
        await eventually(lambda: len(service.held) == 1)
        await peers.close()
        assert code(await task) == "outcome_unknown"
        assert code(await run_async(ask(Ask(address, PUT)), peers, soon())) == "unavailable"

    with served(service) as server:
        run(main(server.address))


def test_answers_can_be_called_back(service: KeyValues) -> None:
    async def main(address: str) -> None:
        heard: asyncio.Queue[Answer] = asyncio.Queue()
        async with peers_of() as peers:
            peers.start([Ask(address, RingGet()), Ask(dead_address(), PUT)], soon(), heard.put_nowait)
            messages = [(await heard.get()).message for _ in range(2)]
        assert sorted(type(message).__name__ for message in messages) == ["Done", "Failure"]

    with served(service) as server:
        run(main(server.address))


@pytest.mark.slow
def test_the_client_runs_on_uvloop(service: KeyValues) -> None:
    uvloop = pytest.importorskip("uvloop")
    service.values[b"big"] = os.urandom(8 << 20)

    async def main(address: str) -> None:
        async with peers_of() as peers:
            answers = await run_async(
                ask_all(
                    [
                        Ask(address, BlockGet(0, [b"big"])),
                        Ask(dead_address(), PUT),
                        Ask("tcp://localhost:1", PUT),
                    ]
                ),
                peers,
                soon(),
            )
            assert b"".join(answers[0].payload) == service.values[b"big"]
            assert [code(answer) for answer in answers[1:]] == ["unavailable"] * 2

    with served(service) as server:
        uvloop.run(main(server.address))


def test_waiting_twice_gives_the_same_answer(service: KeyValues) -> None:
    def steps(address: str) -> Steps[list[Answer]]:
        [call] = yield Submit([Ask(address, RingGet())])
        return [(yield Wait(call)), (yield Wait(call))]

    async def main(address: str) -> None:
        async with peers_of() as peers:
            first, second = await run_async(steps(address), peers, soon())
            assert first is second

    with served(service) as server:
        run(main(server.address))


def one(call: Callable[[float], Any], timeout_s: float | None = None) -> Steps[Any]:
    return (yield Work(call, timeout_s))


def test_work_runs_beside_the_loop_and_what_it_raises_ends_the_operation() -> None:
    def fail(deadline: float) -> None:
        raise Unavailable("it failed")

    async def main() -> None:
        peers = AsyncPeers(IDENTITY)
        thread = await run_async(one(lambda deadline: threading.current_thread()), peers, soon())
        assert thread is not threading.current_thread()
        with pytest.raises(Unavailable, match="it failed"):
            await run_async(one(fail), peers, soon())
        await peers.close()
        with pytest.raises(Unavailable, match="closed"):
            await run_async(one(fail), peers, soon())
        await asyncio.to_thread(thread.join, PATIENCE_S)
        assert not thread.is_alive()

    asyncio.run(main())


def test_work_for_which_no_thread_is_free_ends_at_its_deadline_too() -> None:
    free = threading.Event()
    at_work: list[float] = []

    def hold(deadline: float) -> None:
        at_work.append(deadline)
        assert free.wait(PATIENCE_S)

    async def main() -> None:
        peers = AsyncPeers(IDENTITY)
        holding = [asyncio.create_task(run_async(one(hold), peers, soon())) for _ in range(WORKERS)]
        await eventually(lambda: len(at_work) == WORKERS)
        begun = time.monotonic()
        until_s = await run_async(one(lambda deadline: deadline - time.monotonic(), 0.05), peers, soon())
        assert -1 < until_s <= 0 and not free.is_set(), "its time was over, and nobody was free yet"
        assert time.monotonic() - begun >= 0.05
        given_up = asyncio.create_task(run_async(one(at_work.append), peers, soon()))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        free.set()
        await asyncio.gather(*holding)
        assert given_up.cancelled() and len(at_work) == WORKERS, "what nobody waits for is not begun"
        await peers.close()

    try:
        asyncio.run(main())
    finally:
        free.set()


def test_a_connection_that_is_silent_for_a_request_s_time_is_used_no_more(service: KeyValues) -> None:
    """What it carried may be waiting for TCP's next try, long after the network is back; who waits on it
    longer may still get an answer, and then it ends."""
    with served(service) as server:

        async def main() -> None:
            async with peers_of() as peers:
                patient = peers.start([Ask(server.address, PUT)], soon())[0]
                await eventually(lambda: len(service.held) == 1)
                assert code(await run_async(ask(Ask(server.address, PUT)), peers, soon(0.05))) == (
                    "outcome_unknown"
                )
                assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()
                assert len(service.welcomed) == 2
                assert patient.exchange.answer is None
                await asyncio.to_thread(server.call, lambda: service.held[0](Done()))
                assert (await patient.answer()).message == Done()
                await eventually(lambda: len(service.ended) == 1)

        run(main())


def test_a_connection_that_does_not_open_is_not_waited_for_by_those_who_come_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its first packet may be lost.  It goes on being opened beside the new one."""
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen(8)
        mute.setblocking(False)

        def accepted() -> int:
            with suppress(BlockingIOError):
                while True:
                    connections.append(mute.accept()[0])
            return len(connections)

        async def main() -> None:
            address = f"unix://{path}"
            async with peers_of(connect_timeout_s=10.0) as peers:
                patient = peers.start([Ask(address, PING)], soon())[0]
                for reopen_s, count in ((3600.0, 1), (0.0, 1), (3600.0, 2)):
                    monkeypatch.setattr(asynchronous, "REOPEN_S", reopen_s)
                    hasty = run_async(ask(Ask(address, PING)), peers, soon(0.02))
                    assert code(await hasty) == "unavailable"
                    assert accepted() == count
                assert patient.exchange.answer is None

        connections: list[socket.socket] = []
        try:
            run(main())
        finally:
            for each in connections:
                each.close()


@pytest.mark.slow
def test_a_connection_that_answers_others_in_time_is_kept(service: KeyValues) -> None:
    with served(service) as server:

        async def main() -> None:
            async with peers_of() as peers:
                assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()
                slow = peers.start([Ask(server.address, PUT)], soon(0.5))[0]
                assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()
                assert code(await slow.answer()) == "outcome_unknown"
                assert (await run_async(ask(Ask(server.address, RingGet())), peers, soon())).message == Done()

        run(main())
    assert len(service.welcomed) == 1
