"""``Coordination``: one batch of record reads or writes, each key by one of its owners.

A key goes to its first owner that is not passed over.  One that cannot be reached is replaced by the next;
when all have failed a moment ago they are tried all the same, for an error must be true.  A newer map is
adopted and the keys are placed again; once is enough but for somebody who meets a move.  While a record
moves, the owners that it is moved to or from may coordinate too, after those that it is read from; what needs
a majority is decided by the latter alone.  Where no owner is left that could be reached, other shards are
asked once whether there is a newer map.

What needs a majority is waited for longest, and an owner that hangs is found out by the wait alone.  So one
that was silent when it was asked last is not asked first again when its time to be passed over is up: it is
*probed* beside the others, and takes part once it has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvcomm.errors import KVCommError, OutcomeUnknown, TooLarge, Unavailable, failure_to_error
from kvcomm.steps import Answer, Ask, Call, Steps, Submit, Wait, WaitAny, ask_all
from kvcomm.wire.messages import Failure, Message
from l3_shard.ring import Ring
from l3_shard.routes import WINDOW_BYTES, Routes

RECORDS_MAX = 1_024
"""Records of one request."""
PLACED_MAX = 4
"""Times that a key is placed: a move makes three maps, and a small one makes them within a second."""
PROBE_WAIT_S = 0.2
"""So long after it was probed an owner is waited for when the others cannot serve a key."""


Problems = Mapping[int, KVCommError]
"""By index."""
NOTHING_WRONG: Problems = {}


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be done; keys are named by index."""

    keys: Sequence[bytes]
    sizes: Sequence[int]
    """Bytes that the request carries for each key."""
    request: Callable[[int, Sequence[int]], Message]
    """(epoch, indices) -> the request."""
    take: Callable[[Sequence[int], Message], Problems | None]
    """Takes a reply; says what went wrong with some keys (mostly nothing), ``None`` = it does not answer the
    request."""
    majority: bool = False
    """Whether an owner can do nothing without most of the others."""


