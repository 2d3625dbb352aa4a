"""``Recheck``: what a shard finds out before it answers callers again after it stood still, or was away.

A shard that was stopped for a while goes on with what it believed then, and with a queue of requests from
then.  Strong votes and acknowledged records are on its disk and need no second look; requests whose senders
have given up are not begun (``kvcomm.serve``).  What may be wrong is the *ring*: the cluster may have gone on
to another epoch without it, and a read that it answers by itself would be answered by an owner of the past.

::

    stood still ──► ask all others for their map ──► all have told, or failed, ──► answer what was held,
                    callers' requests wait           or RECHECK_S are over         under the newest map

After ``RECHECK_S`` it goes on with what it has: in a minority there is nobody to ask, and eventual records
are served there all the same.  A new epoch reaches one shard after the other, so one answer would not do.
Peers' requests do not wait: each is compared with the epoch anyhow, and two shards that were stopped together
would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvcomm.errors import Refused
from kvcomm.machine import Origin
from kvcomm.wire.messages import Message, RecordPut, RingGet, RingMap, StrongChange
from l3_shard.desk import Desk
from l3_shard.ring import Ring
from l3_shard.timers import Timers

RECHECK_S = 0.5
HELD_MAX = 1_024
HELD_BYTES_MAX = 64 << 20


class _Held(NamedTuple):
    origin: Origin
    message: Message
    arrived_at: float


class Recheck:
    """See the module.

    Args:
        ring: the newest that we know.
        adopt: takes up a map if it is newer.
        serve: begins a request that was held, as of when it arrived.
    """

    def __init__(
        self,
        node: str,
        desk: Desk,
        timers: Timers,
        *,
        ring: Callable[[], Ring],
        adopt: Callable[[RingMap], None],
        serve: Callable[[Origin, Message, float], None],
    ) -> None:
        self.count = 0
        """How often we stood still."""
        self._node, self._desk, self._timers = node, desk, timers
        self._ring, self._adopt, self._serve = ring, adopt, serve
        self._number = 0
        """Of the doubt."""
        self._in_doubt = False
        self._asked_number = 0
        """Of the doubt about which the others were asked last: only that one can end."""
        self._silent: set[str] = set()
        """Who has not answered yet."""
        self._held: list[_Held] = []
        self._held_bytes = 0

    def resumed(self) -> None:
        """We stood still until now."""
        self.count += 1
        self.doubt()

    def doubt(self) -> None:
        """What we know of the ring may be old."""
        self._number += 1
        others = [name for name in self._ring().names if name != self._node]
        if not others or self._node not in self._ring():
            self._over(self._number)  # what has been held since an earlier time is for this ring to refuse
            return
        self._in_doubt, self._asked_number, self._silent = True, self._number, set(others)
        for node in others:
            self._desk.ask(node, RingGet(), partial(self._heard, self._number, node))
        self._timers.at(self._desk.now + RECHECK_S, partial(self._over, self._number))

    def holds(self, origin: Origin, message: Message) -> bool:
        """Whether a caller's request has to wait; it is served later.

        Raises:
            Refused: too many wait.
        """
        if not self._in_doubt:
            return False
        value_bytes = _value_bytes(message)
        if len(self._held) >= HELD_MAX or self._held_bytes + value_bytes > HELD_BYTES_MAX:
            raise Refused(f"busy: {len(self._held)} requests wait until the ring is known again; slow down")
        self._held.append(_Held(origin, message, self._desk.now))
        self._held_bytes += value_bytes
        return True

    def _heard(self, number: int, node: str, answer: Message) -> None:
        if isinstance(answer, RingMap):
            self._adopt(answer)
        if number != self._number or not self._in_doubt:
            return
        self._silent.discard(node)
        if not self._silent:
            self._over(number)

    def _over(self, number: int) -> None:
        if number != self._number or not self._in_doubt:
            return
        self._in_doubt = False
        held, self._held, self._held_bytes = self._held, [], 0
        for origin, message, arrived_at in held:
            self._serve(origin, message, arrived_at)

    def check(self) -> None:
        """Assert that nothing is held for nothing and the bounds hold."""
        assert self._in_doubt or not self._held
        assert not self._in_doubt or self._asked_number == self._number, "a doubt that nobody ends"
        assert len(self._held) <= HELD_MAX and self._held_bytes <= HELD_BYTES_MAX


def _value_bytes(message: Message) -> int:
    if isinstance(message, RecordPut):
        return sum(len(write.value or b"") for write in message.writes)
    if isinstance(message, StrongChange):
        return sum(len(order.value or b"") for order in message.changes)
    return 0
