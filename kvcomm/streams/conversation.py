r"""``Conversation``: where messages end in a stream, what is a turn, and which filler ends a block.

::

    rows   <system ...> <end> \n ░░ │ <user ...> <end> \n ░ │ <assistant> ....... <end> \n ░░░ │ ...
           protected prefix         │ turn: two messages                                      │ turn

A message ends with an end-of-message id; the separator that the template puts after it and filler belong to
it.  The first message is the protected prefix.  Every further two messages are a turn, whatever their roles;
a message that has not ended is in none.

**Finish commit.**  When a message that the model wrote ends, its last token was sampled and not fed: it has
no K/V.  It is fed together with the separator and filler up to a block border, in one forward pass, *before*
the stream counts as finished and before any cut.  Left alone, it would be computed with the next message,
behind a cut, without what it answers.

**Filler** keeps message borders on block borders, so that a cut of whole turns takes whole messages with
their markers.  It is real: fed, attended, counted as rows.  Which rows are filler is known by their number,
never by their id, which may stand in a text, too.  A budget bounds it: where it is used up, messages end
where they end, and cuts leave up to a block less one token of a turn at either end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain

from kvcomm.errors import ConfigError
from kvcomm.streams.session import Session


@dataclass(frozen=True, slots=True)
class Markup:
    """How a chat template ends messages, in token ids; ``kvcomm.streams.templates`` reads it off one.

    Raises:
        ConfigError: no id ends a message, or filler or the separator would.
    """

    ends: frozenset[int]
    """Ids that end a message."""
    separator: tuple[int, ...] = ()
    """What the template puts between an end and the next message."""
    filler: int | None = None
    """Id to fill blocks with; ``None`` = messages end where they end."""

    def __post_init__(self) -> None:
        if not self.ends:
            raise ConfigError("name the ids that end a message; without them there are no turns")
        if self.filler in self.ends:
            raise ConfigError(f"filler {self.filler} ends a message, so each would be one; see filler_id")
        if self.ends & {*self.separator}:
            raise ConfigError("a separator follows the end of a message and contains none")


def filler_id(
    vocab_size: int,
    *,
    ends: Container[int],
    used: Container[int],
    pad: int | None = None,
    spare: Sequence[int] = (),
) -> int:
    """An id to fill blocks with: the pad token, else the last id that stands for no text, else a spare one.

    Args:
        vocab_size: of the model; often more than its tokenizer uses.
        ends: ids that end a message: many models pad with one of them.
        used: ids that the tokenizer can produce.
        pad: the tokenizer's pad token.
        spare: special tokens that a conversation does without, such as an end of text.

    Raises:
        ConfigError: there is none.
    """
    unused = (token for token in reversed(range(vocab_size)) if token not in used)
    for token in chain([] if pad is None else [pad], unused, spare):
        if token not in ends and 0 <= token < vocab_size:
            return token
    raise ConfigError(
        f"the pad token is missing or ends messages, and all {vocab_size} ids are in use: name a spare one "
        "that never ends a message, or do without filler (cuts then leave parts of blocks of a turn)"
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to feed next, in one forward pass or several."""

    tokens: tuple[int, ...]
    filler: tuple[int, ...] = ()
    """Which of them are filler: places in ``tokens``, ascending."""


