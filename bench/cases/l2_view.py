"""A block that is in the host's pool, as a view: what a fetch costs when nothing has to be copied.

Twice at each size: the one-sided reader alone, and ``Client.fetch`` of a one-block context with everything
that comes with it (hashing the tokens, walking the tiers).  Redis GET of a value of the same size is the
competition; a memory copy is what any store that hands out copies pays at least.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from bench.peers.memory import MEMCPY, Buffers, memcpy
from bench.peers.redis_server import RedisServer, redis_server
from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import Prefixes, Service, pool_reader, publish, service, settle
from bench.timing import Call, Rounds, interleave, round_robin
from kvcomm.block import BlockKey
from kvcomm.client import Client

if TYPE_CHECKING:
    from l2_rdma.reader import Reader

VIEW, FIRST, FETCH = "reader: view", "reader: first view, with checksum", "client: fetch"
READER_US_MAX, CLIENT_US_MAX, FIRST_FIXED_US = 25.0, 60.0, 60.0
REDIS_TIMES_MIN = 20.0
SIZE_RATIO_MAX = 1.5


def run(scale: Scale) -> Report:
    report = Report("l2_view", "A view of a block in the host's pool")
    sizes = (scale.small_bytes, scale.block_bytes, scale.large_bytes)
    with ExitStack() as stack:
        running = stack.enter_context(service())
        readers = stack.enter_context(pool_reader(running))
        redis = stack.enter_context(redis_server())
        settle(running)
        rounds = {size: _rounds(scale, running, readers, redis, size, report) for size in sizes}
    _claim(report, scale, rounds, redis)
    return report


def _rounds(
    scale: Scale,
    running: Service,
    readers: Callable[[], Reader],
    redis: RedisServer | str,
    size_bytes: int,
    report: Report,
) -> Rounds:
    prefixes = publish(running.client, scale.working_set, size_bytes)
    keys, reader = prefixes.keys(running), readers()
    operations = [
        memcpy(scale.working_set, size_bytes),
        Call(VIEW, round_robin(lambda key: _view(reader, key), keys)),
        _first_view(readers, keys),
        Call(FETCH, round_robin(lambda tokens: _fetch(running.client, prefixes, tokens), prefixes.tokens)),
    ]
    competitors = [] if isinstance(redis, str) else redis.gets(Buffers(scale.working_set, size_bytes).all)
    rounds = interleave(
        [*operations, *competitors], rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set
    )
    report.add(rounds, size_name(size_bytes), dict.fromkeys(list(rounds.seconds)[1:], MEMCPY))
    return rounds


def _view(reader: Reader, key: BlockKey) -> None:
    if reader.view(key) is None:
        raise RuntimeError("the pool lost a block that was to be viewed")


def _first_view(readers: Callable[[], Reader], keys: list[BlockKey]) -> Call:
    """Each by a reader that has not verified anything; making the reader is not in the time."""
    fresh = [readers()]

    def forget() -> None:
        fresh[0] = readers()

    return Call(FIRST, round_robin(lambda key: _view(fresh[0], key), keys), after=forget)


def _fetch(client: Client, prefixes: Prefixes, tokens: list[int]) -> None:
    hit = client.fetch(prefixes.namespace, tokens)
    if [block.tier for block in hit.blocks] != ["l2"]:
        raise RuntimeError(f"expected one block from the pool, got {hit.tiers}")


def _claim(report: Report, scale: Scale, rounds: dict[int, Rounds], redis: RedisServer | str) -> None:
    size, block = size_name(scale.block_bytes), rounds[scale.block_bytes]
    report.claim(f"view of {size}, reader", "<=", READER_US_MAX, "us", block.spread(VIEW).scaled(1e6))
    report.claim(f"view of {size}, client", "<=", CLIENT_US_MAX, "us", block.spread(FETCH).scaled(1e6))
    small, large = rounds[scale.small_bytes].spread(VIEW), rounds[scale.large_bytes].spread(VIEW)
    sizes = f"{size_name(scale.large_bytes)} over {size_name(scale.small_bytes)}"
    report.claim(f"view, reader: {sizes}", "<=", SIZE_RATIO_MAX, "x", large.scaled(1 / small.median))
    first = block.ratio(FIRST, MEMCPY, less_s=FIRST_FIXED_US / 1e6)
    report.claim(f"first view of {size}, less {FIRST_FIXED_US:.0f} µs, over memcpy", "<=", 1.0, "x", first)
    if isinstance(redis, str):
        report.skip(f"view of {size} against Redis GET", redis)
        return
    get = block.fastest([name for name in block.seconds if name.startswith("Redis")])
    report.claim(
        f"view of {size}, client, against {get}", ">=", REDIS_TIMES_MIN, "x faster", block.ratio(get, FETCH)
    )
