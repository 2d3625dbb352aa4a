"""``measure``: what reads of a region cost through a channel, found out with a few of them.  ``prove``: that
it can be read.

It reads what is there, the first blocks' bytes, and looks at none of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median

from kvcomm.errors import KVCommError
from l2_rdma.choice import Measured
from l2_rdma.layout import BACKED_WORD, WORD_BYTES
from l2_rdma.transports.port import Channel, Extent, Registration, Transport

BUDGET_S = 0.05
"""No read begins later; each of the two sizes may take half of it."""
_LATENCY_BYTES = 4 << 10
_BANDWIDTH_BYTES = 1 << 20
_LATENCY_READS = 15
_BANDWIDTH_READS = 5
_SHORTEST_S = 1e-9
"""What a read takes at least, for a clock that did not move meanwhile."""


def measure(
    transport: Transport,
    channel: Channel,
    deadline: float,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
) -> Measured:
    """Time reads of 4 KiB and of 1 MiB (or of what the region has) into registered memory, as copies are
    received, where it can be registered.

    Args:
        transport: that ``channel`` is of.
        deadline: monotonic seconds; a peer that stands still is given up then.
        budget_s: what a measurement that goes well may take, roughly; two reads of each size are always
            waited for.

    Raises:
        Unavailable, Refused, Corrupt: a read ended so.
    """
    memory = memoryview(bytearray(_BANDWIDTH_BYTES))
    registration: Registration | None = None
    with suppress(KVCommError):  # no right to lock so much: reads that are no better are what there is
        registration = transport.register(memory)
    try:

        def read(extent: Extent) -> float:
            begin = clock()
            (operation,) = channel.read([extent], [memory[: extent.length]], deadline)
            transport.wait([operation])
            if operation.error is not None:
                raise operation.error
            return clock() - begin

        def typical_s(extent: Extent, count: int) -> float:
            read(extent)  # touches memory that nobody has touched yet: not what reads usually cost
            end = clock() + budget_s / 2
            taken = [read(extent)]
            while len(taken) < count and clock() < end:
                taken.append(read(extent))
            return max(median(taken), _SHORTEST_S)

        read(Extent(BACKED_WORD * WORD_BYTES, WORD_BYTES))
        sample = _sample(channel, int.from_bytes(memory[:WORD_BYTES], "little"))
        latency_s = typical_s(Extent(sample.offset, min(sample.length, _LATENCY_BYTES)), _LATENCY_READS)
        return Measured(channel.transport, latency_s, sample.length / typical_s(sample, _BANDWIDTH_READS))
    finally:
        if registration is not None:
            registration.close()


def prove(transport: Transport, channel: Channel, deadline: float) -> None:
    """See that reads come through, with the smallest one.

    Raises:
        Unavailable, Refused, Corrupt: it ended so.
    """
    word = Extent(BACKED_WORD * WORD_BYTES, WORD_BYTES)
    (operation,) = channel.read([word], [memoryview(bytearray(WORD_BYTES))], deadline)
    transport.wait([operation])
    if operation.error is not None:
        raise operation.error


def _sample(channel: Channel, backed_bytes: int) -> Extent:
    """Slots that have memory behind them (and a wire that keeps payloads elsewhere reads them from there);
    the index of a region that has none."""
    layout = channel.header.layout
    slots_bytes = min(backed_bytes, layout.slots_end) - layout.slots_offset
    if slots_bytes >= _LATENCY_BYTES:
        return Extent(layout.slots_offset, min(slots_bytes, _BANDWIDTH_BYTES))
    return Extent(layout.index_offset, min(layout.slots_offset - layout.index_offset, _BANDWIDTH_BYTES))
