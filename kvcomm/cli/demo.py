"""``kvcomm demo``: three agents share the KV of a real model."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvcomm.cli.options import JsonOption
from kvcomm.config import TRANSPORTS


def demo(
    as_json: JsonOption = False,
    corrupt: Annotated[
        bool, typer.Option("--corrupt", help="Damage every stored copy on the way: readers must notice.")
    ] = False,
    context_tokens: Annotated[int, typer.Option(help="Tokens of the shared text.", min=64, max=7000)] = 1600,
    new_tokens: Annotated[int, typer.Option(help="Tokens that each agent writes.", min=1, max=512)] = 24,
    model: Annotated[
        Path | None, typer.Option(help="Folder of a Hugging Face model, instead of SmolLM2-135M.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration of the demo's cluster.")
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help=f"Only way into the pool's memory, of {', '.join(TRANSPORTS)}; fails if unused."),
    ] = None,
) -> None:
    """Three agents share a context: one computes it, the others fetch it, also after the pool was killed.

    Starts a cluster of its own.  Progress goes to standard error.  Exit code 1 if any text differs from what
    the agent computes alone.
    """
    from kvcomm.demo.story import Options, tell
    from kvcomm.errors import ConfigError

    missing = [name for name in ("torch", "transformers", "gguf") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'kvcomm[demo]', or make demo")
    if transport is not None and transport not in TRANSPORTS:
        raise ConfigError(f"--transport {transport} is none of {', '.join(TRANSPORTS)}")
    report = tell(Options(context_tokens, new_tokens, corrupt, model, config, transport), _say)
    if as_json:
        sys.stdout.write(json.dumps(report.document()) + "\n")
    else:
        from rich.console import Console

        report.show(Console(width=None if sys.stdout.isatty() else 120))
    raise typer.Exit(1 if report.problems() else 0)


def _say(text: str) -> None:
    sys.stderr.write(f"kvcomm demo: {text}\n")
    sys.stderr.flush()
