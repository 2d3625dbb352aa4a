"""How much is done, and when it will be."""

from __future__ import annotations

import pytest

from controller.progress import Progress


def test_nothing_is_known_at_first() -> None:
    progress = Progress()
    assert (progress.done_share, progress.eta_s(0.0)) == (0.0, -1.0)


def test_records_and_bytes_count_alike() -> None:
    progress = Progress()
    progress.saw(100, 1000, 0.0)
    assert progress.done_share == 0.0
    progress.saw(50, 1000, 10.0)
    assert progress.done_share == pytest.approx(0.25)
    assert progress.eta_s(10.0) == pytest.approx(30.0)
    progress.saw(0, 0, 20.0)
    assert progress.done_share == 1.0


def test_what_turns_out_to_be_more_begins_anew() -> None:
    progress = Progress()
    progress.saw(10, 0, 0.0)
    progress.saw(5, 0, 1.0)
    progress.saw(1000, 0, 2.0)
    assert progress.done_share == 0.0
    assert progress.eta_s(2.0) == -1.0


def test_the_pace_is_that_of_the_last_half_minute() -> None:
    progress = Progress()
    for second in range(100):
        progress.saw(10_000 - 10 * second, 0, float(second))
    for second in range(100, 160):
        progress.saw(9_000 - 100 * (second - 100), 0, float(second))
    assert progress.eta_s(159.0) == pytest.approx((9_000 - 5_900) / 100, rel=0.1)


def test_standing_still_has_no_end() -> None:
    progress = Progress()
    for second in range(40):
        progress.saw(10, 10, float(second))
    assert progress.eta_s(40.0) == -1.0
