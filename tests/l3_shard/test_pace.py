"""A rate is kept, whatever the pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l3_shard.pace import Pace


def test_a_burst_is_free_and_a_debt_is_waited_for():
    pace = Pace(100.0, burst=50.0)
    pace.spend(50.0, 0.0)
    assert pace.wait_s(0.0) == 0.0
    pace.spend(200.0, 0.0)
    assert pace.wait_s(0.0) == 2.0 and pace.wait_s(1.5) == 0.5 and pace.wait_s(9.0) == 0.0
    pace.spend(60.0, 100.0)
    assert pace.wait_s(100.0) == pytest.approx(0.1), "what was not used before is not saved beyond the burst"


def test_impossible_paces_are_refused():
    for rate, burst in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="above 0"):
            Pace(rate, burst)


@given(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=50))
def test_never_more_than_the_rate_and_one_burst_and_one_piece(pieces):
    pace, now, spent = Pace(100.0, burst=50.0), 0.0, 0.0
    for piece in pieces:
        now += pace.wait_s(now)
        assert spent <= 100.0 * now + 50.0 + 1e-6
        pace.spend(piece, now)
        spent += piece
