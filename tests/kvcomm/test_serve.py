"""The server, against clients that do not behave."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvcomm import serve
from kvcomm.block import Buffer, Incarnation
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import Conflict, Refused
from kvcomm.machine import Origin
from kvcomm.rpc import KEY_VECTOR, Connection, Identity, Peers, run_blocking
from kvcomm.serve import ReplyFunction
from kvcomm.steps import Ask
from kvcomm.wire.deadlines import SLACK_S, stamp_of
from kvcomm.wire.frames import KNOWS_STAMPS, Frame, encode_frame
from kvcomm.wire.messages import (
    PROTOCOL_VERSION,
    BlockGet,
    BlockPut,
    BlockStored,
    Done,
    Failure,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    RecordPut,
    RingGet,
    Want,
    Welcome,
)
from kvcomm.wire.outbox import HIGH_WATER_BYTES
from tests.peers import (
    CREDENTIALS,
    IDENTITY,
    PATIENCE_S,
    Dialogue,
    KeyValues,
    Served,
    ask,
    served,
    soon,
    until,
)

HELLO = Hello(PROTOCOL_VERSION, IDENTITY.token, IDENTITY.caller, KEY_VECTOR)
PUT = RecordPut(0, [])


@pytest.fixture
def service() -> KeyValues:
    return KeyValues()


@pytest.fixture
def server(service: KeyValues) -> Iterator[Served]:
    with served(service) as serving:
        yield serving


@contextmanager
def stranger(address: str) -> Iterator[Dialogue]:
    """A raw connection."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        yield Dialogue(connection)


@contextmanager
def guest(address: str) -> Iterator[Dialogue]:
    """A raw connection that has greeted."""
    with stranger(address) as dialogue:
        dialogue.say(0, HELLO)
        assert isinstance(dialogue.hear().message, Welcome)
        yield dialogue


def visit(address: str, identity: Identity = IDENTITY) -> Welcome:
    """Greet and leave."""
    with closing(Peers(identity)) as peers:
        return peers.welcome(address, soon())


def ends(dialogue: Dialogue) -> bool:
    """Whether the server closes the connection."""
    try:
        dialogue.hear()
    except (EOFError, ConnectionResetError):
        return True
    return False


# -- greeting


def test_the_origin_is_what_the_server_derived(server: Served, service: KeyValues) -> None:
    node = Identity(CREDENTIALS.token(NODE_TENANT), Incarnation(2**64 - 1))
    visit(server.address, node)
    [origin] = service.welcomed
    assert (origin.tenant, origin.caller) == (CREDENTIALS.tenant_digest(NODE_TENANT), 2**64 - 1)


@pytest.mark.parametrize(
    ("first", "code", "text"),
    [
        (Ping(), "refused", "must be Hello"),
        (Hello(2, IDENTITY.token, 1, KEY_VECTOR), "refused", "protocol 1, not 2"),
        (Hello(1, IDENTITY.token, 1, bytes(32)), "refused", "other block keys"),
        (Hello(1, "acme:" + "0" * 64, 1, KEY_VECTOR), "unauthenticated", "token"),
        (Hello(1, "", 1, KEY_VECTOR), "unauthenticated", "token"),
        (BlockGet(0, [bytes(32)] * 300), "too_large", "over the wire's bound"),
    ],
)
def test_without_a_good_hello_there_is_a_reason_and_an_end(
    server: Served, service: KeyValues, first: Message, code: str, text: str
) -> None:
    with stranger(server.address) as dialogue:
        dialogue.say(0, first)
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert (failure.code, text in failure.text) == (code, True)
        assert ends(dialogue)
    assert (service.welcomed, service.handled, service.ended) == ([], [], [])
    until(lambda: server.server.connection_count == 0)


def test_no_payload_is_taken_before_hello(server: Served, service: KeyValues) -> None:
    with stranger(server.address) as dialogue:
        dialogue.say(0, HELLO, [b"x"])
        assert isinstance(dialogue.hear().message, Failure)
        assert ends(dialogue)
    assert service.welcomed == []


def test_a_silent_stranger_is_shown_out(service: KeyValues) -> None:
    with served(service, hello_timeout_s=0.05) as server, stranger(server.address) as dialogue:
        assert ends(dialogue)


def test_a_guest_may_be_silent_for_longer(service: KeyValues) -> None:
    with served(service, hello_timeout_s=0.05, stall_s=0.05) as server, guest(server.address) as dialogue:
        assert not threading.Event().wait(0.2)
        dialogue.say(1, Ping())
        assert dialogue.hear().message == Pong()


