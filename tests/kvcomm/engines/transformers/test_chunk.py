"""Where the rows of feeds of different lengths go in one pass."""

from __future__ import annotations

import pytest
import torch

from kvcomm.engines.transformers.chunk import Chunk
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Feed, Session
from tests.namespaces import namespace

CPU = torch.device("cpu")


def planned(*counts: tuple[int, int]) -> dict[int, tuple[Session, Feed]]:
    """By lane, a session with so many rows, and a feed of so many more."""
    pool, kv = BlockPool(64), namespace(block_tokens=16, vocab_size=100)
    found = {}
    for lane, (held, fed) in enumerate(counts):
        session = Session(pool, kv, rows_max=500)
        if held:
            session.commit(session.plan([7] * held))
        found[lane] = session, session.plan([*range(fed)])
    return found


@pytest.mark.parametrize("start", [0, 8, 16, 24])
def test_no_place_of_a_lane_is_written_twice_and_none_of_its_view(start: int):
    feeds = planned((0, 30), (50, 3), (17, 9))
    chunk = Chunk.of(feeds, start, start + 8)
    places, positions, ids = chunk.tensors(CPU)
    assert torch.equal(places, positions), "nothing was cut"
    for lane, mine, tokens in zip(chunk.lanes, places.tolist(), ids.tolist(), strict=True):
        feed = feeds[lane][1]
        assert len({*mine}) == len(mine) and max(mine) < chunk.reach
        own = [*feed.tokens[start : start + 8]]
        first = feed.first_slot + min(start, len(feed.tokens))
        assert min(mine) == first, "what was fed before stays"
        if own:
            assert mine[-len(own) :] == [*range(first, first + len(own))] and tokens[-len(own) :] == own


@pytest.mark.parametrize("start", [0, 8])
def test_what_is_written_to_memory_are_the_tokens_alone(start: int):
    feeds = planned((0, 30), (50, 3), (17, 9))
    chunk = Chunk.of(feeds, start, start + 8)
    found = [*zip(*chunk.written(16, CPU).tolist(), strict=True)]
    expected = []
    for lane in chunk.lanes:
        feed = feeds[lane][1]
        for at in range(start, min(start + 8, len(feed.tokens))):
            slot = feed.first_slot + at
            expected.append((lane - chunk.lanes.start, slot, feed.blocks[slot // 16]))
    assert found == expected
