"""A client that asks for what nobody has, in a process of its own: ``python -m bench.flood ADDRESS TOKEN``.

It reads orders from its standard input, one JSON object a line (:class:`Order`), and answers each with what
it asked the shards for (:class:`Flooded`).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.service import identity_of
from kvcomm.block import ROOT_LINEAGE, BlockKey
from kvcomm.blockplane import BlockPlane
from kvcomm.rpc import Peers, run_blocking
from kvcomm.steps import Ask, Steps, Submit, ask_all
from kvcomm.wire.messages import BlockFilterGet, BlockLookup, RingGet, RingMap
from l1.tier import L1Tier
from l3_shard.tier import L3Tier

REPEATED_SHARE = 0.5
"""Of the prefixes asked for: from a few that come again and again; the others come once."""
REPEATED = 32
PREFIX_KEYS = 8
DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """Flood for ``seconds`` with ``rate`` prefixes a second."""

    seconds: float
    rate: float
    negative_ttl_s: float
    filter_age_s: float


@dataclass(frozen=True, slots=True)
class Flooded:
    """What came of it."""

    prefixes: int
    absent_keys: int
    """Asked for by the caller."""
    looked_up: int
    """Keys that shards were asked for."""
    filters: int
    found: int
    """False positives of nobody: this must be 0."""


class _Asked:
    """Counts what an operation asks the shards for."""

    def __init__(self) -> None:
        self.keys = self.filters = 0

    def counting(self, steps: Steps[Any]) -> Generator[Any, Any, Any]:
        result = None
        try:
            while True:
                step = steps.send(result)
                if isinstance(step, Submit):
                    for ask in step.asks:
                        if isinstance(ask.message, BlockLookup):
                            self.keys += len(ask.message.keys)
                        self.filters += isinstance(ask.message, BlockFilterGet)
                result = yield step
        except StopIteration as stop:
            return stop.value


def flood(ring: RingMap, peers: Peers, order: Order, seed: int) -> Flooded:
    """Keep to the rate; a second that took longer is not made up for."""
    draw, asked = random.Random(seed), _Asked()
    near = L1Tier(0, order.negative_ttl_s)
    plane = BlockPlane(near, None, L3Tier(ring, filter_age_s=order.filter_age_s), time.monotonic)
    repeated = [_prefix(draw) for _ in range(REPEATED)]
    prefixes = found = 0
    begin = due = time.monotonic()
    while (now := time.monotonic()) < begin + order.seconds:
        if now < due:
            time.sleep(due - now)
        due = max(due + 1.0 / order.rate, now - 0.1)
        keys = draw.choice(repeated) if draw.random() < REPEATED_SHARE else _prefix(draw)
        steps = asked.counting(plane.fetch(keys, [ROOT_LINEAGE] * len(keys)))
        found += len(run_blocking(steps, peers, now + DEADLINE_S).blocks)
        prefixes += 1
    return Flooded(prefixes, prefixes * PREFIX_KEYS, asked.keys, asked.filters, found)


def _prefix(draw: random.Random) -> list[BlockKey]:
    return [BlockKey(draw.randbytes(32)) for _ in range(PREFIX_KEYS)]


def main() -> None:
    """Obey until the input ends."""
    address, token = sys.argv[1:]
    peers = Peers(identity_of(token))
    (answer,) = run_blocking(ask_all([Ask(address, RingGet())]), peers, time.monotonic() + DEADLINE_S)
    assert isinstance(answer.message, RingMap)
    for number, line in enumerate(sys.stdin):
        done = flood(answer.message, peers, msgspec.json.decode(line, type=Order), number)
        sys.stdout.write(msgspec.json.encode(done).decode() + "\n")
        sys.stdout.flush()
    peers.close()


if __name__ == "__main__":
    main()
