"""``Channels``: the port between a process that serves blocks and the one-sided ways into its region.

The data wire negotiates them (``ChannelAsk``, ``ChannelOpen``); what goes through them is seen by nobody
here.
"""

from __future__ import annotations

from typing import Protocol

from kvcomm.wire.messages import ChannelOffers


class Channels(Protocol):
    """The channels of one region.  All calls come from the event loop's thread, and none blocks.

    A ``holder`` is a connection; its channels end with it.
    """

    def offers(self, tenant: bytes) -> ChannelOffers:
        """What a caller of this tenant can open; nothing if the region is not for it."""
        ...

    def open(self, holder: int, tenant: bytes, transport: str, proposal: bytes) -> bytes:
        """One step of opening a channel; the answer.

        Raises:
            Refused, Corrupt: nothing was opened.
        """
        ...

    def writes_unseen(self, holder: int) -> bool:
        """Whether this holder may be writing into its reservations through a wire that only :meth:`close`
        stops: neither the owner's memory nor the kernel's locks tell of it."""
        ...

    def close(self, holder: int) -> None:
        """Close the holder's channels: when this returns, no byte of theirs arrives in the region any more.
        Idempotent."""
        ...
