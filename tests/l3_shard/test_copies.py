"""Blocks with several copies, seen by the client in virtual time: the fast copy serves, a paused shard costs
little, and a late answer touches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.steps import Answer, Ask, Call, Emit, Steps, Submit, Wait, WaitAny
from kvcomm.tier import Block
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockLookup,
    BlockPresence,
    BlockPut,
    BlockStored,
    BlockSuspect,
    Failure,
    Message,
)
from l3_shard import storing
from l3_shard.ring import encode_map
from l3_shard.speeds import PATIENCE_FIRST_S
from l3_shard.tier import L3Tier
from tests.l3_shard.test_tier import ABSENT, BYTES, COPIES, COUNT, KEYS, Shards, ring_map

NEVER = 1e9
TIMEOUT_S = 2.0


@dataclass
class Pending:
    """A request under way."""

    ask: Ask
    at: float
    """When it is answered."""
    answer: Answer | None = None
    memory: list[memoryview] = field(default_factory=list)


@dataclass
class Slow(Shards):
    """Shards that take their time."""

    delays: dict[str, float] = field(default_factory=dict)
    emit_s: float = 0.0
    """How long the consumer takes with each block."""
    blocking: bool = False
    """An answer is noticed only while the operation waits for something."""

    def run(self, steps: Steps[Any]) -> Any:
        self.emitted = []
        self.pending: list[Pending] = []
        result: Any = None
        try:
            while True:
                step = steps.send(result)
                match step:
                    case Submit(asks):
                        result = [Call(ask, self._send(ask)) for ask in asks]
                    case Wait(call):
                        result = self._finish(call.handle)
                    case WaitAny(calls, timeout_s):
                        result = self._first(calls, timeout_s)
                    case Emit(item):
                        self.emitted.append(item)
                        self.now += self.emit_s
                        result = None
        except StopIteration as stop:
            return stop.value

    def _send(self, ask: Ask) -> Pending:
        node = ask.address.removeprefix("tcp://").partition(":")[0]
        self.asked.append((node, ask.message))
        pending = Pending(ask, self.now + min(self.delays.get(node, 0.001), TIMEOUT_S))
        self.pending.append(pending)
        return pending

    def _first(self, calls: Any, timeout_s: float | None) -> Call | None:
        until = NEVER if timeout_s is None else self.now + timeout_s
        call = min(calls, key=lambda each: each.handle.at)
        self._wait_until(min(until, call.handle.at))
        return call if call.handle.answer is not None else None

    def _finish(self, pending: Pending) -> Answer:
        self._wait_until(pending.at)
        assert pending.answer is not None
        return pending.answer

    def _wait_until(self, until: float) -> None:
        """Every connection is moved while the driver waits for one."""
        began, self.now = self.now, max(self.now, until)
        for pending in self.pending:
            if pending.answer is None and pending.at <= self.now:
                noticed = max(pending.at, began) if self.blocking else pending.at
                node = pending.ask.address.removeprefix("tcp://").partition(":")[0]
                if self.delays.get(node, 0.0) >= TIMEOUT_S:
                    pending.answer = Answer(Failure("unavailable", "no answer in time"), [], noticed)
                else:
                    pending.answer = self._answer(node, pending, noticed)

    def _answer(self, node: str, pending: Pending, noticed: float) -> Answer:
        ask = pending.ask
        message, pieces = self._serve(node, ask.message, b"".join(bytes(piece) for piece in ask.payload))
        payload = [memoryview(piece) for piece in pieces]
        if pieces and ask.sink is not None:
            payload = ask.sink(1, message, sum(map(len, pieces))) or []
            for destination, piece in zip(payload, pieces, strict=True):
                destination[:] = piece
        return Answer(message, payload, noticed)

    def late(self) -> None:
        """What was under way when the operation ended arrives after all."""
        for pending in self.pending:
            if pending.answer is None:
                self._answer("a", pending, self.now)

    def tier(self, ring: Any = None) -> L3Tier:
        return L3Tier(ring or self.ring, clock=lambda: self.now, timeout_s=TIMEOUT_S)

    def gets(self, node: str) -> int:
        return sum(asked == node and isinstance(message, BlockGet) for asked, message in self.asked)


def two_copies(**delays: float) -> Slow:
    shards = Slow(ring_map("abc", block_copies=2), delays=delays)
    shards.fill()
    return shards


def timed(shards: Slow, work: Callable[[], Any]) -> float:
    began = shards.now
    work()
    return shards.now - began


def test_a_paused_shard_costs_one_wait_and_is_then_passed_over():
    shards = two_copies()
    tier = shards.tier()
    for _ in range(10):
        assert len(shards.fetch(tier)) == COUNT
    shards.delays["a"] = NEVER
    first_s = timed(shards, lambda: shards.fetch(tier))
    assert first_s < 2 * PATIENCE_FIRST_S and tier.counts.hedged_count
    shards.asked.clear()
    assert timed(shards, lambda: shards.fetch(tier)) < PATIENCE_FIRST_S
    assert shards.gets("a") == 0, "a shard that did not answer a moment ago is not asked first"


def test_a_client_that_knows_nothing_yet_is_not_held_up_either():
    shards = two_copies(b=NEVER)
    assert timed(shards, lambda: len(shards.fetch(shards.tier())) == COUNT) < 5 * PATIENCE_FIRST_S


def test_the_faster_copy_is_read_and_the_other_one_tried_again():
    shards = two_copies(a=0.2)
    tier = shards.tier()
    shards.fetch(tier)
    shards.asked.clear()
    for _ in range(10):
        shards.fetch(tier)
    assert shards.gets("a") == 0
    shards.delays.clear()
    shards.now += 60.0
    shards.fetch(tier)
    assert shards.gets("a") > 0
    shards.asked.clear()
    shards.fetch(tier)
    assert shards.gets("a") > 0, "it is as fast as the others again"


def test_a_shard_that_recovers_while_it_is_waited_for_may_still_win():
    """Also the hedge may be the slow one."""
    shards = two_copies(a=0.06, b=1.0, c=1.0)
    assert len(shards.fetch(shards.tier())) == COUNT


def test_late_answers_are_received_into_memory_of_their_own():
    shards = two_copies(a=1.0)
    kept: dict[int, Block] = {}
    tier = shards.tier()
    shards.run(tier.get(KEYS, lambda index, block: kept.update({index: block})))
    assert len(kept) == COUNT and any(pending.answer is None for pending in shards.pending)
    shards.blocks["a"] = {key: bytes(len(copy)) for key, copy in shards.blocks["a"].items()}
    shards.late()
    assert all(bytes(block.copy) == BYTES[KEYS[index]] for index, block in kept.items())


def test_a_consumer_that_dawdles_makes_no_shard_look_slow():
    shards = two_copies()
    shards.emit_s = 0.5
    tier = shards.tier()
    for _ in range(3):
        assert len(shards.fetch(tier)) == COUNT
    assert tier.counts.hedged_count == 0


@pytest.mark.parametrize("blocking", [False, True])
def test_answers_that_came_while_the_consumer_dawdled_are_no_measure(blocking):
    shards = two_copies(a=0.08)
    shards.emit_s, shards.blocking = 1.0, blocking
    tier = shards.tier()
    for _ in range(6):
        shards.fetch(tier)
    assert tier._routes.speeds.patience_s(0) <= PATIENCE_FIRST_S, "the consumer's seconds were counted"
    shards.emit_s = 0.0
    shards.fetch(tier)
    shards.fetch(tier)
    shards.asked.clear()
    shards.fetch(tier)
    assert shards.gets("a") == 0, "it is known to be the slower one"


def test_hedging_ends_when_everybody_is_slow():
    """An overloaded cluster is not asked for everything twice."""
    shards = two_copies(a=0.5, b=0.5, c=0.5)
    tier = shards.tier()
    for _ in range(20):
        assert len(shards.fetch(tier)) == COUNT
    requests = sum(isinstance(message, BlockGet) for _, message in shards.asked)
    assert tier.counts.hedged_count <= 4 + requests * 0.1


def test_what_the_hedge_lacks_is_still_awaited_from_the_slow_one():
    shards = two_copies(a=0.3)
    for node in "bc":
        shards.blocks[node] = {}
    tier = shards.tier()
    owned = {index for index, key in enumerate(KEYS) if "a" in tier.ring.block_owners(key)}
    assert set(shards.fetch(tier)) == owned


def test_a_shard_that_left_the_ring_long_ago_is_not_told_of_its_damage():
    """It is unknown by then where to call it."""
    shards = two_copies()
    tier = shards.tier()
    shards.blocks["a"] = {key: bytes(len(copy)) for key, copy in shards.blocks["a"].items()}

    def renew(node: str, message: Message) -> Message | None:
        for epoch in (2, 3):
            if node == "a" and isinstance(message, BlockGet):
                tier._routes._adopt(encode_map(ring_map("bc", epoch=epoch, block_copies=2)))
        return None

    shards.special = renew
    assert len(shards.fetch(tier)) == COUNT and tier.counts.damaged_count
    assert not any(isinstance(message, BlockSuspect) for _, message in shards.asked)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([0.001, 0.02, 0.3, 1.9, NEVER]), min_size=4, max_size=4),
    st.sets(st.tuples(st.sampled_from("abcd"), st.integers(0, COUNT - 1))),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_block_that_a_shard_answers_with_is_found(delays, holes, copies, stale):
    shards = Slow(
        ring_map("abcd", epoch=3, block_copies=copies), delays=dict(zip("abcd", delays, strict=True))
    )
    shards.fill()
    for node, index in sorted(holes):
        shards.blocks.get(node, {}).pop(KEYS[index], None)
    tier = shards.tier(ring_map("ab", epoch=2, block_copies=min(copies, 2)) if stale else None)
    found = shards.fetch(tier)
    reachable = {
        index
        for index, key in enumerate(KEYS)
        for node in "abcd"
        if key in shards.blocks.get(node, {}) and shards.delays[node] < TIMEOUT_S
    }
    assert set(found) <= reachable
    if not stale:  # else a shard that only the old map names may fail before the new one is heard of
        assert set(found) == reachable


# -- lookups


def test_a_lookup_finds_what_one_owner_lost_and_says_absent_only_when_all_did():
    shards = two_copies()
    shards.blocks["a"].clear()
    assert shards.run(shards.tier().lookup([*KEYS, ABSENT])) == [True] * COUNT + [False]


def test_a_lookup_does_not_wait_for_a_paused_shard():
    shards = two_copies()
    tier = shards.tier()
    for _ in range(20):
        shards.run(tier.lookup(KEYS))
    shards.delays["a"] = NEVER
    taken_s = timed(shards, lambda: shards.run(tier.lookup(KEYS)))
    assert taken_s < PATIENCE_FIRST_S
    found = shards.run(tier.lookup([*KEYS, ABSENT]))
    assert found[:-1] == [True] * COUNT
    owners = tier.ring.block_owners(ABSENT)
    assert found[-1] is (None if "a" in owners else False), "nobody knows what the paused one has"


def test_a_lookup_in_one_copy_asks_once():
    shards = Slow(ring_map("abc"))
    shards.fill()
    assert shards.run(shards.tier().lookup([*KEYS, ABSENT])) == [True] * COUNT + [False]
    assert len(shards.asked) == 3


def test_what_one_owner_lacks_is_not_waited_for_from_the_other():
    shards = two_copies(a=NEVER, b=0.001, c=0.001)
    for held in shards.blocks.values():
        held.clear()
    tier = shards.tier()
    taken_s = timed(shards, lambda: shards.run(tier.lookup(KEYS)))
    assert taken_s < 3 * PATIENCE_FIRST_S


def test_an_owner_that_was_outlasted_may_still_answer_first():
    """It was only late, and the other owner stands still."""
    shards = two_copies(a=0.15, b=NEVER, c=NEVER)
    tier = shards.tier()
    found = shards.run(tier.lookup(KEYS))
    theirs = ["a" in tier.ring.block_owners(key) for key in KEYS]
    assert found == [True if ours else None for ours in theirs]


def test_an_owner_that_said_absent_by_two_maps_does_not_speak_for_the_other():
    old, new = ring_map("ab", epoch=1, block_copies=2), ring_map("ab", epoch=2, block_copies=2)
    shards = Slow(new, delays={"a": 0.05})
    tier = shards.tier(old)
    first = {tier.ring.block_owners(key)[0]: key for key in KEYS}

    def answer(node: str, message: Message) -> Message | None:
        if node == "b" and isinstance(message, BlockLookup):
            shards.delays["b"] = NEVER  # it tells of the new map, and then nothing more
            return Failure("stale_epoch", "", encode_map(new))
        return BlockPresence(bytes(len(message.keys))) if isinstance(message, BlockLookup) else None

    shards.special = answer
    assert shards.run(tier.lookup([first["a"], first["b"]])) == [None, None]
    assert sum(node == "a" for node, _ in shards.asked) > 1


# -- puts


def test_a_put_does_not_wait_for_an_owner_that_lags_and_leaves_it_out_for_a_moment():
    shards = Slow(ring_map("abc", block_copies=2), delays={"a": NEVER})
    tier = shards.tier()
    taken_s = timed(shards, lambda: shards.run(tier.put(COPIES)))
    assert taken_s < 3 * storing.LAG_MIN_S
    assert tier.counts.lagging_count > 0 and len(shards.fetch(tier)) == COUNT
    shards.asked.clear()
    assert shards.run(tier.put(COPIES)) == ["present"] * COUNT
    assert "a" not in {node for node, message in shards.asked if isinstance(message, BlockPut)}


def test_a_put_waits_for_an_owner_that_is_a_little_slower():
    shards = Slow(ring_map("abc", block_copies=2), delays={"a": 0.02})
    tier = shards.tier()
    assert shards.run(tier.put(COPIES)) == ["stored"] * COUNT
    assert tier.counts.lagging_count == 0 and sum(map(len, shards.blocks.values())) == 2 * COUNT


def test_a_put_waits_for_the_slow_owner_while_the_fast_one_has_no_room():
    shards = Slow(ring_map("ab", block_copies=2), delays={"a": 0.7})

    def full(node: str, message: Message) -> Message | None:
        if node == "b" and isinstance(message, BlockPut):
            return BlockStored(["full"] * len(message.wants))
        return None

    shards.special = full
    assert shards.run(shards.tier().put(COPIES)) == ["stored"] * COUNT


def test_all_owners_gone_is_said():
    shards = Slow(ring_map("ab", block_copies=2), delays={"a": NEVER, "b": NEVER})
    tier = shards.tier()
    assert shards.run(tier.put(COPIES)) == ["unavailable"] * COUNT
    assert shards.fetch(tier) == {} and shards.run(tier.lookup(KEYS)) == [None] * COUNT
    assert {type(message) for _, message in shards.asked} <= {BlockPut, BlockGet, BlockLookup, BlockCopies}


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_put_reaches_every_owner_that_answers(copies):
    shards = Slow(ring_map("abcd", block_copies=copies))
    assert shards.run(shards.tier().put(COPIES)) == ["stored"] * COUNT
    assert sum(map(len, shards.blocks.values())) == copies * COUNT
