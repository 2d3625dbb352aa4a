"""``Outbox``: what one connection still has to send, as gathered buffers that are never copied. Sans I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from kvcomm.block import Buffer

PIECES_MAX = 256
"""Buffers handed to one ``sendmsg``; Linux takes 1024."""

HIGH_WATER_BYTES = 8 << 20
"""Above this much unsent, a connection takes no new work."""


class Parcel:
    """Buffers that belong together (one frame)."""

    __slots__ = ("begun", "left", "pieces")

    def __init__(self, pieces: Sequence[Buffer], left: Callable[[bool], None] | None) -> None:
        self.pieces: deque[memoryview] = deque([memoryview(piece).cast("B") for piece in pieces])
        self.left = left
        self.begun = False


class Outbox:
    """First in, first out.

    ``left`` of a parcel is called exactly once: with True when its last byte was taken, with False by
    :meth:`clear`.
    """

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        self.unsent_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._parcels)

    def put(self, pieces: Sequence[Buffer], left: Callable[[bool], None] | None = None) -> Parcel:
        """Add non-empty buffers; they must stay valid and unchanged until ``left`` is called."""
        parcel = Parcel(pieces, left)
        self._parcels.append(parcel)
        self.unsent_bytes += sum(map(len, parcel.pieces))
        return parcel

    def gather(self) -> list[memoryview]:
        """What to send next; a prefix of it is then reported to :meth:`taken`."""
        if len(self._parcels) == 1 and len(self._parcels[0].pieces) <= PIECES_MAX:
            return list(self._parcels[0].pieces)
        pieces: list[memoryview] = []
        for parcel in self._parcels:
            pieces.extend(islice(parcel.pieces, PIECES_MAX - len(pieces)))
            if len(pieces) == PIECES_MAX:
                break
        return pieces

    def taken(self, sent_bytes: int) -> None:
        """The kernel took so many bytes off the front."""
        self.unsent_bytes -= sent_bytes
        while sent_bytes:
            parcel = self._parcels[0]
            parcel.begun = True
            piece = parcel.pieces[0]
            if sent_bytes < len(piece):
                parcel.pieces[0] = piece[sent_bytes:]
                return
            sent_bytes -= len(piece)
            parcel.pieces.popleft()
            if not parcel.pieces:
                self._parcels.popleft()
                if parcel.left:
                    parcel.left(True)

    def withdraw(self, parcel: Parcel) -> bool:
        """Take a parcel back of which nothing was sent yet; False when it is too late.  Its ``left`` is not
        called."""
        if parcel.begun or parcel not in self._parcels:
            return False
        self._parcels.remove(parcel)
        self.unsent_bytes -= sum(map(len, parcel.pieces))
        return True

    def clear(self) -> None:
        """The connection is gone: let every buffer go."""
        parcels, self._parcels = self._parcels, deque()
        self.unsent_bytes = 0
        for parcel in parcels:
            if parcel.left:
                parcel.left(False)
