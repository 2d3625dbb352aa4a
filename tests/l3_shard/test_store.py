"""The record store: what survives, what is noticed, whose id it is."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, Refused, Unavailable
from kvcomm.version import VersionVector
from kvcomm.wire.messages import RecordState, Sibling
from l3_shard import acceptor, dvv
from l3_shard.envelope import decode_value, encode_value
from l3_shard.merkle import LEAVES, leaf_of, state_digest
from l3_shard.replica import successor
from l3_shard.storage import Entry
from l3_shard.store import (
    MAP_BYTES_MIN,
    SCAN_LOOKED_MAX,
    DiskFailed,
    DiskFull,
    RecordStore,
)

R = "replica0.1"
BOOT = "boot-1"


def state(value: bytes | None, counter: int = 1) -> RecordState:
    return RecordState({R: counter}, [Sibling(R, counter, 5, value)])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "records"


def open_store(directory: Path, **how) -> Any:
    """``Any``: some tests reach inside."""
    how.setdefault("boot", BOOT)
    how.setdefault("fsync", "interval")
    return RecordStore(directory, **how)


def crash(store: Any) -> None:
    """End without closing: the lock goes, the owner's note stays open."""
    store._closed = True
    store._environment.close()
    os.close(store._lock)


def test_what_was_written_is_there_after_a_restart(directory):
    store = open_store(directory)
    store.write([(b"k", state(b"v")), (b"l", state(None))], store.replica)
    assert store.load([b"k", b"none", b"l"]) == ([state(b"v"), None, state(None)], [])
    store.close()
    store.close()
    again = open_store(directory)
    assert again.load([b"k", b"l"]) == ([state(b"v"), state(None)], [])
    assert again.record_count() == 2 and again.used_bytes() > 0
    again.close()


values = st.none() | st.binary(max_size=50)


@given(st.lists(st.tuples(values, st.booleans()), max_size=6), st.binary(min_size=1, max_size=20))
def test_values_come_back_as_they_were(writes, key):
    record = dvv.EMPTY
    for value, known in writes:
        context = VersionVector.from_wire(record.context) if known else VersionVector()
        record = dvv.put(record, R, Stamp(2**63), value, context).state
    assert decode_value(key, encode_value(key, record)) == record


