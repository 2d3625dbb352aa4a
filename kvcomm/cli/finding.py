"""``Finding``: one thing that ``kvcomm doctor`` looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What it is, how it is, and what to do about it."""

    subject: str
    verdict: Literal["ok", "note", "problem"]
    text: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs (``--json``), where there is more to say than the text."""
