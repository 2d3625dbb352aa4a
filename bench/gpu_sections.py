"""What ``python -m bench.gpu_transport --json`` recorded, as a section of the curves.

It keeps medians only, so where it came from has no spreads.
"""

from __future__ import annotations

import msgspec

from bench.scale import MIB
from bench.sections import Point, Section
from bench.timing import Spread

WAYS = {"plain": "plain copy, GPU to GPU", "channel": "KVCOMM cuda read", "fetch": "KVCOMM cuda fetch"}


class Machine(msgspec.Struct):
    gpu: str
    pool_gpu: int
    """The reader is on GPU 0."""


class Times(msgspec.Struct):
    us: dict[str, float]
    gbps: dict[str, float]
    """10^9 bytes a second."""


class Fetch(msgspec.Struct):
    size_mib: int
    pipelined: Times
    single: Times


class Recorded(msgspec.Struct):
    machine: Machine
    rounds: int
    fetch: list[Fetch]


def from_gpu_json(text: bytes) -> Section:
    """Raises ``msgspec.ValidationError`` if the text holds something else."""
    recorded = msgspec.json.decode(text, type=Recorded)
    gpu = recorded.machine.gpu
    machine = f"two {gpu}" if recorded.machine.pool_gpu else f"one {gpu}"
    section = Section(
        machine,
        f"Medians of {recorded.rounds} rounds. A fetch finds the block in the index, pins it, and has it "
        "verified the first time, which is not in these times.",
    )
    for key, way in WAYS.items():
        section.points += [
            Point(way, each.size_mib * MIB, _always(each.single.us[key]), _always(each.pipelined.gbps[key]))
            for each in recorded.fetch
        ]
    return section


def _always(value: float) -> Spread:
    return Spread(value, value, value)
