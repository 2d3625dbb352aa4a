"""Orders go out while this controller leads, to whom it has heard of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import pytest

from controller.hotkeys import HotKeys, HotOptions
from controller.hotshell import ORDER_S, HotShell
from kvcomm.steps import Ask
from kvcomm.wire.messages import (
    HotRecords,
    HotReport,
    HotView,
    KeyHeat,
    RingMap,
    RingNode,
)

RING = RingMap(
    1, 2, 2, 1, 1, [RingNode(name, "", "", "", "rack-a", 1) for name in ("shard-0", "shard-1")], []
)
WHERE = {"shard-0": "unix:///shard-0"}


@dataclass
class Peers:
    now: float = 100.0
    started: list[tuple[Ask, float]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def start(self, asks: Sequence[Ask], deadline: float) -> None:
        self.started += [(ask, deadline) for ask in asks]


def shell(peers: Any, *, ring: RingMap | None = RING, leads: bool = True) -> HotShell:
    hot = HotKeys(HotOptions(sketch_bytes=16 << 10, names_max=64))
    made = HotShell(
        "controller-0", hot, peers, ring=lambda: ring, leads=lambda: leads, resolve=WHERE.__getitem__
    )
    made.heard(HotReport(2.0, [], [KeyHeat(b"k", 10_000.0)]))
    return made


def test_the_leader_tells_whom_it_has_heard_of():
    peers = Peers()
    shell(peers).order()
    assert [(ask.address, ask.message, deadline) for ask, deadline in peers.started] == [
        ("unix:///shard-0", HotRecords([b"k"], 6.0), 100.0 + ORDER_S)
    ]


def test_nobody_is_told_by_one_that_does_not_lead_or_knows_no_map():
    peers = Peers()
    shell(peers, leads=False).order()
    shell(peers, ring=None).order()
    assert peers.started == []


def test_an_operator_is_told_what_is_hot_how_much_and_for_how_long():
    peers = Peers()
    made = shell(peers)
    assert made.view() == HotView("controller-0", [], [])
    made.order()
    peers.now += 10.0
    [hot] = made.view().records
    assert (hot.key, hot.for_s) == (b"k", 10.0)
    assert hot.rate_s == pytest.approx(10_000 / 2 * log(2) / 10)
