"""A shard that repairs, by literal events and effects: one missed write from the hint to the end of it."""

from __future__ import annotations

import pytest

from kvcomm.machine import Answered, AskPeer, Effect, Reply, Tick
from kvcomm.wire.messages import (
    Done,
    Failure,
    LeafGet,
    LeafRecords,
    Message,
    RecordFetch,
    RecordForget,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordStates,
    RecordVersions,
    RecordWrite,
    Sibling,
    TreeDigests,
    TreeGet,
)
from l3_shard.hints import PREFIX
from l3_shard.merkle import FAN_OUT, MerkleTree, leaf_of, state_digest
from l3_shard.repair import RepairOptions
from l3_shard.ring import encode_map
from l3_shard.shard import Shard
from l3_shard.storage import Entry, Load, Loaded, Persist, Persisted, Survey, Surveyed, Sweep, Swept
from l3_shard.tombstones import dead_since
from tests.l3_shard.cluster import NODE_TENANT, TENANT, ring_map
from tests.l3_shard.test_shard import DRAWN, ME, ONE, OTHER, STAMP, Bench, K, asks_of, origin, put, ticket_of

OPTIONS = RepairOptions(interval_s=1_000.0)
AWAY = Failure("unavailable", "no route")
NOTHING = TreeDigests(MerkleTree().children((0, 0)))
GRAVE = RecordState({f"{DRAWN}.1": 2}, [Sibling(f"{DRAWN}.1", 2, STAMP, None)])


class RepairBench(Bench):
    """The machine with its index, which answers surveys by itself."""

    def __init__(self, notes: dict[bytes, bytes] | None = None) -> None:
        super().__init__()
        self.index: dict[bytes, RecordState] = {}
        clean = (1).to_bytes(8, "big") + self.shard.ring.placement
        standing = (
            {b"caught_up": b"1", b"clean": clean, b"map": encode_map(self.map)} if notes is None else notes
        )
        self.shard = Shard(
            ME,
            f"{DRAWN}.1",
            self.map,
            node_tenant=NODE_TENANT,
            origin_ms=1_000_000,
            repair=OPTIONS,
            notes=standing if notes is None else notes,
        )

    def settled(self, effects: list[Effect], now: float) -> list[Effect]:
        """Answer surveys until none is left; the other effects."""
        others: list[Effect] = []
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Survey):
                entries = [
                    Entry(key, state_digest(key, state), dead_since(state))
                    for key, state in sorted(self.index.items())
                ]
                leaves = tuple(
                    tuple(entry for entry in entries if leaf_of(entry.key) == leaf) for leaf in effect.leaves
                )
                effects += self.on(Surveyed(effect.ticket, leaves), now)
            elif isinstance(effect, Sweep):
                by_leaf: dict[int, list[Entry]] = {}
                for key, state in sorted(self.index.items()):
                    entry = Entry(key, state_digest(key, state), dead_since(state))
                    by_leaf.setdefault(leaf_of(key), []).append(entry)
                swept = [(leaf, tuple(found)) for leaf, found in sorted(by_leaf.items())]
                effects += self.on(Swept(effect.ticket, tuple(swept), None), now)
            else:
                others.append(effect)
        return others

    def started(self) -> None:
        """Compared with both neighbours, nothing anywhere."""
        asks = self.settled(self.on(Tick(), 0.0), 0.0)
        root = TreeGet(1, ME, 0, [0])
        assert asks == [
            AskPeer(ticket_of(ask), node, root, 1.5) for ask, node in zip(asks, "bc", strict=True)
        ]
        for ask in asks:
            assert self.on(Answered(ticket_of(ask), NOTHING)) == []

    def durable_put(self, now: float) -> list[AskPeer]:
        (load,) = self.ask(put(), now=now)
        (persist,) = self.on(Loaded(ticket_of(load), (None,)), now)
        assert isinstance(persist, Persist)
        self.index |= dict(persist.writes)
        asks = [ask for ask in self.on(Persisted(ticket_of(persist)), now) if isinstance(ask, AskPeer)]
        return sorted(asks, key=lambda ask: ask.node)

    def tick(self) -> tuple[list[Effect], float]:
        now = self.shard.deadline()
        assert now is not None
        return self.settled(self.on(Tick(), now), now), now


