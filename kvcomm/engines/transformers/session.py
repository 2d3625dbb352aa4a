"""``Session``: one agent reading and writing with one model, sharing its KV through KVCOMM.

``read`` puts the longest prefix that anybody has computed into the cache, computes the rest, and publishes
the blocks that were missing.  The result is the one of a full prefill within the float noise of the kernels:
what was fetched is verified by the client, and whatever is missing or refused is simply computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache

from kvcomm.block import Buffer, token_array
from kvcomm.engines.transformers.cache import blocks_of, cache_from, token_count_of, truncate
from kvcomm.engines.transformers.forward import advance
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.errors import KVCommError, TokenError
from kvcomm.namespace import Namespace
from kvcomm.tier import Block

OWN = "own"
"""In ``Reading.token_count_by_source``: what the session's cache still held."""


class Found(Protocol):
    """What a fetch brought: verified blocks of a prefix, without a gap."""

    @property
    def token_count(self) -> int: ...
    @property
    def blocks(self) -> Sequence[Block]: ...


class Stored(Protocol):
    """What became of published blocks."""

    @property
    def stored(self) -> int: ...
    @property
    def present(self) -> int: ...
    @property
    def failed(self) -> int: ...


class Fetcher(Protocol):
    """What a session needs of a KVCOMM client."""

    def fetch(self, namespace: Namespace, tokens: Sequence[int], *, deadline_s: float) -> Found: ...

    def publish(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        blocks: Sequence[Buffer],
        *,
        first_block: int,
        deadline_s: float,
    ) -> Stored:
        """``blocks`` are the payloads of ``tokens``' blocks ``[first_block, first_block + len(blocks))``."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """How a context got into the cache."""

    tokens: list[int]
    token_count_by_source: dict[str, int]
    """Tokens taken over, by tier (``"l1"``, ``"l2"``, ``"l3"``) or :data:`OWN`."""
    prefilled_tokens: int
    """Tokens run through the model.  At least one: the logits of the last token are never shared."""
    fetched_bytes: int
    logits: torch.Tensor = field(repr=False)
    """After the last token, float32 ``[vocab_size]``."""
    time_to_first_token_s: float
    """From the call to the logits: fetching, copying and prefilling, not publishing."""
    fetch_s: float
    """Part of it spent fetching and copying."""
    published: Stored | None = None
    trouble: str = ""
    """Why sharing failed, if it did; the reading itself is complete."""

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    @property
    def fetched_tokens(self) -> int:
        return sum(count for source, count in self.token_count_by_source.items() if source != OWN)


@dataclass(frozen=True, slots=True)
class Generation:
    tokens: list[int]
    logprobs: list[float]
    """Natural logarithm of the probability of each token."""
    text: str
    """Empty without a tokenizer."""


class Session:
    """One sequence of one model.  Not thread-safe.

    Args:
        model: in evaluation mode.
        tokenizer: needed to read and return text.
        kv: where blocks are shared; ``None`` = nowhere.
        namespace: of ``model``; computed when not given (hashes all weights).
        deadline_s: for one fetch or one publish.
        prefill_chunk_tokens: most tokens in one forward pass, bounds the memory of the attention mask.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        kv: Fetcher | None,
        namespace: Namespace | None = None,
        *,
        deadline_s: float = 5.0,
        prefill_chunk_tokens: int = 2048,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if model.training:
            raise ValueError(
                "the model is in training mode, where dropout makes K/V random: call model.eval() first"
            )
        if prefill_chunk_tokens < 1:
            raise ValueError("prefill_chunk_tokens must be at least 1")
        self.model = model
        self.tokenizer = tokenizer
        self.namespace = namespace or namespace_of(model, tokenizer)
        self._kv = kv
        self._deadline_s = deadline_s
        self._chunk_tokens = prefill_chunk_tokens
        self._clock = clock
        self._cache: DynamicCache
        self._tokens: list[int]
        self._unfed: list[int]
        self._logits: torch.Tensor | None
        self._shared_blocks: int
        self._forget()

    @property
    def tokens(self) -> list[int]:
        """The whole sequence, read and generated (the last generated token has no K/V yet)."""
        return self._tokens + self._unfed

    @property
    def cache(self) -> DynamicCache:
        return self._cache

    def read(self, context: str | Sequence[int], *, publish: bool = True, room_tokens: int = 0) -> Reading:
        """Make ``context`` (the whole of it, not what came since) the session's sequence.

        Args:
            context: text, or token ids.
            publish: share the full blocks that nobody had.
            room_tokens: cache space to reserve for what will be generated.

        Raises:
            TokenError: no tokens, or an id outside the vocabulary.
        """
        tokens = self._encode(context)
        began = self._clock()
        by_source, trouble = self._fill_cache(tokens, len(tokens) + room_tokens)
        fetched = self._clock()
        prefilled = self._prefill(tokens)
        ended = self._clock()
        stored = None
        if publish and not trouble:
            stored, trouble = self._publish()
        return Reading(
            tokens=tokens,
            token_count_by_source=by_source,
            prefilled_tokens=prefilled,
            fetched_bytes=sum(count for name, count in by_source.items() if name != OWN) * self._token_bytes,
            logits=self._last_logits(),
            time_to_first_token_s=ended - began,
            fetch_s=fetched - began,
            published=stored,
            trouble=trouble,
        )

    def generate(self, max_new_tokens: int, *, stop_tokens: Collection[int] | None = None) -> Generation:
        """Continue greedily.

        Args:
            max_new_tokens: at most so many.
            stop_tokens: end after one of these; default: the model's end-of-sequence tokens.
        """
        stop = _end_tokens(self.model) if stop_tokens is None else stop_tokens
        tokens: list[int] = []
        logprobs: list[float] = []
        for _ in range(max_new_tokens):
            self._feed_unfed()
            scores = torch.log_softmax(self._last_logits(), dim=-1)
            token = int(scores.argmax())
            tokens.append(token)
            logprobs.append(float(scores[token]))
            self._unfed.append(token)
            if token in stop:
                break
        text = "" if self.tokenizer is None else str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        return Generation(tokens, logprobs, text)

    def publish(self) -> Stored | None:
        """Share the full blocks not shared yet, generated ones included; ``None`` if there are none.

        Raises:
            KVCommError: the client could not.
        """
        self._feed_unfed()
        first, last = self._shared_blocks, len(self._tokens) // self.namespace.block_tokens
        if self._kv is None or first >= last:
            return None
        payloads = blocks_of(self._cache, self.namespace, first, last)
        stored = self._kv.publish(
            self.namespace, self._tokens, payloads, first_block=first, deadline_s=self._deadline_s
        )
        if not stored.failed:
            self._shared_blocks = last
        return stored

    @property
    def _token_bytes(self) -> int:
        return self.namespace.block_bytes // self.namespace.block_tokens

    def _encode(self, context: str | Sequence[int]) -> list[int]:
        if not isinstance(context, str):
            ids = context
        elif self.tokenizer is None:
            raise TokenError("this session has no tokenizer: pass token ids")
        else:
            ids = self.tokenizer(context).input_ids
        tokens = list(token_array(ids, self.namespace.vocab_size))
        if not tokens:
            raise TokenError("a context needs at least one token")
        return tokens

    def _keep_prefix(self, tokens: list[int]) -> int:
        """Cut back to what the cache has in common with ``tokens``, leaving at least one token to compute."""
        self._unfed = []
        most = min(len(self._tokens), len(tokens) - 1)
        common = next((at for at in range(most) if self._tokens[at] != tokens[at]), most)
        truncate(self._cache, common)
        del self._tokens[common:]
        self._shared_blocks = min(self._shared_blocks, common // self.namespace.block_tokens)
        return common

    def _fill_cache(self, tokens: list[int], capacity_tokens: int) -> tuple[dict[str, int], str]:
        """Take over what the cache still holds or, if it reaches further, what anybody published.

        Returns token counts by source, and why sharing failed if it did.  What was fetched is copied and let
        go here: its pins in the pool do not outlast the copy.
        """
        own = self._keep_prefix(tokens)
        found, trouble = self._fetch(tokens, own)
        if found is not None:
            self._shared_blocks = len(found.blocks)
        if found is not None and found.token_count > own:
            return self._take_over(tokens, found, capacity_tokens), trouble
        if own:
            return {OWN: own}, trouble
        self._cache = self._new_cache([], capacity_tokens)
        return {}, trouble

    def _fetch(self, tokens: list[int], own: int) -> tuple[Found | None, str]:
        size = self.namespace.block_tokens
        if self._kv is None or len(tokens) // size <= own // size:
            return None, ""
        try:
            return self._kv.fetch(self.namespace, tokens, deadline_s=self._deadline_s), ""
        except KVCommError as error:  # sharing is an optimisation: without it, compute
            return None, f"{error.code}: {error.message}"

    def _take_over(self, tokens: list[int], found: Found, capacity_tokens: int) -> dict[str, int]:
        size = self.namespace.block_tokens
        assert len(found.blocks) * size == found.token_count <= len(tokens), (
            "a hit is a prefix in whole blocks"
        )
        self._cache = self._new_cache([block.payload for block in found.blocks], capacity_tokens)
        held = min(found.token_count, len(tokens) - 1)
        truncate(self._cache, held)
        self._tokens = tokens[:held]
        by_tier: dict[str, int] = {}
        for block in found.blocks:
            by_tier[block.tier] = by_tier.get(block.tier, 0) + size
        return by_tier

    def _prefill(self, tokens: list[int]) -> int:
        rest = tokens[len(self._tokens) :]
        for begin in range(0, len(rest), self._chunk_tokens):
            self._feed(rest[begin : begin + self._chunk_tokens])
        return len(rest)

    def _publish(self) -> tuple[Stored | None, str]:
        try:
            return self.publish(), ""
        except KVCommError as error:
            return None, f"{error.code}: {error.message}"

    def _feed_unfed(self) -> None:
        if self._unfed:
            unfed, self._unfed = self._unfed, []
            self._feed(unfed)

    def _feed(self, tokens: list[int]) -> None:
        try:
            self._logits = advance(self.model, self._cache, tokens)
        except BaseException:  # some layers have the rows by now, others not: start over with the next read
            self._forget()
            raise
        self._tokens += tokens
        assert token_count_of(self._cache) == len(self._tokens)

    def _forget(self) -> None:
        self._cache = self._new_cache([], 0)
        self._tokens = []
        self._unfed = []
        self._logits = None
        self._shared_blocks = 0

    def _new_cache(self, payloads: Sequence[Buffer], capacity_tokens: int) -> DynamicCache:
        return cache_from(payloads, self.namespace, device=self.model.device, capacity_tokens=capacity_tokens)

    def _last_logits(self) -> torch.Tensor:
        if self._logits is None:
            raise ValueError("read a context first")
        return self._logits


def _end_tokens(model: PreTrainedModel) -> Collection[int]:
    config: Any = model.generation_config or model.config
    end = config.eos_token_id
    return () if end is None else {end} if isinstance(end, int) else set(end)
