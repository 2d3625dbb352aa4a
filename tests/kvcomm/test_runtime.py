"""The runtime: a machine meets the clock and the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvcomm.errors import Refused, Unavailable
from kvcomm.machine import (
    Answered,
    AskPeer,
    Closed,
    ConnectionId,
    Effect,
    Event,
    Origin,
    Received,
    Reply,
    Resumed,
    Stop,
    Tick,
    Ticket,
)
from kvcomm.rpc import AsyncPeers
from kvcomm.runtime import Runtime
from kvcomm.wire.messages import Done, Failure, Message, Ping, RingGet
from tests.peers import IDENTITY, PATIENCE_S, KeyValues, dead_address, served, soon

ORIGIN = Origin(ConnectionId(3), 7, bytes(16), 1)


@dataclass(frozen=True, slots=True)
class Note(Effect):
    text: str


class Recorder:
    """A machine that does what a table says and writes down what it was given."""

    def __init__(self, react: Callable[[Event], list[Effect]]) -> None:
        self.events: list[Event] = []
        self.wants: float | None = None
        self.inside = False
        self._react = react

    def handle(self, event: Event, now: float) -> list[Effect]:
        assert not self.inside, "entered twice"
        self.inside = True
        self.events.append(event)
        effects = self._react(event)
        self.inside = False
        return effects

    def deadline(self) -> float | None:
        return self.wants

    def check(self) -> None: ...

    def story(self, key: bytes) -> str:
        return ""


class Shell:
    """A runtime with everything around it written down."""

    def __init__(self, react: Callable[[Event], list[Effect]], resolve: Callable[[str], str] = str) -> None:
        self.machine = Recorder(react)
        self.peers = AsyncPeers(IDENTITY)
        self.performed: list[Effect] = []
        self.stops: list[str] = []
        self.runtime = Runtime(
            self.machine, peers=self.peers, resolve=resolve, perform=self.perform, on_stop=self.stops.append
        )

    def perform(self, effect: Effect) -> None:
        self.performed.append(effect)

    async def heard(self, count: int) -> list[Event]:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.machine.events) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        return self.machine.events

    async def close(self) -> None:
        self.runtime.close()
        await self.peers.close()


def run(main: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_reply_goes_to_who_asked() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [Reply(event.origin, Done())] if isinstance(event, Received) else [])
        replies: list[Message] = []
        shell.runtime.received(ORIGIN, Ping(), lambda message, *_: replies.append(message))
        assert shell.machine.events == [Received(ORIGIN, Ping())]
        assert replies == [Done()]
        await shell.close()

    run(main)


def test_nobody_hears_a_reply_to_a_connection_that_ended() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [Reply(ORIGIN, Done())] if isinstance(event, Tick) else [])
        replies: list[Message] = []
        shell.runtime.received(ORIGIN, Ping(), lambda message, *_: replies.append(message))
        shell.runtime.disconnected(ORIGIN.connection)
        shell.runtime.deliver(Tick())
        assert shell.machine.events == [Received(ORIGIN, Ping()), Closed(ORIGIN.connection), Tick()]
        assert (replies, shell.stops) == ([], [])
        await shell.close()

    run(main)


def test_a_caller_that_numbers_two_requests_alike_hurts_only_itself() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [Reply(ORIGIN, Done())] if isinstance(event, Tick) else [])
        replies: list[Message] = []
        shell.runtime.received(ORIGIN, Ping(), lambda message, *_: replies.append(message))
        with pytest.raises(Refused, match="number them apart"):
            shell.runtime.received(ORIGIN, Ping(), lambda *_: None)
        shell.runtime.deliver(Tick())
        assert (replies, shell.stops) == ([Done()], [])
        await shell.close()

    run(main)


def test_a_machine_that_answers_twice_is_stopped() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [Reply(ORIGIN, Done())] * 2)
        with pytest.raises(KeyError):
            shell.runtime.received(ORIGIN, Ping(), lambda *_: None)
        assert len(shell.stops) == 1
        await shell.close()

    run(main)


def test_an_effect_that_causes_an_event_at_once_waits_its_turn() -> None:
    async def main() -> None:
        def react(event: Event) -> list[Effect]:
            return [Note("a"), Note("b")] if isinstance(event, Tick) else []

        shell = Shell(react)
        order: list[str] = []

        def perform(effect: Effect) -> None:
            assert isinstance(effect, Note)
            order.append(effect.text)
            shell.runtime.deliver(Closed(ConnectionId(len(order))))

        shell.runtime._perform = perform
        shell.runtime.deliver(Tick())
        assert order == ["a", "b"]
        assert shell.machine.events == [Tick(), Closed(ConnectionId(1)), Closed(ConnectionId(2))]
        await shell.close()

    run(main)


def test_peers_are_asked_and_their_answers_handed_in() -> None:
    async def main() -> None:
        def react(event: Event) -> list[Effect]:
            if not isinstance(event, Tick):
                return []
            return [
                AskPeer(Ticket(1), server.address, RingGet(), soon()),
                AskPeer(Ticket(2), dead_address(), RingGet(), soon()),
                AskPeer(Ticket(3), "unknown", RingGet(), soon()),
            ]

        def resolve(node: str) -> str:
            if node == "unknown":
                raise Unavailable("who?")
            return node

        shell = Shell(react, resolve)
        shell.runtime.deliver(Tick())
        answered = {
            event.ticket: event.message for event in await shell.heard(4) if isinstance(event, Answered)
        }
        assert answered[Ticket(1)] == Done()
        assert answered[Ticket(3)] == Failure("unavailable", "no address of unknown: who?")
        failure = answered[Ticket(2)]
        assert isinstance(failure, Failure)
        assert failure.code == "unavailable"
        await shell.close()

    with served(KeyValues()) as server:
        run(main)


def test_a_peer_that_is_late_is_answered_for_at_the_deadline() -> None:
    async def main() -> None:
        deadline = time.monotonic() + 0.05
        shell = Shell(
            lambda event: [AskPeer(Ticket(1), server.address, RingGet(), deadline)] if event == Tick() else []
        )
        go_on = server.pause()
        shell.runtime.deliver(Tick())
        _, answered = await shell.heard(2)
        assert time.monotonic() >= deadline
        go_on.set()
        assert isinstance(answered, Answered)
        assert isinstance(answered.message, Failure)
        await shell.close()

    with served(KeyValues()) as server:
        run(main)


def test_ticks_come_when_the_machine_wants_them() -> None:
    async def main() -> None:
        wanted = [time.monotonic() + 0.02, time.monotonic() + 0.05, None]
        at: list[float] = []

        def react(event: Event) -> list[Effect]:
            at.append(time.monotonic())
            shell.machine.wants = wanted[len(at) - 1]
            return []

        shell = Shell(react)
        shell.runtime.deliver(Closed(ConnectionId(1)))
        events = await shell.heard(3)
        await asyncio.sleep(0.02)
        assert events == [Closed(ConnectionId(1)), Tick(), Tick()]
        assert wanted[0] is not None and at[1] >= wanted[0] - 0.001
        assert wanted[1] is not None and at[2] >= wanted[1] - 0.001
        await shell.close()

    run(main)


def test_a_deadline_that_moves_or_goes_away_moves_the_timer() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [])
        shell.machine.wants = time.monotonic() + 0.01
        shell.runtime.deliver(Closed(ConnectionId(1)))
        shell.machine.wants = None
        shell.runtime.deliver(Closed(ConnectionId(2)))
        await asyncio.sleep(0.03)
        assert shell.machine.events == [Closed(ConnectionId(1)), Closed(ConnectionId(2))]
        await shell.close()

    run(main)


def test_stop_is_the_end() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [Note("before"), Stop("disk is gone"), Note("after")])
        shell.machine.wants = 0.0
        shell.runtime.deliver(Tick())
        shell.runtime.deliver(Tick())
        assert shell.stops == ["disk is gone"]
        assert shell.machine.events == [Tick()]
        assert shell.performed == [Note("before")]
        await shell.close()

    run(main)


def test_a_machine_that_breaks_is_not_used_again() -> None:
    async def main() -> None:
        def react(event: Event) -> list[Effect]:
            raise AssertionError("count is negative")

        shell = Shell(react)
        with pytest.raises(AssertionError):
            shell.runtime.deliver(Tick())
        shell.runtime.deliver(Tick())
        assert shell.stops == ["broken invariant: AssertionError('count is negative')"]
        assert len(shell.machine.events) == 1
        await shell.close()

    run(main)


class Clock:
    """Stands until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_stood_still_hears_of_it_before_what_came_meanwhile() -> None:
    async def main() -> None:
        shell, clock = Shell(lambda event: []), Clock()
        shell.runtime._clock = clock
        shell.runtime.deliver(Tick())
        clock.now += 10.0
        shell.runtime.deliver(Closed(ORIGIN.connection))
        shell.runtime.deliver(Tick())
        assert shell.machine.events == [Tick(), Resumed(), Closed(ORIGIN.connection), Tick()]
        assert shell.runtime.resumed_count == 1
        await shell.close()

    run(main)


@pytest.mark.slow
def test_who_stood_still_with_nothing_to_do_hears_of_it_too() -> None:
    async def main() -> None:
        shell, clock = Shell(lambda event: []), Clock()
        shell.runtime._clock = clock
        shell.runtime.deliver(Tick())
        clock.now += 10.0
        assert await shell.heard(2) == [Tick(), Resumed()]
        await shell.close()

    run(main)


@pytest.mark.slow
def test_an_idle_process_did_not_stand_still() -> None:
    async def main() -> None:
        shell = Shell(lambda event: [])
        shell.runtime.deliver(Tick())
        await asyncio.sleep(3 * shell.runtime._pulse.beat_s)
        shell.runtime.deliver(Tick())
        assert shell.machine.events == [Tick(), Tick()]
        await shell.close()

    run(main)