def only_ask(effects: list[Effect]) -> AskPeer:
    (ask,) = effects
    assert isinstance(ask, AskPeer)
    return ask


def test_a_missed_write_becomes_a_durable_hint_is_handed_on_and_the_hint_is_removed():
    bench = RepairBench()
    bench.started()
    to_b, to_c = bench.durable_put(10.0)
    (persist,) = bench.on(Answered(to_c.ticket, AWAY), 10.0)
    assert isinstance(persist, Persist) and persist.writes == ()
    ((note, value),) = persist.notes
    assert note.startswith(PREFIX) and value is not None
    (reply,) = bench.on(Answered(to_b.ticket, Done()), 10.0)
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)
    assert bench.on(Persisted(persist.ticket), 10.0) == []

    effects, now = bench.tick()
    assert 0.15 <= now - 10.0 <= 0.25, "soon, but not at once"
    handed = RecordReplicate(1, [K], [bench.index[K]])
    ask = only_ask(effects)
    assert ask == AskPeer(ask.ticket, "c", handed, now + 1.5)
    assert bench.on(Answered(ask.ticket, AWAY), now) == []
    effects, later = bench.tick()
    ask = only_ask(effects)
    assert ask.message == handed and 0.15 <= later - now <= 0.5
    effects = bench.settled(bench.on(Answered(ask.ticket, Done()), later), later)
    (removal,) = [effect for effect in effects if isinstance(effect, Persist)]
    assert removal.notes == ((note, None),)
    assert bench.on(Persisted(removal.ticket), later) == []
    ask = only_ask([effect for effect in effects if effect is not removal])
    assert (ask.node, ask.message) == ("c", TreeGet(1, ME, 0, [0])), "it was away: there may be more"


def test_writes_that_go_on_missing_do_not_put_off_the_next_attempt():
    bench = RepairBench()
    bench.started()
    _, to_c = bench.durable_put(10.0)
    (persist,) = bench.on(Answered(to_c.ticket, AWAY), 10.0)
    first = bench.shard.deadline()
    assert first is not None and first <= 10.25
    for now in (10.05, 10.1, 10.14):
        (persist, *_) = bench.ask(put(context={f"{DRAWN}.1": 1}), now=now)
        for ask in bench.on(Persisted(ticket_of(persist)), now):
            if isinstance(ask, AskPeer) and ask.node == "c":
                bench.on(Answered(ask.ticket, AWAY), now)
        assert bench.shard.deadline() == first


def test_a_hint_is_no_acknowledgement():
    bench = RepairBench()
    bench.started()
    to_b, to_c = bench.durable_put(10.0)
    bench.on(Answered(to_c.ticket, AWAY), 10.0)
    replies = [effect for effect in bench.on(Answered(to_b.ticket, AWAY), 10.0) if isinstance(effect, Reply)]
    text = f"only 1 of 2 replicas confirmed the write; b: {AWAY.text}"
    assert replies == [Reply(origin(), Failure("outcome_unknown", text))]


def test_a_comparison_goes_down_to_the_records_and_makes_both_equal():
    """We have K and c has L."""
    bench = RepairBench()
    bench.index[K] = ONE
    other_key = K + b"l"
    asks = bench.settled(bench.on(Tick(), 0.0), 0.0)
    to_c = asks[1]
    theirs = MerkleTree()
    theirs.update(leaf_of(other_key), state_digest(other_key, OTHER))
    assert isinstance(to_c, AskPeer) and to_c.node == "c"
    while isinstance(to_c.message, TreeGet):
        depth, indices = to_c.message.depth, to_c.message.indices
        digests = [digest for index in indices for digest in theirs.children((depth, index))]
        to_c = only_ask(bench.settled(bench.on(Answered(to_c.ticket, TreeDigests(digests)), 0.0), 0.0))
    leaves = sorted({leaf_of(K), leaf_of(other_key)})
    assert to_c.message == LeafGet(1, ME, leaves)
    listed = LeafRecords(len(leaves), [other_key], [state_digest(other_key, OTHER)])
    to_c = only_ask(bench.on(Answered(to_c.ticket, listed), 0.0))
    assert to_c.message == RecordFetch(1, [K, other_key], compares=True)
    (load,) = bench.on(Answered(to_c.ticket, RecordStates([None, OTHER])), 0.0)
    assert isinstance(load, Load) and load.keys == (K, other_key)
    effects = bench.on(Loaded(load.ticket, (ONE, None)), 0.0)
    (persist,) = effects
    assert isinstance(persist, Persist) and persist.writes == ((other_key, OTHER),)
    to_c = only_ask(bench.on(Persisted(persist.ticket), 0.25))
    assert to_c.message == RecordReplicate(1, [K], [ONE])
    assert bench.on(Answered(to_c.ticket, Done()), 0.5) == []
    counts = bench.shard.repair_counts()
    assert counts is not None
    assert (counts.records, counts.comparisons["repaired"]) == ({"pulled": 1, "pushed": 1}, 0)
    assert bench.shard.deadline() == 1.0, "it rests as long as it took"
    assert bench.on(Tick(), 1.0) == []
    counts = bench.shard.repair_counts()
    assert counts is not None and counts.comparisons["repaired"] == 1


