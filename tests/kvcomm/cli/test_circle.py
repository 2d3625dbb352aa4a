"""Stretches of the circle as operators write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.cli.circle import POINTS, parse_range, range_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0x0-0xffffffffffffffff", (0, POINTS - 1)),
        ("0%-100%", (0, POINTS - 1)),
        ("25%-50%", (POINTS // 4, POINTS // 2 - 1)),
        (" 0x40 - 0x7f ", (0x40, 0x7F)),
        ("0X4a-0x7F", (0x4A, 0x7F)),
        ("99.5%-100%", (POINTS * 199 // 200, POINTS - 1)),
    ],
)
def test_both_forms_are_read(text: str, expected: tuple[int, int]):
    assert parse_range(text) == expected


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=3, unique=True))
def test_neighbouring_percentages_neither_overlap_nor_leave_a_gap(cuts: list[int]):
    a, b, c = sorted(cuts)
    left, right = parse_range(f"{a / 10}%-{b / 10}%"), parse_range(f"{b / 10}%-{c / 10}%")
    assert left[1] + 1 == right[0]


@pytest.mark.parametrize(
    "text",
    ["", "5", "10%", "x-y", "0x5-0x4", "50%-50%", "50%-40%", "-5%-10%", "0%-101%", "nan%-5%",
     "0x0-0x10000000000000000", "10%-0x50", "25-50", "40-7f", "0x40-7f", "40-0x7f", "25-50%", "25%-50",
     "0x-0x5", "0x1_0-0x2_0"],
)  # fmt: skip
def test_everything_else_is_told_what_a_range_looks_like(text: str):
    with pytest.raises(ValueError, match=r"RANGE.*(0xFIRST-0xLAST.*FROM%-TO%|not between 0% and 100%)"):
        parse_range(text)


def test_a_range_is_shown_with_its_share():
    assert range_text(*parse_range("25%-50%")) == "0x4000000000000000-0x7fffffffffffffff (25 % of the circle)"
