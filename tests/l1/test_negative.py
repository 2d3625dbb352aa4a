"""``NegativeCache``: short memory of absences, never against this process's own puts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError
from l1 import negative
from l1.negative import JITTER_RATIO, Moment, NegativeCache

KEYS = [bytes([letter]) * 32 for letter in b"abcdef"]
A, B, C = KEYS[:3]


def test_an_absence_is_believed_for_the_ttl_and_not_longer():
    cache = NegativeCache(5.0)
    assert not cache.known_absent(A, 100.0)
    cache.mark([A], 100.0, cache.moment)
    assert cache.known_absent(A, 104.999)
    assert not cache.known_absent(A, 105.0)
    assert not cache.known_absent(A, 104.0), "an expired entry is gone"
    assert cache.hits == 1


def test_marking_again_begins_again():
    cache = NegativeCache(5.0)
    cache.mark([A], 0.0, cache.moment)
    cache.mark([A], 4.0, cache.moment)
    assert cache.known_absent(A, 8.0)


def test_a_put_ends_it_at_once():
    cache = NegativeCache(5.0)
    cache.mark([A, B], 0.0, cache.moment)
    cache.forget([A])
    assert not cache.known_absent(A, 0.0)
    assert cache.known_absent(B, 0.0)


def test_an_answer_older_than_the_put_is_not_believed():
    cache = NegativeCache(5.0)
    asked = cache.moment
    cache.forget([A])
    cache.mark([A, B], 1.0, asked)
    assert not cache.known_absent(A, 1.0)
    assert cache.known_absent(B, 1.0)
    cache.mark([A], 2.0, cache.moment)
    assert cache.known_absent(A, 2.0), "evicted everywhere since: asked after the put"


def test_a_reader_that_missed_too_many_puts_marks_nothing(monkeypatch):
    monkeypatch.setattr(negative, "RECENT_PUTS", 2)
    cache = NegativeCache(5.0)
    asked = cache.moment
    cache.forget([A])
    late = cache.moment
    cache.forget([B, C])  # the put of A is forgotten now
    cache.mark([A], 0.0, asked)
    assert not cache.known_absent(A, 0.0)
    cache.mark([A], 0.0, late)
    assert cache.known_absent(A, 0.0)


def test_the_oldest_makes_room():
    cache = NegativeCache(5.0, entries_max=2)
    cache.mark([A, B], 0.0, cache.moment)
    cache.mark([A], 1.0, cache.moment)
    cache.mark([C], 2.0, cache.moment)
    assert [cache.known_absent(key, 2.0) for key in (A, B, C)] == [True, False, True]
    assert len(cache) == 2


def test_no_ttl_turns_it_off():
    cache = NegativeCache(0.0)
    cache.mark([A], 0.0, cache.moment)
    assert not cache.known_absent(A, 0.0)
    assert len(cache) == 0


def test_jitter_only_ever_shortens():
    draws = iter([0.0, 0.5, 0.999])
    cache = NegativeCache(10.0, jitter=lambda: next(draws))
    cache.mark([A, B, C], 0.0, cache.moment)
    shortest = 10.0 * (1.0 - JITTER_RATIO)
    assert [cache.known_absent(key, shortest) for key in (A, B, C)] == [True, True, True]
    assert [cache.known_absent(key, 9.4) for key in (A, B, C)] == [True, True, False]
    assert [cache.known_absent(key, 9.6) for key in (A, B)] == [True, False]
    assert not cache.known_absent(A, 10.0)


def test_nonsense_is_refused():
    for arguments in ({"ttl_s": -1.0}, {"entries_max": 0}):
        with pytest.raises(ConfigError, match="negative cache"):
            NegativeCache(**arguments)


keys = st.sampled_from(KEYS)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), keys),
        st.tuples(st.just("answer"), st.integers(0, 20)),
        st.tuples(st.just("put"), keys),
        st.tuples(st.just("wait"), st.floats(0.0, 4.0)),
    ),
    max_size=60,
)


@given(steps)
def test_a_key_is_absent_exactly_while_an_answer_newer_than_its_last_put_is_fresh(script):
    """The oracle remembers everything: every put, and every answer with when its question was asked."""
    cache, now = NegativeCache(5.0), 0.0
    asking: list[tuple[bytes, Moment, int]] = []
    put_step: dict[bytes, int] = {}
    answers: dict[bytes, tuple[int, float]] = {}  # step of the question, time of the answer
    for step, (name, argument) in enumerate(script):
        if name == "ask":
            asking.append((argument, cache.moment, step))
        elif name == "answer" and asking:
            key, moment, asked_step = asking.pop(argument % len(asking))
            cache.mark([key], now, moment)
            if asked_step > put_step.get(key, -1):
                answers[key] = (asked_step, now)
        elif name == "put":
            cache.forget([argument])
            put_step[argument] = step
            answers.pop(argument, None)
        elif name == "wait":
            now += argument
        for key in KEYS:
            expected = key in answers and now < answers[key][1] + 5.0
            assert cache.known_absent(key, now) == expected
