"""Tables in a file: a line a row."""

from __future__ import annotations

import pytest
from rich.table import Table

from kvcomm.cli.tables import open_console


def test_no_row_is_broken_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    for column in ("what", "keys"):
        table.add_column(column)
    table.add_row("a shard gets " + "very " * 50 + "much", "3.1 %")
    open_console().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].split()[-3:] == ["much", "3.1", "%"]