def test_answers_that_cannot_be_end_a_comparison_and_nothing_else():
    for wrong in (TreeDigests([1] * (FAN_OUT - 1)), Done(), AWAY):
        bench = RepairBench()
        asks = bench.settled(bench.on(Tick(), 0.0), 0.0)
        for ask in asks:
            assert bench.on(Answered(ticket_of(ask), wrong), 0.0) == []
        counts = bench.shard.repair_counts()
        assert counts is not None and counts.comparisons["failed"] == 2
        deadline = bench.shard.deadline()
        assert deadline is not None and 0.15 <= deadline <= 0.25


def test_questions_that_cannot_be_are_refused():
    bench = RepairBench()
    bench.started()
    wrong: list[Message] = [
        TreeGet(1, "stranger", 0, [0]),
        LeafGet(1, "stranger", [0]),
        TreeGet(1, "b", 4, [0]),
        TreeGet(1, "b", -1, [0]),
        TreeGet(1, "b", 1, [FAN_OUT]),
        TreeGet(1, "b", 0, [0] * 300),
        LeafGet(1, "b", []),
        LeafGet(1, "b", [1 << 16]),
        RecordForget(1, [K], []),
        RecordForget(1, [K], [ONE]),
    ]
    for message in wrong:
        answer = bench.answer(message, tenant=NODE_TENANT)
        assert isinstance(answer, Failure) and answer.code == "refused", message
    assert bench.answer(TreeGet(1, "b", 0, [0]), tenant=NODE_TENANT) == NOTHING
    stale = bench.answer(TreeGet(0, "b", 0, [0]), tenant=NODE_TENANT)
    early = bench.answer(TreeGet(2, "b", 0, [0]), tenant=NODE_TENANT)
    assert isinstance(stale, Failure) and stale.code == "stale_epoch"
    assert isinstance(early, Failure) and early.code == "unavailable"


def test_a_tombstone_is_removed_after_the_floor_is_durable_and_only_if_it_is_still_the_same():
    bench = RepairBench()
    bench.started()
    for held, left in ((GRAVE, RecordState({}, [])), (ONE, None)):
        (first,) = bench.ask(RecordForget(1, [K], [GRAVE]), tenant=NODE_TENANT, now=10.0)
        if left is not None:
            assert isinstance(first, Persist) and first.writes == ()
            assert first.notes == ((b"floor", (2).to_bytes(8, "big")),)
            (load,) = bench.on(Persisted(first.ticket), 10.0)
        else:  # the floor is that high already
            load = first
        effects = bench.on(Loaded(ticket_of(load), (held,)), 10.0)
        if left is not None:
            (persist,) = effects
            assert isinstance(persist, Persist) and persist.writes == ((K, left),)
            effects = bench.on(Persisted(persist.ticket), 10.0)
            bench.shard._lines._recent.take(K)
        assert effects == [Reply(origin(tenant=NODE_TENANT), Done())]


def test_a_floor_that_is_not_durable_removes_nothing():
    bench = RepairBench()
    bench.started()
    (note,) = bench.ask(RecordForget(1, [K], [GRAVE]), tenant=NODE_TENANT, now=10.0)
    effects = bench.on(Persisted(ticket_of(note), "full", "no room"), 10.0)
    assert effects == [Reply(origin(tenant=NODE_TENANT), Done())]


