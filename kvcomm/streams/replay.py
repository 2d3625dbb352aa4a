"""``Pack``: what every row of a trainer's forward pass attends, from rollouts alone (needs torch).

A rollout's tokens and events say when each row was in view: row ``q`` attends row ``k`` if and only if ``q``
lies in one of ``k``'s intervals ``[birth, death)``.  As tensors of births and deaths this is the whole mask,
and the rest of the theory is what happens to the two tensors::

    causal       no interval of k begins before k
    packing      rollout after rollout in one row of a batch: intervals move by the rows before them.  Those
                 of a rollout end with it, so nobody sees another rollout's rows; positions restart
    sliding      a layer that attends W rows: deaths are at most k + W.  Row = position, so the distance is
                 the logical one; by slots, a cut would pull old tokens back into the window
    padding      a row of its own that sees itself, so that no softmax is over nothing

One forward pass over *all* rows, evicted ones and fillers too, then computes what the engine computed: each
row's K/V under the view in which it was fed.  The other way is one pass per view with the K/V spliced between
(:func:`segments`); both are run by ``kvcomm.engines.transformers.replaying``.

What a mask over rows cannot say is refused (:func:`require_maskable`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.view import View, require_bounded

PAD_TOKEN = 0
"""Stands in padding rows, which nobody reads."""

INTERVALS_MAX = 1 << 28
"""Of a pack, unused ones included: two gigabytes."""

_SCORED_AT_ONCE = 1 << 27
"""Logits that are in memory as float32 at a time."""

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Unreplayable(ValueError):
    """No forward pass of this kind computes what the engine did, and why."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How an engine keeps the rows in view: what decides whether a mask over rows tells the whole story."""

    positions: Literal["row", "slot"] = "row"
    """``slot``: keys are rotated anew by their place in the view when they are used (StreamingLLM)."""
    bits: int = 16
    """Of an element of a live block.  Below 16 a row's K/V exist twice: as computed, and as stored."""
    by_head: bool = False
    """Whether the heads of a layer keep different rows."""


BITS_MIN = 8
"""int8 blocks stay within the noise of bf16 (KL 1e-4); int4 ones do not (3e-2)."""


