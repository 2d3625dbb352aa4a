"""``NodeProcess``: what every role process has besides its data wire: a control wire, metrics, a
registration."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcomm import __version__
from kvcomm.block import BlockKey, Incarnation
from kvcomm.blockstore import BlockStore, Depot
from kvcomm.controllers import Controllers
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import Refused
from kvcomm.heart import Face, Heart, Vitals
from kvcomm.instance import Instance, NodeRecord, process_start_time
from kvcomm.metrics import Metrics
from kvcomm.rpc import droptable
from kvcomm.serve import LEAVE_S
from kvcomm.settings import load_config
from kvcomm.wire.address import Address
from kvcomm.wire.messages import (
    BlockItem,
    Message,
    RecordStates,
    RecordVersion,
    RecordWrite,
    RingMap,
    ShardMove,
)

if TYPE_CHECKING:
    from kvcomm.config import Config
    from kvcomm.control import Caller, ControlServer
    from kvcomm.exporter import Exporter
    from kvcomm.metrics import Histogram, Scope
    from kvcomm.rpc import AsyncPeers
    from kvcomm.serve import DataServer
    from kvcomm.wire.control_codec import NodeStatus
    from l2_rdma.warming import Warming
    from l3_shard.peers import WatchView
    from l3_shard.refilling import RefillCounts
    from l3_shard.repair import RepairCounts
    from l3_shard.scrub import ScrubCounts
    from l3_shard.shard import ShardCounts
    from l3_shard.shedding import ShedCounts
    from l3_shard.storage import Database
    from l3_shard.strong import StrongCounts

RACK = "rack-0"
"""Where a node is that nobody said it of."""


def rack_of(settings: Config) -> str:
    """Where the configuration says that its processes are."""
    return settings.network.rack or RACK


def storage_root(instance: Instance, settings: Config) -> Path:
    """Where the shards and controllers of an instance keep what is to last, one directory a node: in
    ``storage.directory``, else in the instance's own directory."""
    root = settings.storage.directory
    return Path(root) if root else instance.directory / "data"


SPLIT_MODES = ("whole", "majority", "minority")
"""By the number that the metric shows."""


