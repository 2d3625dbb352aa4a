"""The checker against every order of tiny histories."""

import random
from itertools import combinations, permutations
from typing import Literal

from tests.l3_shard.linearizable import FOREVER, Op, linearizable


def explained(history: list[Op]) -> bool:
    """By trying everything."""
    certain = [op for op in history if op.returned < FOREVER]
    unknown = [op for op in history if op.returned == FOREVER]
    chosen = [certain + list(some) for n in range(len(unknown) + 1) for some in combinations(unknown, n)]
    return any(runs(order) for ops in chosen for order in permutations(ops))


def runs(order: tuple[Op, ...]) -> bool:
    state = None
    for at, op in enumerate(order):
        if any(later.returned < op.invoked for later in order[at + 1 :]):
            return False
        possible, state = op.apply(state)
        if not possible:
            return False
    return True


def some_history(draw: random.Random) -> list[Op]:
    values: list[bytes | None] = [None, *(b"%d" % number for number in range(3))]
    ops = []
    for number in range(draw.randint(1, 5)):
        invoked = draw.randint(0, 8)
        returned = FOREVER if draw.random() < 0.2 else invoked + draw.randint(0, 4)
        kinds: list[Literal["read", "put", "cas"]] = ["read", "put", "cas"]
        kind = draw.choice(kinds)
        ops.append(
            Op(
                kind,
                invoked,
                returned,
                value=b"%d" % number,
                expected=draw.choice(values),
                succeeded=draw.random() < 0.5,
                seen=draw.choice(values),
            )
        )
    return ops


def test_it_agrees_with_trying_everything():
    draw, answers = random.Random(5), set()
    for _ in range(1_500):
        history = some_history(draw)
        assert linearizable(history) == explained(history), history
        answers.add((len(history), linearizable(history)))
    assert {answer for size, answer in answers if size >= 3} == {True, False}


def test_a_stale_read_a_lost_write_and_a_write_done_twice_are_noticed():
    one, two = Op("put", 0, 1, b"1"), Op("put", 2, 3, b"2")
    assert linearizable([one, two, Op("read", 4, 5, seen=b"2")])
    assert not linearizable([one, two, Op("read", 4, 5, seen=b"1")])
    assert not linearizable([one, Op("read", 2, 3)])
    twice = [Op("read", 3, 4, seen=b"2"), Op("read", 5, 6, seen=b"1")]
    assert not linearizable([one, Op("put", 1.5, 2, b"2"), *twice])
