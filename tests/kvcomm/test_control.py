"""The control wire over real sockets on loopback: a server in a thread with an event loop of its own."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvcomm import control
from kvcomm.block import BlockKey, Incarnation
from kvcomm.blockstore import StoreUsage
from kvcomm.control import Caller, ControlClient, ControlServer
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import (
    Conflict,
    Corrupt,
    KVCommError,
    OutcomeUnknown,
    PoolFull,
    Refused,
    StaleEpoch,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from kvcomm.wire import control_pb2 as pb
from kvcomm.wire import control_pb2_grpc
from kvcomm.wire.control_codec import NodeStatus
from kvcomm.wire.messages import (
    VALUE_BYTES_MAX,
    BlockItem,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordWrite,
    RingMap,
    RingNode,
    RingRange,
    RingTransition,
    Sibling,
)

T = TypeVar("T")
CREDENTIALS = Credentials(bytes(range(32)))
NODE_TOKEN = CREDENTIALS.token(NODE_TENANT)
TEAM_TOKEN = CREDENTIALS.token("team")
PATIENCE_S = 20.0
"""Of a test, where the thing it waits for must happen: generous, never a measurement."""

USAGE = StoreUsage(1 << 40, 2**33, 3, 4, 5, 6, 7)


def ring(epoch: int) -> RingMap:
    shards = [RingNode("shard-0", "tcp://127.0.0.1:1", "unix:///run/0.sock", "127.0.0.1:2", "rack-a", 3)]
    pools = [RingNode("pool-0", "tcp://127.0.0.1:3", "unix:///run/1.sock", "127.0.0.1:4", "rack-b", 1)]
    return RingMap(epoch, 3, 2, 1, 1, shards, pools)


@dataclass
class Backend:
    """A role that keeps everything in dictionaries and remembers who asked."""

    current: RingMap | None = None
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    records: dict[bytes, bytes] = field(default_factory=dict)
    callers: list[Caller] = field(default_factory=list)
    failure: Exception | None = None
    stall: bool = False

    def status(self) -> NodeStatus:
        epoch = self.current.epoch if self.current else 0
        return NodeStatus(
            "shard-0",
            "shard",
            "one",
            "0.1.0",
            Incarnation(2**64 - 1),
            epoch,
            1.5,
            USAGE,
            mode="minority",
            silent=("shard-1",),
        )

    def ring(self) -> RingMap | None:
        return self.current

    async def set_ring(self, ring: RingMap) -> None:
        if self.current and self.current != ring and ring.epoch <= self.current.epoch:
            raise Conflict(f"epoch {self.current.epoch} stands")
        self.current = ring

    async def list_blocks(self, caller: Caller, after: bytes, limit: int) -> list[BlockItem]:
        await self._called(caller)
        keys = [key for key in sorted(self.blocks) if key > after]
        return [BlockItem(key, len(self.blocks[key])) for key in keys[:limit]]

    async def get_block(self, caller: Caller, key: BlockKey) -> bytes | None:
        await self._called(caller)
        return self.blocks.get(key)

    async def get_records(self, caller: Caller, keys: Sequence[bytes], timeout_s: float) -> RecordStates:
        await self._called(caller)
        return RecordStates(
            [
                RecordState(
                    {"r1": 2}, [Sibling("r1", 2, 3 << 16, self.records[key]), Sibling("r2", 1, 4, None)]
                )
                if key in self.records
                else None
                for key in keys
            ],
            degraded=True,
        )

    async def put_records(
        self, caller: Caller, writes: Sequence[RecordWrite], timeout_s: float
    ) -> list[RecordVersion]:
        await self._called(caller)
        for write in writes:
            if write.value is None:
                self.records.pop(write.key, None)
            else:
                self.records[write.key] = write.value
        return [RecordVersion("r1", 3, {**write.context, "r1": 3}, 2) for write in writes]

    async def _called(self, caller: Caller) -> None:
        self.callers.append(caller)
        if self.stall:
            await asyncio.sleep(3600)
        if self.failure:
            raise self.failure


class Loop:
    """An event loop in a thread."""

    def __init__(self, make: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = make()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@dataclass
class Node:
    loop: Loop
    server: ControlServer
    backend: Backend
    address: str


@contextmanager
def serving(loop: Loop, backend: Backend, port: int = 0) -> Iterator[Node]:
    async def start() -> tuple[ControlServer, str]:
        server = ControlServer(backend, CREDENTIALS)
        address = await server.start("127.0.0.1", port)
        await server.set_serving(True)
        return server, address

    server, address = loop.run(start())
    try:
        yield Node(loop, server, backend, address)
    finally:
        loop.run(server.close())


def new_uvloop() -> asyncio.AbstractEventLoop:
    return pytest.importorskip("uvloop", reason="uvloop is not installed").new_event_loop()


@pytest.fixture(params=[asyncio.new_event_loop, new_uvloop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    running = Loop(request.param)
    yield running
    running.close()


@pytest.fixture
def node(loop: Loop) -> Iterator[Node]:
    with serving(loop, Backend()) as started:
        yield started


@pytest.fixture
def client(node: Node) -> Iterator[ControlClient]:
    with ControlClient(node.address, NODE_TOKEN) as opened:
        yield opened


def until(holds: Callable[[], T]) -> T:
    """The first true result, asked again and again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if result := holds():
            return result
        assert time.monotonic() < deadline, "not within the test's patience"
        time.sleep(0.01)


