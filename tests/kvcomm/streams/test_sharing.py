"""Another process goes on exactly where this one is, or says which rows it cannot have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvcomm.aio import AsyncClient
from kvcomm.block import BlockHeader
from kvcomm.client import Client
from kvcomm.errors import Conflict, Corrupt, NamespaceError, PoolFull, Refused, Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.rpc import AsyncPeers, Peers
from kvcomm.stateplane import record_name
from kvcomm.streams import context as contexts
from kvcomm.streams import sharing
from kvcomm.streams.archive import Archive
from kvcomm.streams.chain import chain_of
from kvcomm.streams.context import StreamContext
from kvcomm.streams.conversation import Conversation, Markup
from kvcomm.streams.events import Event
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.session import Session
from kvcomm.streams.sharing import Missing
from tests.kvcomm.streams.byte_engine import ByteEngine
from tests.kvcomm.streams.clusters import TENANT, Cluster
from tests.kvcomm.test_blockplane import run
from tests.kvcomm.test_client import IDENTITY
from tests.namespaces import namespace

NAMESPACE = namespace(block_tokens=4, vocab_size=100).for_tenant(TENANT)
RECORD = record_name("stream", "planner", "main")


def engine(blocks: int = 60) -> ByteEngine:
    return ByteEngine(NAMESPACE, blocks)


def compacted(maker: ByteEngine, cuts: int = 5, seed: int = 1, rows: int = 9) -> Session:
    """A rollout with so many cuts, a pending token, and a partial last block that was begun before a cut."""
    draw = random.Random(seed)
    session = maker.session()
    (token,) = maker.feed([(session, [draw.randrange(100) for _ in range(14)])])
    session.protect(4)
    session.sampled(token)
    for _ in range(cuts):
        maker.generate(session, rows)
        while session.slot_count % 4 != 2:
            maker.generate(session, 1)
        session.evict([(4, 12)], reason="window")
        maker.generate(session, 1)  # the block that was begun before the cut goes on
    session.check()
    return session


def adopted(cluster: Cluster, taker: ByteEngine) -> Session:
    session = run(cluster.sharing().adopt(taker, "planner", "main"))
    assert isinstance(session, Session)
    return session


def test_another_process_generates_what_this_one_would_have() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    assert session.slot_count % 4 == 3, "the last block is partial, and rows of it saw what is cut"
    shared = run(cluster.sharing().publish(session, maker, "planner", "main", policy="window"))
    assert shared.complete and shared.context.policy == "window"
    other = adopted(cluster, taker)
    other.check()
    taker.pool.check()
    assert (other.view, other.lineage, other.events) == (session.view, session.lineage, session.events)
    assert (other.tokens, other.pending, other.protected) == (
        session.tokens,
        session.pending,
        session.protected,
    )
    assert taker.fed_rows == 0, "nothing was computed again"
    assert maker.generate(session, 30) == taker.generate(other, 30)
    for each, where in ((session, maker), (other, taker)):
        each.evict([(4, 8)])
        where.generate(each, 9)
    assert session.tokens == other.tokens and session.lineage == other.lineage
    mine, theirs = (
        [where.payload(block) for block in each.table[:-1]]
        for each, where in ((session, maker), (other, taker))
    )
    assert mine == theirs


def test_a_continuation_over_other_bytes_or_another_view_is_another_one() -> None:
    """The negative controls of the test above."""
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    goes_on = maker.generate(session, 20)
    for spoil in ("a slot of the partial block", "the view"):
        taker = engine()
        other = adopted(cluster, taker)
        if spoil == "the view":
            other.evict([(4, 8)])
        else:
            taker.memory[other.table[-1]][0, 0, 0, 0] ^= 1
        assert taker.generate(other, 20) != goes_on
    again = engine()
    fresh = again.session()
    (token,) = again.feed([(fresh, [session.tokens[row] for row in session.view.rows])])
    fresh.sampled(token)
    assert again.generate(fresh, 20) != goes_on, "reading what is left of the text is not the same"


def test_the_rows_of_a_partial_block_cannot_be_fed_again() -> None:
    """Why its K/V travels: those that were fed before the last cut saw more than is in view now."""
    maker = engine()
    session = compacted(maker)
    cut_at = session.events[-1].at_row
    same = {}
    for slot in range(session.full_slots, session.slot_count):
        row = session.view.rows[slot]
        there = maker.memory[session.table[-1]][:, :, :, slot % 4]
        again = maker.computed(session.table, slot, session.tokens[row], row)
        same[row >= cut_at] = bytes(there) == again
    assert same == {False: False, True: True}


def test_all_or_nothing_a_missing_block_is_an_answer_that_names_its_rows() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    for lost in (0, 2, len(chain.blocks) - 1):
        cluster.tier.held.clear()
        run(cluster.sharing().publish(session, maker, "planner", "main"))
        del cluster.tier.held[chain.blocks[lost].key]
        taker = engine()
        answer = run(cluster.sharing().adopt(taker, "planner", "main"))
        assert isinstance(answer, Missing)
        assert answer.rows == chain.blocks[lost].rows and answer.gone
        assert taker.pool.free_count == taker.pool.block_count and taker.fed_rows == 0
        taker.pool.check()


def test_all_blocks_that_are_missing_are_named() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    for lost in (1, 3):
        del cluster.tier.held[chain.blocks[lost].key]
    answer = run(cluster.sharing().adopt(engine(), "planner", "main"))
    assert isinstance(answer, Missing)
    assert answer.rows == (*chain.blocks[1].rows, *chain.blocks[3].rows)


def test_what_did_not_answer_is_not_called_gone() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    cluster.tier.silent = True
    answer = run(cluster.sharing().adopt(taker, "planner", "main"))
    assert isinstance(answer, Missing) and not answer.gone
    assert answer.rows == tuple(session.view.rows)
    cluster.tier.silent = False
    assert isinstance(run(cluster.sharing().adopt(taker, "planner", "main")), Session)


def test_large_contexts_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is all that is held twice; what arrived before a miss is not fetched again."""
    monkeypatch.setattr(sharing, "PART_BYTES", 2 * NAMESPACE.block_bytes)
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker, rows=12)
    block_count = len(session.table)
    assert block_count >= 5
    put, most = cluster.tier.put, []

    def counted(copies: Any) -> Any:
        most.append(len(copies))
        return put(copies)

    cluster.tier.put = counted  # type: ignore[method-assign]
    shared = run(cluster.sharing().publish(session, maker, "planner", "main"))
    assert shared.published.stored == block_count and max(most) == 2
    last = chain_of(NAMESPACE, session.tokens, session.events).blocks[-1].key
    copy = cluster.tier.held.pop(last)
    assert isinstance(run(cluster.sharing().adopt(taker, "planner", "main")), Missing)
    assert taker.pool.free_count == taker.pool.block_count
    cluster.tier.held[last] = copy
    fetched = cluster.tier.fetched
    other = adopted(cluster, taker)
    assert cluster.tier.fetched - fetched == 1
    assert taker.generate(other, 9) == maker.generate(session, 9)


