"""A process that stood still, by literal times."""

from kvcomm.pulse import Pulse


def test_before_the_first_beat_nothing_is_known():
    assert Pulse().stood_still_s(1e9) == 0.0


def test_a_late_beat_is_told_once_and_a_slightly_late_one_never():
    pulse = Pulse(beat_s=0.25, still_s=1.0)
    pulse.beat(10.0)
    assert pulse.stood_still_s(10.2) == 0.0
    assert pulse.stood_still_s(11.25) == 0.0, "busy"
    assert pulse.stood_still_s(15.25) == 5.0
    assert pulse.stood_still_s(15.25) == 0.0
    pulse.beat(15.3)
    assert pulse.stood_still_s(15.6) == 0.0
