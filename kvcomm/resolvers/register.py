"""``Register``: one value, the last writer wins *among concurrent writes only*.

A write replaces whatever its author and its coordinator had seen, whatever the clocks say.  Writes that knew
nothing of each other are ordered by hybrid logical time, then replica; only the last is ever shown.

**This class loses writes**: of two acknowledged concurrent writes one is gone without a word.  It is for
values where that is what one wants: a heartbeat, a cursor, "last seen".
"""

from __future__ import annotations

from typing import cast

import msgspec

from kvcomm.resolvers.resolver import Moment, Resolver


class Held(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Ordered by who wins."""

    stamp: int
    replica: str
    counter: int
    value: bytes


class Register(Resolver[Held, bytes, bytes | None]):
    """Deltas are values; shown as the winner, ``None`` if absent."""

    replaces_known = True

    def __init__(self, name: str) -> None:
        super().__init__(name, Held, bytes)

    def _load(self, stored: object) -> Held:
        return cast("Held", stored)

    def _store(self, state: Held) -> object:
        return state

    def _merge(self, one: Held, two: Held) -> Held:
        return max(one, two)

    def _change(self, state: Held | None, delta: bytes, moment: Moment) -> Held:
        return Held(moment.stamp, moment.dot.replica, moment.dot.counter, delta)

    def _show(self, state: Held | None) -> bytes | None:
        return None if state is None else state.value