def test_nothing_behind_a_missing_part_is_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "PART_BYTES", NAMESPACE.block_bytes)
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    del cluster.tier.held[chain.blocks[1].key]
    answer = run(cluster.sharing().adopt(taker, "planner", "main"))
    assert isinstance(answer, Missing) and answer.rows == chain.blocks[1].rows


@pytest.mark.parametrize("gone", ["closed", "swapped out"])
def test_a_prefix_for_a_session_without_its_bytes_is_refused(gone: str) -> None:
    cluster, maker = Cluster(), engine()
    session = maker.session()
    maker.feed([(session, list(range(8)))])
    session.close() if gone == "closed" else session.swap_out()
    with pytest.raises(Refused):
        run(cluster.sharing().adopt_prefix(session, maker, list(range(20))))
    assert maker.pool.free_count == maker.pool.block_count


@pytest.mark.parametrize("steps_taken", range(1, 5))
def test_an_adoption_that_is_given_up_lets_go_of_its_room(steps_taken: int) -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    run(cluster.sharing().publish(compacted(maker), maker, "planner", "main"))
    steps = cluster.sharing().adopt(taker, "planner", "main")
    for _ in range(steps_taken):
        next(steps)
    assert taker.pool.free_count < taker.pool.block_count, "it had taken room"
    steps.close()
    assert taker.pool.free_count == taker.pool.block_count
    taker.pool.check()