@given(st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_every_damage_of_a_value_is_recognised(data):
    value = encode_value(b"k", state(b"some value"))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    if not 16 <= bit < 64:  # the six zero bytes carry nothing
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            decode_value(b"k", bytes(flipped))
    with pytest.raises(Corrupt):
        decode_value(b"k", value[: data.draw(st.integers(0, len(value) - 1))])
    with pytest.raises(Corrupt):
        decode_value(b"another", value)


def test_a_damaged_record_is_reported_counted_and_not_served(directory):
    store = open_store(directory)
    store.write([(b"k", state(b"v")), (b"l", state(b"w"))], store.replica)
    with store._environment.begin(write=True) as transaction:
        value = bytearray(transaction.get(b"k", db=store._records))
        value[-1] ^= 1
        transaction.put(b"k", bytes(value), db=store._records)
    assert store.load([b"k", b"l"]) == ([None, state(b"w")], [b"k"])
    assert store.damaged_count == 1
    store.close()


def test_bits_flipped_in_the_file_are_recognised(directory):
    store = open_store(directory)
    store.write([(b"k", state(b"needle" * 2000))], store.replica)
    store.close()
    data = directory / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.index(b"needle" * 10)
    content[at] ^= 0x40
    with open(data, "r+b") as file:
        file.write(content)
    again = open_store(directory)
    assert again.load([b"k"]) == ([None], [b"k"])
    again.close()


# -- whose id


def test_the_replica_id_is_kept_as_long_as_the_records_are(directory):
    store = open_store(directory)
    replica = store.replica
    store.close()
    store = open_store(directory)
    assert store.replica == replica
    store.write([(b"k", state(b"v"))], successor(replica))
    store.write([(b"l", state(b"v"))], replica)
    assert store.replica == successor(replica)
    store.close()
    store = open_store(directory)
    assert store.replica == successor(replica)
    store.close()


def test_an_empty_directory_has_a_new_id(directory):
    store = open_store(directory)
    replica = store.replica
    store.close()
    shutil.rmtree(directory)
    store = open_store(directory)
    assert store.replica != replica
    store.close()


def test_a_lost_database_has_a_new_id(directory):
    store = open_store(directory)
    replica = store.replica
    store.close()
    (directory / "data.mdb").unlink()
    store = open_store(directory)
    assert store.replica != replica
    store.close()


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_a_process_crash_loses_neither_records_nor_the_id(directory, fsync):
    store = open_store(directory, fsync=fsync)
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    crash(store)
    store = open_store(directory, fsync=fsync)
    assert store.replica == replica and store.load([b"k"])[0] == [state(b"v")]
    store.close()


@pytest.mark.parametrize("fsync", ["interval", "never"])
def test_a_power_cut_without_fsync_sets_the_database_aside(directory, fsync):
    store = open_store(directory, fsync=fsync)
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    crash(store)
    store = open_store(directory, fsync=fsync, boot="boot-2")
    assert store.replica != replica and store.load([b"k"])[0] == [None]
    assert (directory / "data.mdb.suspect").exists()
    store.close()


def test_a_power_cut_with_fsync_keeps_everything(directory):
    store = open_store(directory, fsync="always")
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    crash(store)
    store = open_store(directory, fsync="always", boot="boot-2")
    assert store.replica == replica and store.load([b"k"])[0] == [state(b"v")]
    store.close()


def test_a_reboot_after_a_clean_end_keeps_everything(directory):
    store = open_store(directory)
    replica = store.replica
    store.close()
    store = open_store(directory, boot="boot-2")
    assert store.replica == replica
    store.close()


def test_a_system_that_does_not_name_its_boots_trusts_only_clean_ends(directory):
    store = open_store(directory, boot="")
    replica = store.replica
    crash(store)
    store = open_store(directory, boot="")
    assert store.replica != replica
    store.close()


def test_a_copied_directory_keeps_its_records_under_a_new_id(directory, tmp_path):
    store = open_store(directory)
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    store.close()
    shutil.copytree(directory, tmp_path / "copy")
    copy = open_store(tmp_path / "copy")
    assert copy.replica != replica and copy.load([b"k"])[0] == [state(b"v")]
    copy.close()


def failing(error: lmdb.Error):
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_write_that_meets_damage_has_the_next_owner_set_the_database_aside(directory, monkeypatch, caplog):
    """The walk may not see it: pages that are free belong to no tree."""
    store = open_store(directory, fsync="always")
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    monkeypatch.setattr(store, "_commit", failing(lmdb.CorruptedError("MDB_CORRUPTED")))
    with pytest.raises(DiskFailed, match="MDB_CORRUPTED"):
        store.write([(b"l", state(b"v"))], replica)
    store.close()
    store = open_store(directory, fsync="always")
    assert store.replica != replica and store.load([b"k"])[0] == [None]
    assert "its last owner met: MDB_CORRUPTED" in caplog.text
    store.close()
    store = open_store(directory, fsync="always")
    assert store.record_count() == 0 and not (directory / "damage").exists()
    store.close()


@pytest.mark.parametrize(("fsync", "kept"), [("always", True), ("interval", False)])
def test_a_write_that_did_not_reach_the_disk_is_no_clean_end(directory, monkeypatch, fsync, kept):
    """Synced commits are whole or absent; without syncs nobody knows, though a second sync may succeed."""
    store = open_store(directory, fsync=fsync)
    replica = store.replica
    store.write([(b"k", state(b"v"))], replica)
    monkeypatch.setattr(store, "_commit", failing(lmdb.Error("Input/output error")))
    with pytest.raises(DiskFailed):
        store.write([(b"l", state(b"v"))], replica)
    store.close()
    assert not store._read_owner().closed
    store = open_store(directory, fsync=fsync)
    assert (store.replica == replica) == kept and (store.load([b"k"])[0] == [state(b"v")]) == kept
    store.close()


def test_two_owners_of_one_directory_are_refused(directory):
    store = open_store(directory)
    with pytest.raises(Refused, match="another process owns"):
        open_store(directory)
    store.close()
    open_store(directory).close()


def test_a_directory_that_cannot_be_used_is_unavailable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be used"):
        open_store(tmp_path / "file" / "records")


def test_a_file_that_is_no_database_is_set_aside(directory, caplog):
    directory.mkdir()
    (directory / "data.mdb").write_bytes(b"not a database" * 1000)
    store = open_store(directory)
    assert "not an LMDB file" in caplog.text and (directory / "data.mdb.suspect").exists()
    store.close()


def cut_short(store: Any, directory: Path) -> None:
    store.write([(b"%d" % number, state(bytes(300))) for number in range(200)], store.replica)
    os.truncate(directory / "data.mdb", 8 * 4096)


@pytest.mark.parametrize("database", ["records", "strong"])
def test_a_truncated_database_is_set_aside_and_the_id_with_it(directory, database, caplog):
    store = open_store(directory, database=database, fsync="always")
    replica = store.replica
    cut_short(store, directory)
    crash(store)
    store = open_store(directory, database=database, fsync="always")
    assert store.replica != replica and store.record_count() == 0
    assert "SIGBUS" in caplog.text and (directory / "data.mdb.suspect").stat().st_size == 8 * 4096
    store.close()


@pytest.mark.slow
@pytest.mark.processes
def test_a_database_damaged_while_it_was_closed_ends_one_process_and_not_the_next(directory):
    """The first one to open it dies of it, and its successor must not take the database for closed."""
    store = open_store(directory, fsync="always")
    cut_short(store, directory)
    store._write_owner(closed=True)
    crash(store)
    program = f"from l3_shard.store import *; RecordStore(Path({str(directory)!r}), boot={BOOT!r})"
    died = subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | {"PYTHONPATH": "."})
    assert died.returncode == -signal.SIGBUS
    store = open_store(directory)
    assert store.record_count() == 0
    store.close()


