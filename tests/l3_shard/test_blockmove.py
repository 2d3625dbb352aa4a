"""Whether a shard has the blocks that a transition gives it; then whole moves of blocks over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import BlockKey
from kvcomm.blockstore import Depot
from kvcomm.rpc import KEY_VECTOR
from kvcomm.tier import BlockCopy
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    PROTOCOL_VERSION,
    BlockPut,
    Failure,
    Hello,
    RingMap,
    RingNode,
    RingTransition,
    ShardMove,
    Want,
)
from l3_shard import refilling
from l3_shard.blockmove import BlockMove, Getting, together
from l3_shard.disk import BlockDisk
from l3_shard.diskfiles import BlockFiles
from l3_shard.ring import Ring
from tests.blockstores import DictDepot, DictStore
from tests.l3_shard.test_server import Cluster, make_copies
from tests.peers import CREDENTIALS, IDENTITY, Dialogue, until


def nodes(names: str) -> list[RingNode]:
    return [RingNode(name, f"unix:///{name}", "", "", name, 1) for name in names]


def ring_of(now: str, epoch: int, then: str = "", stage: Any = "copy", copies: int = 1) -> Ring:
    transition = RingTransition(stage, nodes(then), []) if then else None
    return Ring.from_map(RingMap(epoch, 1, 1, 1, copies, nodes(now), [], transition=transition))


def test_records_and_blocks_are_as_far_as_the_slower_of_them():
    records = ShardMove(ready_epoch=7, strong_epoch=6, clean_epoch=3, records_left=5, bytes_left=10)
    assert together(records, BlockMove(0, 5, 2, 100)) == ShardMove(0, 6, 3, 5, 2, 110)
    assert together(records, BlockMove(8, 2, 0, 0)) == ShardMove(7, 6, 2, 5, 0, 10)


def test_a_shard_that_gains_nothing_is_ready_at_once_and_one_that_gains_when_all_have_told():
    moving = ring_of("ab", 2, "abc")
    gaining, losing = Getting("c", moving, 60.0, 0.0), Getting("a", moving, 60.0, 0.0)
    assert losing.ready(0.0) and not gaining.ready(0.0)
    gaining.took(moving, {"a"}, full=False)
    assert not gaining.ready(1.0) and not gaining.complete
    gaining.took(ring_of("abc", 1), {"b"}, full=True)
    assert not gaining.ready(1.0), "of a round that had begun by another ring"
    gaining.took(moving, {"b"}, full=False)
    assert gaining.ready(1.0) and gaining.complete


def test_a_move_waits_neither_for_room_nor_for_ever():
    gaining = Getting("c", ring_of("ab", 2, "abc"), 60.0, 10.0)
    assert not gaining.ready(69.9) and gaining.ready(70.0)
    gaining = Getting("c", ring_of("ab", 2, "abc"), 60.0, 10.0)
    gaining.took(ring_of("ab", 2, "abc"), set(), full=True)
    assert gaining.ready(10.1)


def test_what_was_got_stays_got_to_the_end_of_the_move_and_counts_for_no_other():
    gaining = Getting("c", ring_of("ab", 2, "abc"), 60.0, 0.0)
    gaining.took(ring_of("ab", 2, "abc"), {"a", "b"}, full=False)
    for later in (
        ring_of("ab", 3, "abc", "serve"),
        ring_of("ab", 4, "abc"),
        ring_of("ab", 5, "abc", "serve"),
    ):
        gaining.placed(later, 100.0)
        assert gaining.ready(100.0)
    gaining.placed(ring_of("abc", 6), 100.0)
    assert gaining.complete
    gaining.placed(ring_of("abc", 7, "cd"), 100.0)
    assert not gaining.complete and not gaining.ready(100.0) and gaining.ready(160.0)


class Moving(Cluster):
    """Shards d, or a pair of them, that come and go by a transition."""

    def __init__(self, names: str, block_copies: int = 1) -> None:
        self.now_names = self.next_names = ""
        self.stage: Any = "copy"
        self.block_copies = block_copies
        super().__init__(names=names)

    @property
    def map(self) -> RingMap:
        if not self.now_names:
            self.now_names = self.names
        transition = None
        if self.next_names:
            transition = RingTransition(self.stage, self._nodes(self.next_names), [])
        return RingMap(
            self.epoch, 3, 2, 1, self.block_copies, self._nodes(self.now_names), [], transition=transition
        )

    def _nodes(self, names: str) -> list[RingNode]:
        return [RingNode(name, f"unix://{self.directory}/{name}.sock", "", "", name, 1) for name in names]

    def move(self, names: str, stage: Any) -> None:
        self.next_names, self.stage = names, stage
        self.issue()

    def arrive(self) -> None:
        self.now_names, self.next_names = self.next_names, ""
        self.issue()

    def held(self, node: str) -> set[BlockKey]:
        def look() -> set[BlockKey]:
            depot: Depot | None = self.disks.get(node)
            below = () if depot is None else depot.listing(b"", 10_000)
            return {*self.stores[node].copies, *(BlockKey(item.key) for item in below)}

        return self.on_loop(look)

    def kept(self, node: str, keys: list[BlockKey]) -> set[BlockKey]:
        ring = Ring.from_map(self.map)
        return {key for key in keys if node in ring.block_keepers(key)}

    def status(self, node: str) -> ShardMove:
        return self.on_loop(self.running[node].move_status)

    def all_at(self, what: str) -> bool:
        return all(getattr(self.status(name), what) == self.epoch for name in self.running)

    def missing(self, keys: list[BlockKey]) -> int:
        found: dict[int, object] = {}
        self.run(self.tier().get(keys, found.__setitem__))
        return len(keys) - len(found)


@pytest.fixture
def moving() -> Iterator[Moving]:
    running = Moving("abcd")
    running.now_names = "abc"
    running.issue()
    yield running
    running.close()


def carry_out(cluster: Moving, names: str, keys: list[BlockKey]) -> None:
    """A whole move; every block can be read at every step of it."""
    cluster.move(names, "copy")
    assert cluster.missing(keys) == 0
    until(lambda: cluster.all_at("ready_epoch"))
    assert all(cluster.held(name) >= cluster.kept(name, keys) for name in names)
    cluster.move(names, "serve")
    until(lambda: cluster.all_at("ready_epoch"))
    assert cluster.missing(keys) == 0
    cluster.arrive()
    assert cluster.missing(keys) == 0
    until(lambda: cluster.all_at("clean_epoch"))
    for name in cluster.names:
        assert cluster.held(name) == cluster.kept(name, keys), name
    assert cluster.missing(keys) == 0


@pytest.mark.slow
def test_blocks_follow_the_ring_and_nobody_keeps_what_it_does_not_own(moving: Moving) -> None:
    copies = make_copies(40)
    keys = [copy.key for copy in copies]
    assert moving.run(moving.tier().put(copies)) == ["stored"] * 40
    until(lambda: moving.all_at("clean_epoch"))
    assert not moving.held("d")
    carry_out(moving, "abcd", keys)
    assert moving.held("d") and moving.running["d"].shed_counts().blocks == 0
    gone = sum(moving.running[name].shed_counts().blocks for name in "abc")
    assert gone == len(moving.held("d"))
    carry_out(moving, "bcd", keys)
    assert not moving.held("a"), "who has left keeps nothing"


def test_a_put_during_a_move_reaches_both_placements_and_a_get_finds_it_in_either(moving: Moving) -> None:
    moving.move("abcd", "copy")
    copies = make_copies(24)
    keys = [copy.key for copy in copies]
    tier = moving.tier()
    assert moving.run(tier.put(copies)) == ["stored"] * 24
    ring = Ring.from_map(moving.map)
    both = [key for key in keys if len(ring.block_keepers(key)) == 2]
    assert both
    until(lambda: all(moving.held(name) == moving.kept(name, keys) for name in "abcd"))
    for name in "abcd":  # lose what is read from first: whoever else keeps it is asked
        firsts = [key for key in both if ring.block_owners(key)[0] == name]
        moving.on_loop(partial(moving.stores[name].drop, firsts))
    assert moving.run(moving.tier().lookup(keys)) == [True] * 24
    assert moving.missing(keys) == 0


@pytest.mark.slow
def test_a_move_that_is_taken_back_leaves_nothing_behind(moving: Moving) -> None:
    copies = make_copies(24)
    keys = [copy.key for copy in copies]
    moving.run(moving.tier().put(copies))
    moving.move("abcd", "copy")
    until(lambda: moving.all_at("ready_epoch"))
    assert moving.held("d")
    moving.next_names = ""
    moving.issue()
    until(lambda: moving.all_at("clean_epoch"))
    assert not moving.held("d") and moving.missing(keys) == 0


def test_a_shard_that_died_while_it_dropped_goes_on_when_it_is_back(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk has what the others own by now; it says so until that is gone."""
    copies = make_copies(24)
    keys = [copy.key for copy in copies]
    moving.run(moving.tier().put(copies))
    foreign = {copy.key: copy for copy in copies if copy.key not in moving.kept("a", keys)}
    moving.stop("a")
    moving.stores["a"], moving.disks["a"] = DictStore(), DictDepot(copies[0].header.tenant)
    moving.disks["a"].held.update(
        {key: copy.header.pack() + bytes(copy.payload) for key, copy in foreign.items()}
    )
    moving.orphan_s = 0.05
    moving.start("a")
    assert moving.held("a") == set(foreign)
    moving.issue()
    assert moving.status("a").clean_epoch < moving.epoch
    until(lambda: moving.status("a").clean_epoch == moving.epoch)
    assert not moving.held("a")


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, True])
def test_what_only_the_disk_of_a_leaving_shard_has_moves_too(
    moving: Moving, tmp_path: Path, real: bool
) -> None:
    """More than the memory of those who stay has room for."""
    copies = make_copies(40)
    keys = [copy.key for copy in copies]
    for name in "abcd":
        moving.stop(name)
        moving.stores[name] = DictStore(capacity_bytes=4 * copies[0].copy_bytes)
        mine = [copy for copy in copies if Ring.from_map(moving.map).block_owners(copy.key) == (name,)]
        moving.disks[name] = depot_with(mine, moving, name, tmp_path if real else None)
        moving.start(name)
    moving.issue()
    assert moving.missing(keys) == 0
    carry_out(moving, "bcd", keys)
    assert moving.on_loop(lambda: max(moving.disks[name].usage().block_count for name in "bcd")) > 4
    full = [moving.running[name].refill_counts().blocks["full"] for name in "bcd"]
    assert full == [0, 0, 0]
    if real:
        for name in "abcd":
            moving.stop(name)
            moving._call(moving.disks[name].close())
        left = [path for path in tmp_path.rglob("*") if path.is_file() and len(path.name) == 64]
        assert not [path for path in left if path.is_relative_to(tmp_path / "a")], "also the files are gone"