# -- what closes a connection, and only that one


@pytest.mark.parametrize("garbage", [b"\xff" * 64, bytes(encode_frame(1, Ping())[0])[:20] + bytes(64)])
def test_garbage_closes_its_own_connection_only(server: Served, service: KeyValues, garbage: bytes) -> None:
    with guest(server.address) as good, guest(server.address) as bad:
        bad.socket.sendall(garbage)
        failure = bad.hear().message
        assert isinstance(failure, Failure)
        assert failure.code == "corrupt"
        assert ends(bad)
        good.say(1, RingGet())
        assert good.hear().message == Done()
        assert service.ended == [service.welcomed[1].connection]


def test_a_number_used_again_before_its_answer_ends_the_connection(
    server: Served, service: KeyValues
) -> None:
    """Services go by the number: the answer of one request must not be taken for another's."""
    with guest(server.address) as dialogue:
        dialogue.say(1, PUT)
        until(lambda: len(service.held) == 1)
        server.call(lambda: service.held[0](Done()))
        assert dialogue.hear().message == Done()
        dialogue.say(1, PUT)  # answered: free again
        dialogue.say(1, PUT)
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert (failure.code, "request 1" in failure.text) == ("corrupt", True)
        assert ends(dialogue)
    assert service.handled == [PUT, PUT]


def test_a_number_of_a_request_whose_payload_arrives_is_taken(server: Served, service: KeyValues) -> None:
    """Both puts in one segment: the second must not take the place of the first before that is handled."""
    put = encode_frame(1, BlockPut(0, [Want(b"k", 3)]), [b"abc"])
    with guest(server.address) as dialogue:
        dialogue.socket.sendall(b"".join([*put, *put]))
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert failure.code == "corrupt"
        assert ends(dialogue)
    until(lambda: len(service.ended) == 1)
    assert service.values == {}


def test_an_oversized_frame_is_refused_by_its_announcement(service: KeyValues) -> None:
    with served(service, payload_bytes_max=1_000) as server, guest(server.address) as dialogue:
        head = encode_frame(1, BlockPut(0, [Want(b"k", 1_001)]), [bytes(1_001)])[0]
        dialogue.socket.sendall(head)
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert failure.code == "too_large"
        assert ends(dialogue)


def test_a_large_payload_without_a_destination_is_thrown_away_and_refused(
    service: KeyValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "UNPLACED_BYTES_MAX", 1_000)
    with served(service) as server, guest(server.address) as dialogue:
        dialogue.say(1, BlockPut(0, [Want(b"k", 500_000)]), [bytes(500_000)])
        dialogue.say(2, RingGet())
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert failure.code == "too_large"
        assert dialogue.hear().message == Done()
    assert service.handled == [RingGet()]


def test_a_client_that_dies_inside_a_payload(server: Served, service: KeyValues) -> None:
    with guest(server.address) as dialogue:
        whole = b"".join(encode_frame(1, BlockPut(0, [Want(b"k", 200_000)]), [bytes(200_000)]))
        dialogue.socket.sendall(whole[:100_000])
    until(lambda: len(service.ended) == 1)
    assert service.handled == []


def test_a_payload_that_never_completes_is_given_up(service: KeyValues) -> None:
    with served(service, stall_s=0.05) as server, guest(server.address) as dialogue:
        whole = b"".join(encode_frame(1, BlockPut(0, [Want(b"k", 200_000)]), [bytes(200_000)]))
        dialogue.socket.sendall(whole[:100_000])
        assert ends(dialogue)
        until(lambda: len(service.ended) == 1)


def test_a_client_that_takes_nothing_is_given_up_and_its_buffers_let_go(service: KeyValues) -> None:
    service.values[b"big"] = bytes(16 << 20)
    with served(service, stall_s=0.1) as server, guest(server.address) as dialogue:
        dialogue.say(1, BlockGet(0, [b"big"]))
        until(lambda: len(service.ended) == 1)
        assert service.left_count == 1


# -- the service's word


def test_what_the_service_raises_as_an_operating_failure_is_the_reply(
    server: Served, service: KeyValues
) -> None:
    def handle(origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction) -> None:
        raise Conflict("read again", b"now")

    service.handle = handle  # type: ignore[method-assign]
    with guest(server.address) as dialogue:
        dialogue.say(4, RingGet())
        assert dialogue.hear() == Frame(4, Failure("conflict", "read again", b"now"), [])


