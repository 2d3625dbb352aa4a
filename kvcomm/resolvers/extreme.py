"""``Extreme``: the largest (or smallest) number that anybody offered."""

from __future__ import annotations

import math
from typing import cast

from kvcomm.resolvers.resolver import INTEGER_MAX, Moment, Resolver

Number = int | float


class Extreme(Resolver[Number, Number, Number | None]):
    """States and deltas are numbers: ``int`` within 64 bits, finite ``float``.  They are compared exactly,
    and of equal ones the ``float`` counts as larger, so that the order is total."""

    uses_known = False

    def __init__(self, name: str, *, largest: bool) -> None:
        super().__init__(name, Number, Number)  # type: ignore[arg-type]  # a union is no ``type``
        self._largest = largest

    def _load(self, stored: object) -> Number:
        number = cast("Number", stored)
        self._check_delta(number)
        return number

    def _store(self, state: Number) -> object:
        return state

    def _merge(self, one: Number, two: Number) -> Number:
        return (max if self._largest else min)(one, two, key=_order)

    def _change(self, state: Number | None, delta: Number, moment: Moment) -> Number:
        number = delta + 0.0 if isinstance(delta, float) else delta  # -0.0 equals 0.0 and has other bytes
        return number if state is None else self._merge(state, number)

    def _show(self, state: Number | None) -> Number | None:
        return state

    def _check_delta(self, delta: Number) -> None:
        if isinstance(delta, float) and not math.isfinite(delta):
            raise ValueError(f"{delta} is not a finite number")
        if isinstance(delta, int) and not -INTEGER_MAX - 1 <= delta <= INTEGER_MAX:
            raise ValueError(f"{delta} has more than 64 bits")


def _order(number: Number) -> tuple[Number, bool]:
    return number, isinstance(number, float)
