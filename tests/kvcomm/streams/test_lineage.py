"""Names behind events: equal exactly where the past is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcomm.block import ROOT_LINEAGE, BlockKey
from kvcomm.errors import TokenError
from kvcomm.streams.events import Event, SlotRange, SpanId
from kvcomm.streams.lineage import History, next_lineage, span_id
from kvcomm.streams.session import Session
from tests.kvcomm.streams.life import ToyEngine

CUT = Event("evict", 8, (SlotRange(0, 4),))


def lived(live: Callable[[ToyEngine, Session], None]) -> tuple[BlockKey, tuple[bytes, ...], bytes]:
    """(key of the block that was filled last, its content, the lineage)."""
    engine = ToyEngine(32)
    session = engine.session()
    live(engine, session)
    block = session.table[session.full_slots // 4 - 1]
    key = session.pool.key_of(block)
    assert key is not None
    return key, engine.payload(block), session.lineage


def story(
    dropped: int = 2, cut: tuple[int, int] = (4, 8), chunk: int = 0, archive: bool = False, weights: int = 0
) -> Callable[[ToyEngine, Session], None]:
    """16 rows, a cut, 4 rows; the cut after ``16 + chunk`` of them."""

    def live(engine: ToyEngine, session: Session) -> None:
        engine.feed(session, [1] * 4 + [dropped] * 4 + [3] * 8 + [5] * chunk)
        session.evict([cut], archive=archive)
        if weights:
            session.set_weights(weights)
        engine.feed(session, [5] * (4 - chunk))

    return live


def twice(first: tuple[int, int]) -> Callable[[ToyEngine, Session], None]:
    """The second cut says the same, whatever the first one left."""

    def live(engine: ToyEngine, session: Session) -> None:
        engine.feed(session, [1] * 16)
        session.evict([first])
        session.evict([(0, 4)])
        engine.feed(session, [5] * 4)

    return live


def test_gate_g10_what_an_earlier_cut_took_is_in_the_key() -> None:
    (key, content, _), (other_key, other_content, _) = lived(twice((4, 8))), lived(twice((8, 12)))
    assert content != other_content and key != other_key


def test_gate_g10_what_came_back_is_in_the_key() -> None:
    """The same rows before it, the same tokens behind it, and one saw more."""

    def live(engine: ToyEngine, session: Session) -> None:
        engine.feed(session, [1] * 16)
        span = session.evict([(4, 8)], archive=True).span
        if restored:
            session.restore(span, 4)
        engine.feed(session, [5] * 4)

    restored = False
    key, content, lineage = lived(live)
    restored = True
    other_key, other_content, other_lineage = lived(live)
    assert content != other_content and key != other_key and lineage != other_lineage


def never_cut(engine: ToyEngine, session: Session) -> None:
    engine.feed(session, [1] * 4 + [2] * 4 + [3] * 8 + [5] * 4)


OTHER_PASTS = {
    "other tokens under the cut": story(dropped=9),
    "another cut": story(cut=(8, 12)),
    "a wider cut": story(cut=(4, 12)),
    "a later cut": story(chunk=2),
    "other weights": story(weights=1),
    "no cut": never_cut,
}


@pytest.mark.parametrize("name", OTHER_PASTS)
def test_gate_g10_another_history_is_another_key(name: str) -> None:
    """The last block has the same tokens at the same positions in all of them."""
    key, content, _ = lived(story())
    other_key, other_content, _ = lived(OTHER_PASTS[name])
    assert content != other_content and key != other_key


def test_gate_g10_the_same_history_is_the_same_key() -> None:
    assert lived(story()) == lived(story())
    assert lived(never_cut)[2] == ROOT_LINEAGE


def test_the_tokens_fed_so_far_are_in_the_lineage_and_not_how_they_were_fed() -> None:
    one, other = History(), History()
    one.feed([1, 2, 3], 10)
    other.feed([1], 10)
    copy = other.copy()
    other.feed([2, 3], 10)
    assert one.digest() == other.digest() != copy.digest()
    assert next_lineage(ROOT_LINEAGE, one.digest(), CUT) == next_lineage(ROOT_LINEAGE, other.digest(), CUT)
    assert next_lineage(ROOT_LINEAGE, one.digest(), CUT) != next_lineage(ROOT_LINEAGE, copy.digest(), CUT)
    assert next_lineage(b"l" * 32, one.digest(), CUT) != next_lineage(b"m" * 32, one.digest(), CUT)
    with pytest.raises(TokenError):
        one.feed([10], 10)
    assert one.digest() == other.digest()


def test_a_fork_changes_no_names() -> None:
    fork = Event("fork", 8, span=SpanId(b"s" * 32))
    assert next_lineage(b"l" * 32, b"h" * 32, fork) == b"l" * 32


def test_a_span_is_named_by_all_that_it_came_from() -> None:
    keys = [BlockKey(b"a" * 32), BlockKey(b"b" * 32)]
    spans = {
        span_id(b"l" * 32, b"h" * 32, keys),
        span_id(b"m" * 32, b"h" * 32, keys),
        span_id(b"l" * 32, b"i" * 32, keys),
        span_id(b"l" * 32, b"h" * 32, keys[::-1]),
        span_id(b"l" * 32, b"h" * 32, keys[:1]),
    }
    assert len(spans) == 5 and {len(span) for span in spans} == {32}
