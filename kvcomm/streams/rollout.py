"""``Rollout``: all that a trainer gets of one generated sequence, and all that it needs.

Tokens by row, events, samples.  Text is never tokenized again, and nothing is derived from offsets.  The
header says how many events there are and ends their digest, so that a stage which drops some on the way is
noticed whatever it drops.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import Corrupt
from kvcomm.streams.events import Event, ViewDigest
from kvcomm.streams.view import Visibility, visibility


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens were drawn: log probabilities are those of the distribution *after* this processing."""

    temperature: float = 1.0
    """0 = the most probable token; its log probability is then of temperature 1."""
    top_k: int = 0
    """0 = all."""
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token."""

    query_row: int
    """The row whose logits it was drawn from."""
    token: int
    logprob: float
    """Natural logarithm, of the processed distribution."""
    sampling: Sampling
    loss: bool = True
    """Whether a trainer learns from it."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Raises ``Corrupt`` when the parts do not fit."""

    name: str
    namespace: bytes
    """Id of the K/V's namespace: the model and its weights."""
    block_tokens: int
    tokens: tuple[int, ...]
    """By row, fillers included."""
    filler_rows: tuple[int, ...]
    """Rows that were fed only to end a block: nobody's text, no loss."""
    events: tuple[Event, ...]
    samples: tuple[Sample, ...]
    event_count: int
    view_digest: ViewDigest
    """After the last event."""

    def __post_init__(self) -> None:
        last = self.events[-1].view_digest if self.events else None
        if len(self.events) != self.event_count or (last is not None and last != self.view_digest):
            raise Corrupt(
                f"rollout {self.name!r} has {len(self.events)} of {self.event_count} events, or other ones "
                "than it was written with: use it as it was written"
            )

    @property
    def row_count(self) -> int:
        return len(self.tokens)

    def visibility(self) -> Visibility:
        """Raises ``Corrupt`` where an event does not follow from those before it."""
        return visibility(self.row_count, self.events)
