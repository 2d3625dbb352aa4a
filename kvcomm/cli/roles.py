"""``kvcomm pool``, ``kvcomm shard`` and ``kvcomm controller``: one node of a cluster, in the foreground.
``kvcomm up`` starts them."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.cli.options import ConfigOption

if TYPE_CHECKING:
    from controller.controller import Controller
    from controller.hotkeys import HotOptions
    from controller.process import ControllerSettings
    from kvcomm.cli.node import NodeProcess
    from kvcomm.cli.warm_source import ShardSource
    from kvcomm.instance import Instance
    from kvcomm.wire.messages import RingMap
    from l2_rdma.owner import Owner
    from l2_rdma.pool import RunningPool
    from l2_rdma.transports.cuda.gpu import Gpu
    from l3_shard.disk import BlockDisk
    from l3_shard.server import RunningShard, ShardOptions

InstanceName = Annotated[
    str, typer.Option("--instance", help="Cluster on this host that the node belongs to.")
]
RackName = Annotated[
    str, typer.Option("--rack", help="Where it is, else network.rack: copies are spread over racks.")
]
NodeName = Annotated[str, typer.Option("--node", help="Name of the node; its placement goes by it.")]
Lifeline = Annotated[bool, typer.Option("--lifeline", hidden=True, help="Stop when standard input closes.")]


def pool(
    node: NodeName,
    instance: InstanceName = "default",
    config: ConfigOption = None,
    rack: RackName = "",
    lifeline: Lifeline = False,
) -> None:
    """Run this host's pool: a region of shared memory that agents read one-sided."""
    from kvcomm.cli.node import NodeProcess, log_to_stderr
    from kvcomm.serve import run

    log_to_stderr()
    run(_pool(NodeProcess(instance, node, "pool", config, rack), lifeline))


async def _pool(process: NodeProcess, lifeline: bool) -> None:
    from kvcomm.cli.node import StoreBackend
    from kvcomm.cli.signals import stop_event
    from kvcomm.cli.vitals import PoolVitals
    from l2_rdma.pool import PoolOptions, run_pool
    from l2_rdma.transports.port import WireOptions

    cache, network = process.settings.cache, process.settings.network
    stop = stop_event(lifeline)
    announcing: list[asyncio.Task[None]] = []
    source = _shard_source(process)

    def ready(running: RunningPool) -> None:
        def refresh() -> None:
            process.refresh(running.store, running.server, running.grant_counts, 0)
            process.refresh_warming(running.warming)

        backend = StoreBackend(process, running.store)
        work = process.announce(
            backend,
            running.addresses,
            running.region,
            refresh,
            transports=running.transports,
            refused_transports=running.refused_transports,
            vitals=PoolVitals(running),
        )
        announcing.append(asyncio.create_task(_or_stop(_live(process, work), stop)))

    try:
        await run_pool(
            node=process.node,
            instance=process.instance.name,
            incarnation=process.incarnation,
            credentials=process.instance.credentials(),
            tenant=process.settings.security.tenant,
            addresses=process.listen_at,
            options=PoolOptions(
                cache.l2_size_bytes,
                cache.l2_pin_budget_bytes,
                cache.reservation_ttl_s,
                transports=network.transports,
                wires=WireOptions(listen_host=network.listen_host, rdma_device=network.rdma_device),
                gpu=_gpu(cache.l2_device),
            ),
            stop=stop,
            ready=ready,
            source=source,
        )
    finally:
        await source.close()
        await _end(announcing)
        await process.withdraw()
    _check(announcing)


def _shard_source(process: NodeProcess) -> ShardSource:
    """Where the pool gets the blocks that it is told to have: as its own tenant, so only that one's."""
    from kvcomm.cli.warm_source import ShardSource
    from kvcomm.rpc import Identity

    settings = process.settings
    token = process.instance.credentials().token(settings.security.tenant)
    return ShardSource(
        lambda: process.heart.newest if process.heart is not None else None,
        Identity(token, process.incarnation),
        dial=lambda shard: shard.local_address or shard.address,
        timeout_s=settings.network.request_timeout_s,
        connect_timeout_s=settings.network.connect_timeout_s,
    )


def _hot_options(process: NodeProcess) -> HotOptions:
    """When a controller calls a key hot."""
    from controller.hotkeys import HotOptions

    cluster = process.settings.cluster
    return HotOptions(
        block_enter_s=cluster.hot_block_rate,
        record_enter_s=cluster.hot_record_rate,
        window_s=cluster.heartbeat_s,
        warm_rate_bytes=cluster.warm_rate_bytes,
    )


def _gpu(ordinal: int | None) -> Gpu | None:
    """Where the slots are to be; raises ``Unavailable`` if there is no such GPU."""
    if ordinal is None:
        return None
    from l2_rdma.transports.cuda.runtime import open_gpu

    return open_gpu(ordinal)


