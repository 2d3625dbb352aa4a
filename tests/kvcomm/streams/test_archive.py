"""Spans leave memory and come back whole, or are lost in plain sight."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcomm.errors import NamespaceError, PoolFull
from kvcomm.streams.admission import Admission, Granted, Place
from kvcomm.streams.archive import Archive, SpanLost
from kvcomm.streams.chain import chain_of
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.events import Event, SpanId
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.session import Session
from tests.kvcomm.streams.byte_engine import ByteEngine
from tests.kvcomm.streams.clusters import TENANT, Cluster
from tests.kvcomm.test_blockplane import run
from tests.namespaces import namespace

NAMESPACE = namespace(block_tokens=4, vocab_size=100).for_tenant(TENANT)
BLOCK = NAMESPACE.block_bytes


def archive(cluster: Cluster, engine: ByteEngine, bytes_max: int = 0) -> Archive:
    return Archive(cluster.sharing(), engine, bytes_max=bytes_max)


def with_span(engine: ByteEngine, seed: int = 1) -> tuple[Session, SpanId]:
    """24 rows, of which 8 are archived, and a pending token."""
    draw = random.Random(seed)
    session = engine.session()
    (token,) = engine.feed([(session, [draw.randrange(100) for _ in range(22)])])
    session.sampled(token)
    event = session.evict([(4, 12)], archive=True)
    engine.generate(session, 2)
    return session, event.span


def test_a_span_goes_away_and_comes_back_as_it_was() -> None:
    cluster, engine, other = Cluster(), ByteEngine(NAMESPACE, 30), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    stays, same = with_span(other)
    assert span == same
    free = engine.pool.free_count
    assert run(archive(cluster, engine).put_away(session, span)).moved
    assert engine.pool.free_count == free + 2 and session.archive[span].blocks == ()
    engine.pool.take(engine.pool.free_count)  # somebody uses the memory
    engine.pool.release([block for block in range(30) if block not in session.table])  # type: ignore[misc]
    event = run(archive(cluster, engine).bring_back(session, span))
    assert isinstance(event, Event) and event.kind == "restore"
    assert cluster.tier.fetched == 2
    stays.restore(span)
    assert engine.generate(session, 20) == other.generate(stays, 20)
    session.check()
    engine.pool.check()


def test_a_span_in_memory_comes_back_without_the_cluster() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    assert isinstance(run(archive(cluster, engine).bring_back(session, span)), Event)
    assert not cluster.tier.held


def test_a_span_whose_memory_nobody_has_used_since_is_not_fetched() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    run(archive(cluster, engine).put_away(session, span))
    assert isinstance(run(archive(cluster, engine).bring_back(session, span)), Event)
    assert cluster.tier.fetched == 0


def test_what_finds_no_room_stays_where_it_is() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    cluster.tier.blocks_max = 1
    put = run(archive(cluster, engine).put_away(session, span))
    assert not put.moved and put.published.failed == 1
    assert len(session.archive[span].blocks) == 2
    assert isinstance(run(archive(cluster, engine).bring_back(session, span)), Event)
    session.check()


def lose(cluster: Cluster, engine: ByteEngine, session: Session, span: SpanId, index: int = 1) -> None:
    """The span is put away, its memory used, and one of its blocks gone."""
    assert run(archive(cluster, engine).put_away(session, span)).moved
    del cluster.tier.held[session.archive[span].keys[index]]
    free = engine.pool.take(engine.pool.free_count)
    engine.pool.release(free)


def test_edge_22_a_lost_span_is_told_and_its_text_read_again_as_new_rows() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    rows = session.archive[span].rows
    lose(cluster, engine, session, span)
    free, view = engine.pool.free_count, list(session.view.rows)
    lost = run(archive(cluster, engine).bring_back(session, span))
    assert lost == SpanLost(span, rows, rows[4:], gone=True)
    assert (engine.pool.free_count, list(session.view.rows)) == (free, view), "nothing was changed"
    assert span in session.archive
    recorder, before, pending = Recorder(session, "r"), session.next_row, session.pending
    again = archive(cluster, engine).repeat(session, lost, recorder)
    assert (again.first_row, again.row_count) == (before + 1, 8)
    assert session.tokens[before] == pending
    assert session.tokens[before + 1 :] == [session.tokens[row] for row in rows], "the same text"
    assert list(session.view.rows)[-8:] == list(range(before + 1, before + 9)), "at new positions"
    assert span not in session.archive
    rollout = recorder.rollout()
    assert rollout.repeated_rows == tuple(range(before + 1, before + 9)), "and it says so"
    session.check()
    with pytest.raises(ValueError, match="no such span"):
        archive(cluster, engine).repeat(session, lost, recorder)
    assert session.next_row == before + 9, "once"


def test_repeating_without_room_changes_nothing() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    lose(cluster, engine, session, span)
    lost = run(archive(cluster, engine).bring_back(session, span))
    assert isinstance(lost, SpanLost)
    taken, counts = engine.pool.take(engine.pool.free_count), StreamCounts()
    away = Archive(cluster.sharing(), engine, bytes_max=0, counts=counts)
    with pytest.raises(PoolFull):
        away.repeat(session, lost)
    assert span in session.archive
    engine.pool.release(taken)
    away.repeat(session, lost)
    assert counts.metrics.snapshot()['kvcomm_streams_rows_total{what="reprefilled"}'] == 8


def test_edge_23_a_restore_without_room_takes_nothing_and_fetches_nothing() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    assert run(archive(cluster, engine).put_away(session, span)).moved
    taken = engine.pool.take(engine.pool.free_count - 1)
    with pytest.raises(PoolFull):
        run(archive(cluster, engine).bring_back(session, span))
    assert (engine.pool.free_count, cluster.tier.fetched) == (1, 0)
    engine.pool.release(taken[:1])
    room = engine.pool.take(2)
    event = run(archive(cluster, engine).bring_back(session, span, room=room))
    assert isinstance(event, Event) and set(room) <= set(session.table)


def test_room_beyond_what_is_needed_is_given_back_and_too_little_is_refused() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    assert run(archive(cluster, engine).put_away(session, span)).moved
    free = engine.pool.free_count
    with pytest.raises(ValueError, match="room of 1 blocks for 2"):
        run(archive(cluster, engine).bring_back(session, span, room=engine.pool.take(1)))
    assert engine.pool.free_count == free
    room = engine.pool.take(2)  # empty blocks go first: the pool still has the span's
    assert isinstance(run(archive(cluster, engine).bring_back(session, span, room=room)), Event)
    assert cluster.tier.fetched == 0 and engine.pool.free_count == free - 2
    engine.pool.check()


@pytest.mark.parametrize("meanwhile", ["closed", "restored"])
def test_a_span_that_goes_meanwhile_is_published_whole(meanwhile: str) -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 30)
    session, span = with_span(engine)
    blocks = session.archive[span].blocks
    was = dict(zip(session.archive[span].keys, map(engine.payload, blocks), strict=True))
    lookup = cluster.tier.lookup

    def gone(keys: Any) -> Any:
        if meanwhile == "closed":
            session.close()
            stranger = engine.session()
            engine.feed([(stranger, [1] * 4 * engine.pool.free_count)])
        else:
            session.restore(span)
        return lookup(keys)

    cluster.tier.lookup = gone  # type: ignore[method-assign]
    assert run(archive(cluster, engine).put_away(session, span)).moved
    assert {key: copy[256:] for key, copy in cluster.tier.held.items()} == was
    assert {*blocks} <= {*session.table} or meanwhile == "closed"
    session.check()
    engine.pool.check()


@pytest.mark.parametrize("wrong", ["span", "place", "lost", "tenant"])
def test_room_that_was_handed_over_is_given_back_whatever_happens(wrong: str) -> None:
    cluster = Cluster()
    engine = ByteEngine(NAMESPACE if wrong != "tenant" else namespace(block_tokens=4, vocab_size=100), 30)
    session, span = with_span(engine)
    if wrong == "lost":
        lose(cluster, engine, session, span)
    elif wrong != "tenant":
        run(archive(cluster, engine).put_away(session, span))
        engine.pool.release(engine.pool.take(engine.pool.free_count))
    else:
        session.drop_archived(span, moved=True)
    free = engine.pool.free_count
    room = engine.pool.take(2)
    away = archive(cluster, engine)
    if wrong == "lost":
        assert isinstance(run(away.bring_back(session, span, room=room)), SpanLost)
    else:
        asked = SpanId(b"s" * 32) if wrong == "span" else span
        with pytest.raises((ValueError, NamespaceError)):
            run(away.bring_back(session, asked, 3 if wrong == "place" else None, room=room))
    assert engine.pool.free_count == free
    engine.pool.check()


def test_fault_b10_another_node_restores_this_rollouts_text_and_no_other() -> None:
    """Two engines count their sessions and spans alike; spans are named by content."""
    cluster = Cluster()
    one, two, third = (ByteEngine(NAMESPACE, 30) for _ in range(3))
    first, span = with_span(one, seed=1)
    second, other_span = with_span(two, seed=2)
    assert span != other_span
    for engine, session, mine in ((one, first, span), (two, second, other_span)):
        run(archive(cluster, engine).put_away(session, mine))
        run(cluster.sharing().publish(session, engine, "agent", f"{mine.hex()}"))
    taken = run(cluster.sharing().adopt(third, "agent", f"{other_span.hex()}"))
    assert isinstance(taken, Session) and list(taken.archive) == [other_span]
    assert isinstance(run(archive(cluster, third).bring_back(taken, other_span)), Event)
    run(archive(cluster, two).bring_back(second, other_span))
    assert third.generate(taken, 20) == two.generate(second, 20)
    with pytest.raises(ValueError, match="no such span"):
        run(archive(cluster, third).bring_back(taken, span))


def test_archived_memory_is_bounded_and_the_coldest_goes_first() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 100)
    cold, cold_span = with_span(engine, seed=1)
    warm, warm_span = with_span(engine, seed=2)
    engine.generate(cold, 5)
    counts = StreamCounts()
    away = Archive(cluster.sharing(), engine, bytes_max=2 * BLOCK, counts=counts)
    assert away.memory_bytes([cold, warm]) == 4 * BLOCK
    assert [put.span for put in run(away.settle([warm, cold]))] == [cold_span]
    assert away.memory_bytes([cold, warm]) == 2 * BLOCK
    assert counts.metrics.snapshot()["kvcomm_streams_archive_bytes"] == 2 * BLOCK
    assert warm.archive[warm_span].blocks and not cold.archive[cold_span].blocks
    assert run(away.settle([warm, cold])) == []


def test_what_forks_share_counts_once_and_leaves_memory_for_all_of_them() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 100)
    parent, span = with_span(engine)
    child = engine.fork(parent, b"c" * 32)
    away = archive(cluster, engine, bytes_max=0)
    assert away.memory_bytes([parent, child]) == 2 * BLOCK
    free = engine.pool.free_count
    (put,) = run(away.settle([parent, child]))
    assert put.moved and engine.pool.free_count == free + 2
    for each in (parent, child):
        assert isinstance(run(away.bring_back(each, span)), Event)
    assert engine.generate(parent, 9) == engine.generate(child, 9)


def test_a_span_is_as_cold_as_for_the_fork_that_went_on_longest() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 100)
    parent, shared = with_span(engine, seed=1)
    child = engine.fork(parent, b"c" * 32)
    other, alone = with_span(engine, seed=2)
    engine.generate(other, 5)
    engine.generate(parent, 9)
    away = archive(cluster, engine, bytes_max=2 * BLOCK)
    assert [put.span for put in run(away.settle([parent, other, child]))] == [shared]
    assert child.archive[shared].blocks == () and other.archive[alone].blocks


def test_a_span_that_cannot_move_stays_and_the_next_is_tried() -> None:
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 100)
    cold, cold_span = with_span(engine, seed=1)
    warm, warm_span = with_span(engine, seed=2)
    engine.generate(cold, 5)
    cluster.tier.blocks_max = 2
    blocks = chain_of(NAMESPACE, warm.tokens, warm.events).archived[warm_span]
    run(cluster.sharing().put(engine, list(zip(warm.archive[warm_span].blocks, blocks, strict=True))))
    puts = run(archive(cluster, engine).settle([cold, warm]))
    assert [(put.span, put.moved) for put in puts] == [(cold_span, False), (warm_span, True)]


def test_fault_b14_every_session_that_wants_a_span_back_gets_it() -> None:
    """32 sessions and room for three restores at a time: who finds none holds none and comes again."""
    cluster = Cluster()
    engine = ByteEngine(NAMESPACE, 32 * 4 + 3 * 3)  # a running session needs one more block than its span's
    away = archive(cluster, engine)
    waiting: list[tuple[Session, SpanId]] = []
    for seed in range(32):
        session, span = with_span(engine, seed)
        assert run(away.put_away(session, span)).moved
        waiting.append((session, span))
    running: list[Session] = []
    turned_away = 0
    for _ in range(40):
        begun = [(each, away.bring_back(*each)) for each in waiting]  # all at once, step by step
        waiting = []
        while begun:
            each, steps = begun.pop(0)
            try:
                next(steps)
                begun.append((each, steps))
            except StopIteration as stop:
                running += [each[0]] if isinstance(stop.value, Event) else []
            except PoolFull:
                turned_away += 1
                waiting.append(each)
            engine.pool.check()
        for session in running:
            engine.generate(session, 2)
            session.close()
        running = []
    assert not waiting and turned_away > 32
    assert engine.pool.free_count == engine.pool.block_count


def test_fault_b14_in_line_for_room_everybody_is_served_in_turn() -> None:
    """The same through ``Admission``: who waits holds nothing, and nobody is overtaken."""
    cluster, engine = Cluster(), ByteEngine(NAMESPACE, 32 * 4 + 3 * 3)
    away = archive(cluster, engine)
    line = Admission(engine.pool, waiting_max=32, spare_blocks=3)
    asking: dict[Place, tuple[Session, SpanId]] = {}
    for seed in range(32):
        session, span = with_span(engine, seed)
        assert run(away.put_away(session, span)).moved
        asking[line.ask(2, now=0.0, deadline=100.0)] = (session, span)
    order = list(asking)
    served: list[Place] = []
    for now in range(1, 40):
        running = []
        for granted in line.serve(float(now)):
            assert isinstance(granted, Granted)
            session, span = asking.pop(granted.place)
            assert isinstance(run(away.bring_back(session, span, room=granted.blocks)), Event)
            served.append(granted.place)
            running.append(session)
        for session in running:
            engine.generate(session, 2)
            session.close()
        engine.pool.check()
    assert served == order and not asking
    assert engine.pool.free_count == engine.pool.block_count
