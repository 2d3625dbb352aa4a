"""``DigestKernels``: compiles the kernels of ``xxh3`` for one GPU and runs them."""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

from kvcomm.errors import Unavailable
from l2_rdma.transports.cuda.xxh3 import (
    BLOCK_BYTES,
    CUDA_SOURCE,
    LANES,
    LONG_BYTES_MIN,
    POINTER_ALIGNMENT,
    SUMS_BLOCKS_PER_GROUP,
    SUMS_THREADS,
)

BATCH_MAX = 4096
"""Payloads a launch."""
SUMS_BYTES_MAX = 64 << 20
"""Scratch on the GPU, a sixteenth of the payloads of one launch (or of a single larger one)."""
_GROUPS_MAX = 2048
"""Thread groups a launch: few that walk far read faster than many that read once."""
_WORDS_A_PAYLOAD = 3


class Owner(Protocol):
    """What is needed of the GPU."""

    ordinal: int
    capability: tuple[int, int]

    def call(self, name: str, *arguments: Any) -> Any: ...


class DigestKernels:
    """xxh3-64 of payloads on a GPU.  Not thread-safe; the GPU is the calling thread's.

    Raises:
        Unavailable: the kernels cannot be compiled or loaded.
    """

    def __init__(self, gpu: Owner, runtime: Any, driver: Any, nvrtc: Any) -> None:
        self._gpu = gpu
        self._driver = driver
        image = _compiled(nvrtc, gpu.capability)
        self._module = self._drive("cuModuleLoadData", image)
        self._sums_kernel = self._drive("cuModuleGetFunction", self._module, b"stripe_sums")
        self._digests_kernel = self._drive("cuModuleGetFunction", self._module, b"digests")
        self._upload = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._stream = gpu.call("cudaStreamCreateWithFlags", 1)  # cudaStreamNonBlocking
        # Written by the host and read by the GPU, and the other way round.
        words = BATCH_MAX * (_WORDS_A_PAYLOAD + 1)
        self._shared = int(gpu.call("cudaHostAlloc", words * 8, 1))  # cudaHostAllocPortable
        self._words = memoryview((ctypes.c_uint64 * words).from_address(self._shared)).cast("B").cast("Q")
        self._table = int(gpu.call("cudaMalloc", BATCH_MAX * _WORDS_A_PAYLOAD * 8))
        self._sums = 0
        self._sums_bytes = 0

    def digests(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """Of each ``(address, length)``.

        Raises:
            ValueError: an address is not a multiple of 16, or a length below 241.
        """
        for address, length in extents:
            if address % POINTER_ALIGNMENT or length < LONG_BYTES_MIN:
                raise ValueError(
                    f"a digest on the GPU needs an address that is a multiple of {POINTER_ALIGNMENT} and at "
                    f"least {LONG_BYTES_MIN} bytes, not {address:#x} and {length}"
                )
        found: list[int] = []
        while len(found) < len(extents):
            found += self._launch(extents[len(found) : len(found) + BATCH_MAX])
        return found

    def _launch(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """Of as many as the scratch memory is for."""
        blocks = [(length - 1) // BLOCK_BYTES for _, length in extents]
        ends = list(accumulate(blocks))
        count = max(1, bisect_right(ends, SUMS_BYTES_MAX // (LANES * 8)))
        self._reserve(ends[count - 1] * LANES * 8)
        rows = [
            (address, length, end - mine)
            for (address, length), end, mine in zip(extents[:count], ends, blocks, strict=False)
        ]
        table = array("Q", chain.from_iterable(rows))
        self._words[: len(table)] = memoryview(table)
        results = self._shared + BATCH_MAX * _WORDS_A_PAYLOAD * 8
        self._gpu.call(
            "cudaMemcpyAsync", self._table, self._shared, len(table) * 8, self._upload, self._stream
        )
        groups = min(-(-max(blocks[:count]) // SUMS_BLOCKS_PER_GROUP), max(1, _GROUPS_MAX // count))
        if groups:
            self._run(self._sums_kernel, (groups, count), SUMS_THREADS, (self._table, self._sums))
        self._run(self._digests_kernel, (count, 1), 32, (self._table, self._sums, results))
        self._gpu.call("cudaStreamSynchronize", self._stream)
        first = BATCH_MAX * _WORDS_A_PAYLOAD
        return self._words[first : first + count].tolist()

    def _run(self, kernel: Any, grid: tuple[int, int], threads: int, pointers: tuple[int, ...]) -> None:
        parameters = (pointers, (ctypes.c_void_p,) * len(pointers))
        self._drive("cuLaunchKernel", kernel, *grid, 1, threads, 1, 1, 0, int(self._stream), parameters, 0)

    def _reserve(self, nbytes: int) -> None:
        if nbytes > self._sums_bytes:
            if self._sums:
                self._gpu.call("cudaFree", self._sums)
            self._sums, self._sums_bytes = 0, 0
            self._sums = int(self._gpu.call("cudaMalloc", nbytes))
            self._sums_bytes = nbytes

    def _drive(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status):
            raise Unavailable(f"{name} failed: {self._driver.CUresult(int(status)).name}")
        return results[0] if results else None


def _compiled(nvrtc: Any, capability: tuple[int, int]) -> bytes:
    """The kernels' machine code for GPUs of ``capability``."""

    def check(status: Any, what: str) -> None:
        if int(status):
            raise Unavailable(f"{what} failed: {nvrtc.nvrtcResult(int(status)).name}{log()}")

    def log() -> str:
        status, size = nvrtc.nvrtcGetProgramLogSize(program)
        if int(status) or not size:
            return ""
        text: bytes = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return str("\n" + text.decode(errors="replace").rstrip("\0"))

    try:
        status, program = nvrtc.nvrtcCreateProgram(CUDA_SOURCE.encode(), b"xxh3.cu", 0, [], [])
    except RuntimeError as error:  # the bindings are there, and look for the library now
        raise Unavailable(
            f"CUDA's run-time compiler is not here (pip install kvcomm[gpu]): {error}"
        ) from error
    if int(status):
        raise Unavailable("CUDA's run-time compiler cannot be used (pip install kvcomm[gpu])")
    architecture = f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode()
    options = [architecture, b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    check(status, "compiling the digest kernels")
    status, size = nvrtc.nvrtcGetCUBINSize(program)
    check(status, "compiling the digest kernels")
    image = b" " * size
    (status,) = nvrtc.nvrtcGetCUBIN(program, image)
    check(status, "compiling the digest kernels")
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(image)