# -- verbs ---------------------------------------------------------------------------------------------------


def test_status(node: Node, client: ControlClient) -> None:
    assert client.status() == node.backend.status()
    node.backend.current = ring(7)
    assert client.status().epoch == 7


def test_the_ring_is_handed_over_and_only_goes_forward(node: Node, client: ControlClient) -> None:
    assert client.ring() is None
    assert client.set_ring(ring(4)) == 4
    assert client.ring() == ring(4)
    assert client.set_ring(ring(4)) == 4
    with pytest.raises(Conflict, match="epoch 4 stands"):
        client.set_ring(ring(3))
    assert client.ring() == ring(4)


def test_a_ring_on_the_move_crosses_the_control_wire_whole(client: ControlClient) -> None:
    shards = [*ring(1).shards, RingNode("shard-1", "tcp://127.0.0.1:9", "", "", "rack-a", 1)]
    moving = RingTransition("serve", shards, [RingRange(1 << 63, (1 << 64) - 1, "shard-1")])
    plain = ring(5)
    client.set_ring(plain)
    assert client.ring() == plain
    whole = msgspec.structs.replace(ring(6), ranges=[RingRange(0, 7, "shard-0")], transition=moving)
    client.set_ring(whole)
    assert client.ring() == whole
    odd = msgspec.structs.replace(whole, epoch=7, transition=msgspec.structs.replace(moving, stage="odd"))
    with pytest.raises(ValueError, match="no stage 'odd'"):
        client.set_ring(odd)


def test_only_the_clusters_own_processes_set_the_ring(node: Node) -> None:
    with ControlClient(node.address, TEAM_TOKEN) as team:
        with pytest.raises(Refused, match="own processes"):
            team.set_ring(ring(1))
        assert team.ring() is None
        assert team.status().node == "shard-0"


def test_blocks(node: Node) -> None:
    keys = [BlockKey(bytes([index]) * 32) for index in range(5)]
    node.backend.blocks = {key: bytes([index]) * (256 + index) for index, key in enumerate(keys)}
    with ControlClient(node.address, TEAM_TOKEN) as client:
        assert client.get_block(keys[3]) == bytes([3]) * 259
        assert client.get_block(BlockKey(bytes([9]) * 32)) is None
        first = client.list_blocks(limit=3)
        rest = client.list_blocks(after=first[-1].key, limit=3)
        assert [item.key for item in first + rest] == keys
        assert [item.copy_bytes for item in rest] == [259, 260]
    assert {caller.tenant for caller in node.backend.callers} == {"team"}
    assert {caller.digest for caller in node.backend.callers} == {CREDENTIALS.tenant_digest("team")}
    assert not node.backend.callers[0].is_node


def test_an_empty_copy_is_not_a_miss(node: Node, client: ControlClient) -> None:
    node.backend.blocks[bytes(32)] = b""
    assert client.get_block(BlockKey(bytes(32))) == b""


@pytest.mark.slow
def test_a_block_that_is_too_large_goes_over_the_data_wire(node: Node, client: ControlClient) -> None:
    node.backend.blocks[bytes(32)] = bytes(control.BLOCK_BYTES_MAX)
    assert len(client.get_block(BlockKey(bytes(32)), timeout_s=PATIENCE_S) or b"") == control.BLOCK_BYTES_MAX
    node.backend.blocks[bytes(32)] = bytes(control.BLOCK_BYTES_MAX + 1)
    with pytest.raises(TooLarge, match="data wire"):
        client.get_block(BlockKey(bytes(32)), timeout_s=PATIENCE_S)


