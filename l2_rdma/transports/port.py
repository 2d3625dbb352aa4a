"""``Transport``: the port of all wires; one-sided operations on somebody else's region.

Theory of operation.  A process has one :class:`Transport` of each kind.  It connects to regions, and what
it gets is a :class:`Channel`: one region in one life of its owner.  A channel posts :class:`Operation` s, as
many as are wanted at once, and :meth:`Transport.wait` drives them, in the thread of whoever waits (``poll``).

* **Every operation ends**, with an outcome or by its deadline.  Outcomes are data: ``operation.error`` is
  ``None``, ``Unavailable`` (peer gone, out of time), ``Refused`` (outside the region, no right) or
  ``Corrupt`` (the peer breaks the protocol).  Only misuse raises.
* **A done operation is over.**  Nothing touches its local memory any more, also when it ended by its
  deadline: where the wire could still deliver, the transport sees to it first (it breaks the channel, or
  throws the late bytes away).
* **A channel never comes back.**  Once broken it fails everything; its owner connects anew, and finds a new
  incarnation if the peer was restarted.
* Operations of one channel complete in any order.  Whoever needs an order waits in between.
* An operation of no bytes is done like any other.  A write or an atomic that ends with ``Unavailable`` may
  have taken effect, unless its deadline had passed when it was posted.

What is read can be torn, stale or damaged: transports carry bytes, ``l2_rdma.remote`` verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from kvcomm.block import Buffer
from kvcomm.errors import KVCommError, Refused
from l2_rdma.layout import WORD_BYTES, WORD_MASK, RegionHeader

if TYPE_CHECKING:
    from l2_rdma.region import Region

TransportName = Literal["shm", "cuda", "verbs", "tcp"]


@dataclass(frozen=True, slots=True)
class WireOptions:
    """What transports need to know of this host."""

    listen_host: str = "127.0.0.1"
    """Where the ``tcp`` provider listens."""
    rdma_device: str = ""
    """The ``verbs`` device to use; empty = the first one with a usable port and GID."""
    cuda_device: int = 0
    """The GPU of ``cuda``, as ``CUDA_VISIBLE_DEVICES`` numbers them."""


class Extent(NamedTuple):
    """Bytes of the peer's region."""

    offset: int
    length: int


class Operation:
    """One one-sided operation under way; made by a channel, ended by its transport, once."""

    __slots__ = ("deadline", "done", "error", "value")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        """Monotonic seconds."""
        self.done = False
        self.error: KVCommError | None = None
        self.value = 0
        """Of ``fetch_add`` and ``compare_swap``: what was there before."""

    def complete(self, value: int = 0) -> None:
        assert not self.done, "an operation ends once"
        self.value = value
        self.done = True

    def fail(self, error: KVCommError) -> None:
        assert not self.done, "an operation ends once"
        self.error = error
        self.done = True


class Registration(Protocol):
    """Local memory made known to a transport.  Keeps the memory alive."""

    def close(self) -> None:
        """Operations may not use it as registered any more.  Idempotent."""
        ...


class PlainRegistration:
    """Of a transport that needs to know nothing of the memory that it uses."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer: memoryview | None = buffer

    def close(self) -> None:
        self._buffer = None


class Channel(Protocol):
    """One region, reached one-sided.  Thread-safe.

    All methods post and return; lengths that differ, an unaligned word and a negative offset raise
    ``ValueError``.
    """

    transport: TransportName
    header: RegionHeader
    """Of the region, as its owner described it when the channel was opened."""

    @property
    def broken(self) -> KVCommError | None:
        """Why nothing works any more."""
        ...

    def read(self, extents: Sequence[Extent], into: Sequence[memoryview], deadline: float) -> list[Operation]:
        """Fill each of ``into`` (writable, contiguous, as long as its extent); one operation each."""
        ...

    def write(self, extent: Extent, data: Buffer, deadline: float) -> Operation:
        """``data`` must not change before the operation is done."""
        ...

    def fetch_add(self, offset: int, amount: int, deadline: float) -> Operation:
        """Add to the 64-bit word at ``offset`` (a multiple of 8), modulo 2**64."""
        ...

    def compare_swap(self, offset: int, expected: int, desired: int, deadline: float) -> Operation:
        """Store ``desired`` if the word is ``expected``."""
        ...

    def close(self) -> None:
        """What is under way fails.  Idempotent."""
        ...


@runtime_checkable
class MappedChannel(Protocol):
    """A channel to memory that this process has mapped.  A mapping cannot be taken back: whoever writes
    through it pins the slot meanwhile, in the hazard words of ``file`` (``l2_rdma.hazards``)."""

    file: Region


Ask = Callable[[bytes], bytes]
"""Sends the pool's provider of the same kind a proposal; its answer.  Raises ``KVCommError``."""


