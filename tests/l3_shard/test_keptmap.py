"""A shard never falls back behind a map that it has told anybody of."""

from __future__ import annotations

from itertools import count

import pytest

from kvcomm.machine import Effect
from kvcomm.wire.messages import Message, RingOffer, RingTaken, TreeDigests, TreeGet
from l3_shard import keptmap
from l3_shard.desk import Desk, ShardLimits
from l3_shard.keptmap import KeptMap, kept_map
from l3_shard.notes import Notes
from l3_shard.ring import NO_RING, Ring, encode_map
from l3_shard.storage import Database, Persist, Persisted
from l3_shard.timers import Timers
from tests.l3_shard.cluster import NODE_TENANT, ring_map, small_rings
from tests.l3_shard.moving_world import MovingWorld

quick = pytest.fixture(autouse=True)(small_rings)


def test_a_map_that_rotted_or_contradicts_itself_is_none():
    newest = ring_map("abc", epoch=4)
    assert kept_map({b"map": encode_map(newest)}) == newest
    assert kept_map({}) == kept_map({b"map": b"rot"}) == NO_RING
    assert kept_map({b"map": encode_map(ring_map("aa", epoch=4))}) == NO_RING


def test_the_newest_of_both_databases_counts():
    old, new = ({b"map": encode_map(ring_map("abc", epoch=epoch))} for epoch in (4, 5))
    assert kept_map(old, new).epoch == kept_map(new, old).epoch == kept_map({}, new).epoch == 5
    assert kept_map() == kept_map({}, {b"map": b"rot"}) == NO_RING


class Shelf:
    """One database of a shard without a ring of its own."""

    def __init__(self, database: Database, epoch: int = 0) -> None:
        self.database = database
        self.notes = {b"map": encode_map(ring_map("abc", epoch=epoch))} if epoch else {}


class Shelves:
    """A kept map over these databases; what is ordered is written when the test says so."""

    def __init__(self, *shelves: Shelf) -> None:
        self.desk = Desk(ShardLimits(), count(1))
        self.ring = Ring.from_map(kept_map(*(shelf.notes for shelf in shelves)))
        self.notes = {shelf.database: Notes(self.desk, shelf.database) for shelf in shelves}
        noted = [(self.notes[shelf.database], shelf.notes) for shelf in shelves]
        self.kept = KeptMap(lambda: self.ring, noted, self.desk, Timers(count(1)))

    def write(self) -> set[str]:
        """Into which databases."""
        for notes in self.notes.values():
            notes.flush("replica")
        return {effect.database for effect in self._orders() if isinstance(effect, Persist)}

    def _orders(self) -> list[Effect]:
        self.orders = self.desk.take()
        return self.orders

    def written(self, database: Database) -> None:
        (order,) = (each for each in self.orders if isinstance(each, Persist) and each.database == database)
        assert self.notes[database].persisted(Persisted(order.ticket))


def test_a_map_is_taken_when_it_is_in_both_databases():
    shelves = Shelves(Shelf("records"), Shelf("strong"))
    shelves.ring = Ring.from_map(ring_map("abc", epoch=3))
    shelves.kept.keep()
    assert shelves.write() == {"records", "strong"}
    shelves.written("records")
    assert shelves.kept.taken.epoch == 0, "a power cut may cost these"
    shelves.written("strong")
    assert shelves.kept.taken.epoch == 3


def test_a_database_that_was_lost_gets_the_map_again():
    shelves = Shelves(Shelf("records"), Shelf("strong", epoch=3))
    assert shelves.kept.taken.epoch == 3
    shelves.kept.keep()
    assert shelves.write() == {"records"}
    shelves.kept.keep()
    assert shelves.kept.taken.epoch == 3


def test_after_a_crash_an_older_map_is_not_taken():
    world = MovingWorld(1, "abc", "abc")
    world.run(until=1.0)
    newer = world.stable("abc")
    world.offer(newer)
    world.run(until=2.0)
    assert world.shards["a"].taken.to_map() == newer
    world.crash("a")  # whoever starts it has the first map
    assert world.shards["a"].ring.to_map() == newer
    world.offer(ring_map("abc", epoch=1), ["a"])
    assert world.shards["a"].ring.epoch == newer.epoch


def test_a_map_is_told_of_when_it_is_on_the_disk(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keptmap, "AGAIN_S", 0.1)
    world = MovingWorld(1, "abc", "abc")
    world.run(until=1.0)
    newer = world.stable("abc")
    world.faults.full = 1.0  # no room
    answers: list[Message] = []
    world.call("a", RingOffer(newer), answers.append, NODE_TENANT)
    world.call("a", TreeGet(newer.epoch, "b", 0, [0]), answers.append, NODE_TENANT)
    world.run(until=1.3)
    shard = world.shards["a"]
    assert shard.ring.epoch == newer.epoch and shard.taken.epoch == 1 and not answers
    world.faults.full = 0.0
    world.run(until=1.8)
    assert shard.taken.epoch == newer.epoch
    assert {type(answer) for answer in answers} == {RingTaken, TreeDigests} and RingTaken(2) in answers


def test_before_it_is_comparisons_do_not_count_on_it(monkeypatch: pytest.MonkeyPatch):
    """Proof that the test above can fail."""
    monkeypatch.setattr(KeptMap, "once_taken", lambda self, then: then())
    with pytest.raises(AssertionError):
        test_a_map_is_told_of_when_it_is_on_the_disk(monkeypatch)
