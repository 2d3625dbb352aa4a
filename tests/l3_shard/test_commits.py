"""Grouped commits on a real store."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcomm.machine import Effect, Event, Ticket
from kvcomm.wire.messages import RecordState, Sibling
from l3_shard.commits import Commits
from l3_shard.storage import Load, Loaded, Persist, Persisted, Scan, Scanned
from l3_shard.store import DiskFailed, DiskFull, RecordStore

STATE = RecordState({"replica0.1": 1}, [Sibling("replica0.1", 1, 5, b"v")])


def run(directory: Path, fsync, play: Callable[[Commits, list[Event], RecordStore], None]) -> list[Event]:
    """Orders of one turn; the events once everything is through."""
    events: list[Event] = []
    reasons: list[str] = []

    async def main() -> None:
        store = RecordStore(directory, fsync=fsync)
        commits = Commits(store, events.append, reasons.append)
        play(commits, events, store)
        await commits.close()

    asyncio.run(main())
    assert reasons == []
    return events


def persist(number: int) -> Persist:
    return Persist(Ticket(number), ((b"k%d" % number, STATE),), "replica0.1")


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_the_writes_of_one_turn_are_one_transaction(tmp_path, fsync, monkeypatch):
    transactions: list[int] = []
    write = RecordStore.write

    def counted(store: RecordStore, writes, replica: str, notes) -> None:
        transactions.append(len(writes))
        write(store, writes, replica, notes)

    monkeypatch.setattr(RecordStore, "write", counted)

    def play(commits: Commits, events: list[Event], store: RecordStore) -> None:
        for number in (1, 2, 3):
            commits.perform(persist(number))
        assert events == []

    events = run(tmp_path / "r", fsync, play)
    assert events == [Persisted(Ticket(number)) for number in (1, 2, 3)] and transactions == [3]


def test_reads_and_scans_are_answered_at_once(tmp_path):
    def play(commits: Commits, events: list[Event], store: RecordStore) -> None:
        store.write([(b"k", STATE)], store.replica)
        commits.perform(Load(Ticket(1), (b"k", b"none")))
        commits.perform(Scan(Ticket(2), b"", b"", 9))
        assert events == [Loaded(Ticket(1), (STATE, None)), Scanned(Ticket(2), (b"k",), None)]

    run(tmp_path / "r", "interval", play)


def test_a_write_that_does_not_fit_does_not_fail_its_neighbours(tmp_path, monkeypatch):
    write = RecordStore.write

    def small_only(store: RecordStore, writes, replica: str, notes) -> None:
        if any(key == b"k2" for key, _ in writes):
            raise DiskFull("no room for k2")
        write(store, writes, replica, notes)

    monkeypatch.setattr(RecordStore, "write", small_only)

    def play(commits: Commits, events: list[Event], store: RecordStore) -> None:
        for number in (1, 2, 3):
            commits.perform(persist(number))

    events = run(tmp_path / "r", "interval", play)
    outcomes = [(event.ticket, event.outcome) for event in events if isinstance(event, Persisted)]
    assert outcomes == [(1, "durable"), (2, "full"), (3, "durable")]


def test_a_full_disk_is_told_once_when_it_fills_and_once_when_there_is_room(tmp_path, monkeypatch, caplog):
    write, full = RecordStore.write, [True]

    def perhaps(store: RecordStore, writes, replica: str, notes) -> None:
        if full:
            raise DiskFull("1 byte free")
        write(store, writes, replica, notes)

    monkeypatch.setattr(RecordStore, "write", perhaps)

    async def main() -> None:
        commits = Commits(RecordStore(tmp_path / "r", fsync="interval"), lambda event: None, pytest.fail)
        for number in range(6):
            if number == 3:
                assert commits.disk_full
                full.clear()
            commits.perform(persist(number))
            await commits.idle()
        assert not commits.disk_full
        await commits.close()

    asyncio.run(main())
    assert [record.message for record in caplog.records] == [
        "writes are refused: 1 byte free",
        "there is room again for writes",
    ]


def test_a_failed_disk_is_told_apart(tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise DiskFailed("EIO")

    for name in ("write", "load", "scan"):
        monkeypatch.setattr(RecordStore, name, broken)

    def play(commits: Commits, events: list[Event], store: RecordStore) -> None:
        commits.perform(Load(Ticket(1), (b"k",)))
        commits.perform(Scan(Ticket(2), b"", b"", 9))
        commits.perform(persist(3))

    assert run(tmp_path / "r", "interval", play) == [
        Loaded(Ticket(1), (), failure="EIO"),
        Scanned(Ticket(2), (), None, failure="EIO"),
        Persisted(Ticket(3), "failed", "EIO"),
    ]


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_a_write_that_breaks_an_invariant_ends_the_shard_and_holds_up_nobody(tmp_path, monkeypatch, fsync):
    def broken(*_: object) -> None:
        raise RuntimeError("impossible")

    monkeypatch.setattr(RecordStore, "write", broken)
    reasons: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        commits = Commits(RecordStore(tmp_path / "r", fsync=fsync), lambda event: None, reasons.append)
        commits.perform(persist(1))
        await asyncio.wait_for(commits.close(), 10)

    asyncio.run(main())
    assert reasons == ["broken invariant in a commit: RuntimeError('impossible')"]


def test_a_directory_that_is_gone_is_a_failed_disk(tmp_path):
    async def main() -> list[Event]:
        events: list[Event] = []
        commits = Commits(RecordStore(tmp_path / "r", fsync="interval"), events.append, pytest.fail)
        shutil.rmtree(tmp_path / "r")
        commits.perform(persist(1))
        await asyncio.wait_for(commits.idle(), 10)
        return events

    (event,) = asyncio.run(main())
    assert isinstance(event, Persisted) and event.outcome == "failed" and "how much room" in event.text


def test_an_effect_of_another_kind_is_a_bug(tmp_path):
    def play(commits: Commits, events: list[Event], store: RecordStore) -> None:
        with pytest.raises(TypeError):
            commits.perform(Effect())

    run(tmp_path / "r", "interval", play)
