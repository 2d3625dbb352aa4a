"""``kvcomm chaos``: try the shipped code against drawn faults."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvcomm.chaos.simulation import Result

app = typer.Typer(help="Try the shipped code against faults.", no_args_is_help=True)
SHOWN_MAX = 5
"""Violations of one seed that are printed."""


@app.callback()
def chaos() -> None:
    """Try the shipped code against faults."""


@app.command("sim")
def sim(
    seeds: Annotated[int, typer.Option(help="How many worlds to try.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="Seed of the first one.", min=0)] = 0,
    mode: Annotated[
        str, typer.Option(help="safety: nothing promised is broken; liveness: a healed core answers again.")
    ] = "safety",
    seed: Annotated[int | None, typer.Option(help="Try this seed alone.", min=0)] = None,
    trace: Annotated[bool, typer.Option(help="Print the history of that seed as JSON lines.")] = False,
) -> None:
    """Run simulated clusters, each drawn from its seed.  Exit code 1: a promise was broken."""
    from kvcomm.chaos.simulation import simulate
    from kvcomm.chaos.swarm import draw_plan

    if mode not in ("safety", "liveness"):
        raise typer.BadParameter(f"{mode!r} is neither safety nor liveness", param_hint="--mode")
    chosen = range(first, first + seeds) if seed is None else [seed]
    begin, simulated_s, failed = time.process_time(), 0.0, 0
    for number in chosen:
        result = simulate(draw_plan(number, "safety" if mode == "safety" else "liveness"))
        simulated_s += result.simulated_s
        failed += bool(result.violations)
        if trace and seed is not None:
            sys.stdout.write(result.history.encoded().decode())
        if result.violations:
            _report(number, mode, result)
    took_s = max(1e-9, time.process_time() - begin)
    sys.stderr.write(
        f"{len(chosen)} worlds, {simulated_s:.0f} simulated seconds in {took_s:.1f} CPU seconds "
        f"({simulated_s / took_s:.0f} to 1): {failed} broke a promise\n"
    )
    if failed:
        raise typer.Exit(1)


def _report(seed: int, mode: str, result: Result) -> None:
    sys.stderr.write(f"seed {seed}: {len(result.violations)} violations\n")
    for violation in result.violations[:SHOWN_MAX]:
        sys.stderr.write(f"  {violation.promise}: {violation.text}\n")
    sys.stderr.write(f"  world: {json.dumps(result.plan.describe(), sort_keys=True)}\n")
    sys.stderr.write(f"  again: kvcomm chaos sim --mode {mode} --seed {seed} --trace\n")