def test_a_session_of_another_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="another engine"):
        run(Cluster().sharing().publish(compacted(engine()), engine(), "planner", "main"))


def test_damaged_bytes_are_not_loaded() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    key = chain_of(NAMESPACE, session.tokens, session.events).blocks[1].key
    copy = bytearray(cluster.tier.held[key])
    copy[-1] ^= 1
    cluster.tier.held[key] = bytes(copy)
    with pytest.raises(Corrupt):  # real tiers answer it as a miss
        run(cluster.sharing().adopt(taker, "planner", "main"))
    assert taker.pool.free_count == taker.pool.block_count
    taker.pool.check()


@pytest.mark.parametrize(
    "forgery",
    [
        {"lineage": bytes(32)},
        {"parent": b"p" * 32},
        {"logical_start": 0},
        {"token_count": 2},
        {"approximate": True},
        {"namespace": b"n" * 32},
    ],
)
def test_edge_16_a_copy_that_says_it_is_another_block_is_missing(forgery: dict[str, object]) -> None:
    """Whole, with a right checksum, under the right key."""
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    block = chain_of(NAMESPACE, session.tokens, session.events).blocks[2]
    copy = cluster.tier.held[block.key]
    header = replace(BlockHeader.unpack(copy), **forgery)  # type: ignore[arg-type]
    cluster.tier.held[block.key] = header.pack() + copy[256:]
    answer = run(cluster.sharing().adopt(taker, "planner", "main"))
    assert isinstance(answer, Missing) and set(block.rows) <= set(answer.rows)


def test_edge_16_an_exact_lookup_finds_no_compacted_block() -> None:
    """Same ids at the same positions with another history: other keys, so other blocks."""
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    hit = run(cluster.operations().fetch(NAMESPACE, session.tokens))
    kept = chain_of(NAMESPACE, session.tokens, []).table
    assert hit.keys == tuple(block.key for block in kept)
    assert {block.header.lineage for block in hit.blocks} <= {bytes(32)}
    assert len(hit.blocks) <= 1, "the block before the first cut may be shared with anybody"
    after = chain_of(NAMESPACE, session.tokens, session.events).table
    assert not {block.key for block in after if block.lineage != bytes(32)} & set(hit.keys)


def test_tenants_never_share_what_was_computed_after_a_cut() -> None:
    other_tenant = TenantDigest(b"o" * 16)
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    taker = ByteEngine(namespace(block_tokens=4, vocab_size=100).for_tenant(other_tenant), 60)
    with pytest.raises(NamespaceError, match="tenant"):  # if ever its record were seen
        run(cluster.sharing(other_tenant).adopt(taker, "planner", "main"))
    with pytest.raises(Refused, match="another tenant"):
        run(cluster.sharing(other_tenant).adopt(engine(), "planner", "main"))
    theirs = chain_of(taker.namespace, session.tokens, session.events[:0]).table
    assert not {block.key for block in theirs} & cluster.tier.held.keys()


def test_an_engine_without_a_tenant_is_told_how_to_be_built() -> None:
    maker = ByteEngine(namespace(block_tokens=4, vocab_size=100), 60)
    session = maker.session()
    maker.feed([(session, [1, 2, 3])])
    with pytest.raises(NamespaceError, match=r"client\.bind"):
        run(Cluster().sharing().publish(session, maker, "planner", "main"))


def test_blocks_of_this_engine_are_held_not_fetched() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    before = maker.pool.free_count
    other = adopted(cluster, maker)
    full = session.full_slots // 4
    assert other.table[:full] == session.table[:full] and other.table[full:] != session.table[full:]
    assert cluster.tier.fetched == 1 and before - maker.pool.free_count == 1, "the partial block alone"
    assert maker.generate(session, 12) == maker.generate(other, 12)
    session.close()
    other.close()
    assert maker.pool.free_count == maker.pool.block_count