def depot_with(copies: list[BlockCopy], moving: Moving, name: str, directory: Path | None) -> Depot:
    """A disk tier that has these from an earlier life; real files in ``directory``."""
    content = {copy.key: copy.header.pack() + bytes(copy.payload) for copy in copies}
    if directory is None:
        return DictDepot(CREDENTIALS.tenant_digest("acme"), content)
    files = BlockFiles(directory / name)
    for key, copy in content.items():
        files.write(key, memoryview(copy))
    made: Depot = moving.on_loop(lambda: BlockDisk(files, 64 << 20, moving.stores[name], time.monotonic))
    return made


def test_a_move_does_not_wait_for_blocks_that_nobody_has_room_for(moving: Moving) -> None:
    copies = make_copies(40)
    moving.run(moving.tier().put(copies))
    moving.on_loop(lambda: setattr(moving.stores["d"], "capacity_bytes", 2 * copies[0].copy_bytes))
    moving.move("abcd", "copy")
    until(lambda: moving.all_at("ready_epoch"))
    assert len(moving.held("d")) == 2 and moving.stores["d"].evicting <= {False}


@pytest.mark.slow
def test_nor_for_a_shard_that_is_away(moving: Moving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refilling, "RETRY_S", 0.02)
    moving.stop("d")
    moving.blocks_limit_s = 0.3
    moving.start("d")
    moving.stop("a")
    moving.move("abcd", "copy")
    assert moving.status("d").ready_epoch == 0
    until(lambda: moving.status("d").ready_epoch == moving.epoch)


