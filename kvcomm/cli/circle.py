"""Stretches of the ring's circle as a person writes them: ``0x40..-0x7f..`` or ``25%-50%``."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

POINTS = 1 << 64
"""Of the circle: ``l3_shard.ring.point_of`` maps keys to them, evenly."""
FORMS = "0xFIRST-0xLAST (64-bit points, both included) or FROM%-TO% of the circle, such as 25%-50%"
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]+")
"""With its ``0x``: ``25-50`` is a percentage whose sign was forgotten, not a stretch of 44 points."""


def parse_range(text: str) -> tuple[int, int]:
    """First and last point, both included.

    Raises:
        ValueError: it is no range; the text says what one looks like.
    """
    first, dash, last = text.strip().partition("-")
    if not dash:
        raise ValueError(f"RANGE is {text!r}, but should be {FORMS}")
    if first.strip().endswith("%") and last.strip().endswith("%"):
        begin, end = _point(first, text), _point(last, text) - 1
    else:
        begin, end = _number(first, text), _number(last, text)
    if not 0 <= begin <= end < POINTS:
        raise ValueError(f"RANGE {text!r} is empty, or not on the circle: {FORMS}")
    return begin, end


def range_text(first: int, last: int) -> str:
    """For a person."""
    share = (last - first + 1) / POINTS
    return f"{first:#018x}-{last:#018x} ({100 * share:.3g} % of the circle)"


def _point(text: str, whole: str) -> int:
    try:
        percent = Decimal(text.strip().removesuffix("%"))
    except InvalidOperation as error:
        raise ValueError(f"RANGE is {whole!r}, but should be {FORMS}") from error
    if not percent.is_finite() or not 0 <= percent <= 100:
        raise ValueError(f"RANGE {whole!r}: {text} is not between 0% and 100%")
    return int(percent * POINTS / 100)


def _number(text: str, whole: str) -> int:
    if not _HEXADECIMAL.fullmatch(text.strip()):
        raise ValueError(f"RANGE is {whole!r}, but should be {FORMS}")
    return int(text, 16)
