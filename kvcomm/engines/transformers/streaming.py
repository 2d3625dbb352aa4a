"""``StreamEngine``: KV-streams on a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from kvcomm.block import Buffer
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, layer_types, window_of
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.lanes import lane_cache, lane_slots
from kvcomm.engines.transformers.paged import PagedKV
from kvcomm.namespace import Namespace
from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Feed, Session


def _no_journal(event: Event) -> None:
    pass


class StreamEngine:
    """A :class:`kvcomm.streams.engine.Engine`.  Not thread-safe.

    Args:
        model: in evaluation mode.
        block_count: size of the paged memory, on the model's device.
        namespace: of ``model``; computed when not given (hashes all weights).
        block_tokens: of a namespace that is computed.
        rows_max: most rows of a session; the model's ``max_position_embeddings`` if not given.
        chunk_rows: most rows of a session in one pass, bounds the memory of the attention mask; a longer
            feed is computed in several.

    Raises:
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
    ) -> None:
        if chunk_rows < 1:
            raise ValueError("chunk_rows must be at least 1")
        self.model = model
        self.namespace = namespace or namespace_of(model, block_tokens=block_tokens)
        self.pool = BlockPool(block_count)
        self.paged = PagedKV(self.namespace, block_count, model.device)
        config = model.config.get_text_config(decoder=True)
        self.rows_max = rows_max or int(config.max_position_embeddings)
        self._chunk_rows = chunk_rows
        self._kinds = sorted(set(layer_types(model)))
        self._window = window_of(model)

    def session(self, *, journal: Callable[[Event], None] = _no_journal) -> Session:
        return Session(self.pool, self.namespace, rows_max=self.rows_max, journal=journal)

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[torch.Tensor]:
        """See :meth:`kvcomm.streams.engine.Engine.feed`.

        Raises:
            ValueError: the model is in training mode, a session stands twice, or is of another engine.
        """
        self._check(feeds)
        planned: list[tuple[Session, Feed]] = []
        try:
            for session, tokens in feeds:
                planned.append((session, session.plan(tokens)))
            logits = self._computed(planned)
        except BaseException:
            for session, feed in planned:
                session.abandon(feed)
            raise
        for session, feed in planned:
            session.commit(feed)
        return logits

    def fork(
        self, session: Session, name: bytes, *, journal: Callable[[Event], None] = _no_journal
    ) -> Session:
        child = session.fork(name, journal=journal)
        full = session.full_slots // session.block_tokens
        self.paged.copy(session.table[full:], child.table[full:])
        return child

    def payload(self, block: BlockId) -> memoryview:
        return self.paged.payload(block)

    def load(self, block: BlockId, payload: Buffer) -> None:
        self.paged.load(block, payload)

    # -- inside

    def _check(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> None:
        if self.model.training:
            raise ValueError(
                "the model is in training mode, where dropout makes K/V random: call model.eval() first"
            )
        if any(session.pool is not self.pool for session, _ in feeds):
            raise ValueError("a session of another engine: its blocks are not in this memory")

    def _computed(self, planned: Sequence[tuple[Session, Feed]]) -> list[torch.Tensor]:
        """K/V written to the paged memory; the logits after each feed's last token."""
        logits: dict[int, torch.Tensor] = {}
        longest = max((len(feed.tokens) for _, feed in planned), default=0)
        for start in range(0, longest, self._chunk_rows):
            at = [index for index, (_, feed) in enumerate(planned) if len(feed.tokens) > start]
            with torch.inference_mode():
                rows = self._pass([planned[index] for index in at], start)
            logits |= zip(at, rows.clone(), strict=True)  # of ordinary tensors, whoever computes on
        return [logits[index] for index in range(len(planned))]

    def _pass(self, planned: Sequence[tuple[Session, Feed]], start: int) -> torch.Tensor:
        """Tokens ``[start, start + chunk_rows)`` of each feed; float32 ``[feed, vocab_size]``."""
        device = self.paged.states.device
        parts = [feed.tokens[start : start + self._chunk_rows] for _, feed in planned]
        firsts = [feed.first_slot + start for _, feed in planned]
        counts = [len(part) for part in parts]
        most = max(counts)
        places = torch.tensor(lane_slots(firsts, counts), device=device)
        ids = torch.tensor([[0] * (most - len(part)) + list(part) for part in parts], device=device)
        shift = torch.tensor([[feed.first_row - feed.first_slot] for _, feed in planned], device=device)
        positions = places + shift
        states, key_positions = self._gathered(planned, start, max(firsts) + most)
        key_positions.scatter_(1, places, positions)
        cache = lane_cache(states, places, max(firsts))
        masks = self._masks(places, positions, key_positions)
        logits = forward(self.model, ids, positions, masks, cache=cache, last=1)[:, -1].float()
        self._write(planned, states, firsts, counts)
        return logits

    def _gathered(
        self, planned: Sequence[tuple[Session, Feed]], start: int, place_count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Lanes ``[layer, K or V, lane, kv head, place, head dim]`` and the rows at their places."""
        layers, two, _, heads, size, dim = self.paged.states.shape
        states = self.paged.states.new_zeros(layers, two, len(planned), heads, place_count, dim)
        rows = torch.zeros(len(planned), place_count, dtype=torch.int64)
        for lane, (session, feed) in enumerate(planned):
            held = feed.first_slot + start
            fed = range(feed.first_row, feed.first_row + start)
            rows[lane, :held] = torch.tensor([*session.view.rows, *fed], dtype=torch.int64)
            blocks = torch.tensor(feed.blocks[: -(-held // size)], dtype=torch.int64, device=states.device)
            for layer in range(layers if held else 0):
                states[layer, :, lane, :, :held] = self.paged.read(layer, blocks)[:, :, :held]
        return states, rows.to(states.device)

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

    def _write(
        self,
        planned: Sequence[tuple[Session, Feed]],
        states: torch.Tensor,
        firsts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """What the lanes got, to the paged memory."""
        size = self.namespace.block_tokens
        lanes: list[int] = []
        slots: list[int] = []
        blocks: list[int] = []
        for lane, ((_, feed), first, count) in enumerate(zip(planned, firsts, counts, strict=True)):
            lanes += [lane] * count
            slots += range(first, first + count)
            blocks += [feed.blocks[slot // size] for slot in range(first, first + count)]
        where = torch.tensor([lanes, slots, blocks], device=states.device)
        self.paged.write(where[2], where[1] % size, states[:, :, where[0], :, where[1]])
