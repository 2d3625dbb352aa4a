"""The walk through the tiers, against dictionaries and a dumb oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from kvcomm.block import NO_PARENT, ROOT_LINEAGE, BlockKey, Incarnation, block_keys, header_for
from kvcomm.blockplane import BlockPlane, Prefix
from kvcomm.namespace import Namespace
from kvcomm.steps import Emit, Park, Steps
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus, TierName
from l1.tier import L1Tier

T = TypeVar("T")

NAMESPACE = Namespace(
    model="m",
    revision="r",
    tokenizer="t",
    vocab_size=100,
    dtype="float16",
    layout="LKHTD",
    layers=1,
    kv_heads=1,
    head_dim=2,
    block_tokens=2,
    rope="none",
    rope_parameters={},
)
KEYS = block_keys(NAMESPACE, list(range(24)))
ROOTS = [ROOT_LINEAGE] * len(KEYS)
PAYLOADS = [bytes([index]) * NAMESPACE.block_bytes for index in range(len(KEYS))]


def copy_of(index: int) -> BlockCopy:
    parent = KEYS[index - 1] if index else NO_PARENT
    payload = memoryview(PAYLOADS[index])
    header = header_for(
        NAMESPACE, KEYS[index], parent, payload, logical_start=2 * index, producer=Incarnation(7)
    )
    return BlockCopy(header, payload)


def block_of(index: int, tier: TierName) -> Block:
    copy = copy_of(index)
    return Block(copy.header, memoryview(copy.header.pack() + bytes(copy.payload)), tier)


@dataclass
class DictTier:
    """A tier with ``held`` blocks, of which ``lost`` disappear between lookup and get."""

    name: TierName
    held: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    reachable: bool = True
    puts: list[int] = field(default_factory=list)
    gets: list[int] = field(default_factory=list)
    lookups: list[list[int]] = field(default_factory=list)

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        self.lookups.append([KEYS.index(key) for key in keys])
        yield from ()
        return [KEYS.index(key) in self.held if self.reachable else None for key in keys]

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        for position, key in enumerate(keys):
            index = KEYS.index(key)
            self.gets.append(index)
            if self.reachable and index in self.held - self.lost:
                found(position, block_of(index, self.name))
                yield Emit(position)

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        statuses: list[PutStatus] = []
        for copy in copies:
            index = KEYS.index(copy.key)
            self.puts.append(index)
            statuses.append("stored" if self.reachable else "unavailable")
            if self.reachable:
                self.held.add(index)
        yield from ()
        return statuses


def run(steps: Steps[T], emitted: list[Any] | None = None, park: Callable[[Park], bool] | None = None) -> T:
    """Drive an operation that asks nobody."""
    answer: Any = None
    try:
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, Emit):
                if emitted is not None:
                    emitted.append(step.item)
            else:
                assert isinstance(step, Park)
                assert park is not None
                answer = park(step)
    except StopIteration as stop:
        result: T = stop.value
        return result


def near_with(indices: Iterable[int] = ()) -> L1Tier:
    near = L1Tier(1 << 20)
    for index in indices:
        near.put(block_of(index, "l2"))
    return near


def plane(near: L1Tier, l2: DictTier | None, l3: DictTier | None) -> BlockPlane:
    return BlockPlane(near, l2, l3, clock=lambda: 0.0)


indices = st.sets(st.integers(0, len(KEYS) - 1))


@given(in_l1=indices, in_l2=indices, in_l3=indices, lost2=indices, lost3=indices)
def test_fetch_gives_the_longest_prefix_that_can_be_had(
    in_l1: set[int], in_l2: set[int], in_l3: set[int], lost2: set[int], lost3: set[int]
) -> None:
    near = near_with(in_l1)
    l2, l3 = DictTier("l2", set(in_l2), lost2), DictTier("l3", set(in_l3), lost3)
    emitted: list[Block] = []
    prefix: Prefix = run(plane(near, l2, l3).fetch(KEYS, ROOTS), emitted)

    def available(index: int) -> bool:
        return index in in_l1 or index in in_l2 - lost2 or index in in_l3 - lost3

    want = next((index for index in range(len(KEYS)) if not available(index)), len(KEYS))
    assert [block.key for block in prefix.blocks] == KEYS[:want]
    assert list(prefix.blocks) == emitted
    assert all(bytes(block.payload) == PAYLOADS[index] for index, block in enumerate(prefix.blocks))
    assert len(l2.lookups) <= 1
    assert len(l3.lookups) <= 1
    from_l3 = [index for index, block in enumerate(prefix.blocks) if block.tier == "l3"]
    assert set(from_l3) <= set(l2.puts)  # promoted for the rest of the rack
    assert near.stats().flight_count == 0


def test_no_round_trip_when_l1_has_everything() -> None:
    near = near_with(range(len(KEYS)))
    l2, l3 = DictTier("l2"), DictTier("l3")
    assert len(run(plane(near, l2, l3).fetch(KEYS, ROOTS)).blocks) == len(KEYS)
    assert l2.lookups == l3.lookups == []


def test_an_absence_is_remembered_and_a_local_put_drops_it() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1})
    blocks = plane(near, None, l3)
    assert len(run(blocks.fetch(KEYS, ROOTS)).blocks) == 2
    run(blocks.fetch(KEYS, ROOTS))
    assert len(l3.lookups) == 1, "blocks 0 and 1 are in L1 and block 2 is known to be absent"
    run(blocks.publish(KEYS[:3], copy_of))
    assert len(run(blocks.fetch(KEYS, ROOTS)).blocks) == 3


def test_an_unreachable_l3_is_a_miss_that_is_not_remembered() -> None:
    near, l3 = near_with(), DictTier("l3", {0}, reachable=False)
    blocks = plane(near, None, l3)
    assert run(blocks.fetch(KEYS, ROOTS)).blocks == ()
    l3.reachable = True
    assert len(run(blocks.fetch(KEYS, ROOTS)).blocks) == 1


@given(in_l2=indices, in_l3=indices)
def test_publish_writes_to_each_tier_only_what_it_lacks(in_l2: set[int], in_l3: set[int]) -> None:
    l2, l3 = DictTier("l2", set(in_l2)), DictTier("l3", set(in_l3))
    built: list[int] = []

    def build(index: int) -> BlockCopy:
        built.append(index)
        return copy_of(index)

    stored = run(plane(near_with(), l2, l3).publish(KEYS, build))
    everything = set(range(len(KEYS)))
    assert set(l2.puts) == everything - in_l2
    assert set(l3.puts) == everything - in_l3
    assert sorted(built) == sorted(everything - (in_l2 & in_l3))
    assert all(status.readable for status in stored)
    assert [status.wrote for status in stored] == [index in built for index in range(len(KEYS))]


def test_publish_to_dead_tiers_says_so() -> None:
    stored = run(plane(near_with(), DictTier("l2", reachable=False), None).publish(KEYS[:1], copy_of))
    assert [(status.l2, status.l3, status.readable) for status in stored] == [("unavailable", None, False)]


def test_another_readers_flight_is_waited_for_not_loaded_again() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1, 2})
    other = near.claim([KEYS[1]], 0.0, math.inf)

    def land(park: Park) -> bool:
        assert l3.gets == [0, 2], "our own keys first: nobody waits for somebody who waits for him"
        other.landed(block_of(1, "l3"), 0.0)
        return True

    emitted: list[Block] = []
    assert len(run(plane(near, None, l3).fetch(KEYS, ROOTS[:3]), emitted, land).blocks) == 3
    assert l3.gets == [0, 2]
    assert [block.key for block in emitted] == KEYS[:3]
    other.close(0.0)


def test_blocks_that_land_between_the_look_and_the_claim_are_delivered() -> None:
    near = near_with()

    @dataclass
    class Late(DictTier):
        def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
            for index in range(3):
                near.put(block_of(index, "l3"))  # another reader's load ends just now
            return (yield from super().lookup(keys))

    l3 = Late("l3", {0, 1, 2})
    assert len(run(plane(near, None, l3).fetch(KEYS, ROOTS[:3])).blocks) == 3
    assert l3.gets == []


def test_a_failed_flight_is_loaded_by_the_follower() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1, 2})
    other = near.claim([KEYS[0]], 0.0, math.inf)

    def give_up(park: Park) -> bool:
        other.close(0.0)
        return True

    prefix = run(plane(near, None, l3).fetch(KEYS, ROOTS[:3]), park=give_up)
    assert len(prefix.blocks) == 3
    assert l3.gets == [1, 2, 0]


def test_an_abandoned_stream_releases_its_claims() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1, 2})
    steps = plane(near, None, l3).fetch(KEYS, ROOTS[:3])
    assert isinstance(next(steps), Emit)
    assert near.stats().flight_count > 0
    steps.close()
    assert near.stats().flight_count == 0


def test_a_flight_that_lands_while_we_load_our_own_is_not_missed() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1, 2})
    other = near.claim([KEYS[1]], 0.0, math.inf)
    steps = plane(near, None, l3).fetch(KEYS, ROOTS[:3])
    assert isinstance(next(steps), Emit)  # block 0, ours; before block 2, ours as well
    other.landed(block_of(1, "l3"), 0.0)
    assert len(run(steps, park=lambda park: True).blocks) == 3
    assert l3.gets == [0, 2]
    other.close(0.0)


def test_out_of_time_the_walk_waits_for_nobody() -> None:
    near, l3 = near_with(), DictTier("l3", {0, 1, 2})
    other = near.claim([KEYS[1]], 0.0, math.inf)
    parks: list[Park] = []

    def too_late(park: Park) -> bool:
        parks.append(park)
        return False

    assert len(run(plane(near, None, l3).fetch(KEYS, ROOTS[:3]), park=too_late).blocks) == 1
    assert len(parks) == 1
    other.close(0.0)


def test_the_head_of_a_fetched_run_is_evicted_last() -> None:
    near, l3 = near_with(), DictTier("l3", set(range(6)))
    run(plane(near, DictTier("l2"), l3).fetch(KEYS, ROOTS[:6]))
    assert near.keys() == KEYS[:6][::-1]


# -- lineages


def forged(index: int, tier: TierName) -> Block:
    """A whole, intact copy under the right key that says that it was computed under another view."""
    copy = copy_of(index)
    header = replace(copy.header, lineage=b"L" * 32)
    return Block(header, memoryview(header.pack() + bytes(copy.payload)), tier)


@dataclass
class Forging(DictTier):
    forgeries: set[int] = field(default_factory=set)

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        for position, key in enumerate(keys):
            index = KEYS.index(key)
            found(position, forged(index, self.name) if index in self.forgeries else block_of(index, "l2"))
            yield Emit(position)


def test_edge_16_a_copy_of_another_lineage_is_a_counted_miss_in_every_tier() -> None:
    near = near_with()
    near.put(forged(0, "l2"))
    prefix = run(plane(near, None, None).fetch(KEYS, ROOTS))
    assert (prefix.blocks, prefix.foreign_count) == ((), 1)
    for name in ("l2", "l3"):
        tier = Forging(name, set(range(5)), forgeries={2})
        near = near_with()
        walk = plane(near, tier, None) if name == "l2" else plane(near, None, tier)
        prefix = run(walk.fetch(KEYS, ROOTS))
        assert [block.key for block in prefix.blocks] == KEYS[:2]
        assert prefix.foreign_count == 1
        assert near.get(KEYS[2:3]) == [None], "it is not remembered either"
        asked = [b"L" * 32 if index == 2 else ROOT_LINEAGE for index in range(len(KEYS))]
        assert len(run(walk.fetch(KEYS, asked)).blocks) == 5, "who asks for that lineage gets it"


def test_a_copy_of_the_right_lineage_in_another_tier_is_found_behind_a_forged_one() -> None:
    l2, l3 = Forging("l2", set(range(4)), forgeries={1}), DictTier("l3", set(range(4)))
    prefix = run(plane(near_with(), l2, l3).fetch(KEYS[:4], ROOTS))
    assert (len(prefix.blocks), prefix.foreign_count) == (4, 1)


def test_presence_is_asked_of_every_tier_and_nothing_is_fetched() -> None:
    l2, l3 = DictTier("l2", {1}), DictTier("l3", {2, 4})
    there = run(plane(near_with({0}), l2, l3).present(KEYS[:6]))
    assert there == [True, True, True, False, True, False]
    assert l2.gets == l3.gets == []
    l2.reachable = False
    there = run(plane(near_with({0}), l2, l3).present(KEYS[:6]))
    assert there == [True, None, True, None, True, None], "a silent pool may have what shards have not"
    assert run(plane(near_with(), None, l3).present(KEYS[1:3])) == [False, True]
