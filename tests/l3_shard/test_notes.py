"""Notes are written one write at a time, and whoever waits hears whether they are durable."""

from itertools import count

from kvcomm.machine import Ticket
from l3_shard.desk import Desk, ShardLimits
from l3_shard.notes import NOTES_A_WRITE, Notes
from l3_shard.storage import Persist, Persisted

REPLICA = "replica0.1"


def made() -> tuple[Desk, Notes]:
    desk = Desk(ShardLimits(), (number for number in count(1)))
    return desk, Notes(desk)


def test_notes_are_one_write_and_the_next_waits_for_it():
    desk, notes = made()
    notes.flush(REPLICA)
    assert desk.take() == []
    notes.save(b"a", b"1")
    notes.save(b"b", None)
    notes.flush(REPLICA)
    assert desk.take() == [Persist(Ticket(1), (), REPLICA, notes=((b"a", b"1"), (b"b", None)))]
    notes.save(b"a", b"2")
    notes.save(b"a", b"3")
    notes.flush(REPLICA)
    assert desk.take() == []
    assert not notes.persisted(Persisted(Ticket(9)))
    assert notes.persisted(Persisted(Ticket(1)))
    notes.flush(REPLICA)
    assert desk.take() == [Persist(Ticket(2), (), REPLICA, notes=((b"a", b"3"),))]


def test_who_waits_hears_the_outcome_of_the_write_with_the_note():
    desk, notes = made()
    heard: list[bool] = []
    for number in range(NOTES_A_WRITE + 5):
        notes.save(b"%d" % number, b"")
    notes.save(b"floor", b"7", heard.append)
    notes.flush(REPLICA)
    (persist,) = desk.take()
    assert isinstance(persist, Persist) and dict(persist.notes)[b"floor"] == b"7"
    notes.save(b"floor", b"8", heard.append)
    assert notes.persisted(Persisted(persist.ticket)) and heard == [True]
    notes.flush(REPLICA)
    (persist,) = desk.take()
    assert isinstance(persist, Persist)
    assert notes.persisted(Persisted(persist.ticket, "full", "no room")) and heard == [True, False]


def test_a_write_has_a_bound_when_nobody_waits():
    desk, notes = made()
    for number in range(NOTES_A_WRITE + 5):
        notes.save(b"%d" % number, b"")
    sizes = []
    for _ in range(2):
        notes.flush(REPLICA)
        (persist,) = desk.take()
        assert isinstance(persist, Persist)
        sizes.append(len(persist.notes))
        notes.persisted(Persisted(persist.ticket))
    assert sizes == [NOTES_A_WRITE, 5]
