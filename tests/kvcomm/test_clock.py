"""The hybrid clock: causality, nearness to the wall clock, and the refusal of wild stamps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.clock import MILLISECONDS_MAX, ClockDrift, HybridClock, Stamp, pack, unpack

milliseconds = st.integers(0, MILLISECONDS_MAX)


@given(milliseconds, st.integers(0, 65_535))
def test_pack_and_unpack_are_inverse(ms, counter):
    assert unpack(pack(ms, counter)) == (ms, counter)
    assert pack(ms, counter) < 2**64


@given(milliseconds, st.integers(0, 65_535), milliseconds, st.integers(0, 65_535))
def test_stamps_order_like_pairs(ms, counter, other_ms, other_counter):
    assert (pack(ms, counter) < pack(other_ms, other_counter)) == ((ms, counter) < (other_ms, other_counter))


@pytest.mark.parametrize(("ms", "counter"), [(-1, 0), (MILLISECONDS_MAX + 1, 0), (0, -1), (0, 65_536)])
def test_what_does_not_fit_is_refused(ms, counter):
    with pytest.raises(ValueError, match="48 bits"):
        pack(ms, counter)


steps = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(-50, 50)),
    max_size=60,
)


@given(steps)
def test_causality_and_bounded_drift(moves):
    """Processes with skewed clocks send each other stamps: every effect is stamped after its cause, and no
    stamp is ahead of the fastest wall clock by more than the ticks made."""
    clocks = [HybridClock() for _ in range(3)]
    skew = [0, 40, -40]
    wall = 1_000
    for ticks, (sender, receiver, step) in enumerate(moves, start=1):
        wall += max(step, 0)
        sent = clocks[sender].tick(wall + skew[sender])
        clocks[receiver].observe(sent, wall + skew[receiver])
        received = clocks[receiver].tick(wall + skew[receiver])
        assert received > sent
        ahead_ms = unpack(received)[0] - (wall + max(skew))
        assert ahead_ms <= 0 and unpack(received)[1] <= 2 * ticks


def test_a_wall_clock_set_back_keeps_stamps_growing():
    clock = HybridClock()
    before = clock.tick(1_000_000)
    assert clock.tick(5) == before + 1


def test_a_full_counter_carries_into_the_milliseconds():
    clock = HybridClock(pack(1_000, 65_535))
    assert unpack(clock.tick(1_000)) == (1_001, 0)


def test_a_stamp_too_far_ahead_is_refused_and_not_followed():
    clock = HybridClock(Stamp(7), drift_ms_max=1_000)
    with pytest.raises(ClockDrift, match="1001 ms ahead"):
        clock.observe(pack(2_001), 1_000)
    assert clock.last == 7
    clock.observe(pack(2_000), 1_000)
    assert clock.last == pack(2_000)
