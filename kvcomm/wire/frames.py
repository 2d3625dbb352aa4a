"""The data wire's frames: sans I/O, shared by blocking sockets, asyncio and the simulator.

A frame is ``prefix (32 bytes) | message (msgpack) | payload``::

    0   magic 2s = "KV"      8   request u64          24  checksum u64   xxh3-64 of bytes [0, 24)
    2   version u8           16  payload_bytes u34, in the same word     and the message
    3   flags u8                 from bit 34 on: stamp u30
    4   message_bytes u32

The payload is not covered: blocks carry their own checksum, which the reader verifies after arrival.
Requests are pipelined: a reply carries its request's number, and replies may come in any order.  The stamp of
a request is its deadline, that of a reply the time, both of the server's clock (``kvcomm.wire.deadlines``).
Stamps go only to those who have said that they know them, by a flag of their ``Hello``: to others they would
be a part of the size.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Union, cast

import msgspec
from xxhash import xxh3_64

from kvcomm.block import Buffer
from kvcomm.errors import Corrupt, TooLarge
from kvcomm.wire.messages import MESSAGES, PROTOCOL_VERSION, Message

MAGIC = b"KV"
HELLO_NUMBER = 0
"""Number of ``Hello``, and of what a server says unasked."""
KNOWS_STAMPS = 1
"""Flag of ``Hello``: its sender reads stamps.  Who does not know a flag ignores it."""
MESSAGE_BYTES_MAX = 16 << 20
PAYLOAD_BYTES_MAX = 4 << 30
STAGING_BYTES = 64 << 10
_SCRAP = memoryview(bytearray(256 << 10))

_PREFIX = struct.Struct("<2sBBIQQQ")
_SUMMED_BYTES = 24
_STAMP_SHIFT = 34
_PAYLOAD_MASK = (1 << _STAMP_SHIFT) - 1
PREFIX_BYTES = _PREFIX.size

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    type=cast("type[Message]", Union[MESSAGES])  # noqa: UP007 - a tuple of classes cannot be written with |
)

Sink = Callable[[int, Message, int], list[memoryview] | None]
"""``sink(request, message, payload_bytes)``: where the payload goes, as writable pieces whose lengths add up
to
``payload_bytes``; ``None`` = a fresh buffer."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame; ``payload`` is what the sink named, now filled (empty list = no payload)."""

    request: int
    message: Message
    payload: list[memoryview]
    stamp: int = field(default=0, compare=False)
    """0 = none."""
    flags: int = field(default=0, compare=False)


def encode_frame(
    request: int, message: Message, payload: Iterable[Buffer] = (), stamp: int = 0, flags: int = 0
) -> list[Buffer]:
    """The pieces to send, in order; payload buffers are passed through, not copied.

    Raises:
        TooLarge: the message or the payload is over its bound.
    """
    pieces = [piece for piece in payload if len(piece)]
    payload_bytes = sum(memoryview(piece).nbytes for piece in pieces)
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX or payload_bytes > PAYLOAD_BYTES_MAX:
        raise TooLarge(
            f"frame of {len(body)} + {payload_bytes} bytes is over the wire's bound; split the batch"
        )
    sizes = payload_bytes | stamp << _STAMP_SHIFT
    head = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, flags, len(body), request, sizes, 0)[:_SUMMED_BYTES]
    return [head + _checksum(head, body) + body, *pieces]


def discard(payload_bytes: int) -> list[memoryview]:
    """A destination for a payload that nobody wants: one small buffer, written over and over, by anybody."""
    whole, rest = divmod(payload_bytes, len(_SCRAP))
    return [_SCRAP] * whole + ([_SCRAP[:rest]] if rest else [])


def _checksum(head: Buffer, body: Buffer) -> bytes:
    digest = xxh3_64(head)
    digest.update(body)
    return digest.intdigest().to_bytes(8, "little")