def test_no_room_for_all_takes_nothing() -> None:
    cluster, maker, taker = Cluster(), engine(), engine(blocks=3)
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    with pytest.raises(PoolFull):
        run(cluster.sharing().adopt(taker, "planner", "main"))
    assert (taker.pool.free_count, cluster.tier.fetched) == (3, 0)


def test_a_longer_past_than_the_model_reaches_is_refused() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    taker = ByteEngine(NAMESPACE, 60, rows_max=20)
    with pytest.raises(Refused, match="over the model's 20"):
        run(cluster.sharing().adopt(taker, "planner", "main"))
    assert taker.pool.free_count == 60


def test_a_head_moves_only_when_all_that_it_names_can_be_read() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    cluster.tier.blocks_max = 3
    shared = run(cluster.sharing().publish(session, maker, "planner", "main"))
    assert not shared.complete and shared.published.failed
    with pytest.raises(Unavailable, match="no stream 'main'"):
        run(cluster.sharing().head("planner", "main"))
    cluster.tier.blocks_max = 100
    assert run(cluster.sharing().publish(session, maker, "planner", "main")).complete
    assert all(maker.pool.holder_count(block) == 1 for block in session.table)


def test_publishing_again_writes_only_what_is_new() -> None:
    cluster, maker = Cluster(), engine()
    session, sharing = compacted(maker), cluster.sharing()
    first = run(sharing.publish(session, maker, "planner", "main"))
    assert first.published.stored == len(session.table)
    maker.generate(session, 5)
    second = run(sharing.publish(session, maker, "planner", "main"))
    assert second.published.present == len(session.table) - 2 and second.published.stored == 2
    assert run(sharing.head("planner", "main")) == second.context


def test_what_another_session_left_in_a_block_does_not_travel() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    assert 0xAB in bytes(maker.payload(session.table[-1])), "the memory is not clean"
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    tail = chain_of(NAMESPACE, session.tokens, session.events).tail
    assert tail is not None
    copy = cluster.tier.held[tail.key]
    header, payload = BlockHeader.unpack(copy), copy[256:]
    assert (header.token_count, header.logical_start) == (3, tail.rows[0])
    width = NAMESPACE.head_dim * 4
    for at in range(0, len(payload), 4 * width):
        assert payload[at + 3 * width : at + 4 * width] == bytes(width)
        assert payload[at : at + 3 * width] != bytes(3 * width)


def test_another_way_of_the_same_stream_is_a_conflict_until_told() -> None:
    cluster, maker = Cluster(), engine(200)
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    child = maker.fork(session, b"c" * 32)
    maker.generate(session, 4)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    child.evict([(4, 8)])
    maker.generate(child, 4)
    with pytest.raises(Conflict, match="replaces=True"):
        run(cluster.sharing().publish(child, maker, "planner", "main"))
    run(cluster.sharing().publish(child, maker, "planner", "main", replaces=True))
    assert run(cluster.sharing().head("planner", "main")).tokens.tolist() == child.tokens


def test_a_head_that_came_meanwhile_is_not_replaced_unseen() -> None:
    """Two threads of one client, whose memory of what it saw is one: the later write does not cover the
    head that was never compared with."""
    cluster, maker = Cluster(), engine(200)
    sharing, session, other = cluster.sharing(), compacted(maker), compacted(maker, seed=2)
    put, seen = cluster.tier.put, []

    def meanwhile(copies: Any) -> Any:
        cluster.tier.put = put  # type: ignore[method-assign]
        assert run(sharing.publish(other, maker, "planner", "main")).complete
        seen.append(len(cluster.records.written))
        return put(copies)

    cluster.tier.put = meanwhile  # type: ignore[method-assign]
    assert run(sharing.publish(session, maker, "planner", "main")).complete
    theirs, mine = cluster.records.written
    assert seen == [1] and theirs.value != mine.value
    assert mine.context == {}, "of the head that it looked at: there was none"


def test_each_of_the_siblings_must_be_a_past() -> None:
    cluster, maker = Cluster(), engine(200)
    cluster.records.concurrent = True
    session = compacted(maker)
    for each in (session, compacted(maker, seed=2)):
        run(cluster.sharing().publish(each, maker, "planner", "main", replaces=True))
    with pytest.raises(Conflict, match="not a past"):
        run(cluster.sharing().publish(session, maker, "planner", "main"))


