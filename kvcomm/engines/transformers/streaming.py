"""``StreamEngine``: KV-streams on a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvcomm.block import Buffer
from kvcomm.engines.transformers.attention import Watch, watching
from kvcomm.engines.transformers.chunk import Chunk
from kvcomm.engines.transformers.decoding import PagedDecode, decodes_pages
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, layer_types, window_of
from kvcomm.engines.transformers.identity import namespace_of, weights_digest
from kvcomm.engines.transformers.lanes import Lanes, lane_cache
from kvcomm.engines.transformers.paged import PagedKV
from kvcomm.errors import Refused
from kvcomm.namespace import Namespace
from kvcomm.streams.counts import StreamCounts
from kvcomm.streams.events import Event, no_journal
from kvcomm.streams.model_rules import require_compactable
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Feed, Session


class StreamEngine:
    """A :class:`kvcomm.streams.engine.Engine`.  Not thread-safe.

    Args:
        model: in evaluation mode.
        block_count: size of the paged memory, on the model's device.
        namespace: of ``model``; computed when not given (hashes all weights).  Its dtype is the memory's:
            with fewer bits than the model computes in, rows are rounded when they are written.
        block_tokens: of a namespace that is computed.
        rows_max: most rows of a session; the model's ``max_position_embeddings`` if not given.
        chunk_rows: most rows of a session in one pass, bounds the memory of the attention mask; a longer
            feed is computed in several.
        lanes_max: most sessions with a contiguous working copy of their view; see ``lanes``.
        counts: of events and rows, in a client's metrics; its own if not given.
        decode: how steps of one token each are computed: over the working copies, or over the memory itself
            (see ``decoding``), which "auto" does on a GPU for models that allow it.

    Raises:
        NotCompactable: see :func:`require_compactable`.
        UnsupportedModel: see :func:`namespace_of`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        block_count: int,
        namespace: Namespace | None = None,
        *,
        block_tokens: int = 16,
        rows_max: int | None = None,
        chunk_rows: int = 1024,
        lanes_max: int = 32,
        counts: StreamCounts | None = None,
        decode: Literal["auto", "lanes", "pages"] = "auto",
    ) -> None:
        if chunk_rows < 1 or lanes_max < 1:
            raise ValueError("chunk_rows and lanes_max must be at least 1")
        require_compactable(model.config.get_text_config(decoder=True).to_dict())
        self.model = model
        self.namespace = namespace or namespace_of(model, block_tokens=block_tokens)
        self.pool = BlockPool(block_count)
        self.counts = counts or StreamCounts()
        self.paged = PagedKV(self.namespace, block_count, model.device)
        self.lanes = Lanes(self.paged, lanes_max)
        config = model.config.get_text_config(decoder=True)
        self.rows_max = rows_max or int(config.max_position_embeddings)
        self.weights_version = 0
        """Of the rows that are computed now; see :meth:`set_weights`."""
        self._weights_digest = b""
        self._swapped: WeakKeyDictionary[Session, list[memoryview]] = WeakKeyDictionary()
        self._chunk_rows = chunk_rows
        self._kinds = sorted(set(layer_types(model)))
        self._window = window_of(model)
        on_gpu = model.device.type == "cuda"
        able = decodes_pages(model) and self.paged.states.dtype == model.dtype
        pages = decode == "pages" or (decode == "auto" and on_gpu and able)
        if pages and not able:
            raise ValueError("this model cannot decode over pages; see kvcomm.engines.transformers.decoding")
        self._decode = PagedDecode(model, self.paged, self.rows_max, record=on_gpu) if pages else None

    def session(self, *, journal: Callable[[Event], None] = no_journal) -> Session:
        session = Session(self.pool, self.namespace, rows_max=self.rows_max, journal=journal)
        self.counts.watch(session)
        if self.weights_version:
            session.set_weights(self.weights_version, digest=self._weights_digest)
        return session

    def recovered(
        self,
        tokens: Sequence[int],
        events: Sequence[Event],
        *,
        journal: Callable[[Event], None] = no_journal,
    ) -> Session:
        """See :meth:`kvcomm.streams.engine.Engine.recovered`.

        Raises:
            Refused: the last rows were computed with other weights than the model has now; see
                :meth:`set_weights`.
        """
        session = Session.recovered(
            self.pool, self.namespace, tokens, events, rows_max=self.rows_max, journal=journal
        )
        self._require_these_weights(session)
        self.counts.watch(session)
        return session

    def set_weights(
        self, version: int, sessions: Iterable[Session] = (), *, digest: bytes | None = None
    ) -> None:
        """The model's weights were changed in place: rows of ``sessions`` go on under them, over the K/V of
        the old ones, and new sessions share no block with older weights.  Other open sessions are not fed
        any more.

        Args:
            digest: 32 bytes that no other weights have, a checkpoint's for one.  If not given the weights are
                hashed as they lie in memory (SHA-256, about 1.8 GB/s a core): blocks are named by it, so that
                another training of the same model never finds them.

        Raises:
            ValueError: no version, or the one in force, or no digest.
            NamespaceError: a weight is not in memory.
            Refused: a session is closed or swapped out; those before it have changed, and may be given again.
        """
        if version < 1 or version == self.weights_version:
            raise ValueError(f"weights {version} after {self.weights_version}: that is no change")
        named = bytes.fromhex(weights_digest(self.model)) if digest is None else digest
        if len(named) != 32:
            raise ValueError(f"a digest of weights has 32 bytes, not {len(named)}")
        for session in sessions:
            if session.view.weights_version != version:
                session.set_weights(version, digest=named)
        self.weights_version, self._weights_digest = version, named
        if self._decode is not None:
            self._decode.forget()

    def feed(
        self, feeds: Sequence[tuple[Session, Sequence[int]]], *, watch: Watch | None = None
    ) -> list[torch.Tensor]:
        """See :meth:`kvcomm.streams.engine.Engine.feed`.

        Args:
            watch: is told what the rows attend.

        Raises:
            ValueError: the model is in training mode, a session stands twice, or is of another engine.
            Refused: a session was written with other weights; see :meth:`set_weights`.
        """
        with self._planned(feeds) as planned:
            logits = self._computed(planned, watch, last=1) if planned else []
            for session, feed in tuple(planned):
                session.commit(feed)
                planned.pop(0)
                self.lanes.fed(session)
        self.counts.fed(feeds)
        return [rows[-1] for rows in logits]

    def feed_guess(
        self, session: Session, tokens: Sequence[int], judge: Callable[[torch.Tensor], int]
    ) -> torch.Tensor:
        """Feed tokens of which the last ones are guessed, and keep those that the model agrees to: in a view
        that changes with events a wrong row must not be there when the next one happens.

        Args:
            tokens: at most ``chunk_rows``.
            judge: gets the logits after each token, float32 ``[tokens, vocab_size]``, and says how many
                tokens from the front are right; the others were never fed.

        Returns the logits after the last token that was kept, or, if none was, after none: ``[0]``.

        Raises:
            ValueError: too many tokens, or ``judge`` says more than there are.
        """
        if len(tokens) > self._chunk_rows:
            raise ValueError(f"{len(tokens)} guessed tokens, and one pass computes {self._chunk_rows}")
        with self._planned([(session, tokens)]) as planned:
            ((_, feed),) = planned
            (logits,) = self._computed(planned, None, last=len(tokens))
            count = judge(logits)
            if not 0 <= count <= len(tokens):
                raise ValueError(f"{count} of {len(tokens)} guessed tokens are right")
            if count:
                session.commit(feed, count)
                planned.clear()
                self.lanes.fed(session)
        self.counts.fed([(session, tokens[:count])])
        return logits[count - 1] if count else logits.new_zeros(0)

    def fork(
        self,
        session: Session,
        name: bytes,
        *,
        journal: Callable[[Event], None] = no_journal,
        at_row: int | None = None,
    ) -> Session:
        child = session.fork(name, journal=journal, at_row=at_row)
        self.counts.forked(child)
        full = child.full_slots // child.block_tokens
        self.paged.copy(session.table[full : len(child.table)], child.table[full:])
        return child

    def payload(self, block: BlockId) -> memoryview:
        return self.paged.payload(block)

    def load(self, block: BlockId, payload: Buffer) -> None:
        self.paged.load(block, payload)

    def swap_out(self, session: Session) -> None:
        """Give the session's blocks to others; their bytes wait in the host's memory.  Archived blocks stay.

        Raises:
            ValueError, Refused: a feed is under way, or the session is closed or swapped out.
        """
        payloads = [self.payload(block) for block in session.table]
        session.swap_out()
        for closed in [each for each in self._swapped if each.closed]:  # nobody will ask for their bytes
            del self._swapped[closed]
        self.lanes.leave(session)
        self._swapped[session] = payloads

    def swap_in(self, session: Session) -> None:
        """Take memory for it again, and go on where it was: nothing is computed twice.

        Raises:
            ValueError: the session was not swapped out here.
            PoolFull: no memory.  Nothing is changed then.
        """
        payloads = self._swapped.get(session)
        if payloads is None:
            raise ValueError("no bytes of that session are kept here: swap_out keeps them")
        session.swap_in(lambda place, block: self.load(block, payloads[place]))
        del self._swapped[session]

    def keeps(self, session: Session) -> bool:
        """Whether it is swapped out, and its bytes are here."""
        return session in self._swapped

    # -- inside

    @contextmanager
    def _planned(
        self, feeds: Sequence[tuple[Session, Sequence[int]]]
    ) -> Iterator[list[tuple[Session, Feed]]]:
        """All are planned; those that are still in the list at the end are abandoned, as after an error."""
        if self.model.training:
            raise ValueError(
                "the model is in training mode, where dropout makes K/V random: call model.eval() first"
            )
        if any(session.pool is not self.pool for session, _ in feeds):
            raise ValueError("a session of another engine: its blocks are not in this memory")
        for session, _ in feeds:
            self._require_these_weights(session)
        planned: list[tuple[Session, Feed]] = []
        try:
            for session, tokens in feeds:
                planned.append((session, session.plan(tokens)))
            yield planned
        finally:
            for session, feed in planned:
                session.abandon(feed)

    def _require_these_weights(self, session: Session) -> None:
        written, digest = session.view.weights_version, session.view.weights_digest
        if (written, digest) != (self.weights_version, self._weights_digest):
            these = f"{self.weights_version}{' of another digest' if written == self.weights_version else ''}"
            raise Refused(
                f"the stream was written with weights {written}, and these are {these}: its "
                "record would say that they computed what follows; give it to set_weights, or go on with an "
                "engine of its weights"
            )

    def _computed(
        self, planned: Sequence[tuple[Session, Feed]], watch: Watch | None, last: int
    ) -> list[torch.Tensor]:
        """K/V written to lanes and paged memory; the logits after each feed's ``last`` last tokens."""
        counts = [len(feed.tokens) for _, feed in planned]
        padding = min(self._chunk_rows, max(counts) - min(counts))
        places = padding + max(feed.first_slot + len(feed.tokens) for _, feed in planned)
        if watch is not None:
            for session, feed in planned:
                count = len(feed.tokens)
                watch.begin(session, feed.first_slot + count, count, self.paged.states.device)
        if self._decode is not None and watch is None and max(counts) == last == 1:
            for session, _ in planned:
                self.lanes.leave(session)
            with torch.inference_mode():
                stepped = self._decode.step(planned)
            return [logits[None].clone() for logits in stepped]
        with torch.inference_mode():
            lanes = self.lanes.seat([session for session, _ in planned], places)
            by_lane = dict(zip(lanes, planned, strict=True))
            logits: dict[int, torch.Tensor] = {}
            for start in range(0, max(counts), self._chunk_rows):
                logits |= self._pass(by_lane, start, watch, last)
        return [logits[lane].clone() for lane in lanes]  # ordinary tensors, whoever computes on

    def _pass(
        self, by_lane: Mapping[int, tuple[Session, Feed]], start: int, watch: Watch | None, last: int
    ) -> dict[int, torch.Tensor]:
        """Tokens ``[start, start + chunk_rows)`` of each feed.  Float32 ``[last, vocab_size]`` by lane, for
        those that have some."""
        chunk = Chunk.of(by_lane, start, start + self._chunk_rows)
        places, positions, ids = chunk.tensors(self.paged.states.device)
        lanes = slice(chunk.lanes.start, chunk.lanes.stop)
        self.lanes.rows[lanes].scatter_(1, places, positions)
        states = self.lanes.states[:, :, lanes, :, : chunk.reach]
        masks = self._masks(places, positions, self.lanes.rows[lanes, : chunk.reach])
        cache = lane_cache(states, places, max(chunk.firsts))
        collector = None if watch is None else chunk.collector(watch, states.device)
        with nullcontext() if collector is None else watching(self.model, collector):
            logits = forward(self.model, ids, positions, masks, cache=cache, last=last).float()
        self._write(chunk, states)
        if watch is not None and collector is not None:
            for lane, mass in zip(chunk.lanes, collector.mass, strict=True):
                watch.add(by_lane[lane][0], mass)
        return {lane: logits[lane - chunk.lanes.start] for lane in chunk.active}

    def _masks(
        self, places: torch.Tensor, positions: torch.Tensor, key_positions: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """By layer type, bool ``[lane, 1, row, place]``.  A row always sees itself, so none sees nothing."""
        at = torch.arange(key_positions.shape[1], device=places.device)
        seen = at <= places[:, :, None]
        masks = {FULL: seen[:, None]}
        if self._window:
            near = positions[:, :, None] - key_positions[:, None, :] < self._window
            masks[SLIDING] = (seen & near)[:, None]
        return {kind: masks[kind] for kind in self._kinds}

    def _write(self, chunk: Chunk, states: torch.Tensor) -> None:
        """What the lanes got, to the paged memory."""
        size = self.namespace.block_tokens
        lanes, slots, blocks = chunk.written(size, states.device)
        self.paged.write(blocks, slots % size, states[:, :, lanes, :, slots])
