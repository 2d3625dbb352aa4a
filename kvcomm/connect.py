"""``connect``: composition root of an agent's process; the only place where a client meets its tiers.

Which cluster?  The first of these that is given:

1. ``address=`` (``tcp://host:port`` of any shard) or ``instance=`` (a cluster on this host, by name);
2. ``KVCOMM_ADDRESS``, else ``KVCOMM_INSTANCE`` in the environment (empty = not set);
3. the instance ``default``, if ``kvcomm up`` runs it on this host;
4. an embedded cluster: real processes of our own, gone when this process is.

The credential is ``token=``, else ``KVCOMM_TOKEN``, else the configuration's ``security.token_file``, else
made from the secret of a local instance (whoever can read its directory is its owner).
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kvcomm.block import Incarnation
from kvcomm.blockplane import BlockPlane
from kvcomm.client import Client
from kvcomm.errors import ConfigError, KVCommError, Refused, Unauthenticated, Unavailable, failure_to_error
from kvcomm.heat import Heat
from kvcomm.hotcopies import HotCopies
from kvcomm.leaseplane import LeasePlane
from kvcomm.metrics import Metrics
from kvcomm.namespace import TenantDigest
from kvcomm.operations import Operations
from kvcomm.rpc import Identity, Peers, run_blocking
from kvcomm.stateplane import StatePlane
from kvcomm.steps import Ask, Steps, ask_all
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.tier import PoolState, PoolView
from kvcomm.wire.messages import Failure, RingGet, RingMap, RingNode

if TYPE_CHECKING:
    from kvcomm.aio import AsyncClient
    from kvcomm.config import Config
    from kvcomm.embedded import Embedded
    from kvcomm.instance import Instance
    from kvcomm.slabs import Slabs
    from l1.tier import L1Tier
    from l2_rdma.tier import L2Tier
    from l3_shard.tier import L3Tier

# What only a call of connect() needs is imported inside: "import kvcomm" stays quick.

ADDRESS_VARIABLE = "KVCOMM_ADDRESS"
INSTANCE_VARIABLE = "KVCOMM_INSTANCE"
TOKEN_VARIABLE = "KVCOMM_TOKEN"
DEFAULT_INSTANCE = "default"
PIN_SLOTS = 1024
"""Views of one pool's memory that a client can hold; what is over is copied."""
CONNECT_DEADLINE_S = 60.0
"""Enough to start an embedded cluster on a busy machine."""
RING_POLL_S = 0.05


def connect(
    config: str | Path | None = None,
    *,
    address: str | None = None,
    instance: str | None = None,
    token: str | None = None,
    embed: bool = True,
    deadline_s: float = CONNECT_DEADLINE_S,
) -> Client:
    """A client of the cluster that the arguments, the environment and this host offer; see the module's text.

    Args:
        config: configuration file; else ``$KVCOMM_CONFIG``, else ``./kvcomm.yaml``, else defaults.
        embed: whether to start an embedded cluster when no other is found.

    Raises:
        ConfigError: the configuration or its token file cannot be used, or both an address and an instance
            are named.
        Unavailable: no cluster found (``embed=False``), or it did not answer in time.
        Unauthenticated: it does not know our token.
    """
    from kvcomm.settings import load_config

    settings = load_config(config)
    deadline = time.monotonic() + deadline_s
    door = _find(settings, config, address, instance, token, embed, deadline)
    identity = Identity(door.token, _incarnation())
    peers = Peers(identity, connect_timeout_s=settings.network.connect_timeout_s)
    try:
        parts = _assemble(settings, door, identity, peers, deadline)
    except BaseException:
        peers.close()
        door.leave()
        raise

    def close() -> None:
        parts.close()
        peers.close()
        door.leave()

    return Client(parts.operations, peers, parts.counted, close, parts.pools)