def test_a_head_that_cannot_be_read_can_be_replaced() -> None:
    cluster, maker = Cluster(), engine()
    run(cluster.operations().state().put([(RECORD, b"damaged", None)]))
    session = compacted(maker)
    with pytest.raises(Corrupt):
        run(cluster.sharing().publish(session, maker, "planner", "main"))
    assert run(cluster.sharing().publish(session, maker, "planner", "main", replaces=True)).complete
    assert run(cluster.sharing().head("planner", "main")).row_count == session.next_row


def test_siblings_of_which_one_extends_the_other_are_one_stream() -> None:
    cluster, maker = Cluster(), engine(200)
    cluster.records.concurrent = True
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    maker.generate(session, 4)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    assert run(cluster.sharing().head("planner", "main")).row_count == session.next_row
    other = compacted(maker, seed=2)
    run(cluster.sharing().publish(other, maker, "planner", "main", replaces=True))
    with pytest.raises(Conflict, match="different ways"):
        run(cluster.sharing().head("planner", "main"))


def test_forks_in_other_processes_share_inside_the_lineage() -> None:
    """GRPO: siblings continue one compacted prompt; what they have in common is stored once."""
    cluster, maker = Cluster(), engine(200)
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    stored = len(cluster.tier.held)
    for number in range(4):
        taker = engine()
        sibling = adopted(cluster, taker)
        sibling.pending = None
        taker.feed([(sibling, [number, 7, 7, 7, 7])])
        shared = run(cluster.sharing().publish(sibling, taker, "planner", f"sibling {number}"))
        assert shared.published.present >= sibling.full_slots // 4 - 2
        assert len(cluster.tier.held) - stored <= 2 + 1, "its own blocks alone"
        stored = len(cluster.tier.held)
    strangers = engine()
    other = compacted(strangers, seed=5)
    assert not {strangers.pool.key_of(block) for block in other.table} & cluster.tier.held.keys()


def test_a_prompt_that_another_process_has_read_is_not_computed_again() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    prompt = list(range(1, 23))
    session = maker.session()
    maker.feed([(session, prompt)])
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    other = taker.session()
    assert run(cluster.sharing().adopt_prefix(other, taker, prompt)) == 20
    assert taker.feed([(other, prompt[20:])]) == maker.feed([(fresh := maker.session(), prompt)])
    assert (taker.fed_rows, taker.loads, other.tokens) == (2, 5, fresh.tokens)
    other.check()
    for row in (0, 9):
        changed = [*prompt[:row], 99, *prompt[row + 1 :]]
        assert run(cluster.sharing().adopt_prefix(taker.session(), taker, changed)) == row // 4 * 4
    short = taker.session()
    assert run(cluster.sharing().adopt_prefix(short, taker, prompt[:4])) == 0, "one token is left to compute"
    taker.feed([(short, prompt[:4])])
    assert run(cluster.sharing().adopt_prefix(short, taker, prompt[4:13])) == 8
    taker.feed([(short, prompt[12:13])])
    assert run(cluster.sharing().adopt_prefix(short, taker, prompt[13:])) == 0, "not inside a block"
    taker.pool.check()


def test_siblings_fetch_what_one_of_them_was_fed_behind_the_cut() -> None:
    """And nobody else does: same tokens, same rows, another past."""
    cluster, maker = Cluster(), engine(200)
    session = maker.session()
    maker.feed([(session, list(range(1, 25)))])
    session.evict([(4, 12)])
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    said = list(range(50, 70))
    maker.feed([(session, said)])
    run(cluster.sharing().publish(session, maker, "planner", "first sibling"))
    taker = engine()
    sibling = adopted(cluster, taker)
    assert run(cluster.sharing().adopt_prefix(sibling, taker, said)) == 16
    taker.feed([(sibling, said[16:])])
    assert (sibling.tokens, taker.fed_rows) == (session.tokens, 4)
    full = session.full_slots // 4
    mine = [maker.payload(block) for block in session.table[:full]]
    assert mine == [taker.payload(block) for block in sibling.table[:full]]
    stranger = taker.session()
    taker.feed([(stranger, [2, *range(2, 25)])])
    stranger.evict([(4, 12)])
    assert run(cluster.sharing().adopt_prefix(stranger, taker, said)) == 0


