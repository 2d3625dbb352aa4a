"""``Handoff``: tells a replica what it missed, a bounded batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvcomm.wire.messages import Done, Failure, Message, RecordReplicate, RecordState
from l3_shard import dvv
from l3_shard.desk import Desk
from l3_shard.hints import Hint, Hints
from l3_shard.lines import Lines, Local
from l3_shard.writing import UNMERGEABLE


class Handoff:
    """One batch for one node: make one, call :meth:`start` once.

    Args:
        keeps: whether ``node`` is still a replica of a stored key.
        done: hears how it went; ``None`` = handed on, else what the node answered.
    """

    def __init__(
        self,
        node: str,
        epoch: int,
        desk: Desk,
        lines: Lines[RecordState],
        hints: Hints,
        *,
        keeps: Callable[[bytes], bool],
        done: Callable[[Message | None], None],
    ) -> None:
        self._node, self._epoch = node, epoch
        self._desk, self._lines, self._hints = desk, lines, hints
        self._keeps, self._done = keeps, done
        self._found: dict[bytes, RecordState] = {}
        self._open_count = 0

    def start(self, count: int) -> None:
        """Hand on up to ``count`` records, as far as they fit one message."""
        oldest = self._hints.oldest(self._node, count)
        self._hints.void(self._node, [hint for hint in oldest if not self._keeps(hint.key)])
        kept = [hint for hint in oldest if self._keeps(hint.key)]
        if not kept:
            self._done(None)
            return
        self._open_count = len(kept)
        for hint in kept:
            self._lines.read(hint.key, partial(self._read, kept, hint))

    def _read(self, hints: Sequence[Hint], hint: Hint, local: Local[RecordState]) -> None:
        if local.state.context:
            self._found[hint.key] = local.state
        self._open_count -= 1
        if not self._open_count:
            self._send(hints)

    def _send(self, hints: Sequence[Hint]) -> None:
        """What cannot be read here, or was removed since, is nothing to hand on."""
        self._hints.void(self._node, [hint for hint in hints if hint.key not in self._found])
        going: list[Hint] = []
        held_bytes = 0
        for hint in hints:
            if hint.key in self._found:
                held_bytes += dvv.value_bytes(self._found[hint.key])
                if going and held_bytes > self._desk.limits.message_bytes:
                    break
                going.append(hint)
        if not going:
            self._done(None)
            return
        states = [self._found[hint.key] for hint in going]
        message = RecordReplicate(self._epoch, [hint.key for hint in going], states)
        self._found.clear()
        self._desk.ask(self._node, message, partial(self._answered, going), sum(map(dvv.value_bytes, states)))

    def _answered(self, going: Sequence[Hint], answer: Message) -> None:
        if isinstance(answer, Done):
            self._hints.delivered(self._node, going)
            self._done(None)
        elif isinstance(answer, Failure) and answer.code in UNMERGEABLE:
            self._apart(going)
        else:
            self._done(answer)

    def _apart(self, going: Sequence[Hint]) -> None:
        """One record's trouble must not keep the others, and comparisons, from their turn: each by itself."""
        if len(going) > 1:
            self.start(1)
        else:
            self._hints.void(self._node, going)
            self._done(None)
