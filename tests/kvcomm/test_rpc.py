"""The blocking client, against real servers and against peers that misbehave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcomm.errors import ConfigError, OutcomeUnknown, Refused, Unauthenticated, Unavailable
from kvcomm.rpc import KEY_VECTOR, Connection, Identity, Peers, iterate_blocking, run_blocking
from kvcomm.steps import Answer, Ask, Call, Emit, Steps, Submit, Wait, ask_all
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockPut,
    BlockStored,
    Done,
    Failure,
    Goodbye,
    Hello,
    Message,
    RecordPut,
    RingGet,
    Want,
)
from tests.peers import (
    CREDENTIALS,
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


def block_put(values: dict[bytes, bytes]) -> tuple[BlockPut, list[bytes]]:
    return BlockPut(0, [Want(key, len(value)) for key, value in values.items()]), list(values.values())


@pytest.fixture
def service() -> KeyValues:
    return KeyValues()


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, service: KeyValues, runtime_dir: Path) -> Iterator[Served]:
    with served(
        service, "tcp://127.0.0.1:0" if request.param == "tcp" else f"unix://{runtime_dir}/s"
    ) as serving:
        yield serving


@pytest.fixture
def peers() -> Iterator[Peers]:
    pool = Peers(IDENTITY)
    yield pool
    pool.close()


# -- a server that is well


def test_welcome_says_who_the_server_is_and_what_it_makes_of_us(server: Served, peers: Peers) -> None:
    welcome = peers.welcome(server.address, soon())
    assert (welcome.node, welcome.role, welcome.instance, welcome.incarnation) == ("n1", "pool", "test", 11)
    assert (welcome.region, welcome.epoch) == ("/region", 5)
    assert welcome.tenant == CREDENTIALS.tenant_digest("acme")


def test_put_and_get_straight_into_the_destination(server: Served, peers: Peers) -> None:
    values = {b"a": os.urandom(3_000_000), b"b": os.urandom(70_000), b"c": b"x"}
    put, payload = block_put(values)
    stored = run_blocking(ask(Ask(server.address, put, payload)), peers, soon())
    assert stored.message == BlockStored(["stored"] * 3)
    pieces = [memoryview(bytearray(len(values[key]))) for key in (b"c", b"a")]
    seen: list[tuple[Message, int]] = []

    def sink(number: int, message: Message, payload_bytes: int) -> list[memoryview]:
        seen.append((message, payload_bytes))
        return pieces

    answer = run_blocking(
        ask(Ask(server.address, BlockGet(0, [b"c", b"none", b"a"]), sink=sink)), peers, soon()
    )
    assert answer.message == BlockCopies([1, 0, 3_000_000])
    assert [bytes(piece) for piece in pieces] == [values[b"c"], values[b"a"]]
    assert seen == [(answer.message, 3_000_001)]
    fresh = run_blocking(ask(Ask(server.address, BlockGet(0, [b"b"]))), peers, soon())
    assert b"".join(fresh.payload) == values[b"b"]


def test_the_reply_s_buffers_are_let_go_when_they_left(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    service.values[b"k"] = bytes(1 << 20)
    run_blocking(ask(Ask(server.address, BlockGet(0, [b"k"]))), peers, soon())
    until(lambda: service.left_count == 1)


def test_pipelined_requests_are_handled_in_order_and_answered_by_number(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    def steps() -> Steps[list[Answer]]:
        calls: list[Call] = yield Submit([Ask(server.address, BlockGet(0, [b"%d" % n])) for n in range(50)])
        answers = []
        for call in reversed(calls):
            answers.append((yield Wait(call)))
        return answers[::-1]

    service.values = {b"%d" % n: b"value %d" % n for n in range(50)}
    answers = run_blocking(steps(), peers, soon())
    assert [b"".join(answer.payload) for answer in answers] == [b"value %d" % n for n in range(50)]
    assert service.handled == [BlockGet(0, [b"%d" % n]) for n in range(50)]
    assert len(service.welcomed) == 1


def test_both_sides_with_full_hands_do_not_lock_each_other(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    """Gets whose replies nobody has read yet stand in the way of puts that nobody can read."""
    big = os.urandom(4 << 20)
    service.values[b"big"] = big

    def steps() -> Steps[list[Answer]]:
        asks = []
        for n in range(12):
            asks.append(Ask(server.address, BlockGet(0, [b"big"])))
            asks.append(Ask(server.address, *block_put({b"%d" % n: big})))
        return (yield from ask_all(asks))

    answers = run_blocking(steps(), peers, soon(30.0))
    assert [type(answer.message) for answer in answers] == [BlockCopies, BlockStored] * 12
    assert all(b"".join(answer.payload) == big for answer in answers[::2])
    assert all(service.values[b"%d" % n] == big for n in range(12))


def test_many_peers_are_asked_in_parallel(peers: Peers) -> None:
    """Each of them answers only once all of them have been asked."""
    barrier = threading.Barrier(5)

    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        frame = dialogue.hear()
        barrier.wait(PATIENCE_S)
        dialogue.say(frame.request, Done(), [b"x" * 100_000])

    with (
        scripted(script) as a,
        scripted(script) as b,
        scripted(script) as c,
        scripted(script) as d,
        scripted(script) as e,
    ):
        answers = run_blocking(
            ask_all([Ask(address, RingGet()) for address in (a, b, c, d, e)]), peers, soon()
        )
    assert [answer.message for answer in answers] == [Done()] * 5
    assert [b"".join(answer.payload) for answer in answers] == [b"x" * 100_000] * 5


def test_connections_are_reused(server: Served, service: KeyValues, peers: Peers) -> None:
    for _ in range(20):
        run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
    assert len(service.welcomed) == 1


@pytest.mark.slow
def test_sixty_four_threads_share_one_pool(server: Served, service: KeyValues, peers: Peers) -> None:
    service.values = {b"%d" % n: b"%d" % n * 20_000 for n in range(64)}

    def work(n: int) -> bool:
        key = b"%d" % n
        return all(
            b"".join(run_blocking(ask(Ask(server.address, BlockGet(0, [key]))), peers, soon(30.0)).payload)
            == service.values[key]
            for _ in range(20)
        )

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(work, range(64)))
    peers.close()
    until(lambda: sorted(service.ended) == sorted({origin.connection for origin in service.welcomed}))


def test_emitted_items_come_out_as_they_are_made(server: Served, service: KeyValues, peers: Peers) -> None:
    closed = []

    def steps() -> Steps[None]:
        try:
            for n in range(3):
                yield from ask(Ask(server.address, RingGet()))
                yield Emit(n)
        finally:
            closed.append(True)

    assert list(iterate_blocking(steps(), peers, soon())) == [0, 1, 2]
    items = iterate_blocking(steps(), peers, soon())
    assert next(items) == 0
    items.close()
    assert closed == [True, True]
    assert len(service.handled) == 4
    assert run_blocking(steps(), peers, soon()) is None


def test_what_the_operation_raises_is_raised(peers: Peers) -> None:
    def steps() -> Steps[None]:
        yield Emit(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_blocking(steps(), peers, soon())


def test_an_operation_may_need_no_peer(peers: Peers) -> None:
    def steps() -> Steps[int]:
        return 3
        yield Emit(0)

    assert run_blocking(steps(), peers, soon()) == 3


# -- a server that is not


def test_nobody_there(peers: Peers) -> None:
    address = dead_address()
    answer = run_blocking(ask(Ask(address, PUT)), peers, soon())
    assert isinstance(answer.message, Failure)
    assert (answer.message.code, answer.message.text.startswith(address)) == ("unavailable", True)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1"):
        peers.welcome(address, soon())


def test_no_such_unix_socket(peers: Peers, tmp_path: Path) -> None:
    answer = run_blocking(ask(Ask(f"unix://{tmp_path}/none", RingGet())), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"


def test_what_is_not_an_address_is_the_caller_s_mistake(peers: Peers) -> None:
    with pytest.raises(ConfigError):
        run_blocking(ask(Ask("localhost", RingGet())), peers, soon())


@pytest.mark.parametrize(("message", "code"), [(RingGet(), "unavailable"), (PUT, "outcome_unknown")])
def test_a_silent_server_costs_the_deadline_and_no_more(peers: Peers, message: Message, code: str) -> None:
    ended = threading.Event()

    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()
        with pytest.raises(EOFError):
            dialogue.hear()
        ended.set()

    with scripted(script) as address:
        deadline = soon(0.15)
        answer = run_blocking(ask(Ask(address, message)), peers, deadline)
        assert isinstance(answer.message, Failure)
        assert answer.message.code == code
        assert answer.now >= deadline
        assert ended.wait(PATIENCE_S), "the connection with a reply outstanding must be closed"


def test_one_request_s_timeout_leaves_the_others_alone(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    def steps() -> Steps[tuple[Answer, Answer, Answer]]:
        calls: list[Call] = yield Submit(
            [Ask(server.address, PUT, timeout_s=0.05), Ask(server.address, RingGet(), timeout_s=9.0)]
        )
        late = yield Wait(calls[0])
        good = yield Wait(calls[1])
        after = yield from ask(Ask(server.address, RingGet()))
        return late, good, after

    late, good, after = run_blocking(steps(), peers, soon())
    assert isinstance(late.message, Failure)
    assert late.message.code == "outcome_unknown"
    assert (good.message, after.message) == (Done(), Done())
    assert len(service.welcomed) == 1
    until(lambda: len(service.ended) == 1)  # its reply may still come, so the connection is not kept


def test_a_late_reply_does_not_touch_its_destination(peers: Peers) -> None:
    """The caller has the destination back once it was told of the failure."""
    go_on, finished = threading.Event(), threading.Event()
    destination = memoryview(bytearray(200_000))

    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        first = dialogue.hear()
        dialogue.say(first.request, Done())
        second = dialogue.hear()
        whole = b"".join(encode_frame(second.request, Done(), [b"2" * 200_000]))
        dialogue.socket.sendall(whole[:90_000])
        assert go_on.wait(PATIENCE_S)
        dialogue.socket.sendall(whole[90_000:])
        third = dialogue.hear()
        dialogue.say(third.request, Done())
        finished.set()

    def steps() -> Steps[tuple[Answer, bytes, Answer]]:
        yield from ask(Ask(address, RingGet()))
        late = yield from ask(Ask(address, RingGet(), sink=lambda *_: [destination], timeout_s=0.1))
        before = bytes(destination)
        go_on.set()
        return late, before, (yield from ask(Ask(address, RingGet())))

    with scripted(script) as address:
        late, before, after = run_blocking(steps(), peers, soon())
        assert finished.wait(PATIENCE_S)
    assert isinstance(late.message, Failure)
    assert after.message == Done()
    assert bytes(destination) == before
    assert before.count(b"2") < 200_000


def test_a_paused_server_is_not_waited_for(server: Served, peers: Peers) -> None:
    run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
    go_on = server.pause()
    answers = [
        run_blocking(ask(Ask(server.address, message)), peers, soon(0.1)) for message in (RingGet(), PUT)
    ]
    fresh = run_blocking(ask(Ask(server.address, PUT)), Peers(IDENTITY), soon(0.1))
    go_on.set()
    codes = [answer.message.code for answer in [*answers, fresh] if isinstance(answer.message, Failure)]
    # The last two connected to a server that never said Welcome, so their puts were certainly not received.
    assert codes == ["unavailable", "unavailable", "unavailable"]
    assert run_blocking(ask(Ask(server.address, RingGet())), peers, soon()).message == Done()


def test_a_server_that_dies_inside_a_payload(peers: Peers) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        number = dialogue.hear().request
        whole = b"".join(encode_frame(number, BlockCopies([500_000]), [bytes(500_000)]))
        dialogue.socket.sendall(whole[:300_000])

    with scripted(script) as address:
        answer = run_blocking(ask(Ask(address, BlockGet(0, [b"k"]))), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"


@pytest.mark.parametrize("message", [RingGet(), PUT])
def test_a_server_that_dies_after_a_request_on_a_fresh_connection(peers: Peers, message: Message) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()

    with scripted(script) as address:
        answer = run_blocking(ask(Ask(address, message)), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == ("unavailable" if message.idempotent else "outcome_unknown")


def test_a_connection_that_died_while_idle_is_replaced_unnoticed(peers: Peers) -> None:
    replaced = threading.Event()

    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    def second(dialogue: Dialogue) -> None:
        replaced.set()
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    with scripted(first, second) as address:
        assert run_blocking(ask(Ask(address, PUT)), peers, soon()).message == Done()
        until(lambda: not idle_is_alive(peers, address))
        assert run_blocking(ask(Ask(address, PUT)), peers, soon()).message == Done()
        assert replaced.is_set()


def idle_is_alive(peers: Peers, address: str) -> bool:
    """Whether the pool's idle connection still stands, without taking it."""
    return peers._idle[address][0].alive()


