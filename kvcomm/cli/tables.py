"""``open_console``: where commands print their tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

FILE_CELLS = 1000
"""Where stdout is no terminal: lines are for programs then, and none is broken."""


def open_console(*, highlight: bool = True) -> Console:
    """As wide as the terminal; else wide enough for every table."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else FILE_CELLS, highlight=highlight)