async def connect_async(
    config: str | Path | None = None,
    *,
    address: str | None = None,
    instance: str | None = None,
    token: str | None = None,
    embed: bool = True,
    deadline_s: float = CONNECT_DEADLINE_S,
) -> AsyncClient:
    """:func:`connect` for asyncio; the client belongs to the running event loop."""
    import asyncio

    from kvcomm.aio import AsyncClient
    from kvcomm.rpc import AsyncPeers
    from kvcomm.settings import load_config

    settings = load_config(config)
    deadline = time.monotonic() + deadline_s
    door = await asyncio.to_thread(_find, settings, config, address, instance, token, embed, deadline)
    identity = Identity(door.token, _incarnation())
    greeting = Peers(identity, connect_timeout_s=settings.network.connect_timeout_s)
    try:
        parts = await asyncio.to_thread(_assemble, settings, door, identity, greeting, deadline)
    except BaseException:
        await asyncio.to_thread(door.leave)
        raise
    finally:
        greeting.close()
    peers = AsyncPeers(identity, connect_timeout_s=settings.network.connect_timeout_s)

    async def close() -> None:
        parts.close()
        await peers.close()
        await asyncio.to_thread(door.leave)

    return AsyncClient(parts.operations, peers, parts.counted, close, parts.pools)


@dataclass(frozen=True, slots=True)
class _Door:
    """The way into one cluster."""

    seeds: tuple[str, ...]
    """Addresses of shards: they know the ring."""
    token: str
    local: bool
    """The cluster's nodes run on this host: unix sockets and shared memory can be reached."""
    embedded: Embedded | None = None

    def leave(self) -> None:
        if self.embedded is not None:
            self.embedded.stop()

    def dial(self, node: RingNode) -> str:
        """Where to call a node: its socket in the file system where we share one, else TCP."""
        return node.local_address if self.local and node.local_address else node.address


@dataclass(frozen=True, slots=True)
class _Parts:
    operations: Operations
    counted: Callable[[], dict[str, float]]
    close: Callable[[], None]
    pools: Callable[[], Sequence[PoolView]]


def _find(
    settings: Config,
    config: str | Path | None,
    address: str | None,
    instance: str | None,
    token: str | None,
    embed: bool,
    deadline: float,
) -> _Door:
    from kvcomm.instance import Instance

    if address is not None and instance is not None:
        raise ConfigError("name the cluster by address or by instance, not by both")
    token = token or find_token(settings)
    if address is None and instance is None:
        address = os.environ.get(ADDRESS_VARIABLE) or None
        instance = None if address else os.environ.get(INSTANCE_VARIABLE) or None
    if address is not None:
        if token is None:
            raise Unavailable(
                f"a cluster at {address} needs a token: pass token=, set {TOKEN_VARIABLE}, "
                "or configure security.token_file"
            )
        return _Door((address,), token, local=False)
    if instance is None and any(each.name == DEFAULT_INSTANCE and each.nodes() for each in Instance.list()):
        instance = DEFAULT_INSTANCE
    if instance is not None:
        return _door_of(Instance.open(instance), settings, token, None)
    if not embed:
        raise Unavailable("no cluster found: start one with 'kvcomm up', or name it (--instance, --address)")
    from kvcomm.embedded import Embedded

    name = f"embedded-{_incarnation():016x}"
    embedded = Embedded.start(name, config, deadline)
    try:
        return _door_of(Instance.open(name), settings, token, embedded)
    except BaseException:
        embedded.stop()
        raise


def _incarnation() -> Incarnation:
    import secrets

    return Incarnation(secrets.randbits(64) | 1)


def find_token(settings: Config) -> str | None:
    """The token of ``$KVCOMM_TOKEN``, else of ``security.token_file``, if there is one."""
    return os.environ.get(TOKEN_VARIABLE) or _token_from(settings)


def _token_from(settings: Config) -> str | None:
    path = settings.security.token_file
    if not path:
        return None
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"security.token_file {path}: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not token:
        raise ConfigError(f"security.token_file {path} is empty")
    return token


def _door_of(instance: Instance, settings: Config, token: str | None, embedded: Embedded | None) -> _Door:
    seeds = [node.addresses[0] for node in instance.nodes() if node.role == "shard"]
    if not seeds:
        raise Unavailable(f"no shard of instance {instance.name!r} is running; start it with 'kvcomm up'")
    return _Door(
        tuple(seeds), token or instance.credentials().token(settings.security.tenant), True, embedded
    )


