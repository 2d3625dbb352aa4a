"""What a table's keys are follows from tokens and events, whoever computes them."""

from __future__ import annotations

import pytest

from kvcomm.errors import Corrupt
from kvcomm.namespace import TenantDigest
from kvcomm.streams.chain import chain_of, tail_key
from kvcomm.streams.events import Event, SlotRange, SpanId
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from tests.kvcomm.streams.pasts import NAMESPACE, told

TENANT = TenantDigest(b"t" * 16)


@pytest.mark.parametrize("seed", range(30))
def test_the_chain_of_any_story_is_the_sessions_table(seed: int) -> None:
    session = told(seed)
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    full = session.full_slots // session.block_tokens
    assert [block.key for block in chain.table] == [
        session.pool.key_of(block) for block in session.table[:full]
    ]
    assert len(chain.blocks) == len(session.table)
    assert (chain.view, chain.lineage) == (session.view, session.lineage)
    assert [row for block in chain.blocks for row in block.rows] == list(session.view.rows)
    for span, archived in session.archive.items():
        assert tuple(block.key for block in chain.archived[span]) == archived.keys


def test_a_parent_may_be_cut_and_stays_the_parent() -> None:
    session = Session(told(0).pool, NAMESPACE, rows_max=100)
    session.commit(session.plan([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]))
    before = chain_of(NAMESPACE, session.tokens, session.events).table
    session.evict([(4, 8)])
    after = chain_of(NAMESPACE, session.tokens, session.events).table
    assert after == [before[0], before[2]]
    assert after[1].parent == before[1].key


def test_what_several_ranges_took_comes_back_in_its_order() -> None:
    session = Session(BlockPool(20), NAMESPACE, rows_max=100)
    session.commit(session.plan(list(range(22))))
    span = session.evict([(0, 4), (8, 16)], archive=True).span
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    assert tuple(block.key for block in chain.archived[span]) == session.archive[span].keys
    session.commit(session.plan([1, 2]))
    session.restore(span, 4)
    chain = chain_of(NAMESPACE, session.tokens, session.events)
    assert [block.key for block in chain.table] == list(map(session.pool.key_of, session.table))
    assert [row for block in chain.blocks for row in block.rows] == list(session.view.rows)


def test_a_span_whose_name_is_not_that_of_what_was_cut_is_refused() -> None:
    """Its digest is right: any trainer follows such a log, and an engine would restore another's rows."""
    session = Session(BlockPool(20), NAMESPACE, rows_max=100)
    session.commit(session.plan(list(range(12))))
    forged = session.view.stamped(Event("evict", 12, (SlotRange(4, 8),), SpanId(b"s" * 32)))
    with pytest.raises(Corrupt, match="not named by what was cut"):
        chain_of(NAMESPACE, session.tokens, [forged])


def test_a_tail_is_named_by_all_that_it_was_computed_from() -> None:
    session = told(3)
    tail = chain_of(NAMESPACE, [1, 2, 3, 4, 5, 6], []).tail
    assert tail is not None and tail.rows == (4, 5)
    assert chain_of(NAMESPACE, [1, 2, 3, 4], []).tail is None
    keys = {
        tail.key,
        tail_key(NAMESPACE, tail.parent, tail.lineage, [5, 7], tail.rows),
        tail_key(NAMESPACE, tail.parent, tail.lineage, [5], [4]),
        tail_key(NAMESPACE, tail.parent, tail.lineage, [5, 6], [4, 6]),
        tail_key(NAMESPACE, tail.parent, b"l" * 32, [5, 6], tail.rows),
        tail_key(NAMESPACE, tail.key, tail.lineage, [5, 6], tail.rows),
        tail_key(NAMESPACE.for_tenant(TENANT), tail.parent, tail.lineage, [5, 6], tail.rows),
    }
    assert len(keys) == 7
    assert not keys & {session.pool.key_of(block) for block in session.table}


@pytest.mark.parametrize(
    "event",
    [
        Event("evict", 6, (SlotRange(4, 6),)),
        Event("evict", 6, (SlotRange(1, 4),)),
        Event("evict", 6, (SlotRange(0, 4),), span=b"s" * 32),  # type: ignore[arg-type]  # named by nothing
        Event("restore", 6, span=b"s" * 32, insert_at=0),  # type: ignore[arg-type]
        Event("evict", 7, (SlotRange(0, 4),)),
    ],
)
def test_edge_25_events_that_cannot_happen_are_refused(event: Event) -> None:
    with pytest.raises(Corrupt):
        chain_of(NAMESPACE, [1, 2, 3, 4, 5, 6], [event])
