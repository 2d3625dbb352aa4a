"""``BlockFiles``: a directory of self-describing files, one a block; blocking calls, for a thread.

::

    DIRECTORY/lock                  held by the process that owns the directory
    DIRECTORY/ab/abcd...ef          a whole copy, ``header | payload``, named by its key in hexadecimal
    DIRECTORY/ab/abcd...ef.part     being written

A file is written under its other name and renamed, so under its own name it is whole as far as this machine
stood; its checksums say whether the disk kept it so.  Without ``fsync`` a power cut may leave files that are
empty or full of zeros under their own names: they fail verification and are misses, which is all that a
cache owes.  A kill leaves ``.part`` files; :meth:`scan` removes them.

One file a block, not many in one.  Measured (``bench disk``): appending to one large file takes 0.7 of the
time of a 2 MiB file and 0.6 of a 64 KiB file, and reading 2 MiB from it takes as long.  The writes that it
would speed up are nobody's wait, and it would bring a compaction that copies what stays, an index to recover
and evictions that free nothing at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvcomm.block import HEADER_BYTES, BlockHeader, BlockKey, verify_copy
from kvcomm.errors import ConfigError, Corrupt, Refused
from l3_shard.diskindex import DiskEntry

PART = ".part"
_NAME_CHARS = 64


@dataclass(frozen=True, slots=True)
class Found:
    """What a scan brought to light."""

    entries: list[DiskEntry]
    """The oldest first."""
    damaged_count: int
    """Files that were no copies of the block that they are named after, or too short; removed."""
    part_count: int
    """Writes that a kill had cut short; removed."""


class BlockFiles:
    """Safe to use from several threads, one key at a time for writes.

    Args:
        fsync: force each file, and its name, to the disk before :meth:`write` returns.

    Raises:
        ConfigError: the directory cannot be used.
        Refused: another process owns it.
    """

    def __init__(self, directory: Path, *, fsync: bool = False) -> None:
        self.directory = directory
        self._fsync = fsync
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for number in range(256):
                (directory / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"shard.disk_path: {directory} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise Refused(f"{directory} belongs to another running process") from error

    def close(self) -> None:
        """Let go of the directory.  Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self.directory / name[:2] / name

    def write(self, key: BlockKey, copy: memoryview) -> None:
        """Store ``header | payload``.  Raises ``OSError``; then nothing is left behind, if the disk lets
        us."""
        path = self.path(key)
        part = path.with_name(path.name + PART)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(descriptor, copy)
                if self._fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(part, path)
            if self._fsync:
                self._sync_directory(path.parent)
        except BaseException:
            for left in (part, path):
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            raise

    def read(self, key: BlockKey, copy_bytes: int) -> memoryview:
        """The whole copy, verified.

        Raises:
            FileNotFoundError: it is gone.
            Corrupt: it is not what was written.
            OSError: the disk failed.
        """
        buffer = memoryview(bytearray(copy_bytes))
        descriptor = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != copy_bytes:
                raise Corrupt(f"{self.path(key)} has another size than was written")
            _read_all(descriptor, buffer)
        finally:
            os.close(descriptor)
        if HEADER_BYTES + verify_copy(buffer, key).payload_bytes != copy_bytes:
            raise Corrupt(f"{self.path(key)} is longer than its copy")
        return buffer

    def remove(self, key: BlockKey) -> None:
        """Raises ``OSError``, not for a file that is gone already."""
        self.path(key).unlink(missing_ok=True)

    def scan(self) -> Found:
        """Every file by its name, size and header; payloads are verified when they are read.

        Raises:
            OSError: a directory cannot be read.
        """
        aged: list[tuple[float, DiskEntry]] = []
        damaged_count = part_count = 0
        for entry in self._files():
            if entry.name.endswith(PART):
                part_count += 1
                _discard(entry)
                continue
            try:
                found = _entry_of(entry)
            except Corrupt:
                damaged_count += 1
                _discard(entry)
            else:
                aged.append((entry.stat().st_mtime, found))
        aged.sort(key=lambda each: each[0])
        return Found([entry for _, entry in aged], damaged_count, part_count)

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for number in range(256):
            with os.scandir(self.directory / f"{number:02x}") as entries:
                yield from entries

    @staticmethod
    def _sync_directory(directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entry_of(entry: os.DirEntry[str]) -> DiskEntry:
    """Raises ``Corrupt`` if the file is not what its name says, as far as its header tells."""
    try:
        key = bytes.fromhex(entry.name) if len(entry.name) == _NAME_CHARS else b""
        with open(entry.path, "rb", buffering=0) as file:
            header = BlockHeader.unpack(file.read(HEADER_BYTES))
    except (ValueError, OSError) as error:
        raise Corrupt(f"{entry.path}: {error}") from error
    copy_bytes = HEADER_BYTES + header.payload_bytes
    if header.key != key or entry.stat(follow_symlinks=False).st_size != copy_bytes:
        raise Corrupt(f"{entry.path} holds another block, or not all of it")
    return DiskEntry(header.key, header.parent, header.tenant, copy_bytes)


def _discard(entry: os.DirEntry[str]) -> None:
    """A file that the disk does not let go is found again by the next scan, and is never read."""
    with suppress(OSError):
        os.unlink(entry.path)


def _write_all(descriptor: int, copy: memoryview) -> None:
    done = 0
    while done < len(copy):
        done += os.write(descriptor, copy[done:])


def _read_all(descriptor: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        count = os.readv(descriptor, [buffer[done:]])
        if not count:
            raise Corrupt("the file became shorter while it was read")
        done += count
