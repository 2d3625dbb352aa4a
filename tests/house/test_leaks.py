"""The leak check fires on a process, on an orphan and on shared memory, and on nothing else."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import leaks

DEADLINE_S = 10.0
WAIT_FOR_STDIN = "import sys; sys.stdin.read()"


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of this test's own; the processes that it starts belong to that run."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(leaks.MARK, mark)
    return mark


@pytest.fixture
def child(run_id: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WAIT_FOR_STDIN], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def segment() -> Iterator[Path]:
    path = leaks.SHM_DIR / f"kvcomm-leak-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    if not leaks.SHM_DIR.is_dir():
        pytest.skip(f"{leaks.SHM_DIR} does not exist here")
    path.write_bytes(b"\0" * 4096)
    yield path
    path.unlink()


@pytest.mark.processes
def test_a_living_child_is_reported_until_it_ends(run_id: str, child: subprocess.Popen[bytes]) -> None:
    assert [process.pid for process in leaks.processes_of_run(run_id)] == [child.pid]
    (line,) = leaks.left_behind(run_id, leaks.shared_memory())
    assert str(child.pid) in line
    assert WAIT_FOR_STDIN in line

    child.kill()
    child.wait(DEADLINE_S)
    assert leaks.processes_of_run(run_id) == []


@pytest.mark.processes
@pytest.mark.slow
def test_an_orphan_is_reported(run_id: str) -> None:
    code = (
        "import subprocess, sys;"
        f"command = [sys.executable, '-c', {WAIT_FOR_STDIN!r}];"
        "p = subprocess.Popen(command, stdin=0, stdout=subprocess.DEVNULL);"
        "print(p.pid)"
    )
    # The grandchild waits on our end of this pipe, so it ends with us whatever happens here.
    read_end, write_end = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=read_end,
            stdout=subprocess.PIPE,
            timeout=DEADLINE_S,
            check=True,
        )
        orphan = int(done.stdout)
        assert [process.pid for process in leaks.processes_of_run(run_id)] == [orphan]
    finally:
        os.close(write_end)
        os.close(read_end)
    psutil.wait_procs(leaks.processes_of_run(run_id), timeout=DEADLINE_S)
    assert leaks.until_empty(lambda: leaks.left_behind(run_id, leaks.shared_memory()), DEADLINE_S) == []


@pytest.mark.processes
def test_another_runs_process_is_spared(child: subprocess.Popen[bytes]) -> None:
    assert leaks.processes_of_run(uuid.uuid4().hex) == []


def test_a_new_segment_is_reported_and_an_old_one_spared(run_id: str, segment: Path) -> None:
    before = leaks.shared_memory()
    assert f"shared memory {segment}" in leaks.left_behind(run_id, before - {segment})
    assert f"shared memory {segment}" not in leaks.left_behind(run_id, before)


@pytest.mark.processes
@pytest.mark.slow
def test_a_segment_that_another_run_has_mapped_is_spared(run_id: str, segment: Path) -> None:
    code = (
        "import mmap, sys;"
        f"f = open({str(segment)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        "print('mapped', flush=True); sys.stdin.read()"
    )
    environment = os.environ | {leaks.MARK: uuid.uuid4().hex}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"mapped\n"
            assert leaks.mapped_elsewhere(segment, run_id)
        finally:
            other.kill()


def test_runtime_dir_is_private_and_named_by_the_environment(runtime_dir: Path) -> None:
    assert os.environ["KVCOMM_RUNTIME_DIR"] == str(runtime_dir)
    assert runtime_dir.stat().st_mode & 0o777 == 0o700
    assert list(runtime_dir.iterdir()) == []
