"""Three shards whose records differ: how long until they are equal, when nobody reads or writes; and the same
at the end of a split in which both sides wrote."""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from bench.report import Report
from bench.scale import Scale
from bench.timing import Spread
from kvcomm.block import NO_TENANT, Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.rpc import Connection, Identity, droptable
from kvcomm.wire.messages import (
    DropOrder,
    DropPeer,
    RecordPut,
    RecordState,
    RecordWrite,
    RingMap,
    RingNode,
    Sibling,
    SplitReport,
    TreeDigests,
    TreeGet,
)

NODES = ("a", "b", "c")
EQUAL_MS_MAX = 10_000.0
DIFFERENT_EVERY = 100
VALUE_BYTES = 128
EPOCH = 2
SMALL = 30
"""Records that differ after a split which nobody has much to mend of."""
HEAL_SMALL_MS_MAX = 3_000.0
SPLIT_S = 6.0
BATCH = 250
DEADLINE_S, POLL_S = 60.0, 0.05
_TENANT = b"bench tenant 16b"


def run(scale: Scale) -> Report:
    report = Report("repair", "Replicas that differ")
    different_count = len(range(0, scale.records, DIFFERENT_EVERY))
    taken: list[float] = []
    for _ in range(scale.repairs):
        with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
            root = Path(directory)
            _fill(root, scale.records)
            taken.append(_repair(root))
            _check(root, scale.records)
    what = f"{scale.records:,} records on 3 shards, {different_count:,} of them different: equal"
    report.claim(what, "<=", EQUAL_MS_MAX, "ms", Spread.of([seconds * 1e3 for seconds in taken]))
    report.notes.append(
        "From the moment that all shards answer, the survey of every record included. Half of the different "
        "records were missing on one shard, half were newer on another. Nobody read or wrote; afterwards the "
        "stores were compared record by record."
    )
    for count, bound_ms in ((SMALL, HEAL_SMALL_MS_MAX), (different_count, EQUAL_MS_MAX)):
        equal, told = [], []
        for _ in range(scale.repairs):
            with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
                root = Path(directory)
                _fill(root, scale.records, differ=False)
                seconds, reports = _heal(root, count)
                equal.append(seconds * 1e3)
                told += [each.equal_after_s for each in reports]
        what = f"{scale.records:,} records on 3 shards, {count:,} written during a split: equal after it"
        report.claim(what, "<=", bound_ms, "ms", Spread.of(equal))
        report.notes.append(
            f"{count:,} records: by the shards' own reports, counted from when each noticed the end of the "
            f"split, at most {max(told):.2f} s."
        )
    report.notes.append(
        "The split: one shard and the two others do not hear each other (drop tables: bytes are held back in "
        "both directions); nine of ten records are written on the side of the two, about half on the other, "
        "so that nearly half of them are written on both. Counted from the order that ends it to three equal "
        "Merkle roots, looked at every 50 ms."
    )
    return report


def _heal(root: Path, count: int) -> tuple[float, list[SplitReport]]:
    """Seconds from the end of a split to three equal shards, and what they tell of it."""
    credentials = Credentials(secrets.token_bytes(32))
    with ExitStack() as stack:
        pipes = [stack.enter_context(_shard(root, node, credentials.secret)) for node in NODES]
        for pipe in pipes:
            if not pipe.poll(DEADLINE_S):
                raise Unavailable("a shard did not start")
            pipe.recv()
        identity = Identity(credentials.token(NODE_TENANT), Incarnation(99))
        opened = time.monotonic() + DEADLINE_S
        shards = {node: Connection.open(_address(root, node), identity, opened) for node in NODES}
        for shard in shards.values():
            stack.callback(shard.close)
        _until_equal(shards)
        _split(root, shards, apart=True)
        time.sleep(SPLIT_S / 2)
        _write(shards["a"], [number for number in range(count) if number % 10], b"a")
        _write(shards["c"], [number for number in range(count) if number % 20 < 11], b"c")
        time.sleep(SPLIT_S / 2)
        begin = time.monotonic()
        _split(root, shards, apart=False)
        _until_equal(shards)
        seconds = time.monotonic() - begin
        return seconds, [_told(pipe) for pipe in pipes]


def _write(shard: Connection, numbers: Sequence[int], value: bytes) -> None:
    """On the smaller side nothing is acknowledged, and everything kept."""
    for begin in range(0, len(numbers), BATCH):
        writes = [RecordWrite(b"split/%08d" % number, value, {}) for number in numbers[begin : begin + BATCH]]
        with suppress(OutcomeUnknown):
            shard.call(RecordPut(EPOCH, writes), deadline=time.monotonic() + DEADLINE_S)


def _split(root: Path, shards: dict[str, Connection], *, apart: bool) -> None:
    for node, shard in shards.items():
        others = [other for other in NODES if apart and (node == "c") != (other == "c")]
        drops = [DropPeer([_address(root, other)], _incarnation(other), True, True) for other in others]
        shard.call(DropOrder(drops), deadline=time.monotonic() + DEADLINE_S)


def _told(pipe: Pipe) -> SplitReport:
    """As soon as the shard has found all others equal."""
    until = time.monotonic() + DEADLINE_S
    while True:
        pipe.send("report")
        report = pipe.recv()
        if isinstance(report, SplitReport) and report.equal_after_s >= 0.0:
            return report
        if time.monotonic() > until:
            raise Unavailable(f"a shard does not say that the split is over: {report}")
        time.sleep(POLL_S)


