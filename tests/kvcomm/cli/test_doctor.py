"""Findings of ``kvcomm doctor`` that need no cluster."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcomm.cli import doctor
from kvcomm.config import parse_config

CONFIG = parse_config("cache: {l2_size: 1MiB, l3_size: 1MiB}\ncluster: {shards: 1}\n", ram_bytes=1 << 30)


def free(monkeypatch: pytest.MonkeyPatch, directory: Path, free_bytes: int) -> None:
    monkeypatch.setattr(doctor, "SHM", directory)
    room = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda path: room)


def test_too_little_shared_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, tmp_path, (2 << 20) - 1)
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["problem"]
    free(monkeypatch, tmp_path, 2 << 20)
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["ok"]


def test_what_a_running_cluster_holds_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, tmp_path, 1 << 20)
    with (tmp_path / "kvcomm-x-pool-0").open("wb") as region:
        os.posix_fallocate(region.fileno(), 0, 1 << 20)
    (tmp_path / "somebody-elses").write_bytes(bytes(1 << 20))
    assert [each.verdict for each in doctor._memory(CONFIG)] == ["ok"]


def test_a_host_without_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHM", tmp_path / "none")
    (finding,) = doctor._memory(CONFIG)
    assert finding.verdict == "problem"
