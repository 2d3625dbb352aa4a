"""``PagedDecode``: one more row for each of several sessions, attended in the paged memory where it lies.

No lane is read or written: the attention kernel takes block tables, so a cut costs a row of numbers.  The
whole step is the same launches every time, for any lengths, so on a GPU it is recorded once for a number of
sessions and played back (a CUDA graph); otherwise Python, which issues hundreds of launches a step, would
take several times as long as the GPU.

What changes from step to step goes into one small tensor::

    given   [session, token | slot | row | block]       tables  [session, slots | block of slots 0 .. , ...]

A step enters its block into the table itself, so tables are written from here only for a session that was
cut, restored, swapped in or fed otherwise since.

The model's attention is exchanged for the time of a step; its mask then *is* ``tables``, int32
``[session, 1, 1, 1 + blocks]``, which models hand on as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcomm.engines.kernels.attention import attend_pages, takes
from kvcomm.engines.transformers.forward import FULL, forward, layer_types
from kvcomm.engines.transformers.paged import PagedKV
from kvcomm.streams.pool import BlockId
from kvcomm.streams.session import Feed, Session

ATTENTION = "kvcomm_pages"
_GRAPHS_MAX = 16
"""Numbers of sessions that are recorded; others are computed launch by launch."""
_UNRECORDED_MAX = 16
"""Numbers of sessions whose tables are kept without a recording: each is as long as a session may get."""


def decodes_pages(model: PreTrainedModel) -> bool:
    """Whether :class:`PagedDecode` can compute what the model does: full attention in every layer, nothing
    done to scores but scaling, a shape that the kernel has tiles for."""
    config: Any = model.config.get_text_config(decoder=True)
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    plain = not getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa"
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    fits = takes(dim, heads, kv_heads or heads)
    return set(layer_types(model)) == {FULL} and plain and not sinks and fits


@dataclass(slots=True)
class _Seat:
    """Whose row of the tables it is, and what it says."""

    session: ReferenceType[Session]
    table: list[BlockId]
    """Another list after the session was swapped in."""
    slot_count: int
    event_count: int


class _Steps:
    """Steps of one number of sessions."""

    def __init__(self, count: int, block_count_max: int, device: torch.device) -> None:
        self.given = torch.zeros(count, 4, dtype=torch.int64, device=device)
        self.tables = torch.zeros(count, 1, 1, 1 + block_count_max, dtype=torch.int32, device=device)
        self.seats: list[_Seat | None] = [None] * count
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None

    def seated(self, at: int, session: Session, slot_count: int) -> bool:
        """Whether row ``at`` of the tables is the session's, and nothing happened to it but steps."""
        seat = self.seats[at]
        if seat is None or seat.session() is not session or seat.table is not session.table:
            return False
        return (seat.slot_count, seat.event_count) == (slot_count, len(session.events))


class PagedDecode:
    """Decode steps of ``model`` over ``paged``.

    Args:
        slots_max: most slots of a session.
        record: play recorded steps back; only on a GPU.
    """

    def __init__(self, model: PreTrainedModel, paged: PagedKV, slots_max: int, *, record: bool) -> None:
        self._model, self._paged, self._record = model, paged, record
        self._block_count_max = -(-slots_max // paged.namespace.block_tokens)
        self._steps: dict[int, _Steps] = {}
        self._memory: Any = None
        """Of the recorded steps, which share it."""

    def step(self, planned: Sequence[tuple[Session, Feed]]) -> torch.Tensor:
        """Compute one planned token of each session and write its K/V.

        Returns logits, float32 ``[session, vocab_size]``.
        """
        count = len(planned)
        steps = self._steps_of(count)
        for at, (session, feed) in enumerate(planned):
            if not steps.seated(at, session, feed.first_slot):
                blocks = torch.tensor(feed.blocks, dtype=torch.int32)
                steps.tables[at, 0, 0, 1 : 1 + len(blocks)].copy_(blocks)
            steps.seats[at] = None  # until it is known that the step happened
        given = [[feed.tokens[0], feed.first_slot, feed.first_row, feed.tail[-1]] for _, feed in planned]
        steps.given.copy_(torch.tensor(given))
        logits = self._logits(steps)
        steps.seats = [
            _Seat(ref(session), session.table, feed.first_slot + 1, len(session.events))
            for session, feed in planned
        ]
        return logits

    def forget(self) -> None:
        """The weights are others, maybe in other places, where recorded steps would not look."""
        self._steps.clear()
        self._memory = None

    # -- inside

    def _steps_of(self, count: int) -> _Steps:
        steps = self._steps.get(count)
        if steps is None:
            unrecorded = [number for number, each in self._steps.items() if each.graph is None]
            if len(unrecorded) >= _UNRECORDED_MAX:
                del self._steps[unrecorded[0]]
            steps = _Steps(count, self._block_count_max, self._paged.states.device)
            self._steps[count] = steps
        return steps

    def _logits(self, steps: _Steps) -> torch.Tensor:
        steps.done += 1
        if steps.graph is None and self._recordable(steps):
            self._recorded(steps)
        if steps.graph is None:
            return self._computed(steps)
        steps.graph.replay()
        assert steps.logits is not None
        return steps.logits.clone()

    def _recordable(self, steps: _Steps) -> bool:
        """Not the first: kernels are compiled and memory is found in it."""
        recorded = sum(each.graph is not None for each in self._steps.values())
        return self._record and steps.done > 1 and recorded < _GRAPHS_MAX

    def _recorded(self, steps: _Steps) -> None:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            steps.logits = self._computed(steps)
        steps.graph = graph

    def _computed(self, steps: _Steps) -> torch.Tensor:
        size = self._paged.namespace.block_tokens
        tokens, slots, rows, blocks = steps.given.unbind(1)
        tables = steps.tables[:, 0, 0]
        tables[:, 0].copy_(slots + 1)
        tables.scatter_(1, (1 + slots // size)[:, None], blocks[:, None].to(torch.int32))
        cache = DynamicCache()
        cache.layers = [_PageLayer(layer, blocks, slots % size) for layer in self._paged.states]
        cache.layer_class_to_replicate = None
        with _attending_pages(self._model):
            logits = forward(
                self._model, tokens[:, None], rows[:, None], {FULL: steps.tables}, cache=cache, last=1
            )
        return logits[:, -1].float()


class _PageLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of the paged memory during a step: row ``n`` goes into ``blocks[n]``, at ``offsets[n]``, and
    what is attended is the memory itself."""

    def __init__(self, states: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        super().__init__()
        self.dtype, self.device = states.dtype, states.device
        self.is_initialized = True
        self.keys, self.values = states[0], states[1]
        self._where = blocks, offsets

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = self._where
        self.keys[blocks, :, offsets] = key_states[:, :, 0]
        self.values[blocks, :, offsets] = value_states[:, :, 0]
        return self.keys, self.values


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query ``[session, head, 1, head dim]``, the rest as in the head of
    this module."""
    tables = attention_mask[:, 0, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query[:, :, 0].contiguous()
    return attend_pages(rows, key, value, tables[:, 1:], tables[:, 0], scale)[:, None], None


AttentionInterface.register(ATTENTION, _attend)


@contextmanager
def _attending_pages(model: PreTrainedModel) -> Iterator[None]:
    config: Any = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