class Transport(Protocol):
    """This process's side of one kind of wire.  Thread-safe; a forked child makes its own."""

    name: TransportName

    def register(self, buffer: memoryview) -> Registration:
        """Let operations use ``buffer`` without a copy in between, where the wire has such a notion."""
        ...

    def connect(self, offer: bytes, header: RegionHeader, ask: Ask, deadline: float) -> Channel:
        """Open a channel to the region that ``offer`` and ``header`` come from.

        Raises:
            Refused: it cannot be reached this way; the message is for the operator.
            Unavailable: the peer does not answer, or not in time.
        """
        ...

    def wait(self, operations: Sequence[Operation]) -> None:
        """Until all are done: no later than the last of their deadlines."""
        ...

    def close(self) -> None:
        """Close every channel.  Idempotent.  Connecting or registering afterwards raises ``ValueError``."""
        ...


class Provider(Protocol):
    """A pool's side of one kind of wire.  All calls come from the event loop's thread, and none blocks."""

    name: TransportName
    writes_unseen: bool
    """Whether clients write in a way that only :meth:`close_holder` stops.  ``False`` for those who pin what
    they write to in the region's hazard words (``l2_rdma.hazards``), as all that map its memory do."""

    def offer(self) -> bytes:
        """What a client's transport of the same name needs to know before it connects."""
        ...

    def open(self, holder: int, tenant: bytes, proposal: bytes) -> bytes:
        """One step of opening a channel; the answer to the proposal.

        Args:
            holder: the control connection that the channel lives and dies with.

        Raises:
            Refused, Corrupt: nothing was opened.
        """
        ...

    def close_holder(self, holder: int) -> None:
        """Close this holder's channels.  When it returns, no byte of theirs arrives in the region any more.
        Idempotent."""
        ...

    def close(self) -> None:
        """Close all of them.  Idempotent."""
        ...


def outside(header: RegionHeader, offset: int, length: int) -> Refused | None:
    """The error of an operation that leaves the region."""
    if offset >= 0 and length >= 0 and offset + length <= header.layout.region_bytes:
        return None
    return Refused(
        f"bytes [{offset}, {offset + length}) are not in the region of {header.layout.region_bytes} bytes"
    )


def check_read(extents: Sequence[Extent], into: Sequence[memoryview]) -> None:
    """Raises ``ValueError`` unless every destination fits its extent."""
    if len(extents) != len(into):
        raise ValueError(f"{len(extents)} extents and {len(into)} destinations")
    for extent, view in zip(extents, into, strict=True):
        check_extent(extent, view.nbytes)
        if view.readonly or not view.c_contiguous:
            raise ValueError("a destination must be writable and contiguous")


def check_extent(extent: Extent, length: int) -> None:
    """Raises ``ValueError`` unless ``extent`` is as long as what goes with it."""
    if extent.offset < 0 or extent.length != length:
        raise ValueError(f"{extent} does not go with {length} bytes")


def check_word(offset: int, *values: int) -> None:
    """Raises ``ValueError`` for an unaligned word or a value that is none."""
    if offset < 0 or offset % WORD_BYTES:
        raise ValueError(f"a word's offset is a multiple of {WORD_BYTES}, not {offset}")
    for value in values:
        if not 0 <= value <= WORD_MASK:
            raise ValueError(f"{value} is not an unsigned 64-bit number")
