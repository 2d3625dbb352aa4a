"""The record of a compacted context: one form, damage is noticed, and nothing in it is believed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcomm.block import BlockKey, Incarnation
from kvcomm.errors import Corrupt, NamespaceError, TooLarge
from kvcomm.manifest import Manifest
from kvcomm.namespace import TenantDigest
from kvcomm.streams.chain import chain_of
from kvcomm.streams.context import ArchivedSpan, StreamContext, newest
from kvcomm.streams.events import Event, Run, SpanId
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from tests.kvcomm.streams.pasts import NAMESPACE, told
from tests.namespaces import namespace


def context_of(session: Session) -> StreamContext:
    chain = chain_of(session.namespace, session.tokens, session.events)
    return StreamContext.of(session, chain, producer=Incarnation(7), policy="turns")


@pytest.mark.parametrize("seed", range(20))
def test_any_story_travels_and_verifies(seed: int) -> None:
    session = told(seed)
    session.protect(3)
    session.sampled(seed)
    session.end_turn(session.slot_count - 1)
    context = context_of(session)
    again = StreamContext.decode(context.encode())
    assert again == context
    chain = again.verify(NAMESPACE)
    assert list(chain.view.rows) == list(session.view.rows)
    assert (again.tokens.tolist(), again.pending, again.protected) == (session.tokens, seed, 4)
    assert (again.view_digest, again.weights_version) == (session.view.digest, session.view.weights_version)
    assert {each.span for each in again.archived} == session.archive.keys()


def test_every_damaged_byte_and_every_cut_is_noticed() -> None:
    data = context_of(told(1, steps=12)).encode()
    for at in range(len(data)):
        with pytest.raises(Corrupt):
            StreamContext.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Corrupt):
            StreamContext.decode(data[:at])
    with pytest.raises(Corrupt):
        StreamContext.decode(data + b"\0")


def test_edge_16_a_compacted_context_and_an_exact_manifest_are_never_taken_for_each_other() -> None:
    with pytest.raises(Corrupt, match="not a version 1 manifest"):
        Manifest.decode(context_of(told(1)).encode())
    manifest = Manifest.empty(NAMESPACE).append(list(range(60)), NAMESPACE)
    with pytest.raises(Corrupt, match="not a version 1 stream"):
        StreamContext.decode(manifest.encode())


def test_what_does_not_follow_from_tokens_and_events_is_refused() -> None:
    """Each change is well-formed and would be believed by who trusts the record."""
    session = told(5)
    context = context_of(session)
    assert context.events and context.archived
    other = BlockKey(b"k" * 32)
    tokens = bytearray(context.token_bytes)
    tokens[0] ^= 1
    runs, last = context.view_runs[:-1], context.view_runs[-1]
    for change in (
        {"keys": (*context.keys[:-1], other)},
        {"keys": context.keys[::-1]},
        {"lineage": b"l" * 32},
        {"token_bytes": bytes(tokens)},
        {"events": context.events[:-1]},
        {"events": context.events[1:]},
        {"events": (*context.events, context.events[-1])},
        {"view_runs": (*runs, (last[0] - 1, last[1]))},
        {"archived": (context.archived[0]._replace(keys=(other,)), *context.archived[1:])},
        {"archived": (context.archived[0]._replace(span=SpanId(b"s" * 32)), *context.archived[1:])},
        {"archived": (ArchivedSpan(SpanId(bytes(32)), ()), *context.archived)},
    ):
        with pytest.raises(Corrupt):
            replace(context, **change).verify(NAMESPACE)
    for index, event in enumerate(context.events):
        late = (
            *context.events[:index],
            replace(event, at_row=event.at_row + 1),
            *context.events[index + 1 :],
        )
        with pytest.raises(Corrupt):
            replace(context, events=late).verify(NAMESPACE)


def test_a_token_that_the_model_does_not_have_is_refused_though_it_is_only_pending() -> None:
    context = context_of(told(8))
    with pytest.raises(Corrupt, match="is none of its namespace"):
        replace(context, pending=NAMESPACE.vocab_size).verify(NAMESPACE)


def test_a_context_is_of_no_use_to_another_model_or_tenant() -> None:
    context = context_of(told(2))
    for other in (
        namespace(block_tokens=4, vocab_size=100, revision="weights-2"),
        NAMESPACE.for_tenant(TenantDigest(b"t" * 16)),
    ):
        with pytest.raises(NamespaceError, match="tenant cannot use"):
            context.verify(other)


@pytest.mark.parametrize(
    "change",
    [
        {"lineage": b"short"},
        {"block_tokens": 0},
        {"codec": "zip"},
        {"token_bytes": b"abc"},
        {"keys": ()},
        {"view_runs": ((0, 10_000),)},
        {"filler_runs": (Run(0, 3), Run(0, 3))},
        {"filler_runs": (Run(3, 1), Run(0, 1))},
        {"filler_runs": (Run(0, 1), Run(1, 1))},
        {"repeated_runs": (Run(0, 3), Run(2, 3))},
        {"filler_runs": (Run(0, 3),), "repeated_runs": (Run(2, 1),)},
        {"protected": 3},
        {"pending": -1},
        {"events": (Event("weights", 10_000, weights_version=1),)},
        {"turns": ((4, 2),)},
        {"turns": ((0, 10_000),)},
    ],
)
def test_parts_that_contradict_each_other_are_no_context(change: dict[str, object]) -> None:
    with pytest.raises(Corrupt, match="not a stream's context"):
        replace(context_of(told(4)), **change)  # type: ignore[arg-type]


def test_bytes_that_are_whole_and_not_canonical_are_refused() -> None:
    context = context_of(told(6))
    split = context.view_runs[0]
    doubled = replace(
        context, view_runs=(Run(split[0], 1), Run(split[0] + 1, split[1] - 1), *context.view_runs[1:])
    )
    with pytest.raises(Corrupt):
        StreamContext.decode(doubled.encode()).verify(NAMESPACE)


def test_a_log_that_cuts_rows_without_end_is_refused_before_it_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = context_of(told(5))
    monkeypatch.setattr("kvcomm.streams.view.CUT_ROWS_MAX", 3)
    with pytest.raises(TooLarge, match="begin a new stream"):
        context.verify(NAMESPACE)


def test_rows_that_are_marked_twice_in_a_record_are_never_made() -> None:
    """A megabyte of runs over all rows would be gigabytes for who adopts it."""
    session = Session(BlockPool(10), NAMESPACE, rows_max=100)
    session.commit(session.plan(list(range(20))))
    context = replace(context_of(session), filler_runs=(Run(2, 1), Run(7, 3)), repeated_runs=(Run(3, 4),))
    data = context.encode()
    again = StreamContext.decode(data)
    assert (again.filler_rows, again.repeated_rows) == ([2, 7, 8, 9], [3, 4, 5, 6])
    pair = Run(2, 1)[0].to_bytes(8, "little") + Run(2, 1)[1].to_bytes(8, "little")
    whole = (0).to_bytes(8, "little") + (20).to_bytes(8, "little")
    forged = data[:-8].replace(pair, whole)
    assert forged != data[:-8]
    with pytest.raises(Corrupt, match="rows that are marked"):
        StreamContext.decode(forged + xxh3_64_intdigest(forged).to_bytes(8, "little"))


@pytest.mark.slow
def test_a_record_holds_two_hundred_thousand_rows_and_says_what_to_do_beyond() -> None:
    small = namespace(block_tokens=16, vocab_size=100)
    session = Session(BlockPool(20_000), small, rows_max=1_000_000)
    for _ in range(50):
        session.commit(session.plan([7] * 4_000))
        session.evict([(0, session.full_slots)])
    assert len(context_of(session).encode()) < 1 << 20
    for _ in range(16):
        session.commit(session.plan([7] * 4_000))
    with pytest.raises(TooLarge, match="begin a new stream"):
        context_of(session).encode()


def test_of_siblings_the_one_that_extends_the_others_is_the_newest() -> None:
    session = told(8)
    contexts = [context_of(session)]
    session.sampled(5)
    contexts.append(context_of(session))
    for siblings in (contexts, contexts[::-1]):
        assert newest(siblings) == contexts[1], "a token was sampled since"
    session.commit(session.plan([5, 6, 7, 8, 9]))
    contexts.append(context_of(session))
    session.evict([(0, 4)])
    contexts.append(context_of(session))
    random.Random(1).shuffle(contexts)
    assert newest(contexts) == context_of(session)
    assert newest([]) is None
    other = told(9)
    assert newest([context_of(session), context_of(other)]) is None
    before = contexts[0]
    assert all(context_of(session).extends(each) for each in contexts)
    assert not replace(before, namespace=NAMESPACE.for_tenant(TenantDigest(b"t" * 16)).id).extends(before)


def test_what_was_cut_before_the_end_of_the_other_went_another_way() -> None:
    early, late = (Session(BlockPool(20), NAMESPACE, rows_max=100) for _ in range(2))
    for session, first in ((early, 8), (late, 12)):
        session.commit(session.plan(list(range(first))))
    past = context_of(late)
    early.evict([(0, 4)])
    early.commit(early.plan(list(range(8, 14))))
    assert not context_of(early).extends(past)
    late.evict([(0, 4)])
    late.commit(late.plan([12, 13]))
    assert context_of(late).extends(past)


def test_a_token_that_is_to_be_fed_is_behind_one_that_was() -> None:
    session = Session(BlockPool(20), NAMESPACE, rows_max=100)
    session.commit(session.plan([1, 2, 3]))
    session.sampled(4)
    pending = context_of(session)
    session.commit(session.plan([4]))
    fed = context_of(session)
    assert fed.extends(pending) and not pending.extends(fed)
    assert newest([pending, fed]) == fed


@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_bytes_that_were_changed_and_sealed_again_are_refused_or_verify_nothing(
    seed: int, flips: list[tuple[int, int]]
) -> None:
    """Who can write the record can seal it: whatever it says, the answer is ``Corrupt``, no other error, and
    nothing is believed that tokens and events do not give."""
    body = bytearray(SEALED[seed])
    for at, mask in flips:
        body[at % len(body)] ^= mask
    data = bytes(body) + xxh3_64_intdigest(bytes(body)).to_bytes(8, "little")
    try:
        context = StreamContext.decode(data)
        chain = context.verify(NAMESPACE)
    except (Corrupt, NamespaceError):
        return
    assert context.encode() == data
    assert list(chain.view.runs) == list(context.view_runs) and chain.lineage == context.lineage
    assert context.keys == tuple(block.key for block in chain.blocks)


SEALED = [context_of(told(seed, steps=15)).encode()[:-8] for seed in range(10)]
