"""Filters over a shard's blocks never lack a block that is here, however blocks come, go and change their
place while a filter is being made."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.block import BlockKey
from kvcomm.blockstore import BlockStore, Depot, DepotState, DepotUsage, StoreUsage
from kvcomm.wire.messages import BlockItem
from l3_shard import presence as module
from l3_shard.bloom import Layers
from l3_shard.presence import KEPT_S, Presence

MINE, OTHERS = b"m" * 16, b"o" * 16


def key(number: int) -> BlockKey:
    return BlockKey(sha256(number.to_bytes(8, "little")).digest())


@dataclass
class Half:
    """Memory or a disk: what is there, by key."""

    keys: dict[BlockKey, bytes] = field(default_factory=dict)

    def listing(self, after: bytes, limit: int, tenant: bytes = b"") -> list[BlockItem]:
        mine = (each for each in self.keys if not tenant or self.keys[each] == tenant)
        return [BlockItem(each, 1) for each in sorted(mine) if each > after][:limit]

    def present(self, keys: list[BlockKey], tenant: bytes) -> list[bool]:
        return [self.keys.get(each) == tenant for each in keys]


class Memory(Half):
    def usage(self) -> StoreUsage:
        return StoreUsage(0, 0, 0, 0, len(self.keys), 0, 0)


@dataclass
class Disk(Half):
    state: DepotState = "on"

    def listing(self, after: bytes, limit: int, tenant: bytes = b"") -> list[BlockItem]:
        return super().listing(after, limit, tenant) if self.state in ("on", "full") else []

    def usage(self) -> DepotUsage:
        return DepotUsage(self.state, 0, 0, len(self.keys), *[0] * 9)


class Shard:
    """Blocks in two places, and the filters over them."""

    def __init__(self) -> None:
        self.memory, self.disk, self.now = Memory(), Disk(), 0.0
        self.presence = Presence(cast(BlockStore, self.memory), cast(Depot, self.disk))

    def publish(self, number: int, tenant: bytes = MINE) -> None:
        self.presence.heard(key(number), tenant)
        self.memory.keys[key(number)] = tenant

    def demote(self, number: int) -> None:
        """To the disk; it leaves memory."""
        if key(number) in self.memory.keys:
            self.disk.keys[key(number)] = self.memory.keys.pop(key(number))

    def promote(self, number: int) -> None:
        """From the disk, which loses it."""
        if key(number) in self.disk.keys:
            self.publish(number, self.disk.keys.pop(key(number)))

    def drop(self, number: int) -> None:
        self.memory.keys.pop(key(number), None)
        self.disk.keys.pop(key(number), None)

    def made(self) -> Layers:
        """The filter, once it is there."""
        for _ in range(1_000):
            if layers := self.presence.layers(MINE, self.now):
                return Layers(layers)
            self.presence.tick(self.now)
        raise AssertionError("no filter after a thousand ticks")


def test_it_says_nothing_before_it_has_looked_at_everything():
    shard = Shard()
    shard.publish(1)
    assert not shard.presence.busy and shard.presence.layers(MINE, 0.0) == []
    assert shard.presence.busy
    layers = shard.made()
    assert key(1) in layers and key(2) not in layers and not shard.presence.busy


def test_a_block_is_in_the_filter_before_it_can_be_read():
    shard = Shard()
    shard.publish(0)
    shard.made()
    shard.presence.heard(key(1), MINE)  # and only then into memory
    assert key(1) in shard.made()


@pytest.mark.parametrize("state", ["opening", "stalled"])
def test_a_disk_that_cannot_be_read_at_the_moment_is_waited_for(
    state: DepotState, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "PAGE_KEYS", 2)
    shard = Shard()
    for number in range(9):
        shard.publish(number)
        if number:
            shard.demote(number)
    assert shard.presence.layers(MINE, shard.now) == []
    for at_s in range(40):
        shard.disk.state = "on" if at_s in (1, 4) or at_s > 20 else state
        shard.presence.tick(shard.now)
        assert at_s > 20 or shard.presence.layers(MINE, shard.now) == []
    layers = shard.made()
    assert all(key(number) in layers for number in range(9))
    assert not shard.presence.busy


def test_a_disk_that_is_off_for_good_is_not_waited_for():
    shard = Shard()
    shard.publish(0)
    shard.disk.state = "off"
    assert key(0) in shard.made()


def test_a_tenant_is_told_of_its_own_blocks_alone():
    shard = Shard()
    shard.publish(1)
    shard.publish(2, OTHERS)
    shard.demote(2)
    shard.publish(3, OTHERS)
    layers = shard.made()
    shard.publish(4, OTHERS)
    assert [key(number) in layers for number in (1, 2, 3)] == [True, False, False]
    assert key(4) not in shard.made()


def test_an_overgrown_filter_is_made_anew_and_the_old_one_kept_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIRST_KEYS", 8)
    shard = Shard()
    shard.publish(0)
    shard.made()
    for number in range(1, 40):
        shard.publish(number)
        shard.drop(number)
    for _ in range(5):
        shard.presence.tick(shard.now)
    assert key(7) in shard.made(), "dropped, but another owner's older filter may lack it"
    shard.now += KEPT_S
    layers = shard.made()
    assert key(7) not in layers and key(0) in layers


def test_with_more_keys_than_it_may_hold_it_says_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIRST_KEYS", 4)
    monkeypatch.setattr(module, "KEYS_MAX", 16)
    shard = Shard()
    for number in range(64):
        shard.publish(number)
    for _ in range(20):
        assert shard.presence.layers(MINE, 0.0) == []
        shard.presence.tick(0.0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["publish", "demote", "promote", "drop", "tick", "tick"]), st.integers(0, 30)),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=40)
@given(STEPS)
def test_never_is_a_block_that_is_here_ruled_out(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAGE_KEYS", 3)
        patch.setattr(module, "FIRST_KEYS", 4)
        shard = Shard()
        for number in range(12):
            shard.publish(number)
            if number % 2:
                shard.demote(number)
        for what, number in steps:
            if what == "tick":
                shard.presence.tick(shard.now)
                shard.now += 1.0
            elif what != "publish" or key(number) not in shard.disk.keys:
                getattr(shard, what)(number)
            layers = shard.presence.layers(MINE, shard.now)
            held = Layers(layers)
            assert not layers or all(each in held for each in (*shard.memory.keys, *shard.disk.keys))
