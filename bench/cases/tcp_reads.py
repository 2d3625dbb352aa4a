"""One-sided reads over TCP, beside a socket with no protocol, and what other stores do over TCP.

A read here is the transport's own: bytes of another process's region into memory that is there already, found
and verified by nobody.  A get is a block by its key: found in the index, verified.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.channels import channel, mapped
from bench.peers.memory import MEMCPY, Buffers, memcpy
from bench.peers.mooncake_store import mooncake
from bench.peers.raw_socket import RAW_BLOCKING, RAW_SOCKET, raw_socket
from bench.peers.redis_server import redis_server
from bench.pool import pools
from bench.report import Report
from bench.scale import Scale, size_name
from bench.timing import Operation, interleave

IN_FLIGHT = 16
TCP, TCP_RUN = "tcp: read", f"tcp: {IN_FLIGHT} reads at once, a read"
TCP_GET = "tcp: get by key, verified"
TCP_GET_RUN = f"tcp: {IN_FLIGHT} gets at once, a get"
SOCKET_TIMES_MAX, STREAM_SHARE_MIN = 1.2, 0.9
MOONCAKE_TIMES_MIN, REDIS_TIMES_MIN = 2.0, 1.5


def run(scale: Scale) -> Report:
    report = Report("tcp_reads", "One-sided reads over TCP")
    _measure(scale, report)
    return report


def _measure(scale: Scale, report: Report) -> None:
    size_bytes, size = scale.block_bytes, size_name(scale.block_bytes)
    with ExitStack() as stack:
        [pool] = stack.enter_context(pools(1, transports=["tcp"]))
        region = stack.enter_context(mapped(pool))
        reads = stack.enter_context(channel(pool, "tcp"))
        if isinstance(reads, str):
            report.skip(f"reads of {size} over tcp", reads)
            return
        keys = pool.fill(scale.working_set, size_bytes)
        extents = region.payloads(keys)
        raw = stack.enter_context(raw_socket(scale.working_set, size_bytes))
        blocking = stack.enter_context(raw_socket(scale.working_set, size_bytes, blocking=True))
        streams = raw.stream(IN_FLIGHT), blocking.stream(IN_FLIGHT)
        operations: list[Operation] = [
            memcpy(scale.working_set, size_bytes),
            raw.one,
            blocking.one,
            *streams,
            reads.of(TCP, extents),
            reads.of(TCP_RUN, extents, IN_FLIGHT),
            reads.blocks(TCP_GET, keys),
            reads.blocks(TCP_GET_RUN, keys, IN_FLIGHT),
        ]
        missing = {}
        redis = stack.enter_context(redis_server())
        if isinstance(redis, str):
            missing["Redis"] = redis
        else:
            operations += redis.gets(Buffers(scale.working_set, size_bytes).all)
        store = stack.enter_context(mooncake(scale.working_set, size_bytes))
        if isinstance(store, str):
            missing["Mooncake"] = store
        else:
            operations += store.gets(size_bytes)
        rounds = interleave(
            operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set
        )
    baselines = dict.fromkeys(list(rounds.seconds)[2:], RAW_SOCKET)
    of_streams = {TCP_RUN: streams[0].name, TCP_GET_RUN: streams[0].name}
    report.add(rounds, size, baselines | {RAW_SOCKET: MEMCPY} | of_streams)
    for socket, stream in zip((RAW_SOCKET, RAW_BLOCKING), streams, strict=True):
        over, share = rounds.ratio(TCP, socket), rounds.ratio(stream.name, TCP_RUN)
        report.claim(f"read of {size} over tcp, over a {socket}", "<=", SOCKET_TIMES_MAX, "x", over)
        what = f"{IN_FLIGHT} reads of {size} at once over tcp, share of the bandwidth of a {socket}"
        report.claim(what, ">=", STREAM_SHARE_MIN, "x", share)
    for peer, times_min in (("Mooncake", MOONCAKE_TIMES_MIN), ("Redis", REDIS_TIMES_MIN)):
        if peer in missing:
            report.skip(f"read of {size} over tcp against {peer}", missing[peer])
            continue
        # The same wire, as between hosts: Redis has a faster one on its own.
        rivals = [name for name in rounds.seconds if name.startswith(peer) and "unix" not in name]
        best = rounds.fastest(rivals)
        for verb, name in (("read", TCP), ("get", TCP_GET)):
            faster = rounds.ratio(best, name)
            report.claim(f"{verb} of {size} over tcp, against {best}", ">=", times_min, "x faster", faster)
