"""``PlainEngine``: an engine without memory management, the oracle of paged ones.

K/V of every row ever fed, row by row, in one list; a feed gathers those that the view names, one session at
a time.  No blocks, no slots, nothing reused, so nothing to get wrong: what it computes is what the log says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, window_of
from kvcomm.namespace import Namespace
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from tests.namespaces import namespace as complete

Layers = list[tuple[torch.Tensor, torch.Tensor]]


class PlainEngine:
    """The port of an engine, as far as rollouts need it.

    Args:
        namespace: of an engine whose spans it shall know.
        kv_dtype: what K/V are rounded to.
        bits: of an element of a full block of 16 rows; 0 = as computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        namespace: Namespace | None = None,
        *,
        kv_dtype: torch.dtype | None = None,
        bits: int = 0,
    ) -> None:
        self.model, self.kv_dtype, self.bits = model, kv_dtype, bits
        self.namespace = namespace or complete(vocab_size=model.config.vocab_size)
        self.pool = BlockPool(1000)
        self._rows: dict[Session, Layers] = {}
        """[1, kv heads, rows ever fed, head dim], by layer."""

    def session(self, *, journal=lambda event: None) -> Session:
        session = Session(self.pool, self.namespace, rows_max=8192, journal=journal)
        self._rows[session] = []
        return session

    def fork(self, session: Session, name: bytes, *, journal=lambda event: None) -> Session:
        child = session.fork(name, journal=journal)
        self._rows[child] = self._rows[session]
        return child

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[torch.Tensor]:
        return [self._feed(session, tokens) for session, tokens in feeds]

    @torch.no_grad()
    def _feed(self, session: Session, tokens: Sequence[int]) -> torch.Tensor:
        stored, seen = self._rows[session], torch.tensor(list(session.view.rows), dtype=torch.int64)
        plan = session.plan(tokens)
        positions = torch.arange(plan.first_row, plan.first_row + len(tokens))
        cache = RoundedCache(self.kv_dtype)
        for layer, (keys, values) in enumerate(stored if len(seen) else []):
            cache.update(keys[:, :, seen], values[:, :, seen], layer)
        at = torch.cat([seen, positions])
        allowed = at[None] <= positions[:, None]
        masks = {FULL: allowed[None, None]}
        if window_of(self.model):
            masks[SLIDING] = (allowed & (positions[:, None] - at[None] < window_of(self.model)))[None, None]
        ids = torch.tensor([list(tokens)])
        logits = forward(self.model, ids, positions[None], masks, cache=cache, last=1)
        fresh = [(x.keys[:, :, len(seen) :], x.values[:, :, len(seen) :]) for x in cache.layers]
        self._rows[session] = [
            (torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2))
            for old, new in zip(
                stored or [(x[0][:, :, :0], x[1][:, :, :0]) for x in fresh], fresh, strict=True
            )
        ]
        session.commit(plan)
        for slot in range(plan.first_slot // 16 * 16, session.full_slots if self.bits else 0, 16):
            self._quantise(session, torch.tensor(list(session.view.rows[slot : slot + 16])))
        return logits[0, -1].float()

    def _quantise(self, session: Session, rows: torch.Tensor) -> None:
        """The block of those rows, after KIVI: keys by channel, values by row."""
        for keys, values in self._rows[session]:
            keys[:, :, rows] = _rounded(keys[:, :, rows], 2, self.bits)
            values[:, :, rows] = _rounded(values[:, :, rows], 3, self.bits)


def _rounded(states: torch.Tensor, axis: int, bits: int) -> torch.Tensor:
    least, most = states.amin(axis, keepdim=True), states.amax(axis, keepdim=True)
    step = (most - least).clamp_min(1e-8) / (2**bits - 1)
    return ((states - least) / step).round() * step + least


class RoundedCache(DynamicCache):
    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key_states, value_states, *args, **kwargs):
        if self.dtype is not None:
            key_states = key_states.to(self.dtype).to(key_states.dtype)
            value_states = value_states.to(self.dtype).to(value_states.dtype)
        return super().update(key_states, value_states, *args, **kwargs)
