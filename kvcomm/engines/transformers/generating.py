"""``Stream`` and ``generate``: rollouts written by an engine, one or many at a time, each cut when its policy
says so.

The order of one step, for every stream of a batch::

    one pass for all ─► scan ─► observe ─► sample ─► stop? ─ no ─► cut ─► next pass
                                                      └─ yes ─► finish: [last token, filler] in the next
                                                                pass, no cut before the next message

A cut happens between two passes, so streams of one batch are cut at different rows, and a token that was
sampled is the first row behind the cut that follows.  A stream that stopped is not cut until its next message
is admitted.

Where the memory is full the newest streams of the batch are swapped out, bytes and all, and go on when others
are done: nothing is computed twice.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvcomm.block import BlockKey
from kvcomm.engines.transformers.attention import Watch
from kvcomm.engines.transformers.sampling import draw
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.errors import ConfigError, PoolFull
from kvcomm.streams.archive import Repeated
from kvcomm.streams.compactor import Compactor
from kvcomm.streams.context import StreamContext
from kvcomm.streams.conversation import Conversation, Markup
from kvcomm.streams.events import Event, no_journal
from kvcomm.streams.policies.full import Full
from kvcomm.streams.policies.port import Policy
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.session import Session

_log = logging.getLogger(__name__)

Stop = Literal["token", "length", "rows"]
"""Why an answer ended: a stop token; ``max_new_tokens``; the model's length limit (``Session.rows_max``)."""

PREFILL_ROWS = 512

Adopt = Callable[[Session, Sequence[int]], int]
"""Begins to feed tokens with blocks that are there; how many rows that gave: ``Session.adopt_prefix``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What others say to a stream.

    Messages are token ids, each with its end and separator where the stream has a ``Markup``.
    """

    messages: Sequence[Sequence[int]]
    generation_prefix: Sequence[int] = ()
    """What makes the model answer."""


@dataclass(slots=True)
class Answer:
    """What one stream wrote."""

    tokens: list[int] = field(default_factory=list)
    """Sampled, the stop token included."""
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None
    """``None`` = it goes on."""
    filler_count: int = 0
    """Rows fed behind it to end its block: nobody's text."""


