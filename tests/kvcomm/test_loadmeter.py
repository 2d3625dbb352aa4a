"""Rates from counters: literal times."""

from __future__ import annotations

import pytest

from kvcomm.loadmeter import Counted, LoadMeter, Rates, quantile
from kvcomm.metrics import Histogram


def seconds(*values: float) -> Histogram:
    histogram = Histogram((0.001, 0.01, 0.1))
    for value in values:
        histogram.observe(value)
    return histogram


def test_rates_are_those_since_the_look_before() -> None:
    meter = LoadMeter(now=10.0)
    histogram = seconds(*[0.0005] * 98, 0.05, 0.05)
    assert meter.look(Counted(histogram, 10, 4), 12.0) == Rates(50.0, 0.4, 0.1)
    histogram.observe(0.005)
    assert meter.look(Counted(histogram, 12, 6), 13.0) == Rates(1.0, 1.0, 0.01)
    assert meter.look(Counted(histogram, 12, 6), 14.0) == Rates()


def test_who_looks_often_sees_the_same_numbers() -> None:
    meter = LoadMeter(now=10.0, window_s=1.0)
    first = meter.look(Counted(seconds(0.005)), 11.0)
    assert meter.look(Counted(seconds(*[0.005] * 100)), 11.9) == first
    assert meter.look(Counted(seconds(*[0.005] * 101)), 12.0) == Rates(100.0, 0.0, 0.01)


@pytest.mark.parametrize(
    ("counts", "p99"),
    [
        ([0, 0, 0, 0], 0.0),
        ([1, 0, 0, 0], 0.001),
        ([99, 1, 0, 0], 0.001),
        ([98, 2, 0, 0], 0.01),
        ([0, 0, 0, 3], 0.1),
    ],
)
def test_quantiles_are_upper_bounds(counts: list[int], p99: float) -> None:
    assert quantile((0.001, 0.01, 0.1), counts, 0.99) == p99