def test_records(node: Node, client: ControlClient) -> None:
    writes = [RecordWrite(b"a", b"1", {"r9": 4}), RecordWrite(b"b", b"", {})]
    versions = client.put_records(writes)
    assert versions == [RecordVersion("r1", 3, {"r9": 4, "r1": 3}, 2), RecordVersion("r1", 3, {"r1": 3}, 2)]
    states = client.get_records([b"a", b"b", b"c"])
    assert states.degraded
    assert states.states == [
        RecordState({"r1": 2}, [Sibling("r1", 2, 3 << 16, b"1")]),
        RecordState({"r1": 2}, [Sibling("r1", 2, 3 << 16, b"")]),
        None,
    ]
    client.put_records([RecordWrite(b"a", None, {"r1": 3})])
    assert client.get_records([b"a"]).states == [None]


# -- watching ------------------------------------------------------------------------------------------------


def test_watchers_hear_of_new_epochs(node: Node, client: ControlClient) -> None:
    client.set_ring(ring(2))
    watches = [client.watch_ring(timeout_s=PATIENCE_S), client.watch_ring(1, timeout_s=PATIENCE_S)]
    late = client.watch_ring(2, timeout_s=PATIENCE_S)
    assert [next(watch) for watch in watches] == [ring(2), ring(2)]
    client.set_ring(ring(3))
    assert [next(watch) for watch in (*watches, late)] == [ring(3)] * 3

    async def learn_otherwise() -> None:
        node.backend.current = ring(9)
        node.server.ring_changed()

    node.loop.run(learn_otherwise())
    assert [next(watch).epoch for watch in (*watches, late)] == [9, 9, 9]
    for watch in (*watches, late):
        watch.close()  # type: ignore[attr-defined]


def test_a_fast_sequence_is_delivered_in_order_up_to_the_last(node: Node, client: ControlClient) -> None:
    seen: list[int] = []

    def watch() -> None:
        for each in client.watch_ring(timeout_s=PATIENCE_S):
            seen.append(each.epoch)
            if each.epoch == 50:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    for epoch in range(1, 51):
        client.set_ring(ring(epoch))
    watcher.join(PATIENCE_S)
    assert seen[-1] == 50
    assert all(earlier < later for earlier, later in pairwise(seen))


def test_watching_ends_in_time(client: ControlClient) -> None:
    assert list(client.watch_ring(timeout_s=0.1)) == []


# -- credentials ---------------------------------------------------------------------------------------------


def every_verb(client: ControlClient) -> list[Callable[[], object]]:
    return [
        client.status,
        client.ring,
        lambda: client.set_ring(ring(1)),
        lambda: next(client.watch_ring(timeout_s=PATIENCE_S)),
        client.list_blocks,
        lambda: client.get_block(BlockKey(bytes(32))),
        lambda: client.get_records([b"a"]),
        lambda: client.put_records([RecordWrite(b"a", b"1", {})]),
    ]


@pytest.mark.parametrize("token", ["", "team:00", "team", Credentials(bytes(32)).token(NODE_TENANT), "é:ü"])
def test_no_verb_answers_a_wrong_token(node: Node, token: str) -> None:
    node.backend.current = ring(1)
    if not token.isascii():
        token = token.encode("ascii", "replace").decode()
    with ControlClient(node.address, token) as stranger:
        for verb in every_verb(stranger):
            with pytest.raises(Unauthenticated):
                verb()
    assert node.backend.callers == []
    assert node.backend.records == {}


def test_the_verbs_above_are_all_there_are() -> None:
    methods = [method.name for method in pb.DESCRIPTOR.services_by_name["Control"].methods]
    with ControlClient("127.0.0.1:1", NODE_TOKEN) as client:
        assert len(methods) == len(every_verb(client))