def require_maskable(keeping: Keeping) -> None:
    """Raises ``Unreplayable`` where one mask over rows is not what the engine did."""
    if keeping.positions != "row":
        raise Unreplayable(
            "keys that are rotated anew by slot have no fixed position, which a replay over rows needs: "
            "train on rollouts of a policy that keeps rotations"
        )
    if keeping.bits < BITS_MIN:
        raise Unreplayable(
            f"live blocks of {keeping.bits} bits: rows that were fed before a block filled saw other K/V "
            f"than those after it. Keep live blocks at {BITS_MIN} bits or more, use fewer in archives only"
        )
    if keeping.by_head:
        raise Unreplayable(
            "heads that keep different rows need a mask each: cut whole blocks for all heads alike"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Rollouts one after another in one row of a batch; one rollout is a pack of one, so that all samples of
    a batch take one path."""

    rollouts: tuple[Rollout, ...]
    starts: tuple[int, ...]
    """First row of each rollout in the pack."""
    tokens: torch.Tensor
    """int64 ``[rows]``."""
    positions: torch.Tensor
    """int64 ``[rows]``, from 0 on in each rollout."""
    births: torch.Tensor
    """int32 ``[intervals, rows]``: a row is seen by rows ``births <= q < deaths`` of any of its intervals.
    Unused intervals are empty; their count is a power of two, for kernels are compiled for each."""
    deaths: torch.Tensor
    """int32 ``[intervals, rows]``."""

    @property
    def row_count(self) -> int:
        return len(self.tokens)

    @property
    def query_rows(self) -> torch.Tensor:
        """int64 ``[samples]``: the row in the pack whose logits each sample was drawn from, rollout by
        rollout."""
        rows = [
            start + sample.query_row
            for start, rollout in zip(self.starts, self.rollouts, strict=True)
            for sample in rollout.samples
        ]
        return torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``[samples, ...]`` in the order of :attr:`query_rows`, apart by rollout."""
        return list(torch.split(values, [len(rollout.samples) for rollout in self.rollouts]))

    def to(self, device: torch.device | str) -> Pack:
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "births", "deaths")}
        return replace(self, **moved)

    def dense(self, window: int = 0) -> torch.Tensor:
        """bool ``[rows, rows]``: whether a row (first axis) attends another; ``window`` 0 = any distance."""
        births, deaths = self._within(window)
        queries = torch.arange(self.row_count, device=births.device, dtype=births.dtype)[:, None]
        seen = torch.zeros(self.row_count, self.row_count, dtype=torch.bool, device=births.device)
        for birth, death in zip(births, deaths, strict=True):
            seen |= (birth <= queries) & (queries < death)
        return seen

    def mask_mod(self, window: int = 0) -> MaskMod:
        """The same for FlexAttention: nothing of size ``[rows, rows]`` is kept."""
        births, deaths = self._within(window)
        interval_count = len(births)

        def seen(
            batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
        ) -> torch.Tensor:
            inside = (births[0, key] <= query) & (query < deaths[0, key])
            for at in range(1, interval_count):
                inside = inside | ((births[at, key] <= query) & (query < deaths[at, key]))
            return inside

        return seen

    def block_mask(self, window: int = 0, tile: int = 128) -> BlockMask:
        """For FlexAttention: which ``tile`` x ``tile`` squares have to be computed, and which need no mask.

        Read off the intervals, in ``rows * rows / tile`` steps: the mask itself is never laid out.
        """
        births, deaths = self._within(window)
        tile_count = -(-self.row_count // tile)
        first = torch.arange(tile_count, device=births.device)[:, None] * tile
        some = torch.zeros(tile_count, self.row_count, dtype=torch.bool, device=births.device)
        every = torch.zeros_like(some)
        for birth, death in zip(births, deaths, strict=True):
            some |= (birth < death) & (birth < first + tile) & (death > first)
            every |= (birth <= first) & (death >= first + tile)
        squares = (tile_count, tile_count, tile)
        missing = tile_count * tile - self.row_count
        some = torch.nn.functional.pad(some, (0, missing)).view(squares).any(-1)
        every = torch.nn.functional.pad(every, (0, missing)).view(squares).all(-1)
        partial_count, partial = _listed(some & ~every)
        every_count, whole = _listed(every)
        return BlockMask.from_kv_blocks(
            partial_count,
            partial,
            every_count,
            whole,
            BLOCK_SIZE=tile,
            mask_mod=self.mask_mod(window),
            seq_lengths=(self.row_count, self.row_count),
        )

    def _within(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not window:
            return self.births, self.deaths
        rows = torch.arange(self.row_count, device=self.deaths.device, dtype=self.deaths.dtype)
        return self.births, torch.minimum(self.deaths, rows + window)


def pack(rollouts: Sequence[Rollout], *, multiple: int = 1) -> Pack:
    """Lay rollouts into one row of a batch.

    Args:
        rollouts: at least one.
        multiple: padding rows at the end make the row count one of it (kernels are compiled for shapes).

    Raises:
        ValueError: there are none.
        Corrupt: an event does not follow from those before it.
        TooLarge: see ``kvcomm.streams.view.require_bounded``.
        Unreplayable: rows come back so often that their intervals have no room in memory.
    """
    if not rollouts:
        raise ValueError("a pack has at least one rollout")
    tokens: list[int] = []
    positions: list[int] = []
    lives: list[list[tuple[int, int]]] = []
    starts: list[int] = []
    for rollout in rollouts:
        start = len(tokens)
        starts.append(start)
        tokens += rollout.tokens
        positions += range(rollout.row_count)
        lives += [
            [(start + birth, start + death) for birth, death in intervals]
            for intervals in rollout.visibility().intervals
        ]
    missing = -max(len(tokens), 1) % multiple + (not tokens)
    lives += [[(row, row + 1)] for row in range(len(tokens), len(tokens) + missing)]
    return _packed(rollouts, starts, tokens + [PAD_TOKEN] * missing, positions + [0] * missing, lives)


def padding(row_count: int) -> Pack:
    """Rows that see themselves and that nobody reads: for a pass whose result does not count."""
    zeros = [0] * row_count
    return _packed((), (), zeros, zeros, [[(row, row + 1)] for row in range(row_count)])


def bins(row_counts: Sequence[int], rows_max: int) -> list[list[int]]:
    """Which rollouts to pack together: first fit, longest first; places in ``row_counts``.

    Raises:
        ValueError: one is longer than ``rows_max``.
    """
    found: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(row_counts)), key=lambda place: (-row_counts[place], place)):
        rows = row_counts[place]
        if rows > rows_max:
            raise ValueError(f"rollout {place} has {rows} rows, over rows_max={rows_max}")
        at = next((at for at, left in enumerate(room) if left >= rows), len(room))
        if at == len(room):
            found.append([])
            room.append(rows_max)
        found[at].append(place)
        room[at] -= rows
    return found


