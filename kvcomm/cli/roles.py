"""``kvcomm pool`` and ``kvcomm shard``: one node of a cluster, in the foreground.  ``kvcomm up`` starts
them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.cli.options import ConfigOption

if TYPE_CHECKING:
    from kvcomm.cli.node import NodeProcess
    from l2_rdma.pool import RunningPool

InstanceName = Annotated[
    str, typer.Option("--instance", help="Cluster on this host that the node belongs to.")
]
NodeName = Annotated[str, typer.Option("--node", help="Name of the node; its placement goes by it.")]
Lifeline = Annotated[bool, typer.Option("--lifeline", hidden=True, help="Stop when standard input closes.")]


def pool(
    node: NodeName,
    instance: InstanceName = "default",
    config: ConfigOption = None,
    lifeline: Lifeline = False,
) -> None:
    """Run this host's pool: a region of shared memory that agents read one-sided."""
    from kvcomm.cli.node import NodeProcess, log_to_stderr
    from kvcomm.serve import run

    log_to_stderr()
    run(_pool(NodeProcess(instance, node, "pool", config), lifeline))


async def _pool(process: NodeProcess, lifeline: bool) -> None:
    from kvcomm.cli.node import StoreBackend
    from kvcomm.cli.signals import stop_event
    from l2_rdma.pool import PoolOptions, run_pool

    cache = process.settings.cache
    stop = stop_event(lifeline)
    announcing: list[asyncio.Task[None]] = []

    def ready(running: RunningPool) -> None:
        def refresh() -> None:
            process.refresh(running.store, running.server, 0)

        backend = StoreBackend(process, running.store)
        work = process.announce(backend, running.addresses, running.region, refresh)
        announcing.append(asyncio.create_task(_or_stop(work, stop)))

    try:
        await run_pool(
            node=process.node,
            instance=process.instance.name,
            incarnation=process.incarnation,
            credentials=process.instance.credentials(),
            tenant=process.settings.security.tenant,
            addresses=process.listen_at,
            options=PoolOptions(cache.l2_size_bytes, cache.l2_pin_budget_bytes, cache.reservation_ttl_s),
            stop=stop,
            ready=ready,
        )
    finally:
        await process.withdraw()
    for task in announcing:
        task.result()  # what went wrong while announcing is why we ended


async def _or_stop(work: Awaitable[None], stop: asyncio.Event) -> None:
    """Without its registration nobody finds the node: end it, and say why."""
    try:
        await work
    except BaseException:
        stop.set()
        raise
