"""``Locating``: one lookup of many blocks: who of their owners has them.

The fastest owner is asked first.  What it has not, or did not say in the usual time, the next owner is asked
for, so a block with several copies is found although one owner lost it or stands still.  Who was slow may
still answer first.  "Absent" is said only when every owner said so: where one says it and another is late,
nobody waits, and the answer is ``None``.  While keys are being moved all that keep the block are owners here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcomm.block import BlockKey
from kvcomm.steps import Answer, Call, Steps, Submit, Wait, WaitAny
from kvcomm.tier import Presence
from kvcomm.wire.messages import KEYS_MAX, BlockLookup, BlockPresence
from l3_shard.routes import Routes


@dataclass(eq=False, slots=True)
class _Asking:
    """One question under way."""

    node: str
    indices: list[int]
    began: float
    call: Call
    outlasted: bool = False


class Locating:
    """One operation; run :meth:`steps` once."""

    def __init__(self, routes: Routes, keys: Sequence[BlockKey]) -> None:
        self._routes, self._keys = routes, keys
        self._found: list[Presence] = [None] * len(keys)
        self._tried: list[list[str]] = [[] for _ in keys]
        self._absent_at: list[set[str]] = [set() for _ in keys]  # who said so; old owners may be among them
        self._open: list[_Asking] = []
        self._renewed = False

    def steps(self) -> Steps[list[Presence]]:
        """One round trip if the first owners have all, one more for each further owner or a newer map."""
        todo: Sequence[int] = range(len(self._keys))
        while True:
            yield from self._ask(todo)
            mattering = [asking for asking in self._open if self._matters(asking)]
            if not mattering:
                return [self._said(index) for index in range(len(self._keys))]
            overdue = min((at for at in map(self._overdue_at, mattering) if at is not None), default=None)
            timeout_s = None if overdue is None else max(0.0, overdue - self._routes.now())
            done: Call | None = yield WaitAny([asking.call for asking in mattering], timeout_s)
            if done is None:
                todo = self._ask_others(mattering)
                continue
            asking = next(asking for asking in mattering if asking.call is done)
            self._open.remove(asking)
            answer: Answer = yield Wait(done)
            todo = self._take(asking, answer)

    def _ask(self, todo: Iterable[int]) -> Steps[None]:
        """Whoever is next for each of these; nobody where there is nobody left."""
        by_node: dict[str, list[int]] = {}
        for index in todo:
            owner = self._next_owner(index)
            if owner is not None:
                self._tried[index].append(owner)
                by_node.setdefault(owner, []).append(index)
        pieces = [
            (node, theirs[begin : begin + KEYS_MAX])
            for node, theirs in by_node.items()
            for begin in range(0, len(theirs), KEYS_MAX)
        ]
        if not pieces:
            return
        epoch, now = self._routes.ring.epoch, self._routes.now()
        calls: list[Call] = yield Submit(
            [
                self._routes.ask(node, BlockLookup(epoch, [self._keys[index] for index in indices]))
                for node, indices in pieces
            ]
        )
        for (node, indices), call in zip(pieces, calls, strict=True):
            self._open.append(_Asking(node, indices, now, call))

    def _next_owner(self, index: int) -> str | None:
        tried = self._tried[index]
        return next(
            (each for each in self._routes.block_owners(self._keys[index]) if each not in tried), None
        )

    def _matters(self, asking: _Asking) -> bool:
        """Whether its answer could still change what we say; an owner that is late is not waited for where
        another one has spoken."""
        return any(
            self._found[index] is None if asking.outlasted else self._found[index] is not True
            for index in asking.indices
        )

    def _overdue_at(self, asking: _Asking) -> float | None:
        """``None``: nothing is gained by not waiting."""
        ring = self._routes.ring
        if asking.outlasted or (ring.to_map().block_copies == 1 and not ring.moving):
            return None
        return asking.began + self._routes.speeds.patience_s(0)

    def _ask_others(self, mattering: Sequence[_Asking]) -> list[int]:
        """Who is overdue by now is outlasted; what others can be asked for instead."""
        now, speeds, todo = self._routes.now(), self._routes.speeds, []
        for asking in mattering:
            overdue = self._overdue_at(asking)
            if overdue is None or overdue > now:
                continue
            asking.outlasted = True
            speeds.outlasted(asking.node, now - asking.began, 0, now)
            missing = [index for index in asking.indices if self._found[index] is not True]
            if any(self._next_owner(index) is not None for index in missing) and speeds.may_hedge():
                self._routes.counts.hedged_count += 1
                todo += missing
        return todo

    def _take(self, asking: _Asking, answer: Answer) -> list[int]:
        """The indices that somebody else must be asked for."""
        node, indices, message = asking.node, asking.indices, answer.message
        if isinstance(message, BlockPresence) and len(message.present) == len(indices):
            self._routes.speeds.took(node, answer.now - asking.began, 0, answer.now)
            for index, present in zip(indices, message.present, strict=True):
                if not present:
                    self._absent_at[index].add(node)
                self._found[index] = bool(present) or bool(self._found[index])
        elif self._routes.failed(node, answer) and not self._renewed:
            self._renewed = True  # by the newer map, from the start; once, whatever the next one says
            for index, said in enumerate(self._found):
                if not said:
                    self._tried[index].clear()
        return [index for index in indices if not self._found[index]]

    def _said(self, index: int) -> Presence:
        keepers = self._routes.ring.block_keepers(self._keys[index])
        if self._found[index] is False and not self._absent_at[index].issuperset(keepers):
            return None  # some of them may have it for all we know
        return self._found[index]
