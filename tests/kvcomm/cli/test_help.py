"""The help of every command is shown as it was written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import typer.main
from rich.markup import render

from kvcomm.cli.app import app


def helps(command: object, path: str = "kvcomm") -> Iterator[tuple[str, str]]:
    """Of a command, its parameters and those below it."""
    yield path, getattr(command, "help", None) or ""
    for parameter in getattr(command, "params", ()):
        yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from helps(below, f"{path} {name}")


@pytest.mark.parametrize(
    ("where", "text"), [pytest.param(*each, id=each[0]) for each in helps(typer.main.get_command(app))]
)
def test_no_word_in_brackets_is_swallowed(where: str, text: str):
    assert render(text).plain == text.replace("\\[", "[")
