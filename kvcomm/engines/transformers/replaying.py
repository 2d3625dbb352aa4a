"""``replay``: run a transformers model over rollouts as their engine ran it, from their records alone.

::

    replayed = replay(model, rollouts)                        # one forward pass over all of them
    loss = sum(policy_loss(each.log_probs, each.rollout, advantage) for each in replayed)
    loss.backward()
    print(mismatch(replayed))                                 # kvcomm.streams.mismatch

Paths, of which a call takes one for all its rollouts:

``mask``
    One forward pass over all rows of all rollouts, packed.  The gradient flows through evicted K/V too: what
    the model wrote into a row is learned from what later rows read there.
``segmented``
    One forward pass per view with the K/V spliced between, rollout after rollout.  The same numbers and the
    same gradient.  A distributed trainer needs the same number of passes on every rank: ``passes``.
``detached``
    The same without a gradient through the K/V of earlier views: memory is bounded by the longest view, and
    the gradient is another one (measured cosine 0.85 to the full one).

How the model attends decides the kind of mask: ``attn_implementation="flex_attention"`` takes block masks
(for long rows, on a GPU; on a CPU it runs uncompiled and without gradients), ``sdpa`` and ``eager`` take
dense ones of ``[rows, rows]``.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvcomm.block import token_array
from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, window_of
from kvcomm.streams.model_rules import require_compactable
from kvcomm.streams.replay import (
    Keeping,
    Pack,
    Segment,
    Unreplayable,
    pack,
    padding,
    require_maskable,
    sampled_log_probabilities,
    segments,
)
from kvcomm.streams.rollout import Rollout

Path = Literal["mask", "segmented", "detached"]

FLEX = "flex_attention"
FLEX_TILE = 128
"""Rows are padded to its multiples, so that kernels are compiled for few shapes."""


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A rollout as the trainer's weights see it."""

    rollout: Rollout
    path: Path
    """Which gradient this is."""
    logits: torch.Tensor = field(repr=False)
    """``[samples, vocab_size]``, the model's own, of the samples' query rows."""
    log_probs: torch.Tensor = field(repr=False)
    """float32 ``[samples]``: of the tokens that were drawn, each under its own sampling."""


def replay(
    model: PreTrainedModel,
    rollouts: Sequence[Rollout],
    *,
    path: Path = "mask",
    kv_dtype: torch.dtype | None = None,
    keeping: Keeping = Keeping(),  # noqa: B008 - frozen
    passes: int = 0,
) -> list[Replayed]:
    """Log probabilities of all samples; gradients flow if they are on.

    Args:
        model: the trainer's, with the weights to be judged or trained.
        rollouts: at least one; packed into one row of a batch on the path ``mask``, so choose them with
            ``kvcomm.streams.replay.bins``.
        kv_dtype: of the engine's K/V memory where it is not the model's: rows are rounded as they were there.
        keeping: how the engine kept its rows.
        passes: run as many forward passes at least, further ones on padding whose logits count nothing, so
            that ranks which wait for each other in every pass stay together.

    Raises:
        Unreplayable: no such pass computes what the engine did (``keeping``, attention that takes no mask),
            it has no gradient, or its mask has no room.
        TooLarge: see ``kvcomm.streams.view.require_bounded``.
        TokenError: a rollout has tokens that the model has not; a GPU would end the process over them.
        NotCompactable: rotary frequencies that depend on the length, layers without rows.
        Corrupt: an event does not follow from those before it.
    """
    require_maskable(keeping)
    require_compactable(model.config.to_dict())
    _require_masks(model, path, kv_dtype)
    vocab_size = _vocab_size(model)
    for each in rollouts:
        token_array((*each.tokens, *(sample.token for sample in each.samples[-1:])), vocab_size)
    done = pass_count(rollouts, path)  # looks at all events before anything runs
    if path == "mask":
        packed = pack(rollouts, multiple=FLEX_TILE if _attention(model) == FLEX else 1).to(model.device)
        logits = packed.split(pack_logits(model, packed, kv_dtype))
    else:
        logits = [_segmented(model, each, kv_dtype, detach=path == "detached") for each in rollouts]
    for _ in range(done, passes):
        idle = 0 * _idle_pass(model)
        logits = [own + idle for own in logits]
    return [
        Replayed(rollout, path, own, sampled_log_probabilities(own, rollout.samples))
        for rollout, own in zip(rollouts, logits, strict=True)
    ]


def pass_count(rollouts: Sequence[Rollout], path: Path) -> int:
    """Forward passes that :func:`replay` takes for them."""
    return 1 if path == "mask" else sum(1 for each in rollouts for _ in segments(each))


