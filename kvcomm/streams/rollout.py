"""``Rollout``: all that a trainer gets of one generated sequence, and all that it needs.

Tokens by row, events, samples.  Text is never tokenized again, and nothing is derived from offsets.  The
header says how many rows and events there are and ends the events' digest, so a stage on the way that cuts
tokens off or drops events is noticed, whatever it drops; one that changes an event is noticed when the view
is computed (:meth:`Rollout.visibility`), which every trainer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from kvcomm.errors import Corrupt, TokenError
from kvcomm.streams.events import ROOT_DIGEST, Event, ViewDigest
from kvcomm.streams.view import Visibility, visibility

LOGPROB_MAX = 1e-3
"""A log probability is at most 0; engines compute it with rounding."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens were drawn: log probabilities are those of the distribution *after* this processing.

    Raises ``ValueError`` for what nobody can draw with.
    """

    temperature: float = 1.0
    """0 = the most probable token; its log probability is then of temperature 1."""
    top_k: int = 0
    """0 = all."""
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < inf and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"temperature and top_k are not negative, top_p is in (0, 1]: {self}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token.  Raises ``ValueError`` when its log probability is none."""

    query_row: int
    """The row whose logits it was drawn from; the token, once fed, is the next one."""
    token: int
    logprob: float
    """Natural logarithm, of the processed distribution."""
    sampling: Sampling
    loss: bool = True
    """Whether a trainer learns from it."""

    def __post_init__(self) -> None:
        if self.query_row < 0 or self.token < 0 or not -inf < self.logprob <= LOGPROB_MAX:
            raise ValueError(
                f"token {self.token} after row {self.query_row} with log probability {self.logprob}: what "
                "was sampled had a probability above 0 and at most 1"
            )


@dataclass(frozen=True, slots=True)
class Rollout:
    """Raises ``Corrupt`` when the parts do not fit."""

    name: str
    namespace: bytes
    """Id of the K/V's namespace: the model and its weights."""
    block_tokens: int
    tokens: tuple[int, ...]
    """By row, fillers included."""
    filler_rows: tuple[int, ...]
    """Rows that were fed only to end a block: nobody's text, no loss."""
    events: tuple[Event, ...]
    samples: tuple[Sample, ...]
    """Ascending; the last one's token may never have been fed."""
    row_count: int
    event_count: int
    view_digest: ViewDigest
    """After the last event."""
    repeated_rows: tuple[int, ...] = ()
    """Rows with the text of archived ones whose K/V was lost: computed again, as new rows, under another
    view.  Not text of its own, no loss."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise Corrupt(f"rollout {self.name!r} {problem}: use it as it was written, or Rollout.truncated")

    @staticmethod
    def sealed(
        name: str,
        namespace: bytes,
        block_tokens: int,
        tokens: Sequence[int],
        events: Sequence[Event],
        samples: Sequence[Sample],
        filler_rows: Sequence[int] = (),
        repeated_rows: Sequence[int] = (),
    ) -> Rollout:
        """With the header of these parts: for who wrote them, not for who was sent them."""
        digest = events[-1].view_digest if events else ROOT_DIGEST
        return Rollout(
            name, namespace, block_tokens, tuple(tokens), tuple(filler_rows), tuple(events), tuple(samples),
            len(tokens), len(events), digest, tuple(repeated_rows),
        )  # fmt: skip

    def visibility(self) -> Visibility:
        """Raises ``Corrupt`` where an event does not follow from those before it."""
        return visibility(self.row_count, self.events)

    def truncated(self, row_count: int) -> Rollout:
        """The first ``row_count`` rows, and what concerns them: samples drawn from them, events that at least
        one of them ran under.  All of it, if it has no more rows.

        Raises:
            ValueError: ``row_count`` is negative.
        """
        if row_count < 0:
            raise ValueError(f"a rollout cannot have {row_count} rows")
        if row_count >= self.row_count:
            return self
        events = tuple(event for event in self.events if event.at_row < row_count)
        return replace(
            self,
            tokens=self.tokens[:row_count],
            filler_rows=tuple(row for row in self.filler_rows if row < row_count),
            repeated_rows=tuple(row for row in self.repeated_rows if row < row_count),
            events=events,
            samples=tuple(sample for sample in self.samples if sample.query_row < row_count),
            row_count=row_count,
            event_count=len(events),
            view_digest=events[-1].view_digest if events else ROOT_DIGEST,
        )

    def text(self) -> tuple[int, ...]:
        """The tokens without fillers and repetitions: what a chat template rendered, and what was sampled."""
        return text_of(self.tokens, {*self.filler_rows, *self.repeated_rows})

    def _problem(self) -> str | None:
        if len(self.tokens) != self.row_count:
            return f"has {len(self.tokens)} of {self.row_count} rows"
        last = self.events[-1].view_digest if self.events else ROOT_DIGEST
        if len(self.events) != self.event_count or last != self.view_digest:
            return f"has {len(self.events)} of {self.event_count} events, or other ones than at first"
        if self.events and self.events[-1].at_row > self.row_count:
            return f"has an event at row {self.events[-1].at_row} of {self.row_count}"
        if len(self.namespace) != 32 or self.block_tokens < 1:
            return f"has a namespace of {len(self.namespace)} bytes and blocks of {self.block_tokens}"
        return self._marks_problem() or self._samples_problem()

    def _marks_problem(self) -> str | None:
        for rows in (self.filler_rows, self.repeated_rows):
            if rows and not 0 <= rows[0] <= rows[-1] < self.row_count:
                return "marks rows that it does not have"
            if any(before >= after for before, after in pairwise(rows)):
                return "marks rows that do not ascend"
        if not set(self.filler_rows).isdisjoint(self.repeated_rows):
            return "marks a row as filler and as repetition"
        return None

    def _samples_problem(self) -> str | None:
        if any(before.query_row >= after.query_row for before, after in pairwise(self.samples)):
            return "has samples that do not ascend"
        marked = {*self.filler_rows, *self.repeated_rows}
        for sample in self.samples:
            row = sample.query_row + 1
            if row > self.row_count:
                return f"has a sample of row {sample.query_row} of {self.row_count}"
            if row < self.row_count and self.tokens[row] != sample.token:
                return f"has another token in row {row} than was sampled for it"
            if row in marked:
                return f"marks row {row}, which was sampled"
        return None


def text_of(tokens: Sequence[int], marked: set[int]) -> tuple[int, ...]:
    """``tokens`` by row without the ``marked`` rows."""
    return tuple(token for row, token in enumerate(tokens) if row not in marked)


def rest_of(rendered: Sequence[int], text: Sequence[int]) -> tuple[int, ...]:
    """What of a ``rendered`` conversation comes behind ``text``, which a stream holds already.

    Text is never tokenized again to find out what an engine ran: ids are compared.

    Raises:
        TokenError: ``rendered`` does not begin with ``text``.
    """
    same = len(text) if tuple(rendered[: len(text)]) == tuple(text) else _first_difference(rendered, text)
    if same < len(text):
        raise TokenError(
            f"the rendered conversation differs from what was fed at token {same} of {len(text)}: the "
            "template does not keep its prefix (it drops reasoning, adds a separator, or text was tokenized "
            "again); render only the new messages"
        )
    return tuple(rendered[len(text) :])


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
