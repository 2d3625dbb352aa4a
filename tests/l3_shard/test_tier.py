"""The client's side of L3 against scripted shards: routing, windows, verification, newer maps, shards that
fail."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for, verify_copy
from kvcomm.errors import KVCommError, OutcomeUnknown, PartlyDone, Refused, TooLarge, Unavailable
from kvcomm.steps import Answer, Ask, Call, Emit, Steps, Submit, Wait, WaitAny
from kvcomm.tier import Block, BlockCopy
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockLookup,
    BlockPresence,
    BlockPut,
    BlockStored,
    BlockSuspect,
    Done,
    Failure,
    Message,
    Ping,
    Pong,
    RecordFate,
    RecordFates,
    RecordGet,
    RecordKeys,
    RecordPut,
    RecordScan,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
    RecordWrite,
    RingGet,
    RingMap,
    RingNode,
    RingTransition,
    Sibling,
    StrongOutcome,
    StrongOutcomes,
    StrongRead,
)
from l3_shard import routes
from l3_shard.coordination import PROBE_WAIT_S
from l3_shard.ring import Ring, encode_map
from l3_shard.tier import L3Tier
from tests.namespaces import namespace

NAMESPACE = namespace()
COUNT = 80


def ring_map(names: str = "abc", epoch: int = 1, block_copies: int = 1, replicas: int = 3) -> RingMap:
    shards = [RingNode(name, f"tcp://{name}:1", f"unix:///{name}", "", name, 1) for name in names]
    return RingMap(epoch, replicas, min(2, replicas), 1, block_copies, shards, [])


def make_copies(count: int) -> list[BlockCopy]:
    parent, copies = NO_PARENT, []
    for index, key in enumerate(block_keys(NAMESPACE, [t % 1000 for t in range(16 * count)])):
        payload = memoryview(os.urandom(NAMESPACE.block_bytes))
        header = header_for(
            NAMESPACE, key, parent, payload, logical_start=16 * index, producer=Incarnation(5)
        )
        copies.append(BlockCopy(header, payload))
        parent = key
    return copies


COPIES = make_copies(COUNT)
KEYS = [copy.key for copy in COPIES]
BYTES = {copy.key: copy.header.pack() + bytes(copy.payload) for copy in COPIES}
ABSENT = BlockKey(b"\xff" * 32)


@dataclass
class Shards:
    """Shards that hold blocks and records in dictionaries; the driver of the operations under test."""

    ring: RingMap
    blocks: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    records: dict[bytes, RecordState] = field(default_factory=dict)
    down: dict[str, str] = field(default_factory=dict)
    """Shard -> failure code that it answers with."""
    silent: set[str] = field(default_factory=set)
    """Of them: those that give no answer at all."""
    hung: set[str] = field(default_factory=set)
    """Of those: the ones that one waits for in vain."""
    waits: list[float | None] = field(default_factory=list)
    """How long each request might take."""
    asked: list[tuple[str, Message]] = field(default_factory=list)
    under_way: Counter[str] = field(default_factory=Counter)
    most_under_way: int = 0
    now: float = 100.0
    special: Callable[[str, Message], Message | None] = lambda node, message: None

    def run(self, steps: Steps[Any]) -> Any:
        """Drive an operation; what it emitted is in ``emitted``."""
        self.emitted: list[Any] = []
        result: Any = None
        try:
            while True:
                step = steps.send(result)
                match step:
                    case Submit(asks):
                        result = [self._start(ask) for ask in asks]
                    case Wait(call):
                        self.under_way[call.ask.address] -= 1
                        self.now += (call.ask.timeout_s or 0.0) if _node(call.ask) in self.hung else 0.0
                        result = call.handle
                    case WaitAny(calls, timeout_s):
                        result = next((call for call in calls if _node(call.ask) not in self.hung), None)
                        self.now += (timeout_s or 0.0) if result is None else 0.0
                    case Emit(item):
                        self.emitted.append(item)
                        result = None
        except StopIteration as stop:
            return stop.value

    def _start(self, ask: Ask) -> Call:
        node = _node(ask)
        self.asked.append((node, ask.message))
        self.under_way[ask.address] += 1
        self.most_under_way = max(self.most_under_way, self.under_way[ask.address])
        message, pieces = self._serve(node, ask.message, b"".join(bytes(piece) for piece in ask.payload))
        payload = [memoryview(piece) for piece in pieces]
        if pieces and ask.sink is not None:
            payload = ask.sink(1, message, sum(map(len, pieces))) or []
            for destination, piece in zip(payload, pieces, strict=True):
                destination[:] = piece
        self.waits.append(ask.timeout_s)
        return Call(ask, Answer(message, payload, self.now, spoken=node not in self.silent))

    def _serve(self, node: str, message: Message, payload: bytes) -> tuple[Message, list[bytes]]:
        scripted = self.special(node, message)
        if scripted is not None:
            return scripted, []
        if node in self.down:
            return Failure(self.down[node], "scripted"), []
        if getattr(message, "epoch", self.ring.epoch) < self.ring.epoch:
            return Failure("stale_epoch", "old", encode_map(self.ring)), []
        held = self.blocks.setdefault(node, {})
        match message:
            case BlockLookup(keys=keys):
                return BlockPresence(bytes(key in held for key in keys)), []
            case BlockGet(keys=keys):
                copies = [held.get(key, b"") for key in keys]
                return BlockCopies([len(copy) for copy in copies]), [copy for copy in copies if copy]
            case BlockPut(wants=wants):
                statuses = []
                for want in wants:
                    statuses.append("present" if want.key in held else "stored")
                    held[want.key], payload = payload[: want.copy_bytes], payload[want.copy_bytes :]
                    verify_copy(held[want.key], BlockKey(want.key))
                return BlockStored(statuses), []
            case BlockSuspect(keys=keys):
                for key in keys:
                    if held.get(key) != BYTES[BlockKey(key)]:
                        held.pop(key, None)
                return Done(), []
            case Ping():
                return Pong(), []
            case RingGet():
                return self.ring, []
            case RecordGet(keys=keys):
                return RecordStates([self.records.get(key) for key in keys]), []
            case RecordPut(writes=writes):
                for write in writes:
                    self.records[write.key] = RecordState({"r": 1}, [Sibling("r", 1, 1, write.value)])
                return RecordVersions([RecordVersion("r", 1, {"r": 1}, 2) for _ in writes]), []
            case RecordScan(prefix, after, limit):
                names = sorted(key for key in self.records if key.startswith(prefix) and key > after)
                return RecordKeys(names[:limit]), []
        raise AssertionError(message)

    def fill(self, keys: Sequence[bytes] = KEYS) -> None:
        """Put every block where the ring wants it."""
        ring = Ring.from_map(self.ring)
        for key in keys:
            for owner in ring.block_owners(key):
                self.blocks.setdefault(owner, {})[key] = BYTES[BlockKey(key)]

    def tier(self, ring: RingMap | None = None) -> L3Tier:
        return L3Tier(ring or self.ring, clock=lambda: self.now)

    def fetch(self, tier: L3Tier, keys: Sequence[BlockKey] = KEYS) -> dict[int, Block]:
        found: dict[int, Block] = {}
        self.run(tier.get(keys, lambda index, block: found.update({index: block})))
        assert list(found) == self.emitted == sorted(found)
        for index, block in found.items():
            assert bytes(block.copy) == BYTES[keys[index]] and block.key == keys[index] and block.tier == "l3"
        return found


def _node(ask: Ask) -> str:
    return ask.address.removeprefix("tcp://").partition(":")[0]


def answer_with(message: Message, _node: str, _asked: Message) -> Message:
    return message


# -- blocks


def test_a_get_brings_everything_in_order_in_windows():
    shards = Shards(ring_map())
    shards.fill()
    assert len(shards.fetch(shards.tier())) == COUNT
    gets = [message for _, message in shards.asked if isinstance(message, BlockGet)]
    assert max(len(get.keys) for get in gets) == routes.WINDOW_KEYS
    assert shards.most_under_way == routes.WINDOWS_IN_FLIGHT
    ring = Ring.from_map(shards.ring)
    for node, message in shards.asked:
        assert isinstance(message, BlockGet)
        assert all(ring.block_owners(key) == (node,) for key in message.keys)


def test_windows_shrink_with_the_size_of_the_copies():
    shards, tier = Shards(ring_map("a")), None
    shards.fill()
    tier = shards.tier()
    tier._routes.copy_bytes = 3 << 20
    shards.fetch(tier, KEYS[:4])
    assert [len(message.keys) for _, message in shards.asked if isinstance(message, BlockGet)] == [2, 2]
    assert tier._routes.copy_bytes == len(BYTES[KEYS[0]])


def test_every_block_has_memory_of_its_own():
    shards = Shards(ring_map("a"))
    shards.fill()
    found = shards.fetch(shards.tier(), KEYS[:2])
    assert len({id(block.copy.obj) for block in found.values()}) == 2


def test_misses_are_skipped():
    shards = Shards(ring_map())
    shards.fill(KEYS[::2])
    assert list(shards.fetch(shards.tier())) == list(range(0, COUNT, 2))
    assert shards.fetch(shards.tier(), []) == {}


def test_a_damaged_copy_is_counted_and_the_next_owner_asked():
    shards = Shards(ring_map(block_copies=2))
    shards.fill()
    owner = Ring.from_map(shards.ring).block_owners(KEYS[3])[0]
    shards.blocks[owner][KEYS[3]] = (
        BYTES[KEYS[3]][:-1] + b"\x00" if BYTES[KEYS[3]][-1] else BYTES[KEYS[3]][:-1] + b"\x01"
    )
    tier = shards.tier()
    assert len(shards.fetch(tier)) == COUNT
    assert tier.counts.damaged_count == 1


def test_a_damaged_only_copy_is_a_miss_that_can_be_published_again():
    shards = Shards(ring_map("a"))
    shards.fill()
    shards.blocks["a"][KEYS[3]] = BYTES[KEYS[4]]
    tier = shards.tier()
    assert shards.run(tier.lookup([KEYS[3]])) == [True]
    assert sorted(shards.fetch(tier)) == [index for index in range(COUNT) if index != 3]
    assert shards.run(tier.lookup([KEYS[3]])) == [False]
    assert shards.run(tier.put([COPIES[3]])) == ["stored"]
    assert len(shards.fetch(tier)) == COUNT


def test_the_shard_that_sent_damage_is_told_before_the_rest_is_awaited():
    """Whoever reads only as far as the gap ends the operation there."""
    shards = Shards(ring_map("a"))
    shards.fill()
    for index in (3, 5, 40):
        shards.blocks["a"][KEYS[index]] = BYTES[KEYS[9]]
    assert len(shards.fetch(shards.tier())) == COUNT - 3
    messages = [message for _, message in shards.asked]
    told = [message for message in messages if isinstance(message, BlockSuspect)]
    assert told == [BlockSuspect([KEYS[3], KEYS[5]]), BlockSuspect([KEYS[40]])]
    assert isinstance(messages[-1], BlockGet), "the reports went out in between"


@pytest.mark.parametrize("code", ["refused", "unavailable"])
def test_a_shard_that_does_not_want_to_hear_of_damage_is_left_alone(code):
    shards = Shards(ring_map("a"))
    shards.fill()
    shards.blocks["a"][KEYS[3]] = BYTES[KEYS[4]]
    shards.special = lambda node, asked: Failure(code, "no") if isinstance(asked, BlockSuspect) else None
    assert len(shards.fetch(shards.tier())) == COUNT - 1
    assert len(shards.fetch(shards.tier())) == COUNT - 1


def test_a_lost_copy_is_served_by_the_next_owner():
    shards = Shards(ring_map(block_copies=2))
    shards.fill()
    shards.blocks["a"].clear()
    assert len(shards.fetch(shards.tier())) == COUNT


def test_a_failed_shard_is_replaced_by_the_next_owner_and_passed_over_for_a_while():
    shards = Shards(ring_map(block_copies=2))
    shards.fill()
    tier = shards.tier()
    shards.down["a"] = "unavailable"
    assert len(shards.fetch(tier)) == COUNT
    assert {node for node, _ in shards.asked} == {"a", "b", "c"}
    assert sum(node == "a" for node, _ in shards.asked) <= routes.WINDOWS_IN_FLIGHT
    shards.asked.clear()
    assert len(shards.fetch(tier)) == COUNT and "a" not in {node for node, _ in shards.asked}
    shards.now += routes.SHUN_S
    shards.down.clear()
    shards.asked.clear()
    shards.fetch(tier)
    assert "a" in {node for node, _ in shards.asked}


def test_a_shard_that_fails_again_is_passed_over_longer_and_forgiven_after_a_while():
    shards = Shards(ring_map("a"))
    shards.fill()
    tier = shards.tier()
    shards.down["a"] = "unavailable"
    for passed_over_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        shards.fetch(tier)
        shards.asked.clear()
        shards.now += passed_over_s - 0.1
        assert shards.fetch(tier) == {} and shards.asked == []
        shards.now += 0.1
    shards.down.clear()
    assert len(shards.fetch(tier)) == COUNT
    shards.now += routes.RELAPSE_S
    shards.down["a"] = "unavailable"
    shards.fetch(tier)
    shards.now += routes.SHUN_S
    shards.down.clear()
    assert len(shards.fetch(tier)) == COUNT


def test_blocks_of_a_dead_shard_are_misses_at_once():
    shards = Shards(ring_map("a"))
    shards.fill()
    shards.down["a"] = "unavailable"
    tier = shards.tier()
    assert shards.fetch(tier) == {}
    shards.asked.clear()
    assert shards.fetch(tier) == {} and shards.asked == []
    assert shards.run(tier.lookup(KEYS[:3])) == [None, None, None]
    assert shards.run(tier.put(COPIES[:2])) == ["unavailable", "unavailable"]


def test_an_answer_that_does_not_fit_the_question_counts_as_failed():
    shards = Shards(ring_map("a"))
    shards.fill()
    for wrong in (BlockCopies([0]), RecordKeys([]), BlockCopies([5] * 16)):
        tier = shards.tier()
        shards.special = partial(answer_with, wrong)
        assert shards.fetch(tier) == {}
        assert tier.counts.failed_count


def test_a_newer_map_is_adopted_and_the_blocks_asked_again():
    shards = Shards(ring_map("abcd", epoch=3))
    shards.fill()
    tier = shards.tier(ring_map("ab", epoch=2))
    assert len(shards.fetch(tier)) == COUNT
    assert tier.ring.epoch == 3 and tier.counts.stale_count


def test_a_shard_that_always_says_stale_does_not_hold_the_get_for_ever():
    shards = Shards(ring_map("a"))
    shards.fill()
    shards.special = lambda node, message: Failure("stale_epoch", "", encode_map(shards.ring))
    assert shards.fetch(shards.tier(), KEYS[:3]) == {}
    shards.special = lambda node, message: Failure("stale_epoch", "", b"garbage")
    assert shards.fetch(shards.tier(), KEYS[:3]) == {}


def test_lookup_asks_each_shard_once():
    shards = Shards(ring_map())
    shards.fill(KEYS[:7])
    assert shards.run(shards.tier().lookup([*KEYS[:9], ABSENT])) == [True] * 7 + [False] * 3
    assert len(shards.asked) == len({node for node, _ in shards.asked})


def test_lookup_says_when_nobody_knows():
    shards = Shards(ring_map("a"), down={"a": "unavailable"})
    assert shards.run(shards.tier().lookup(KEYS[:2])) == [None, None]


def test_lookup_adopts_a_newer_map():
    shards = Shards(ring_map("abcd", epoch=3))
    shards.fill()
    assert shards.run(shards.tier(ring_map("ab", epoch=2)).lookup(KEYS)) == [True] * COUNT


def test_a_put_goes_to_every_owner():
    shards = Shards(ring_map(block_copies=2))
    tier = shards.tier()
    assert shards.run(tier.put(COPIES)) == ["stored"] * COUNT
    assert sum(len(held) for held in shards.blocks.values()) == 2 * COUNT
    assert shards.most_under_way <= routes.WINDOWS_IN_FLIGHT
    assert shards.run(tier.put(COPIES)) == ["present"] * COUNT
    assert len(shards.fetch(tier)) == COUNT
    assert shards.run(tier.put([])) == []


def test_a_put_with_one_dead_owner_is_stored_at_the_other():
    shards = Shards(ring_map("ab", block_copies=2), down={"a": "unavailable"})
    assert shards.run(shards.tier().put(COPIES)) == ["stored"] * COUNT


def test_a_put_says_why_not():
    for code, status in (("refused", "refused"), ("too_large", "too_large"), ("unavailable", "unavailable")):
        shards = Shards(ring_map("a"), down={"a": code})
        assert shards.run(shards.tier().put(COPIES[:2])) == [status] * 2
    shards = Shards(ring_map("a"))
    shards.special = lambda node, message: BlockStored(["full", "news"])
    assert shards.run(shards.tier().put(COPIES[:2])) == ["full", "refused"]


def test_a_put_adopts_a_newer_map():
    shards = Shards(ring_map("abcd", epoch=3))
    assert shards.run(shards.tier(ring_map("ab", epoch=2)).put(COPIES)) == ["stored"] * COUNT
    assert len(shards.fetch(shards.tier())) == COUNT


# -- records

NAMES = [b"name/%d" % index for index in range(40)]


def write(name: bytes, value: bytes | None = b"v") -> RecordWrite:
    return RecordWrite(name, value, {})


def test_records_go_to_their_first_owner_in_one_request_a_shard():
    shards = Shards(ring_map("abcde"))
    tier = shards.tier()
    versions = shards.run(tier.record_put([write(name) for name in NAMES]))
    assert [version.acks for version in versions] == [2] * 40
    assert len(shards.asked) == len({node for node, _ in shards.asked}) == 5
    answers = shards.run(tier.record_get([*NAMES, b"none"]))
    assert [answer.values for answer in answers] == [(b"v",)] * 40 + [()]
    assert answers[-1].context == {} and not answers[0].degraded
    assert shards.run(tier.record_scan(b"name/1")) == sorted(
        name for name in NAMES if name.startswith(b"name/1")
    )
    assert shards.run(tier.record_get([])) == [] and shards.run(tier.record_put([])) == []


def test_the_next_owner_coordinates_when_the_first_cannot_be_reached():
    shards = Shards(ring_map(), down={"a": "unavailable"})
    tier = shards.tier()
    assert len(shards.run(tier.record_put([write(name) for name in NAMES]))) == 40
    assert len(shards.run(tier.record_get(NAMES))) == 40


def test_nobody_to_be_reached_is_unavailable_after_everybody_was_tried():
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "unavailable"))
    tier = shards.tier()
    for _ in range(2):
        shards.asked.clear()
        with pytest.raises(Unavailable, match="none of 3 owners"):
            shards.run(tier.record_get([b"k"]))
        assert [node for node, _ in shards.asked] and {node for node, _ in shards.asked} == set("abc")
    with pytest.raises(Unavailable):
        shards.run(tier.record_scan(b""))


@pytest.mark.parametrize("gone", ["a", "b", "c"])
def test_who_knows_no_owner_that_is_left_asks_the_others_for_the_map(gone: str):
    """A client was idle while the only owner that its map names for some records was drained and stopped."""
    before, after = ring_map(replicas=1), ring_map(names="abc".replace(gone, ""), epoch=9, replicas=1)
    shards = Shards(after, down={gone: "unavailable"})
    lost = [name for name in NAMES if Ring.from_map(before).replicas(name) == (gone,)]
    assert lost
    tier = shards.tier(before)
    assert len(shards.run(tier.record_put([write(name) for name in lost]))) == len(lost)
    assert sum(isinstance(message, RingGet) for _, message in shards.asked) == 2
    shards.asked.clear()
    assert len(shards.run(tier.record_get(lost))) == len(lost)
    assert gone not in {node for node, _ in shards.asked}


def test_an_owner_without_a_majority_is_believed_when_the_others_were_silent_a_moment_ago():
    """Each silent one would cost the whole wait again."""
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "unavailable"), silent={"a", "b"})
    tier = shards.tier()
    with pytest.raises(Unavailable):
        shards.run(tier.strong_read([b"k"]))
    assert {node for node, _ in shards.asked} == set("abc"), "nobody was known to be silent"
    shards.asked.clear()
    with pytest.raises(Unavailable):
        shards.run(tier.strong_read([b"k"]))
    assert [node for node, _ in shards.asked] == ["c"]
    shards.asked.clear()
    with pytest.raises(Unavailable):
        shards.run(tier.record_get([b"k"]))
    assert len(shards.asked) == 3, "any owner can serve what needs no majority"


def test_a_shard_that_another_one_met_at_work_is_asked_though_it_was_silent_a_moment_ago():
    """Its proposals are in the way: to go round it would only prolong the duel."""
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "unavailable"), silent={"a", "b"})
    tier = shards.tier()
    with pytest.raises(Unavailable):
        shards.run(tier.strong_read([b"k"]))
    del shards.down["a"]
    beaten = Failure("unavailable", "no decision in time", b"a")
    read = StrongOutcomes([StrongOutcome("", b"1", b"value")])
    shards.special = lambda node, message: {"a": read, "c": beaten}.get(node)
    for asked in (["c", "a"], ["a"]):
        shards.asked.clear()
        assert shards.run(tier.strong_read([b"k"])) == read.outcomes
        assert [node for node, _ in shards.asked] == asked


def test_a_shard_whose_proposals_were_beaten_is_not_passed_over():
    """All clients come back to the first owner, whoever won this time."""
    shards = Shards(ring_map())
    tier = shards.tier()
    first, *others = Ring.from_map(ring_map()).replicas(b"k")
    beaten = Failure("unavailable", "no decision in time", others[-1].encode())
    read = StrongOutcomes([StrongOutcome("", b"1", b"value")])
    shards.special = lambda node, message: beaten if node == first else read
    for _ in range(2):
        shards.asked.clear()
        assert shards.run(tier.strong_read([b"k"])) == read.outcomes
        assert [node for node, _ in shards.asked] == [first, others[0]]


def majority_lost() -> tuple[Shards, L3Tier]:
    """Of the owners c alone answers, that it has no majority; the time to pass over the two that hang is just
    over."""
    hung = {"a", "b"}
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "unavailable"), silent=hung, hung=hung)
    tier = shards.tier()
    with pytest.raises(Unavailable):
        shards.run(tier.strong_read([b"k"]))
    shards.now += 1.5
    shards.asked.clear()
    return shards, tier


def test_owners_that_hang_are_not_waited_for_again_when_their_time_to_be_passed_over_is_up():
    shards, tier = majority_lost()
    for _ in range(8):
        begin = shards.now
        with pytest.raises(Unavailable, match="c: scripted"):
            shards.run(tier.strong_read([b"k"]))
        assert shards.now - begin <= PROBE_WAIT_S + 1e-9
        shards.now += 1.5
    probed = [node for node, message in shards.asked if isinstance(message, Ping)]
    assert {"a", "b"} == set(probed) and len(probed) < 12, "less and less often"
    assert {node for node, message in shards.asked if not isinstance(message, Ping)} == {"c"}


@pytest.mark.parametrize("back", "ab")
def test_an_owner_that_answers_again_takes_part_at_once(back: str):
    shards, tier = majority_lost()
    for known in (shards.silent, shards.hung):
        known.discard(back)
    del shards.down[back]
    shards.special = lambda node, message: (
        StrongOutcomes([StrongOutcome("", b"1", b"v")])
        if node == back and isinstance(message, StrongRead)
        else None
    )
    begin = shards.now
    assert [outcome.value for outcome in shards.run(tier.strong_read([b"k"]))] == [b"v"]
    assert shards.now == begin


def test_if_nobody_else_is_left_the_hanging_are_asked():
    shards, tier = majority_lost()
    shards.hung.add("c")
    shards.silent.add("c")
    for _ in range(2):
        with pytest.raises(Unavailable):
            shards.run(tier.strong_read([b"k"]))
        shards.now += 20
    assert {node for node, message in shards.asked if not isinstance(message, Ping)} == set("abc")


def test_a_shard_is_waited_for_shorter_with_a_few_strong_records():
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "refused"))
    tier = shards.tier()
    for keys in ([b"k"], [b"%d" % number for number in range(100)]):
        with pytest.raises(Refused):
            shards.run(tier.strong_read(keys))
    few, *many = shards.waits
    assert few == pytest.approx(0.7) and set(many) == {2.0}


def test_an_unknown_outcome_is_never_sent_again():
    shards = Shards(ring_map(), down=dict.fromkeys("abc", "outcome_unknown"))
    with pytest.raises(OutcomeUnknown):
        shards.run(shards.tier().record_put([write(b"k")]))
    assert len(shards.asked) == 1


def put_all(shards: Shards) -> KVCommError:
    """The error of a put of all names."""
    with pytest.raises(KVCommError) as caught:
        shards.run(shards.tier().record_put([write(name) for name in NAMES]))
    error = caught.value
    assert [outcome.key for outcome in error.outcomes] == NAMES
    return error


def statuses(error: KVCommError) -> dict[str, int]:
    return dict(Counter(outcome.status for outcome in error.outcomes))


@pytest.mark.parametrize("code", ["conflict", "unavailable", "refused"])
def test_a_batch_that_was_done_in_part_says_what_became_of_each_write(code: str):
    shards = Shards(ring_map("ab", replicas=1), down={"a": code})
    error = put_all(shards)
    done = len(shards.records)
    assert type(error) is PartlyDone and 0 < done < len(NAMES)
    assert statuses(error) == {"done": done, "not_done": len(NAMES) - done}
    assert f"{done} of {len(NAMES)} writes were done, {len(NAMES) - done} were not" in error.message
    for outcome in error.outcomes:
        assert (outcome.key in shards.records) == (outcome.status == "done")
        if outcome.status == "done":
            assert outcome.dot is not None and outcome.context == {outcome.dot[0]: outcome.dot[1]}
        else:
            assert outcome.error is not None and outcome.error.code == code and outcome.dot is None


def test_what_may_have_been_done_is_told_from_what_was():
    shards = Shards(ring_map("ab", replicas=1), down={"a": "outcome_unknown"})
    error = put_all(shards)
    assert type(error) is PartlyDone
    assert statuses(error) == {"done": len(shards.records), "unknown": len(NAMES) - len(shards.records)}


@pytest.mark.parametrize("code", ["conflict", "unavailable", "refused"])
def test_a_batch_of_which_nothing_was_done_says_so_by_its_class(code: str):
    shards = Shards(ring_map("ab", replicas=1), down={"a": code, "b": code})
    error = put_all(shards)
    assert error.code == code and not isinstance(error, OutcomeUnknown) and not shards.records
    assert statuses(error) == {"not_done": len(NAMES)}


def test_the_fates_of_one_request_are_those_of_its_writes():
    """What its coordinator could not do another owner may; what was refused is not asked for again."""
    shards = Shards(ring_map("ab", replicas=2))
    version = RecordVersion("r", 7, {"r": 7}, 1)
    asked: list[list[bytes]] = []

    def fates(node: str, message: Message) -> Message | None:
        if not isinstance(message, RecordPut):
            return None
        asked.append([each.key for each in message.writes])
        if len(asked) > 1:
            return None  # as scripted elsewhere: done
        return RecordFates(
            [RecordFate(version), RecordFate(None, "unavailable", "full"), RecordFate(None, "conflict", "no")]
        )

    shards.special = fates
    names = [name for name in NAMES if Ring(ring_map("ab", replicas=2)).replicas(name)[0] == "a"][:3]
    with pytest.raises(PartlyDone, match="2 of 3 writes were done, 1 were not, 0 are unknown: conflict: no"):
        shards.run(shards.tier().record_put([write(name) for name in names]))
    assert asked == [names, [names[1]]]


def test_a_read_of_which_a_part_cannot_be_answered_says_unavailable():
    shards = Shards(ring_map("ab", replicas=1), down={"a": "unavailable"})
    with pytest.raises(Unavailable):
        shards.run(shards.tier().record_get(NAMES))


def test_records_follow_newer_maps_but_not_for_ever():
    shards = Shards(ring_map("abcd", epoch=3))
    tier = shards.tier(ring_map("ab", epoch=2))
    assert len(shards.run(tier.record_put([write(name) for name in NAMES]))) == 40
    assert tier.ring.epoch == 3
    shards.special = lambda node, message: Failure("stale_epoch", "", encode_map(shards.ring))
    with pytest.raises(Unavailable, match="changed 4 times"):
        shards.run(tier.record_get([b"k"]))


def test_big_answers_are_asked_for_in_halves():
    shards = Shards(ring_map("a", replicas=1))
    tier = shards.tier()
    shards.run(tier.record_put([write(name) for name in NAMES]))

    def at_most_ten(node: str, message: Message) -> Message | None:
        big = isinstance(message, RecordGet) and len(message.keys) > 10
        return Failure("too_large", "split") if big else None

    shards.special = at_most_ten
    assert [answer.values for answer in shards.run(tier.record_get(NAMES))] == [(b"v",)] * 40
    shards.special = lambda node, message: Failure("too_large", "a value")
    with pytest.raises(TooLarge):
        shards.run(tier.record_get([b"k"]))
    with pytest.raises(TooLarge):
        shards.run(tier.record_put([write(name) for name in NAMES]))


def test_big_batches_are_cut():
    shards = Shards(ring_map("a", replicas=1))
    shards.run(shards.tier().record_put([write(name, bytes(3 << 20)) for name in NAMES[:5]]))
    assert [len(message.writes) for _, message in shards.asked if isinstance(message, RecordPut)] == [2, 2, 1]


def test_an_answer_to_another_question_is_an_unknown_outcome():
    shards = Shards(ring_map("a", replicas=1))
    shards.special = lambda node, message: RecordKeys([])
    with pytest.raises(OutcomeUnknown):
        shards.run(shards.tier().record_put([write(b"k")]))


def test_a_scan_pages_and_misses_one_shard_gladly(monkeypatch):
    monkeypatch.setattr("l3_shard.tier.SCAN_KEYS", 7)
    shards = Shards(ring_map())
    tier = shards.tier()
    shards.run(tier.record_put([write(name) for name in NAMES]))
    shards.down["a"] = "unavailable"
    assert shards.run(tier.record_scan(b"name/")) == sorted(NAMES)
    shards.down["b"] = "refused"
    with pytest.raises(Refused):
        shards.run(tier.record_scan(b"name/"))


def test_a_scan_misses_no_shard_that_alone_has_what_was_acknowledged():
    """By the placement of before a write needed one copy: there was one shard."""
    step = RingTransition("copy", ring_map("abc").shards, [])
    shards = Shards(structs.replace(ring_map("a"), transition=step))
    shards.down["b"] = "unavailable"
    assert shards.run(shards.tier().record_scan(b"")) == []
    shards.down = {"a": "unavailable"}
    with pytest.raises(Unavailable, match="incomplete: a did not answer"):
        shards.run(shards.tier().record_scan(b""))


def test_a_scan_under_an_old_map_asks_the_shards_of_the_new_one():
    """Those of the old one may own nothing of it any more, and would say so without a word of warning."""
    shards = Shards(ring_map("abcdef", epoch=2))
    old = ring_map("abc")
    asked: list[tuple[str, int]] = []

    def answer(node: str, message: Message) -> Message | None:
        assert isinstance(message, RecordScan)
        asked.append((node, message.epoch))
        if message.epoch < 2:
            return Failure("stale_epoch", "", encode_map(shards.ring))
        return RecordKeys([b"name/" + node.encode()])

    shards.special = answer
    assert shards.run(shards.tier(old).record_scan(b"name/")) == [b"name/%c" % name for name in b"abcdef"]
    assert asked[-6:] == [(node, 2) for node in "abcdef"]


def test_one_degraded_answer_does_not_taint_the_others():
    shards = Shards(ring_map())
    first = {name: Ring.from_map(shards.ring).replicas(name)[0] for name in NAMES}

    def answer(node: str, message: Message) -> Message | None:
        assert isinstance(message, RecordGet)
        return RecordStates([None] * len(message.keys), degraded=node == "a")

    shards.special = answer
    answers = shards.run(shards.tier().record_get(NAMES))
    assert [each.degraded for each in answers] == [first[name] == "a" for name in NAMES]
    assert {each.degraded for each in answers} == {True, False}


def test_calls_go_where_dial_says():
    shards = Shards(ring_map("a"))
    tier = L3Tier(shards.ring, dial=lambda node: node.local_address, timeout_s=0.5)
    steps = tier.lookup(KEYS[:1])
    step = next(steps)
    assert isinstance(step, Submit)
    assert step.asks[0].address == "unix:///a" and step.asks[0].timeout_s == 0.5
    steps.close()


# -- hot keys ------------------------------------------------------------------------------------------------


def test_what_a_shard_calls_hot_is_told_with_its_record():
    def special(node: str, message: Message) -> Message | None:
        if not isinstance(message, RecordGet):
            return None
        hot = [index for index, key in enumerate(message.keys) if key.startswith(b"hot")]
        return RecordStates([None] * len(message.keys), False, [*hot, 99])

    shards = Shards(ring_map(), special=special)
    tier = L3Tier(ring_map())
    keys = [b"hot-1", b"cold-1", b"hot-2", b"cold-2", b"hot-3"]
    answers = shards.run(tier.record_get(keys))
    assert [answer.hot for answer in answers] == [True, False, True, False, True]


def test_reports_find_shards_that_are_well_in_turn():
    shards = Shards(ring_map())
    tier = L3Tier(ring_map(), clock=lambda: shards.now)
    assert tier.shard_address("tcp://a:1") and not tier.shard_address("unix:///pool")
    assert {tier.any_shard() for _ in range(6)} == {"tcp://a:1", "tcp://b:1", "tcp://c:1"}
    shards.down = {"a": "unavailable"}
    keys = [b"%d" % number for number in range(20)]
    shards.run(tier.record_get(keys))
    assert {tier.any_shard() for _ in range(6)} == {"tcp://b:1", "tcp://c:1"}
