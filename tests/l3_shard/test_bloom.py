"""``LayeredBloom``: members are never absent, and the error rate holds while it grows."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError
from l3_shard.bloom import LayeredBloom


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def false_positives(bloom: LayeredBloom, first: int, count: int) -> int:
    return sum(key(number) in bloom for number in range(first, first + count))


def upper_bound(successes: int, trials: int, z: float = 2.576) -> float:
    """Wilson score bound: the rate is below it with a one-sided confidence of 99.5 %."""
    share, spread = successes / trials, z * z / trials
    root = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return (share + spread / 2 + root) / (1 + spread)


@given(st.lists(st.binary(max_size=40), max_size=200), st.integers(1, 16))
def test_a_member_is_never_absent(members, capacity):
    bloom = LayeredBloom(capacity)
    for count, member in enumerate(members):
        bloom.add(member)
        assert all(each in bloom for each in members[: count + 1])
    assert bloom.key_count <= len(set(members))


def test_adding_again_takes_no_room():
    bloom = LayeredBloom(100)
    for _ in range(3):
        for number in range(100):
            bloom.add(key(number))
    assert bloom.key_count <= 100
    assert bloom.layer_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("members", "layers"), [(2_000, 1), (14_000, 3), (62_000, 5)], ids=["at capacity", "7 times", "31 times"]
)
def test_the_error_rate_stays_below_its_bound(members, layers):
    bloom = LayeredBloom(2_000, 0.001)
    for number in range(members):
        bloom.add(key(number))
    assert bloom.layer_count == layers
    trials = 300_000
    wrong = false_positives(bloom, 10_000_000, trials)
    assert upper_bound(wrong, trials) < 0.001, f"{wrong} of {trials} absent keys were called present"


def test_the_rate_is_not_low_because_nothing_is_ever_called_present():
    """The measurement can see a bad filter: one plain layer, filled far over its capacity."""
    bloom = LayeredBloom(1_000, 0.001)
    bloom.add(key(0))
    bloom._room = 1_000_000  # never grow
    for number in range(8_000):
        bloom.add(key(number))
    assert false_positives(bloom, 10_000_000, 5_000) > 500


def test_it_is_the_same_in_every_process():
    script = (
        "from l3_shard.bloom import LayeredBloom\n"
        "bloom = LayeredBloom(8, 0.4)\n"
        "for number in range(40): bloom.add(b'member %d' % number)\n"
        "import sys\n"
        "sys.stdout.write(''.join(str(int(b'%d' % n in bloom)) for n in range(300)))\n"
    )
    answers = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        answers.append(
            subprocess.run(
                [sys.executable, "-c", script], env=environment, check=True, capture_output=True, timeout=30
            ).stdout
        )
    assert answers[0] == answers[1]
    assert b"0" in answers[0]
    assert b"1" in answers[0]


def test_beyond_its_bound_it_gives_up_and_is_never_wrong():
    bloom = LayeredBloom(4, keys_max=8)
    members = [key(number) for number in range(20)]
    for member in members:
        bloom.add(member)
    assert bloom.saturated
    assert bloom.size_bytes == 0
    assert all(member in bloom for member in members)
    assert key(999) in bloom


def test_its_size_is_as_documented():
    bloom = LayeredBloom(1_000, 0.001)
    for number in range(1_000 * 7):
        bloom.add(key(number))
    assert bloom.size_bytes / bloom.key_count < 4


def test_nonsense_is_refused():
    for capacity, rate in ((0, 0.001), (10, 0.0), (10, 1.0), (1 << 25, 0.001)):
        with pytest.raises(ConfigError, match="Bloom"):
            LayeredBloom(capacity, rate)
