"""Waiting for blocks: in order, with an end, and holding nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import PoolFull, Refused
from kvcomm.streams.admission import Admission, Expired, Granted, Place
from kvcomm.streams.events import SpanId
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session
from tests.kvcomm.streams.life import ToyEngine

SESSIONS = 32


def test_who_came_first_is_served_first_and_nobody_overtakes() -> None:
    pool = BlockPool(4)
    held = pool.take(4)
    line = Admission(pool, waiting_max=8)
    large, small = line.ask(3, 0.0, 9.0), line.ask(1, 0.0, 9.0)
    assert line.serve(1.0) == [] and line.waiting_count == 2
    pool.release(held[:2])
    assert line.serve(2.0) == [], "the small one would fit, and waits"
    pool.release(held[2:])
    first, second = line.serve(3.0)
    assert isinstance(first, Granted) and isinstance(second, Granted)
    assert (first.place, len(first.blocks)) == (large, 3)
    assert (second.place, len(second.blocks)) == (small, 1)
    assert pool.free_count == 0 and line.deadline() is None


def test_a_wait_ends_at_its_deadline_with_nothing_held() -> None:
    pool = BlockPool(2)
    held = pool.take(2)
    line = Admission(pool, waiting_max=8)
    late, early = line.ask(2, 0.0, 5.0), line.ask(1, 0.0, 3.0)
    assert line.deadline() == 3.0
    assert line.serve(3.0) == [Expired(early)]
    assert line.deadline() == 5.0
    pool.release(held)
    assert line.serve(5.0) == [Expired(late)]
    assert pool.free_count == 2


def test_an_expired_head_makes_way() -> None:
    pool = BlockPool(4)
    pool.take(2)
    line = Admission(pool, waiting_max=8)
    large, small = line.ask(4, 0.0, 1.0), line.ask(2, 0.0, 9.0)
    gone, granted = line.serve(1.0)
    assert gone == Expired(large) and granted.place == small


def test_who_leaves_makes_way_too() -> None:
    pool = BlockPool(2)
    pool.take(1)
    line = Admission(pool, waiting_max=8)
    large, small = line.ask(2, 0.0, 9.0), line.ask(1, 0.0, 9.0)
    line.leave(large)
    line.leave(large)
    (granted,) = line.serve(1.0)
    assert granted.place == small
    line.leave(small)


def test_spare_blocks_are_for_those_that_run() -> None:
    pool = BlockPool(4)
    line = Admission(pool, waiting_max=8, spare_blocks=2)
    line.ask(2, 0.0, 9.0)
    line.ask(1, 0.0, 9.0)
    assert len(line.serve(0.0)) == 1 and pool.free_count == 2
    with pytest.raises(PoolFull, match="2 spare"):
        line.ask(3, 0.0, 9.0)


def test_what_cannot_be_waited_for() -> None:
    line = Admission(BlockPool(2), waiting_max=1)
    for block_count, deadline in ((0, 9.0), (1, 0.0), (1, float("inf")), (1, float("nan"))):
        with pytest.raises(ValueError, match="give it time"):
            line.ask(block_count, 0.0, deadline)
    with pytest.raises(PoolFull, match="a pool of 2"):
        line.ask(3, 0.0, 9.0)
    line.ask(1, 0.0, 9.0)
    with pytest.raises(Refused, match="1 wait"):
        line.ask(1, 0.0, 9.0)
    for waiting_max, spare_blocks in ((0, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match="at least one may wait"):
            Admission(BlockPool(2), waiting_max=waiting_max, spare_blocks=spare_blocks)


@pytest.mark.slow
@given(st.data())
def test_any_line_against_a_list(data: st.DataObject) -> None:
    pool, now = BlockPool(6), 0.0
    line = Admission(pool, waiting_max=5)
    held: list[BlockId] = []
    waiting: list[tuple[Place, int, float]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.integers(0, 2))
        if len(waiting) < 5 and data.draw(st.booleans()):
            count, deadline = data.draw(st.integers(1, 6)), now + data.draw(st.integers(1, 9))
            waiting.append((line.ask(count, now, deadline), count, deadline))
        gone = data.draw(st.integers(0, len(held)))
        pool.release(held[:gone])
        del held[:gone]
        outcomes = line.serve(now)
        expected: list[tuple[Place, int]] = [(place, 0) for place, _, end in waiting if end <= now]
        waiting = [wish for wish in waiting if wish[2] > now]
        free = 6 - len(held)
        while waiting and waiting[0][1] <= free:
            place, count, _ = waiting.pop(0)
            free -= count
            expected.append((place, count))
        found = [(each.place, len(each.blocks) if isinstance(each, Granted) else 0) for each in outcomes]
        assert found == expected
        held += [block for each in outcomes if isinstance(each, Granted) for block in each.blocks]
        assert line.deadline() == min((end for _, _, end in waiting), default=None)
        line.check()
        pool.check()


class Restoring:
    """One engine and many sessions that all archived a span of four blocks and want it back."""

    def __init__(self) -> None:
        self.engine = ToyEngine(2 * SESSIONS + 7)
        self.payloads: dict[tuple[int, SpanId], list[tuple[bytes, ...]]] = {}
        self.sessions: list[Session] = []
        for number in range(SESSIONS):
            session = self.engine.session()
            self.engine.feed(session, [number] * 22)
            event = session.evict([(0, 16)], archive=True)
            blocks = session.archive[event.span].blocks
            self.payloads[number, event.span] = [self.engine.payload(block) for block in blocks]
            session.drop_archived(event.span, moved=True)
            self.sessions.append(session)

    def restore(self, number: int, blocks: tuple[BlockId, ...]) -> Iterator[None]:
        """With its memory at hand, a block more than the span: restore, run a few rows, and end."""
        session = self.sessions[number]
        (span,) = session.archive
        for block, payload in zip(blocks[:4], self.payloads[number, span], strict=True):
            self.engine.load(block, payload)
        yield
        session.restore(span, 0, blocks[:4])
        yield
        self.engine.pool.release(blocks[4:])  # and taken again at once, to be written
        self.engine.feed(session, [1] * 3)
        yield
        assert list(session.view.rows) == list(range(25))
        session.check()
        session.close()


def test_fault_b14_all_restores_finish_on_a_small_pool() -> None:
    world = Restoring()
    pool = world.engine.pool
    assert pool.free_count == 7, "room for one span at a time"
    line = Admission(pool, waiting_max=SESSIONS)
    places = {line.ask(5, 0.0, 1_000.0): number for number in range(SESSIONS)}
    running: dict[int, Iterator[None]] = {}
    finished: list[int] = []
    for now in range(SESSIONS * 6):
        for outcome in line.serve(float(now)):
            assert isinstance(outcome, Granted)
            number = places[outcome.place]
            running[number] = world.restore(number, outcome.blocks)
        for number in sorted(running):
            if next(running[number], "done") == "done":
                del running[number]
                finished.append(number)
    assert finished == list(range(SESSIONS))
    pool.check()
    assert pool.free_count == pool.block_count


def test_fault_b14_block_by_block_they_would_wait_for_each_other_for_ever() -> None:
    """What the line is for: the same sessions, each taking what it finds and waiting for the rest."""
    world = Restoring()
    held: list[list[BlockId]] = [[] for _ in world.sessions]
    for _ in range(SESSIONS):
        for mine in held:
            if len(mine) < 4 and world.engine.pool.free_count:
                mine += world.engine.pool.take(1)
    assert max(map(len, held)) < 4 and world.engine.pool.free_count == 0


def test_edge_23_a_restore_without_room_holds_nothing_and_changes_nothing() -> None:
    world = Restoring()
    pool = world.engine.pool
    first, second = world.sessions[:2]
    (span,) = first.archive
    blocks = pool.take(4)
    (gone,) = second.archive
    before = (pool.free_count, list(second.view.rows), second.events[:])
    with pytest.raises(PoolFull):
        pool.take(4)
    with pytest.raises(ValueError, match="fetch its bytes"):
        second.restore(gone)
    with pytest.raises(ValueError, match="3 blocks"):
        first.restore(span, 0, blocks[:3])
    assert (pool.free_count, list(second.view.rows), second.events) == before
    assert [pool.holder_count(block) for block in blocks] == [1] * 4
    first.check()
