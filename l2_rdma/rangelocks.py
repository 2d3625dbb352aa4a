"""Locks of the kernel's on byte ranges of a file.

They belong to an open file description and end with the last process that has it.  Threads and forked
children share it, so the kernel does not tell them apart.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def try_lock(descriptor: int, start: int, length: int) -> bool:
    """Hold the range, for writing; ``False`` if somebody else does."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, start, length))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, start, length))


def is_locked(descriptor: int, start: int, length: int) -> bool:
    """Whether somebody else holds any of the range."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, start, length))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _lock(kind: int, start: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
