"""``CudaGpu``: a GPU through NVIDIA's own bindings (``cuda.bindings``), which are imported when one is
opened.

What CUDA reports as failure becomes ``Unavailable`` with the name of the call: a process whose GPU failed
cannot use it again, and goes on without.  Handles, streams and events are CUDA's; no part of this knows
torch.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvcomm.errors import ConfigError, Refused, Unavailable
from l2_rdma.transports.cuda.checksum import DigestKernels
from l2_rdma.transports.cuda.gpu import HANDLE_BYTES

ALLOCATION_UNIT_BYTES = 2 << 20
"""CUDA cuts smaller allocations from shared ones, and a handle always means the whole."""

_exported: dict[bytes, int] = {}
"""Handles of this process's own memory: CUDA maps only other processes'."""
_gpus: dict[tuple[int, int], CudaGpu] = {}
"""By process (a forked child cannot use its parent's) and number."""
_opening = threading.Lock()


def open_gpu(ordinal: int = 0) -> CudaGpu:
    """The GPU number ``ordinal`` of those this process may see; one object a process, as its kernels take
    half a
    second to compile.

    Raises:
        Unavailable: there is none, or no bindings, or no driver; the message says which.
    """
    try:
        from cuda.bindings import driver, nvrtc, runtime
    except ImportError as error:
        raise Unavailable(f"CUDA's bindings are not installed (pip install kvcomm[gpu]): {error}") from error
    status, count = runtime.cudaGetDeviceCount()
    if int(status):
        raise Unavailable(f"no GPU can be used here: {_text(runtime, status)}")
    if not 0 <= ordinal < count:
        raise Unavailable(f"this process sees {count} GPUs; there is no number {ordinal}")
    with _opening:
        known = _gpus.get((os.getpid(), ordinal))
        if known is None:
            known = _gpus[os.getpid(), ordinal] = CudaGpu(ordinal, runtime, driver, nvrtc)
        return known


class CudaGpu:
    """One GPU.  Thread-safe.

    Args:
        ordinal: as ``CUDA_VISIBLE_DEVICES`` numbers them.
        runtime, driver, nvrtc: the modules of ``cuda.bindings``.
    """

    def __init__(self, ordinal: int, runtime: Any, driver: Any, nvrtc: Any) -> None:
        self.ordinal = ordinal
        self.runtime = runtime
        self.driver = driver
        self._lock = threading.Lock()
        self._opened: dict[bytes, tuple[int, int]] = {}
        """Handle to (address, how often); CUDA maps a handle once a process."""
        self._kernels: DigestKernels | None = None
        self._nvrtc = nvrtc
        self.idle_events: deque[Any] = deque()
        """As many as were ever in use at once, which the flights of the channels bound."""
        self.use()
        self.call("cudaFree", 0)  # makes the context
        properties = self.call("cudaGetDeviceProperties", ordinal)
        self.uuid = bytes(properties.uuid.bytes)
        self.name = properties.name.decode().rstrip("\0")
        self.capability = (properties.major, properties.minor)
        self._success = runtime.cudaError_t.cudaSuccess
        self._not_ready = runtime.cudaError_t.cudaErrorNotReady

    # -- memory

    def allocate(self, nbytes: int) -> int:
        self.use()
        whole = -(-max(nbytes, 1) // ALLOCATION_UNIT_BYTES) * ALLOCATION_UNIT_BYTES
        status, pointer = self.runtime.cudaMalloc(whole)
        if status == self.runtime.cudaError_t.cudaErrorMemoryAllocation:
            free, total = self.call("cudaMemGetInfo")
            raise ConfigError(f"{nbytes} bytes of {self.name} are asked for, {free} of {total} are free")
        self.check(status, "cudaMalloc")
        return int(pointer)

    def free(self, pointer: int) -> None:
        self.use()
        with self._lock:
            for handle in [handle for handle, known in _exported.items() if known == pointer]:
                del _exported[handle]
        self.call("cudaFree", pointer)

    def export(self, pointer: int) -> bytes:
        self.use()
        handle = handle_bytes(self.call("cudaIpcGetMemHandle", pointer))
        _exported[handle] = pointer
        return handle

    def open(self, handle: bytes) -> int:
        if (own := _exported.get(handle)) is not None:
            return own
        with self._lock:
            pointer, count = self._opened.get(handle, (0, 0))
            if not count:
                pointer = self._map(handle)
            self._opened[handle] = (pointer, count + 1)
            return pointer

    def close(self, pointer: int) -> None:
        with self._lock:
            for handle, (known, count) in self._opened.items():
                if known != pointer:
                    continue
                self._opened[handle] = (pointer, count - 1)
                if count == 1:
                    del self._opened[handle]
                    self.use()
                    self.call("cudaIpcCloseMemHandle", pointer)
                return

    def _map(self, handle: bytes) -> int:
        self.use()
        raw = handle_from(self.runtime, handle)
        status, pointer = self.runtime.cudaIpcOpenMemHandle(raw, self.runtime.cudaIpcMemLazyEnablePeerAccess)
        if int(status):
            raise Refused(f"{self.name} cannot map the pool's memory: {_text(self.runtime, status)}")
        return int(pointer)

    def register(self, address: int, nbytes: int) -> None:
        self.use()
        (status,) = self.runtime.cudaHostRegister(address, nbytes, self.runtime.cudaHostRegisterPortable)
        if int(status):
            raise Refused(f"{nbytes} bytes cannot be locked in memory: {_text(self.runtime, status)}")

    def unregister(self, address: int) -> None:
        self.use()
        self.call("cudaHostUnregister", address)

    # -- work

    def stream(self) -> CudaStream:
        self.use()
        return CudaStream(self, self.call("cudaStreamCreateWithFlags", self.runtime.cudaStreamNonBlocking))

    def digests(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        self.use()
        with self._lock:
            if self._kernels is None:
                self._kernels = DigestKernels(self, self.runtime, self.driver, self._nvrtc)
            return self._kernels.digests(extents)

    # -- the bindings

    def use(self) -> None:
        """Make this the calling thread's GPU."""
        self.call("cudaSetDevice", self.ordinal)

    def call(self, name: str, *arguments: Any) -> Any:
        """One call of the runtime; its result, if it has one."""
        status, *results = getattr(self.runtime, name)(*arguments)
        if int(status):
            self.check(status, name)
        return results[0] if len(results) == 1 else tuple(results)

    def passed(self, query: Callable[[Any], Any], subject: Any) -> bool:
        """What ``cudaEventQuery`` and ``cudaStreamQuery`` say."""
        (status,) = query(subject)
        if status == self._success:
            return True
        if status != self._not_ready:
            self.check(status, query.__name__)
        return False

    def check(self, status: Any, name: str) -> None:
        if int(status):
            raise Unavailable(f"{name} failed on GPU {self.ordinal}: {_text(self.runtime, status)}")


class CudaStream:
    """A stream of CUDA's that runs beside the default one."""

    def __init__(self, gpu: CudaGpu, raw: Any) -> None:
        self._gpu = gpu
        self.raw = raw
        self._open = True
        runtime = gpu.runtime
        self._memcpy = runtime.cudaMemcpyAsync  # looked up once: this is called for every block
        self._to_any_side = runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._query = runtime.cudaStreamQuery
        self._success = runtime.cudaError_t.cudaSuccess

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        (status,) = self._memcpy(destination, source, nbytes, self._to_any_side, self.raw)
        if status != self._success:
            self._gpu.check(status, "cudaMemcpyAsync")

    def mark(self) -> CudaMarker:
        gpu = self._gpu
        try:
            event = gpu.idle_events.pop()
        except IndexError:
            gpu.use()
            event = gpu.call("cudaEventCreateWithFlags", 2)  # cudaEventDisableTiming
        gpu.call("cudaEventRecord", event, self.raw)
        return CudaMarker(gpu, event)

    def idle(self) -> bool:
        return self._gpu.passed(self._query, self.raw)

    def wait(self) -> None:
        self._gpu.call("cudaStreamSynchronize", self.raw)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            self.wait()
        finally:
            self._gpu.call("cudaStreamDestroy", self.raw)


class CudaMarker:
    """An event; they are used again, as making one costs more than a small copy."""

    __slots__ = ("_event", "_gpu")

    def __init__(self, gpu: CudaGpu, event: Any) -> None:
        self._gpu = gpu
        self._event = event

    def done(self) -> bool:
        return self._gpu.passed(self._gpu.runtime.cudaEventQuery, self._event)

    def release(self) -> None:
        if self._event is not None:
            self._gpu.idle_events.append(self._event)
            self._event = None


def dma_buf_support(gpu: CudaGpu, pointer: int, nbytes: int) -> str:
    """Whether the driver would give GPU memory to a network card (GPUDirect RDMA by dma-buf): ``"yes"``, or
    why
    not.  The file descriptor that it makes to find out is closed again."""
    driver = gpu.driver
    gpu.use()
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    status, supported = driver.cuDeviceGetAttribute(attribute, gpu.ordinal)
    if int(status) or not supported:
        return "no: the driver says that the device has no dma-buf support"
    try:
        status, descriptor = driver.cuMemGetHandleForAddressRange(pointer, nbytes, kind, 0)
    except (TypeError, ValueError) as error:
        return f"no: {error}"
    if int(status):
        return f"no: {driver.CUresult(int(status)).name}"
    os.close(int(descriptor))
    return "yes"


def handle_bytes(raw: Any) -> bytes:
    """Of CUDA's structure, taken from its memory: some versions of the bindings have no name for them."""
    return ctypes.string_at(raw.getPtr(), HANDLE_BYTES)


def handle_from(runtime: Any, handle: bytes) -> Any:
    """The structure again."""
    assert len(handle) == HANDLE_BYTES, "whoever brought it has looked at its length"
    raw = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(raw.getPtr(), handle, HANDLE_BYTES)
    return raw


def _text(runtime: Any, status: Any) -> str:
    _, name = runtime.cudaGetErrorName(status)
    _, text = runtime.cudaGetErrorString(status)
    return f"{name.decode()} ({text.decode()})"
