"""The client's side of the data wire.

``blocking`` is for agents' threads, ``asynchronous`` for event loops; both run the ``Steps`` of
``kvcomm.steps`` over the same sans-I/O ``session``.  The asynchronous names are loaded when first used:
asyncio would be most of the time that ``import kvcomm`` takes.
"""

from typing import TYPE_CHECKING, Any

from kvcomm.rpc.blocking import Connection, Peers, iterate_blocking, run_blocking
from kvcomm.rpc.session import KEY_VECTOR, Identity

if TYPE_CHECKING:
    from kvcomm.rpc.asynchronous import AsyncPeers, Request, iterate_async, run_async

__all__ = [
    "KEY_VECTOR",
    "AsyncPeers",
    "Connection",
    "Identity",
    "Peers",
    "Request",
    "iterate_async",
    "iterate_blocking",
    "run_async",
    "run_blocking",
]


def __getattr__(name: str) -> Any:
    if name in ("AsyncPeers", "Request", "iterate_async", "run_async"):
        from kvcomm.rpc import asynchronous

        return getattr(asynchronous, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