def _until_equal(shards: dict[str, Connection]) -> None:
    pairs = [(one, two) for one in NODES for two in NODES if one < two]
    until = time.monotonic() + DEADLINE_S
    while not all(_equal(shards, one, two) for one, two in pairs):
        if time.monotonic() > until:
            raise Unavailable("the shards did not become equal")
        time.sleep(POLL_S)


def _fill(root: Path, record_count: int, *, differ: bool = True) -> None:
    """Write the stores."""
    from l3_shard.store import RecordStore

    for node in NODES:
        store = RecordStore(root / node, fsync="never")
        try:
            records = [_record(node if differ else "b", number) for number in range(record_count)]
            held = [(key, state) for key, state in records if state.context]
            for at in range(0, len(held), 2_000):
                store.write(held[at : at + 2_000], store.replica)
        finally:
            store.close()


def _record(node: str, number: int) -> tuple[bytes, RecordState]:
    key, value = _TENANT + b"record/%08d" % number, b"%08d" % number * (VALUE_BYTES // 8)
    first = RecordState({"written000.1": 1}, [Sibling("written000.1", 1, 1 << 56, value)])
    if number % DIFFERENT_EVERY:
        return key, first
    if number % (2 * DIFFERENT_EVERY):
        return key, RecordState({}, []) if node == "a" else first
    newer = RecordState({"written000.1": 2}, [Sibling("written000.1", 2, 2 << 56, value[::-1])])
    return key, newer if node == "b" else first


def _repair(root: Path) -> float:
    """Seconds from three shards that answer to three equal ones."""
    credentials = Credentials(secrets.token_bytes(32))
    with ExitStack() as stack:
        pipes = [stack.enter_context(_shard(root, node, credentials.secret)) for node in NODES]
        for pipe in pipes:
            if not pipe.poll(DEADLINE_S):
                raise Unavailable("a shard did not start")
            pipe.recv()
        begin = time.monotonic()
        identity = Identity(credentials.token(NODE_TENANT), Incarnation(3))
        shards = {node: Connection.open(_address(root, node), identity, begin + DEADLINE_S) for node in NODES}
        for shard in shards.values():
            stack.callback(shard.close)
        _until_equal(shards)
        return time.monotonic() - begin


def _equal(shards: dict[str, Connection], one: str, two: str) -> bool:
    """Whether both say the same of what both keep.  A shard that is still counting answers too late."""

    def digests(shard: Connection, other: str) -> list[int] | None:
        try:
            frame = shard.call(TreeGet(EPOCH, other, 0, [0]), deadline=time.monotonic() + DEADLINE_S)
        except KVCommError:
            return None
        assert isinstance(frame.message, TreeDigests)
        return frame.message.digests

    first = digests(shards[one], two)
    return first is not None and first == digests(shards[two], one)


def _check(root: Path, record_count: int) -> None:
    """The judge that knows nothing of trees."""
    from l3_shard.store import RecordStore

    keys = [_record("b", number)[0] for number in range(record_count)]
    held = []
    for node in NODES:
        store = RecordStore(root / node, fsync="never")
        try:
            held.append(store.load(keys)[0])
        finally:
            store.close()
    expected = [_record("b", number)[1] for number in range(record_count)]
    if any(states != expected for states in held):
        raise RuntimeError("the shards say that they are equal and are not")


def _incarnation(node: str) -> Incarnation:
    return Incarnation(3 + NODES.index(node))


def _address(root: Path, node: str) -> str:
    return f"unix://{root}/{node}.sock"


@contextmanager
def _shard(root: Path, node: str, secret: bytes) -> Iterator[Pipe]:
    """A shard in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(root, node, secret, theirs), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        ours.close()
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(root: Path, node: str, secret: bytes, pipe: Pipe) -> None:
    asyncio.run(_serve_until_closed(root, node, secret, pipe))


async def _serve_until_closed(root: Path, node: str, secret: bytes, pipe: Pipe) -> None:
    from l2_rdma.pool import PoolOptions, block_region
    from l3_shard.server import RunningShard, ShardOptions, run_shard

    stop = asyncio.Event()
    running: list[RunningShard] = []

    def asked() -> None:
        try:
            pipe.recv()
        except EOFError:
            stop.set()
        else:
            pipe.send(running[0].split())

    def ready(shard: RunningShard) -> None:
        running.append(shard)
        pipe.send("ready")

    droptable.install()
    asyncio.get_running_loop().add_reader(pipe.fileno(), asked)
    shards = [RingNode(name, _address(root, name), "", "", name, 1) for name in NODES]
    async with block_region(
        node=node,
        instance=f"bench-{root.name}",
        incarnation=Incarnation(3),
        tenant=NO_TENANT,
        options=PoolOptions(16 << 20),
    ) as (blocks, _):
        await run_shard(
            node=node,
            instance=f"bench-{root.name}",
            incarnation=_incarnation(node),
            credentials=Credentials(secret),
            addresses=[_address(root, node)],
            options=ShardOptions(root / node, fsync="interval"),
            blocks=blocks,
            stop=stop,
            ready=ready,
            ring_map=RingMap(EPOCH, len(NODES), 2, 1, 1, shards, []),
        )
