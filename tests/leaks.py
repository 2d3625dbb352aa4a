"""What a test run must not leave behind: processes and POSIX shared memory.

Processes carry the run's mark in their environment, so that orphans are found as well, and so that two runs
on one machine do not accuse each other. Shared memory carries no mark: a new segment counts as ours unless a
process of another run has it mapped.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

MARK = "KVCOMM_TEST_RUN"
SHM_DIR = Path("/dev/shm")
SHM_GLOB = "kvcomm-*"

# Lives until the interpreter exits, by design of the standard library: it unlinks what a crash would leave.
_STANDARD_LIBRARY_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def processes_of_run(run_id: str) -> list[psutil.Process]:
    """Living descendants and orphans of the run `run_id`, this process and zombies excluded."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and _is_of_run(process, run_id):
                found.append(process)
    return found


def shared_memory() -> set[Path]:
    """The segments of KVCOMM that exist on this machine now, whoever made them."""
    return set(SHM_DIR.glob(SHM_GLOB))


def mapped_elsewhere(segment: Path, run_id: str) -> bool:
    """True if a process outside of the run has `segment` mapped: then it is not ours to judge."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if str(segment) in Path(f"/proc/{process.pid}/maps").read_text() and not (
                process.pid == os.getpid() or _is_of_run(process, run_id)
            ):
                return True
    return False


def left_behind(run_id: str, shm_before: set[Path]) -> list[str]:
    """One line for each process and each new segment that the run still holds."""
    lines = []
    for process in processes_of_run(run_id):
        with contextlib.suppress(psutil.Error):
            lines.append(f"process {process.pid}: {' '.join(process.cmdline())}")
    lines += [
        f"shared memory {segment}"
        for segment in sorted(shared_memory() - shm_before)
        if not mapped_elsewhere(segment, run_id)
    ]
    return lines


def until_empty(look: Callable[[], list[str]], timeout_s: float) -> list[str]:
    """Look again until nothing is left or the time is over; what was seen last."""
    for seen in _looks(look, timeout_s):
        if not seen:
            return []
    return seen


def _looks(look: Callable[[], list[str]], timeout_s: float) -> Iterator[list[str]]:
    deadline = time.monotonic() + timeout_s
    yield look()
    while time.monotonic() < deadline:
        time.sleep(0.05)
        yield look()


def _is_of_run(process: psutil.Process, run_id: str) -> bool:
    if process.status() == psutil.STATUS_ZOMBIE or process.environ().get(MARK) != run_id:
        return False
    command = " ".join(process.cmdline())
    return not any(helper in command for helper in _STANDARD_LIBRARY_HELPERS)
