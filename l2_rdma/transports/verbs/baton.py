"""``Baton``: a lock that costs no system call while it is free.

CPython 3.11's locks look at the clock whenever they are taken.  That is nothing where the clock is read in
user space, and a quarter of a small READ where it is not, as in guests that trap it.  A queue of one token
locks as well: whoever has taken the token has the lock.
"""

from __future__ import annotations

from queue import SimpleQueue


class Baton(SimpleQueue[None]):
    """A context manager.  Not reentrant.

    Both ends are methods of C, as a lock's are, so that Ctrl-C arrives before or after and never in between,
    which would leave it taken for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.put(None)

    __enter__ = SimpleQueue.get
    __exit__ = SimpleQueue.put
    """What ``with`` says of an exception is taken for the token and for arguments that ``put`` ignores."""
