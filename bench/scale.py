"""``Scale``: how much to measure."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Scale:
    """Rounds and sizes of a run."""

    rounds: int
    turn_s: float
    """Seconds that one operation gets in one round."""
    working_set: int
    """Distinct blocks or buffers that an operation goes round, the baseline's too: copying one and the same
    buffer again and again would measure the processor's cache."""
    block_bytes: int
    """The block size of the targets."""
    small_bytes: int
    large_bytes: int
    prefix_tokens: int
    fill_bytes: int
    """Put before puts are timed: more than the pool holds, so that it is as full as it is after a while."""
    processes: int
    """Fresh processes for what can be measured only once in each."""
    records: int
    """On each shard, when replicas are repaired."""
    repairs: int


FULL = Scale(
    rounds=31,
    turn_s=0.05,
    working_set=12,
    block_bytes=2 * MIB,
    small_bytes=64 * KIB,
    large_bytes=16 * MIB,
    prefix_tokens=2_048,
    fill_bytes=5 << 29,
    processes=15,
    records=100_000,
    repairs=5,
)
SMOKE = Scale(
    rounds=2,
    turn_s=0.001,
    working_set=2,
    block_bytes=64 * KIB,
    small_bytes=4 * KIB,
    large_bytes=256 * KIB,
    prefix_tokens=64,
    fill_bytes=4 * MIB,
    processes=2,
    records=1_000,
    repairs=1,
)
"""Says whether everything runs, not how fast."""


def size_name(size_bytes: int) -> str:
    """``2 MiB`` for 2097152."""
    for unit_bytes, unit in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit_bytes:
            return f"{size_bytes / unit_bytes:g} {unit}"
    return f"{size_bytes} B"
