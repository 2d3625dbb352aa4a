"""``Loopback``: hosts that are nothing but names; every process drops by itself what a cut would.

No root needed.  What a drop table cannot do (loss, slowness, a refused connection that is silent) is left to
``Namespaces``, which is also the referee of whether the tables are honest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcomm.chaos.scenario import Step
from kvcomm.chaos.shapes import Cut
from kvcomm.wire.messages import DropPeer

ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One process of a host, as the others know it."""

    addresses: tuple[str, ...]
    caller: int


class Loopback:
    """``count`` hosts, ``n1`` ...

    Args:
        endpoints: the processes that serve on each host, now.
        tell: give every process of a host its table.
    """

    kind = "loopback"
    able: frozenset[type[Step]] = frozenset()

    def __init__(
        self,
        count: int,
        endpoints: Callable[[], Mapping[str, Sequence[Endpoint]]],
        tell: Callable[[str, Sequence[DropPeer]], None],
    ) -> None:
        self.nodes = [f"n{index}" for index in range(1, count + 1)]
        self._endpoints, self._tell = endpoints, tell
        self._cuts: frozenset[Cut] = frozenset()

    def address(self, node: str) -> str:
        return ADDRESS

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def cut(self, cuts: Iterable[Cut]) -> None:
        self._cuts = frozenset(cuts)
        self.repeat(self.nodes)

    def repeat(self, nodes: Sequence[str]) -> None:
        """Say it again: a process that has started since knows nothing."""
        endpoints = self._endpoints()
        for node in nodes:
            self._tell(node, list(drops_of(node, self._cuts, endpoints)))

    def lose(self, percent: float) -> None:
        raise NotImplementedError("a drop table loses no packets; Loopback.able says so")

    def slow(self, node: str, kbit_s: int) -> None:
        raise NotImplementedError("a drop table limits no rate; Loopback.able says so")

    def heal(self) -> None:
        self.cut(())

    def close(self) -> None:
        """There is nothing to remove."""


def drops_of(
    node: str, cuts: frozenset[Cut], endpoints: Mapping[str, Sequence[Endpoint]]
) -> Iterable[DropPeer]:
    """The part of ``cuts`` that a process of ``node`` does: each side of a direction holds it back."""
    for other in sorted(endpoints):
        mute, deaf = (node, other) in cuts, (other, node) in cuts
        if mute or deaf:
            for each in endpoints[other]:
                yield DropPeer(list(each.addresses), each.caller, mute, deaf)