def _assemble(settings: Config, door: _Door, identity: Identity, peers: Peers, deadline: float) -> _Parts:
    """Put the client together from what the cluster says of itself."""
    from kvcomm.slabs import Slabs
    from l1.tier import L1Tier
    from l3_shard.tier import L3Tier

    cache, network = settings.cache, settings.network
    ring, tenant = _greet(door, peers, deadline, network.request_timeout_s)
    _watch_forks()  # not before l2_rdma is imported: its pins must hear of a fork first
    near = L1Tier(cache.l1_size_bytes, cache.l1_negative_ttl_s, negative_entries=cache.l1_negative_entries)
    _nears.add(near)
    slabs = Slabs()
    l3: L3Tier | None = None
    if ring.shards:
        timeout_s = network.request_timeout_s
        l3 = L3Tier(
            ring,
            dial=door.dial,
            timeout_s=timeout_s,
            allocate=slabs.take,
            filter_age_s=cache.l3_filter_age_s,
        )
    newest = l3.newest_map if l3 is not None else lambda: ring
    l2 = _rack(settings, door, identity, slabs, newest) if ring.pools else None
    tally = Tally(Metrics("client"), time.monotonic)
    copies = HotCopies(cache.hot_record_age_s)
    pace_s = settings.cluster.heartbeat_s
    heat = Heat(identity.caller, network.rack, l3, time.monotonic, pace_s) if l3 else None
    state = StatePlane(l3, tally, copies=copies, heat=heat, clock=time.monotonic) if l3 else None
    strong = StrongPlane(l3, tally, random.random) if l3 else None
    blocks = BlockPlane(near, l2, l3, time.monotonic)
    numbers = count(1)
    holder = f"{identity.caller:016x}"
    leases = (
        LeasePlane(strong, time.monotonic, random.random, lambda: f"{holder}.{next(numbers)}")
        if strong
        else None
    )
    operations = Operations(blocks, state, tally, tenant, identity.caller, strong, leases, heat)

    def close() -> None:
        near.clear()
        if l2 is not None:
            l2.close()

    counted = _counting(tally.metrics, near, l2, l3, copies, heat)
    return _Parts(operations, counted, close, lambda: l2.stats().pools if l2 is not None else ())


def _counting(
    metrics: Metrics,
    near: L1Tier,
    l2: L2Tier | None,
    l3: L3Tier | None,
    copies: HotCopies,
    heat: Heat | None,
) -> Callable[[], dict[str, float]]:
    """What the tiers count themselves is taken over when somebody looks."""
    taking_over = threading.Lock()  # else an older look could come after a newer one and turn a counter back

    def counted() -> dict[str, float]:
        with taking_over:
            return take_over()

    def take_over() -> dict[str, float]:
        counter, first = metrics.counter, near.stats()
        counter("kvcomm_negative_hits_total").advance_to(first.absent_hits_total)
        counter("kvcomm_flight_followers_total").advance_to(first.followed_total)
        counter("kvcomm_copies_refused_total", tier="l1").advance_to(first.rejected_total)
        counter("kvcomm_hot_record_reads_total").advance_to(copies.answered_count)
        counter("kvcomm_hot_record_copies_total", event="kept").advance_to(copies.kept_count)
        counter("kvcomm_hot_record_copies_total", event="dropped").advance_to(copies.dropped_count)
        if heat is not None:
            counter("kvcomm_hot_reports_total").advance_to(heat.reports_count)
        if l2 is not None:
            rack = l2.stats()
            counter("kvcomm_copies_refused_total", tier="l2").advance_to(rack.reads.corrupt)
            counter("kvcomm_view_fallbacks_total").advance_to(rack.reads.unpinned_copies)
            for used, reads in rack.reads_by_transport.items():
                counter("kvcomm_transport_reads_total", transport=used).advance_to(reads.hits)
                counter("kvcomm_transport_bytes_total", transport=used).advance_to(reads.hit_bytes)
                counter("kvcomm_transport_unavailable_total", transport=used).advance_to(reads.unavailable)
            counter("kvcomm_pool_losses_total").advance_to(rack.lost_count)
            for state in get_args(PoolState):
                number = sum(pool.state == state for pool in rack.pools)
                metrics.gauge("kvcomm_pools", state=state).set(number)
            for (wanted, used), count in rack.fallbacks.items():
                counter("kvcomm_transport_fallbacks_total", wanted=wanted, used=used).advance_to(count)
        if l3 is not None:
            counter("kvcomm_copies_refused_total", tier="l3").advance_to(l3.counts.damaged_count)
            counter("kvcomm_stale_epochs_total").advance_to(l3.counts.stale_count)
            counter("kvcomm_hedged_requests_total").advance_to(l3.counts.hedged_count)
            counter("kvcomm_lagging_copies_total").advance_to(l3.counts.lagging_count)
            counter("kvcomm_filtered_lookups_total").advance_to(l3.filters.skipped_count)
        return metrics.snapshot()

    return counted