def test_what_a_stopping_server_has_not_answered_was_not_done(peers: Peers) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()
        dialogue.say(0, Goodbye())

    with scripted(script) as address:
        answer = run_blocking(ask(Ask(address, PUT)), peers, soon())
    assert isinstance(answer.message, Failure)
    assert (answer.message.code, "stopping" in answer.message.text) == ("unavailable", True)


def test_a_goodbye_that_lies_unread_when_sending_fails_is_heard(peers: Peers) -> None:
    gone = threading.Event()

    def steps(address: str) -> Steps[Answer]:
        [first] = yield Submit([Ask(address, PUT)])
        assert gone.wait(PATIENCE_S)
        for _ in range(3):  # the first is answered by a reset, and what follows cannot be sent any more
            yield Submit([Ask(address, RingGet())])
            time.sleep(0.02)
        answer: Answer = yield Wait(first)
        return answer

    with scripted(leaving(gone)) as address:
        run_blocking(ask(Ask(address, RingGet())), peers, soon())
        answer = run_blocking(steps(address), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"


def test_it_may_be_asked_of_its_successor_at_once(peers: Peers) -> None:
    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()
        dialogue.say(0, Goodbye())

    def second(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    with scripted(first, second) as address:
        run_blocking(ask(Ask(address, RingGet())), peers, soon())
        assert run_blocking(ask(Ask(address, PUT)), peers, soon()).message == Done()


@pytest.mark.parametrize(("message", "again"), [(RingGet(), True), (PUT, False)])
def test_a_reused_connection_that_dies_under_a_request_is_retried_once_if_harmless(
    peers: Peers, message: Message, again: bool
) -> None:
    retried = threading.Event()

    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()

    def second(dialogue: Dialogue) -> None:
        retried.set()
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    with scripted(first, second) as address:
        run_blocking(ask(Ask(address, RingGet())), peers, soon())
        answer = run_blocking(ask(Ask(address, message)), peers, soon())
        if again:
            assert answer.message == Done()
        else:
            assert isinstance(answer.message, Failure)
            assert answer.message.code == "outcome_unknown"
        assert retried.is_set() is again


def test_a_request_is_retried_only_once(peers: Peers) -> None:
    def first(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())
        dialogue.hear()

    def second(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.hear()

    def third(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request, Done())

    with scripted(first, second, third) as address:
        run_blocking(ask(Ask(address, RingGet())), peers, soon())
        answer = run_blocking(ask(Ask(address, RingGet())), peers, soon())
        assert isinstance(answer.message, Failure)


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), b""])
def test_a_peer_that_speaks_something_else(peers: Peers, reply: bytes) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.hear()
        dialogue.socket.sendall(reply)

    with scripted(script) as address:
        answer = run_blocking(ask(Ask(address, PUT)), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"


def test_a_reply_to_what_was_not_asked_ends_the_connection(peers: Peers) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.greet()
        dialogue.say(dialogue.hear().request + 1, Done())
        with pytest.raises(EOFError):
            dialogue.hear()

    with scripted(script) as address:
        answer = run_blocking(ask(Ask(address, PUT)), peers, soon())
    assert isinstance(answer.message, Failure)
    assert "not outstanding" in answer.message.text


def test_no_welcome_in_time(peers: Peers) -> None:
    def script(dialogue: Dialogue) -> None:
        dialogue.hear()
        with pytest.raises(EOFError):
            dialogue.hear()

    with scripted(script) as address:
        hasty = Peers(IDENTITY, connect_timeout_s=0.05)
        answer = run_blocking(ask(Ask(address, PUT)), hasty, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"


def test_a_wrong_token_is_said_to_be_wrong(server: Served, service: KeyValues) -> None:
    stranger = Peers(Identity("acme:00", IDENTITY.caller))
    with pytest.raises(Unauthenticated, match="token"):
        stranger.welcome(server.address, soon())
    answer = run_blocking(ask(Ask(server.address, PUT)), stranger, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unauthenticated"
    assert service.welcomed == []


def test_an_oversized_request_fails_before_it_is_sent(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    answer = run_blocking(ask(Ask(server.address, BlockGet(0, [bytes(1 << 20)] * 17))), peers, soon())
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "too_large"
    assert service.handled == []


def test_a_deadline_that_has_passed_asks_nobody(server: Served, service: KeyValues, peers: Peers) -> None:
    answer = run_blocking(ask(Ask(server.address, PUT)), peers, time.monotonic() - 1.0)
    assert isinstance(answer.message, Failure)
    assert answer.message.code == "unavailable"
    assert service.handled == []


# -- the pool


def test_no_more_than_idle_max_connections_are_kept(server: Served, service: KeyValues) -> None:
    peers = Peers(IDENTITY, idle_max=1)
    both = threading.Barrier(2)

    def steps() -> Steps[None]:
        yield from ask(Ask(server.address, RingGet()))
        both.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: run_blocking(steps(), peers, soon()), range(2)))
    until(lambda: len(service.ended) == 1)
    peers.close()
    until(lambda: len(service.ended) == 2)


def test_a_forked_child_does_not_speak_on_its_parent_s_connections(
    server: Served, service: KeyValues, peers: Peers
) -> None:
    run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
    peers._pid = -1  # as if we were the child
    run_blocking(ask(Ask(server.address, RingGet())), peers, soon())
    assert len(service.welcomed) == 2


def test_the_key_vector_is_fixed() -> None:
    """It changes exactly when keys change, and then the two versions must not talk."""
    assert KEY_VECTOR.hex() == "6e285303b2fbb801a0733660f39a2191a9b9171f1f13c4787e694be230714190"


# -- a held connection


def test_a_connection_is_held_and_its_end_is_seen(service: KeyValues) -> None:
    with served(service) as server:
        connection = Connection.open(server.address, IDENTITY, soon())
        assert connection.welcome.node == "n1"
        assert connection.call(RingGet(), deadline=soon()).message == Done()
        put, payload = block_put({b"k": b"value"})
        assert connection.call(put, payload, deadline=soon()).message == BlockStored(["stored"])
        destination = memoryview(bytearray(5))
        connection.call(BlockGet(0, [b"k"]), sink=lambda *_: [destination], deadline=soon())
        assert bytes(destination) == b"value"
        assert connection.alive()
        assert len(service.welcomed) == 1
    until(lambda: not connection.alive())
    with pytest.raises(Unavailable):
        connection.call(RingGet(), deadline=soon())
    assert not connection.alive()
    connection.close()


def test_the_connection_s_end_is_the_holder_s(server: Served, service: KeyValues) -> None:
    connection = Connection.open(server.address, IDENTITY, soon())
    connection.close()
    until(lambda: service.ended == [service.welcomed[0].connection])
    connection.close()


def test_a_call_out_of_time_ends_the_connection(server: Served, service: KeyValues) -> None:
    connection = Connection.open(server.address, IDENTITY, soon())
    with pytest.raises(OutcomeUnknown):
        connection.call(PUT, deadline=soon(0.05))
    assert not connection.alive()
    until(lambda: len(service.ended) == 1)
    with pytest.raises(Unavailable, match="closed"):
        connection.call(RingGet(), deadline=soon())


def test_a_refusal_by_the_server_leaves_the_connection_open(server: Served, service: KeyValues) -> None:
    def refuse(*_: object) -> None:
        raise Refused("not today", b"detail")

    service.handle = refuse  # type: ignore[method-assign, assignment]
    connection = Connection.open(server.address, IDENTITY, soon())
    with pytest.raises(Refused, match="not today") as caught:
        connection.call(PUT, deadline=soon())
    assert caught.value.detail == b"detail"
    assert connection.alive()
    connection.close()


def test_opening_raises_what_went_wrong(server: Served) -> None:
    with pytest.raises(Unavailable):
        Connection.open(dead_address(), IDENTITY, soon())
    with pytest.raises(Unauthenticated):
        Connection.open(server.address, Identity("x", IDENTITY.caller), soon())
    with pytest.raises(Unavailable):
        Connection.open(server.address, IDENTITY, time.monotonic() - 1.0)


def test_hello_is_the_first_thing_said_and_hides_its_token_from_logs() -> None:
    heard: list[Message] = []

    def script(dialogue: Dialogue) -> None:
        heard.append(dialogue.hear().message)

    with scripted(script) as address, pytest.raises(Unavailable):
        Connection.open(address, IDENTITY, soon())
    assert heard == [Hello(1, IDENTITY.token, IDENTITY.caller, KEY_VECTOR)]
    assert IDENTITY.token not in repr(IDENTITY)