def shard(
    node: NodeName,
    instance: InstanceName = "default",
    config: ConfigOption = None,
    rack: RackName = "",
    lifeline: Lifeline = False,
) -> None:
    """Run a shard: blocks by consistent hashing, records replicated and on disk."""
    from kvcomm.cli.node import NodeProcess, log_to_stderr
    from kvcomm.serve import run

    log_to_stderr()
    run(_shard(NodeProcess(instance, node, "shard", config, rack), lifeline))


async def _shard(process: NodeProcess, lifeline: bool) -> None:
    from kvcomm.cli.gateway import ShardBackend
    from kvcomm.cli.signals import stop_event
    from kvcomm.cli.vitals import ShardVitals
    from l3_shard.presence import Presence
    from l3_shard.ring import NO_RING
    from l3_shard.server import run_shard

    stop = stop_event(lifeline)
    announcing: list[asyncio.Task[None]] = []

    async with _shard_stores(process) as (store, disk):
        presence = Presence(store, disk)
        store.watch(presence.heard)
        if disk is not None:
            disk.watch(presence.heard)

        def ready(running: RunningShard) -> None:
            def refresh() -> None:
                process.refresh(store, running.server, running.grant_counts, running.ring().epoch)
                process.refresh_records(running.counts(), running.repair_counts(), running.fsync_seconds)
                process.refresh_strong(running.strong_counts())
                process.metrics.gauge("kvcomm_disk_full").set(running.disk_full())
                process.refresh_disk(disk, running.refill_counts())
                process.refresh_move(running.move_status(), running.shed_counts())
                process.refresh_watch(running.watch())
                process.refresh_scrub(running.scrub_counts(), running.damaged_now())
                process.metrics.gauge("kvcomm_hot_records").set(running.marking.hot_count(time.monotonic()))
                process.metrics.counter("kvcomm_hot_answers_total").advance_to(running.marking.marked_count)

            backend, vitals = ShardBackend(process, store, running, disk), ShardVitals(running, disk)
            running.on_ring(process.ring_changed)
            work = process.announce(
                backend,
                running.addresses,
                "",
                refresh,
                ring=backend.ring,
                took_ring=running.adopt,
                vitals=vitals,
                reports=running.marking.reports,
            )
            announcing.append(asyncio.create_task(_or_stop(_live(process, work), stop)))
            announcing.append(asyncio.create_task(_or_stop(vitals.tell_steps(process.beat), stop)))

        try:
            await run_shard(
                node=process.node,
                instance=process.instance.name,
                incarnation=process.incarnation,
                credentials=process.instance.credentials(),
                addresses=process.listen_at,
                options=_shard_options(process),
                blocks=store,
                disk=disk,
                presence=presence,
                stop=stop,
                ready=ready,
                dial=lambda peer: peer.local_address or peer.address,
                ring_map=process.instance.ring() or NO_RING,
            )
        finally:
            await _end(announcing)
            await process.withdraw()
    _check(announcing)


def controller(
    node: NodeName,
    instance: InstanceName = "default",
    config: ConfigOption = None,
    rack: RackName = "",
    lifeline: Lifeline = False,
) -> None:
    """Run a controller: it watches the nodes, and the one that leads issues the ring's maps."""
    from kvcomm.cli.node import NodeProcess, log_to_stderr
    from kvcomm.serve import run

    log_to_stderr()
    run(_controller(NodeProcess(instance, node, "controller", config, rack), lifeline))


async def _controller(process: NodeProcess, lifeline: bool) -> None:
    from controller.process import RunningController, run_controller
    from kvcomm.cli.gateway import ControllerBackend
    from kvcomm.cli.signals import stop_event
    from kvcomm.cli.standing import refresh_controller

    stop = stop_event(lifeline)
    announcing: list[asyncio.Task[None]] = []

    def ready(running: RunningController) -> None:
        def refresh() -> None:
            process.refresh_server(running.server, running.machine.epoch)
            refresh_controller(process.metrics, running.machine.view(time.monotonic()), running.term)
            process.metrics.gauge("kvcomm_controller_votes").set(running.metadata.counts().votes)
            hot = running.shell.hot.hot
            process.metrics.gauge("kvcomm_hot_keys", plane="block").set(len(hot.blocks.keys))
            process.metrics.gauge("kvcomm_hot_keys", plane="record").set(len(hot.records.keys))

        backend = ControllerBackend(process, running)
        work = process.announce(backend, running.addresses, "", refresh, ring=backend.ring)
        announcing.append(asyncio.create_task(_or_stop(_live(process, work), stop)))

    try:
        await run_controller(
            _machine(process),
            _controller_settings(process),
            instance=process.instance.name,
            incarnation=process.incarnation,
            credentials=process.instance.credentials(),
            addresses=process.listen_at,
            stop=stop,
            ready=ready,
        )
    finally:
        await _end(announcing)
        await process.withdraw()
    _check(announcing)