def test_a_prefix_is_taken_as_far_as_there_is_room() -> None:
    cluster, maker, taker = Cluster(), engine(), engine(blocks=3)
    prompt = list(range(1, 26))
    session = maker.session()
    maker.feed([(session, prompt)])
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    other = taker.session()
    assert run(cluster.sharing().adopt_prefix(other, taker, prompt)) == 12
    assert taker.pool.free_count == 0
    other.close()
    assert taker.pool.free_count == 3
    cluster.tier.held.clear()
    assert run(cluster.sharing().adopt_prefix(taker.session(), taker, prompt)) == 12, "of its own pool"


def test_events_reach_the_journal_of_whoever_goes_on() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    log: list[Event] = []
    other = run(cluster.sharing().adopt(taker, "planner", "main", journal=log.append))
    assert isinstance(other, Session)
    other.evict([(4, 8)])
    assert log == other.events and log[:-1] == session.events


def test_dropped_events_are_refused() -> None:
    """The negative control of adoption: a record whose events are lost is not adopted as a full context."""
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    context = run(cluster.sharing().publish(session, maker, "planner", "main")).context
    value = replace(context, events=context.events[:-1]).encode()
    run(cluster.operations().state().put([(RECORD, value, None)]))
    with pytest.raises(Corrupt, match="does not follow"):
        run(cluster.sharing().adopt(taker, "planner", "main"))


def test_fillers_and_repetitions_travel() -> None:
    cluster, maker = Cluster(), engine()
    session = maker.session()
    recorder = Recorder(session, "r")
    maker.feed([(session, [1, 2, 3, 4, 5, 6])])
    recorder.filler(2)
    context = run(cluster.sharing().publish(session, maker, "planner", "main", recorder=recorder)).context
    assert context.filler_runs == ((4, 2),) and context.repeated_runs == ()
    assert StreamContext.decode(context.encode()) == context
    assert len(context.encode()) < contexts.CONTEXT_BYTES_MAX


def test_a_session_without_its_bytes_cannot_be_published() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    session.swap_out()
    with pytest.raises(ValueError, match="not in memory"):
        run(cluster.sharing().publish(session, maker, "planner", "main"))


def test_a_journal_that_refuses_the_past_leaves_nothing_behind() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    run(cluster.sharing().publish(compacted(maker), maker, "planner", "main"))

    def full(event: Event) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        run(cluster.sharing().adopt(taker, "planner", "main", journal=full))
    assert taker.pool.free_count == taker.pool.block_count


def test_a_span_that_was_dropped_for_good_is_not_adopted() -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    session = compacted(maker)
    kept, dropped = (session.evict([(4, 8)], archive=True).span for _ in range(2))
    session.drop_archived(dropped, moved=False)
    run(cluster.sharing().publish(session, maker, "planner", "main"))
    other = adopted(cluster, taker)
    assert set(other.archive) == {kept}
    assert other.archive[kept].keys == session.archive[kept].keys
    assert isinstance(run(Archive(cluster.sharing(), taker, bytes_max=0).bring_back(other, kept)), Event)


def test_cutting_while_others_read_does_not_pull_blocks_from_under_a_transfer() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    table = chain_of(NAMESPACE, session.tokens, session.events).table
    was = {known.key: bytes(maker.payload(block)) for block, known in zip(session.table, table, strict=False)}
    steps = cluster.sharing().publish(session, maker, "planner", "main")
    get = cluster.records.record_get

    def cut_meanwhile(keys: Any, least: Any) -> Any:
        session.close()
        stranger = maker.session()
        maker.feed([(stranger, [1] * 4 * maker.pool.free_count)])
        return get(keys, least)

    cluster.records.record_get = cut_meanwhile  # type: ignore[method-assign, assignment]
    assert run(steps).complete
    assert {key: cluster.tier.held[key][256:] for key in was} == was


