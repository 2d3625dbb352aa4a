"""A small value of the state plane: one read beside Redis GET, and many at once beside one by one."""

from __future__ import annotations

from contextlib import ExitStack

from bench.peers.memory import Buffers
from bench.peers.redis_server import RedisServer, redis_server
from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import service
from bench.timing import Call, Rounds, interleave, round_robin
from kvcomm.client import State

VALUE_BYTES, BATCH = 128, 64
GET, PUT = "state: get", "state: put, durable on a quorum"
BATCH_GET = f"state: get of {BATCH}, a key"
REDIS_TIMES_MAX, BATCH_TIMES_MIN = 1.5, 5.0


def run(scale: Scale) -> Report:
    report = Report("state", "A small value of the state plane")
    with ExitStack() as stack:
        state = stack.enter_context(service()).client.state("bench")
        redis = stack.enter_context(redis_server())
        rounds = interleave([*_ours(state), *_theirs(redis)], rounds=scale.rounds, turn_s=scale.turn_s)
    baselines = {} if isinstance(redis, str) else dict.fromkeys((GET, PUT, BATCH_GET), _fastest(rounds))
    report.add(rounds, size_name(VALUE_BYTES), baselines)
    _claim(report, rounds, redis)
    return report


def _ours(state: State) -> list[Call]:
    values = {f"key-{at}": bytes(value) for at, value in enumerate(Buffers(BATCH, VALUE_BYTES).all)}
    state.put_many(values)
    names = list(values)

    def get(name: str) -> None:
        if len(state.get(name).values) != 1:
            raise RuntimeError(f"{name} has not exactly one value")

    def get_all() -> None:
        if any(found.values != (values[name],) for name, found in state.get_many(names).items()):
            raise RuntimeError("a batch came back with other values than were put")

    return [
        Call(GET, round_robin(get, names)),
        Call(BATCH_GET, get_all, items=BATCH),
        Call(PUT, round_robin(lambda name: state.put(name, values[name]), names)),
    ]


def _theirs(redis: RedisServer | str) -> list[Call]:
    if isinstance(redis, str):
        return []
    calls = redis.gets(Buffers(BATCH, VALUE_BYTES).all)
    names = [f"value-{index}" for index in range(BATCH)]
    client = redis.clients["unix"]
    return [*calls, Call(f"Redis MGET of {BATCH}, a key", lambda: client.mget(names), items=BATCH)]


def _fastest(rounds: Rounds) -> str:
    return rounds.fastest([name for name in rounds.seconds if name.startswith("Redis GET")])


def _claim(report: Report, rounds: Rounds, redis: RedisServer | str) -> None:
    size = size_name(VALUE_BYTES)
    if isinstance(redis, str):
        report.skip(f"state get of {size} against Redis GET", redis)
    else:
        best = _fastest(rounds)
        report.claim(f"state get of {size}, over {best}", "<=", REDIS_TIMES_MAX, "x", rounds.ratio(GET, best))
    faster = rounds.ratio(GET, BATCH_GET)
    report.claim(f"{BATCH} keys at once, rate over one by one", ">=", BATCH_TIMES_MIN, "x faster", faster)
