"""Both ends of the data wire for tests: a served ``Service`` on a thread of its own, and a peer that follows
a script."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvcomm.block import Incarnation
from kvcomm.credentials import Credentials
from kvcomm.machine import ConnectionId, Origin
from kvcomm.rpc import Identity
from kvcomm.serve import DataServer, ReplyFunction, Service
from kvcomm.steps import Answer, Ask, Steps, Submit, Wait
from kvcomm.wire.frames import Frame, FrameReader, encode_frame
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockPut,
    BlockStored,
    Done,
    Goodbye,
    Message,
    RecordPut,
    Welcome,
)

CREDENTIALS = Credentials(bytes(range(32)))
IDENTITY = Identity(CREDENTIALS.token("acme"), Incarnation(7))
PATIENCE_S = 10.0


def soon(timeout_s: float = PATIENCE_S) -> float:
    """A deadline."""
    return time.monotonic() + timeout_s


def ask(ask: Ask) -> Steps[Answer]:
    [call] = yield Submit([ask])
    answer: Answer = yield Wait(call)
    return answer


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Poll until ``condition`` holds; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        pause.wait(0.002)


class KeyValues:
    """A service for tests: puts are kept whole, gets return them; a ``RecordPut`` waits for
    :meth:`release`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.held: list[ReplyFunction] = []
        self.welcomed: list[Origin] = []
        self.handled: list[Message] = []
        self.ended: list[ConnectionId] = []
        self.left_count = 0

    def welcome(self, origin: Origin) -> tuple[str, int]:
        self.welcomed.append(origin)
        return "/region", 5

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        return None

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        self.handled.append(message)
        match message:
            case BlockPut(wants=wants):
                whole, begin = b"".join(payload), 0
                for want in wants:
                    self.values[want.key] = whole[begin : begin + want.copy_bytes]
                    begin += want.copy_bytes
                reply(BlockStored(["stored"] * len(wants)))
            case BlockGet(keys=keys):
                copies = [self.values.get(key, b"") for key in keys]
                reply(BlockCopies([len(copy) for copy in copies]), [c for c in copies if c], self._left)
            case RecordPut():
                self.held.append(reply)
            case _:
                reply(Done())

    def closed(self, connection: ConnectionId) -> None:
        self.ended.append(connection)

    def _left(self) -> None:
        self.left_count += 1


class Served:
    """A server and its event loop on a thread."""

    def __init__(self, service: Service, addresses: Sequence[str], **options: Any) -> None:
        self.service = service
        self.loop = asyncio.new_event_loop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.problems.append(context))
        self.server = DataServer(
            service, node="n1", role="pool", instance="test", incarnation=Incarnation(11),
            credentials=CREDENTIALS, **options,
        )  # fmt: skip
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.addresses = self._run(self.server.start(addresses))

    @property
    def address(self) -> str:
        return self.addresses[0]

    def call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` on the server's loop."""

        async def run() -> Any:
            return function()

        return self._run(run())

    def pause(self) -> threading.Event:
        """Stop the loop from doing anything until the event is set."""
        go_on = threading.Event()
        self.loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
        return go_on

    def leave(self, limit_s: float) -> threading.Event:
        """Have the server stop in order; set when it has."""
        ended = threading.Event()
        leaving = asyncio.run_coroutine_threadsafe(self.server.leave(limit_s), self.loop)
        leaving.add_done_callback(lambda _: ended.set())
        return ended

    def close(self) -> None:
        self._run(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)


@contextmanager
def served(service: Service, address: str = "tcp://127.0.0.1:0", **options: Any) -> Iterator[Served]:
    serving = Served(service, [address], **options)
    try:
        yield serving
    finally:
        serving.close()
    assert serving.problems == []


class Dialogue:
    """One accepted connection of a scripted peer; every wait ends after :data:`PATIENCE_S`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self.socket = connection
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def hear(self) -> Frame:
        """The next frame; ``EOFError`` when the client is gone."""
        while not self._frames:
            received_bytes = self.socket.recv_into(self._reader.buffer())
            if not received_bytes:
                raise EOFError
            self._frames += self._reader.advance(received_bytes)
        return self._frames.pop(0)

    def say(self, number: int, message: Message, payload: Sequence[bytes] = ()) -> None:
        self.socket.sendall(b"".join(encode_frame(number, message, payload)))

    def greet(self) -> None:
        """Hear ``Hello``, say ``Welcome``."""
        self.say(self.hear().request, Welcome("rogue", "pool", "test", 1, bytes(16), "", 0))


@contextmanager
def scripted(*scripts: Callable[[Dialogue], None]) -> Iterator[str]:
    """The address of a peer whose n-th connection follows the n-th script and is then closed; later ones are
    refused."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(PATIENCE_S)
    problems: list[BaseException] = []

    def run() -> None:
        with listening:
            for script in scripts:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection, suppress(EOFError, ConnectionError):
                    try:
                        script(Dialogue(connection))
                    except AssertionError as error:
                        problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
    assert problems == []


def leaving(gone: threading.Event) -> Callable[[Dialogue], None]:
    """A script: answers one request, leaves the next undone, says goodbye and hangs up."""

    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()
        dialogue.say(0, Goodbye())
        dialogue.socket.close()
        gone.set()

    return script


def dead_address() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"tcp://127.0.0.1:{listening.getsockname()[1]}"
