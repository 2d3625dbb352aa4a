"""What the demo and its agents say to each other: a JSON document a line on its standard streams."""

from __future__ import annotations

import msgspec


class Start(msgspec.Struct, frozen=True, tag=True):
    """First order: load the model and connect."""

    agent: str
    instance: str
    config: str
    """The configuration file of the cluster."""
    model_label: str
    model_folder: str | None


class Read(msgspec.Struct, frozen=True, tag=True):
    """Read a context with sharing, continue it, and do the same without sharing for comparison."""

    step: str
    """What the report calls this."""
    session: str
    """Name of the context that is kept or followed."""
    text: str
    """The shared text; empty when following."""
    text_tokens: int
    """Use so many tokens of it."""
    question: str
    """Read after it."""
    new_tokens: int
    follow: str | None = None
    """Instead of ``text``: what this agent's context looks like now."""
    keep: bool = False
    """Publish the continuation too, and keep all of it as our own context for others to follow."""


class Reconnect(msgspec.Struct, frozen=True, tag=True):
    """Leave the cluster and come back as a new client that holds nothing."""


Order = Start | Read | Reconnect


class Ready(msgspec.Struct, frozen=True, tag=True):
    agent: str
    block_tokens: int
    block_bytes: int


class Row(msgspec.Struct, frozen=True, tag=True):
    """How one context was read."""

    agent: str
    step: str
    shared_tokens: int
    """Of the text, or of the followed context."""
    token_count: int
    """With the question."""
    fetched_tokens: dict[str, int]
    """By tier: ``l1``, ``l2``, ``l3``."""
    fetched_bytes: int
    prefilled_tokens: int
    published_blocks: int
    first_token_s: float
    """With sharing: from the call to the first logits."""
    fetch_s: float
    """Part of it: fetching and copying into the cache."""
    prefill_first_token_s: float
    """Without sharing, same process, same tokens."""
    tokens_equal: bool | None
    """Whether both runs continued with the same tokens; ``None`` where this is the run without sharing."""
    logprob_difference: float | None
    """Largest absolute difference of a continued token's log-probability, natural logarithm."""
    refused_copies: int
    """Copies that failed verification, at any tier."""
    text: str
    """The continuation."""
    trouble: str = ""
    l2_reads: dict[str, int] = {}
    """Blocks read from the pool, by transport."""

    @property
    def fetched(self) -> int:
        return sum(self.fetched_tokens.values())

    @property
    def speed_up(self) -> float | None:
        """Of the time to the first token; ``None`` where nothing was fetched."""
        return self.prefill_first_token_s / self.first_token_s if self.fetched else None


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """The order could not be carried out."""

    message: str


Reply = Ready | Row | Trouble
