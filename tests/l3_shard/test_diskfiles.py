"""Blocks as files: whole or not there, found again, verified."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.block import HEADER_BYTES, BlockKey
from kvcomm.errors import ConfigError, Corrupt, Refused
from l3_shard.diskfiles import PART, BlockFiles
from tests.l3_shard.blocks import TENANT, chain

COPIES = chain(3)
KEYS = list(COPIES)
SIZE = len(COPIES[KEYS[0]])


@pytest.fixture(params=[False, True], ids=["cached", "synced"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockFiles]:
    opened = BlockFiles(tmp_path / "blocks", fsync=request.param)
    yield opened
    opened.close()


def write(files: BlockFiles, *keys: BlockKey) -> None:
    for key in keys:
        files.write(key, memoryview(COPIES[key]))


def test_what_was_written_is_read_and_found_again_the_oldest_first(files: BlockFiles) -> None:
    write(files, *KEYS)
    for age, key in enumerate(reversed(KEYS)):
        os.utime(files.path(key), (1e9 + age, 1e9 + age))
    assert bytes(files.read(KEYS[1], SIZE)) == COPIES[KEYS[1]]
    found = files.scan()
    assert [entry.key for entry in found.entries] == KEYS[::-1]
    assert found.entries[0].parent == KEYS[1] and found.entries[0].tenant == TENANT
    assert {entry.copy_bytes for entry in found.entries} == {SIZE}
    files.remove(KEYS[0])
    files.remove(KEYS[0])
    with pytest.raises(FileNotFoundError):
        files.read(KEYS[0], SIZE)


@pytest.mark.parametrize("at", [20, 200, HEADER_BYTES + 1, -1])
def test_a_flipped_bit_is_never_served(files: BlockFiles, at: int) -> None:
    write(files, KEYS[0])
    content = bytearray(files.path(KEYS[0]).read_bytes())
    content[at] ^= 4
    files.path(KEYS[0]).write_bytes(content)
    with pytest.raises(Corrupt):
        files.read(KEYS[0], SIZE)


@pytest.mark.parametrize("left", [0, HEADER_BYTES - 1, HEADER_BYTES, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_no_copy(files: BlockFiles, left: int) -> None:
    write(files, *KEYS[:2])
    files.path(KEYS[0]).write_bytes((COPIES[KEYS[0]] + b"x")[:left])
    with pytest.raises(Corrupt):
        files.read(KEYS[0], SIZE)
    with pytest.raises(Corrupt):
        files.read(KEYS[0], left)
    found = files.scan()
    assert [entry.key for entry in found.entries] == [KEYS[1]] and found.damaged_count == 1
    assert not files.path(KEYS[0]).exists()


def test_a_scan_removes_what_is_no_block_of_its_name(files: BlockFiles) -> None:
    write(files, *KEYS)
    files.path(KEYS[0]).write_bytes(COPIES[KEYS[1]])
    files.path(KEYS[2]).with_name("no key").write_bytes(COPIES[KEYS[2]])
    part = files.path(KEYS[2]).with_name(KEYS[2].hex() + PART)
    part.write_bytes(COPIES[KEYS[2]][:99])
    found = files.scan()
    assert sorted(entry.key for entry in found.entries) == sorted(KEYS[1:])
    assert (found.damaged_count, found.part_count) == (2, 1) and not part.exists()


def test_a_write_that_fails_leaves_nothing(files: BlockFiles) -> None:
    files.path(KEYS[0]).mkdir()  # so that the rename cannot take place
    (files.path(KEYS[0]) / "x").touch()
    with pytest.raises(OSError, match="director"):
        write(files, KEYS[0])
    assert not [path for path in files.directory.rglob("*") if path.name.endswith(PART)]


def test_a_name_that_cannot_be_forced_to_the_disk_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take room that nobody counts."""

    def failing(directory: Path) -> None:
        raise OSError(errno.EIO, f"scripted: {directory}")

    files = BlockFiles(tmp_path / "synced", fsync=True)
    monkeypatch.setattr(BlockFiles, "_sync_directory", staticmethod(failing))
    with pytest.raises(OSError, match="scripted"):
        write(files, KEYS[0])
    assert not files.path(KEYS[0]).exists() and files.scan().entries == []
    files.close()


def test_a_directory_has_one_owner(files: BlockFiles) -> None:
    with pytest.raises(Refused, match="another running process"):
        BlockFiles(files.directory)
    files.close()
    BlockFiles(files.directory).close()
    with pytest.raises(ConfigError, match="disk_path"):
        BlockFiles(files.directory / "lock" / "below")
