"""``CudaTransport``: one-sided operations on slots in GPU memory of this host.

What lies in the file (index, words) is copied when it is posted, like ``shm``.  What lies on the GPU is
enqueued as copies in a stream of the channel's own, beside whatever the process computes, and an event after
each posting tells when they are over; whoever waits polls the events.

* Local memory is host memory or a ``DeviceBuffer``.  Registered host memory is copied straight and beside the
  caller; other host memory by the driver, before the call returns.
* A copy cannot be called back.  An operation past its deadline is given up only after the stream has run dry,
  which is soon: at most :data:`FLIGHT_BYTES_MAX` are under way, the rest waits in the channel.
* A GPU that fails breaks the channel for good.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, KVCommError, Refused, Unavailable
from l2_rdma.copying import address_of, copy_bytes
from l2_rdma.layout import WORD_BYTES, RegionHeader
from l2_rdma.region import host_id
from l2_rdma.transports.cuda.gpu import HANDLE_BYTES, DeviceBuffer, Gpu, Marker
from l2_rdma.transports.cuda.locked import LockedMemory
from l2_rdma.transports.cuda.provider import CudaAnswer, CudaOffer, CudaProposal
from l2_rdma.transports.cuda.region import CudaRegion
from l2_rdma.transports.poll import PollLoop
from l2_rdma.transports.port import (
    Ask,
    Extent,
    Operation,
    TransportName,
    check_extent,
    check_word,
    outside,
)

FLIGHT_BYTES_MAX = 256 << 20
"""Under way at once: about 5 ms over PCIe, below 1 ms between GPUs."""
EVENT_BYTES = 64 << 20
"""An event follows so many bytes, so that more is enqueued before all of it is over."""
FLIGHT_COPIES_MAX = 512
"""A stream takes about a thousand before it makes the caller wait."""
_POSTED_AT_FIRST, _POSTED_AT_ONCE = 2, 16
"""Of a batch, before copies are enqueued: the GPU begins while the rest is looked at."""
_SPIN_S = 0.002
"""Longer waits give the processor away, which costs them a twentieth of their time at most."""
_NAP_S = 0.00005

LocalMemory = memoryview | DeviceBuffer


class CudaTransport:
    """Reads and writes pools of this host from one GPU.

    Args:
        gpu: the one whose copies these are; it need not be the pool's.
    """

    name: TransportName = "cuda"

    def __init__(self, gpu: Gpu, clock: Callable[[], float] = time.monotonic) -> None:
        self.gpu = gpu
        self._clock = clock
        self._channels: list[CudaChannel] = []
        self._closed = False
        self._lock = threading.Lock()
        self._locked = LockedMemory(gpu, self._drain)
        self._loop = PollLoop(self._poll, clock)

    def register(self, buffer: memoryview) -> CudaRegistration:
        self._require_open()
        return CudaRegistration(self._locked, buffer)

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> CudaChannel:
        self._require_open()
        try:
            offered = msgspec.msgpack.decode(offer, type=CudaOffer)
            if offered.host != host_id():
                raise Refused("the pool is on another host, or in another container with its own /dev/shm")
            answered = ask(msgspec.msgpack.encode(CudaProposal(offered.host, self.gpu.uuid)))
            where = msgspec.msgpack.decode(answered, type=CudaAnswer)
        except msgspec.DecodeError as error:
            raise Corrupt(f"an offer of GPU memory that is none: {error}") from error
        if len(where.handle) != HANDLE_BYTES:
            raise Corrupt(f"a handle of GPU memory has {HANDLE_BYTES} bytes, not {len(where.handle)}")
        region = CudaRegion.map(where.path, header.tenant, self.gpu, where.handle)
        if region.header != header:
            region.close()
            raise Unavailable(f"{where.path} is of another life of the pool")
        try:
            channel = CudaChannel(region, self._locked, self._clock)
        except BaseException:
            region.close()
            raise
        with self._lock:
            if self._closed:
                channel.close()
            self._channels = [each for each in [*self._channels, channel] if not each.closed]
        return channel

    def wait(self, operations: Sequence[Operation]) -> None:
        self._loop.wait(operations)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
        self._locked.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("the transport is closed")

    def _drain(self) -> None:
        for channel in self._open_channels():
            channel.drain()

    def _open_channels(self) -> list[CudaChannel]:
        with self._lock:
            return list(self._channels)

    def _poll(self, timeout_s: float) -> None:
        """Ask the events, and give the processor away only when they take longer than a small copy does."""
        begun = self._clock()
        while True:
            if any([channel.progress() for channel in self._open_channels()]):  # noqa: C419 - all of them
                return
            waited_s = self._clock() - begun
            if waited_s >= timeout_s:
                return
            if waited_s >= _SPIN_S:
                time.sleep(min(_NAP_S, timeout_s))


class CudaRegistration:
    """Host memory locked in place, until :meth:`close`, or until memory is locked or unlocked after the last
    reference is gone.  Where the system refuses, ``refusal`` says why, and copies take the way of other host
    memory."""

    def __init__(self, locked: LockedMemory, buffer: memoryview) -> None:
        self._locked = locked
        self._address = address_of(buffer)
        self.refusal = locked.lock(self._address, buffer.nbytes)
        address = self._address if not self.refusal else 0
        self._forgotten = weakref.finalize(self, locked.give_back, address, buffer)  # keeps it until then
        self._forgotten.atexit = False  # CUDA may be gone by then; the system unlocks it

    @property
    def pinned(self) -> bool:
        return self._forgotten.alive and not self.refusal

    def close(self) -> None:
        known = self._forgotten.detach()
        if known is not None and not self.refusal:
            self._locked.unlock(self._address)


class _Piece(NamedTuple):
    """The part of an operation that is the GPU's."""

    operation: Operation
    destination: int
    source: int
    nbytes: int
    local: int
    """The address that is this process's, if it is host memory."""
    memory: object
    """Kept alive."""


