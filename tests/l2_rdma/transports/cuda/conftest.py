"""Pools in GPU memory: of a GPU of plain shared memory, and, where there is one, of a real GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, Incarnation
from kvcomm.errors import Unavailable
from kvcomm.wire.messages import Want
from l2_rdma.copying import address_of
from l2_rdma.fence import barrier_everywhere
from l2_rdma.owner import Owner
from l2_rdma.pins import PinTable
from l2_rdma.transports.cuda.gpu import DeviceBuffer, Gpu
from l2_rdma.transports.cuda.reader import CudaReader
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.cuda.slots import DeviceSlots
from tests.l2_rdma.regions import TENANT, header_of, key_of, layout_of, payload_of
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu


def real_gpu(ordinal: int = 0) -> Gpu:
    """Skips the test where there is none."""
    from l2_rdma.transports.cuda.runtime import open_gpu

    try:
        return open_gpu(ordinal)
    except Unavailable as error:
        pytest.skip(f"needs {'an NVIDIA GPU' if not ordinal else 'two NVIDIA GPUs'}: {error}")


@pytest.fixture(scope="session")
def cuda_gpu() -> Gpu:
    return real_gpu()


@pytest.fixture(scope="session")
def second_gpu(cuda_gpu: Gpu) -> Gpu:
    """Another one, which the first one reaches."""
    return real_gpu(1)


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    """One to allocate on and to copy with."""
    if request.param == "cuda":
        found: Gpu = request.getfixturevalue("cuda_gpu")
        return found
    return HostGpu(tmp_path_factory.getbasetemp())


def upload(gpu: Gpu, data: bytes) -> DeviceBuffer:
    """A buffer of its own on the GPU."""
    buffer = DeviceBuffer(gpu.allocate(len(data)), len(data))
    stream = gpu.stream()
    stream.copy(buffer.pointer, address_of(memoryview(data)), len(data))
    stream.close()
    return buffer


def download(gpu: Gpu, buffer: DeviceBuffer) -> bytes:
    data = memoryview(bytearray(buffer.nbytes))
    stream = gpu.stream()
    stream.copy(address_of(data), buffer.pointer, buffer.nbytes)
    stream.close()
    return bytes(data)


class DevicePool:
    """An owner over a region on ``gpu``; blocks are put as a GPU client puts them, through :attr:`reader`."""

    def __init__(
        self, directory: Path, gpu: Gpu, *, slab_count: int = 2, pin_slots: int = 8, **layout: Any
    ) -> None:
        self.gpu = gpu
        self.region = CudaRegion.create(
            directory,
            gpu,
            instance="tests",
            node="pool-0",
            tenant=TENANT,
            incarnation=Incarnation(5),
            layout=layout_of(slab_count, **layout),
        )
        self.slots = DeviceSlots(self.region)
        self.owner = Owner(
            self.region.file.memory,
            self.region.header,
            locked=self.region.file.hazards_locked,
            barrier=barrier_everywhere,
            pin_budget_bytes=1 << 30,
            slot_memory=self.slots,
        )
        self._holders = 100
        self._clients: list[CudaReader] = []
        self.reader = self.client(pin_slots)

    def client(self, pin_slots: int = 8, *, budget_bytes: int | None = None) -> CudaReader:
        """Another process's reader."""
        self._holders += 1
        mapped = CudaRegion.map(str(self.region.file.path), TENANT, self.gpu, self.region.handle())
        first, count, _ = self.owner.open_pins(self._holders, pin_slots)
        self._clients.append(CudaReader(mapped, PinTable(mapped.file, first, count, budget_bytes)))
        return self._clients[-1]

    def put(self, number: int, payload: bytes | None = None, **changes: Any) -> str:
        payload = payload_of(number) if payload is None else payload
        header = header_of(number, payload, **changes)
        grant = self.owner.reserve([Want(key_of(number), 256 + len(payload))], 1, TENANT, 0.0)[0]
        if grant.status != "granted":
            return grant.status
        pin = self.reader.begin_write(grant.offset, grant.generation, 256 + len(payload))
        assert pin is not None
        source = upload(self.gpu, payload)
        self.reader.write(grant.offset, header.pack(), source)
        self.gpu.free(source.pointer)
        self.reader.end_write(pin)
        return self.owner.publish([grant.token], 1, 0.0, verify=False)[0]

    def offset_of(self, number: int) -> int:
        """Where a published block lies."""
        found = self.reader._index.probe(key_of(number))
        assert found is not None
        return found.offset

    def damage(self, number: int) -> None:
        """Flip a payload byte on the GPU."""
        at = DeviceBuffer(self.region.address(self.offset_of(number) + HEADER_BYTES), 1)
        flipped = memoryview(bytes([download(self.gpu, at)[0] ^ 1]))
        stream = self.gpu.stream()
        stream.copy(at.pointer, address_of(flipped), 1)
        stream.close()

    def generation_on_gpu(self, offset: int) -> int:
        word = DeviceBuffer(self.region.address(offset + GENERATION_OFFSET), 8)
        return int.from_bytes(download(self.gpu, word), "little")

    def close(self) -> None:
        for client in self._clients:
            client.close()
            client.region.close()
        self.slots.close()
        self.region.close()


@pytest.fixture
def make_pool(tmp_path: Path, gpu: Gpu) -> Iterator[Callable[..., DevicePool]]:
    pools: list[DevicePool] = []

    def make(**options: Any) -> DevicePool:
        pools.append(DevicePool(tmp_path, gpu, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
