"""``Gpu``: the port to one GPU, and ``DeviceBuffer``, memory on it.

Only what one-sided reads need: memory, handles that let other processes map it, ordered copies, and the
digest of payloads where they are.  ``runtime`` implements it with CUDA; tests have one of plain shared
memory, so that everything above runs where there is no GPU.

Addresses are plain numbers.  On a host with CUDA every address, of host and device memory alike, is unique
in a process (unified virtual addressing), so a copy needs no word on which side its ends are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HANDLE_BYTES = 64
"""Of what :meth:`Gpu.export` makes."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """``nbytes`` bytes of GPU memory at ``pointer``, for as long as ``owner`` lives."""

    pointer: int
    nbytes: int
    owner: object = None

    def __post_init__(self) -> None:
        if self.pointer <= 0 or self.nbytes < 0:
            raise ValueError(
                f"a device buffer has an address and a length, not {self.pointer}, {self.nbytes}"
            )

    @staticmethod
    def of(array: Any) -> DeviceBuffer:
        """The memory of a contiguous array on a GPU (a torch tensor, a CuPy array, ...).

        Raises:
            ValueError: it is not on a GPU, or not contiguous.
        """
        described = getattr(array, "__cuda_array_interface__", None)
        if described is None:
            raise ValueError(f"{type(array).__name__} is not memory of a GPU (no __cuda_array_interface__)")
        if described.get("strides") is not None:
            raise ValueError("the array is not contiguous")
        length = int(described["typestr"][2:])
        for size in described["shape"]:
            length *= size
        return DeviceBuffer(described["data"][0], length, array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3: ``torch.as_tensor(buffer, device="cuda")`` and ``cupy.asarray(buffer)`` are bytes that
        share the memory and keep this alive."""
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "strides": None,
            "version": 3,
        }

    def part(self, begin: int, length: int) -> DeviceBuffer:
        """Bytes ``[begin, begin + length)``.  Raises ``ValueError``: they are not all inside."""
        if not 0 <= begin <= begin + length <= self.nbytes:
            raise ValueError(f"[{begin}, {begin + length}) is not inside {self.nbytes} bytes")
        return DeviceBuffer(self.pointer + begin, length, self)


class Marker(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether all that was enqueued before it is over.  Never waits.

        Raises:
            Unavailable: the GPU failed; what was enqueued is over, and its bytes are worth nothing.
        """
        ...

    def release(self) -> None:
        """It is not asked again."""
        ...


class Stream(Protocol):
    """Copies, in the order in which they are enqueued.  Thread-safe."""

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue.  Host memory that is not registered is copied before this returns.

        Raises:
            Unavailable: the GPU failed.
        """
        ...

    def mark(self) -> Marker: ...

    def idle(self) -> bool:
        """Whether all that was enqueued is over.  Never waits.  Raises ``Unavailable``: the GPU failed."""
        ...

    def wait(self) -> None:
        """Until all that was enqueued is over.  Raises ``Unavailable``: the GPU failed."""
        ...

    def close(self) -> None:
        """Waits, too.  Idempotent."""
        ...


class Gpu(Protocol):
    """One GPU.  Thread-safe.  Every method raises ``Unavailable`` if the GPU fails.

    CUDA keeps a current GPU for each thread, and methods may leave this one there: a process that computes on
    several names its own before it goes on.
    """

    uuid: bytes
    """16 bytes, equal in all processes."""

    def allocate(self, nbytes: int) -> int:
        """Address of so many bytes, aligned to 256, in an allocation of their own.

        Raises:
            ConfigError: the GPU has not so much left.
        """
        ...

    def free(self, pointer: int) -> None: ...

    def export(self, pointer: int) -> bytes:
        """A handle by which other processes of this host map a whole allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """Map it, in the exporting process too.  Stays valid when the exporter dies, until :meth:`close`.

        Raises:
            Refused: this GPU cannot reach the memory.
        """
        ...

    def close(self, pointer: int) -> None:
        """As often as :meth:`open`."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Lock host memory in place, so that copies go straight into it and beside the caller.

        Raises:
            Refused: the system does not allow it.
        """
        ...

    def unregister(self, address: int) -> None: ...

    def stream(self) -> Stream: ...

    def digests(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """xxh3-64 of each ``(address, length)`` of device memory, equal to what a host computes.  Waits; in
        one go for all of them.  The first call, which may be for none, takes half a second."""
        ...
