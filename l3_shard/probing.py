"""``Probing``: finds out, beside an operation on blocks, whether shards that gave no answer answer again.

A shard that was silent is passed over for up to ``SHUN_MAX_S``: asking it would cost a whole request's time
each time.  After the end of a split that is long.  So an operation that would have asked it sends it a
``Ping`` beside its own requests, every ``PROBE_EVERY_S`` at most, and gives that a moment more at its end: a
connection has to be opened first.  Where nobody else is left to ask, it waits for the pings before it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kvcomm.steps import Answer, Call, Steps, Submit, Wait, WaitAny
from kvcomm.wire.messages import Pong
from l3_shard.routes import Routes

T = TypeVar("T")

END_WAIT_S = 0.03
"""Of an operation with pings under way: a few round trips, and a few hundredths of a client's time."""
ALONE_WAIT_S = 0.1
"""For pings where nobody else can be asked."""


class Probing:
    """Beside one operation on ``keys``."""

    def __init__(self, routes: Routes, keys: Sequence[bytes]) -> None:
        self._routes, self._keys = routes, keys
        self._open: list[tuple[str, Call]] = []

    def around(self, operation: Steps[T]) -> Steps[T]:
        """The operation's steps, with the pings around them."""
        silent = self._routes.silent_shards()
        if silent:
            yield from self._begin(silent)
        result: T = yield from operation
        yield from self._hear(END_WAIT_S)
        return result

    def _begin(self, silent: set[str]) -> Steps[None]:
        ring = self._routes.ring
        wanted = {node for key in self._keys for node in ring.block_keepers(key)}
        asked = [node for node in sorted(wanted & silent) if self._routes.may_probe(node)]
        if asked:
            calls: list[Call] = yield Submit([self._routes.ping(node) for node in asked])
            self._open = list(zip(asked, calls, strict=True))
        if wanted <= silent:
            yield from self._hear(ALONE_WAIT_S)

    def _hear(self, wait_s: float) -> Steps[None]:
        """Those that answer within ``wait_s``; the first one is enough where there was nobody."""
        until = self._routes.now() + wait_s
        while self._open:
            timeout_s = max(0.0, until - self._routes.now())
            done: Call | None = yield WaitAny([call for _, call in self._open], timeout_s)
            if done is None:
                return
            node = next(node for node, call in self._open if call is done)
            self._open = [each for each in self._open if each[1] is not done]
            answer: Answer = yield Wait(done)
            if isinstance(answer.message, Pong):
                self._routes.heard(node)
                until = self._routes.now()