def test_a_put_that_a_new_ring_overtakes_is_done_again_where_it_belongs(moving: Moving) -> None:
    """Its bytes were under way; a shard that acknowledged them would drop them at once."""
    old, (copy,) = moving.tier(), make_copies(1)
    (owner,) = Ring.from_map(moving.map).block_owners(copy.key)
    other = "abc".replace(owner, "")[0]
    body = [copy.header.pack(), bytes(copy.payload)]
    head = BlockPut(moving.epoch, [Want(copy.key, copy.copy_bytes)])
    hello = Hello(PROTOCOL_VERSION, IDENTITY.token, IDENTITY.caller, KEY_VECTOR)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{moving.directory}/{owner}.sock")
        client = Dialogue(connection)
        client.say(0, hello)
        client.hear()
        frame = b"".join(bytes(piece) for piece in encode_frame(1, head, body))
        connection.sendall(frame[:-10])
        until(lambda: moving.on_loop(lambda: moving.stores[owner].reserved))
        moving.now_names = other
        moving.issue()
        connection.sendall(frame[-10:])
        answer = client.hear().message
    assert isinstance(answer, Failure) and answer.code == "stale_epoch"
    assert not moving.held(owner)
    assert moving.run(old.put([copy])) == ["stored"] and moving.held(other) == {copy.key}