class FrameReader:
    """Turns arriving bytes into frames, reading payloads straight into their destination.

    Theory of operation: the owner asks for :meth:`buffer`, receives into it, and says how much arrived with
    :meth:`advance`.  While no payload is due the buffer is a staging area that may take several small frames
    at once; while a payload is due it is exactly the rest of the destination, so that nothing is read past
    it and nothing is copied (except the first piece that came into staging together with the message).
    """

    def __init__(
        self,
        sink: Sink | None = None,
        *,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        payload_bytes_max: int = PAYLOAD_BYTES_MAX,
    ) -> None:
        self._sink = sink
        self.message_bytes_max = message_bytes_max
        self.payload_bytes_max = payload_bytes_max
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._begin = 0  # [begin, end) of the staging area holds bytes not yet parsed
        self._end = 0
        self._due: deque[memoryview] = deque()  # pieces of the payload still to fill, first one first
        self._waiting: Frame | None = None

    def buffer(self) -> memoryview:
        """Where to receive next; never empty."""
        if self._due:
            return self._due[0]
        return self._staging[self._end :]

    def advance(self, received_bytes: int) -> list[Frame]:
        """``received_bytes`` have arrived in :meth:`buffer`; the frames that they completed.

        Raises:
            Corrupt: the bytes are not a frame of this protocol; the connection is of no further use.
            TooLarge: a frame announces more than its bound.
        """
        frames: list[Frame] = []
        if self._due:
            self._filled(received_bytes, frames)
        else:
            self._end += received_bytes
        while not self._due and self._next(frames):
            pass
        if not self._due:
            self._make_room()
        return frames

    @property
    def receiving(self) -> Frame | None:
        """The frame whose payload is being received; while there is one, :meth:`buffer` may be filled in one
        blocking read."""
        return self._waiting

    def discard(self, request: int) -> None:
        """Stop writing to the destination of ``request``'s payload, which may be half received; the rest is
        thrown away.

        The frame still comes out of :meth:`advance`, with a payload that means nothing.
        """
        if self._waiting is not None and self._waiting.request == request:
            self._due = deque(discard(sum(len(piece) for piece in self._due)))

    @property
    def idle(self) -> bool:
        """Whether nothing is half received."""
        return not self._due and self._begin == self._end

    def _next(self, frames: list[Frame]) -> bool:
        """Parse one frame's prefix and message out of staging; False when it is not all there."""
        have = self._end - self._begin
        if have < PREFIX_BYTES:
            return False
        head = bytes(self._staging[self._begin : self._begin + _SUMMED_BYTES])
        magic, version, flags, body_bytes, request, sizes, checksum = _PREFIX.unpack_from(
            self._staging, self._begin
        )
        payload_bytes, stamp = sizes & _PAYLOAD_MASK, sizes >> _STAMP_SHIFT
        if magic != MAGIC or version != PROTOCOL_VERSION:
            raise Corrupt(f"not a version {PROTOCOL_VERSION} frame (magic {magic!r}, version {version})")
        if body_bytes > self.message_bytes_max or payload_bytes > self.payload_bytes_max:
            raise TooLarge(f"frame announces {body_bytes} + {payload_bytes} bytes, over the wire's bound")
        if have < PREFIX_BYTES + body_bytes:
            return False
        body = self._staging[self._begin + PREFIX_BYTES : self._begin + PREFIX_BYTES + body_bytes]
        if _checksum(head, body) != checksum.to_bytes(8, "little"):
            raise Corrupt("frame checksum does not match")
        message = _decode(body)
        self._begin += PREFIX_BYTES + body_bytes
        place = self._place(request, message, payload_bytes)
        self._start_payload(Frame(request, message, place, stamp, flags), frames)
        return True

    def _place(self, request: int, message: Message, payload_bytes: int) -> list[memoryview]:
        if not payload_bytes:
            return []
        pieces = self._sink(request, message, payload_bytes) if self._sink else None
        if pieces is None:
            return [memoryview(bytearray(payload_bytes))]
        pieces = [piece.cast("B") for piece in pieces if piece.nbytes]
        if sum(piece.nbytes for piece in pieces) != payload_bytes:
            raise Corrupt(f"payload of {payload_bytes} bytes does not fit its destination")
        return pieces

    def _start_payload(self, frame: Frame, frames: list[Frame]) -> None:
        if not frame.payload:
            frames.append(frame)
            return
        self._waiting, self._due = frame, deque(frame.payload)
        while self._due and self._begin < self._end:
            piece = self._due[0]
            take = min(len(piece), self._end - self._begin)
            piece[:take] = self._staging[self._begin : self._begin + take]
            self._begin += take
            self._filled(take, frames)

    def _filled(self, received_bytes: int, frames: list[Frame]) -> None:
        rest = self._due[0][received_bytes:]
        if len(rest):
            self._due[0] = rest
            return
        self._due.popleft()
        if not self._due:
            assert self._waiting is not None
            frames.append(self._waiting)
            self._waiting = None

    def _make_room(self) -> None:
        """Move an unparsed rest to the front; grow staging when one message alone does not fit.

        A message is moved at most twice, however slowly it arrives.
        """
        if self._begin == self._end:
            self._begin = self._end = 0
            if len(self._staging) > STAGING_BYTES:
                self._staging = memoryview(bytearray(STAGING_BYTES))
            return
        have, need = self._end - self._begin, self._need_bytes()
        if self._begin + need <= len(self._staging) and self._begin < len(self._staging) // 2:
            return  # there is room behind; moving would cost a copy for nothing
        old = self._staging
        if need > len(old):
            self._staging = memoryview(bytearray(need))
        self._staging[:have] = old[self._begin : self._end]
        self._begin, self._end = 0, have

    def _need_bytes(self) -> int:
        """Of the frame that is half there, without its payload."""
        if self._end - self._begin < PREFIX_BYTES:
            return PREFIX_BYTES
        return PREFIX_BYTES + int(_PREFIX.unpack_from(self._staging, self._begin)[3])


def _decode(body: memoryview) -> Message:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:  # bytes may nest without end
        raise Corrupt(f"message cannot be decoded: {error}") from error