def test_a_sink_that_refuses_gets_no_payload(server: Served, service: KeyValues) -> None:
    def sink(origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        raise Refused("no room")

    service.sink = sink  # type: ignore[method-assign]
    with guest(server.address) as dialogue:
        dialogue.say(1, BlockPut(0, [Want(b"k", 300_000)]), [bytes(300_000)])
        dialogue.say(2, RingGet())
        assert dialogue.hear().message == Failure("refused", "no room")
        assert dialogue.hear().message == Done()
    assert service.handled == [RingGet()]


def test_a_bug_of_the_service_ends_the_connection_and_is_reported(service: KeyValues) -> None:
    def handle(origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction) -> None:
        raise ZeroDivisionError

    service.handle = handle  # type: ignore[method-assign]
    serving = Served(service, ["tcp://127.0.0.1:0"])
    try:
        with guest(serving.address) as dialogue:
            dialogue.say(1, RingGet())
            assert ends(dialogue)
        until(lambda: len(serving.problems) == 1)
        assert [type(problem["exception"]) for problem in serving.problems] == [ZeroDivisionError]
        assert len(service.ended) == 1
    finally:
        serving.close()


def test_a_request_cannot_be_answered_twice(server: Served, service: KeyValues) -> None:
    with guest(server.address) as dialogue:
        dialogue.say(1, PUT)
        until(lambda: len(service.held) == 1)
        server.call(lambda: service.held[0](Done()))
        assert dialogue.hear().message == Done()
        with pytest.raises(AssertionError, match="answered twice"):
            server.call(lambda: service.held[0](Done()))


def test_a_reply_after_the_end_lets_its_buffers_go_at_once(server: Served, service: KeyValues) -> None:
    with guest(server.address) as dialogue:
        dialogue.say(1, PUT)
        until(lambda: len(service.held) == 1)
    until(lambda: len(service.ended) == 1)
    left: list[bool] = []
    server.call(lambda: service.held[0](Done(), [b"x"], lambda: left.append(True)))
    assert left == [True]


def test_an_oversized_reply_becomes_a_failure(server: Served, service: KeyValues) -> None:
    with guest(server.address) as dialogue:
        dialogue.say(1, PUT)
        until(lambda: len(service.held) == 1)
        left: list[bool] = []
        huge = BlockGet(0, [bytes(1 << 20)] * 17)
        server.call(lambda: service.held[0](huge, [b"x"], lambda: left.append(True)))
        failure = dialogue.hear().message
        assert isinstance(failure, Failure)
        assert (failure.code, left) == ("too_large", [True])


# -- bounds


def test_unanswered_requests_are_bounded(service: KeyValues) -> None:
    """At the bound the connection is not read: requests wait in the sockets' buffers, and others are
    served."""
    with served(service, outstanding_max=10) as server, guest(server.address) as dialogue:
        sender = threading.Thread(target=flood, args=(dialogue,))
        sender.start()
        until(lambda: len(service.held) >= 10)
        with guest(server.address) as other:
            other.say(1, RingGet())
            assert other.hear().message == Done()
        assert len(service.held) < FLOOD_COUNT // 2
        answered_count = 0
        while answered_count < FLOOD_COUNT:
            until(lambda: bool(service.held))
            held, service.held = service.held, []
            server.call(lambda held=held: [reply(Done()) for reply in held])  # type: ignore[misc]
            assert {dialogue.hear().message for _ in held} == {Done()}
            answered_count += len(held)
        sender.join(PATIENCE_S)
        assert not sender.is_alive()


FLOOD_COUNT = 5_000


def flood(dialogue: Dialogue) -> None:
    dialogue.socket.sendall(b"".join(encode_frame(number, PUT)[0] for number in range(1, FLOOD_COUNT + 1)))


def test_a_client_that_does_not_read_its_replies_is_not_read(service: KeyValues) -> None:
    service.values[b"big"] = bytes(4 << 20)
    with served(service) as server, guest(server.address) as dialogue:
        for number in range(1, 30):
            dialogue.say(number, BlockGet(0, [b"big"]))
            until(lambda number=number: len(service.handled) >= min(number, 3))  # type: ignore[misc]
        assert len(service.handled) * (4 << 20) < HIGH_WATER_BYTES + (20 << 20)
        payload_bytes = [sum(map(len, dialogue.hear().payload)) for _ in range(29)]
    assert payload_bytes == [4 << 20] * 29


def test_connections_are_bounded(service: KeyValues) -> None:
    with served(service, connections_max=2) as server, guest(server.address), guest(server.address):
        with stranger(server.address) as third:
            assert ends(third)
        assert server.server.connection_count == 2


# -- addresses


def test_one_server_listens_at_several_addresses(service: KeyValues, runtime_dir: Path) -> None:
    serving = Served(service, ["tcp://127.0.0.1:0", f"unix://{runtime_dir}/s", "tcp://localhost:0"])
    try:
        assert all(":0" not in address for address in serving.addresses)
        for address in serving.addresses:
            assert visit(address).node == "n1"
    finally:
        serving.close()


def test_a_port_in_use_is_named(server: Served) -> None:
    with pytest.raises(Refused, match=f"cannot listen on {server.address}: Address already in use"):
        Served(KeyValues(), ["tcp://127.0.0.1:0", server.address])


def test_a_unix_socket_is_private_and_goes_with_its_server(service: KeyValues, runtime_dir: Path) -> None:
    path = runtime_dir / "s"
    with served(service, f"unix://{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(Refused, match="in use"):
            Served(KeyValues(), [f"unix://{path}"])
    assert not path.exists()


def test_a_dead_server_s_socket_file_is_replaced(service: KeyValues, runtime_dir: Path) -> None:
    path = runtime_dir / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with served(service, f"unix://{path}") as server:
        assert visit(server.address).node == "n1"


def test_another_file_is_not_replaced(runtime_dir: Path) -> None:
    (runtime_dir / "s").write_text("precious")
    with pytest.raises(Refused, match="not a socket"):
        Served(KeyValues(), [f"unix://{runtime_dir}/s"])
    assert (runtime_dir / "s").read_text() == "precious"


def test_a_closing_server_leaves_its_successor_s_socket_alone(runtime_dir: Path) -> None:
    path = runtime_dir / "s"
    with served(KeyValues(), f"unix://{path}"):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
    assert path.exists()


def test_closing_tells_the_service_of_every_connection_once(service: KeyValues) -> None:
    with served(service) as server:
        connections = [Connection.open(server.address, IDENTITY, soon()) for _ in range(3)]
        connections[0].close()
        until(lambda: len(service.ended) == 1)
    assert sorted(service.ended) == sorted(origin.connection for origin in service.welcomed)
    assert len(service.ended) == len(set(service.ended)) == 3
    for connection in connections:
        connection.close()


# -- an orderly stop


def test_what_is_under_way_is_answered_before_the_goodbye(server: Served, service: KeyValues) -> None:
    with guest(server.address) as dialogue:
        dialogue.say(1, PUT)
        until(lambda: len(service.held) == 1)
        ended = server.leave(PATIENCE_S)
        until(lambda: refuses_connections(server.address))
        assert not ended.is_set()
        dialogue.say(2, PUT)
        refused = dialogue.hear()
        assert (refused.request, isinstance(refused.message, Failure)) == (2, True)
        assert isinstance(refused.message, Failure) and refused.message.code == "unavailable"
        server.call(lambda: service.held[0](Done()))
        assert [(frame.request, frame.message) for frame in (dialogue.hear(), dialogue.hear())] == [
            (1, Done()),
            (0, Goodbye()),
        ]
        assert len(service.handled) == 1
    assert ended.wait(PATIENCE_S)
    until(lambda: len(service.ended) == 1)


def test_what_comes_after_the_goodbye_is_not_done(
    service: KeyValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "HANG_UP_S", PATIENCE_S)
    with served(service) as server, guest(server.address) as dialogue:
        ended = server.leave(PATIENCE_S)
        assert dialogue.hear().message == Goodbye()
        dialogue.say(1, PUT)
        dialogue.say(2, BlockPut(0, [Want(bytes(32), 5)]), [b"bytes"])
        dialogue.socket.shutdown(socket.SHUT_WR)
        assert ended.wait(PATIENCE_S)
        assert ends(dialogue)
    assert (service.handled, service.values) == ([], {})


def test_a_payload_that_was_arriving_is_taken_to_its_end(server: Served, service: KeyValues) -> None:
    whole = b"".join(encode_frame(1, BlockPut(0, [Want(b"k", 500_000)]), [bytes(500_000)]))
    with guest(server.address) as dialogue:
        dialogue.socket.sendall(whole[:200_000])
        until(lambda: any(each._unanswered for each in list(server.server._connections.values())))
        server.leave(PATIENCE_S)
        until(lambda: refuses_connections(server.address))
        dialogue.socket.sendall(whole[200_000:])
        assert dialogue.hear().message == BlockStored(["stored"])
        assert dialogue.hear().message == Goodbye()
    assert service.values == {b"k": bytes(500_000)}


def test_who_gets_no_answer_in_time_gets_no_goodbye(server: Served, service: KeyValues) -> None:
    """What it asked for may have been done."""
    with guest(server.address) as waits, guest(server.address) as idles, stranger(server.address) as mute:
        waits.say(1, PUT)
        until(lambda: len(service.held) == 1)
        ended = server.leave(0.2)
        assert idles.hear().message == Goodbye()
        assert ends(mute)
        assert ended.wait(PATIENCE_S)
        with pytest.raises((EOFError, ConnectionResetError)):
            waits.hear()


def refuses_connections(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return True
    return False


def test_connection_numbers_are_never_used_twice(service: KeyValues) -> None:
    for _ in range(2):
        with served(service) as server:
            visit(server.address)
            visit(server.address)
    assert len({origin.connection for origin in service.welcomed}) == 4


# -- loops


def test_run_uses_uvloop_where_it_is_installed() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    pytest.importorskip("uvloop")
    assert serve.run(main()).startswith("uvloop")


@pytest.mark.slow
def test_the_server_runs_on_uvloop(service: KeyValues, monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)
    service.values[b"big"] = os.urandom(8 << 20)
    with served(service) as server, guest(server.address) as dialogue:
        peers = Peers(IDENTITY)
        answer = run_blocking(ask(Ask(server.address, BlockGet(0, [b"big"]))), peers, soon())
        assert b"".join(answer.payload) == service.values[b"big"]
        dialogue.socket.sendall(b"\xff" * 64)
        assert isinstance(dialogue.hear().message, Failure)
        assert ends(dialogue)
        peers.close()
        until(lambda: len(service.ended) == 2)


# -- deadlines


def test_what_lay_in_the_socket_until_its_sender_had_given_up_is_not_done(
    server: Served, service: KeyValues
) -> None:
    with closing(Peers(IDENTITY)) as peers:
        late = Ask(server.address, RecordPut(1, []), timeout_s=0.05)
        run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
        go_on = server.pause()
        answer = run_blocking(ask(late), peers, soon())
        assert isinstance(answer.message, Failure) and answer.message.code == "outcome_unknown"
        begin = time.monotonic()
        until(lambda: time.monotonic() > begin + 2 * SLACK_S)
        go_on.set()
        until(lambda: server.server.overdue_count == 1)
        run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
    assert service.handled == [RingGet(), RingGet()], "executed late: 0"


def test_what_waited_a_while_and_is_still_waited_for_is_done(server: Served, service: KeyValues) -> None:
    with closing(Peers(IDENTITY)) as peers:
        run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
        go_on = server.pause()
        threading.Timer(0.3, go_on.set).start()
        answer = run_blocking(ask(Ask(server.address, RingGet(), timeout_s=PATIENCE_S)), peers, soon())
    assert answer.message == Done() and server.server.overdue_count == 0


def say(dialogue: Dialogue, pieces: list[Buffer]) -> None:
    dialogue.socket.sendall(b"".join(bytes(piece) for piece in pieces))


def test_who_does_not_know_stamps_gets_none(server: Served) -> None:
    """To an older client a stamp would be a part of the payload's size."""
    with guest(server.address) as dialogue:
        dialogue.say(1, RingGet())
        assert dialogue.hear().stamp == 0


def test_an_overdue_request_is_refused_as_not_done(service: KeyValues) -> None:
    with served(service, clock=lambda: 1_000.0) as server, stranger(server.address) as dialogue:
        say(dialogue, encode_frame(0, HELLO, flags=KNOWS_STAMPS))
        assert dialogue.hear().stamp == stamp_of(1_000.0)
        for number, deadline in ((1, 999.0), (2, 1_001.0)):
            say(dialogue, encode_frame(number, RingGet(), (), stamp_of(deadline)))
        first, second = dialogue.hear(), dialogue.hear()
        assert isinstance(first.message, Failure) and first.message.code == "unavailable"
        assert "nothing was done" in first.message.text
        assert second.message == Done() and second.stamp == stamp_of(1_000.0)
        say(dialogue, encode_frame(3, BlockPut(0, [Want(b"k", 1)]), [b"x"], stamp_of(999.0)))
        assert not isinstance(dialogue.hear().message, Failure), (
            "its room is given away: it may as well be kept"
        )
