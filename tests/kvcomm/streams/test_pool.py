"""Who holds which block, and which one is used next."""

from __future__ import annotations

import pytest

from kvcomm.block import BlockKey
from kvcomm.errors import PoolFull
from kvcomm.streams.pool import BlockId, BlockPool

KEYS = [BlockKey(bytes([i]) * 32) for i in range(8)]


def filled(count: int) -> tuple[BlockPool, list[BlockId]]:
    """All blocks taken, ``count`` of them named."""
    pool = BlockPool(4)
    blocks = pool.take(4)
    for block, key in zip(blocks, KEYS[:count], strict=False):
        pool.name(block, key)
    return pool, blocks


def test_taking_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(PoolFull, match="3 blocks wanted, 2 of 4"):
        pool.take(3)
    assert pool.free_count == 2
    assert pool.take(0) == []
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)


def test_a_free_block_keeps_its_content_until_its_room_is_needed() -> None:
    pool, blocks = filled(4)
    pool.release(blocks)
    assert pool.free_count == 4 and pool.find(KEYS[1]) == blocks[1]
    pool.hold([blocks[1]])
    assert pool.free_count == 3
    taken = pool.take(3)
    assert blocks[1] not in taken
    assert [pool.find(key) for key in KEYS[:4]] == [None, blocks[1], None, None]
    pool.check()


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    pool, blocks = filled(4)
    pool.release(blocks)
    assert [pool.take(1)[0] for _ in range(4)] == blocks[::-1]


def test_blocks_without_content_are_used_first() -> None:
    pool, blocks = filled(2)
    pool.release(blocks[:2])
    pool.release(blocks[2:])
    assert set(pool.take(2)) == set(blocks[2:])
    assert pool.find(KEYS[0]) is not None


def test_one_content_may_stand_in_several_blocks() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    for block in (first, second):
        pool.name(block, KEYS[0])
    pool.release([first])
    assert pool.find(KEYS[0]) == second, "the one that is held"
    pool.release([second])
    assert pool.find(KEYS[0]) == first
    pool.hold([second])
    pool.take(2)
    assert pool.find(KEYS[0]) == second
    assert (pool.key_of(first), pool.key_of(second)) == (None, KEYS[0])
    pool.check()


def test_the_last_release_frees() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.hold([block, block])
    assert pool.holder_count(block) == 3
    pool.release([block, block])
    assert pool.free_count == 1
    pool.release([block])
    assert pool.free_count == 2


def test_what_a_caller_must_never_do_stops_the_process() -> None:
    pool, blocks = filled(1)
    with pytest.raises(AssertionError, match="written once"):
        pool.name(blocks[0], KEYS[1])
    pool.release(blocks)
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.hold(blocks[1:2])
    with pytest.raises(AssertionError, match="holds it"):
        pool.name(blocks[1], KEYS[1])
