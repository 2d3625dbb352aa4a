"""A block to and from a shard's disk tier, beside plain files, and beside appending to one large file."""

from __future__ import annotations

import os
import secrets
import tempfile
from itertools import cycle
from pathlib import Path

from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import namespace
from bench.timing import Call, Rounds, interleave, round_robin
from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for

WRITE, READ = "disk tier: write", "disk tier: read, verified"
RAW_WRITE, RAW_READ = "plain file: write", "plain file: read"
APPEND, READ_AT = "one large file: append", "one large file: read"
WRITE_TIMES_MAX, READ_TIMES_MAX = 1.5, 1.5


def run(scale: Scale) -> Report:
    report = Report("disk", "A block on a shard's disk")
    for size_bytes in (scale.block_bytes, scale.small_bytes):
        with tempfile.TemporaryDirectory(prefix="kvd-") as directory:
            rounds = _measure(Path(directory), size_bytes, scale)
        size = size_name(size_bytes)
        report.add(rounds, size, {WRITE: RAW_WRITE, APPEND: RAW_WRITE, READ: RAW_READ, READ_AT: RAW_READ})
        if size_bytes == scale.block_bytes:
            written, read = rounds.ratio(WRITE, RAW_WRITE), rounds.ratio(READ, RAW_READ)
            report.claim(f"{size} to disk, over a plain file", "<=", WRITE_TIMES_MAX, "x", written)
            report.claim(f"{size} from disk, over a plain file", "<=", READ_TIMES_MAX, "x", read)
    report.notes.append(
        "In the page cache, without syncs: what the tier itself costs. A plain file is created under its own "
        "name, written in one call and read into memory made for it, unverified; the tier writes under "
        "another name and renames, and verifies what it reads."
    )
    return report


def _measure(directory: Path, size_bytes: int, scale: Scale) -> Rounds:
    from l3_shard.diskfiles import BlockFiles

    (fresh, copy), *held = _copies(scale.working_set + 1, size_bytes).items()
    files = BlockFiles(directory / "tier")
    for key, each in held:
        files.write(key, each)
    turn = cycle(key for key, _ in held)
    plain, large = directory / "plain", directory / "large"
    operations = [
        *_plain(plain, copy, len(held)),
        Call(WRITE, lambda: files.write(fresh, copy), after=lambda: files.remove(fresh)),
        Call(READ, lambda: files.read(next(turn), len(copy))),
        *_large(large, copy, len(held)),
    ]
    try:
        return interleave(operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set)
    finally:
        files.close()


def _copies(number: int, size_bytes: int) -> dict[BlockKey, memoryview]:
    ns = namespace(size_bytes)
    copies: dict[BlockKey, memoryview] = {}
    for index in range(number):
        (key,) = block_keys(ns, [index] * 16)
        payload = secrets.token_bytes(size_bytes)
        header = header_for(ns, key, NO_PARENT, memoryview(payload), logical_start=0, producer=Incarnation(3))
        copies[key] = memoryview(header.pack() + payload)
    return copies


def _plain(directory: Path, copy: memoryview, number: int) -> list[Call]:
    """The same bytes in files of their own.  A new file each time, as the tier's are: a file system may force
    what replaces another file to the disk."""
    directory.mkdir()

    def write(name: str) -> None:
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(descriptor, copy)
        os.close(descriptor)

    def read(name: str) -> None:
        memory = bytearray(len(copy))
        descriptor = os.open(directory / name, os.O_RDONLY)
        os.readv(descriptor, [memory])
        os.close(descriptor)

    names = [str(each) for each in range(number)]
    for name in names:
        write(name)
    return [
        Call(RAW_WRITE, lambda: write("new"), after=(directory / "new").unlink),
        Call(RAW_READ, round_robin(read, names)),
    ]


def _large(path: Path, copy: memoryview, number: int) -> list[Call]:
    """What one file for many blocks would save: no create, no rename, no close."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    size_bytes, end = len(copy), number * len(copy)

    def read(at: int) -> None:
        os.preadv(descriptor, [bytearray(size_bytes)], at * size_bytes)

    for at in range(number):
        os.pwrite(descriptor, copy, at * size_bytes)
    return [
        Call(
            APPEND,
            lambda: os.pwrite(descriptor, copy, end),
            after=lambda: os.truncate(descriptor, end),
        ),
        Call(READ_AT, round_robin(read, range(number))),
    ]
