"""``Talk``: one conversation under one arm, in one stream, or in several where the arm moves it."""

from __future__ import annotations

from examples.rollouts.arms import Arm
from kvcomm.engines.transformers.generating import Stream
from kvcomm.streams.restarter import Carry, Restarter
from kvcomm.streams.rollout import Rollout
from kvcomm.streams.session import Session


class Talk:
    """Before each turn :meth:`due` is asked, and followed where it says something.

    Args:
        stream: with the arm's policy; only its first prompt is fed, if anything.
        shared_rows: of it, computed for a sibling and not again.
    """

    def __init__(self, arm: Arm, stream: Stream, shared_rows: int = 0) -> None:
        assert stream.conversation is not None
        self.stream = stream
        self.said: list[list[int]] = []
        """By turn, what was answered."""
        self.rows_again = self.slots_most = 0
        """Rows of text that went through the model before; the largest view, which is what memory and
        attention are paid for."""
        self.rows_fed = -shared_rows
        """That went through the model, once the conversation is closed."""
        self._ended: list[Rollout] = []
        self._restarter: Restarter | None = None
        if arm.restart is not None:
            self._restarter = Restarter(stream.conversation, arm.restart)

    def due(self) -> Carry | None:
        """What a new stream has to begin with before the next turn; ``None`` = this one goes on."""
        return None if self._restarter is None else self._restarter.at_admission()

    def move(self, session: Session, carry: Carry) -> None:
        """``carry.tokens`` were fed into ``session``, which takes over."""
        assert self._restarter is not None
        self._restarter = self._restarter.moved(session, carry)
        conversation = self._restarter.conversation
        name = f"{self.stream.recorder.name}, moved"
        old, self.stream = self.stream, self.stream.successor(name, conversation)
        self._end(old)
        self.rows_again += len(carry.tokens)

    def answered(self, tokens: list[int]) -> None:
        """One more turn is over."""
        self.said.append(tokens)
        self.slots_most = max(self.slots_most, self.stream.session.slot_count)

    def close(self) -> tuple[Rollout, ...]:
        """All that was written; its memory is free."""
        self._end(self.stream)
        return tuple(self._ended)

    def _end(self, stream: Stream) -> None:
        self._ended.append(stream.rollout())
        self.rows_fed += stream.session.next_row
        stream.close()