class Stream:
    """One rollout.

    Args:
        engine: who computes it.
        name: of the rollout.
        policy: what to cut; nothing if not given.
        markup: how messages end, where there are any: then turns, protected prefix and filler are kept.
        sampling: how tokens are drawn.
        seed: of the draw.
        archive: keep what is cut, to bring it back.
        filler_rows_max: see ``Conversation``.
        session: to go on with, of ``engine``: adopted, recovered, forked; a new one if not given.
        past: what ``session`` was adopted from: knows its fillers.
        journal: of the new session.

    Raises:
        ConfigError: the policy does not fit the engine's blocks, or needs a markup.
    """

    def __init__(
        self,
        engine: StreamEngine,
        name: str,
        *,
        policy: Policy | None = None,
        markup: Markup | None = None,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        seed: int = 0,
        archive: bool = False,
        filler_rows_max: int | None = None,
        session: Session | None = None,
        past: StreamContext | None = None,
        journal: Callable[[Event], None] = no_journal,
    ) -> None:
        self.session = session or engine.session(journal=journal)
        if isinstance(policy, WholeTurns) and markup is None and not self.session.turns:
            raise ConfigError(
                "a policy of whole turns never cuts a stream that knows of none: give it a markup"
            )
        self.compactor = Compactor(self.session, policy or Full(), archive=archive)
        self.recorder = Recorder(self.session, name)
        self.conversation: Conversation | None = None
        filler_rows = past.filler_rows if past else None
        if markup is not None and self.session.next_row:
            self.conversation = Conversation.resumed(
                self.session,
                markup,
                filler_rows=filler_rows,
                repeated_rows=past.repeated_rows if past else (),
                filler_rows_max=filler_rows_max,
            )
            filler_rows = self.conversation.filler_rows
        elif markup is not None:
            self.conversation = Conversation(self.session, markup, filler_rows_max=filler_rows_max)
        self.recorder.filler_at(filler_rows or ())
        self.recorder.repeated_rows += past.repeated_rows if past else ()
        self.sampling = sampling
        self.logits: torch.Tensor | None = None
        """After the last row, float32 ``[vocab_size]``."""
        self.answer: Answer | None = None
        """Under way."""
        self.finished = False
        """The answer's last row has K/V."""
        self._finishing = self._obstacle_told = False
        self._cut_due = self.session.pending is not None
        """Whether rows were fed that the policy was not asked about; a session that is taken over in the
        middle of an answer may have some."""
        self._prompt_end = 0
        """The row behind the prompt that was admitted last; fewer are fed where a pass failed."""
        self._generator = torch.Generator().manual_seed(seed)
        self._engine = engine

    def rollout(self) -> Rollout:
        """As it is now."""
        return self.recorder.rollout()

    def fork(
        self,
        name: str,
        *,
        seed: int,
        loss: bool = False,
        at_row: int | None = None,
        journal: Callable[[Event], None] = no_journal,
    ) -> Stream:
        """Another stream with the same past, whose blocks it shares and whose draw goes another way from
        here: siblings of one prompt, or what follows instead of a mistake.

        Args:
            name: of its rollout; its digest stands in the log.
            seed: of its draw.
            loss: whether a trainer learns from the samples so far in this rollout, too.
            at_row: with the past before that row, which must not be before the last event; then it is
                prefilled before it generates.

        Raises:
            ValueError: an answer is under way; see ``Session.fork``.
            PoolFull: no block for a copy of the partial last one, or none to come back to from where
                :func:`generate` sent this stream when memory was full.
        """
        self._require_no_answer()
        if self._engine.keeps(self.session):
            self._engine.swap_in(self.session)
        digest = hashlib.sha256(name.encode()).digest()
        session = self._engine.fork(self.session, digest, journal=journal, at_row=at_row)
        child = Stream(self._engine, name, sampling=self.sampling, seed=seed, session=session)
        child.compactor = self.compactor.forked(session)
        child.recorder = self.recorder.fork(session, name, loss=loss)
        child.conversation = self.conversation and self.conversation.forked(session)
        if session.next_row == self.session.next_row:
            child.logits, child.finished, child._cut_due = self.logits, self.finished, self._cut_due
            child._prompt_end = self._prompt_end
        return child

    def successor(self, name: str, conversation: Conversation) -> Stream:
        """The stream that goes on with this one's conversation, moved to the session where it stands now, and
        with its draw.

        Raises:
            ValueError: an answer is under way.
        """
        self._require_no_answer()
        other = Stream(self._engine, name, sampling=self.sampling, session=conversation.session)
        other.compactor = Compactor(
            conversation.session, self.compactor.policy, archive=self.compactor.archive
        )
        other.conversation, other._generator = conversation, self._generator
        other.recorder.filler_rows += conversation.filler_rows
        other.recorder.repeated_rows += conversation.repeated_rows
        return other

    def repeated(self, again: Repeated) -> None:
        """``Archive.repeat`` has fed the text of a lost span into this stream, and told its recorder."""
        if self.conversation is not None:
            self.conversation.repeated(again.row_count)
        self.logits, self._cut_due = again.logits, True

    def close(self) -> None:
        """Let go of all memory; idempotent."""
        self.session.close()

    def _require_no_answer(self) -> None:
        if self.answer is not None:
            raise ValueError("an answer is under way: let generate() finish it first")

    # -- the parts of a step, for who drives it

    def admit(self, prompt: Prompt) -> list[int]:
        """Cut what has to go before ``prompt``, and say what to feed."""
        self.compactor.at_admission()
        self._cut_due = self.finished = False
        if self.conversation is None:
            tokens = [token for part in (*prompt.messages, prompt.generation_prefix) for token in part]
        else:
            tokens = [*self.conversation.admit(prompt.messages, prompt.generation_prefix).tokens]
            self._tell_obstacle()
        self._prompt_end = self.session.next_row + len(tokens)
        return tokens

    @property
    def prompted(self) -> bool:
        """Whether it can answer: there is something to go on from, and no prompt was fed in part."""
        if self.session.next_row < self._prompt_end:
            return False
        return self.logits is not None or self.session.pending is not None

    @property
    def goes_on_uncut(self) -> bool:
        """Whether an answer follows an answer without a prompt between them, which would have been the moment
        to cut."""
        return self.answer is None and self.compactor.stopped

    def begin_answer(self) -> None:
        """Go on with one that was interrupted, or begin one."""
        if self.goes_on_uncut:
            self.compactor.at_admission()
        if self.answer is None:
            self.answer, self.finished = Answer(), False

    def first_key(self, tokens: list[int]) -> BlockKey | None:
        """Of the block that begins ``tokens``, if it can be taken up from another stream."""
        size = self.session.block_tokens
        # Of rows that are taken up nobody sees what they attend.
        if self.compactor.query_rows is not None or self.session.slot_count % size or len(tokens) <= size:
            return None
        return self.session.next_keys(tokens[:size])[0]

    def adopt(self, tokens: list[int], adopt: Adopt = Session.adopt_prefix) -> list[int]:
        """Take up the blocks that begin ``tokens``, as far as ``adopt`` finds them; the rest is to be fed."""
        if self.first_key(tokens) is None:
            return tokens
        count = adopt(self.session, tokens)
        self._cut_due = count > 0
        self._read()
        return tokens[count:]

    def cut(self) -> None:
        """What the last pass made too much goes, before the next one."""
        if self._cut_due:
            self._cut_due = False
            self.compactor.after_forward()

    def committed(self, logits: torch.Tensor, watch: Watch | None) -> None:
        """A pass is done."""
        self.logits, self._cut_due = logits, True
        self.finished, self._finishing = self._finishing, False
        self._read()
        if watch is not None and self.compactor.query_rows is not None:
            self.compactor.observe(watch.mass(self.session), watch.row_count(self.session))

    def uniform(self) -> float:
        """The next number of the draw."""
        return float(torch.rand((), dtype=torch.float64, generator=self._generator))

    def finish(self, end: int | None) -> list[int]:
        """The answer is complete: what to feed before it is reported."""
        self.compactor.stop()
        if self.conversation is None:
            tokens = [] if self.session.pending is None else [self.session.pending]
        else:
            chunk = self.conversation.finish(end)
            tokens = [*chunk.tokens]
            if self.answer is not None:
                self.answer.filler_count = len(chunk.filler)
        self._finishing, self.finished = bool(tokens), not tokens
        return tokens

    def _tell_obstacle(self) -> None:
        """Once: a policy that never cuts this stream would be taken for one that does."""
        obstacle = None if self._obstacle_told else self.compactor.obstacle
        if obstacle is not None:
            self._obstacle_told = True
            _log.warning("stream %s runs on full context: %s", self.recorder.name, obstacle)

    def withdraw(self) -> None:
        """What was to be fed and was not will not be."""
        self._finishing = False
        if self.conversation is not None and not self.session.closed:
            self._read()
            self.conversation.withdraw()

    def _read(self) -> None:
        if self.conversation is not None:
            self.conversation.scan()
            laid = self.conversation.filler_rows[len(self.recorder.filler_rows) :]
            self.recorder.filler_at([row for row in laid if row < self.session.next_row])


