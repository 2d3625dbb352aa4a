"""``Talk``: one conversation under one arm, in one stream, or in several where the arm moves it."""

from __future__ import annotations

from examples.rollouts.arms import Arm
from examples.rollouts.task import MARKUP
from kvcomm.engines.transformers.generating import Stream
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.restarter import Carry, Restarter
from kvcomm.streams.rollout import Rollout
from kvcomm.streams.session import Session


class Talk:
    """Before each turn :meth:`due` is asked, and followed where it says something.

    Args:
        seed: of what is drawn.
        session: new; in a conversation that moves, the first one.
    """

    def __init__(self, engine: StreamEngine, arm: Arm, name: str, seed: int, session: Session) -> None:
        self._engine, self._arm, self._name, self._seed = engine, arm, name, seed
        self._ended: list[Rollout] = []
        self._restarter: Restarter | None = None
        self.stream = self._stream(session)
        if arm.restart is not None:
            assert self.stream.conversation is not None
            self._restarter = Restarter(self.stream.conversation, arm.restart)
        self.said: list[list[int]] = []
        """By turn, what was answered."""
        self.rows_fed = self.rows_again = self.slots_most = 0
        """Rows that went through the model; of them, of text that had been through it before; and the
        largest view, which is what memory and attention are paid for."""

    def due(self) -> Carry | None:
        """What a new stream has to begin with before the next turn; ``None`` = this one goes on."""
        return None if self._restarter is None else self._restarter.at_admission()

    def move(self, session: Session, carry: Carry) -> None:
        """``carry.tokens`` were fed into ``session``, which takes over."""
        assert self._restarter is not None
        self._end()
        self._restarter = self._restarter.moved(session, carry)
        self.stream = self._stream(session)
        self.stream.conversation = self._restarter.conversation
        self.rows_again += len(carry.tokens)

    def answered(self, tokens: list[int]) -> None:
        """One more turn is over."""
        self.said.append(tokens)
        self.slots_most = max(self.slots_most, self.stream.session.slot_count)

    def close(self) -> tuple[Rollout, ...]:
        """All that was written; its memory is free."""
        self._end()
        return tuple(self._ended)

    def _end(self) -> None:
        self._ended.append(self.stream.rollout())
        self.rows_fed += self.stream.session.next_row
        self.stream.close()

    def _stream(self, session: Session) -> Stream:
        return Stream(
            self._engine, f"{self._name}/{len(self._ended)}", policy=self._arm.policy, markup=MARKUP,
            seed=self._seed + len(self._ended), session=session,
        )  # fmt: skip