# -- one pass per view


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[first_row, end_row)`` of a rollout, all fed under one view."""

    first_row: int
    end_row: int
    view_rows: tuple[int, ...]
    """In view before the first of them, by slot."""
    archived_rows: tuple[int, ...]
    """Out of view, and able to come back."""


def segments(rollout: Rollout) -> Iterator[Segment]:
    """One for every view that rows were fed under; as many forward passes does the segmented replay take.
    Each names all rows in view, so let go of it before the next.

    Raises:
        Corrupt: an event does not follow from those before it.
        TooLarge: see ``kvcomm.streams.view.require_bounded``.
    """
    require_bounded(rollout.row_count, rollout.events)
    view, first, row_count = View(), 0, rollout.row_count
    in_view: tuple[int, ...] = ()
    archived: tuple[int, ...] = ()
    for event in rollout.events:
        count = view.count_before(event, row_count)
        moves = event.kind in ("evict", "restore")
        if moves and event.at_row > first:
            yield Segment(first, event.at_row, in_view, archived)
            first = event.at_row
        view.feed(count)
        view.apply(event)
        if moves:
            in_view = tuple(view.rows)
            archived = tuple(row for rows in view.archived.values() for row in rows)
    if first < row_count:
        yield Segment(first, row_count, in_view, archived)


# -- what was sampled


def log_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Of the distribution that tokens were drawn from, after temperature, top-k and top-p, in this order.

    Args:
        logits: ``[..., vocab_size]``; computed in float32, or in float64 if they are.

    Returns:
        The same shape; ``-inf`` for tokens that cannot be drawn.  Gradients flow.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
    out = torch.zeros_like(scores, dtype=torch.bool)
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.detach().topk(sampling.top_k).values[..., -1:]
        out = scores < least
    if sampling.top_p < 1:
        out = out | ~_nucleus(scores.detach().masked_fill(out, -torch.inf), sampling.top_p)
    return torch.log_softmax(scores.masked_fill(out, -torch.inf), -1)


def sampled_log_probabilities(logits: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """Of the tokens that were drawn, each under its own sampling.

    A token at the edge of the top-k or top-p set can fall out of it by the noise of another kernel.  It was
    drawn, so it was inside: it is put back before the distribution is normalized, lest the answer be
    ``-inf``.

    Args:
        logits: ``[samples, vocab_size]``, of their query rows.

    Returns:
        float32 (float64 if the logits are) ``[samples]``; gradients flow.
    """
    rows = max(1, _SCORED_AT_ONCE // logits.shape[-1])
    borders = range(0, max(len(samples), 1), rows)
    parts = [(logits[at : at + rows], samples[at : at + rows]) for at in borders]
    if len(parts) < 2 or not (logits.requires_grad and torch.is_grad_enabled()):
        return torch.cat([_scored(*part) for part in parts])
    # Else every part would keep a copy of itself in float32 until the backward pass.
    again = [checkpoint(_scored, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(again)


def _scored(logits: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """One part of :func:`sampled_log_probabilities`."""
    drawn = torch.tensor([sample.token for sample in samples], dtype=torch.int64, device=logits.device)
    # Of no samples, too, it is a function of the logits: a rank that has none goes backward with the others.
    groups = _by_sampling(samples) or {Sampling(): []}
    if len(groups) == 1:
        return _drawn(logits, drawn, next(iter(groups)))
    found = logits.new_zeros(len(samples), dtype=torch.promote_types(logits.dtype, torch.float32))
    for sampling, places in groups.items():
        at = torch.tensor(places, dtype=torch.int64, device=logits.device)
        found = found.index_copy(0, at, _drawn(logits[at], drawn[at], sampling))
    return found


def _drawn(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """``[n, vocab_size]``, ``[n]`` to log probabilities ``[n]``."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
    own = scores.gather(-1, tokens[:, None])[:, 0]
    plain = replace(sampling, temperature=1.0)
    if plain == Sampling():
        return own - scores.logsumexp(-1)
    kept = log_probabilities(scores.detach(), plain) > -torch.inf
    kept = kept.scatter(-1, tokens[:, None], True)
    return own - scores.masked_fill(~kept, -torch.inf).logsumexp(-1)


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """bool: the fewest most probable tokens whose probabilities sum to ``top_p`` at least."""
    probabilities, order = scores.softmax(-1).sort(stable=True, dim=-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _by_sampling(samples: Sequence[Sample]) -> Mapping[Sampling, list[int]]:
    places: dict[Sampling, list[int]] = {}
    for place, sample in enumerate(samples):
        places.setdefault(sample.sampling, []).append(place)
    return places


def loss_mask(rollout: Rollout) -> torch.Tensor:
    """bool ``[samples]``: those that a trainer learns from.  Prompts, tool outputs and fillers are not
    samples."""
    return torch.tensor([sample.loss for sample in rollout.samples], dtype=torch.bool)


def policy_loss(log_probs: torch.Tensor, rollout: Rollout, advantage: torch.Tensor | float) -> torch.Tensor:
    """Mean of ``-advantage * log probability`` over the samples with loss; 0 where there are none.

    Args:
        log_probs: ``[samples]``, of the replay.
        advantage: one for all, or ``[samples]``.
    """
    learned = loss_mask(rollout).to(log_probs.device)
    terms = torch.where(learned, -advantage * log_probs, 0.0)
    return terms.sum() / learned.sum().clamp(min=1)


# -- inside


def _packed(
    rollouts: Sequence[Rollout],
    starts: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int],
    lives: Sequence[Sequence[tuple[int, int]]],
) -> Pack:
    births, deaths = _interval_tensors(lives)
    ids, at = (torch.tensor(each, dtype=torch.int64) for each in (tokens, positions))
    return Pack(tuple(rollouts), tuple(starts), ids, at, births, deaths)