# -- room


@pytest.mark.slow
def test_the_map_grows_and_stops_at_its_bound(directory):
    store = open_store(directory, map_bytes_max=4 * MAP_BYTES_MIN)
    for index in range(3):
        store.write([(b"%d" % index, state(bytes(40 << 20)))], store.replica)
    assert store._environment.info()["map_size"] > MAP_BYTES_MIN
    with pytest.raises(DiskFull, match="largest size"):
        store.write([(b"big%d" % index, state(bytes(40 << 20))) for index in range(4)], store.replica)
    assert store.load([b"0", b"big0"])[0] == [state(bytes(40 << 20)), None]
    store.write([(b"small", state(b"v"))], store.replica)
    store.close()


def child(program: str, directory: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", program, str(directory)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_full_disk_refuses_the_write_and_takes_the_next_when_there_is_room(directory):
    free = 1 << 40
    store = open_store(directory, free_bytes=lambda where: free)
    store.write([(b"before", state(b"v"))], store.replica)
    free = 17 << 20
    with pytest.raises(DiskFull, match="bytes free"):
        store.write([(b"big", state(bytes(1 << 20)))], store.replica)
    free = 1 << 40
    store.write([(b"after", state(b"v"))], store.replica)
    assert store.load([b"before", b"big", b"after"])[0] == [state(b"v"), None, state(b"v")]
    store.close()


def test_a_disk_that_fills_during_the_write_is_full_not_broken(directory):
    store = open_store(directory)
    working, store._environment = (
        store._environment,
        Broken(lmdb.DiskError("mdb_txn_commit: No space left on device")),
    )
    with pytest.raises(DiskFull):
        store.write([(b"k", state(b"v"))], store.replica)
    store._environment = working
    store.close()


class Broken:
    """An environment whose disk gives an error."""

    def __init__(self, error: lmdb.Error) -> None:
        self.error = error

    def begin(self, write: bool = False, buffers: bool = False):
        raise self.error

    def sync(self, force: bool) -> None:
        raise self.error


def test_an_error_of_the_disk_is_not_taken_for_a_full_one(directory):
    store = open_store(directory)
    working, store._environment = store._environment, Broken(lmdb.Error("mdb_txn_commit: Input/output error"))
    for act in (
        lambda: store.write([(b"k", state(b"v"))], store.replica),
        lambda: store.load([b"k"]),
        lambda: store.scan(b"", b"", 1),
        store.sync,
    ):
        with pytest.raises(DiskFailed):
            act()
    store._environment = working
    store.close()


# -- scans


def test_a_scan_names_living_records_in_order_and_goes_on(directory):
    store = open_store(directory)
    names = [b"a", b"p/1", b"p/2", b"p/3", b"p/4", b"q"]
    store.write([(name, state(b"v")) for name in names] + [(b"p/25", state(None))], store.replica)
    assert store.scan(b"p/", b"", 10) == ([b"p/1", b"p/2", b"p/3", b"p/4"], None)
    assert store.scan(b"p/", b"", 2) == ([b"p/1", b"p/2"], b"p/2")
    assert store.scan(b"p/", b"p/2", 10) == ([b"p/3", b"p/4"], None)
    assert store.scan(b"p/", b"p/25", 10) == ([b"p/3", b"p/4"], None)
    assert store.scan(b"p/", b"p/9", 10) == ([], None)
    assert store.scan(b"", b"", 2) == ([b"a", b"p/1"], b"p/1")
    assert store.scan(b"z", b"", 2) == ([], None)
    store.close()


def test_a_scan_looks_at_a_bounded_number_of_tombstones(directory):
    store = open_store(directory)
    store.write([(b"%06d" % index, state(None)) for index in range(SCAN_LOOKED_MAX + 1)], store.replica)
    store.write([(b"x", state(b"v"))], store.replica)
    keys, resume = store.scan(b"", b"", 10)
    assert keys == [] and resume == b"%06d" % (SCAN_LOOKED_MAX - 1)
    assert store.scan(b"", resume, 10) == ([b"x"], None)
    store.close()


@pytest.mark.slow
@given(st.sets(st.binary(min_size=1, max_size=3), max_size=12), st.binary(max_size=2), st.binary(max_size=3))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_scans_are_those_of_a_sorted_list(tmp_path_factory, names, prefix, after):
    store = open_store(tmp_path_factory.mktemp("scan"))
    store.write([(name, state(b"v")) for name in sorted(names)], store.replica)
    wanted = sorted(name for name in names if name.startswith(prefix) and name > after)
    found: list[bytes] = []
    resume: bytes | None = after
    while resume is not None:
        keys, resume = store.scan(prefix, resume, 2)
        found += keys
    store.close()
    assert found == wanted


# -- kill -9

WRITER = """
import sys
from pathlib import Path
from tests.l3_shard.test_store import open_store, state
store = open_store(Path(sys.argv[1]), fsync="always")
print(store.replica, flush=True)
for number in range(1_000_000):
    store.write([(b"%d" % number, state(b"v%d" % number)), (b"last", state(b"%d" % number))], store.replica)
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_writer_keeps_what_it_acknowledged(directory):
    with child(WRITER, directory) as process:
        try:
            assert process.stdout is not None
            replica = process.stdout.readline().strip()
            acknowledged = [int(process.stdout.readline()) for _ in range(50)]
            process.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in process.stdout.read().splitlines() if line]
        finally:
            process.kill()
    store = open_store(directory, fsync="always")
    assert store.replica == replica
    states, damaged = store.load([b"%d" % number for number in acknowledged])
    assert damaged == [] and states == [state(b"v%d" % number) for number in acknowledged]
    (last,), _ = store.load([b"last"])
    assert last is not None and int(last.siblings[0].value or b"-1") >= acknowledged[-1]
    store.close()


# -- index and notes


def entries(store: RecordStore) -> list[Entry]:
    return [entry for leaf in store.survey(range(LEAVES)) for entry in leaf]


def test_the_index_follows_every_write(tmp_path: Path):
    keys = [b"k%d" % number for number in range(50)]
    live = {key: RecordState({"r.1": 1}, [Sibling("r.1", 1, 7, key)]) for key in keys}
    dead = RecordState({"r.1": 2}, [Sibling("r.1", 2, 9, None)])
    store = RecordStore(tmp_path / "s", fsync="never")
    try:
        store.write(list(live.items()), store.replica)
        store.write([(keys[0], dead)], store.replica)
        store.write([(keys[1], dvv.EMPTY)], store.replica)
        expected = live | {keys[0]: dead}
        del expected[keys[1]]
        found = entries(store)
        assert {entry.key: (entry.digest, entry.dead_since) for entry in found} == {
            key: (state_digest(key, state), 9 if state is dead else 0) for key, state in expected.items()
        }
        assert [leaf_of(entry.key) for entry in found] == sorted(leaf_of(entry.key) for entry in found)
        assert store.load([keys[1]]) == ([None], []) and store.record_count() == 49
        (one,) = store.survey([leaf_of(keys[5])])
        assert keys[5] in [entry.key for entry in one]
    finally:
        store.close()


def test_a_database_without_an_index_gets_one_when_it_is_opened(tmp_path: Path):
    state = RecordState({"r.1": 1}, [Sibling("r.1", 1, 7, b"v")])
    store = RecordStore(tmp_path / "s", fsync="never")
    store.write([(b"k", state), (b"l", state)], store.replica)
    with store._environment.begin(write=True) as transaction:
        transaction.drop(store._index, delete=False)
        transaction.put(b"l", b"damaged", db=store._records)
    store.close()
    store = RecordStore(tmp_path / "s", fsync="never")
    try:
        found = {entry.key: entry.digest for entry in entries(store)}
        assert found == {b"k": state_digest(b"k", state), b"l": 0}, "a damaged one equals no intact copy"
    finally:
        store.close()


def test_an_index_finds_room_in_a_database_that_fills_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("l3_shard.store.MAP_BYTES_MIN", 1 << 20)
    state = RecordState({"r.1": 1}, [Sibling("r.1", 1, 7, b"v" * 99)])
    store = RecordStore(tmp_path / "s", fsync="never")
    with store._environment.begin(write=True) as transaction:
        transaction.drop(store._index, delete=False)
    rows = [(b"%0400d" % index, encode_value(b"%0400d" % index, state)) for index in range(4_000)]
    store._environment.set_mapsize(64 << 20)
    with store._environment.begin(write=True) as transaction:
        for key, value in rows:
            transaction.put(key, value, db=store._records)
    replica = store.replica
    store.close()
    store = RecordStore(tmp_path / "s", fsync="never")
    try:
        swept, _ = store.sweep(0, len(rows))
        assert sum(len(leaf) for _, leaf in swept) == len(rows) and store.replica == replica
    finally:
        store.close()


def test_a_database_that_lost_a_record_goes_on_under_another_id(directory):
    """Its counter is lost too: a write that began at 1 again would be taken for one that others have seen."""
    store = open_store(directory)
    store.write([(b"k", state(b"v", 5)), (b"l", state(b"v"))], store.replica, [(b"caught_up", b"1")])
    with store._environment.begin(write=True) as transaction:
        transaction.delete(b"k", db=store._records)
    store.close()
    again = open_store(directory)
    try:
        assert again.replica != store.replica and again.notes() == {}
        assert [entry.key for entry in entries(again)] == [b"l"] and again.load([b"l"]) == ([state(b"v")], [])
    finally:
        again.close()


def test_notes_are_kept_with_the_state_they_speak_of(tmp_path: Path):
    store = RecordStore(tmp_path / "s", fsync="never")
    store.write([], store.replica, [(b"a", b"1"), (b"b", b"2")])
    store.write([], store.replica, [(b"a", None), (b"c", b"3"), (b"nothing", None)])
    store.close()
    store = RecordStore(tmp_path / "s", fsync="never")
    assert store.notes() == {b"b": b"2", b"c": b"3"}
    store.close()
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    copy = RecordStore(tmp_path / "copy", fsync="never")
    try:
        assert copy.replica != store.replica and copy.notes() == {}
    finally:
        copy.close()


def numbered(count: int) -> dict[bytes, RecordState]:
    return {b"record/%04d" % number: state(b"%d" % number) for number in range(count)}


def test_a_sweep_gives_the_whole_index_in_whole_leaves(directory):
    records = numbered(300)
    store = open_store(directory)
    store.write(list(records.items()), R)
    first: int | None = 0
    found: list[tuple[int, tuple[Entry, ...]]] = []
    while first is not None:
        leaves, first = store.sweep(first, 20)
        assert sum(len(entries) for _, entries in leaves) >= 20 or first is None
        found += leaves
    numbers = [leaf for leaf, _ in found]
    assert numbers == sorted(set(numbers)), "no leaf comes twice"
    expected = store.survey(numbers)
    assert [entries for _, entries in found] == expected
    assert sorted(entry.key for _, entries in found for entry in entries) == sorted(records)
    store.close()
    empty = open_store(directory.with_name("empty"))
    assert empty.sweep(0, 20) == ([], None)
    empty.close()


def audited(store: Any, records: int = 7, size_bytes: int = 1 << 20) -> tuple[list[bytes], ...]:
    """(damaged, lost, misfiled) of a whole pass."""
    resume: bytes | None = b""
    found: tuple[list[bytes], ...] = ([], [], [])
    looked = 0
    while resume is not None:
        audit = store.audit(resume, records, size_bytes)
        assert audit.looked_count <= records
        for all_, some in zip(found, (audit.damaged, audit.lost, audit.misfiled), strict=True):
            all_ += some
        looked += audit.looked_count
        resume = audit.resume
    assert looked == store.audit(b"", 1, 1).total_count
    return found


def test_an_audit_finds_exactly_what_is_wrong(directory):
    records = numbered(40)
    store = open_store(directory)
    assert audited(store) == ([], [], []), "of nothing"
    store.write(list(records.items()), R)
    assert audited(store) == ([], [], [])
    keys = sorted(records)
    with store._environment.begin(write=True) as transaction:
        rotten = bytearray(transaction.get(keys[3], db=store._records))
        rotten[-1] ^= 1
        transaction.put(keys[3], bytes(rotten), db=store._records)
        transaction.put(keys[5], b"short", db=store._records)
        transaction.delete(keys[8], db=store._records)
        index = [leaf_of(key).to_bytes(2, "big") + key for key in keys]
        transaction.put(index[11], bytes(16), db=store._index)
        transaction.delete(index[39], db=store._index)
    assert store.audit(b"", 3, 1 << 20).total_count == 39 + 39
    assert audited(store) == ([keys[3], keys[5]], [keys[8]], [keys[11], keys[39]])
    assert audited(store, size_bytes=1) == ([keys[3], keys[5]], [keys[8]], [keys[11], keys[39]])
    store.close()


def test_strong_records_are_audited_without_an_index(directory):
    store = open_store(directory, database="strong", fsync="always")
    states = {b"s%d" % number: acceptor.EMPTY for number in range(9)}
    store.write(list(states.items()), R)
    assert audited(store) == ([], [], [])
    with store._environment.begin(write=True) as transaction:
        transaction.put(b"s4", b"x" * 40, db=store._records)
    assert audited(store) == ([b"s4"], [], [])
    store.close()