@pytest.mark.parametrize("message_count", range(6))
def test_a_conversation_goes_on_with_its_turns_and_fillers(message_count: int) -> None:
    cluster, maker, taker = Cluster(), engine(), engine()
    markup = Markup(frozenset({99}), separator=(98,), filler=0)
    session = maker.session()
    recorder, talk = Recorder(session, "r"), Conversation(session, markup)
    say(maker, talk, recorder, [[number + 1, 7, 99, 98] for number in range(message_count)], [50, 51])
    if session.turns:
        session.evict([session.turns[0]], reason="turns")
    sharing = cluster.sharing()
    run(sharing.publish(session, maker, "planner", "main", recorder=recorder))
    context = run(sharing.head("planner", "main"))
    other = run(sharing.adopt(taker, "planner", "main", context=context))
    assert isinstance(other, Session)
    again = Conversation.resumed(other, markup, filler_rows=context.filler_rows)
    heard = Recorder(other, "r")
    heard.filler_rows, heard.repeated_rows = context.filler_rows, context.repeated_rows
    for engine_of, conversation, notes in ((maker, talk, recorder), (taker, again, heard)):
        say(engine_of, conversation, notes, [], [52], end=99)
        say(engine_of, conversation, notes, [[9, 9, 9, 99, 98], [8, 99, 98]], [50], end=99)
        say(engine_of, conversation, notes, [[9, 99, 98]], [])
    assert (other.tokens, other.turns, other.protected) == (session.tokens, session.turns, session.protected)
    assert heard.text() == recorder.text() and again.filler_rows == talk.filler_rows
    assert again.message_count == talk.message_count


def say(
    maker: ByteEngine,
    talk: Conversation,
    recorder: Recorder,
    messages: list[list[int]],
    prefix: list[int],
    end: int | None = None,
) -> None:
    """Messages of others and the beginning of an answer; with ``end``, the rest of one, and its end."""
    session = talk.session

    def feed(tokens: Sequence[int], filler: Sequence[int]) -> None:
        if tokens:
            maker.feed([(session, tokens)])
            recorder.filler_at([session.next_row - len(tokens) + at for at in filler])
            talk.scan()

    if messages or end is None:
        chunk = talk.admit(messages, prefix)
        feed(chunk.tokens, chunk.filler)
    else:
        feed(prefix, ())
    if end is not None:
        chunk = talk.finish(end)
        feed(chunk.tokens, chunk.filler)


# -- the clients' faces


def test_both_clients_publish_adopt_and_restore() -> None:
    cluster, maker = Cluster(), engine()
    session = compacted(maker)
    span = session.evict([(4, 8)], archive=True).span
    with client(cluster) as kv:
        assert kv.bind(namespace(block_tokens=4, vocab_size=100)).id == NAMESPACE.id
        assert kv.archive(maker, bytes_max=0).settle([session])[0].moved
        assert kv.agent("planner").stream("main").publish(session, maker).complete
        assert kv.adopt_prefix(maker.session(), maker, [99] * 9) == 0
        assert kv.agent("other").stream_of("planner", "main").context().row_count == session.next_row
    expected = maker.generate(session, 9)

    async def ask() -> None:
        async with async_client(cluster) as kv:
            taker = engine()
            prefix = await kv.adopt_prefix(taker.session(), taker, session.tokens)
            assert prefix == 4, "what was read before the first cut is anybody's"
            stream = kv.agent("other").stream_of("planner", "main")
            assert (await stream.context()).events == tuple(session.events)
            other = await stream.adopt(taker)
            assert isinstance(other, Session) and taker.generate(other, 9) == expected
            spans = kv.archive(taker, bytes_max=0)
            assert isinstance(await spans.bring_back(other, span), Event)
            assert await spans.settle([other]) == []
            event = other.evict([(4, 8)], archive=True)
            assert (await spans.put_away(other, event.span)).moved
            assert (await kv.agent("other").stream("mine").publish(other, taker)).complete

    asyncio.run(ask())


def client(cluster: Cluster) -> Client:
    return Client(cluster.operations(), Peers(IDENTITY), lambda: {}, lambda: None)


def async_client(cluster: Cluster) -> AsyncClient:
    async def close() -> None:
        return

    return AsyncClient(cluster.operations(), AsyncPeers(IDENTITY), lambda: {}, close)