def _interval_tensors(lives: Sequence[Sequence[tuple[int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(births, deaths), int32 ``[intervals, rows]``."""
    count = 1 << (max(map(len, lives), default=1) - 1).bit_length()
    if count * len(lives) > INTERVALS_MAX:
        raise Unreplayable(
            f"some row of these {len(lives)} comes back {count // 2} times or more, over INTERVALS_MAX="
            f"{INTERVALS_MAX} intervals in all: pack fewer rollouts, or replay them in segments"
        )
    found = torch.zeros(2, count, len(lives), dtype=torch.int32)
    rows = list(range(len(lives)))
    for at in range(count):
        rows = [row for row in rows if at < len(lives[row])]
        pairs = [lives[row][at] for row in rows]
        found[:, at, torch.tensor(rows, dtype=torch.int64)] = (
            torch.tensor(pairs, dtype=torch.int32).view(-1, 2).T
        )
    births, deaths = found
    own = torch.arange(len(lives), dtype=torch.int32)
    seen = ((births <= own) & (own < deaths)).any(0)
    assert seen.all(), "a row attends itself, or its softmax would be over nothing"
    assert ((births >= own) | (births == deaths)).all(), "a row is seen by rows from it on"
    return births, deaths


def _listed(squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many of a row of squares, which ones first) of bool ``[tiles, tiles]``, with axes for batch and
    head."""
    which = squares.int().argsort(dim=-1, descending=True, stable=True)
    return squares.sum(-1, dtype=torch.int32)[None, None], which.to(torch.int32)[None, None]
