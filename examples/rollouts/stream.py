"""``Stream``: one conversation under one arm, as one rollout, or as several where the arm begins anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from examples.rollouts.arms import Arm
from examples.rollouts.task import ASSISTANT, GENERATION_PREFIX, MARKUP, SYSTEM_MESSAGE
from examples.rollouts.writers import Writer
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.conversation import Chunk, Conversation
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.session import Session

PLAIN = Sampling()
"""Temperature 1, the whole vocabulary: what is drawn is what is trained."""


@dataclass(slots=True)
class Cost:
    """What a conversation took, in rows and slots."""

    fed: int = 0
    """Rows that went through the model."""
    again: int = 0
    """Of them: of text that had been through it before."""
    adopted: int = 0
    """Rows whose K/V was there already, computed for a sibling."""
    slots_most: int = 0
    """Largest view: what memory and attention are paid for."""


@dataclass(slots=True, eq=False)
class Stream:
    """Driven by ``playing``: admit, feed, say and feed, finish, feed."""

    writer: Writer
    arm: Arm
    weights_version: int
    name: str
    cost: Cost = field(default_factory=Cost)
    rollouts: list[Rollout] = field(default_factory=list)
    """Of streams that ended."""
    said: list[list[int]] = field(default_factory=list)
    """By turn, what was sampled."""

    conversation: Conversation = field(init=False)
    compactor: Compactor = field(init=False)
    recorder: Recorder = field(init=False)
    _turns: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(init=False, default_factory=list)
    """Question and answer of those in view."""
    _question: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        self._begin()

    def admit(self, question: tuple[int, ...]) -> Chunk:
        """Cut, or begin anew, where the arm does; then what the model reads before it answers."""
        named = self.compactor.policy.select(self.compactor.look("admission"))
        messages = [question]
        if named and self.arm.restarts:
            gone = len([turn for turn in self.session.turns if turn.end <= named[-1].end])
            self._turns = self._turns[gone:]
            self.close()
            self._begin()
            messages = [message for turn in self._turns for message in turn] + messages
        else:
            self.compactor.at_admission()
        if not self.session.next_row:
            messages = [SYSTEM_MESSAGE, *messages]
        self._question = question
        self.said.append([])
        return self.conversation.admit(messages, GENERATION_PREFIX)

    def adopt(self, chunk: Chunk) -> int:
        """Take over what a sibling has computed; so many tokens of the chunk need not be fed."""
        count = self.session.adopt_prefix(chunk.tokens)
        self.cost.adopted += count
        return count

    def fed(self, chunk: Chunk, count: int) -> None:
        """The chunk is in view; its last ``count`` tokens went through the model."""
        session = self.session
        first = session.next_row - len(chunk.tokens)
        self.recorder.filler_rows += [first + place for place in chunk.filler]
        self.cost.fed += count
        self.cost.slots_most = max(self.cost.slots_most, session.slot_count)
        if self.rollouts and not first:  # of a stream that began anew: all but the new question
            new = -(-len(self._question) // session.block_tokens) * session.block_tokens
            self.cost.again += max(0, count - new - len(GENERATION_PREFIX))
        self.conversation.scan()

    def say(self, token: int, log_prob: float) -> Chunk:
        """``token`` was drawn.  What to feed if the message goes on."""
        self.recorder.sampled(token, log_prob, PLAIN)
        self.said[-1].append(token)
        return Chunk((token,))

    def finish(self, end: int) -> Chunk:
        """The answer is complete, if need be by force."""
        self.compactor.stop()
        ended = self.said[-1][-1:] == [end]
        answer = (ASSISTANT, *self.said[-1], *(() if ended else (end,)))
        self._turns.append((self._question, answer))
        return self.conversation.finish(None if ended else end)

    def close(self) -> None:
        """Write the rollout and let go of the memory."""
        self.rollouts.append(self.recorder.rollout())
        self.session.close()

    @property
    def session(self) -> Session:
        """The one in progress."""
        return self.recorder.session

    def _begin(self) -> None:
        session = self.writer.session()
        if self.weights_version:
            session.set_weights(self.weights_version)
        self.conversation = Conversation(session, MARKUP)
        self.compactor = Compactor(session, self.arm.policy)
        self.recorder = Recorder(session, f"{self.name}/{len(self.rollouts)}")
