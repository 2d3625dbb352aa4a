"""``recall``: is a fact still known when its tokens are gone?

::

    <start>  key value . .  │ n n n n │ key ?  -> value         . and n: neutral tokens, drawn at random
             └── cut ─────┘   kept

Right before the question the fact is cut out of the view, with its key and value.  What is left of it is what
the kept tokens wrote into their own K/V while they saw it.  A model is trained for each condition through the
replay of records, and asked on the engine, where the cut really happens.

What must come out: 1.0 as soon as one neutral token that saw the fact is kept; chance where none is, whatever
else is kept, and where the kept text is computed again without the fact.  So a cut is no deletion.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from examples.rollouts.grpo import accumulate
from examples.rollouts.toys import BLOCK_TOKENS, step, toy_model
from examples.rollouts.voices import Teacher
from kvcomm.engines.transformers.identity import namespace_of
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.recorder import Recorder
from kvcomm.streams.rollout import Sampling
from kvcomm.streams.session import Session

START = (1, 0, 0, 0)
KEYS = range(4, 12)
VALUES = range(16, 32)
NEUTRAL = range(40, 60)
VOCAB_SIZE = 60
CHANCE = 1 / len(VALUES)

_LEARNING_RATE = 4e-3
_WARM_STEPS = 20


@dataclass(frozen=True, slots=True)
class Condition:
    """What is left when the question comes."""

    context: Literal["full context", "KV-streams", "re-prefill"]
    kept: int
    """Neutral tokens between the fact and the question."""
    before: int = 0
    """Neutral tokens before the fact, in whole blocks: they are kept, too, and never saw it."""

    @property
    def name(self) -> str:
        kept = f"{self.kept} kept" if self.kept else "none kept"
        return f"{self.context}, {kept}" + (f", {self.before} from before it" if self.before else "")

    @property
    def knowable(self) -> bool:
        """Whether the fact can be known."""
        return self.context == "full context" or (self.context == "KV-streams" and self.kept > 0)


FULL_SET = (
    Condition("full context", 16),
    Condition("KV-streams", 16),
    Condition("KV-streams", 4),
    Condition("KV-streams", 1),
    Condition("KV-streams", 0),
    Condition("KV-streams", 0, before=16),
    Condition("re-prefill", 16),
)
SHORT_SET = (Condition("KV-streams", 4), Condition("KV-streams", 0), Condition("re-prefill", 4))


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the experiment; each model gets the same."""

    conditions: tuple[Condition, ...] = FULL_SET
    steps: int = 200
    facts: int = 32
    """A step."""
    questions: int = 512
    """Asked of each trained model."""
    seed: int = 0


QUICK = Settings(SHORT_SET, steps=110, facts=24, questions=256)


class Writer(Protocol):
    """An engine, or a teacher."""

    def session(self) -> Session: ...

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> Any: ...


class Fact(NamedTuple):
    """One, and the neutral tokens around it."""

    before: tuple[int, ...]
    key: int
    value: int
    gone: tuple[int, ...]
    """Cut together with it, so that the cut takes a whole block."""
    kept: tuple[int, ...]


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """One record for each condition, as it is done."""
    for condition in settings.conditions:
        draw = random.Random(settings.seed)
        model = toy_model(VOCAB_SIZE, settings.seed)
        loss = _train(model, condition, settings, draw)
        yield {
            "condition": condition.name,
            "knowable": condition.knowable,
            "recall": _asked(model, condition, settings.questions, draw),
            "chance": CHANCE,
            "questions": settings.questions,
            "steps": settings.steps,
            "last_loss_nats": loss,
        }


def draw_fact(draw: random.Random, condition: Condition) -> Fact:
    def neutral(count: int) -> tuple[int, ...]:
        return tuple(draw.choice(NEUTRAL) for _ in range(count))

    key, value = draw.choice(KEYS), draw.choice(VALUES)
    return Fact(neutral(condition.before), key, value, neutral(BLOCK_TOKENS - 2), neutral(condition.kept))


def tell(writer: Writer, condition: Condition, facts: Sequence[Fact]) -> tuple[list[Session], Any]:
    """Streams right after their question, and what feeding it gave."""
    sessions = [writer.session() for _ in facts]

    def feed(parts: Sequence[tuple[int, ...]]) -> Any:
        return writer.feed([(session, part) for session, part in zip(sessions, parts, strict=True) if part])

    feed([(*START, *fact.before) for fact in facts])
    for session in sessions:
        session.protect(session.slot_count)
    told = condition.context != "re-prefill"  # a stream begun anew never had it
    if told:
        feed([(fact.key, fact.value, *fact.gone) for fact in facts])
    feed([fact.kept for fact in facts])
    if condition.context == "KV-streams":
        for session in sessions:
            session.evict([(session.protected, session.protected + BLOCK_TOKENS)], reason="the fact")
    return sessions, feed([(fact.key,) for fact in facts])


def _train(model: PreTrainedModel, condition: Condition, settings: Settings, draw: random.Random) -> float:
    """The last loss, in nats."""
    teacher = Teacher(namespace_of(model, block_tokens=BLOCK_TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE, weight_decay=0.0)
    loss = 0.0
    for number in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (number + 1) / _WARM_STEPS)
        facts = [draw_fact(draw, condition) for _ in range(settings.facts)]
        sessions, _ = tell(teacher, condition, facts)
        rollouts = []
        for session, fact in zip(sessions, facts, strict=True):
            recorder = Recorder(session, "fact")
            recorder.sampled(fact.value, 0.0, Sampling())
            rollouts.append(recorder.rollout())
            session.close()
        learned = accumulate(model, rollouts, [1.0] * len(rollouts))
        step(model, optimizer)
        loss = -float(torch.cat([each.log_probs for each in learned.replayed]).mean())
    return loss


def _asked(model: PreTrainedModel, condition: Condition, count: int, draw: random.Random) -> float:
    """Share of right answers from the engine, most probable token each."""
    together = 64
    engine = StreamEngine(model, 16 * together, block_tokens=BLOCK_TOKENS, lanes_max=together)
    right = 0
    for start in range(0, count, together):
        facts = [draw_fact(draw, condition) for _ in range(min(together, count - start))]
        sessions, logits = tell(engine, condition, facts)
        right += sum(int(each.argmax()) == fact.value for each, fact in zip(logits, facts, strict=True))
        for session in sessions:
            session.close()
    return right / count
