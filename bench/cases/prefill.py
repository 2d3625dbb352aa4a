"""Time to the first token of a long context: fetching what another agent computed, beside computing it again.

One process, one model, fresh caches each time.  The last token is always computed, for its logits are not
shared.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.report import Report, Row
from bench.scale import SMOKE, Scale
from bench.service import DEADLINE_S, service
from bench.timing import Spread, interleave
from kvcomm.errors import KVCommError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcomm.engines.transformers import Reading, Session

COMPUTED, FETCHED = "prefill", "fetch, then the last token"
TIMES_MIN = 5.0
ROUNDS = 5
SEED = 7


def run(scale: Scale) -> Report:
    report = Report("prefill", "Time to first token")
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        report.skip("time to first token", f"{' and '.join(absent)} not installed")
        return report
    label, model = _tiny() if scale is SMOKE else _demo_model()
    draw = random.Random(SEED)
    tokens = [draw.randrange(model.config.vocab_size) for _ in range(scale.prefix_tokens)]
    _measure(report, label, model, tokens, rounds=2 if scale is SMOKE else ROUNDS)
    return report


def _measure(report: Report, label: str, model: PreTrainedModel, tokens: list[int], *, rounds: int) -> None:
    from kvcomm.engines.transformers import Session, namespace_of

    ns = namespace_of(model)
    with service() as running:

        def agent(kv: Any) -> Session:
            return Session(model, None, kv, ns, deadline_s=DEADLINE_S)

        published = agent(running.client).read(tokens)
        if published.published is None or published.published.failed:
            raise KVCommError(f"the context could not be published: {published.trouble}")
        computing = _Reads(COMPUTED, lambda: agent(None).read(tokens))
        fetching = _Reads(FETCHED, lambda: agent(running.client).read(tokens))
        measured = interleave([computing, fetching], rounds=rounds, turn_s=0.0, warm_calls=1)
    _same_answer(computing.last, fetching.last)
    size = f"{len(tokens):,} tokens"
    report.add(measured, size, {FETCHED: COMPUTED})
    part = Spread.of(fetching.fetch_s).scaled(1e6)
    report.rows.append(Row("of it fetching and copying into the cache", size, part))
    faster = measured.ratio(COMPUTED, FETCHED)
    report.claim(f"first token after {size}: prefill over fetch", ">=", TIMES_MIN, "x faster", faster)
    reading = fetching.last
    report.notes.append(
        f"Model: {label}, {reading.fetched_bytes / (1 << 20):,.0f} MiB of KV in blocks of "
        f"{ns.block_bytes / 1024:,.0f} KiB, {reading.token_count_by_source} tokens by source."
    )


@dataclass
class _Reads:
    """Timed by the session itself: the time to the first token leaves out the publishing after it."""

    name: str
    read: Callable[[], Reading]
    fetch_s: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    @property
    def last(self) -> Reading:
        return self.readings[-1]

    def times(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            reading = self.read()
            taken.append(reading.time_to_first_token_s)
            self.fetch_s.append(reading.fetch_s)
            self.readings = [reading]
        return taken


def _same_answer(computed: Reading, fetched: Reading) -> None:
    """A fast wrong answer is no result.  Raises ``RuntimeError``."""
    if fetched.fetched_tokens != fetched.token_count // 16 * 16 or computed.fetched_tokens:
        raise RuntimeError(f"expected everything fetched: {fetched.token_count_by_source}, {fetched.trouble}")
    if int(fetched.logits.argmax()) != int(computed.logits.argmax()):
        raise RuntimeError("the fetched context leads to another token than the computed one")


def _demo_model() -> tuple[str, PreTrainedModel]:
    from kvcomm.demo.model import find_model

    found = find_model(lambda what, done, whole: print(f"{what} {done}/{whole}", file=sys.stderr))
    return found.label, found.load()[0]


def _tiny() -> tuple[str, PreTrainedModel]:
    """Random weights, small enough for a smoke test."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return "a tiny random Llama", LlamaForCausalLM(config).eval()
