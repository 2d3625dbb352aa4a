"""``StreamEngine``: KV-streams on a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from kvcomm.block import Buffer
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, layer_types, window_of
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.lanes import Lanes, lane_cache, lane_places
from kvcomm.engines.transformers.paged import PagedKV
from kvcomm.namespace import Namespace
from kvcomm.streams.events import Event
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Feed, Session

_ALIGNED = 16
"""Attention kernels want masks whose rows are multiples of it."""


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
        lanes_max: most sessions with a contiguous working copy of their view; see ``lanes``.

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
        lanes_max: int = 32,
    ) -> None:
        if chunk_rows < 1 or lanes_max < 1:
            raise ValueError("chunk_rows and lanes_max must be at least 1")
        self.model = model
        self.namespace = namespace or namespace_of(model, block_tokens=block_tokens)
        self.pool = BlockPool(block_count)
        self.paged = PagedKV(self.namespace, block_count, model.device)
        self.lanes = Lanes(self.paged, lanes_max)
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
        if not feeds:
            return []
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
            self.lanes.fed(session)
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
        """K/V written to lanes and paged memory; the logits after each feed's last token."""
        counts = [len(feed.tokens) for _, feed in planned]
        padding = min(self._chunk_rows, max(counts) - min(counts))
        places = padding + max(feed.first_slot + len(feed.tokens) for _, feed in planned)
        with torch.inference_mode():
            lanes = self.lanes.seat([session for session, _ in planned], places)
            by_lane = dict(zip(lanes, (feed for _, feed in planned), strict=True))
            logits: dict[int, torch.Tensor] = {}
            for start in range(0, max(counts), self._chunk_rows):
                logits |= self._pass(by_lane, start)
        return [logits[lane].clone() for lane in lanes]  # ordinary tensors, whoever computes on

    def _pass(self, by_lane: dict[int, Feed], start: int) -> dict[int, torch.Tensor]:
        """Tokens ``[start, start + chunk_rows)`` of each feed.  Float32 ``[vocab_size]`` by lane, for those
        that have some."""
        parts = {lane: feed.tokens[start : start + self._chunk_rows] for lane, feed in by_lane.items()}
        active = [lane for lane, part in parts.items() if part]
        window = range(min(active), max(active) + 1)
        counts = [len(parts[lane]) for lane in window]
        firsts = [by_lane[lane].first_slot + min(start, len(by_lane[lane].tokens)) for lane in window]
        most = max(counts)
        reach = -(-(max(firsts) + most) // _ALIGNED) * _ALIGNED
        device = self.paged.states.device
        shifts = [by_lane[lane].first_row - by_lane[lane].first_slot for lane in window]
        given = torch.tensor(
            [
                [shift, *at, *[0] * (most - len(parts[lane])), *parts[lane]]
                for lane, shift, at in zip(window, shifts, lane_places(firsts, counts), strict=True)
            ],
            device=device,
        )
        places, ids = given[:, 1 : most + 1], given[:, most + 1 :]
        positions = places + given[:, :1]
        lanes = slice(window.start, window.stop)
        self.lanes.rows[lanes].scatter_(1, places, positions)
        states = self.lanes.states[:, :, lanes, :, :reach]
        masks = self._masks(places, positions, self.lanes.rows[lanes, :reach])
        cache = lane_cache(states, places, max(firsts))
        logits = forward(self.model, ids, positions, masks, cache=cache, last=1)[:, -1].float()
        self._write([by_lane[lane] for lane in window], states, firsts, counts)
        return {lane: logits[lane - window.start] for lane in active}

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
        feeds: Sequence[Feed],
        states: torch.Tensor,
        firsts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """What the lanes got, to the paged memory."""
        size = self.namespace.block_tokens
        lanes: list[int] = []
        slots: list[int] = []
        blocks: list[int] = []
        for lane, (feed, first, count) in enumerate(zip(feeds, firsts, counts, strict=True)):
            lanes += [lane] * count
            slots += range(first, first + count)
            before = feed.first_slot // size
            blocks += [feed.tail[slot // size - before] for slot in range(first, first + count)]
        where = torch.tensor([lanes, slots, blocks], device=states.device)
        self.paged.write(where[2], where[1] % size, states[:, :, where[0], :, where[1]])
