"""``Wires``: this process's transports, one of each kind, made when a pool is first attached through them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcomm.errors import Unavailable
from kvcomm.slabs import Slabs
from l2_rdma.transports.known import Found, find_transports
from l2_rdma.transports.port import Transport, TransportName, WireOptions


class Wires:
    """Thread-safe.  A forked child makes its own.

    Args:
        names: the transports that may be used, preferred first (``network.transports``).
        slabs: where copies are received; registered with each transport that is used.
    """

    def __init__(
        self, names: Sequence[str], options: WireOptions | None = None, slabs: Slabs | None = None
    ) -> None:
        self.names = tuple(names)
        self.slabs = slabs or Slabs()
        self._options = options or WireOptions()
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._found: Found[Transport] | None = None
        self._user_count = 0
        self._closed = False

    def found(self) -> Found[Transport]:
        """Those that run in this process, and why the others do not.  The first call may take long: libraries
        are loaded and devices asked.  Call it within :meth:`using`.

        ``shm`` is not among them: a pool's memory on this host is mapped by ``l2_rdma.attachment`` itself.
        """
        with self._lock:
            if self._found is None:
                self._found = find_transports([name for name in self.names if name != "shm"], self._options)
            return self._found

    def used(self, name: TransportName) -> None:
        """Copies come through this one from now on."""
        found = self.found()
        self.slabs.register_with(name, found.running[name].register)

    @contextmanager
    def using(self) -> Iterator[None]:
        """The transports are not closed before this ends.

        Raises:
            Unavailable: they are being closed.
        """
        self._reset_after_fork()
        lock = self._lock
        with lock:
            if self._closed:
                raise Unavailable("this client is closed")
            self._user_count += 1
        try:
            yield
        finally:
            with lock:
                self._user_count -= 1
                closing = self._is_over()
            if closing:
                self._end()

    def close(self) -> None:
        """When the last user is done.  Idempotent."""
        self._reset_after_fork()
        with self._lock:
            closing = not self._closed and not self._user_count
            self._closed = True
        if closing:
            self._end()

    def _is_over(self) -> bool:
        return self._closed and not self._user_count

    def _reset_after_fork(self) -> None:
        """Queue pairs and sockets are the parent's."""
        if self._process == os.getpid():
            return
        self._lock = threading.Lock()
        self._found, self._user_count = None, 0
        self._process = os.getpid()  # last: from now on other threads take the lock, which must be ours

    def _end(self) -> None:
        with self._lock:
            found, self._found = self._found, None
        for name, transport in (found.running if found is not None else {}).items():
            self.slabs.unregister(name)  # before the transport, whose affair they are
            transport.close()