def prefill(
    engine: StreamEngine,
    prompts: Sequence[tuple[Stream, Prompt]],
    *,
    chunk_rows: int = PREFILL_ROWS,
    adopt: Adopt = Session.adopt_prefix,
) -> None:
    """Admit a prompt to each stream: cut, then feed, with cuts between the chunks.  What the engine's memory
    has already, of siblings with the same past, is taken up and not computed; of siblings that begin here
    together, the first one computes what all have in common.

    Args:
        chunk_rows: most rows of a stream in one pass.
        adopt: where else blocks are looked for: ``lambda session, tokens: kv.adopt_prefix(session, engine,
            tokens)`` asks the cluster, too.

    Raises:
        ValueError: a prompt is empty, or does not fit its stream's markup; a stream stands twice, or its
            answer is not finished.
        Refused: more rows than the model takes.
        PoolFull: not even one of them fits with what others hold.

    Where this raises, rows that were fed stay, and a stream whose prompt was not fed whole does not answer:
    to try again, fork it at the row where the prompt began.
    """
    if chunk_rows < 1:
        raise ValueError("chunk_rows must be at least 1")
    batch = _Batch(engine, [stream for stream, _ in prompts])
    unfed: dict[Stream, list[int]] = {}
    starts: dict[Stream, BlockKey | None] = {}
    try:
        for stream, prompt in prompts:
            batch.bring_in(stream)
            unfed[stream] = stream.admit(prompt)
            starts[stream] = stream.first_key(unfed[stream])
        while unfed:
            rest: dict[Stream, list[int]] = {}
            for stream in _first_of_each(unfed, starts):
                batch.bring_in(stream)  # the next one may put it out again
                rest[stream] = stream.adopt(unfed.pop(stream), adopt)
            batch.feed_all(rest, chunk_rows)
    except BaseException:
        for stream, _ in prompts:
            stream.withdraw()
        raise


