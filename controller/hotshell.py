"""``HotShell``: brings the shards' reports to :class:`~controller.hotkeys.HotKeys`, and while this controller
leads, its orders to the nodes.

Nobody waits for what comes of an order: a node that missed it hears the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controller.hotkeys import HotKeys
from kvcomm.rpc.asynchronous import AsyncPeers
from kvcomm.steps import Ask
from kvcomm.wire.messages import HotReport, HotView, RingMap

LOOKS = 4
"""So often in a window it is seen whether we lead and whether orders are due."""
ORDER_S = 1.0


class HotShell:
    """Run :meth:`run` as a task; hand it reports.

    Args:
        node: this controller.
        ring: the newest map, if there is one.
        leads: whether this controller leads now.
        resolve: where a node is to be called; ``KeyError``: it has not been heard of.
    """

    def __init__(
        self,
        node: str,
        hot: HotKeys,
        peers: AsyncPeers,
        *,
        ring: Callable[[], RingMap | None],
        leads: Callable[[], bool],
        resolve: Callable[[str], str],
    ) -> None:
        self.hot = hot
        self._node = node
        self._peers, self._ring, self._leads, self._resolve = peers, ring, leads, resolve

    def heard(self, report: HotReport) -> None:
        self.hot.heard(report, self._peers.clock())

    def view(self) -> HotView:
        """What is hot, for an operator."""
        return self.hot.view(self._node, self._peers.clock())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.hot.window_s / LOOKS)
            self.order()

    def order(self) -> None:
        """Say what is due."""
        ring, now = self._ring(), self._peers.clock()
        if ring is None or not self._leads():
            return
        for node, message in self.hot.orders(ring, now):
            try:
                address = self._resolve(node)
            except KeyError:
                continue
            self._peers.start([Ask(address, message)], now + ORDER_S)