class Coordination:
    """One operation; run :meth:`steps` or :meth:`outcomes` once."""

    def __init__(self, routes: Routes, batch: Batch, *, timeout_s: float | None = None) -> None:
        """``timeout_s``: what a shard has to answer, else what is usual.  Of a batch that needs a majority:
        an owner that says there is none is believed when the others were silent a moment ago, unless it names
        one of them that was in its way."""
        self._routes, self._batch, self._timeout_s = routes, batch, timeout_s
        self._todo = list(range(len(batch.keys)))
        self._tried: dict[int, set[str]] = {}
        self._trouble: dict[int, str] = {}
        """What the last owner that could not serve a key said."""
        self._placed: dict[int, int] = {}
        """How often a key was placed again."""
        self._stranded: list[int] = []
        """All owners that we know were tried."""
        self._asked_for_ring = False
        self._records_max = RECORDS_MAX
        self._problems: dict[int, KVCommError] = {}
        self._doubted: dict[str, None] = {}
        """Owners to be probed."""
        self._probes: dict[Call, str] = {}
        """Under way."""
        self._probed_at = 0.0

    def steps(self) -> Steps[None]:
        """Raises what went wrong first, after everything else of the batch is through; an unknown outcome
        before all others."""
        problems = yield from self.outcomes()
        for index in sorted(problems):
            if isinstance(problems[index], OutcomeUnknown):
                raise problems[index]
        if problems:
            raise problems[min(problems)]

    def outcomes(self) -> Steps[Problems]:
        """Everything that went wrong; all other keys are done."""
        while self._todo:
            ring = self._routes.ring
            placed = list(self._place(ring))
            asks = [
                self._routes.ask(node, self._batch.request(ring.epoch, indices), timeout_s=self._timeout_s)
                for node, indices in placed
            ]
            answers = yield from self._ask_all(asks)
            for (node, indices), answer in zip(placed, answers, strict=True):
                self._take(node, indices, answer)
            if self._probes:
                yield from self._listen()
            if self._stranded:
                yield from self._rescue(ring)
        return self._problems

    def _rescue(self, ring: Ring) -> Steps[None]:
        """No owner by ``ring`` could serve these.  Who was away while shards came and went knows nobody who
        is left, and only those who own nothing of them can tell."""
        stranded, self._stranded = self._stranded, []
        if not self._asked_for_ring:
            self._asked_for_ring = True
            tried = {node for index in stranded for node in self._tried.get(index, ())}
            for answer in (yield from ask_all(self._routes.ask_for_ring(tried))):
                self._routes.learn(answer.message)
        if self._routes.ring.epoch > ring.epoch:
            self._place_again(stranded)
            return
        for index in stranded:
            count = len(self._owners(ring, index))
            text = f"none of {count} owners of a record could serve it{self._trouble.get(index, '')}"
            self._problems[index] = Unavailable(text)

    def _ask_all(self, asks: Sequence[Ask]) -> Steps[list[Answer]]:
        """And probe the doubted, without waiting for them."""
        if not self._doubted:
            return (yield from ask_all(asks))
        doubted, self._doubted = list(self._doubted), {}
        probes = [self._routes.probe(node) for node in doubted]
        self._probed_at = self._routes.now()
        calls: list[Call] = yield Submit([*probes, *asks])
        self._probes |= zip(calls[: len(probes)], doubted, strict=True)
        answers: list[Answer] = []
        for call in calls[len(probes) :]:
            answers.append((yield Wait(call)))
        return answers

    def _listen(self) -> Steps[None]:
        """Which of the probed have answered; they are waited for if somebody could not serve a key, and only
        until one of them has."""
        waits = any(index in self._tried for index in self._todo)
        while self._probes:
            left_s = max(0.0, self._probed_at + PROBE_WAIT_S - self._routes.now()) if waits else 0.0
            done: Call | None = yield WaitAny(list(self._probes), left_s)
            if done is None:
                return
            node = self._probes.pop(done)
            answer: Answer = yield Wait(done)
            if isinstance(answer.message, Failure):
                self._routes.failed(node, answer)
            else:
                self._routes.heard(node)
                waits = False

    def _place(self, ring: Ring) -> Iterator[tuple[str, list[int]]]:
        """Requests of bounded size for what is to be done."""
        by_node: dict[str, list[int]] = {}
        todo, self._todo = self._todo, []
        for index in todo:
            node = self._choose(self._owners(ring, index), self._tried.get(index, ()))
            if node is not None:
                by_node.setdefault(node, []).append(index)
            else:
                self._stranded.append(index)
        for node, indices in by_node.items():
            size = 0
            piece: list[int] = []
            for index in indices:
                if piece and (
                    len(piece) == self._records_max or size + self._batch.sizes[index] > WINDOW_BYTES
                ):
                    yield node, piece
                    size, piece = 0, []
                piece.append(index)
                size += self._batch.sizes[index]
            yield node, piece

    def _owners(self, ring: Ring, index: int) -> Sequence[str]:
        """Who may coordinate it."""
        key = self._batch.keys[index]
        return ring.replicas(key) if self._batch.majority else ring.keepers(key)

    def _choose(self, owners: Sequence[str], tried: Collection[str]) -> str | None:
        """The first that is healthy, else the first that is not known to be silent, else the first."""
        left = [node for node in owners if node not in tried] if tried else owners
        doubted = list(filter(self._routes.doubtful, left)) if self._batch.majority else []
        known = [node for node in left if node not in doubted] if doubted else left
        chosen = self._choose_known(known)
        believed = self._batch.majority and any(not self._routes.silent(node) for node in tried)
        if chosen is not None:
            self._doubted |= dict.fromkeys(doubted)
        if chosen is not None or believed:
            return chosen
        return next(iter(doubted or left), None)

    def _choose_known(self, owners: Sequence[str]) -> str | None:
        for node in owners:
            if self._routes.healthy(node):
                return node
        for node in owners:
            if not self._routes.silent(node):
                return node
        return None

    def _take(self, node: str, indices: list[int], answer: Answer) -> None:
        message = answer.message
        if not isinstance(message, Failure):
            problems = self._batch.take(indices, message)
            if self._batch.majority:
                self._routes.heard(node)
            if problems is None:
                text = f"{node} gave no answer to the question that it was asked"
                problems = dict.fromkeys(indices, OutcomeUnknown(text))
            for index, error in problems.items():
                self._failed(node, index, error)
            return
        error = failure_to_error(message.code, message.text, message.detail)
        if self._batch.majority and isinstance(error, Unavailable) and error.detail:
            self._routes.heard(node)
            self._routes.beaten(error.detail.decode(errors="replace"))
            for index in indices:
                self._failed(node, index, error)
        elif self._routes.failed(node, answer):
            self._place_again(indices)
        elif isinstance(error, TooLarge) and len(indices) > 1 and not any(self._batch.sizes):
            self._records_max = max(1, len(indices) // 2)
            self._todo += indices
        else:
            for index in indices:
                self._failed(node, index, error)

    def _failed(self, node: str, index: int, error: KVCommError) -> None:
        """Nothing was changed by an owner that is unavailable: another one may be asked."""
        if isinstance(error, Unavailable):
            self._tried.setdefault(index, set()).add(node)
            self._trouble[index] = f"; {node}: {error.message}"
            self._todo.append(index)
        else:
            self._problems[index] = error

    def _place_again(self, indices: list[int]) -> None:
        for index in indices:
            count = self._placed[index] = self._placed.get(index, 1) + 1
            if count > PLACED_MAX:
                text = f"the ring changed {PLACED_MAX} times during one request; try again"
                self._problems[index] = Unavailable(text)
            else:
                self._tried.pop(index, None)
                self._todo.append(index)
