"""Damage reaches every copy in a file, and only payloads."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import pytest

from kvcomm.block import (
    HEADER_BYTES,
    MAGIC,
    NO_PARENT,
    BlockKey,
    Incarnation,
    block_keys,
    header_for,
    verify_copy,
)
from kvcomm.demo import vandal
from kvcomm.demo.vandal import damage, regions_of
from kvcomm.errors import Corrupt
from kvcomm.namespace import Namespace

NAMESPACE = Namespace(
    model="m", revision="1", tokenizer="t", vocab_size=512, dtype="float32", layout="LKHTD", layers=1,
    kv_heads=1, head_dim=8, block_tokens=4, rope="none", rope_parameters={},
)  # fmt: skip
HOLE_BYTES = 4 << 20


def copies(count: int) -> dict[BlockKey, bytes]:
    found = {}
    for index, key in enumerate(block_keys(NAMESPACE, range(4 * count))):
        payload = bytes([index]) * NAMESPACE.block_bytes
        header = header_for(
            NAMESPACE, key, NO_PARENT, memoryview(payload), logical_start=4 * index, producer=Incarnation(1)
        )
        found[key] = header.pack() + payload
    return found


@pytest.mark.parametrize("step_bytes", [8 << 20, 4096, 300])
def test_every_copy_fails_verification_after(
    step_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vandal, "_STEP_BYTES", step_bytes)  # copies across and at the edge of a window
    stored = copies(12)
    path, places = tmp_path / "region", {}
    with path.open("wb") as file:
        for index, (key, copy) in enumerate(stored.items()):
            file.seek(64 * index, os.SEEK_CUR)
            places[key] = file.tell()
            file.write(copy)
    assert damage(path) == 12
    content = path.read_bytes()
    for key, at in places.items():
        with pytest.raises(Corrupt, match="payload"):
            verify_copy(content[at:], key)
    changed = [
        at for at, (a, b) in enumerate(zip(content, _rebuilt(stored, places, content), strict=True)) if a != b
    ]
    assert len(changed) == 12


def test_damage_twice_is_no_damage(tmp_path: Path) -> None:
    (key, copy), *_ = copies(1).items()
    (tmp_path / "region").write_bytes(copy)
    assert (damage(tmp_path / "region"), damage(tmp_path / "region")) == (1, 1)
    verify_copy((tmp_path / "region").read_bytes(), key)


def test_what_only_looks_like_a_header_is_left_alone(tmp_path: Path) -> None:
    content = MAGIC + bytes(HEADER_BYTES) + MAGIC
    (tmp_path / "region").write_bytes(content)
    assert damage(tmp_path / "region") == 0
    assert (tmp_path / "region").read_bytes() == content


def test_a_sparse_file_is_damaged_once_and_stays_sparse(tmp_path: Path) -> None:
    path, stored = tmp_path / "region", copies(3)
    with path.open("wb") as file:
        for index, copy in enumerate(stored.values()):
            file.seek((index + 1) * HOLE_BYTES)
            file.write(copy)
        file.truncate(5 * HOLE_BYTES)
    before = path.stat().st_blocks
    assert before * 512 < HOLE_BYTES  # else this file system has no holes and the test shows nothing
    assert damage(path) == 3
    assert path.stat().st_blocks == before
    for index, key in enumerate(stored):
        with path.open("rb") as file:
            file.seek((index + 1) * HOLE_BYTES)
            with pytest.raises(Corrupt):
                verify_copy(file.read(HOLE_BYTES), key)


def _rebuilt(stored: dict[BlockKey, bytes], places: dict[BlockKey, int], content: bytes) -> bytes:
    whole = bytearray(len(content))
    for key, at in places.items():
        whole[at : at + len(stored[key])] = stored[key]
    return bytes(whole)


def test_mapped_regions_are_found() -> None:
    descriptor, name = tempfile.mkstemp(prefix="kvcomm-test-", dir="/dev/shm")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        before = regions_of(os.getpid())
        with mmap.mmap(descriptor, mmap.PAGESIZE):
            assert regions_of(os.getpid()) == sorted([*before, Path(name)])
    finally:
        os.close(descriptor)
        os.unlink(name)
