"""Store-to-load fences between processes, from plain CPython.

The hazard protocol (see ``l2_rdma.hazards``) needs one on each side: a reader stores its hazard *then* loads
the slot's generation; the owner stores the retired generation *then* loads the hazards.  x86 and Arm both let
a later load overtake an earlier store, and then each side misses the other's.

Two fences, used together:

* :func:`full_fence`: take and release a lock.  CPython's locks are POSIX semaphores; on x86 that is two
  locked instructions, each a full fence (about 0.1 us).  On Arm they only acquire and release, which is *not*
  a full fence.
* :func:`barrier_everywhere`: the kernel's ``membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)``, issued by the
  owner, makes every running thread of every *registered* process execute a full fence (about 1 us; Linux >=
  4.16).  Readers register once with :func:`register_for_barriers`.  This makes the reader's side right on any
  architecture.

Where neither is to be had (Arm with ``membarrier`` filtered) the owner leaves a retired slot alone for a
grace period, far longer than a store stays in a store buffer: see :func:`grace_s`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

_MEMBARRIER = {"x86_64": 324, "aarch64": 283}
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 2, 4
_GRACE_S = 0.010

_lock = threading.Lock()


def full_fence() -> None:
    """Order this thread's earlier stores before its later loads (on x86; see the module's text)."""
    _lock.acquire()
    _lock.release()


def register_for_barriers() -> bool:
    """Let owners fence this process's threads; False where the kernel does not offer it."""
    return _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier_everywhere() -> None:
    """Fence this thread, and the threads of all registered processes where the kernel offers it."""
    full_fence()
    _membarrier(_GLOBAL_EXPEDITED)


def grace_s() -> float:
    """How long the owner must let a retired slot rest before it looks at the hazards: 0 where the fences are
    full."""
    return 0.0 if platform.machine() == "x86_64" or _membarrier(_GLOBAL_EXPEDITED) else _GRACE_S


def _membarrier(command: int) -> bool:
    number = _MEMBARRIER.get(platform.machine())
    if number is None:
        return False
    return bool(
        _libc.syscall(ctypes.c_long(number), ctypes.c_int(command), ctypes.c_uint(0), ctypes.c_int(0)) == 0
    )


def _after_fork_in_child() -> None:
    """Another thread may have been inside the fence: the child has the taken lock, and not the thread."""
    global _lock  # noqa: PLW0603 - a fork leaves the old one in an unknown state
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
_libc = ctypes.CDLL(None, use_errno=True)
