"""``Filters``: what a client need not ask its shards for.

Who fetches what nobody has ever published, again and again and always something else, gets past every cache
of absences: each key is asked once.  While most of what a client asks for is absent, it fetches each shard's
filter (``l3_shard.presence``) at most once every ``age_s`` and asks for nothing that all owners' filters rule
out.

What a filter says is true of the moment when its shard sent it.  So a block that was published since, by
somebody else, may be called absent for ``age_s``: the price, as of every remembered absence, and why this is
off by default.  Nothing else is ever called absent that is there:

* A key is ruled out by *all* its owners' filters, and only if these and our ring are of one epoch, which is
  not moving anything: who owns a block does not change between two of them.
* What this client put is never ruled out by filters from before.
* A shard that does not answer, or has nothing to say, may have everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.block import BlockKey
from kvcomm.steps import Steps, ask_all
from kvcomm.tier import Presence
from kvcomm.wire.messages import BlockFilter, BlockFilterGet
from l3_shard.bloom import Layers
from l3_shard.routes import Routes

WINDOW_S = 1.0
FLOOD_KEYS = 256
"""Absent keys within a window that make a flood, if there are as many for each that is there as below."""
FLOOD_RATIO = 4
PUTS_MAX = 16_384
"""Own puts remembered; at one more, all filters are forgotten instead."""


@dataclass(frozen=True, slots=True)
class _Held:
    layers: Layers | None
    """``None``: the shard could not say."""
    epoch: int
    asked_at: float


class Filters:
    """One client's, over all its shards.  Used by many threads: what they share is replaced as a whole, and a
    lost update costs a question.  Own puts must not get lost: they are only ever added, or all forgotten.

    Args:
        age_s: how old a filter may be; 0 = there are none.
    """

    def __init__(self, routes: Routes, age_s: float) -> None:
        self._routes, self._age_s = routes, age_s
        self._held: dict[str, _Held] = {}
        self._puts: dict[BlockKey, float] = {}
        self._forgot_at = float("-inf")
        """What was asked for until then counts for nothing."""
        self._window_at = float("-inf")
        self._counts = (0, 0)  # absent and present keys of this window
        self._flood = False
        self.skipped_count = 0
        """Keys that no shard was asked for, since start."""
        self.fetched_count = 0
        """Filters fetched."""

    def ruled_out(self, keys: Sequence[BlockKey]) -> Steps[list[bool]]:
        """Which of these no owner had ``age_s`` ago at the latest; one round trip every ``age_s``."""
        over = self._routes.now() - self._window_at >= 2 * WINDOW_S
        if not self._age_s or not self._flood or over or self._routes.ring.to_map().transition is not None:
            return [False] * len(keys)
        owners = [self._routes.ring.block_owners(key) for key in keys]
        yield from self._renew({owner for each in owners for owner in each})
        absent = [self._absent(key, each) for key, each in zip(keys, owners, strict=True)]
        self.skipped_count += sum(absent)
        return absent

    def answered(self, said: Sequence[Presence]) -> None:
        """What came of a lookup, those that were ruled out included."""
        if not self._age_s:
            return
        now = self._routes.now()
        if now - self._window_at >= WINDOW_S:
            self._flood = now - self._window_at < 2 * WINDOW_S and _flooded(*self._counts)
            self._counts, self._window_at = (0, 0), now
        absent, present = self._counts
        absent += sum(each is False for each in said)
        present += sum(each is True for each in said)
        self._counts = absent, present
        self._flood = self._flood or _flooded(absent, present)

    def put(self, keys: Sequence[BlockKey]) -> None:
        """This client is about to put these, or has just done so."""
        if not self._age_s:
            return
        now = self._routes.now()
        if len(self._puts) + len(keys) > PUTS_MAX:
            self._forgot_at = now
            self._held, self._puts = {}, {}
        self._puts.update(dict.fromkeys(keys, now))

    def _renew(self, owners: set[str]) -> Steps[None]:
        now, ring = self._routes.now(), self._routes.ring
        due = [
            node
            for node in sorted(owners)
            if self._routes.healthy(node)
            and ((held := self._held.get(node)) is None or now - held.asked_at >= self._age_s)
        ]
        if not due:
            return
        # Noted before they answer: another thread goes on without them meanwhile.
        self._held |= {node: _Held(None, 0, now) for node in due}
        answers = yield from ask_all([self._routes.ask(node, BlockFilterGet(ring.epoch)) for node in due])
        for node, answer in zip(due, answers, strict=True):
            message = answer.message
            if isinstance(message, BlockFilter):
                self.fetched_count += 1
                layers = Layers(message.layers) if message.layers else None
                self._held[node] = _Held(layers, message.epoch, now)
            else:
                self._routes.failed(node, answer)

    def _absent(self, key: BlockKey, owners: Sequence[str]) -> bool:
        epoch, since, put_at = self._routes.ring.epoch, self._routes.now() - self._age_s, self._puts.get(key)
        for owner in owners:
            held = self._held.get(owner)
            if held is None or held.layers is None or held.epoch != epoch or held.asked_at < since:
                return False
            if held.asked_at <= self._forgot_at:
                return False
            if put_at is not None and held.asked_at <= put_at:
                return False
            if key in held.layers:
                return False
        return True


def _flooded(absent: int, present: int) -> bool:
    return absent >= FLOOD_KEYS and absent >= FLOOD_RATIO * present
