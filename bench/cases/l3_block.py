"""A block from a shard over TCP, verified, beside what else could bring it: a raw socket, Redis, Mooncake."""

from __future__ import annotations

import time
from contextlib import ExitStack

from bench.peers.memory import MEMCPY, Buffers, memcpy
from bench.peers.mooncake_store import mooncake
from bench.peers.raw_socket import RAW_SOCKET, raw_socket
from bench.peers.redis_server import redis_server
from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import DEADLINE_S, Service, identity, publish, service
from bench.timing import Call, Operation, Rounds, interleave, round_robin
from kvcomm.block import BlockKey
from kvcomm.errors import Unavailable
from kvcomm.rpc import Peers, run_blocking
from kvcomm.slabs import Slabs
from kvcomm.tier import Block

GET = "shard: get over TCP"
RUN = "shard: get of a run of blocks over TCP, a block"
"""As a fetch of a prefix does it: every block of the working set in one operation."""
SOCKET_TIMES_MAX, PEER_TIMES_MIN = 1.3, 1.3


def run(scale: Scale) -> Report:
    report = Report("l3_block", "A block from a shard")
    with ExitStack() as stack:
        running = stack.enter_context(service())
        keys = publish(running.client, scale.working_set, scale.block_bytes).keys(running)
        peers = Peers(identity(running))
        stack.callback(peers.close)
        operations: list[Operation] = [
            memcpy(scale.working_set, scale.block_bytes),
            stack.enter_context(raw_socket(scale.working_set, scale.block_bytes)).one,
            *_gets(running, keys, peers),
        ]
        missing = {}
        redis = stack.enter_context(redis_server())
        if isinstance(redis, str):
            missing["Redis"] = redis
        else:
            operations += redis.gets(Buffers(scale.working_set, scale.block_bytes).all)
        store = stack.enter_context(mooncake(scale.working_set, scale.block_bytes))
        if isinstance(store, str):
            missing["Mooncake"] = store
        else:
            operations += store.gets(scale.block_bytes)
        rounds = interleave(
            operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set
        )
    report.add(
        rounds,
        size_name(scale.block_bytes),
        dict.fromkeys(list(rounds.seconds)[2:], RAW_SOCKET) | {RAW_SOCKET: MEMCPY},
    )
    _claim(report, rounds, size_name(scale.block_bytes), missing)
    return report


def _gets(running: Service, keys: list[BlockKey], peers: Peers) -> list[Call]:
    """Through the tier, told to use TCP though the shard is on this host."""
    from l3_shard.tier import L3Tier

    ring = running.instance.ring()
    if ring is None:
        raise Unavailable("the cluster wrote no ring")
    tier = L3Tier(ring, dial=lambda node: node.address, timeout_s=DEADLINE_S, allocate=Slabs().take)

    def get(run: list[BlockKey]) -> None:
        found: list[Block] = []
        steps = tier.get(run, lambda _, block: found.append(block))
        run_blocking(steps, peers, time.monotonic() + DEADLINE_S)
        if len(found) < len(run):
            raise RuntimeError("the shards lost a block that was to be fetched")

    each = [[key] for key in keys]
    return [Call(GET, round_robin(get, each)), Call(RUN, lambda: get(keys), items=len(keys))]


def _claim(report: Report, rounds: Rounds, size: str, missing: dict[str, str]) -> None:
    for what, name in ((size, GET), (f"{size} of a run", RUN)):
        over = rounds.ratio(name, RAW_SOCKET)
        report.claim(f"{what} from a shard over TCP, over a raw socket", "<=", SOCKET_TIMES_MAX, "x", over)
    for peer in ("Redis", "Mooncake"):
        if peer in missing:
            report.skip(f"{size} from a shard against {peer}", missing[peer])
            continue
        best = rounds.fastest([name for name in rounds.seconds if name.startswith(peer)])
        for what, name in ((size, GET), (f"{size} of a run", RUN)):
            faster = rounds.ratio(best, name)
            report.claim(f"{what} from a shard, against {best}", ">=", PEER_TIMES_MIN, "x faster", faster)
