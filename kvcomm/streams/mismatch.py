"""``Mismatch``: how far a trainer's probabilities are from those that tokens were drawn with (needs torch).

For a drawn token let ``x = log p_trainer - log p_engine``.  ``k3 = exp(x) - x - 1`` is never negative, and
its mean over drawn tokens estimates ``KL(p_engine || p_trainer)`` without bias (J. Schulman, "Approximating
KL divergence", 2020).  Two cases are gates all the same, and no estimates: the most probable token
(temperature 0) was not drawn, so its ``k3`` says how far the sides are at that token alone; and with top-k or
top-p, where a token at the edge of the set is on one side only, the two sides are normalized over other sets.

A mean is a weak gate where it matters: with bf16, an event that is applied one row late can change fewer
tokens than rounding does.  So the report also has the worst token, and the first samples behind each event
apart from the others; and what decides whether a replay is right is fp32, where noise is 1e-12 and the same
fault at least 1e-5 (:data:`EXACT`).

Only samples of *one* weights version are judged: where older weights wrote K/V that a row reads, a difference
measures how stale a rollout is, not whether its replay is right.  They are counted, and left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcomm.streams.rollout import Rollout
from kvcomm.streams.view import View, weights_runs

FIRST_SAMPLES = 3
"""Behind an event: those that a wrong row border shows in first."""


_COMPARED_AT_ONCE = 1 << 26
"""Logits that are in memory as float64 at a time."""


class Scored(Protocol):
    """What a replay gives."""

    @property
    def rollout(self) -> Rollout: ...
    @property
    def log_probs(self) -> torch.Tensor:
        """``[samples]``: of the drawn tokens, under their own sampling."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some samples, in nats."""

    count: int = 0
    mean: float = 0.0
    worst: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a report may show, in nats."""

    mean: float
    worst: float
    log_prob: float
    """Largest ``|x|``."""


EXACT = Limits(mean=1e-9, worst=1e-8, log_prob=1e-4)
"""fp32 on both sides: a replay that keeps to it does what the engine did."""
ROUNDED = Limits(mean=1e-3, worst=1e-2, log_prob=0.2)
"""bf16: an alarm, not a proof."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Of the samples of some rollouts."""

    k3: Spread
    after_events: Spread
    """k3 of the first :data:`FIRST_SAMPLES` samples behind each event that moved rows."""
    elsewhere: Spread
    """k3 of the others."""
    log_prob_worst: float
    """Largest ``|x|``."""
    worst_rollout: str
    """Where the worst k3 is."""
    worst_row: int
    stale_count: int
    """Samples left out: their rows, or rows that they depend on, were computed with other weights."""
    kl: Spread | None = None
    """Exact, over the vocabulary, where the engine's logits were kept."""

    def beyond(self, limits: Limits) -> list[str]:
        """What is over the limits; empty = the replay keeps to them.  A report of nothing keeps to none."""
        found = [] if self.k3.count else ["no sample could be judged"]
        shown = {"k3": self.k3, "k3 behind events": self.after_events}
        if self.kl is not None:
            shown["KL"] = self.kl
        for name, spread in shown.items():
            found += _over(f"mean {name}", spread.mean, limits.mean)
            found += _over(f"worst {name}", spread.worst, limits.worst)
        return found + _over("largest |dlogp|", self.log_prob_worst, limits.log_prob)

    def __str__(self) -> str:
        lines = [
            f"mismatch of {self.k3.count} samples" + (f", {self.stale_count} stale" * bool(self.stale_count)),
            _line("k3", self.k3),
            _line(f"first {FIRST_SAMPLES} behind events", self.after_events),
            _line("elsewhere", self.elsewhere),
        ]
        if self.kl is not None:
            lines.append(_line("exact KL", self.kl))
        place = f"row {self.worst_row} of {self.worst_rollout!r}" if self.k3.count else "nowhere"
        lines.append(f"  largest |dlogp| {self.log_prob_worst:.2e}, worst k3 at {place}")
        return "\n".join(lines)


def mismatch(
    scored: Sequence[Scored],
    *,
    weights_version: int | None = None,
    engine_logits: Sequence[torch.Tensor] | None = None,
    trainer_logits: Sequence[torch.Tensor] | None = None,
) -> Mismatch:
    """The report over all samples of ``scored``, computed in float64.

    Args:
        scored: of a replay.
        weights_version: which weights the replay ran with; needed where the rollouts name several.
        engine_logits: by rollout ``[samples, vocab_size]``, if the engine kept them, for the exact KL.
        trainer_logits: the replay's.  KL is that of the temperature's distributions, without top-k and top-p
            (where their sets differ it is infinite).

    Raises:
        ValueError: no rollouts; several weights versions and no word which one is judged; or one kind of
            logits without the other.
    """
    if (engine_logits is None) != (trainer_logits is None):
        raise ValueError("the exact KL needs the logits of both sides")
    if not scored:
        raise ValueError("a report is about at least one rollout")
    version = _version([each.rollout for each in scored], weights_version)
    tables = [_Table(each, version) for each in scored]
    difference = torch.cat([table.difference for table in tables])
    k3 = torch.expm1(difference) - difference
    judged = torch.cat([table.judged for table in tables])
    behind = torch.cat([table.behind for table in tables])
    kl = None
    if engine_logits is not None and trainer_logits is not None:
        by_rollout = zip(scored, engine_logits, trainer_logits, strict=True)
        kl = _spread(torch.cat([exact_kl(each.rollout, ours, its) for each, ours, its in by_rollout])[judged])
    places = [(table.name, row) for table in tables for row in table.rows]
    masked = k3.masked_fill(~judged, -1.0)
    worst = places[int(masked.argmax())] if judged.any() else ("", -1)
    return Mismatch(
        k3=_spread(k3[judged]),
        after_events=_spread(k3[judged & behind]),
        elsewhere=_spread(k3[judged & ~behind]),
        log_prob_worst=float(difference[judged].abs().max()) if judged.any() else 0.0,
        worst_rollout=worst[0],
        worst_row=worst[1],
        stale_count=int((~judged).sum()),
        kl=kl,
    )