class NodeProcess:
    """One node of an instance, as its own process sees itself."""

    def __init__(self, instance: str, node: str, role: Scope, config: Path | None, rack: str = RACK) -> None:
        self.settings = load_config(config)
        if self.settings.network.drop_table:
            droptable.install()
        self.instance = Instance.open(instance)
        self.node = node
        self.role = role
        self.rack = rack or rack_of(self.settings)
        self.controllers = Controllers(self.instance, self.settings)
        self.heart: Heart | None = None
        """Once the node is announced."""
        self.incarnation = Incarnation(secrets.randbits(64) | 1)
        self.metrics = Metrics(role)
        self._started_at = time.monotonic()
        self._record: NodeRecord | None = None
        self._control: ControlServer | None = None
        self._backend: RoleBackend | None = None
        self._exporter: Exporter | None = None
        self._heart_peers: AsyncPeers | None = None

    @property
    def listen_at(self) -> list[str]:
        """Data-wire addresses to bind: a socket for this host, unless it is not to have one, and a port for
        others; the configured one of a controller that has one."""
        network = self.settings.network
        if self.node in self.controllers.configured:
            return [self.controllers.configured[self.node]]
        port = str(Address(host=network.listen_host))
        return [f"unix://{self.instance.socket_path(self.node)}", port] if network.local_sockets else [port]

    @property
    def storage_directory(self) -> Path:
        """Of this node's records."""
        return storage_root(self.instance, self.settings) / self.node

    @property
    def disk_directory(self) -> Path | None:
        """Of this shard's disk tier, if it is to have one."""
        root = self.settings.shard.disk_path
        return Path(root) / self.node if root else None

    async def announce(
        self,
        backend: RoleBackend,
        addresses: list[str],
        region: str,
        refresh: Callable[[], None],
        *,
        transports: Sequence[str] = (),
        refused_transports: Mapping[str, str] | None = None,
        ring: Callable[[], RingMap | None] | None = None,
        took_ring: Callable[[RingMap], object] = lambda ring: None,
        vitals: Callable[[], Vitals] = Vitals,
        reports: Callable[[float], Sequence[Message]] = lambda now: (),
    ) -> None:
        """Open the control wire and the metrics and let others know.

        Args:
            refresh: brings gauges up to date.
            transports, refused_transports: a pool's, as ``RunningPool`` has them.
            ring, took_ring, vitals, reports: for the node's heartbeats, see ``kvcomm.heart``.
        """
        from kvcomm.control import ControlServer
        from kvcomm.exporter import Exporter, in_loop

        self._backend = backend
        self._control = ControlServer(backend, self.instance.credentials())
        control = await self._control.start()
        labels = {
            "node": self.node,
            "role": self.role,
            "instance": self.instance.name,
            "version": __version__,
        }
        self._exporter = Exporter(
            self.metrics, labels, in_loop(asyncio.get_running_loop(), refresh, self.metrics)
        )
        metrics = self._exporter.start()
        await self._control.set_serving(True)
        start_time = process_start_time(os.getpid())
        assert start_time is not None, "we are running"
        self._record = NodeRecord(
            node=self.node,
            role=self.role,
            pid=os.getpid(),
            pid_start_time=start_time,
            addresses=addresses,
            control=control,
            metrics=metrics,
            incarnation=self.incarnation,
            region=region,
            transports=list(transports),
            refused_transports=dict(refused_transports or {}),
        )
        self.instance.register(self._record)
        self.heart = self._make_heart(self._record, ring, took_ring, vitals, reports)

    async def keep_telling(self) -> None:
        """Tell the controllers how we are, once announced and until cancelled."""
        assert self.heart is not None, "it is announced first"
        await self.heart.run()

    def _make_heart(
        self,
        record: NodeRecord,
        ring: Callable[[], RingMap | None] | None,
        took_ring: Callable[[RingMap], object],
        vitals: Callable[[], Vitals],
        reports: Callable[[float], Sequence[Message]],
    ) -> Heart:
        from kvcomm.rpc import AsyncPeers, Identity

        def address(scheme: str) -> str:
            return next((each for each in record.addresses if each.startswith(scheme)), "")

        identity = Identity(self.instance.credentials().token(NODE_TENANT), self.incarnation)
        timeout_s = self.settings.network.connect_timeout_s
        self._heart_peers = AsyncPeers(identity, connect_timeout_s=timeout_s)
        return Heart(
            Face(
                self.node, self.role, self.rack, self.incarnation,
                address("tcp:"), address("unix:"), record.control,
            ),
            self.controllers.names,
            self.controllers.locate,
            self._heart_peers,
            period_s=self.settings.cluster.heartbeat_s,
            ring=ring,
            took_ring=took_ring,
            vitals=vitals,
            reports=reports,
        )  # fmt: skip

    async def withdraw(self) -> None:
        """The opposite, in the opposite order.  Idempotent."""
        if self._heart_peers is not None:
            await self._heart_peers.close()
        if self._record is not None:
            self.instance.unregister(self._record)
            self._record = None
        if self._exporter is not None:
            self._exporter.close()
        if self._control is not None:
            await self._control.close(LEAVE_S)
        backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    def ring_changed(self) -> None:
        """Tell those who watch the ring over the control wire, and the controllers."""
        if self._control is not None:
            self._control.ring_changed()
        self.beat()

    def beat(self) -> None:
        """Something changed that the controllers should hear of at once."""
        if self.heart is not None:
            self.heart.beat()

    def status(self, store: BlockStore | None, epoch: int, disk: Depot | None = None) -> NodeStatus:
        from kvcomm.wire.control_codec import NodeStatus

        return NodeStatus(
            self.node,
            self.role,
            self.instance.name,
            __version__,
            self.incarnation,
            epoch,
            time.monotonic() - self._started_at,
            None if store is None else store.usage(),
            None if disk is None else disk.usage(),
        )

    def refresh(
        self, store: BlockStore, server: DataServer, grant_counts: Mapping[str, int], epoch: int
    ) -> None:
        """Take over what the parts count, when somebody looks: the hot paths know of no metrics."""
        self.metrics.store(store.usage())
        for status, count in grant_counts.items():
            self.metrics.counter("kvcomm_reservations_total", status=status).advance_to(count)
        self.refresh_server(server, epoch)

    def refresh_server(self, server: DataServer, epoch: int) -> None:
        """The same for what every role has."""
        metrics = self.metrics
        metrics.gauge("kvcomm_connections").set(server.connection_count)
        metrics.gauge("kvcomm_ring_epoch").set(epoch)
        metrics.counter("kvcomm_requests_overdue_total").advance_to(server.overdue_count)
        for message, count in server.request_counts.items():
            metrics.counter("kvcomm_requests_total", message=message.__name__).advance_to(count)

    def refresh_warming(self, warming: Warming) -> None:
        """The same for the copies of hot blocks in a pool."""
        metrics, counts = self.metrics, warming.counts
        metrics.gauge("kvcomm_warm_copies").set(warming.warm_count)
        metrics.counter("kvcomm_warmed_bytes_total").advance_to(counts.stored_bytes)
        metrics.counter("kvcomm_warm_copies_dropped_total").advance_to(counts.dropped_count)
        for outcome, count in counts.blocks.items():
            metrics.counter("kvcomm_warmed_blocks_total", outcome=outcome).advance_to(count)

    def refresh_records(self, counts: ShardCounts, repair: RepairCounts, fsync_seconds: Histogram) -> None:
        """The same for a shard's records."""
        metrics, acks = self.metrics, "kvcomm_replication_acks_total"
        metrics.counter(acks, outcome="acked").advance_to(counts.acked_count)
        metrics.counter(acks, outcome="failed").advance_to(counts.missed_count)
        metrics.counter("kvcomm_stood_still_total").advance_to(counts.stood_still_count)
        metrics.counter("kvcomm_rejected_writes_total").advance_to(counts.rejected_count)
        metrics.counter("kvcomm_fsyncs_total").advance_to(fsync_seconds.count)
        metrics.histogram("kvcomm_fsync_seconds").advance_to(fsync_seconds)
        metrics.gauge("kvcomm_hints").set(repair.hint_count)
        metrics.gauge("kvcomm_hint_bytes").set(repair.hint_bytes)
        metrics.gauge("kvcomm_caught_up").set(repair.caught_up)
        for name, label, outcomes in (
            ("kvcomm_hints_total", "outcome", repair.hints),
            ("kvcomm_comparisons_total", "outcome", repair.comparisons),
            ("kvcomm_repaired_records_total", "direction", repair.records),
        ):
            for outcome, count in outcomes.items():
                metrics.counter(name, **{label: outcome}).advance_to(count)
        metrics.counter("kvcomm_tombstones_removed_total").advance_to(repair.tombstones_removed)
        metrics.counter("kvcomm_records_purged_total").advance_to(repair.purged)

    def refresh_disk(self, disk: Depot | None, refill: RefillCounts) -> None:
        """The same for its disk tier, if it has one, and for the copies that it got back."""
        if disk is not None:
            self.metrics.disk(disk.usage())
        for outcome, count in refill.blocks.items():
            self.metrics.counter("kvcomm_refilled_blocks_total", outcome=outcome).advance_to(count)
        self.metrics.counter("kvcomm_refilled_bytes_total").advance_to(refill.stored_bytes)
        for result, count in refill.rounds.items():
            self.metrics.counter("kvcomm_refill_rounds_total", outcome=result).advance_to(count)

    def refresh_move(self, move: ShardMove, shed: ShedCounts) -> None:
        """The same for what the ring gave and took."""
        metrics = self.metrics
        metrics.counter("kvcomm_shed_blocks_total").advance_to(shed.blocks)
        metrics.counter("kvcomm_shed_bytes_total").advance_to(shed.block_bytes)
        metrics.gauge("kvcomm_move_records_left").set(move.records_left)
        metrics.gauge("kvcomm_move_blocks_left").set(move.blocks_left)
        metrics.gauge("kvcomm_move_bytes_left").set(move.bytes_left)

    def refresh_watch(self, view: WatchView) -> None:
        """The same for what it knows of the other shards."""
        metrics = self.metrics
        metrics.gauge("kvcomm_split_mode").set(SPLIT_MODES.index(view.mode))
        metrics.gauge("kvcomm_silent_peers").set(len(view.silent))
        metrics.counter("kvcomm_silences_total").advance_to(view.silenced_count)
        metrics.counter("kvcomm_split_seconds_total").advance_to(view.split_s)

    def refresh_scrub(self, scrubs: Mapping[Database, ScrubCounts], damaged_now: int) -> None:
        """The same for what goes over them on the disk."""
        metrics = self.metrics
        metrics.gauge("kvcomm_damaged_records").set(damaged_now)
        for database, counts in scrubs.items():
            metrics.counter("kvcomm_scrubbed_bytes_total", database=database).advance_to(counts.looked_bytes)
            metrics.counter("kvcomm_scrub_passes_total", database=database).advance_to(counts.passes)
            for problem, count in (
                ("damaged", counts.damaged), ("lost", counts.lost), ("misfiled", counts.misfiled),
                ("unreadable", counts.failed),
            ):  # fmt: skip
                series = metrics.counter("kvcomm_scrub_problems_total", database=database, problem=problem)
                series.advance_to(count)

    def refresh_strong(self, counts: StrongCounts) -> None:
        """The same for its strong records."""
        metrics, failures = self.metrics, "kvcomm_strong_failures_total"
        metrics.gauge("kvcomm_strong_votes").set(int(counts.votes))
        metrics.counter("kvcomm_strong_contended_rounds_total").advance_to(counts.contended_count)
        metrics.counter(failures, outcome="unavailable").advance_to(counts.unavailable_count)
        metrics.counter(failures, outcome="outcome_unknown").advance_to(counts.unknown_count)
        metrics.gauge("kvcomm_strong_pending_maps").set(counts.pending_count)
        for name, count in (
            ("kvcomm_strong_confirmed_records_total", counts.confirmed_count),
            ("kvcomm_strong_damaged_records_total", counts.damaged_count),
            ("kvcomm_strong_healed_records_total", counts.healed_count),
            ("kvcomm_strong_removed_records_total", counts.removed_count),
        ):
            metrics.counter(name).advance_to(count)