def pools_near(ring: RingMap, rack: str) -> Sequence[RingNode]:
    """Those of the rack; all, if it has none or is not named."""
    return [node for node in ring.pools if node.rack == rack] or ring.pools


def _rack(
    settings: Config, door: _Door, identity: Identity, slabs: Slabs, newest: Callable[[], RingMap]
) -> L2Tier:
    """The pools that are near, as the ring changes."""
    from l2_rdma.attachment import AttachOptions
    from l2_rdma.rack import Pool
    from l2_rdma.tier import L2Tier
    from l2_rdma.transports.port import WireOptions
    from l2_rdma.wires import Wires

    network = settings.network
    seen: tuple[RingMap | None, list[Pool]] = (None, [])

    def pools() -> list[Pool]:
        nonlocal seen
        now = newest()
        if seen[0] is not now:
            near = pools_near(now, network.rack)
            seen = now, [Pool(node.node, door.dial(node), node.weight) for node in near]
        return seen[1]

    return L2Tier(
        pools,
        identity,
        wires=Wires(network.transports, WireOptions(rdma_device=network.rdma_device), slabs),
        options=AttachOptions(
            zero_copy_threshold_bytes=network.zero_copy_threshold_bytes,
            pin_slots=PIN_SLOTS,
            request_timeout_s=network.request_timeout_s,
        ),
    )


_nears: weakref.WeakSet[L1Tier] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for near in list(_nears):
        near.forked()


def _greet(door: _Door, peers: Peers, deadline: float, timeout_s: float) -> tuple[RingMap, TenantDigest]:
    """The map that the first answering seed has, and who we are to the cluster.

    Shards answer before they have been given a ring: a cluster that is just being started is waited for.
    """
    while True:
        failures: list[str] = []
        starting = False
        for seed in door.seeds:
            greeted = False
            try:
                welcome = peers.welcome(seed, deadline)
                if welcome.role != "shard":
                    raise Refused(f"{seed} is a {welcome.role}, which does not know the ring; name a shard")
                greeted = True
                ring = run_blocking(_ring(seed, timeout_s), peers, deadline)
                return ring, TenantDigest(welcome.tenant)
            except Unauthenticated:
                raise
            except KVCommError as error:
                starting = starting or (greeted and isinstance(error, Unavailable))
                failures.append(error.message)
        if not starting or time.monotonic() + RING_POLL_S >= deadline:
            raise Unavailable(f"no node answers: {'; '.join(failures)}")
        time.sleep(RING_POLL_S)


def _ring(seed: str, timeout_s: float) -> Steps[RingMap]:
    (answer,) = yield from ask_all([Ask(seed, RingGet(), timeout_s=timeout_s)])
    match answer.message:
        case RingMap():
            return answer.message
        case Failure():
            raise failure_to_error(answer.message.code, answer.message.text, answer.message.detail)
    raise Refused(
        f"{seed} answers {type(answer.message).__name__} when asked for the ring; use equal versions"
    )
