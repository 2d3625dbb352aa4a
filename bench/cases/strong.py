"""An uncontended change of a strong record on three replicas, beside one raw round trip with one sync.

A change by the proposer that made the last one costs a round trip of the client, one round trip among the
shards, and one sync on each of a majority, which run at the same time.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from bench.peers.memory import Buffers
from bench.peers.synced_echo import SYNCED_ECHO, synced_echo
from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import START_DEADLINE_S, Service, service
from bench.timing import Call, Rounds, interleave
from kvcomm.client import Strong
from kvcomm.errors import Unavailable

VALUE_BYTES = 128
PUT, READ = "strong: put", "strong: read"
CREATE = "strong: first put of a record"
FLOOR_TIMES_MAX = 3.0


def run(scale: Scale) -> Report:
    report = Report("strong", "A strong record, three replicas")
    with ExitStack() as stack:
        running = stack.enter_context(service())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-")))
        floor = stack.enter_context(synced_echo(directory, VALUE_BYTES))
        rounds = interleave([floor, *_ours(_ready(running))], rounds=scale.rounds, turn_s=scale.turn_s)
    report.add(rounds, size_name(VALUE_BYTES), dict.fromkeys((PUT, READ, CREATE), SYNCED_ECHO))
    _claim(report, rounds)
    return report


def _ready(running: Service) -> Strong:
    """The shards vote a moment after the cluster has come up."""
    strong, deadline = running.client.strong("bench"), time.monotonic() + START_DEADLINE_S
    while True:
        try:
            strong.put("record", b"")
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return strong


def _ours(strong: Strong) -> list[Call]:
    (buffer,) = Buffers(1, VALUE_BYTES).all
    value, numbers = bytes(buffer), count()
    strong.put("record", value)

    def read() -> None:
        if strong.read("record").value != value:
            raise RuntimeError("a strong read gave another value than was put")

    return [
        Call(PUT, lambda: strong.put("record", value)),
        Call(READ, read),
        Call(CREATE, lambda: strong.put(f"record-{next(numbers)}", value)),
    ]


def _claim(report: Report, rounds: Rounds) -> None:
    size = size_name(VALUE_BYTES)
    ratio = rounds.ratio(PUT, SYNCED_ECHO)
    report.claim(f"strong put of {size}, over {SYNCED_ECHO}", "<=", FLOOR_TIMES_MAX, "x", ratio)
