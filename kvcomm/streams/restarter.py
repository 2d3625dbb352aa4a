"""``Restarter``: asks a policy at the right moments, and where it names something, says with which tokens a
new stream takes over.

::

    carry = restarter.at_admission()          or after_forward(), as for a Compactor
    if carry is not None:
        rollout = recorder.rollout()          the old stream's samples are one rollout
        session = engine.session()
        engine.feed([(session, carry.tokens)])
        restarter = restarter.moved(session, carry)     the old session may be closed now

What a policy names is taken out as named: there is no block table that it must fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from kvcomm.streams.compactor import merged_ranges
from kvcomm.streams.conversation import Conversation
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.port import Look, Moment
from kvcomm.streams.policies.restarts import Reprefill, Summary
from kvcomm.streams.session import Session

_INSERTED = -1


@dataclass(frozen=True, slots=True)
class Carry:
    """What a new stream begins with."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    """Of each token, its row in the old stream; -1 for what was put in."""
    turns: tuple[tuple[int, int], ...]
    """Finished turns, in places of ``tokens``, which are the slots of the new stream."""
    protected: int
    pending: int | None
    """Sampled in the old stream and not fed there: the first token after these."""
    dropped_rows: int

    @property
    def inserted(self) -> SlotRange | None:
        """Where the summary stands."""
        if _INSERTED not in self.rows:
            return None
        start = self.rows.index(_INSERTED)
        return SlotRange(start, start + self.rows.count(_INSERTED))


class Restarter:
    """Of one conversation, which moves from stream to stream."""

    def __init__(self, conversation: Conversation, policy: Reprefill) -> None:
        self.conversation, self.policy = conversation, policy
        self.stopped = False
        self._summary: SlotRange | None = None
        self._moving = conversation
        """As it was before its summary was written."""

    @property
    def session(self) -> Session:
        return self.conversation.session

    def stop(self) -> None:
        """The stream's answer is complete: it goes on as it is until the next message."""
        self.stopped = True

    def after_forward(self) -> Carry | None:
        """``None`` = this stream goes on.

        Raises:
            ValueError: the policy named slots that are not there.
        """
        return None if self.stopped or self.session.closed else self._carry("forward")

    def at_admission(self) -> Carry | None:
        """Before the first token of the next message is fed; see :meth:`after_forward`.

        Raises:
            ValueError: the message before is not finished.
        """
        if self.session.pending is not None:
            raise ValueError("a sampled token is not fed: finish its message first (Conversation.finish)")
        self.stopped = False
        return None if self.session.closed else self._carry("admission")

    def moved(self, session: Session, carry: Carry) -> Restarter:
        """For the new stream, once ``carry.tokens`` are fed there and nothing else.

        Raises:
            ValueError: other tokens were.
        """
        moved_rows = any(event.kind != "weights" for event in session.events)
        if tuple(session.tokens) != carry.tokens or moved_rows:
            raise ValueError("feed carry.tokens into a new session first, and nothing else")
        other = Restarter(self._moving.moved(session, carry.rows), self.policy)
        other.stopped, other._summary = self.stopped, carry.inserted
        session.protect(carry.protected)
        for start, end in carry.turns:
            session.end_turn(start, end)
        if carry.pending is not None:
            session.sampled(carry.pending)
        return other

    def _carry(self, moment: Moment) -> Carry | None:
        session = self.session
        view, pending = list(session.view.rows), session.pending
        kept = self._kept(moment)
        if len(kept) == len(view):
            return None
        self._moving = self.conversation.copy()
        rows, turns = [view[slot] for slot in kept], _among(kept, session.turns)
        tokens = [session.tokens[row] for row in rows]
        if isinstance(self.policy, Summary):
            staying = frozenset(kept)
            dropped = [session.tokens[row] for slot, row in enumerate(view) if slot not in staying]
            text = self._written(self.policy, dropped)
            place = bisect_left(kept, session.protected)
            place = min(
                [place, *(start for start, _ in turns)]
            )  # a turn may begin in the last protected block
            tokens[place:place], rows[place:place] = text, [_INSERTED] * len(text)
            turns = [(start + len(text), end + len(text)) for start, end in turns]
        protected = min(session.protected, len(view))
        return Carry(tuple(tokens), tuple(rows), tuple(turns), protected, pending, len(view) - len(kept))

    def _kept(self, moment: Moment) -> list[int]:
        """The slots that stay, if the policy is asked until it names nothing."""
        session = self.session
        kept = list(range(session.slot_count))
        while True:
            turns = _among(kept, session.turns)
            look = Look(len(kept), session.protected, session.block_tokens, turns, session.next_row, moment)
            named = self.policy.inner.select(look)
            if not named:
                break
            for start, end in reversed(merged_ranges(named, len(kept))):
                del kept[start:end]
        if len(kept) < session.slot_count and self._summary is not None:
            kept = [slot for slot in kept if not self._summary.start <= slot < self._summary.end]
        return kept

    def _written(self, policy: Summary, dropped: Sequence[int]) -> list[int]:
        event_count = len(self.session.events)
        text = list(policy.write(self.session, dropped))
        if len(self.session.events) != event_count:
            raise ValueError("the stream was cut while its summary was written: what goes was named before")
        return text


def _among(kept: Sequence[int], turns: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is left of the turns, in places of the slots ``kept``."""
    places = [(bisect_left(kept, start), bisect_left(kept, end)) for start, end in turns]
    return [(start, end) for start, end in places if start < end]
