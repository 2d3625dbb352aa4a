"""A cut is no deletion: what kept rows saw is still known."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="the examples compute with torch")
pytest.importorskip("transformers", reason="the examples train a transformers model")

from examples.rollouts.recall import (
    CHANCE,
    FULL_SET,
    QUICK,
    Condition,
    draw_fact,
    measure,
    tell,
)
from examples.rollouts.voices import Teacher
from kvcomm.streams.view import View
from tests.namespaces import namespace

KNOWN, UNKNOWN = 0.9, 0.15


@pytest.mark.model
@pytest.mark.slow
def test_a_fact_that_was_cut_is_known_if_a_row_that_saw_it_is_kept_and_otherwise_is_not(threads_one):
    found = {record["condition"]: record for record in measure(QUICK)}
    assert len(found) == 3
    assert {record["knowable"] for record in found.values()} == {True, False}
    for record in found.values():
        assert record["chance"] == CHANCE == 0.0625
        if record["knowable"]:
            assert record["recall"] > KNOWN, record
        else:
            assert record["recall"] < UNKNOWN, record


@pytest.mark.parametrize("condition", FULL_SET, ids=lambda condition: condition.name)
def test_what_the_question_sees(condition: Condition):
    draw = random.Random(0)
    fact = draw_fact(draw, condition)
    (session,), _ = tell(Teacher(namespace(block_tokens=4, vocab_size=60)), condition, [fact])
    seen = [session.tokens[row] for row in session.view.rows]
    assert seen[-1] == fact.key
    assert (fact.value in seen) == (condition.context == "full context")
    neutral = [*fact.before, *fact.kept]
    if condition.context == "full context":
        neutral[len(fact.before) : len(fact.before)] = [fact.key, fact.value, *fact.gone]
    assert seen[4:-1] == neutral
    assert [event.kind for event in session.events] == ["evict"] * (condition.context == "KV-streams")


def test_the_kept_tokens_saw_the_fact_those_before_it_did_not():
    for condition in (Condition("KV-streams", 2), Condition("KV-streams", 0, before=8)):
        fact = draw_fact(random.Random(0), condition)
        (session,), _ = tell(Teacher(namespace(block_tokens=4, vocab_size=60)), condition, [fact])
        (event,) = session.events
        value_row = session.tokens.index(fact.value)
        kept = [row for row in session.view.rows if session.tokens[row] in {*fact.before, *fact.kept}]
        assert all((row > value_row) == (not condition.before) for row in kept)
        assert len(kept) == max(condition.kept, condition.before)
        view = View()
        view.feed(event.at_row)
        assert value_row in view.apply(event)
