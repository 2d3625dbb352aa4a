"""A client finds out soon that shards which gave no answer are back, and waits for none that are not."""

from __future__ import annotations

from kvcomm.wire.messages import Ping
from l3_shard.probing import ALONE_WAIT_S, END_WAIT_S
from l3_shard.ring import Ring
from l3_shard.routes import PROBE_EVERY_S
from l3_shard.tier import L3Tier
from tests.l3_shard.test_tier import COPIES, COUNT, KEYS, Shards, ring_map


def cut_off(*names: str) -> tuple[Shards, L3Tier]:
    """These were silent so often that they are passed over for seconds."""
    shards = Shards(ring_map("abc"))
    shards.fill()
    tier = L3Tier(shards.ring, clock=lambda: shards.now, timeout_s=2.0)
    shards.down, shards.silent = dict.fromkeys(names, "unavailable"), set(names)
    for _ in range(4):
        shards.fetch(tier)
        shards.now += 1.01
    shards.fetch(tier)
    shards.asked.clear()
    return shards, tier


def pings(shards: Shards) -> list[str]:
    return [node for node, message in shards.asked if isinstance(message, Ping)]


def back(shards: Shards) -> None:
    shards.down, shards.silent = {}, set()


def test_a_shard_that_is_back_is_used_again_at_once() -> None:
    shards, tier = cut_off("a")
    assert len(shards.fetch(tier)) < COUNT
    back(shards)
    shards.now += PROBE_EVERY_S
    shards.fetch(tier)
    assert len(shards.fetch(tier)) == COUNT


def test_where_nobody_else_is_left_the_pings_come_first() -> None:
    shards, tier = cut_off("a", "b", "c")
    assert shards.fetch(tier) == {}
    back(shards)
    shards.now += PROBE_EVERY_S
    assert len(shards.fetch(tier)) > 0, "by those that had answered"
    assert len(shards.fetch(tier)) == COUNT


def test_puts_and_lookups_find_out_too() -> None:
    shards, tier = cut_off("a", "b", "c")
    back(shards)
    shards.now += PROBE_EVERY_S
    shards.run(tier.put(COPIES))
    assert "unavailable" not in shards.run(tier.put(COPIES))
    shards, tier = cut_off("a", "b", "c")
    back(shards)
    shards.now += PROBE_EVERY_S
    shards.run(tier.lookup(KEYS))
    assert shards.run(tier.lookup(KEYS)) == [True] * COUNT


def test_pings_are_few_and_cost_little_while_others_answer() -> None:
    shards, tier = cut_off("a")
    shards.hung = {"a"}
    began, times = shards.now, 20
    for _ in range(times):
        shards.fetch(tier)
    assert shards.now - began <= END_WAIT_S and len(pings(shards)) <= 1
    others = [key for key in KEYS if Ring.from_map(shards.ring).block_owners(key) != ("a",)]
    shards.now += 10 * PROBE_EVERY_S
    shards.asked.clear()
    shards.run(tier.lookup(others))
    assert pings(shards) == [], "nobody would have asked it"


def test_who_is_cut_off_from_everybody_waits_a_moment_each_time_and_no_longer() -> None:
    shards, tier = cut_off("a", "b", "c")
    shards.hung = set("abc")
    for _ in range(5):
        began = shards.now
        shards.fetch(tier)
        assert shards.now - began <= ALONE_WAIT_S + END_WAIT_S
        shards.now += 0.01
    assert len(pings(shards)) <= 3 * 2