class Conversation:
    """Of one stream.

    Args:
        session: new.
        markup: of the model's chat template.
        filler_rows_max: filler for the whole stream; ``None`` = as needed, a block less one row a message.
    """

    def __init__(self, session: Session, markup: Markup, *, filler_rows_max: int | None = None) -> None:
        self.session, self.markup, self.filler_rows_max = session, markup, filler_rows_max
        self.filler_rows: list[int] = []
        """Ascending; those laid out and not fed yet included."""
        self.repeated_rows: list[int] = []
        """Ascending: those whose text is that of lost ones; see :meth:`repeated`."""
        self.message_count = 0
        """Messages that ended."""
        self.unfilled_count = 0
        """Messages that end inside a block, because the budget or ``rows_max`` had no room for filler."""
        self._scanned = 0
        self._laid = 0
        """Rows below it are fed or laid out."""
        self._border = 0
        """The row where the last message that ended, ended."""
        self._turn = 0
        """The row where the turn under way began."""
        self._tail: int | None = None
        """Behind an end: separator tokens seen; ``None`` elsewhere."""

    @classmethod
    def resumed(
        cls,
        session: Session,
        markup: Markup,
        *,
        filler_rows: Sequence[int] | None = None,
        repeated_rows: Sequence[int] = (),
        filler_rows_max: int | None = None,
    ) -> Conversation:
        """Of a stream with a past: adopted from another agent, recovered, or forked.  Its tokens are all read
        once more, those that were cut, too; its turns and its prefix are what it says.

        Args:
            filler_rows: if not known, filler ids right behind the end of a message are taken for filler.
            repeated_rows: see :meth:`repeated`.
        """
        resumed = cls(session, markup, filler_rows_max=filler_rows_max)
        resumed.repeated_rows = [*repeated_rows]
        known, again = None if filler_rows is None else frozenset(filler_rows), frozenset(repeated_rows)
        for row, token in enumerate(session.tokens):
            if row in again:
                if resumed._tail is not None:
                    resumed._end_message(row, None)
                resumed._pass_over(row, row + 1)
                continue
            behind_end = resumed._tail is not None and token == markup.filler
            is_filler = behind_end if known is None else row in known
            if is_filler:
                resumed.filler_rows.append(row)
            resumed._read(token, row, None, is_filler)
        resumed._scanned = resumed._laid = session.next_row
        if resumed._tail is not None:
            resumed._end_message(session.next_row, None)
        return resumed

    def forked(self, session: Session) -> Conversation:
        """For a session that was forked from this one's, now or at an earlier row."""
        child = Conversation.resumed(
            session,
            self.markup,
            filler_rows=self.filler_rows[: self._filler_count(session.next_row)],
            repeated_rows=[row for row in self.repeated_rows if row < session.next_row],
            filler_rows_max=self.filler_rows_max,
        )
        slots = session.slot_count
        if child.message_count % 2 and not child.in_message:
            for start, end in self.session.turns:
                if start < slots < end:  # filler behind it, which the child is without, belongs to the turn
                    session.end_turn(start, slots)
        return child

    def copy(self) -> Conversation:
        """As it is now, of the same stream."""
        other = copy(self)
        other.filler_rows, other.repeated_rows = self.filler_rows[:], self.repeated_rows[:]
        return other

    @property
    def text_rows(self) -> int:
        """Rows fed without filler: what a limit on the text's length counts.  The model's own limit counts
        all rows (``Session.rows_max``), for filler has positions, too."""
        return self.session.next_row - self._filler_count(self.session.next_row)

    @property
    def in_message(self) -> bool:
        """Whether a message has begun and not ended."""
        return self._scanned > self._border

    # -- what to feed

    def admit(self, messages: Sequence[Sequence[int]], generation_prefix: Sequence[int] = ()) -> Chunk:
        """Messages that others wrote, each with its end and separator, and then what makes the model answer.

        Filler goes behind each message's separator, so that the next one begins a block, and never behind
        ``generation_prefix``: the last that the model reads before it writes is what it was trained on.  The
        first message of a stream is protected from now on, lest a window cut it while it is fed in parts.

        Raises:
            ValueError: a message does not end, or more than once; the message before has not ended; or what
                was laid out before is not fed yet.
        """
        self._require_read()
        if self.in_message or self.session.pending is not None:
            raise ValueError("the message before has not ended: feed finish(end=...) first")
        for message in messages:
            self._require_message(message)
        tokens: list[int] = []
        filler: list[int] = []
        unfed = sum(map(len, messages)) + len(generation_prefix)
        for place, message in enumerate(messages):
            tokens += message
            unfed -= len(message)
            count = self._lay_filler(len(tokens), unfed)
            filler += range(len(tokens), len(tokens) + count)
            tokens += self._filler(count)
            if not self.message_count and not place:
                self.session.protect(self.session.slot_count + len(tokens))
        tokens += generation_prefix
        self._laid = self.session.next_row + len(tokens)
        return Chunk(tuple(tokens), tuple(filler))

    def finish(self, end: int | None = None) -> Chunk:
        """What completes the message that the model wrote: feed it in one pass, then report it finished.

        First its last sampled token.  Then, if that ends the message, or ``end`` does, the separator; then
        filler.  No tokens if all have K/V and end a block; fewer if ``rows_max`` leaves no room for all.

        Args:
            end: the id that ends a message which a limit on new tokens cut short, or that has no tokens.
                Without it such a message goes on, or is no turn.

        Raises:
            ValueError: ``end`` ends no message; or what was laid out before is not fed yet.
        """
        self._require_read()
        if end is not None and end not in self.markup.ends:
            raise ValueError(f"token {end} ends no message")
        session = self.session
        tokens = [] if session.pending is None else [session.pending]
        ended = session.pending in self.markup.ends
        if end is not None and not ended and (tokens or self.in_message):
            tokens.append(end)
            ended = True
        if ended:
            tokens += self.markup.separator
        tokens = tokens[: session.rows_max - session.next_row]
        count = self._lay_filler(len(tokens), 0)
        self._laid = session.next_row + len(tokens) + count
        places = tuple(range(len(tokens), len(tokens) + count))
        return Chunk((*tokens, *self._filler(count)), places)

    def withdraw(self) -> None:
        """What was laid out and not fed will not be: its forward pass failed for good."""
        del self.filler_rows[self._filler_count(self.session.next_row) :]
        self._laid = self.session.next_row

    # -- what was fed

    def scan(self) -> int:
        """Read the rows that were committed since the last scan and note messages, prefix and turns: after
        every commit, before the next event.  Its cost is that of the new rows.

        Returns how many messages ended.

        Raises:
            ValueError: rows were cut before they were read, or another token was fed than the filler that was
                laid out.
        """
        before = self.message_count
        self._scan(self.session.next_row)
        return self.message_count - before

    def repeated(self, row_count: int) -> None:
        """Instead of :meth:`scan`, when the last ``row_count`` of the new rows repeat archived text: no
        message begins or ends in them.  Between turns they are one of their own, so that they go in order.

        Raises:
            ValueError: as :meth:`scan`; or so many rows are not new.
        """
        session = self.session
        end, first = session.next_row, session.next_row - row_count
        if not self._scanned <= first:
            raise ValueError(f"{row_count} rows are repeated and {end - self._scanned} are new")
        self._scan(first)
        self._scanned = end
        self.repeated_rows += range(first, end)
        if self._border == first and self.message_count % 2:
            self._end_turn(session.slot_count)
        self._pass_over(first, end)

    def _pass_over(self, first: int, end: int) -> None:
        """These rows are in no message, unless one has begun."""
        if self._border == first:
            self._border = end
            if self.message_count % 2:
                self._turn = end

    def _scan(self, end: int) -> None:
        """The rows before ``end``."""
        session, first = self.session, self._scanned
        behind = session.slot_count - (session.next_row - first)
        """Slot of row ``first``."""
        if behind < 0 or (first < end and session.view.rows[behind] != first):
            raise ValueError(f"rows from {first} on were cut before they were read: scan after every commit")
        for row in range(first, end):
            self._read(session.tokens[row], row, behind + row - first, self._is_filler(row))
        self._scanned = end
        if self._tail is not None and self._scanned >= self._laid:
            self._end_message(end, behind + end - first)

    def _read(self, token: int, row: int, slot: int | None, is_filler: bool) -> None:
        if is_filler:
            if token != self.markup.filler:
                raise ValueError(
                    f"row {row} was laid out as filler and is token {token}: feed chunks as given"
                )
            return
        if self._tail is not None:
            if self._tail < len(self.markup.separator) and token == self.markup.separator[self._tail]:
                self._tail += 1
                return
            self._end_message(row, slot)
        if token in self.markup.ends:
            self._tail = 0

    def _end_message(self, row: int, slot: int | None) -> None:
        """One ended right before ``row``, which stands or will stand in ``slot``; no slot = the session knows
        of it."""
        self._tail, self._border = None, row
        self.message_count += 1
        if slot is not None and self.message_count == 1:
            self.session.protect(slot)
        if self.message_count % 2:
            if slot is not None and self.message_count > 1:
                self._end_turn(slot)
            self._turn = row

    def _end_turn(self, end: int) -> None:
        """From the oldest row of it that is still in view; a window may have cut some."""
        rows, start = self.session.view.rows, end
        while start and rows[start - 1] >= self._turn:
            start -= 1
        if start < end:
            self.session.end_turn(start, end)

    def moved(self, session: Session, rows: Sequence[int]) -> Conversation:
        """The same conversation in a new stream whose rows are, in this order, ``rows`` of this one (-1 = put
        in on the way), and are fed there.

        Raises:
            ValueError: another number of rows is.
        """
        if session.next_row != len(rows):
            raise ValueError(f"{session.next_row} rows are fed and {len(rows)} were carried over")
        other = Conversation(session, self.markup, filler_rows_max=self.filler_rows_max)
        other.filler_rows = [at for at, row in enumerate(rows) if self._is_filler(row)]
        again = frozenset(self.repeated_rows)
        other.repeated_rows = [at for at, row in enumerate(rows) if row in again]
        other.message_count, other.unfilled_count = self.message_count, self.unfilled_count
        other._scanned = other._laid = len(rows)
        other._border, other._turn = _place(rows, self._border), _place(rows, self._turn)
        return other

    # -- inside

    def _lay_filler(self, fed: int, unfed: int) -> int:
        """Filler rows behind the first ``fed`` tokens of a chunk, before ``unfed`` more; they are noted."""
        session = self.session
        count = -(session.slot_count + fed) % session.block_tokens
        if self.markup.filler is None or not count:
            return 0
        budget = self.filler_rows_max
        over_budget = budget is not None and len(self.filler_rows) + count > budget
        row = session.next_row + fed
        if over_budget or row + count + unfed > session.rows_max:
            self.unfilled_count += 1
            return 0
        self.filler_rows += range(row, row + count)
        return count

    def _filler(self, count: int) -> list[int]:
        return [] if self.markup.filler is None else [self.markup.filler] * count

    def _is_filler(self, row: int) -> bool:
        at = self._filler_count(row)
        return at < len(self.filler_rows) and self.filler_rows[at] == row

    def _filler_count(self, row: int) -> int:
        """Filler rows before ``row``."""
        return bisect_left(self.filler_rows, row)

    def _require_read(self) -> None:
        if self._scanned != self.session.next_row:
            raise ValueError("rows were committed and not read: scan after every commit")
        if self._scanned < self._laid:
            raise ValueError(
                f"{self._laid - self._scanned} rows were laid out and are not fed: feed or withdraw"
            )

    def _require_message(self, message: Sequence[int]) -> None:
        ends, separator = self.markup.ends, self.markup.separator
        body = len(message) - len(separator)
        if body < 1 or message[body - 1] not in ends or tuple(message[body:]) != separator:
            raise ValueError(
                "a message ends with an end-of-message id and the separator; this one ends with "
                f"{list(message[-len(separator) - 1 :])}"
            )
        if any(token in ends for token in message[: body - 1]):
            raise ValueError("a message has one end; this one's text contains the id of another: escape it")


def _place(rows: Sequence[int], border: int) -> int:
    """Where those from row ``border`` on begin."""
    place = len(rows)
    while place and rows[place - 1] >= border:
        place -= 1
    return place