class _Flight(NamedTuple):
    """Copies under way, over when ``marker`` is passed."""

    marker: Marker
    pieces: list[_Piece]
    nbytes: int
    deadline: float
    """The earliest of them."""


class CudaChannel:
    """A mapped region with its slots on a GPU.  Beside what the port says, a ``DeviceBuffer`` may stand
    wherever
    local memory does."""

    transport: TransportName = "cuda"

    def __init__(self, region: CudaRegion, locked: LockedMemory, clock: Callable[[], float]) -> None:
        self.header = region.header
        self.region = region
        self.file = region.file
        self._locked = locked
        self._clock = clock
        self._stream = region.gpu.stream()
        self._slots_offset = region.header.layout.slots_offset
        self._base = region.slots.pointer - self._slots_offset
        self._lock = threading.RLock()
        self._flights: deque[_Flight] = deque()
        self._flight_bytes = self._flight_copies = 0
        self._queue: deque[_Piece] = deque()
        self._error: KVCommError | None = None
        self.closed = False

    @property
    def broken(self) -> KVCommError | None:
        if self._error is None and not self.region.file.open:
            return Unavailable("the pool has closed its region")
        return self._error

    def read(
        self, extents: Sequence[Extent], into: Sequence[LocalMemory], deadline: float
    ) -> list[Operation]:
        if len(extents) != len(into):
            raise ValueError(f"{len(extents)} extents and {len(into)} destinations")
        for extent, local in zip(extents, into, strict=True):
            check_extent(extent, local.nbytes)
            if isinstance(local, memoryview) and (local.readonly or not local.c_contiguous):
                raise ValueError("a destination must be writable and contiguous")
        posted: list[Operation] = []
        with self._lock:
            error = self._reason_not_to_begin(deadline)
            begin, length = 0, _POSTED_AT_FIRST
            while begin < len(extents):
                some = slice(begin, begin + length)
                begin, length = begin + length, min(2 * length, _POSTED_AT_ONCE)
                error = error or self._error  # enqueueing the ones before may have broken the channel
                posted += [
                    self._post(extent, local, deadline, error, read=True)
                    for extent, local in zip(extents[some], into[some], strict=True)
                ]
                if self._queue:
                    self._launch()
        return posted

    def write(self, extent: Extent, data: Buffer | DeviceBuffer, deadline: float) -> Operation:
        local = data if isinstance(data, DeviceBuffer) else memoryview(data)
        check_extent(extent, local.nbytes)
        with self._lock:
            error = self._reason_not_to_begin(deadline)
            operation = self._post(extent, local, deadline, error, read=False)
            if self._queue:
                self._launch()
        return operation

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        check_word(offset, amount)
        words = self.region.file.atomics
        return self._on_word(offset, deadline, lambda: words.fetch_add(offset, amount, deadline))

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        check_word(offset, expected, desired)
        words = self.region.file.atomics
        return self._on_word(
            offset, deadline, lambda: words.compare_swap(offset, expected, desired, deadline)
        )

    def close(self) -> None:
        with self._lock:
            if self._error is None:
                self._break(Unavailable("the channel is closed"))
            self.closed = True
            with suppress(KVCommError):
                self.region.close()

    def drain(self) -> None:
        """Until no copy is under way."""
        with self._lock:
            try:
                while self._flights:
                    self._finish_all()
                    self._launch()
            except KVCommError as error:
                self._break(error)

    def progress(self) -> bool:
        """End what is over or overdue, and enqueue what waits; whether anything ended."""
        with self._lock:
            before = len(self._flights), len(self._queue)
            if before == (0, 0):
                return False
            try:
                self._end_passed()
                if self._flights or self._queue:
                    self._end_overdue()
                    self._launch()
            except KVCommError as error:
                self._break(error)
            return before != (len(self._flights), len(self._queue))

    # -- posting

    def _reason_not_to_begin(self, deadline: float) -> KVCommError | None:
        if (error := self.broken) is not None:
            return error
        return Unavailable("its time was over before it began") if self._clock() >= deadline else None

    def _post(
        self, extent: Extent, local: LocalMemory, deadline: float, error: KVCommError | None, *, read: bool
    ) -> Operation:
        operation = Operation(deadline)
        error = error or outside(self.header, *extent)
        if error is not None:
            operation.fail(error)
            return operation
        if extent.offset >= self._slots_offset:
            self._enqueue(operation, local, 0, self._base + extent.offset, extent.length, read=read)
            return operation
        on_host = min(max(self._slots_offset - extent.offset, 0), extent.length)
        if on_host and isinstance(local, memoryview):
            file = self.region.file.memory[extent.offset : extent.offset + on_host]
            mine = local.cast("B")[:on_host]
            copy_bytes(*((mine, file) if read else (file, mine)))
            if on_host == extent.length:
                operation.complete()
                return operation
        elif on_host:
            self._post_file_to_gpu(operation, extent, local, on_host, read=read)
            return operation
        theirs = self._base + extent.offset + on_host
        self._enqueue(operation, local, on_host, theirs, extent.length - on_host, read=read)
        return operation

    def _post_file_to_gpu(
        self, operation: Operation, extent: Extent, local: LocalMemory, on_host: int, *, read: bool
    ) -> None:
        """Between the file and device memory: a small thing, not worth a pipeline of its own."""
        if on_host < extent.length:
            operation.fail(Refused("with device memory, an operation stays in the slots or outside of them"))
            return
        file = self.region.file.memory[extent.offset : extent.offset + on_host]
        self._enqueue(operation, local, 0, address_of(file), on_host, read=read)

    def _enqueue(
        self, operation: Operation, local: LocalMemory, begin: int, theirs: int, nbytes: int, *, read: bool
    ) -> None:
        if not nbytes:
            operation.complete()
            return
        on_gpu = isinstance(local, DeviceBuffer)
        mine = (local.pointer if isinstance(local, DeviceBuffer) else address_of(local)) + begin
        destination, source = (mine, theirs) if read else (theirs, mine)
        self._queue.append(_Piece(operation, destination, source, nbytes, 0 if on_gpu else mine, local))

    def _on_word(self, offset: int, deadline: float, act: Callable[[], int]) -> Operation:
        operation = Operation(deadline)
        error = self._reason_not_to_begin(deadline) or outside(self.header, offset, WORD_BYTES)
        if error is None and offset >= self._slots_offset:
            error = Refused("words in the slots are in GPU memory, where there are no atomics from here")
        try:
            if error is None:
                operation.complete(act())
            else:
                operation.fail(error)
        except KVCommError as failure:
            operation.fail(failure)
        return operation

    # -- copies under way

    def _launch(self) -> None:
        """Enqueue what waits, as far as there is room, with events in between."""
        copy = self._stream.copy
        pieces: list[_Piece] = []
        try:
            while self._queue and self._flight_bytes < FLIGHT_BYTES_MAX:
                pieces = []
                total = 0
                deadline = float("inf")
                while self._queue and total < EVENT_BYTES and self._flight_copies < FLIGHT_COPIES_MAX:
                    piece = self._queue[0]
                    if not piece.local or self._locked.whole(piece.local, piece.nbytes):
                        copy(piece.destination, piece.source, piece.nbytes)
                    else:
                        for begin, length in self._locked.parts(piece.local, piece.nbytes):
                            copy(piece.destination + begin, piece.source + begin, length)
                    pieces.append(self._queue.popleft())
                    self._flight_copies += 1
                    total += piece.nbytes
                    deadline = min(deadline, piece.operation.deadline)
                if not pieces:
                    return
                self._flight_bytes += total
                self._flights.append(_Flight(self._stream.mark(), pieces, total, deadline))
        except KVCommError as error:
            self._queue.extendleft(reversed(pieces))
            self._break(error)

    def _end_passed(self) -> None:
        while self._flights and self._flights[0].marker.done():
            self._end(self._flights.popleft(), None)

    def _end_overdue(self) -> None:
        now = self._clock()
        late = Unavailable("not done in time")
        if any(flight.deadline <= now for flight in self._flights):
            self._finish_all(late_at=now, late=late)
        if any(piece.operation.deadline <= now for piece in self._queue):
            kept = deque(piece for piece in self._queue if piece.operation.deadline > now)
            for piece in self._queue:
                if piece.operation.deadline <= now:
                    piece.operation.fail(late)
            self._queue = kept

    def _finish_all(self, *, late_at: float = 0.0, late: KVCommError | None = None) -> None:
        """Let the stream run dry; operations whose deadline was before ``late_at`` get ``late``."""
        self._stream.wait()
        while self._flights:
            flight = self._flights.popleft()
            self._end(flight, late if flight.deadline <= late_at else None, late_at)

    def _end(self, flight: _Flight, late: KVCommError | None, late_at: float = 0.0) -> None:
        flight.marker.release()
        self._flight_bytes -= flight.nbytes
        self._flight_copies -= len(flight.pieces)
        for piece in flight.pieces:
            if late is not None and piece.operation.deadline <= late_at:
                piece.operation.fail(late)
            else:
                piece.operation.complete()

    def _break(self, error: KVCommError) -> None:
        """Nothing works any more: first let copies end, then say so.  The region stays mapped until
        :meth:`close`: what others look at through it is not ours to take away."""
        if self._error is not None:
            return
        self._error = error
        with suppress(KVCommError):  # then the GPU itself failed, and its copies with it
            self._stream.close()
        for flight in self._flights:
            flight.marker.release()
        pieces = [piece for flight in self._flights for piece in flight.pieces] + list(self._queue)
        self._flights.clear()
        self._queue.clear()
        self._flight_bytes = self._flight_copies = 0
        for piece in pieces:
            piece.operation.fail(error)
