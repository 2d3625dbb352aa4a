"""What is counted of streams, and where it is seen."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from kvcomm.aio import AsyncClient
from kvcomm.client import Client
from kvcomm.errors import Refused
from kvcomm.metrics import Metrics
from kvcomm.rpc import AsyncPeers, Peers
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from tests.kvcomm.streams.clusters import Cluster
from tests.kvcomm.test_client import IDENTITY
from tests.namespaces import namespace


def feed(counts: StreamCounts, *feeds: tuple[Session, list[int]]) -> None:
    for session, tokens in feeds:
        session.commit(session.plan(tokens))
    counts.fed(feeds)


def seen(counts: StreamCounts) -> dict[str, float]:
    """What is not 0, by its name without the common part."""
    numbers = counts.metrics.snapshot()
    return {
        name.removeprefix("kvcomm_streams_").replace("_total", ""): number
        for name, number in numbers.items()
        if name.startswith("kvcomm_streams_") and number
    }


@pytest.fixture
def session() -> Session:
    return Session(BlockPool(50), namespace(block_tokens=4, vocab_size=100), rows_max=1_000)


def test_rows_and_events_are_counted(session: Session):
    counts = StreamCounts()
    counts.watch(session)
    feed(counts, (session, [1] * 18))
    assert seen(counts) == {'rows{what="fed"}': 18, "live_slots": 18}
    span = session.evict([(4, 12)], archive=True).span
    session.evict([(4, 8)])
    feed(counts, (session, [2]))
    session.restore(span)
    session.set_weights(1)
    assert seen(counts) == {
        'rows{what="fed"}': 19,
        'rows{what="evicted"}': 12,
        'rows{what="kept"}': 10 + 6,
        'rows{what="restored"}': 8,
        'events{kind="evict"}': 2,
        'events{kind="restore"}': 1,
        'events{kind="weights"}': 1,
        "live_slots": 7,
    }


def test_a_session_that_nobody_needs_is_gone_at_once(session: Session):
    """With the bytes that an engine keeps for it, and not when a collector happens to look."""
    counts = StreamCounts()
    gc.disable()
    try:
        child = session.fork(bytes(32))
        counts.forked(child)
        last = ref(child)
        child.close()
        del child
        assert last() is None
    finally:
        gc.enable()


def test_a_batch_is_one_forward_pass_and_its_slots_are_added_up(session: Session):
    counts = StreamCounts()
    other = Session(session.pool, session.namespace, rows_max=100)
    feed(counts, (session, [1] * 5), (other, [1] * 3))
    feed(counts, (session, [1]), (other, [1]))
    assert seen(counts) == {'rows{what="fed"}': 10, "live_slots": 10}


def test_a_fork_is_counted_once_and_its_later_events_too(session: Session):
    counts = StreamCounts()
    counts.watch(session)
    feed(counts, (session, [1] * 9))
    child = session.fork(bytes(32))
    counts.forked(child)
    child.evict([(0, 4)])
    assert seen(counts)['events{kind="fork"}'] == 1
    assert seen(counts)['events{kind="evict"}'] == 1


def test_an_event_that_the_journal_refuses_is_not_counted(session: Session):
    def refuse(event: Event) -> None:
        raise Refused("the disk is full")

    counts = StreamCounts()
    session.journal = refuse
    counts.watch(session)
    feed(counts, (session, [1] * 9))
    with pytest.raises(Refused):
        session.evict([(0, 4)])
    assert 'events{kind="evict"}' not in seen(counts)
    assert not session.events


def test_what_others_report():
    counts = StreamCounts()
    counts.reprefilled(7)
    counts.archived(4096)
    counts.archived(1024)
    counts.mismatch(1e-4, 2e-3)
    assert seen(counts) == {
        'rows{what="reprefilled"}': 7,
        "archive_bytes": 1024,
        'mismatch_kl{over="mean"}': 1e-4,
        'mismatch_kl{over="worst"}': 2e-3,
    }


def test_several_count_into_the_same_metrics(session: Session):
    metrics = Metrics("client")
    for _ in range(2):
        feed(StreamCounts(metrics), (session, [1, 2]))
    assert metrics.snapshot()['kvcomm_streams_rows_total{what="fed"}'] == 4


def test_both_faces_of_a_client_count_into_its_metrics():
    operations = Cluster().operations()

    async def close() -> None:
        pass

    blocking = Client(operations, Peers(IDENTITY), operations.metrics.snapshot, lambda: None)
    concurrent = AsyncClient(operations, AsyncPeers(IDENTITY), operations.metrics.snapshot, close)
    for client in (blocking, concurrent):
        client.stream_counts().reprefilled(3)
    assert blocking.metrics() == concurrent.metrics()
    assert blocking.metrics()['kvcomm_streams_rows_total{what="reprefilled"}'] == 6
