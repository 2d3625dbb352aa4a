"""The checker against brute force on tiny histories, and histories that everybody can judge."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal

import pytest

from kvcomm.chaos.linearizable import UNSEEN, Access, Ended, Kind, TooHard, check_register
from tests.l3_shard.linearizable import FOREVER, Op, linearizable


def read(saw: str | None, begin: float, end: float | None) -> Access:
    return Access("read", begin, end, saw=saw)


def write(value: str | None, begin: float, end: float | None) -> Access:
    return Access("write", begin, end, value=value, ended="ok" if end is not None else "unknown")


def cas(expected: str | None, value: str, begin: float, end: float | None, saw: str | None = None) -> Access:
    ended: Ended = "unknown" if end is None else "ok" if saw is None else "mismatch"
    return Access("cas", begin, end, value=value, expected=expected, ended=ended, saw=saw)


def test_a_read_may_not_be_older_than_a_write_that_ended_before_it_began() -> None:
    stale = read(None, 2, 3)
    assert check_register([write("a", 0, 1), stale]) == stale
    assert check_register([write("a", 0, 1), read("a", 2, 3)]) is None


def test_a_read_may_see_a_write_that_has_not_ended() -> None:
    assert check_register([write("a", 0, 5), read("a", 1, 2), read("a", 3, 4)]) is None
    back = read(None, 3, 4)
    assert check_register([write("a", 0, 5), read("a", 1, 2), back]) == back


def test_an_unknown_write_takes_effect_at_any_later_time_or_never() -> None:
    lost = write("a", 0, None)
    assert check_register([lost, read(None, 5, 6), read("a", 7, 8)]) is None
    assert check_register([lost, read(None, 5, 6)]) is None
    twice = read("a", 11, 12)
    assert check_register([lost, read("a", 5, 6), write("b", 7, 8), read("b", 9, 10), twice]) == twice


def test_two_compare_and_sets_of_one_value_cannot_both_be_done() -> None:
    assert check_register([cas(None, "a", 0, 1), cas(None, "b", 0, 2)]) is not None
    assert check_register([cas(None, "a", 0, 1), cas("a", "b", 0, 2)]) is None


def test_a_failed_compare_and_set_saw_what_was_there() -> None:
    assert check_register([write("a", 0, 1), cas("x", "b", 2, 3, saw="a")]) is None
    assert check_register([write("a", 0, 1), cas("x", "b", 2, 3, saw="c")]) is not None
    assert check_register([write("a", 0, 1), cas("a", "b", 2, 3, saw=UNSEEN)]) is not None


def test_a_history_with_too_many_explanations_is_said_to_be_too_hard() -> None:
    writes = [write(f"v{index}", 0, None) for index in range(24)]
    reads = [read(f"v{index}", 1, 100 + index) for index in range(24)]
    with pytest.raises(TooHard):
        check_register([*writes, *reads, read("never", 1, 99)], situations_max=1_000)


def brute(accesses: Sequence[Access]) -> bool:
    """Try every order of every choice of the unknown ones."""
    unknown = [index for index, access in enumerate(accesses) if access.open]
    for chosen in range(1 << len(unknown)):
        left_out = {index for at, index in enumerate(unknown) if not chosen >> at & 1}
        taken = [index for index in range(len(accesses)) if index not in left_out]
        if any(_explains([accesses[index] for index in order]) for order in permutations(taken)):
            return True
    return False


def _explains(order: Sequence[Access]) -> bool:
    for at, later in enumerate(order):
        if any(later.end is not None and later.end < earlier.begin for earlier in order[:at]):
            return False
    value = None
    for access in order:
        if access.kind == "read":
            if not access.open and access.saw != value:
                return False
        elif access.kind == "write":
            value = access.value
        elif access.ended == "mismatch":
            if value == access.expected or (access.saw not in (UNSEEN, value)):
                return False
        elif access.open:
            value = access.value if value == access.expected else value
        elif value != access.expected:
            return False
        else:
            value = access.value
    return True


def tiny(draw: random.Random) -> list[Access]:
    values = ["a", "b", None]
    accesses = []
    for _ in range(draw.randint(1, 5)):
        begin = float(draw.randint(0, 8))
        end = None if draw.random() < 0.25 else begin + draw.randint(1, 4) - 0.5
        kinds: list[Kind] = ["read", "write", "cas"]
        kind = draw.choice(kinds)
        value, expected = draw.choice(values), draw.choice(values)
        ended: Ended = "unknown" if end is None else "ok"
        saw = draw.choice(values) if kind == "read" else None
        if kind == "cas" and end is not None and draw.random() < 0.5:
            ended, saw = "mismatch", draw.choice([*values, UNSEEN])
        accesses.append(Access(kind, begin, end, value, expected, ended, saw))
    return accesses


def compare(seed: int) -> bool:
    accesses = tiny(random.Random(seed))
    explained = brute(accesses)
    assert (check_register(accesses) is None) == explained, (seed, accesses)
    return explained


def test_it_agrees_with_brute_force() -> None:
    verdicts = [compare(seed) for seed in range(1_000)]
    assert 200 < sum(verdicts) < 800, "half of the histories or so must be broken"


@pytest.mark.slow
def test_it_agrees_with_brute_force_on_many_histories() -> None:
    for seed in range(1_000, 21_000):
        compare(seed)


# -- beside a second judge
#
# ``tests.l3_shard.linearizable`` searches for an order backwards from what is left to do and remembers where
# it was (Wing and Gong, with Lowe's memory); the shipped one walks forwards through begins and ends.  They
# share no line, so a mistake in one of them shows, also on histories that are too long for brute force.


def second(accesses: Sequence[Access]) -> bool:
    return linearizable([_as_operation(access) for access in accesses])


def _as_operation(access: Access) -> Op:
    def encoded(value: str | None) -> bytes | None:
        return None if value is None else value.encode()

    kinds: dict[Kind, Literal["read", "put", "cas"]] = {"read": "read", "write": "put", "cas": "cas"}
    returned = FOREVER if access.open or access.end is None else access.end
    return Op(
        kinds[access.kind],
        access.begin,
        returned,
        value=encoded(access.value),
        expected=encoded(access.expected),
        succeeded=access.ended == "ok",
        seen=encoded(access.saw),
    )


def played(draw: random.Random, count: int) -> list[Access]:
    """A register that takes each operation at a moment between its begin and its end; values are written
    once.  Then, mostly, somebody is told something else."""
    moments = sorted(draw.uniform(0.0, 10.0) for _ in range(count))
    value: str | None = None
    accesses: list[Access] = []
    for number, moment in enumerate(moments):
        begin, end = moment - draw.uniform(0.0, 1.5), moment + draw.uniform(0.0, 1.5)
        kinds: list[Kind] = ["read", "write", "cas"]
        kind = draw.choice(kinds)
        known = [access.value for access in accesses] or [None]
        if kind == "read":
            accesses.append(Access("read", begin, end, saw=value))
            continue
        new = f"v{number}"
        expected = (value if draw.random() < 0.7 else draw.choice(known)) if kind == "cas" else None
        takes = kind == "write" or expected == value
        ended: Ended = "unknown" if draw.random() < 0.15 else "ok" if takes else "mismatch"
        saw = value if ended == "mismatch" else None
        accesses.append(Access(kind, begin, None if ended == "unknown" else end, new, expected, ended, saw))
        if takes and (ended == "ok" or draw.random() < 0.5):
            value = new
    reads = [at for at, access in enumerate(accesses) if access.kind == "read"]
    if reads and draw.random() < 0.6:
        at = draw.choice(reads)
        told = draw.choice([None, *(access.value for access in accesses if access.kind != "read")])
        accesses[at] = replace(accesses[at], saw=told)
    return accesses


@pytest.mark.slow
def test_both_judges_agree_on_histories_that_brute_force_cannot_try() -> None:
    verdicts: set[bool] = set()
    for seed in range(400):
        accesses = played(random.Random(seed), 14)
        explained = check_register(accesses) is None
        assert second(accesses) == explained, (seed, accesses)
        verdicts.add(explained)
    assert verdicts == {True, False}


def test_both_judges_agree_on_tiny_histories() -> None:
    for seed in range(300):
        accesses = [access for access in tiny(random.Random(seed)) if access.saw != UNSEEN]
        assert second(accesses) == (check_register(accesses) is None), seed