def test_a_new_store_says_that_what_it_lacks_may_exist():
    bench = RepairBench(notes={})
    effects = bench.ask(RecordFetch(1, [K]), tenant=NODE_TENANT)
    (load,) = [effect for effect in effects if isinstance(effect, Load)]
    (reply,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert isinstance(reply, Reply) and reply.message == RecordStates([None], degraded=True)


def test_a_comparison_that_could_not_merge_everything_has_failed_and_is_tried_again():
    bench = RepairBench()
    asks = bench.settled(bench.on(Tick(), 0.0), 0.0)
    to_c = asks[1]
    theirs = MerkleTree()
    theirs.update(leaf_of(K), state_digest(K, OTHER))
    while isinstance(to_c, AskPeer) and isinstance(to_c.message, TreeGet):
        depth, indices = to_c.message.depth, to_c.message.indices
        digests = [digest for index in indices for digest in theirs.children((depth, index))]
        to_c = only_ask(bench.settled(bench.on(Answered(to_c.ticket, TreeDigests(digests)), 0.0), 0.0))
    listed = LeafRecords(1, [K], [state_digest(K, OTHER)])
    fetch = only_ask(bench.on(Answered(ticket_of(to_c), listed), 0.0))
    (load,) = bench.on(Answered(fetch.ticket, RecordStates([OTHER])), 0.0)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)), 0.0)
    assert bench.on(Persisted(ticket_of(persist), "full", "no room"), 0.0) == []
    counts = bench.shard.repair_counts()
    assert counts is not None
    assert (counts.comparisons["failed"], counts.comparisons["repaired"], counts.records["pulled"]) == (
        1,
        0,
        0,
    )
    deadline = bench.shard.deadline()
    assert deadline is not None and deadline <= 0.25


def test_a_record_that_a_replica_cannot_merge_holds_up_neither_hints_nor_comparisons():
    """The second of three hints: the others are handed on, it is given up, and then replicas are compared."""
    bench = RepairBench()
    bench.started()
    keys = [TENANT + key for key in (b"k", b"l", b"m")]
    writes = [RecordWrite(key[len(TENANT) :], b"v", {}) for key in keys]
    (load,) = bench.ask(RecordPut(1, writes), now=10.0)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,) * 3), 10.0)
    assert isinstance(persist, Persist)
    bench.index |= dict(persist.writes)
    (to_c,) = asks_of(bench.on(Persisted(ticket_of(persist)), 10.0), "c")
    (noted,) = [each for each in bench.on(Answered(to_c, AWAY), 10.0) if isinstance(each, Persist)]
    bench.on(Persisted(noted.ticket), 10.0)
    delivered: list[bytes] = []
    for _ in range(30):
        effects, now = bench.tick()
        while effects:
            effect = effects.pop(0)
            if isinstance(effect, Persist):
                effects += bench.on(Persisted(effect.ticket), now)
            elif isinstance(effect, AskPeer) and isinstance(effect.message, RecordReplicate):
                whole = keys[1] not in effect.message.keys
                delivered += effect.message.keys if whole else []
                answer = Done() if whole else Failure("corrupt", "it contradicts ours")
                effects += bench.settled(bench.on(Answered(effect.ticket, answer), now), now)
            elif isinstance(effect, AskPeer) and isinstance(effect.message, TreeGet) and effect.node == "c":
                counts = bench.shard.repair_counts()
                assert counts is not None and counts.hint_count == 0
                assert sorted(delivered) == [keys[0], keys[2]] and counts.hints["void"] == 1
                return
    raise AssertionError("no comparison")


@pytest.mark.parametrize(("new", "damaged"), [(False, False), (False, True), (True, False)])
def test_a_shard_vouches_for_its_tree_unless_its_disk_is_new_or_has_damaged_records(
    new: bool, damaged: bool
) -> None:
    bench = RepairBench({b"map": encode_map(ring_map("abc"))} if new else None)
    bench.settled(bench.on(Tick(), 0.0), 0.0)
    (load,) = bench.ask(RecordFetch(1, [K]), tenant=NODE_TENANT)
    bench.on(Loaded(ticket_of(load), (None,), (K,) if damaged else ()))
    answers = bench.settled(bench.ask(TreeGet(1, "b", 0, [0]), request=7, tenant=NODE_TENANT), 0.0)
    (reply,) = [each for each in answers if isinstance(each, Reply)]
    assert isinstance(reply.message, TreeDigests)
    assert reply.message.degraded == (new or damaged)
