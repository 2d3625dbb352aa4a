"""Whether an LMDB file can be read from end to end: run as a program, because the file may end its reader.

LMDB reads through a memory map and trusts its pages.  Where the file is shorter than its own tree says, a
look is a ``SIGBUS``; a flipped bit in a page can be a wild jump.  No ``try`` catches that, and a shard that
met it would die, be started again and die again.  So after an unclean end the whole database is read once by
a child process (:func:`unsound`), whose end tells.

This finds a tree that cannot be walked.  Values have checksums of their own and are verified when they are
read.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import lmdb

WALK_TIMEOUT_S = 10.0
"""A database that takes longer (some gigabytes from a cold disk) is used without a verdict: a node that does
not come up in time is taken for dead."""

START_TIMEOUT_S = 10.0
"""For the child to get so far that it ends itself."""

_DAMAGED = 3
_BY_DAMAGE = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)
_REFUSALS = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, ValueError)


def unsound(directory: Path, timeout_s: float = WALK_TIMEOUT_S) -> str:
    """Why the database in ``directory`` is damaged; empty = it is not, or nobody can tell: a disk that fails,
    a file of another owner or a reader out of memory says nothing about what is in it."""
    command = [sys.executable, "-P", __file__, str(directory), str(timeout_s)]
    try:
        walked = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s + START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return ""
    if walked.returncode == _DAMAGED:
        return walked.stderr.strip()
    if -walked.returncode in _BY_DAMAGE:
        return f"reading it ends the reader by {signal.Signals(-walked.returncode).name}: it is cut short"
    return ""


def walk(directory: Path) -> int:
    """Touch every page that the tree leads to; the number of entries.

    Raises:
        lmdb.Error: what LMDB itself refuses.
        ValueError: keys are out of order or missing.
    """
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=8) as environment:
        return sum(_walk(environment, name) for name in _names(environment))


def _names(environment: lmdb.Environment) -> list[bytes]:
    with environment.begin() as transaction, transaction.cursor() as cursor:
        return [bytes(name) for name in cursor.iternext(values=False)]


def _walk(environment: lmdb.Environment, name: bytes) -> int:
    database = environment.open_db(name, create=False)
    count, last = 0, b""
    with environment.begin(buffers=True) as transaction, transaction.cursor(db=database) as cursor:
        for key, value in cursor:
            bytes(value[-1:])  # the end of a large value lies on another page
            if bytes(key) <= last:
                raise ValueError("its keys are out of order")
            count, last = count + 1, bytes(key)
        if count != transaction.stat(database)["entries"]:
            raise ValueError("it lacks entries that it counts")
    return count


def main(directory: str, timeout_s: str) -> int:
    signal.setitimer(signal.ITIMER_REAL, float(timeout_s))  # which ends this process, wherever it is
    try:
        walk(Path(directory))
    except _REFUSALS as error:
        sys.stderr.write(f"it cannot be walked: {error}")
        return _DAMAGED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