def _machine(process: NodeProcess) -> Controller:
    from controller.controller import Controller, ControllerOptions
    from controller.placement import RingRules
    from kvcomm.cli.launching import plan_of

    cluster = process.settings.cluster
    rules = RingRules(cluster.replicas, cluster.write_quorum, cluster.read_quorum, cluster.block_copies)
    initial = [each for each in plan_of(process.settings) if each.role != "controller"]
    options = ControllerOptions(
        heartbeat_s=cluster.heartbeat_s,
        lease_s=max(cluster.lease_s, 3 * cluster.heartbeat_s),
        replace_after_s=cluster.replace_after_s,
        move_rate_bytes_s=cluster.move_rate_bytes,
        members=tuple(process.controllers.names),
        policy="" if cluster.balance == "none" else cluster.balance,
    )
    return Controller(process.node, rules, initial, options)


def _controller_settings(process: NodeProcess) -> ControllerSettings:
    from controller.process import ControllerSettings

    settings, controllers = process.settings, process.controllers
    near = not controllers.configured
    return ControllerSettings(
        controllers.names,
        process.storage_directory,
        controllers.locate,
        dial=lambda beat: (near and beat.local_address) or beat.address,
        publish=lambda ring: _publish(process.instance, ring),
        hot=_hot_options(process),
        lease_s=settings.cluster.lease_s,
        request_timeout_s=settings.network.request_timeout_s,
        connect_timeout_s=settings.network.connect_timeout_s,
    )


def _publish(instance: Instance, ring: RingMap) -> None:
    """For processes of this host that start later; a newer one that is there already stays."""
    from kvcomm.errors import Conflict
    from kvcomm.instance import InstanceMissing

    with suppress(Conflict, InstanceMissing):
        instance.write_ring(ring)


def _shard_options(process: NodeProcess) -> ShardOptions:
    from kvcomm.validators import Validators
    from l3_shard.desk import ShardLimits, strong_wait_s
    from l3_shard.peers import WatchOptions
    from l3_shard.refilling import RefillOptions
    from l3_shard.repair import RepairOptions
    from l3_shard.scrub import ScrubOptions
    from l3_shard.server import ShardOptions

    settings, cluster = process.settings, process.settings.cluster
    return ShardOptions(
        process.storage_directory,
        settings.storage.fsync,
        settings.storage.fsync_interval_s,
        limits=ShardLimits(
            request_timeout_s=0.75 * settings.network.request_timeout_s,
            strong_timeout_s=0.75 * strong_wait_s(settings.network.request_timeout_s),
        ),
        connect_timeout_s=settings.network.connect_timeout_s,
        repair=RepairOptions(
            cluster.repair_interval_s,
            cluster.hint_bytes,
            cluster.hint_age_s,
            cluster.tombstone_age_s,
            move_rate_bytes=cluster.move_rate_bytes,
            scrub=ScrubOptions(settings.storage.scrub_interval_s, settings.storage.scrub_rate_bytes),
        ),
        refill=RefillOptions(
            cluster.move_rate_bytes,
            cluster.repair_interval_s,
            settings.network.request_timeout_s,
            cluster.move_blocks_limit_s,
        ),
        validators=Validators(settings.records.validators),
        watch=WatchOptions(cluster.heartbeat_s),
    )


@asynccontextmanager
async def _shard_stores(process: NodeProcess) -> AsyncIterator[tuple[Owner, BlockDisk | None]]:
    """The shard's memory for blocks, and the disk tier beneath it if there is to be one."""
    from kvcomm.block import NO_TENANT
    from l2_rdma.pool import PoolOptions, block_region
    from l3_shard.disk import block_disk

    cache, shard = process.settings.cache, process.settings.shard
    async with block_region(
        node=process.node,
        instance=process.instance.name,
        incarnation=process.incarnation,
        tenant=NO_TENANT,
        options=PoolOptions(cache.l3_size_bytes, reservation_ttl_s=cache.reservation_ttl_s),
    ) as (store, _):
        if process.disk_directory is None:
            yield store, None
            return
        async with block_disk(
            process.disk_directory,
            shard.disk_bytes,
            store,
            fsync=shard.disk_fsync == "always",
            clock=time.monotonic,
        ) as disk:
            yield store, disk


async def _live(process: NodeProcess, announcement: Awaitable[None]) -> None:
    await announcement
    gc.freeze()  # modules and the like stay: each look through them for garbage is 40 ms without an answer
    await process.keep_telling()


async def _or_stop(work: Awaitable[None], stop: asyncio.Event) -> None:
    """Without its registration nobody finds the node: end it, and say why."""
    try:
        await work
    except BaseException:
        stop.set()
        raise


async def _end(announcing: list[asyncio.Task[None]]) -> None:
    """End an announcement that is still under way: nothing may be registered after the withdrawal."""
    for task in announcing:
        task.cancel()
    await asyncio.gather(*announcing, return_exceptions=True)


def _check(announcing: list[asyncio.Task[None]]) -> None:
    """Raise what went wrong while announcing: it is why the node ended."""
    for task in announcing:
        if not task.cancelled():
            task.result()
