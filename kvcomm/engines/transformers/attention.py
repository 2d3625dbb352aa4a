"""``Watch``: how much the rows of a feed attended each slot of their views.

Policies that cut what is attended least need it, and no fast attention kernel tells.  While a watched pass
runs, the model's attention function is wrapped: it computes what it always computes, and beside it the
probabilities of the watched rows, some rows at a time, and only their sums are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from kvcomm.engines.transformers.forward import as_added
from kvcomm.streams.session import Session

_NAME = "kvcomm_watched"
_ROWS_AT_ONCE = 64
"""Probabilities are float32 ``[lane, query head, row, place]``: bounded by so many rows."""


class Watch:
    """Filled by one feed.

    Args:
        query_rows: by session: the attention of so many last rows of the feed; 0 = of all.
    """

    def __init__(self, query_rows: Mapping[Session, int]) -> None:
        if any(count < 0 for count in query_rows.values()):
            raise ValueError("watch so many last rows, or 0 for all")
        self._query_rows = dict(query_rows)
        self._mass: dict[Session, torch.Tensor] = {}
        self._row_count: dict[Session, int] = {}

    def mass(self, session: Session) -> list[float]:
        """By slot of the view behind the feed: probability, summed over layers, query heads and rows."""
        found: list[float] = self._mass[session].tolist()
        return found

    def row_count(self, session: Session) -> int:
        """The rows that were watched."""
        return self._row_count[session]

    def begin(self, session: Session, slot_count: int, row_count: int, device: torch.device) -> None:
        """A feed of ``row_count`` rows begins; ``slot_count`` with them."""
        wanted = self._query_rows.get(session)
        watched = 0 if wanted is None else min(wanted or row_count, row_count)
        self._mass[session] = torch.zeros(slot_count, dtype=torch.float32, device=device)
        self._row_count[session] = watched

    def last_rows(self, session: Session, start: int, end: int, row_count: int) -> int:
        """How many of the rows ``[start, end)`` of a feed, its last ones, are watched."""
        return max(0, end - max(start, row_count - self._row_count[session]))

    def add(self, session: Session, mass: torch.Tensor) -> None:
        """Float32 ``[place]``, from one pass of the feed; nobody attends places behind the view."""
        total = self._mass[session]
        count = min(len(total), len(mass))
        total[:count] += mass[:count]


class Collector:
    """Of one pass: float32 ``[lane, place]`` in ``mass``.

    Args:
        last_rows: by lane, how many of the pass's last rows count.
    """

    def __init__(self, last_rows: Sequence[int], place_count: int, device: torch.device) -> None:
        self._most = max(last_rows)
        at = torch.arange(self._most, device=device)
        self._counts = at >= self._most - torch.tensor(last_rows, device=device)[:, None]  # [lane, row]
        self.mass = torch.zeros(len(last_rows), place_count, dtype=torch.float32, device=device)

    def collect(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scaling: float) -> None:
        """Of one layer: ``[lane, head, row, dim]``, ``[lane, kv head, place, dim]``."""
        lanes, heads, rows, dim = query.shape
        groups = heads // key.shape[1]
        keys = key.float().transpose(-1, -2)[:, :, None]  # [lane, kv head, 1, dim, place]
        for begin in range(rows - self._most, rows, _ROWS_AT_ONCE):
            part = slice(begin, min(begin + _ROWS_AT_ONCE, rows))
            asked = query[:, :, part].float().view(lanes, -1, groups, part.stop - begin, dim)
            scores = (asked @ keys).flatten(1, 2) * scaling
            chosen = mask[:, :, part]
            if chosen.dtype == torch.bool:
                scores = scores.masked_fill(~chosen, -torch.inf)
            else:
                scores = scores + chosen
            self.add(scores.softmax(-1), begin - (rows - self._most))

    def collect_weights(self, weights: torch.Tensor) -> None:
        """What eager attention computed itself: ``[lane, head, row, place]``."""
        self.add(weights[:, :, weights.shape[2] - self._most :].float(), 0)

    def add(self, probabilities: torch.Tensor, first: int) -> None:
        """Of the watched rows from ``first`` on."""
        counts = self._counts[:, first : first + probabilities.shape[2]]
        self.mass += (probabilities.sum(1) * counts[:, :, None]).sum(1)


@contextmanager
def watching(model: PreTrainedModel, collector: Collector) -> Iterator[None]:
    """Passes of ``model`` are watched meanwhile.

    Raises:
        ValueError: its attention takes no mask that says what each row sees.
    """
    config: Any = model.config
    name = config._attn_implementation
    if name not in ("eager", "sdpa"):
        raise ValueError(
            f"attention is watched in models with attn_implementation 'sdpa' or 'eager', not {name!r}"
        )
    token = _WATCHED.set((name, collector))
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = name
        _WATCHED.reset(token)


_WATCHED: ContextVar[tuple[str, Collector]] = ContextVar("kvcomm_watched")


def _watched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    name, collector = _WATCHED.get()
    # Each modeling file has an eager function of its own: soft caps, sinks.
    own = sys.modules[type(module).__module__].eager_attention_forward
    attend = own if name == "eager" else AttentionInterface()[name]
    if name == "eager":
        attention_mask = as_added(attention_mask, query.dtype)
    output, weights = attend(module, query, key, value, attention_mask, **settings)
    if name == "eager":
        collector.collect_weights(weights)
    else:
        scaling = settings.get("scaling") or query.shape[-1] ** -0.5
        collector.collect(query, key, attention_mask, scaling)
    return output, weights


AttentionInterface.register(_NAME, _watched_attention)
