"""A database that would end its reader is found out by a reader that may end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lmdb
import pytest

from l3_shard.walk import unsound, walk

PAGE_BYTES = 4096


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Many pages: branches, leaves, and values that lie on pages of their own."""
    with lmdb.open(str(tmp_path), max_dbs=8, map_size=64 << 20) as environment:
        records, index = (environment.open_db(name) for name in (b"records", b"index"))
        with environment.begin(write=True) as transaction:
            for number in range(2_000):
                transaction.put(b"key-%06d" % number, bytes(100), db=records)
                transaction.put(b"key-%06d" % number, b"", db=index)
            transaction.put(b"large", bytes(5 * PAGE_BYTES), db=records)
    return tmp_path


def test_a_sound_database_has_nothing_against_it(database: Path) -> None:
    assert walk(database) == 4_001
    assert unsound(database) == ""


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_a_database_that_is_cut_short_is_unsound(database: Path, share: float) -> None:
    data = database / "data.mdb"
    os.truncate(data, int(data.stat().st_size * share) // PAGE_BYTES * PAGE_BYTES)
    assert unsound(database)


def test_a_large_value_that_is_cut_off_is_noticed(database: Path) -> None:
    """Its page lies behind all others, and no key is on it."""
    data = database / "data.mdb"
    content = data.read_bytes()
    last = max(at for at in range(0, len(content), PAGE_BYTES) if content[at + 10 : at + 12] == b"\x04\x00")
    os.truncate(data, last + 2 * PAGE_BYTES)
    assert unsound(database)


def test_keys_out_of_order_are_noticed(database: Path) -> None:
    data = database / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content.replace(b"key-001000", b"key-000000"))
    assert "out of order" in unsound(database)


def test_a_page_of_another_kind_is_noticed(database: Path) -> None:
    """A flipped bit that turns leaves into branches."""
    data = database / "data.mdb"
    content = bytearray(data.read_bytes())
    leaves = [at for at in range(2 * PAGE_BYTES, len(content), PAGE_BYTES) if content[at + 10] == 2]
    content[leaves[len(leaves) // 2] + 10] ^= 3
    data.write_bytes(content)
    assert unsound(database)


def test_what_cannot_be_read_is_not_called_damaged(database: Path, tmp_path: Path) -> None:
    assert unsound(tmp_path / "nowhere") == ""


def test_a_walk_that_takes_too_long_has_no_verdict(database: Path) -> None:
    os.truncate(database / "data.mdb", 4 * PAGE_BYTES)
    assert unsound(database, timeout_s=1e-6) == ""


def test_a_reader_that_does_not_even_begin_is_not_waited_for(
    database: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = tmp_path_factory.mktemp("bin") / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stuck))
    monkeypatch.setattr("l3_shard.walk.START_TIMEOUT_S", 0.1)
    began = time.monotonic()
    assert unsound(database, timeout_s=0.05) == ""
    assert time.monotonic() - began < 30
