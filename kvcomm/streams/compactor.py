"""``Compactor``: asks a policy at the right moments what to cut, and cuts it.

The order inside a step, which its driver keeps::

    forward pass ─► Conversation.scan ─► observe ─► sample ─► stop? ─ no ─► after_forward ─► next step
                                                               │
                                                              yes ─► stop ─► finish commit, no cut
    next message ─► at_admission ─► its first token is fed

* Never a cut on a stream that stopped: whoever gets its answer would find rows gone that the answer saw.  The
  cut is made when the next message is admitted, before any of its rows runs.
* A token that was sampled before the cut is the first row after it, and sees the new view.
* Also between the chunks of a prompt: the event stands at the row where the next chunk begins.
* A policy is asked again until it names nothing; each answer takes a block or ends a turn, so it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from kvcomm.errors import ConfigError
from kvcomm.streams.events import Event, SlotRange
from kvcomm.streams.policies.port import Checked, Look, Moment, Policy, Scoring
from kvcomm.streams.policies.restarts import Reprefill
from kvcomm.streams.session import Session


class Compactor:
    """Of one stream.

    Args:
        session: whose view is cut.
        policy: what to cut; may serve many streams.
        archive: keep what is cut, to bring it back.

    Raises:
        ConfigError: the policy's settings do not fit the session's blocks.
    """

    def __init__(self, session: Session, policy: Policy, *, archive: bool = False) -> None:
        if isinstance(policy, Reprefill):
            raise ConfigError(f"policy {policy.name!r} begins new streams and cuts none: use a Restarter")
        if isinstance(policy, Checked):
            policy.check(session.block_tokens)
        self._scoring = policy if isinstance(policy, Scoring) and policy.needs_scores else None
        if policy.needs_scores and self._scoring is None:
            raise ConfigError(f"policy {policy.name!r} needs scores and says not how: give it a scorer")
        scoring = self._scoring
        self._scorer = None if scoring is None else scoring.scorer(session.block_tokens)
        self.session, self.policy, self.archive = session, policy, archive
        self.stopped = False

    def forked(self, session: Session) -> Compactor:
        """For a session that was forked from this one's: now, with what its blocks are worth so far, or at an
        earlier row, where nothing is known of that."""
        child = Compactor(session, self.policy, archive=self.archive)
        child.stopped = self.stopped
        if session.next_row == self.session.next_row:
            child._scorer = deepcopy(self._scorer)
        return child

    @property
    def obstacle(self) -> str | None:
        """Why this policy will never cut this stream, if so: it then runs on full context, which somebody
        should know."""
        return self.policy.obstacle(self._plain_look("forward")) if isinstance(self.policy, Checked) else None

    @property
    def query_rows(self) -> int | None:
        """Attention to measure in each pass: of so many last rows, 0 = of all; ``None`` = none."""
        return None if self._scoring is None else self._scoring.query_rows

    def observe(self, mass: Sequence[float], query_rows: int) -> None:
        """What a forward pass attended, once it is committed and before anything is cut.

        Args:
            mass: by slot of the view: attention probability, summed over layers, query heads and rows.
            query_rows: how many rows; the pass's last ones.

        Raises:
            ValueError: not one number a slot.
        """
        if len(mass) != self.session.slot_count or query_rows < 1:
            raise ValueError(
                f"attention of {query_rows} rows over {len(mass)} slots for a view of "
                f"{self.session.slot_count}: observe a pass before the next cut"
            )
        if self._scorer is not None:
            self._scorer.observe(self.session.view.rows, mass, query_rows)

    def after_forward(self) -> list[Event]:
        """The events that happened, in order.

        Raises:
            ValueError: the policy named slots that are not there; nothing of that was cut.
        """
        return [] if self.stopped or self.session.closed else self._cut("forward")

    def stop(self) -> None:
        """The stream's answer is complete: no cut until the next message."""
        self.stopped = True

    def at_admission(self) -> list[Event]:
        """Before the first token of the next message is fed; see :meth:`after_forward`.

        Raises:
            ValueError: the message before is not finished: a sampled token of it has no K/V yet.
        """
        if self.session.pending is not None:
            raise ValueError(
                f"token {self.session.pending} was sampled and is not fed: finish its message first, or the "
                "rest of it would be computed without what it answers (Conversation.finish)"
            )
        self.stopped = False
        return [] if self.session.closed else self._cut("admission")

    def look(self, moment: Moment) -> Look:
        """What the policy sees now."""
        session, seen = self.session, self._plain_look(moment)
        if self._scoring is None or self._scorer is None or not self._scoring.due(seen):
            return seen
        scores = self._scorer.scores(session.view.rows)
        if not all(score >= 0 for score in scores):  # NaN is not, either
            raise ValueError(
                "attention scores are 0 or more; the pass that they come from computed no number"
            )
        return replace(seen, scores=scores)

    def _plain_look(self, moment: Moment) -> Look:
        session = self.session
        return Look(
            session.slot_count,
            session.protected,
            session.block_tokens,
            tuple(session.turns),
            session.next_row,
            moment,
        )

    def _cut(self, moment: Moment) -> list[Event]:
        events: list[Event] = []
        while named := self.policy.select(self.look(moment)):
            spans = merged_ranges(named, self.session.slot_count)
            inside = [_inside(span, self.session) for span in spans]
            whole = [each for each in inside if each.slot_count]
            if whole:
                events.append(self.session.evict(whole, archive=self.archive, reason=self.policy.name))
            if not self._end_turns(spans, inside) and not whole:
                break
        return events

    def _end_turns(self, spans: Sequence[SlotRange], inside: Sequence[SlotRange]) -> int:
        """Turns that the policy named count no more; what the cut left of them is no turn."""
        ended = gone = 0
        for span, cut in zip(spans, inside, strict=True):
            start = span.start - gone
            gone += cut.slot_count
            ended += self.session.drop_turns(start, span.end - gone)
        return ended


def merged_ranges(named: Sequence[SlotRange], slot_count: int) -> list[SlotRange]:
    """Neighbours as one, before borders are moved: what lies between two cut turns goes, too."""
    merged: list[SlotRange] = []
    end = 0
    for start, stop in named:
        if not end <= start < stop <= slot_count:
            raise ValueError(
                f"a policy names slots of the view ({slot_count}), ascending, disjoint, not empty; not "
                f"{[tuple(each) for each in named]}"
            )
        if merged and start == end:
            start = merged.pop().start
        merged.append(SlotRange(start, stop))
        end = stop
    return merged


def _inside(span: SlotRange, session: Session) -> SlotRange:
    """The whole, full blocks of a range that may go; maybe none."""
    size = session.block_tokens
    start = max(-(-span.start // size) * size, session.protected)
    return SlotRange(start, max(start, span.end // size * size))