def _first_of_each(streams: Iterable[Stream], starts: Mapping[Stream, BlockKey | None]) -> list[Stream]:
    """Those whose first block nobody before them computes."""
    by_start: dict[BlockKey | Stream, Stream] = {}
    for stream in streams:
        by_start.setdefault(starts[stream] or stream, stream)
    return [*by_start.values()]


def generate(
    engine: StreamEngine,
    streams: Sequence[Stream],
    max_new_tokens: int,
    *,
    stop: Collection[int] | None = None,
    end: int | None = None,
    loss: bool = True,
) -> list[Answer]:
    """Let the streams answer their prompts, all in one batch.

    Args:
        streams: prefilled, or adopted in the middle of an answer.
        max_new_tokens: of each.
        stop: an answer ends with one of these; if not given, with what ends a message of its stream.
        end: fed behind an answer that a limit cut short, to end its message.
        loss: whether a trainer learns from these tokens.

    Raises:
        ValueError: a stream is not prefilled, or stands twice.
        PoolFull: not even one of them fits with what others hold.  What was sampled is kept: make room and
            call this again.
    """
    limits = _Limits(max_new_tokens, stop, end, loss)
    batch = _Batch(engine, streams)
    if not all(stream.prompted for stream in streams):
        raise ValueError("prefill a stream before it generates, all of its prompt")
    for stream in streams:
        if stream.goes_on_uncut:
            batch.bring_in(stream)
        stream.begin_answer()
    ready, wanted = list(streams), dict[Stream, list[int]]()
    try:
        while ready:
            wanted |= limits.next_tokens(ready)
            ready = batch.feed(wanted)
            for stream in ready:
                del wanted[stream]
    except BaseException:
        for stream in streams:
            stream.withdraw()
        raise
    answers = [stream.answer for stream in streams if stream.answer is not None]
    for stream in streams:
        stream.answer = None
    return answers


@dataclass(frozen=True, slots=True)
class _Limits:
    """When answers end."""

    max_new_tokens: int
    stop: Collection[int] | None
    end: int | None
    loss: bool

    def next_tokens(self, streams: Sequence[Stream]) -> dict[Stream, list[int]]:
        """What to feed next; those who need nothing more are not there."""
        for stream in streams:
            self._stop_at_limit(stream)
        self._sample([stream for stream in streams if self._draws(stream)])
        return {stream: tokens for stream in streams if (tokens := self._tokens(stream))}

    def _tokens(self, stream: Stream) -> list[int]:
        answer, pending = stream.answer, stream.session.pending
        assert answer is not None
        if answer.stop is None:
            assert pending is not None
            return [pending]
        if stream.finished:
            return []
        return stream.finish(self.end if answer.stop != "token" else None)

    def _draws(self, stream: Stream) -> bool:
        """Whether it goes on, and has no token from before memory ran out."""
        return stream.answer is not None and stream.answer.stop is None and stream.session.pending is None

    def _stop_at_limit(self, stream: Stream) -> None:
        answer, session = stream.answer, stream.session
        if answer is None or answer.stop is not None:
            return
        if session.pending is not None:
            if session.pending in self._stops(stream):  # who drew it did not come to finish
                answer.stop = "token"
        elif len(answer.tokens) >= self.max_new_tokens:
            answer.stop = "length"
        elif session.next_row >= session.rows_max:  # a token without a row would never have K/V
            answer.stop = "rows"

    def _sample(self, streams: Sequence[Stream]) -> None:
        if not streams:
            return
        logits = torch.stack([stream.logits for stream in streams if stream.logits is not None])
        drawn = draw(
            logits, [stream.sampling for stream in streams], [stream.uniform() for stream in streams]
        )
        for stream, (token, logprob) in zip(streams, drawn, strict=True):
            stream.recorder.sampled(token, logprob, stream.sampling, self.loss)
            answer = stream.answer
            assert answer is not None
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            if token in self._stops(stream):
                answer.stop = "token"
            elif len(answer.tokens) >= self.max_new_tokens:
                answer.stop = "length"

    def _stops(self, stream: Stream) -> Collection[int]:
        if self.stop is not None or stream.conversation is None:
            return self.stop or ()
        return stream.conversation.markup.ends


