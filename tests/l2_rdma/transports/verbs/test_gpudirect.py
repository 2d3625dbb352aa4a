"""GPU memory by dma-buf, as far as it can be told without a GPU: who refuses, and what is handed on."""

import ctypes
import enum
import os
from types import SimpleNamespace

import pytest

from kvcomm.errors import Refused, Unavailable
from l2_rdma.transports.port import Extent
from l2_rdma.transports.verbs.gpudirect import export_dma_buf, register_gpu
from tests.l2_rdma.transports.verbs.fabric import Card
from tests.peers import soon

_Result = enum.IntEnum("_Result", {"CUDA_SUCCESS": 0, "CUDA_ERROR_NOT_SUPPORTED": 801})


class Driver:
    """The calls of ``cuda.bindings.driver``."""

    CUdevice_attribute = SimpleNamespace(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED=124)
    CUmemRangeHandleType = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)
    CUresult = _Result

    def __init__(self, *, supported=1, status=0):
        self.supported, self.status = supported, status
        self.exported = []

    def cuDeviceGetAttribute(self, attribute, ordinal):
        assert (attribute, ordinal) == (124, 0)
        return _Result(0), self.supported

    def cuMemGetHandleForAddressRange(self, pointer, nbytes, kind, flags):
        assert (pointer % 4096, nbytes % 4096, kind, flags) == (0, 0, 1, 0)
        if self.status:
            return _Result(self.status), -1
        descriptor = os.memfd_create("exported")
        self.exported.append((pointer, nbytes, descriptor))
        return _Result(0), descriptor


def gpu(**options):
    return SimpleNamespace(driver=Driver(**options), ordinal=0, name="H200", use=lambda: None)


def is_open(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")


class TestWithDmaBuf:
    @pytest.fixture
    def card(self):
        return Card(dmabuf=True)

    def test_whole_pages_are_exported_and_the_part_is_registered(self, net):
        graphics = gpu()
        memory = register_gpu(net.transport, graphics, 0x7000_0000 + 100, 5000)
        [(pointer, nbytes, descriptor)] = graphics.driver.exported

        assert (pointer, nbytes) == (0x7000_0000, 8192)
        assert (memory.address, memory.length) == (100, 5000)
        assert not is_open(descriptor)

        channel = net.connect()
        begin = net.region.header.layout.slots_offset
        net.region.memory[begin : begin + 16] = b"to the GPU itself"[:16]
        [reading] = channel.read_device([Extent(begin, 16)], [(memory, 0)], soon())
        net.transport.wait([reading])
        assert ctypes.string_at(ctypes.addressof(net.fabric.gpu) + 100, 16) == b"to the GPU itsel"
        memory.close()

    @pytest.mark.parametrize(
        ("options", "reason"),
        [({"supported": 0}, "exports no dma-buf"), ({"status": 801}, "CUDA_ERROR_NOT_SUPPORTED")],
    )
    def test_a_gpu_that_cannot(self, net, options, reason):
        with pytest.raises(Refused, match=reason):
            register_gpu(net.transport, gpu(**options), 0, 4096)

    def test_nothing(self, net):
        with pytest.raises(ValueError, match="nothing"):
            register_gpu(net.transport, gpu(), 0, 0)


def test_an_rdma_device_that_cannot_leaves_nothing_open(net):
    graphics = gpu()
    with pytest.raises(Refused, match="cannot reach GPU memory"):
        register_gpu(net.transport, graphics, 4096, 4096)
    [(_, _, descriptor)] = graphics.driver.exported
    assert not is_open(descriptor)


@pytest.mark.gpu
def test_a_real_gpu_exports_a_part_of_its_memory():
    from l2_rdma.transports.cuda.runtime import dma_buf_support, open_gpu

    try:
        real = open_gpu()
    except Unavailable as error:
        pytest.skip(f"needs a GPU ({error.message})")
    pointer = real.allocate(2 << 20)
    try:
        if (able := dma_buf_support(real, pointer, 2 << 20)) != "yes":
            pytest.skip(f"needs a GPU whose driver exports dma-bufs ({able})")
        descriptor = export_dma_buf(real, pointer + 8192, 4096)
        try:
            assert "dmabuf" in os.readlink(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
    finally:
        real.free(pointer)