class RoleBackend:
    """The control calls of a node that has no blocks, keeps no records and is handed no ring."""

    def __init__(self, process: NodeProcess) -> None:
        self._process = process

    async def close(self) -> None:
        """Nothing is held here; called once no call can come any more."""

    def status(self) -> NodeStatus:
        ring = self.ring()
        return self._process.status(None, ring.epoch if ring is not None else 0)

    def ring(self) -> RingMap | None:
        return None

    async def set_ring(self, ring: RingMap) -> None:
        raise Refused("this node is handed no ring; only shards are")

    async def list_blocks(self, caller: Caller, after: bytes, limit: int) -> list[BlockItem]:
        raise Refused("this node keeps no blocks; ask a pool or a shard")

    async def get_block(self, caller: Caller, key: BlockKey) -> bytes | None:
        raise Refused("this node keeps no blocks; ask a pool or a shard")

    async def get_records(self, caller: Caller, keys: Sequence[bytes], timeout_s: float) -> RecordStates:
        raise Refused("this node keeps no records; ask a shard")

    async def put_records(
        self, caller: Caller, writes: Sequence[RecordWrite], timeout_s: float
    ) -> list[RecordVersion]:
        raise Refused("this node keeps no records; ask a shard")


class StoreBackend(RoleBackend):
    """The control calls that a node with a block store answers; a pool keeps no ring and no records."""

    def __init__(self, process: NodeProcess, store: BlockStore) -> None:
        super().__init__(process)
        self._store = store

    def status(self) -> NodeStatus:
        return self._process.status(self._store, 0)

    async def list_blocks(self, caller: Caller, after: bytes, limit: int) -> list[BlockItem]:
        return self._store.listing(after, limit, caller.digest)

    async def get_block(self, caller: Caller, key: BlockKey) -> bytes | None:
        lease = self._store.lease(key, caller.digest)
        if lease is None:
            return None
        try:
            return bytes(lease.copy)
        finally:
            lease.release()


def log_to_stderr() -> None:
    """Warnings and errors, one line each; the launcher keeps them in the node's log."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
