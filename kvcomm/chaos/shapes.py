"""Shapes of partitions: which host does not hear which, and what that leaves together.

A *cut* is one direction: ``("n1", "n2")`` = what ``n1`` says does not reach ``n2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvcomm.chaos import network
from kvcomm.chaos.draw import Draw
from kvcomm.errors import ConfigError

Cut = tuple[str, str]
"""From, to."""
ShapeName = Literal["halves", "isolate", "bridge", "ring", "one-way", "alone"]
SHAPES: tuple[ShapeName, ...] = get_args(ShapeName)

MEANINGS: dict[ShapeName, str] = {
    "halves": "groups of which none hears another: groups: [[n1, n2], [n3, n4, n5]]",
    "isolate": "each of these hears nobody and is heard by nobody: groups: [[n3]]",
    "bridge": "two sides that only the middle one hears: groups: [[n1, n2], [n3], [n4, n5]]",
    "ring": "everybody hears two neighbours only; no groups",
    "one-way": "the second group does not hear the first: groups: [[n1], [n3]]",
    "alone": "nobody hears anybody; no groups",
}
_GROUPS: dict[ShapeName, tuple[int, int]] = {
    "halves": (2, 99), "isolate": (1, 99), "bridge": (3, 3), "ring": (0, 0), "one-way": (2, 2),
    "alone": (0, 0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """A shape that a seed has drawn."""

    shape: ShapeName
    groups: tuple[tuple[str, ...], ...]
    flaps: int
    """How often it comes and goes; 1 = it comes once and stays."""

    def describe(self) -> str:
        groups = " | ".join(" ".join(group) for group in self.groups)
        flaps = f", {self.flaps} times" if self.flaps > 1 else ""
        return f"{self.shape}{': ' + groups if groups else ''}{flaps}"


def cuts_of(shape: ShapeName, groups: Sequence[Sequence[str]], nodes: Sequence[str]) -> frozenset[Cut]:
    """What ``shape`` cuts among ``nodes``.

    Raises:
        ConfigError: the shape takes other groups.
    """
    low, high = _GROUPS[shape]
    if not low <= len(groups) <= high or not all(groups):
        raise ConfigError(f"shape {shape} with {len(groups)} groups; it is {MEANINGS[shape]}")
    named = [node for group in groups for node in group]
    if len(set(named)) != len(named) or not set(named) <= set(nodes):
        raise ConfigError(
            f"the groups of shape {shape} name {named}; nodes are {', '.join(nodes)}, each once"
        )
    return frozenset(_pairs(shape, groups, nodes))


def _pairs(shape: ShapeName, groups: Sequence[Sequence[str]], nodes: Sequence[str]) -> set[Cut]:
    if shape == "ring":
        return network.ring(nodes)
    if shape == "alone":
        return network.everybody_alone(nodes)
    if shape == "bridge":
        return network.halves(groups[0], groups[2])
    if shape == "one-way":
        return {(source, target) for source in groups[0] for target in groups[1]}
    if shape == "isolate":
        return {pair for group in groups for node in group for pair in network.isolate(node, nodes)}
    return {
        pair
        for at, one in enumerate(groups)
        for other in groups[at + 1 :]
        for pair in network.halves(one, other)
    }


def sides(nodes: Sequence[str], cuts: Iterable[Cut]) -> tuple[tuple[str, ...], ...]:
    """Who is still together: groups in which everybody hears everybody and nobody else.

    Where there are no such groups (a bridge, a ring, one way), each node is a side of its own.
    """
    lost = set(cuts)
    neighbours = {
        node: tuple(other for other in nodes if other == node or not {(node, other), (other, node)} & lost)
        for node in nodes
    }
    groups = {neighbours[node] for node in nodes}
    disjoint = sum(map(len, groups)) == len(nodes)
    closed = disjoint and all((a, b) in lost for one in groups for a in one for b in nodes if b not in one)
    if not closed:
        return tuple((node,) for node in nodes)
    return tuple(sorted(groups, key=lambda group: nodes.index(group[0])))


def draw_shape(draw: Draw, nodes: Sequence[str]) -> Drawn:
    """Any shape that leaves something cut."""
    shape = draw.choice(SHAPES)
    mixed = tuple(draw.some(nodes, len(nodes)))
    flaps = draw.between(2, 6) if draw.chance(0.25) else 1
    groups: tuple[tuple[str, ...], ...] = ()
    match shape:
        case "halves":
            at = draw.between(1, len(nodes) - 1)
            groups = mixed[:at], mixed[at:]
        case "isolate":
            groups = (mixed[: draw.between(1, 2)],)
        case "bridge":
            middle = len(nodes) // 2
            groups = mixed[:middle], mixed[middle : middle + 1], mixed[middle + 1 :]
        case "one-way":
            groups = mixed[:1], mixed[1 : 1 + draw.between(1, len(nodes) - 1)]
        case "ring" | "alone":
            groups = ()
    return Drawn(shape, groups, flaps)