def pack_logits(model: PreTrainedModel, packed: Pack, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    """One masked forward pass: logits of the samples' query rows, ``[samples, vocab_size]``."""
    cache = None if kv_dtype is None else _RoundedCache(kv_dtype)
    with _attending(model):
        return forward(
            model,
            packed.tokens[None],
            packed.positions[None],
            _masks(model, packed),
            cache=cache,
            last=packed.query_rows,
        )[0]


def _masks(model: PreTrainedModel, packed: Pack) -> dict[str, Any]:
    windows = {FULL: 0, SLIDING: window_of(model)}
    kinds = [FULL, SLIDING] if windows[SLIDING] else [FULL]
    if _attention(model) == FLEX:
        return {kind: packed.block_mask(windows[kind], FLEX_TILE) for kind in kinds}
    return {kind: _mask(packed.dense(windows[kind])) for kind in kinds}


def _segmented(
    model: PreTrainedModel,
    rollout: Rollout,
    kv_dtype: torch.dtype | None,
    *,
    detach: bool,
) -> torch.Tensor:
    """Logits ``[samples, vocab_size]``."""
    tokens = torch.tensor(rollout.tokens, device=model.device)
    asked = [sample.query_row for sample in rollout.samples]
    queries = torch.tensor(asked, dtype=torch.int64, device=model.device)
    held = _Held()
    found = []
    for segment in segments(rollout):
        held.keep((*segment.view_rows, *segment.archived_rows), detach=detach)
        cache = held.cache(len(segment.view_rows), kv_dtype)
        rows = torch.arange(segment.first_row, segment.end_row, device=model.device)
        here = ((queries >= segment.first_row) & (queries < segment.end_row)).nonzero()[:, 0]
        logits = forward(
            model,
            tokens[rows][None],
            rows[None],
            _segment_masks(model, segment, rows),
            cache=cache,
            last=queries[here] - segment.first_row,
        )[0]
        held.add(segment, cache)
        found.append(logits)  # in the order of samples: they ascend, as segments do
    if not found:
        return torch.zeros(0, _vocab_size(model), device=model.device)
    return torch.cat(found)


def _segment_masks(model: PreTrainedModel, segment: Segment, rows: torch.Tensor) -> Mapping[str, Any]:
    """``[1, 1, rows, in view + rows]``: everything in view, and what of the segment is not later."""
    keys = torch.cat([torch.tensor(segment.view_rows, dtype=rows.dtype, device=rows.device), rows])
    seen = keys[None] <= rows[:, None]
    masks = {FULL: _mask(seen)}
    window = window_of(model)
    if window:
        masks[SLIDING] = _mask(seen & (rows[:, None] - keys[None] < window))
    return masks


class _Held:
    """K/V of the rows that are in view or can come back, layer by layer ``[1, kv heads, rows, head dim]``."""

    def __init__(self) -> None:
        self._rows: tuple[int, ...] = ()
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, rows: tuple[int, ...], *, detach: bool) -> None:
        """Those and no others, in this order."""
        if detach:
            self._layers = [(keys.detach(), values.detach()) for keys, values in self._layers]
        if rows != self._rows:
            place = {row: at for at, row in enumerate(self._rows)}
            at = torch.tensor([place[row] for row in rows], dtype=torch.int64)
            self._layers = [
                (keys.index_select(2, at.to(keys.device)), values.index_select(2, at.to(values.device)))
                for keys, values in self._layers
            ]
            self._rows = rows

    def cache(self, count: int, kv_dtype: torch.dtype | None) -> DynamicCache:
        """With the first ``count`` rows."""
        cache = DynamicCache() if kv_dtype is None else _RoundedCache(kv_dtype)
        for layer, (keys, values) in enumerate(self._layers if count else []):
            cache.update(keys[:, :, :count], values[:, :, :count], layer)
        return cache

    def add(self, segment: Segment, cache: DynamicCache) -> None:
        """The segment's rows were computed into ``cache``, behind those in view."""
        count = len(segment.view_rows)
        fresh: Any = [(layer.keys, layer.values) for layer in cache.layers]
        if self._layers:
            fresh = [
                (torch.cat([old[0], new[0][:, :, count:]], 2), torch.cat([old[1], new[1][:, :, count:]], 2))
                for old, new in zip(self._layers, fresh, strict=True)
            ]
        self._layers = fresh
        self._rows += tuple(range(segment.first_row, segment.end_row))


class _RoundedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """Rows attend K/V as rounded as an engine of a narrower memory keeps them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **words: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (states.to(self._dtype).to(states.dtype) for states in (key_states, value_states))
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(keys, values, *arguments, **words)
        return updated


def _idle_pass(model: PreTrainedModel) -> torch.Tensor:
    """Rows of padding: a number that depends on all weights that a pass uses."""
    packed = padding(FLEX_TILE if _attention(model) == FLEX else 1).to(model.device)
    with _attending(model):
        logits = forward(model, packed.tokens[None], packed.positions[None], _masks(model, packed), last=1)
    return logits.float().mean()


def _vocab_size(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _attention(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


def _require_masks(model: PreTrainedModel, path: Path, kv_dtype: torch.dtype | None) -> None:
    attention = _attention(model)
    if attention not in (FLEX, "sdpa", "eager"):
        raise Unreplayable(
            f"{attention!r} takes no mask of its caller: load the model with attn_implementation='sdpa', or "
            f"{FLEX!r} for long rows on a GPU"
        )
    if attention == FLEX and path != "mask":
        raise Unreplayable(f"the {path} replay attends with 'sdpa' or 'eager', not {FLEX!r}")
    if attention == FLEX and model.device.type == "cpu" and torch.is_grad_enabled():
        raise Unreplayable(
            f"{FLEX!r} has no gradients on a CPU: train there with 'sdpa', or use torch.no_grad()"
        )
    if (kv_dtype is not None or path != "mask") and model.training and _checkpoints(model):
        raise Unreplayable(
            "K/V are rounded, and spliced between views, in a cache, which gradient checkpointing does "
            "without: turn it off, or replay with path='mask' and without kv_dtype"
        )


def _checkpoints(model: PreTrainedModel) -> bool:
    """``is_gradient_checkpointing`` has a new name from transformers 5.24 on."""
    new = "is_activation_checkpointing"
    return bool(getattr(model, new if hasattr(type(model), new) else "is_gradient_checkpointing"))


def _mask(seen: torch.Tensor) -> torch.Tensor:
    """bool ``[queries, keys]`` as one of a batch, for all heads."""
    return seen[None, None]


@contextlib.contextmanager
def _attending(model: PreTrainedModel) -> Iterator[None]:
    """FlexAttention without its compiler where there is no GPU to compile for."""
    if _attention(model) != FLEX or model.device.type != "cpu":
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        # Of torch's own modules, when the compiler that is not used is imported.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield
