"""What a shard asks for and in which order, against shards in dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvcomm.block import BlockKey
from kvcomm.wire.messages import (
    BlockHeld,
    BlockHoldings,
    Failure,
    Holding,
    RingMap,
    RingNode,
    RingTransition,
    Want,
)
from l3_shard import refill
from l3_shard.refill import AskHoldings, Round, Take, held
from l3_shard.ring import Ring
from tests.blockstores import Copy, DictDepot, DictStore


def ring_of(names: str = "abc", copies: int = 2) -> Ring:
    shards = [RingNode(name, f"tcp://{name}:1", "", "", name, 1) for name in names]
    return Ring(RingMap(7, min(3, len(names)), min(2, len(names)), 1, copies, shards, []))


def key_of(number: int) -> BlockKey:
    return BlockKey((number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4)


@dataclass
class Shards:
    """Each a set of keys, and those used lately; carries out a round of one of them."""

    ring: Ring
    held: dict[str, dict[BlockKey, bool]]
    down: set[str] = field(default_factory=set)
    taken: list[tuple[str, BlockKey]] = field(default_factory=list)
    asked_count: int = 0

    def store(self, node: str) -> DictStore:
        store = DictStore()
        for key, used in self.held[node].items():
            store.copies[key] = Copy(key, b"t" * 16, bytearray(100), 1, 0.0, used=used)
        return store

    def round(self, node: str) -> Round:
        mine = self.held[node]

        def lacks(keys: Sequence[BlockKey]) -> list[bool]:
            return [key not in mine for key in keys]

        round_ = Round(node, self.ring, lacks)
        while (order := round_.next()) is not None:
            round_.renew(self.ring)
            assert round_.next() == order, "nothing is forgotten when it was not carried out"
            if order.node in self.down:
                failure = Failure("unavailable", "scripted")
                round_.listed(failure) if isinstance(order, AskHoldings) else round_.took(failed=True)
            elif isinstance(order, AskHoldings):
                self.asked_count += 1
                round_.listed(held(order.message, self.ring, self.store(order.node), None))
            else:
                for want in order.wants:
                    key = BlockKey(want.key)
                    assert key not in mine, "it was not lacking"
                    if key in self.held[order.node]:
                        mine[key] = False
                    self.taken.append((order.node, key))
                round_.took(count=len(order.wants), copy_bytes=sum(want.copy_bytes for want in order.wants))
        return round_


@given(
    st.lists(st.tuples(st.integers(0, 400), st.sampled_from("abcd"), st.booleans()), max_size=200),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_after_a_round_each_has_what_is_its_own_and_somebody_had(blocks, copies, page):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refill, "PAGE_KEYS", page)
        ring = ring_of("abcd", copies)
        shards = Shards(ring, {name: {} for name in "abcd"})
        for number, node, used in blocks:
            shards.held[node][key_of(number)] = used
        before = dict(shards.held["a"])
        anywhere = {key for held_by in shards.held.values() for key in held_by}
        round_ = shards.round("a")
        owned = {key for key in anywhere if "a" in ring.block_owners(key)}
        assert set(shards.held["a"]) == owned | set(before) and not round_.failed
        assert len({key for _, key in shards.taken}) == len(shards.taken), "nothing is taken twice"
        assert shards.round("a").failed is False and len(shards.taken) == len(owned - set(before))


def test_what_was_used_lately_comes_first():
    ring = ring_of("ab")
    shards = Shards(ring, {"a": {}, "b": {key_of(number): number % 3 == 0 for number in range(60)}})
    shards.round("a")
    used = [shards.held["b"][key] for _, key in shards.taken]
    assert used == sorted(used, reverse=True) and len(used) == 60 and sum(used) == 20


def test_a_peer_that_does_not_answer_is_passed_over_and_the_round_has_failed():
    ring = ring_of("abc", copies=3)
    keys = [key_of(number) for number in range(10)]
    shards = Shards(ring, {"a": {}, "b": dict.fromkeys(keys, False), "c": dict.fromkeys(keys[5:], True)})
    shards.down = {"b"}
    assert shards.round("a").failed
    assert set(shards.held["a"]) == set(keys[5:])


def test_a_shard_without_room_asks_no_more():
    ring = ring_of("abc", copies=3)
    round_ = Round("a", ring, lambda keys: [True] * len(keys))
    assert isinstance(round_.next(), AskHoldings)
    items = [Holding(key_of(number), 1 << 20, True) for number in range(9)]
    round_.listed(BlockHeld(items, None))
    first = round_.next()
    assert isinstance(first, Take) and len(first.wants) == refill.WINDOW_BYTES >> 20
    round_.took(full=True)
    assert round_.next() is None and not round_.failed


def test_a_shard_outside_the_ring_asks_nobody():
    assert Round("z", ring_of(), lambda keys: []).next() is None


def test_a_peer_cannot_make_a_round_endless_or_plant_foreign_blocks():
    ring = ring_of("abc", copies=1)
    foreign = next(key_of(n) for n in range(99) if ring.block_owners(key_of(n)) == ("b",))
    round_ = Round("a", ring, lambda keys: [True] * len(keys))
    asked = 0
    while (order := round_.next()) is not None:
        assert isinstance(order, AskHoldings)
        asked += 1
        round_.listed(BlockHeld([Holding(foreign, 100, True), Holding(b"short", 100, True)], b""))
    assert asked == 2, "two peers"


def test_looking_costs_one_pass_where_nothing_is_missing_or_all_that_is_was_used_lately():
    ring = ring_of("abc", copies=3)
    keys = [key_of(number) for number in range(50)]
    for used in (True, False):
        shards = Shards(ring, {name: dict.fromkeys(keys, used) for name in "abc"})
        if used:
            shards.held["a"] = {}
        shards.round("a")
        assert shards.asked_count == 2 and len(shards.held["a"]) == 50
    shards = Shards(ring, {"a": {}, "b": dict.fromkeys(keys, False), "c": dict.fromkeys(keys, False)})
    shards.round("a")
    assert shards.asked_count == 4 and len(shards.held["a"]) == 50


def test_pages_go_on_where_the_last_one_ended_also_through_the_disk():
    ring, shards = ring_of("ab"), Shards(ring_of("ab"), {"b": {}})
    keys = sorted(key_of(number) for number in range(40))
    shards.held["b"] = dict.fromkeys(keys[::2], True)
    below = DictDepot(b"t" * 16, dict.fromkeys(keys[5:30], b"copy"))
    found: list[Holding] = []
    after, pages = b"", 0
    while True:
        answer = held(BlockHoldings(7, "a", after, 6), ring, shards.store("b"), below)
        found += answer.items
        pages += 1
        if answer.resume is None:
            break
        after = answer.resume
    expected = sorted({*keys[::2], *keys[5:30]})
    assert [item.key for item in found] == expected and pages == len(expected) // 6 + 1
    assert [item.used for item in found] == [key in keys[::2] for key in expected]


def test_windows_are_bounded_in_keys_and_bytes():
    wants = [
        Want(key_of(number), size) for number, size in enumerate([5 << 20, 1, 2 << 20, 2 << 20, *[1] * 20])
    ]
    windows = list(refill._windows(wants))
    assert [len(window) for window in windows] == [1, 2, 16, 5]
    assert [want for window in windows for want in window] == wants


def moving(stage: Literal["copy", "serve"]) -> Ring:
    now, then = ring_of("abc", 1).to_map().shards, ring_of("abcd", 1).to_map().shards
    return Ring(RingMap(8, 3, 2, 1, 1, now, [], transition=RingTransition(stage, then, [])))


@pytest.mark.parametrize("stage", ["copy", "serve"])
def test_a_shard_that_comes_gets_what_the_placement_to_come_gives_it(stage):
    ring, keys = moving(stage), [key_of(number) for number in range(80)]
    before = ring_of("abc", 1)
    shards = Shards(ring, {name: {} for name in "abcd"})
    for key in keys:
        shards.held[before.block_owners(key)[0]][key] = False
    round_ = shards.round("d")
    gained = {key for key in keys if ring_of("abcd", 1).block_owners(key) == ("d",)}
    assert set(shards.held["d"]) == gained and 5 < len(gained) < 40
    assert round_.told == {"a", "b", "c"} and round_.left() == (0, 0)


def test_who_has_told_and_given_all_is_not_asked_again():
    ring = ring_of("abcd", copies=4)
    keys = [key_of(number) for number in range(10)]
    shards = Shards(ring, {"a": {}, "b": dict.fromkeys(keys, False), "c": {}, "d": {}})
    shards.down = {"c"}
    first = shards.round("a")
    assert first.told == {"b", "d"} and first.failed
    shards.down, shards.asked_count = set(), 0
    again = Round("a", ring, lambda asked: [False] * len(asked), first.told)
    asked = []
    while (order := again.next()) is not None:
        assert isinstance(order, AskHoldings)
        asked.append(order.node)
        again.listed(BlockHeld([], None))
    assert asked == ["c"] and not again.failed and again.told == {"c"}


def test_a_peer_that_fails_to_give_is_asked_again_and_costs_no_other_its_turn():
    """Its last page was told already: the next one's turn had begun."""
    round_ = Round("a", ring_of("abc", copies=3), lambda keys: [True] * len(keys))
    first = round_.next()
    assert isinstance(first, AskHoldings) and first.node == "b"
    round_.listed(BlockHeld([Holding(key_of(1), 100, True)], None))
    assert isinstance(round_.next(), Take)
    round_.took(failed=True)
    order = round_.next()
    assert isinstance(order, AskHoldings) and order.node == "c"
    round_.listed(BlockHeld([Holding(key_of(2), 100, True)], None))
    assert isinstance(round_.next(), Take)
    round_.took(short=True)
    assert round_.next() is None and round_.failed and round_.told == set()


def test_how_much_is_left_is_told_by_how_far_the_walk_has_come():
    round_ = Round("a", ring_of("abc", copies=3), lambda keys: [True] * len(keys))
    assert round_.left() == (0, 0)
    round_.next()
    page = sorted(key_of(number) for number in range(200))[:50]
    round_.listed(BlockHeld([Holding(key, 100, True) for key in page], page[-1]))
    blocks, size_bytes = round_.left()
    assert 250 < blocks < 600 and abs(size_bytes - 100 * blocks) < 100, "two peers with about 200 each"
    round_.took(count=16, copy_bytes=1600)
    assert round_.left() == (blocks - 16, size_bytes - 1600)


def test_a_round_goes_on_in_the_next_stage_of_a_move():
    round_ = Round("d", moving("copy"), lambda keys: [False] * len(keys))
    first = round_.next()
    round_.renew(Ring(structs.replace(moving("serve").to_map(), epoch=9)))
    second = round_.next()
    assert isinstance(first, AskHoldings) and isinstance(second, AskHoldings)
    assert (first.message.epoch, second.message.epoch) == (8, 9)
