"""A channel is measured by reading it, never for long, whatever its size and whatever becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvcomm.block import Buffer, Incarnation
from kvcomm.errors import KVCommError, Unavailable
from l2_rdma.layout import BACKED_WORD, RegionHeader, RegionLayout, plan_layout
from l2_rdma.probing import measure
from l2_rdma.region import Region
from l2_rdma.transports.port import Ask, Extent, Operation, TransportName, check_read
from l2_rdma.transports.shm import ShmProvider, ShmTransport
from tests.l2_rdma.regions import TENANT, layout_of, region_header

PATIENCE_S = 10.0


def layout_with(slots_bytes: int) -> RegionLayout:
    """One slab."""
    overhead_bytes = layout_of().slots_offset
    return plan_layout(
        overhead_bytes + slots_bytes, slab_bytes=slots_bytes, index_entries=64, hazard_count=64
    )


class Wire:
    """A transport and its one channel, over a clock that moves as the wire's model says."""

    transport: TransportName = "verbs"
    name: TransportName = "verbs"
    broken: KVCommError | None = None
    locks = True

    def __init__(
        self, slots_bytes: int, latency_s: float, bytes_per_s: float, backed: bool = True, fails_at: int = -1
    ) -> None:
        layout = layout_with(slots_bytes)
        self.header: RegionHeader = region_header(layout)
        self.now = 100.0
        self.reads: list[Extent] = []
        self.registered = 0
        self._model = (latency_s, bytes_per_s)
        self._backed_bytes = layout.slots_end if backed else layout.slots_offset
        self._fails_at = fails_at

    def register(self, buffer: memoryview) -> Wire:
        if not self.locks:
            raise Unavailable("no right to lock memory")
        self.registered += 1
        return self

    def close(self) -> None:
        self.registered -= 1

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        check_read(extents, into)
        ((extent, view),) = zip(extents, into, strict=True)
        operation = Operation(deadline)
        self.reads.append(extent)
        if len(self.reads) - 1 == self._fails_at:
            operation.fail(Unavailable("the peer is gone"))
            return [operation]
        if extent.offset == BACKED_WORD * 8:
            view[:] = self._backed_bytes.to_bytes(8, "little")
        self.now += self._model[0] + extent.length / self._model[1]
        operation.complete()
        return [operation]

    def write(self, extent: Extent, data: Buffer, deadline: float) -> Operation:
        raise AssertionError("a measurement writes nothing")

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        raise AssertionError("a measurement writes nothing")

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        raise AssertionError("a measurement writes nothing")

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> Wire:
        raise AssertionError("it is connected")

    def wait(self, operations: Sequence[Operation]) -> None:
        assert all(each.done for each in operations)

    def measure(self, **options: float) -> tuple[float, float]:
        found = measure(self, self, self.now + PATIENCE_S, clock=lambda: self.now, **options)
        assert found.transport == "verbs"
        return found.latency_s, found.bytes_per_s


def test_it_finds_what_the_wire_costs() -> None:
    wire = Wire(2 << 20, 20e-6, 5e9)
    latency_s, bytes_per_s = wire.measure()
    assert latency_s == pytest.approx(20e-6 + 4096 / 5e9)
    assert bytes_per_s == pytest.approx((1 << 20) / (20e-6 + (1 << 20) / 5e9))
    assert wire.registered == 0


def test_it_reads_slots_with_memory_behind_them_and_no_more_than_there_are() -> None:
    wire = Wire(64 << 10, 20e-6, 5e9)
    wire.measure()
    slots = wire.header.layout.slots_offset
    assert set(wire.reads[1:]) == {Extent(slots, 4096), Extent(slots, 64 << 10)}


def test_it_reads_the_index_where_no_slot_has_memory() -> None:
    wire = Wire(1 << 20, 20e-6, 5e9, backed=False)
    wire.measure()
    assert all(each.offset + each.length <= wire.header.layout.slots_offset for each in wire.reads)


def test_a_slow_wire_is_measured_with_few_reads() -> None:
    wire = Wire(2 << 20, 30e-3, 10e6)
    begin = wire.now
    latency_s, bytes_per_s = wire.measure(budget_s=0.05)
    assert len(wire.reads) == 1 + 2 + 2
    assert latency_s == pytest.approx(30e-3 + 4096 / 10e6)
    assert bytes_per_s == pytest.approx((1 << 20) / (30e-3 + (1 << 20) / 10e6))
    assert wire.now - begin < 0.4


def test_memory_that_cannot_be_registered_is_read_into_all_the_same() -> None:
    wire = Wire(2 << 20, 20e-6, 5e9)
    wire.locks = False
    assert wire.measure()[0] == pytest.approx(20e-6 + 4096 / 5e9)


@pytest.mark.parametrize("fails_at", [0, 1, 5, 20])
def test_a_peer_that_goes_away_meanwhile_is_its_error(fails_at: int) -> None:
    wire = Wire(2 << 20, 20e-6, 5e9, fails_at=fails_at)
    with pytest.raises(Unavailable, match="gone"):
        wire.measure()
    assert wire.registered == 0


@pytest.fixture
def make_region(tmp_path: Path) -> Iterator[Callable[[int], Region]]:
    made: list[Region] = []

    def make(slots_bytes: int) -> Region:
        layout = layout_with(slots_bytes)
        region = Region.create(
            tmp_path, instance="t", node="n", tenant=TENANT, incarnation=Incarnation(5), layout=layout
        )
        region.back(1 << 40)
        made.append(region)
        return region

    yield make
    for region in made:
        region.close()


@pytest.mark.parametrize("slots_bytes", [4096, 2 << 20])
def test_a_real_region_is_measured(make_region: Callable[[int], Region], slots_bytes: int) -> None:
    region = make_region(slots_bytes)
    transport = ShmTransport()
    channel = transport.connect(ShmProvider(region).offer(), region.header, bytes, time.monotonic() + 5)
    try:
        found = measure(transport, channel, time.monotonic() + 5)
    finally:
        channel.close()
        transport.close()
    assert found.transport == "shm"
    assert 0 < found.latency_s < 1
    assert found.bytes_per_s > 1e6
