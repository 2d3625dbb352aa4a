"""``choose``: which transport a client reads a pool with: the one that costs least, as measured.

The cost of a read is modelled as latency plus size over bandwidth (Hockney, "The communication challenge for
MPP", 1994), for a block of typical size.  A measurement of a few milliseconds on a busy host is noisy, so
transports that differ by less than :data:`NOISE` count as equal, and the operator's order decides.

Memory of this host is another matter: it is read in place, without a copy (``l2_rdma.reader``), and no copy
is cheaper than that.  So ``shm`` is used wherever it works, whatever its copies cost.

What is not used has its reason: nobody reads a pool the slow way without being told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from l2_rdma.transports.port import TransportName

TYPICAL_BLOCK_BYTES = 2 << 20
"""A block of 16 tokens of an 8-billion-parameter model with grouped queries in 16 bits: 32 layers * 2 * 8
heads * 128 * 2 bytes * 16."""
IN_PLACE: TransportName = "shm"
"""Reads without a copy."""
NOISE = 0.25
"""Costs whose ratio is below ``1 + NOISE`` are equal."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What reads of one region cost through one transport (``l2_rdma.probing``)."""

    transport: TransportName
    latency_s: float
    """Of a read of 4 KiB, by itself; the median."""
    bytes_per_s: float
    """Of reads of 1 MiB, one after the other; the median.  Of less where the region is smaller."""

    def cost_s(self, block_bytes: int) -> float:
        """Predicted time of reading one block."""
        return self.latency_s + block_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome."""

    used: TransportName | None
    """``None``: nothing reaches the pool one-sided."""
    ranking: tuple[Measured, ...]
    """What works, cheapest first, but :attr:`used` before all others."""
    reasons: Mapping[str, str]
    """Of every other transport: why it is not used."""


def choose(
    measured: Sequence[Measured],
    refused: Mapping[str, str],
    preferred: Sequence[str],
    block_bytes: int = TYPICAL_BLOCK_BYTES,
) -> Choice:
    """Rank what was measured.

    Args:
        measured: the transports that work, once each.
        refused: those that do not, and why.
        preferred: the configured ones (``network.transports``), in the order that decides between equals.
        block_bytes: what a read typically is.
    """
    order = {name: place for place, name in enumerate(preferred)}
    allowed = [each for each in measured if each.transport in order]
    ranking = sorted(allowed, key=lambda each: (each.cost_s(block_bytes), order[each.transport]))
    if ranking:
        ranking.sort(key=_best(ranking, order, block_bytes).__ne__)  # it first, the rest as it was
    reasons = dict.fromkeys(preferred, "was not tried")
    reasons |= {each.transport: "not among network.transports" for each in measured}
    reasons |= {each.transport: _worse(each, ranking[0], block_bytes) for each in ranking}
    reasons |= {name: f"refused: {why}" for name, why in refused.items()}
    used = ranking[0].transport if ranking else None
    return Choice(used, tuple(ranking), {name: why for name, why in reasons.items() if name != used})


def _best(ranking: Sequence[Measured], order: Mapping[str, int], block_bytes: int) -> Measured:
    for each in ranking:
        if each.transport == IN_PLACE:
            return each
    limit_s = ranking[0].cost_s(block_bytes) * (1 + NOISE)
    equals = [each for each in ranking if each.cost_s(block_bytes) < limit_s]
    return min(equals, key=lambda each: order[each.transport])


def _worse(one: Measured, best: Measured, block_bytes: int) -> str:
    ours_s, best_s = one.cost_s(block_bytes), best.cost_s(block_bytes)
    costs = f"{_duration(ours_s)} against {_duration(best_s)} for a {_size(block_bytes)} block"
    if ours_s >= best_s * (1 + NOISE):
        return f"slower: {costs}"
    if best.transport == IN_PLACE:
        return "this host's memory is read in place, without a copy"
    return f"no better: {costs}"


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _size(size_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >> power:
            return f"{size_bytes / (1 << power):.3g} {unit}"
    return f"{size_bytes} B"
