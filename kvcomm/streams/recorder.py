"""``Recorder``: writes down what a session does not know, so that a ``Rollout`` comes of it.

A session knows rows and events.  What was sampled, from which row, how probable it was, and which rows are
nobody's text is only known to who samples and feeds::

    recorder.sampled(token, logprob, sampling)      then the token is fed, with or without others behind it
    recorder.filler(7)                              right after the feed that ended with 7 fillers
    recorder.rollout()                              at any time; what follows does not change it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile

from kvcomm.streams.rollout import Rollout, Sample, Sampling, rest_of, text_of
from kvcomm.streams.session import Session


class Recorder:
    """Of one session.

    Args:
        session: may hold rows already, of a context that was adopted: nobody samples those again.
        name: of the rollout.
        filler_rows, repeated_rows: of those that the session holds, as its context says.
    """

    def __init__(
        self,
        session: Session,
        name: str,
        *,
        filler_rows: Iterable[int] = (),
        repeated_rows: Iterable[int] = (),
    ) -> None:
        self.session, self.name = session, name
        self.samples: list[Sample] = []
        self.filler_rows, self.repeated_rows = [*filler_rows], [*repeated_rows]

    def sampled(self, token: int, logprob: float, sampling: Sampling, loss: bool = True) -> Sample:
        """``token`` was drawn from what the last row predicts; tells the session, too.

        Args:
            logprob: natural logarithm, of the distribution after ``sampling`` was applied.
            loss: whether a trainer learns from it.

        Raises:
            ValueError: a token is pending already, nothing was fed, or ``logprob`` is none.  Nothing is
                recorded then.
            TokenError: the id is out of range.
        """
        sample = Sample(max(self.session.next_row - 1, 0), token, logprob, sampling, loss)
        self.session.sampled(token)
        self.samples.append(sample)
        return sample

    def filler(self, row_count: int) -> None:
        """The last ``row_count`` rows that were fed are filler.

        Raises:
            ValueError: there are not so many, or one of them was sampled or marked already.
        """
        self._mark(self.filler_rows, self._last_rows(row_count))

    def filler_at(self, rows: Iterable[int]) -> None:
        """These rows are filler: of a chunk with filler behind each of its messages.

        Raises:
            ValueError: they do not ascend, one was not fed, or was sampled, or is not behind all that were
                marked before.
        """
        self._mark(self.filler_rows, tuple(rows))

    def repeated(self, row_count: int) -> None:
        """The last ``row_count`` rows that were fed have the text of archived ones that were lost.

        Raises:
            ValueError: as :meth:`filler`.
        """
        self._mark(self.repeated_rows, self._last_rows(row_count))

    def text(self) -> tuple[int, ...]:
        """What was fed and sampled so far, fillers and repetitions left out, the pending token included."""
        fed = text_of(self.session.tokens, {*self.filler_rows, *self.repeated_rows})
        pending = self.session.pending
        return fed if pending is None else (*fed, pending)

    def rest_of(self, rendered: Sequence[int]) -> tuple[int, ...]:
        """The ids of a rendered conversation that this stream does not hold yet.  A pending token is held:
        feed it before them.

        Raises:
            TokenError: ``rendered`` says something else than what was fed; see ``rollout.rest_of``.
        """
        return rest_of(rendered, self.text())

    def fork(self, session: Session, name: str, *, loss: bool) -> Recorder:
        """For a ``session`` that was forked from this one, at its end or at an earlier row, right after it
        was.

        Args:
            loss: whether a trainer learns from the shared samples in the child's rollout, too.  False where
                the parent's is trained on as well: else they would count once a child.
        """
        rows = session.next_row + (session.pending is not None)
        child = Recorder(
            session,
            name,
            filler_rows=(row for row in self.filler_rows if row < rows),
            repeated_rows=(row for row in self.repeated_rows if row < rows),
        )
        child.samples = [
            Sample(each.query_row, each.token, each.logprob, each.sampling, each.loss and loss)
            for each in self.samples
            if each.query_row + 1 < rows
        ]
        return child

    def rollout(self) -> Rollout:
        """As it is now."""
        session = self.session
        return Rollout.sealed(
            self.name, session.namespace.id, session.block_tokens, session.tokens, session.events,
            self.samples, self.filler_rows, self.repeated_rows,
        )  # fmt: skip

    def _last_rows(self, row_count: int) -> range:
        end = self.session.next_row
        if not 0 <= row_count <= end:
            raise ValueError(f"{row_count} rows cannot be marked: {end} were fed")
        return range(end - row_count, end)

    def _mark(self, marked: list[int], rows: Sequence[int]) -> None:
        if not rows:
            return
        last = max(*self.filler_rows[-1:], *self.repeated_rows[-1:], -1, -1)
        if any(before >= after for before, after in pairwise((last, *rows))):
            raise ValueError(f"rows are marked in order, each once; row {last} was the last")
        if rows[-1] >= self.session.next_row:
            raise ValueError(f"row {rows[-1]} cannot be marked: {self.session.next_row} were fed")
        behind = takewhile(lambda each: each.query_row + 1 >= rows[0], reversed(self.samples))
        sampled = {each.query_row + 1 for each in behind}
        if not sampled.isdisjoint(rows):
            raise ValueError(f"row {min(sampled.intersection(rows))} was sampled: it is the model's text")
        marked.extend(rows)
