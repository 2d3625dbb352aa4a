"""A put of an eventual record on two of three replicas, beside a round trip on the same wire.

The records are on disk when the operating system says so (``fsync: interval``): what is measured is the
service, not the device.  The client, the three shards and the echo server are processes of their own.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.peers.memory import Buffers
from bench.peers.wire_echo import WIRE_ECHO, wire_echo
from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import service
from bench.timing import Call, interleave, round_robin
from kvcomm.client import State
from kvcomm.stateplane import record_name

VALUE_BYTES, BATCH = 128, 100
PUT = "state: put, on two of three replicas"
BATCH_PUT = f"state: put of {BATCH}, a key"
FLOOR_TIMES_MAX, BATCH_TIMES_MIN = 2.5, 10.0


def run(scale: Scale) -> Report:
    report = Report("eventual", "A put of an eventual record, three replicas")
    with ExitStack() as stack:
        state = stack.enter_context(service(fsync="interval")).client.state("bench")
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-")))
        values = [bytes(value) for value in Buffers(BATCH, VALUE_BYTES).all]
        echo = stack.enter_context(wire_echo(directory, record_name("state", "bench", "key-0"), values[0]))
        rounds = interleave([echo, *_ours(state, values)], rounds=scale.rounds, turn_s=scale.turn_s)
    report.add(rounds, size_name(VALUE_BYTES), dict.fromkeys((PUT, BATCH_PUT), WIRE_ECHO))
    size = size_name(VALUE_BYTES)
    report.claim(
        f"put of {size} on 2 of 3 shards, over a round trip on the wire",
        "<=", FLOOR_TIMES_MAX, "x", rounds.ratio(PUT, WIRE_ECHO),
    )  # fmt: skip
    faster = rounds.ratio(PUT, BATCH_PUT)
    report.claim(
        f"{BATCH} records in one put, rate over one by one", ">=", BATCH_TIMES_MIN, "x faster", faster
    )
    return report


def _ours(state: State, values: list[bytes]) -> list[Call]:
    items = {f"key-{at}": value for at, value in enumerate(values)}
    state.put_many(items)
    return [
        Call(PUT, round_robin(lambda name: state.put(name, items[name]), list(items))),
        Call(BATCH_PUT, lambda: state.put_many(items), items=BATCH),
    ]
