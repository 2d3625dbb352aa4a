"""Three shards in one process, over real sockets and real disks, seen through the client's tier."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import NO_PARENT, Incarnation, block_keys, header_for
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import Conflict, KVCommError, OutcomeUnknown, Refused, StaleEpoch, Unavailable
from kvcomm.rpc import KEY_VECTOR, Connection, Identity, Peers, run_blocking
from kvcomm.steps import Steps
from kvcomm.tier import Block, BlockCopy
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    PROTOCOL_VERSION,
    BlockGet,
    BlockPut,
    Done,
    Failure,
    Hello,
    HotRecords,
    HotReport,
    KeyHeat,
    RecordGet,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordWrite,
    RingGet,
    RingMap,
    RingNode,
    StrongOrder,
    StrongOutcome,
    StrongPrepare,
    Want,
)
from l3_shard.desk import ShardLimits
from l3_shard.refilling import RefillOptions
from l3_shard.server import RunningShard, ShardOptions, ShardStopped, run_shard
from l3_shard.store import Fsync, RecordStore
from l3_shard.tier import L3Tier
from tests.blockstores import DictStore
from tests.namespaces import namespace
from tests.peers import CREDENTIALS, IDENTITY, Dialogue, soon, until

NODE = Identity(CREDENTIALS.token(NODE_TENANT), Incarnation(8))
NAMESPACE = namespace(head_dim=256).for_tenant(CREDENTIALS.tenant_digest("acme"))


class Cluster:
    """Shards as tasks of one loop on a thread of its own; their directories outlive them."""

    def __init__(self, fsync: Fsync = "interval", names: str = "abc") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvc-"))
        self.fsync: Fsync = fsync
        self.names = names
        self.epoch = 0
        self.running: dict[str, RunningShard] = {}
        self.stores = {name: DictStore() for name in names}
        self.disks: dict[str, Any] = {}
        self.blocks_limit_s, self.orphan_s = 60.0, 10.0
        self.ends: dict[str, BaseException | None] = {}
        self._lives = count(11)
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.peers = Peers(IDENTITY)
        for name in names:
            self.start(name)
        self.issue()

    def start(self, name: str) -> None:
        self.ends.pop(name, None)

        async def boot() -> None:
            self._stops[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._run(name))

        self._call(boot())
        until(lambda: name in self.running or name in self.ends)

    async def _run(self, name: str) -> None:
        try:
            await run_shard(
                node=name,
                instance="test",
                incarnation=Incarnation(next(self._lives)),
                credentials=CREDENTIALS,
                addresses=[f"unix://{self.directory}/{name}.sock"],
                options=ShardOptions(
                    self.directory / name,
                    fsync=self.fsync,
                    fsync_interval_s=0.01,
                    limits=ShardLimits(request_timeout_s=2.0),
                    refill=RefillOptions(limit_s=self.blocks_limit_s),
                    orphan_s=self.orphan_s,
                ),
                blocks=self.stores[name],
                disk=self.disks.get(name),
                stop=self._stops[name],
                ready=lambda shard: self.running.update({name: shard}),
            )
        except BaseException as error:
            self.ends[name] = error
        else:
            self.ends[name] = None
        finally:
            self.running.pop(name, None)

    def stop(self, name: str) -> None:
        self.loop.call_soon_threadsafe(self._stops[name].set)
        until(lambda: name in self.ends)

    @property
    def map(self) -> RingMap:
        shards = [
            RingNode(name, f"unix://{self.directory}/{name}.sock", "", "", name, 1) for name in self.names
        ]
        return RingMap(self.epoch, min(3, len(self.names)), min(2, len(self.names)), 1, 1, shards, [])

    def issue(self) -> None:
        """A new epoch, handed to every shard that runs."""
        self.epoch += 1
        for shard in self.running.values():
            assert self.on_loop(lambda shard=shard: shard.adopt(self.map)) == self.epoch

    def on_loop(self, call: Any) -> Any:
        async def run() -> Any:
            return call()

        return self._call(run())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def tier(self) -> L3Tier:
        return L3Tier(self.map, timeout_s=3.0)

    def run(self, steps: Steps[Any]) -> Any:
        return run_blocking(steps, self.peers, soon())

    def put(self, key: bytes, value: bytes | None, context: dict[str, int] | None = None) -> Any:
        return self.run(self.tier().record_put([RecordWrite(key, value, context or {})]))[0]

    def get(self, key: bytes) -> Any:
        return self.run(self.tier().record_get([key]))[0]

    def close(self) -> None:
        for name in list(self.running):
            self.stop(name)
        self.peers.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        shutil.rmtree(self.directory)


@pytest.fixture(params=["interval", "always"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    running = Cluster(request.param)
    yield running
    running.close()


@pytest.fixture
def lone() -> Iterator[Cluster]:
    """One shard."""
    running = Cluster(names="a")
    yield running
    running.close()


def make_copies(count: int) -> list[BlockCopy]:
    parent, copies = NO_PARENT, []
    for index, key in enumerate(block_keys(NAMESPACE, range(16 * count))):
        payload = memoryview(os.urandom(NAMESPACE.block_bytes))
        header = header_for(
            NAMESPACE, key, parent, payload, logical_start=16 * index, producer=Incarnation(5)
        )
        copies.append(BlockCopy(header, payload))
        parent = key
    return copies


def test_records_are_written_read_replaced_listed_and_deleted(cluster: Cluster) -> None:
    first = cluster.put(b"dir/k", b"1")
    assert first.acks >= 2 and first.counter == 1
    answer = cluster.get(b"dir/k")
    assert answer.values == (b"1",) and not answer.degraded and answer.context == first.context
    cluster.put(b"dir/k", b"2")
    assert set(cluster.get(b"dir/k").values) == {b"1", b"2"}
    cluster.put(b"dir/k", b"3", cluster.get(b"dir/k").context)
    assert cluster.get(b"dir/k").values == (b"3",)
    assert cluster.run(cluster.tier().record_scan(b"dir/")) == [b"dir/k"]
    cluster.put(b"dir/k", None, cluster.get(b"dir/k").context)
    assert cluster.get(b"dir/k").values == () and cluster.get(b"never").context == {}
    until(lambda: cluster.run(cluster.tier().record_scan(b"dir/")) == [])


def test_a_copy_that_was_damaged_in_its_shard_is_hidden_and_published_again(lone: Cluster) -> None:
    copies = make_copies(4)
    keys = [copy.key for copy in copies]
    tier, stored = lone.tier(), lone.stores["a"].copies
    lone.run(tier.put(copies))
    lone.on_loop(lambda: stored[keys[2]].buffer.__setitem__(-1, stored[keys[2]].buffer[-1] ^ 1))
    found: dict[int, Block] = {}
    lone.run(tier.get(keys, found.__setitem__))
    assert sorted(found) == [0, 1, 3]
    assert lone.run(tier.put(copies)) == ["present", "present", "stored", "present"]
    lone.run(tier.get(keys, found.__setitem__))
    assert bytes(found[2].payload) == bytes(copies[2].payload)


def test_a_client_that_uses_a_number_twice_harms_itself_alone(lone: Cluster) -> None:
    """Not the shard, which would find that it answered one request twice."""
    hello = Hello(PROTOCOL_VERSION, IDENTITY.token, IDENTITY.caller, KEY_VECTOR)
    put = b"".join(encode_frame(1, RecordPut(1, [RecordWrite(b"k", b"v", {})])))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{lone.directory}/a.sock")
        rogue = Dialogue(connection)
        rogue.say(0, hello)
        rogue.hear()
        connection.sendall(put + put)
        assert isinstance(rogue.hear().message, Failure)
    lone.put(b"other", b"2")
    assert lone.get(b"other").values == (b"2",)
    assert lone.ends == {}


def test_many_records_in_one_batch(cluster: Cluster) -> None:
    names = [b"n/%03d" % index for index in range(200)]
    cluster.run(cluster.tier().record_put([RecordWrite(name, name, {}) for name in names]))
    answers = cluster.run(cluster.tier().record_get(names))
    assert [answer.values for answer in answers] == [(name,) for name in names]
    assert cluster.run(cluster.tier().record_scan(b"n/")) == names


@pytest.mark.slow
def test_threads_that_write_one_record_lose_nothing(cluster: Cluster) -> None:
    problems: list[BaseException] = []

    def append(number: int) -> None:
        try:
            for _ in range(5):
                answer = cluster.get(b"log")
                cluster.put(b"log", b"%d" % number + b",".join(sorted(answer.values))[:64], answer.context)
        except Conflict:
            pass
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert problems == [] and cluster.get(b"log").values


@pytest.mark.slow
def test_replicas_hold_the_same(cluster: Cluster) -> None:
    for index in range(20):
        cluster.put(b"k%d" % index, b"v")
    until(lambda: all(cluster.on_loop(shard.record_count) == 20 for shard in cluster.running.values()))
    tenant = CREDENTIALS.tenant_digest("acme")
    for name in cluster.names:
        cluster.stop(name)
    states = []
    for name in cluster.names:
        store = RecordStore(cluster.directory / name, fsync="interval")
        states.append(store.load([tenant + b"k%d" % index for index in range(20)]))
        store.close()
    assert states[0] == states[1] == states[2] and None not in states[0][0]


def test_records_survive_a_restart_of_every_shard(cluster: Cluster) -> None:
    cluster.put(b"k", b"v")
    for name in cluster.names:
        cluster.stop(name)
    assert set(cluster.ends.values()) == {None}
    for name in cluster.names:
        cluster.start(name)
    cluster.issue()
    assert cluster.get(b"k").values == (b"v",)


def test_the_map_outlives_the_records(lone: Cluster) -> None:
    """As after a power cut, where they are not synced."""
    until(lambda: lone.on_loop(lone.running["a"].ring).epoch == 1)
    lone.stop("a")
    (strong,) = lone.directory.glob("a/**/strong")
    for path in strong.parent.iterdir():
        if path.is_file():
            path.unlink()
    lone.start("a")
    assert lone.on_loop(lone.running["a"].ring).epoch == 1


def test_one_dead_shard_stops_nobody_and_two_are_an_unknown_outcome(cluster: Cluster) -> None:
    cluster.put(b"k", b"v")
    cluster.stop("a")
    assert cluster.get(b"k").values == (b"v",)
    cluster.put(b"k", b"w", cluster.get(b"k").context)
    cluster.stop("b")
    assert cluster.get(b"k").values == (b"w",)
    with pytest.raises(OutcomeUnknown):
        cluster.put(b"k", b"x", cluster.get(b"k").context)
    cluster.stop("c")
    with pytest.raises(Unavailable):
        cluster.get(b"k")


def test_an_old_map_is_replaced_on_the_way(cluster: Cluster) -> None:
    tier = cluster.tier()
    cluster.issue()
    cluster.run(tier.record_put([RecordWrite(b"k", b"v", {})]))
    assert tier.ring.epoch == cluster.epoch == 2
    assert cluster.on_loop(lambda: cluster.running["a"].adopt(RingMap(1, 1, 1, 1, 1, [], []))) == 2


def test_blocks_are_stored_and_fetched(cluster: Cluster) -> None:
    copies = make_copies(40)
    keys = [copy.key for copy in copies]
    tier = cluster.tier()
    assert cluster.run(tier.put(copies)) == ["stored"] * 40
    assert cluster.run(tier.put(copies[:3])) == ["present"] * 3
    assert cluster.run(tier.lookup(keys)) == [True] * 40
    found: dict[int, Block] = {}
    cluster.run(tier.get(keys, lambda index, block: found.update({index: block})))
    assert [bytes(found[index].payload) for index in range(40)] == [bytes(copy.payload) for copy in copies]
    assert sum(len(store.copies) for store in cluster.stores.values()) == 40


def test_old_epochs_are_refused_for_blocks_too(lone: Cluster) -> None:
    lone.issue()
    (copy,) = make_copies(1)
    with connection(lone) as shard:
        for message, payload in (
            (BlockGet(1, [copy.key]), ()),
            (BlockPut(1, [Want(copy.key, copy.copy_bytes)]), (copy.header.pack(), copy.payload)),
        ):
            with pytest.raises(StaleEpoch):
                shard.call(message, payload, deadline=soon())
        assert shard.call(RingGet(), deadline=soon()).message == lone.map
        assert shard.welcome.epoch == 2 and shard.welcome.role == "shard"
    assert not lone.stores["a"].copies


class connection:
    """A connection to shard ``a``, closed on leaving."""

    def __init__(self, cluster: Cluster, identity: Identity = IDENTITY) -> None:
        self._connection = Connection.open(f"unix://{cluster.directory}/a.sock", identity, soon())

    def __enter__(self) -> Connection:
        return self._connection

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def test_a_tenant_can_neither_read_another_nor_speak_replication(lone: Cluster) -> None:
    lone.put(b"k", b"secret")
    other = Identity(CREDENTIALS.token("rival"), Incarnation(9))
    with connection(lone, other) as shard:
        states = shard.call(RecordGet(1, [b"k"]), deadline=soon()).message
        assert getattr(states, "states", None) == [None]
        stored = CREDENTIALS.tenant_digest("acme") + b"k"
        with pytest.raises(Refused, match="own nodes only"):
            shard.call(RecordReplicate(1, [stored], [RecordState({}, [])]), deadline=soon())


def test_many_requests_on_one_connection(lone: Cluster) -> None:
    """The commits of one turn share a transaction; every request still gets its own answer."""
    messages = [RecordPut(1, [RecordWrite(b"k%d" % index, b"v", {})]) for index in range(50)]
    with connection(lone) as shard:
        for message in messages:
            assert getattr(shard.call(message, deadline=soon()).message, "versions", None)


def test_a_disk_that_fails_ends_the_shard_with_its_reason(
    lone: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from l3_shard.store import DiskFailed

    def broken(*_: object) -> None:
        raise DiskFailed("fsync failed: Input/output error")

    monkeypatch.setattr(RecordStore, "write", broken)
    with pytest.raises(KVCommError):
        lone.put(b"k", b"v")
    until(lambda: "a" in lone.ends)
    assert isinstance(lone.ends["a"], ShardStopped) and "Input/output error" in str(lone.ends["a"])


def test_a_failed_periodic_sync_ends_the_shard(lone: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from l3_shard.store import DiskFailed

    calls: list[int] = []

    def broken(store: RecordStore) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise DiskFailed("fsync failed")

    monkeypatch.setattr(RecordStore, "sync", broken)
    with suppress(KVCommError):  # what the shard notes by itself may be the first that is synced
        lone.put(b"k", b"v")
    until(lambda: "a" in lone.ends)
    assert isinstance(lone.ends["a"], ShardStopped)


def test_a_full_disk_is_refused_and_the_shard_goes_on(lone: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from l3_shard.store import DiskFull

    def full(*_: object) -> None:
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(RecordStore, "write", full)
        with pytest.raises(Unavailable):
            lone.put(b"k", b"v")
    assert lone.put(b"k", b"v").counter == 1


def test_a_directory_in_use_is_refused(lone: Cluster) -> None:
    async def second() -> None:
        await run_shard(
            node="a",
            instance="test",
            incarnation=Incarnation(12),
            credentials=CREDENTIALS,
            addresses=[f"unix://{lone.directory}/second.sock"],
            options=ShardOptions(lone.directory / "a"),
            blocks=DictStore(),
            stop=asyncio.Event(),
        )

    with pytest.raises(Refused, match="another process owns"):
        asyncio.run(second())


def strong(cluster: Cluster, op: str, key: bytes, value: bytes | None = None, expected: bytes = b"") -> Any:
    order = StrongOrder(key, op, expected, value)
    return cluster.run(cluster.tier().strong_change([order]))[0]


def strong_read(cluster: Cluster, key: bytes) -> Any:
    return cluster.run(cluster.tier().strong_read([key]))[0]


def voting(cluster: Cluster, *names: str) -> None:
    """Wait until these (all) shards vote."""
    shards = [cluster.running[name] for name in names or cluster.names]
    until(lambda: all(shard.strong_counts().votes for shard in shards))


def test_strong_records_are_changed_compared_and_deleted(cluster: Cluster) -> None:
    voting(cluster)
    assert strong_read(cluster, b"k") == StrongOutcome("", b"", None)
    first = strong(cluster, "put", b"k", b"1")
    assert strong_read(cluster, b"k") == StrongOutcome("", first.version, b"1")
    second = strong(cluster, "cas", b"k", b"2", first.version)
    assert second.code == "" and second.version != first.version
    late = strong(cluster, "cas", b"k", b"3", first.version)
    assert (late.code, late.version, late.value) == ("conflict", second.version, b"2")
    assert strong(cluster, "delete", b"k").code == ""
    assert strong_read(cluster, b"k").value is None
    assert cluster.get(b"k").values == (), "the eventual record of the same name is another"


def test_strong_records_survive_the_restart_of_all_shards(cluster: Cluster) -> None:
    voting(cluster)
    version = strong(cluster, "put", b"k", b"v").version
    for name in cluster.names:
        cluster.stop(name)
    for name in cluster.names:
        cluster.start(name)
    cluster.issue()
    voting(cluster)
    assert strong_read(cluster, b"k") == StrongOutcome("", version, b"v")
    assert strong(cluster, "cas", b"k", b"w", version).code == ""


def test_a_shard_that_lost_its_disk_votes_again_when_it_has_caught_up(cluster: Cluster) -> None:
    voting(cluster)
    version = strong(cluster, "put", b"k", b"v").version
    cluster.stop("b")
    shutil.rmtree(cluster.directory / "b")
    cluster.start("b")
    cluster.issue()
    voting(cluster)
    cluster.stop("a")
    assert strong_read(cluster, b"k") == StrongOutcome("", version, b"v")


def test_without_a_majority_a_change_is_refused_and_nothing_is_changed(cluster: Cluster) -> None:
    voting(cluster)
    strong(cluster, "put", b"k", b"v")
    cluster.stop("a")
    assert strong_read(cluster, b"k").value == b"v"
    cluster.stop("b")
    for order in (StrongOrder(b"k", "put", b"", b"w"), StrongOrder(b"new", "put", b"", b"w")):
        with pytest.raises((Unavailable, OutcomeUnknown)):
            cluster.run(cluster.tier().strong_change([order]))
    with pytest.raises(Unavailable):
        cluster.run(cluster.tier().strong_read([b"k"]))


def test_votes_are_taken_from_nodes_only(cluster: Cluster) -> None:
    voting(cluster)
    with connection(cluster) as shard, pytest.raises(Refused, match="own nodes"):
        shard.call(StrongPrepare(cluster.epoch, bytes(16) + b"k", b""), deadline=soon())


def test_answers_about_hot_records_are_marked_and_reports_added_up(lone: Cluster) -> None:
    lone.put(b"state/n/k", b"v")
    assert not lone.get(b"state/n/k").hot
    [shard] = lone.running.values()
    stored = CREDENTIALS.tenant_digest("acme") + b"state/n/k"
    node = Connection.open(shard.addresses[0], NODE, soon())
    agent = Connection.open(shard.addresses[0], IDENTITY, soon())
    try:
        order = HotRecords([stored], 30.0)
        assert node.call(order, deadline=soon()).message == Done()
        assert lone.get(b"state/n/k").hot
        with pytest.raises(Refused):
            agent.call(order, deadline=soon())
        said = HotReport(1.0, [], [KeyHeat(b"state/n/k", 5.0)])
        assert agent.call(said, deadline=soon()).message == Done()
    finally:
        node.close()
        agent.close()
    report = lone.on_loop(lambda: shard.marking.report(1.0))
    assert report.records == [KeyHeat(stored, 5.0)] and report.served == [KeyHeat(stored, 2.0)]
