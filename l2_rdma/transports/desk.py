"""``Desk``: a pool's side of the negotiation of channels; implements ``kvcomm.channels.Channels``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvcomm.errors import Refused
from kvcomm.wire.messages import ChannelOffer, ChannelOffers
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.port import Provider

_log = logging.getLogger(__name__)


class Desk:
    """Hands what clients propose to the provider that it is for.

    Args:
        header: of the region; its tenant's clients are the ones that are served.
        providers: what serves the region.
        refused: what was to serve it and cannot, and why.
    """

    def __init__(
        self, header: RegionHeader, providers: Sequence[Provider], refused: Mapping[str, str]
    ) -> None:
        self._tenant = bytes(header.tenant)
        self._header = header.pack()
        self._providers = {provider.name: provider for provider in providers}
        self._refused = [ChannelOffer(name, reason.encode()) for name, reason in refused.items()]
        self._unseen: set[int] = set()

    def offers(self, tenant: bytes) -> ChannelOffers:
        if tenant != self._tenant:
            return ChannelOffers(b"", [], [])
        offers = [ChannelOffer(name, provider.offer()) for name, provider in self._providers.items()]
        return ChannelOffers(self._header, offers, self._refused)

    def open(self, holder: int, tenant: bytes, transport: str, proposal: bytes) -> bytes:
        if tenant != self._tenant:
            raise Refused("this node's memory is not shared with this tenant")
        provider = next((each for name, each in self._providers.items() if name == transport), None)
        if provider is None:
            raise Refused(f"this node does not serve {transport!r}")
        if provider.writes_unseen:
            self._unseen.add(holder)
        return provider.open(holder, tenant, proposal)

    def writes_unseen(self, holder: int) -> bool:
        return holder in self._unseen

    def close(self, holder: int) -> None:
        for provider in self._providers.values():
            provider.close_holder(holder)
        self._unseen.discard(holder)

    def stop(self) -> None:
        """Close every channel of every provider."""
        for provider in self._providers.values():
            provider.close()