class _Batch:
    """Streams that share the memory: the first ones run, the last ones give way.

    Raises:
        ValueError: a stream stands twice.
    """

    def __init__(self, engine: StreamEngine, streams: Sequence[Stream]) -> None:
        if len({*streams}) < len(streams):
            raise ValueError("a stream stands twice in a batch")
        self._engine = engine
        self._streams = streams

    def feed(self, wanted: Mapping[Stream, Sequence[int]]) -> list[Stream]:
        """One pass for as many as the memory holds, of those that fit together; who was fed.

        Raises:
            PoolFull: it does not hold one.
        """
        if not wanted:
            return []
        self._bring_in_those_that_fit(wanted)
        running = self._alike([stream for stream in wanted if stream.session.swapped is None], wanted)
        chosen = {*running}
        waiting = [stream for stream in wanted if stream not in chosen]
        idle = [stream for stream in self._streams if stream not in wanted]
        for stream in running:
            stream.cut()
        while True:
            try:
                self._pass(running, wanted)
            except PoolFull:
                if self._make_room(idle) or self._make_room(waiting):
                    continue
                if len(running) == 1:
                    raise
                self._make_room([running.pop()])  # or it holds nothing yet, and only waits
            else:
                return running

    def feed_all(self, rest: dict[Stream, list[int]], chunk_rows: int) -> None:
        """All tokens of each, so many rows in one pass at most."""
        while rest:
            for stream in self.feed({stream: tokens[:chunk_rows] for stream, tokens in rest.items()}):
                rest[stream] = rest[stream][chunk_rows:]
            rest = {stream: tokens for stream, tokens in rest.items() if tokens}

    def bring_in(self, stream: Stream) -> None:
        """Raises ``PoolFull`` if others must not give way."""
        while stream.session.swapped is not None:
            try:
                self._engine.swap_in(stream.session)
            except PoolFull:
                if not self._make_room([other for other in self._streams if other is not stream]):
                    raise

    def _alike(self, streams: list[Stream], wanted: Mapping[Stream, Sequence[int]]) -> list[Stream]:
        """Those with most to feed, and all that have half of that or more: a pass costs as much for each as
        for the longest, and steps of one token have a faster way."""
        most = max(len(wanted[stream]) for stream in streams)
        return [stream for stream in streams if 2 * len(wanted[stream]) >= most]

    def _pass(self, running: Sequence[Stream], wanted: Mapping[Stream, Sequence[int]]) -> None:
        rows = {
            stream.session: count for stream in running if (count := stream.compactor.query_rows) is not None
        }
        watch = Watch(rows) if rows else None
        feeds = [(stream.session, wanted[stream]) for stream in running]
        logits = self._engine.feed(feeds, watch=watch)
        for stream, after in zip(running, logits, strict=True):
            stream.committed(after, watch)

    def _bring_in_those_that_fit(self, wanted: Mapping[Stream, Sequence[int]]) -> None:
        """Who was swapped out comes back when there is room for it and for the next block of everybody."""
        pool = self._engine.pool
        running = sum(stream.session.swapped is None for stream in wanted)
        for stream, tokens in wanted.items():
            session = stream.session
            if session.swapped is None:
                continue
            blocks = -(-(session.slot_count + len(tokens)) // session.block_tokens)
            if running and pool.free_count < blocks + running:
                return
            self.bring_in(stream)
            running += 1

    def _make_room(self, candidates: Sequence[Stream]) -> bool:
        """Swap out the last of them that holds memory."""
        for stream in reversed(candidates):
            if stream.session.table:
                self._engine.swap_out(stream.session)
                return True
        return False