def test_without_metadata_the_status_says_why(node: Node) -> None:
    with grpc.insecure_channel(node.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(pb.StatusRequest(), timeout=PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "Bearer" in (caught.value.details() or "")
        metadata = (("authorization", f"bearer  {TEAM_TOKEN}"),)
        assert stub.Status(pb.StatusRequest(), timeout=PATIENCE_S, metadata=metadata).node == "shard-0"


# -- standard services ---------------------------------------------------------------------------------------


def test_health_needs_no_credential(node: Node) -> None:
    with grpc.insecure_channel(node.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def check(service: str) -> int:
            return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S).status)

        assert check("") == check("kvcomm.v1.Control") == health_pb2.HealthCheckResponse.SERVING
        node.loop.run(node.server.set_serving(False))
        assert check("") == check("kvcomm.v1.Control") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check("somebody.else")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_client_waits_until_the_node_serves(node: Node, client: ControlClient) -> None:
    node.loop.run(node.server.set_serving(False))
    assert not client.serving()
    with pytest.raises(Unavailable, match="does not serve"):
        client.wait_until_serving(timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.wait_until_serving, timeout_s=PATIENCE_S)
        node.loop.run(node.server.set_serving(True))
        waiting.result(PATIENCE_S)
    assert client.serving()


def services(address: str, token: str | None) -> list[str]:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        (reply,) = stub.ServerReflectionInfo(asked, timeout=PATIENCE_S, metadata=metadata)
        return sorted(service.name for service in reply.list_services_response.service)


def test_reflection_describes_the_services_to_who_belongs_here(node: Node) -> None:
    assert services(node.address, TEAM_TOKEN) == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "kvcomm.v1.Control",
    ]
    with pytest.raises(grpc.RpcError) as caught:
        services(node.address, None)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure",
    [
        Unavailable("u"),
        StaleEpoch("s", b"\x00\xffmap"),
        Conflict("c"),
        OutcomeUnknown("o"),
        Corrupt("d"),
        Refused("r"),
        PoolFull("p"),
        TooLarge("t"),
        Unauthenticated("a"),
        KVCommError("k"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_arrives_as_what_it_was(node: Node, client: ControlClient, failure: KVCommError) -> None:
    node.backend.failure = failure
    with pytest.raises(KVCommError) as caught:
        client.get_records([b"a"])
    assert type(caught.value) is type(failure)
    assert (caught.value.message, caught.value.detail) == (failure.message, failure.detail)


def test_a_detail_too_long_for_metadata_is_left_out(node: Node, client: ControlClient) -> None:
    node.backend.failure = StaleEpoch("newer", bytes(100_000))
    with pytest.raises(StaleEpoch) as caught:
        client.get_records([b"a"])
    assert caught.value.detail == b""


def test_each_code_has_its_grpc_status(node: Node) -> None:
    node.backend.failure = PoolFull("full")
    with grpc.insecure_channel(node.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        metadata = (("authorization", f"Bearer {TEAM_TOKEN}"),)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetRecords(pb.GetRecordsRequest(keys=[b"a"]), timeout=PATIENCE_S, metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = {item.key: item.value for item in caught.value.trailing_metadata() or ()}
    assert str(trailing["kvcomm-code"]) == "pool_full"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda client: client.get_block(BlockKey(b"short")), "32 bytes, got 5"),
        (lambda client: client.list_blocks(b"short"), "32 bytes, got 5"),
        (lambda client: client.list_blocks(limit=70_000), "over 65536"),
        (lambda client: client.get_records([b""]), "not empty"),
        (lambda client: client.put_records([RecordWrite(b"", b"1", {})]), "not empty"),
        (lambda client: client.set_ring(RingMap(1, 1, 2, 1, 1, [], [])), "do not fit 1 replicas"),
        (lambda client: client.set_ring(RingMap(0, 1, 1, 1, 1, [], [])), "no ring"),
        (lambda client: client.set_ring(RingMap(1, 1, 1, 1, 1, [ring(1).shards[0]] * 2, [])), "different"),
    ],
)
def test_the_callers_mistake_is_a_value_error(
    node: Node, client: ControlClient, ask: Callable[[ControlClient], object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ask(client)
    assert node.backend.callers == []


def test_an_oversized_value_is_refused(node: Node, client: ControlClient) -> None:
    with pytest.raises(TooLarge, match="a record's value"):
        client.put_records([RecordWrite(b"a", bytes(VALUE_BYTES_MAX + 1), {})])
    with pytest.raises(Refused, match="limit of the control wire"):
        client.put_records([RecordWrite(b"a", bytes(control.MESSAGE_BYTES_MAX), {})])
    assert node.backend.records == {}


def test_our_own_bug_is_no_success(node: Node, client: ControlClient) -> None:
    node.backend.failure = ZeroDivisionError("a bug")
    with pytest.raises(KVCommError, match="a bug"):
        client.get_records([b"a"])
    node.backend.failure = None
    assert client.get_records([b"a"]).states == [None]


@pytest.mark.slow
def test_late_answers_are_told_apart(
    node: Node, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.backend.stall = True
    with pytest.raises(Unavailable):
        client.get_records([b"a"], timeout_s=0.1)
    with pytest.raises(OutcomeUnknown):
        client.put_records([RecordWrite(b"a", b"1", {})], timeout_s=0.1)
    monkeypatch.setattr(control, "CALL_TIMEOUT_S_MAX", 0.05)  # the server's own bound, with a patient client
    with pytest.raises(Unavailable, match="not done within"):
        client.get_records([b"a"], timeout_s=PATIENCE_S)
    with pytest.raises(OutcomeUnknown, match="not done within"):
        client.put_records([RecordWrite(b"a", b"1", {})], timeout_s=PATIENCE_S)


# -- restarts ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_without_a_node_a_call_fails_in_time() -> None:
    with ControlClient(f"127.0.0.1:{free_port()}", NODE_TOKEN) as client:
        with pytest.raises(Unavailable):
            client.status(timeout_s=PATIENCE_S)
        with pytest.raises(OutcomeUnknown):
            client.put_records([RecordWrite(b"a", b"1", {})], timeout_s=0.2)


@pytest.mark.slow
def test_a_client_finds_a_restarted_node(loop: Loop) -> None:
    backend = Backend(current=ring(1))
    with serving(loop, backend) as first:
        port = int(first.address.rpartition(":")[2])
        client = ControlClient(first.address, NODE_TOKEN)
        watch = client.watch_ring(timeout_s=PATIENCE_S)
        assert next(watch).epoch == 1
    try:
        with pytest.raises(Unavailable):
            client.status(timeout_s=PATIENCE_S)
        backend.current = ring(2)
        with serving(loop, backend, port):

            def answers() -> bool:
                with suppress(Unavailable):
                    return client.status(timeout_s=PATIENCE_S).epoch == 2
                return False

            until(answers)
            assert next(watch).epoch == 2, "the watch goes on by itself"
            client.wait_until_serving(timeout_s=PATIENCE_S)
            watch.close()  # type: ignore[attr-defined]
    finally:
        client.close()


def test_a_port_in_use_is_told(node: Node) -> None:
    port = int(node.address.rpartition(":")[2])
    second = ControlServer(Backend(), CREDENTIALS)
    with pytest.raises(Refused, match=f"cannot listen at 127.0.0.1:{port}"):
        node.loop.run(second.start("127.0.0.1", port))
    node.loop.run(second.close())
    node.loop.run(second.close())


def test_closing_ends_watches_and_calls(loop: Loop) -> None:
    with serving(loop, Backend(current=ring(1))) as node, ControlClient(node.address, NODE_TOKEN) as client:
        node.backend.stall = True
        watch = client.watch_ring(timeout_s=PATIENCE_S)
        next(watch)
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.get_records, [b"a"], timeout_s=PATIENCE_S)
            until(lambda: node.backend.callers)
            node.loop.run(node.server.close())
            with pytest.raises(KVCommError):
                call.result(PATIENCE_S)
        watch.close()  # type: ignore[attr-defined]


def test_several_nodes_share_one_loop(loop: Loop) -> None:
    with serving(loop, Backend(current=ring(1))) as one, serving(loop, Backend(current=ring(2))) as two:
        assert one.address != two.address
        for node, epoch in ((one, 1), (two, 2)):
            with ControlClient(node.address, TEAM_TOKEN) as client:
                assert client.status().epoch == epoch


def test_many_threads_share_one_client(node: Node, client: ControlClient) -> None:
    def ask(index: int) -> bytes | None:
        name = str(index).encode()
        client.put_records([RecordWrite(name, name, {})], timeout_s=PATIENCE_S)
        (state,) = client.get_records([name], timeout_s=PATIENCE_S).states
        return state.siblings[0].value if state else None

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(64))) == [str(index).encode() for index in range(64)]


def test_the_options_are_the_tuned_ones() -> None:
    """Defaults need 25 s to come back after a partition of 30 s, these about 1 s; ping strikes would cut our
    own clients off."""
    channel, server = dict(control.CHANNEL_OPTIONS), dict(control.SERVER_OPTIONS)
    for side in (channel, server):
        assert side["grpc.keepalive_time_ms"] == side["grpc.keepalive_timeout_ms"] == 1000
        assert side["grpc.keepalive_permit_without_calls"] == 1
    assert channel["grpc.initial_reconnect_backoff_ms"] == 100
    assert channel["grpc.min_reconnect_backoff_ms"] == 300
    assert channel["grpc.max_reconnect_backoff_ms"] == 1000
    assert channel["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.min_ping_interval_without_data_ms"] == 500
    assert server["grpc.http2.max_ping_strikes"] == 0


@pytest.mark.processes
def test_an_agent_never_loads_grpc() -> None:
    program = (
        "import sys, kvcomm, kvcomm.config, kvcomm.settings, kvcomm.instance\n"
        "assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)
