"""Clients and the filters of shards: when they are fetched, what they rule out, and what never."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvcomm.block import BlockKey
from kvcomm.wire.messages import BlockFilter, BlockFilterGet, BlockLookup, Message, RingMap, RingTransition
from l3_shard.bloom import LayeredBloom
from l3_shard.filters import FLOOD_KEYS, PUTS_MAX
from l3_shard.tier import L3Tier
from tests.l3_shard.test_tier import BYTES, COPIES, KEYS, Shards, ring_map

AGE_S = 2.0


def absent(first: int, count: int = FLOOD_KEYS) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(32, "big")) for number in range(first, first + count)]


class World(Shards):
    """Shards with filters that are true at the moment they are sent."""

    def __init__(self, ring: RingMap) -> None:
        super().__init__(ring)
        self.fetched: list[str] = []
        self.special = self.filter
        self.epoch = ring.epoch
        self.mute: set[str] = set()

    def filter(self, node: str, message: Message) -> Message | None:
        if not isinstance(message, BlockFilterGet):
            return None
        self.fetched.append(node)
        bloom = LayeredBloom(64)
        for key in self.blocks.get(node, {}):
            bloom.add(key)
        # An empty filter has no layers, which would mean "cannot say".
        bloom.add(b"something")
        return BlockFilter(self.epoch, [] if node in self.mute else bloom.to_layers())

    def lookups(self) -> int:
        return sum(len(message.keys) for _, message in self.asked if isinstance(message, BlockLookup))


def world(names: str = "abc", block_copies: int = 1) -> World:
    made = World(ring_map(names, block_copies=block_copies))
    made.blocks = {name: {bytes(key): copy for key, copy in BYTES.items()} for name in names}
    return made


def client(shards: World, age_s: float = AGE_S) -> L3Tier:
    return L3Tier(shards.ring, clock=lambda: shards.now, filter_age_s=age_s)


def flooded(shards: World, tier: L3Tier) -> None:
    """A flood: most of what is asked for is absent."""
    shards.run(tier.lookup(absent(0)))
    shards.asked.clear()


def test_without_a_flood_or_by_default_nobody_asks_for_filters():
    shards = world()
    tier = client(shards)
    shards.run(tier.lookup(KEYS))
    shards.run(tier.lookup(absent(0, FLOOD_KEYS // 2)))
    shards.run(tier.lookup(absent(9_000)[: FLOOD_KEYS // 4]))
    off = client(shards, age_s=0.0)
    for first in range(3):
        shards.run(off.lookup(absent(1_000 * first)))
    assert not shards.fetched


def test_a_flood_is_answered_from_filters_and_what_is_there_is_found():
    shards = world()
    tier = client(shards)
    flooded(shards, tier)
    assert shards.run(tier.lookup([*absent(1_000), *KEYS])) == [False] * FLOOD_KEYS + [True] * len(KEYS)
    assert sorted(shards.fetched) == ["a", "b", "c"]
    assert len(KEYS) <= shards.lookups() <= len(KEYS) + 5
    assert tier.filters.skipped_count >= FLOOD_KEYS - 5


def test_filters_are_fetched_once_in_their_age():
    shards = world()
    tier = client(shards)
    flooded(shards, tier)
    for first in range(5):
        shards.run(tier.lookup(absent(1_000 * (1 + first))))
        shards.now += AGE_S / 10
    assert len(shards.fetched) == 3
    shards.now += AGE_S
    flooded(shards, tier)
    shards.run(tier.lookup(absent(9_000)))
    assert len(shards.fetched) == 6


def test_the_flood_over_everything_is_asked_for_again():
    shards = world()
    tier = client(shards)
    flooded(shards, tier)
    shards.now += 5.0
    shards.run(tier.lookup(KEYS))
    assert shards.lookups() == len(KEYS) and not shards.fetched


def test_a_put_of_this_client_is_seen_at_once():
    shards = world()
    for blocks in shards.blocks.values():
        for key in KEYS:
            blocks.pop(key, None)
    tier = client(shards)
    flooded(shards, tier)
    assert not any(shards.run(tier.lookup(KEYS[:4])))
    shards.run(tier.put(COPIES[:4]))
    assert all(shards.run(tier.lookup(KEYS[:4]))), "the filters are from before the put"
    assert shards.fetched.count("a") == 1


def test_a_filter_that_was_asked_for_before_puts_were_forgotten_rules_out_nothing():
    shards = world()
    kept = {name: shards.blocks[name].pop(KEYS[0]) for name in "abc"}
    tier = client(shards)
    flooded(shards, tier)

    def others_put_meanwhile(node: str, message: Message) -> Message | None:
        answer = shards.filter(node, message)
        if answer is not None:
            shards.blocks[node][KEYS[0]] = kept[node]
            tier.filters.put(KEYS[:1])
            tier.filters.put(absent(50_000, PUTS_MAX))
        return answer

    shards.special = others_put_meanwhile
    shards.run(tier.lookup(absent(1_000)))
    assert shards.fetched
    assert shards.run(tier.lookup(KEYS[:1])) == [True]


def test_what_others_put_is_seen_when_the_filters_are_old():
    shards = world()
    kept = {name: shards.blocks[name].pop(KEYS[0]) for name in "abc"}
    tier = client(shards)
    flooded(shards, tier)
    assert shards.run(tier.lookup(KEYS[:1])) == [False]
    for name, copy in kept.items():
        shards.blocks[name][KEYS[0]] = copy
    shards.now += AGE_S
    flooded(shards, tier)
    assert shards.run(tier.lookup(KEYS[:1])) == [True]


@pytest.mark.parametrize("lost", ["a", "b", "c"])
def test_one_of_two_owners_is_enough(lost: str):
    shards = world(block_copies=2)
    shards.blocks[lost].clear()
    tier = client(shards)
    flooded(shards, tier)
    assert all(shards.run(tier.lookup(KEYS)))


def test_who_cannot_say_may_have_everything():
    shards = world()
    shards.mute = {"a"}
    tier = client(shards)
    flooded(shards, tier)
    keys = absent(1_000)
    shards.run(tier.lookup(keys))
    assert shards.lookups() >= sum(tier.ring.block_owners(key)[0] == "a" for key in keys) > 0


def test_filters_of_another_epoch_count_for_nothing():
    shards = world()
    shards.epoch = 2
    tier = client(shards)
    flooded(shards, tier)
    shards.run(tier.lookup(absent(1_000)))
    assert shards.lookups() == FLOOD_KEYS


def test_while_blocks_move_everything_is_asked_for():
    ring = ring_map("abc")
    moving = replace(ring, transition=RingTransition("copy", ring.shards[:2], []))
    shards = World(moving)
    tier = client(shards)
    flooded(shards, tier)
    shards.run(tier.lookup(absent(1_000)))
    assert not shards.fetched
