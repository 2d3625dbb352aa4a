"""``kvcomm chaos``: try the shipped code against drawn faults."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Literal

import typer

from kvcomm.cli import scenarios

app = typer.Typer(help="Try the shipped code against faults.", no_args_is_help=True)


@app.callback()
def chaos() -> None:
    """Try the shipped code against faults."""


app.command("list")(scenarios.listing)
app.command("show")(scenarios.show)
app.command("run")(scenarios.run)
app.command("summary")(scenarios.summary)


@app.command("sim")
def sim(
    seeds: Annotated[int, typer.Option(help="How many worlds to try.", min=1)] = 100,
    first: Annotated[int, typer.Option(help="Seed of the first one.", min=0)] = 0,
    mode: Annotated[
        str, typer.Option(help="safety: nothing promised is broken; liveness: a healed core answers again.")
    ] = "safety",
    jobs: Annotated[int, typer.Option(help="Processes; 0 = one a core.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Try this seed alone.", min=0)] = None,
    workload: Annotated[
        Literal["mixed", "merging", "splits"],
        typer.Option(
            help="What clients do. mixed: eventual and strong records; merging: counters and sets; "
            "splits: ten splits of random shape a world, and how long each takes to heal."
        ),
    ] = "mixed",
    trace: Annotated[bool, typer.Option(help="Print the history of that seed as JSON lines.")] = False,
) -> None:
    """Run simulated clusters, each drawn from its seed.  Exit code 1: a promise was broken."""
    from kvcomm.chaos.campaign import Verdict, run_campaign, world_of
    from kvcomm.chaos.plan import Mode
    from kvcomm.chaos.simulation import simulate
    from kvcomm.chaos.splits import Splits

    if mode not in ("safety", "liveness"):
        raise typer.BadParameter(f"{mode!r} is neither safety nor liveness", param_hint="--mode")
    drawn: Mode = "safety" if mode == "safety" else "liveness"
    if trace and seed is not None:
        plan, clients = world_of(seed, drawn, workload)
        result = simulate(plan, workload=clients, splits=Splits() if workload == "splits" else None)
        sys.stdout.write(result.history.encoded().decode())

    def heard(verdict: Verdict) -> None:
        if verdict.violations:
            sys.stderr.write(verdict.report())

    chosen = range(first, first + seeds) if seed is None else [seed]
    summary = run_campaign(chosen, drawn, jobs or os.cpu_count() or 1, heard, workload)
    sys.stderr.write(f"{mode}: {summary.text()}\n")
    if summary.failed:
        raise typer.Exit(1)
