"""Limits of processor time: the right hierarchy is found, processes are slowed down and come back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcomm.chaos.live import quotas
from kvcomm.chaos.live.quotas import Hierarchy, Quotas
from kvcomm.errors import Unavailable

SPIN = "while True: pass"
FIRST = "30 24 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"


def test_the_hierarchy_that_limits_processor_time_is_found() -> None:
    mounts = FIRST + "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
    assert quotas._find(mounts) == Hierarchy(Path("/sys/fs/cgroup/cpu,cpuacct"), unified=False)
    with pytest.raises(Unavailable, match="no control groups"):
        quotas._find(FIRST)


def test_of_version_2_the_controller_is_switched_on(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory")
    mounts = FIRST + f"32 24 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate\n"
    assert quotas._find(mounts) == Hierarchy(tmp_path, unified=True)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    (tmp_path / "group").mkdir()
    Hierarchy(tmp_path, unified=True).set(tmp_path / "group", 12.5)
    assert (tmp_path / "group" / "cpu.max").read_text() == "12500 100000"
    with pytest.raises(Unavailable, match="no cpu controller"):
        quotas._find(f"32 24 0:28 / {tmp_path}/gone rw - cgroup2 cgroup2 rw\n")


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    if why := quotas.missing():
        pytest.skip(why)
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    yield process
    process.kill()
    process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pid: int, for_s: float = 1.5) -> float:
    """Of a core that it had."""
    begin, before = time.monotonic(), cpu_s(pid)
    time.sleep(for_s)
    return (cpu_s(pid) - before) / (time.monotonic() - begin)


@pytest.mark.processes
def test_processes_are_slowed_down_and_go_back_to_where_they_were(spinning: subprocess.Popen[bytes]) -> None:
    home = Path(f"/proc/{spinning.pid}/cgroup").read_text()
    limits = Quotas()
    try:
        limits.limit("some", [spinning.pid], 5.0)
        assert Path(f"/proc/{spinning.pid}/cgroup").read_text() != home
        slow = share(spinning.pid)
        assert slow < 0.1
        limits.limit("some", [spinning.pid], 100.0)
        limits.lift("some")
        limits.lift("some")
        assert Path(f"/proc/{spinning.pid}/cgroup").read_text() == home
        assert share(spinning.pid) > 2 * slow
        limits.limit("more", [spinning.pid], 5.0)
    finally:
        limits.close()
    assert Path(f"/proc/{spinning.pid}/cgroup").read_text() == home
    assert not list(quotas._hierarchy().top.glob(f"{quotas.PREFIX}-{os.getpid()}-*"))


@pytest.mark.processes
def test_what_a_killed_story_left_behind_is_removed(spinning: subprocess.Popen[bytes]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    hierarchy = quotas._hierarchy()
    left = hierarchy.top / f"{quotas.PREFIX}-{ended.pid}-n1-all"
    left.mkdir()
    (left / "cgroup.procs").write_text(str(spinning.pid))
    quotas._hierarchy()
    assert not left.exists() and spinning.poll() is None
