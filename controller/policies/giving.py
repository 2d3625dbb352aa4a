"""Moves that give a part of what one shard is the first owner of to another one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from controller.policies.port import Move
from controller.policies.view import CIRCLE, LoadView

STRETCHES_MAX = 128
"""Stretches that one plan gives away: each becomes a range of the map."""


def give(view: LoadView, giver: str, taker: str, share: float, stretches_max: int) -> list[Move]:
    """About ``share`` of all keys go from ``giver`` to ``taker``, as ranges of at most ``stretches_max``
    stretches of the circle.

    Which keys are busy is not known here, so they are taken from all over what the giver has: what they bring
    with them is then the share of its load that they are of its keys.  Stretches that were given to the
    giver earlier go first: the map has no more ranges after that.
    """
    ordered = [(each.first, each.last) for each in view.ring.ranges if each.node == giver]
    earlier = _Spans(ordered)
    ordered += _spread([each for each in view.stretches.get(giver, []) if not earlier.meet(*each)])
    wanted = share * CIRCLE
    moves: list[Move] = []
    for first, last in ordered[:stretches_max]:
        length = last - first + 1
        if length > 1.5 * wanted and moves:
            break
        if length > wanted:
            last = first + max(1, int(wanted)) - 1
        moves.append(Move(taker, first=first, last=last))
        wanted -= last - first + 1
        if wanted <= 0:
            break
    return moves


def given_share(moves: Sequence[Move]) -> float:
    """Of all keys, that these ranges are."""
    return sum(
        (move.last - move.first + 1) / CIRCLE
        for move in moves
        if move.first is not None and move.last is not None
    )


class _Spans:
    """Ordered, without overlaps."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._firsts = [first for first, _ in spans]
        self._lasts = [last for _, last in spans]

    def meet(self, first: int, last: int) -> bool:
        """Whether one of them has a point of these."""
        at = bisect_left(self._lasts, first)
        return at < len(self._firsts) and self._firsts[at] <= last


def _spread(stretches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """All of them, in an order whose every beginning is spread over the whole: by the golden section."""
    count = len(stretches)
    order = sorted(range(count), key=lambda index: (index * 0.6180339887498949) % 1.0)
    return [stretches[index] for index in order]