def exact_kl(rollout: Rollout, engine: torch.Tensor, trainer: torch.Tensor) -> torch.Tensor:
    """``KL(engine || trainer)`` at each sample, float64 ``[samples]``; logits ``[samples, vocab_size]``, of
    which the temperature's distributions are compared."""
    heat = torch.tensor([sample.sampling.temperature or 1.0 for sample in rollout.samples])
    rows = max(1, _COMPARED_AT_ONCE // engine.shape[-1])
    parts = zip(*(torch.split(each, rows) for each in (engine, trainer, heat)), strict=True)
    return torch.cat([_kl(*part) for part in parts])


def _kl(engine: torch.Tensor, trainer: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
    device = trainer.device
    ours, its = (
        torch.log_softmax(logits.detach().to(device).double() / heat.to(device).double()[:, None], -1)
        for logits in (engine, trainer)
    )
    return (ours.exp() * (ours - its)).sum(-1).cpu()


def judged_samples(rollout: Rollout, version: int) -> list[bool]:
    """Whether a sample's row, and every row that it depends on, was computed with ``version``: its own
    weights, those of all that it sees, and so on."""
    if all(each == version for each, _ in weights_runs(rollout.row_count, rollout.events)):
        return [True] * len(rollout.samples)
    view, pure = View(), [False] * rollout.row_count
    seen_pure = True

    def ran_until(row: int) -> None:
        fits = seen_pure and view.weights_version == version
        pure[view.next_row : row] = [fits] * (row - view.next_row)
        view.feed(row - view.next_row)

    for event in rollout.events:
        ran_until(event.at_row)
        view.apply(event)
        seen_pure = all(pure[row] for row in view.rows)
    ran_until(rollout.row_count)
    return [pure[sample.query_row] for sample in rollout.samples]


def behind_events(rollout: Rollout) -> list[bool]:
    """Whether a sample is one of the first :data:`FIRST_SAMPLES` whose rows ran behind an event that moved
    rows."""
    moved = sorted({event.at_row for event in rollout.events if event.kind in ("evict", "restore")})
    found: list[bool] = []
    at = left = 0
    for sample in rollout.samples:
        while at < len(moved) and moved[at] <= sample.query_row:
            at, left = at + 1, FIRST_SAMPLES
        found.append(left > 0)
        left -= 1
    return found


class _Table:
    """What is looked at of one rollout's samples, by sample."""

    def __init__(self, scored: Scored, version: int) -> None:
        rollout = scored.rollout
        if len(scored.log_probs) != len(rollout.samples):
            raise ValueError(f"{len(scored.log_probs)} log probabilities of {len(rollout.samples)} samples")
        self.name = rollout.name
        self.rows = [sample.query_row for sample in rollout.samples]
        engine = torch.tensor([sample.logprob for sample in rollout.samples], dtype=torch.float64)
        self.difference = scored.log_probs.detach().cpu().double() - engine
        self.judged = torch.tensor(judged_samples(rollout, version), dtype=torch.bool)
        self.behind = torch.tensor(behind_events(rollout), dtype=torch.bool)


def _version(rollouts: Sequence[Rollout], told: int | None) -> int:
    if told is not None:
        return told
    found = {
        version for rollout in rollouts for version, _ in weights_runs(rollout.row_count, rollout.events)
    }
    if len(found) > 1:
        raise ValueError(
            f"the rollouts ran with weights {sorted(found)}: say with weights_version= which ones the replay "
            "ran with"
        )
    return min(found, default=0)


def _spread(values: torch.Tensor) -> Spread:
    if not len(values):
        return Spread()
    return Spread(len(values), float(values.mean()), float(values.max()))


def _over(name: str, value: float, limit: float) -> list[str]:
    """A NaN is over every limit."""
    return [] if value <= limit else [f"{name} {value:.2e} is over {limit:.0e}"]


def _line(name: str, spread: Spread) -> str:
    return f"  {name:<22} mean {spread.mean:.2e}  worst {spread.worst:.2e}  of {spread.count}"
