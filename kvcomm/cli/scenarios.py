"""``kvcomm chaos list``, ``show`` and ``run``: scenarios on real processes, and what came of them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvcomm.cli.options import JsonOption

if TYPE_CHECKING:
    from kvcomm.chaos.report import Report
    from kvcomm.chaos.scenario import Scenario

Backend = Literal["auto", "namespaces", "loopback", "simulator"]


def listing(as_json: JsonOption = False) -> None:
    """The scenarios that there are, with what each promises."""
    import msgspec

    from kvcomm.chaos.scenarios import SCENARIOS, listing

    if as_json:
        document = [
            {
                "name": name,
                "faults": scenario.faults,
                "promise": scenario.promise,
                "hold_s": SCENARIOS[name].hold_s,
                "skipped": scenario.skipped,
            }
            for name, scenario in listing()
        ]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
        return
    for name, scenario in listing():
        numbers = ", ".join(map(str, scenario.faults))
        note = f"\n    {scenario.skipped}" if scenario.skipped else ""
        sys.stdout.write(f"{name}  (fault {numbers}, {SCENARIOS[name].hold_s:g} s)\n")
        sys.stdout.write(f"    {scenario.promise}{note}\n")


def show(
    name: Annotated[str, typer.Argument(help="A scenario of the list.")],
    hold: Annotated[float | None, typer.Option(help="Seconds that its fault lasts.", min=0.1)] = None,
    seed: Annotated[int, typer.Option(help="For random-split.", min=0)] = 0,
) -> None:
    """Print a scenario as YAML: to change it, and run the file."""
    from kvcomm.chaos.scenario_file import written
    from kvcomm.chaos.scenarios import scenario_named

    sys.stdout.write(written(scenario_named(name, hold, seed)))


def run(
    names: Annotated[
        list[str], typer.Argument(help="Scenarios of the list, YAML files of your own, or 'all'.")
    ],
    backend: Annotated[
        Backend,
        typer.Option(
            help="namespaces: hosts that are network namespaces (root); loopback: processes that drop what "
            "they send each other; simulator: no processes at all; auto: namespaces where they can be made, "
            "else loopback."
        ),
    ] = "auto",
    hold: Annotated[float | None, typer.Option(help="Seconds that the fault lasts.", min=0.1)] = None,
    seed: Annotated[int, typer.Option(help="For what is drawn.", min=0)] = 0,
    repeat: Annotated[int, typer.Option(help="So often, each time with the next seed.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the reports (JSON) and pictures (PNG).")
    ] = None,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help="Leave logs and histories there, too.")
    ] = False,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance", help="Hurt this running cluster of yours instead of one made for it; see docs."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="You know what that costs the cluster's users.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run scenarios on a cluster of their own and judge them.  Exit code 1: a promise was broken."""
    from kvcomm.chaos.live.namespaces import missing
    from kvcomm.chaos.report import counted

    if instance is not None:
        _consent(instance, backend, yes)
        backend = "loopback"
    chosen = backend if backend != "auto" else "loopback" if missing() else "namespaces"
    if backend == "auto" and chosen == "loopback":
        sys.stderr.write(f"on loopback: {missing()}\n")
    reports: list[Report] = []
    for name in _named(names):
        for turn in range(repeat):
            scenario = _scenario(name, hold, seed + turn)
            with _ended_in_order():
                report = _run_one(scenario, chosen, seed + turn, out, keep_logs, instance)
            reports.append(report)
            if not as_json:
                sys.stdout.write(report.text() + "\n")
                sys.stdout.flush()
    if as_json:
        sys.stdout.write("[" + ",\n".join(report.encoded().decode() for report in reports) + "]\n")
    elif len(reports) > 1:
        sys.stdout.write(counted(reports) + "\n")
    if any(report.outcome == "failed" for report in reports):
        raise typer.Exit(1)


def _consent(instance: str, backend: str, yes: bool) -> None:
    """Raises ``Refused``."""
    from kvcomm.errors import ConfigError, Refused

    if backend not in ("auto", "loopback"):
        raise ConfigError(
            f"a running cluster is hurt by its drop tables, not by {backend}: leave --backend out"
        )
    if not yes:
        raise Refused(
            f"this cuts, pauses and kills nodes of {instance!r} while others use it, and its operators will"
            " see failures: say --yes if that is what you want"
        )


def summary(
    folder: Annotated[Path, typer.Argument(help="Where `run --out` left its reports.")],
) -> None:
    """The reports of a folder as a table, with the distribution of how long random splits took to heal."""
    import msgspec

    from kvcomm.chaos.report import Report
    from kvcomm.chaos.summary import summary_of
    from kvcomm.errors import ConfigError

    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(f"there are no reports in {folder}")
    try:
        reports = [msgspec.json.decode(path.read_bytes(), type=Report) for path in paths]
    except msgspec.DecodeError as error:
        raise ConfigError(f"not all files of {folder} are reports: {error}") from error
    sys.stdout.write(summary_of(reports))


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and a terminal that closes end it as Ctrl-C does: processes, namespaces and files go."""
    before = {
        number: signal.signal(number, lambda caught, _: sys.exit(128 + caught))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _named(names: list[str]) -> list[str]:
    from kvcomm.chaos.scenarios import SCENARIOS

    return [each for name in names for each in (SCENARIOS if name == "all" else [name])]


def _scenario(name: str, hold: float | None, seed: int) -> Scenario:
    """Raises ``ConfigError``."""
    from kvcomm.chaos.scenario_file import parse_scenario
    from kvcomm.chaos.scenarios import scenario_named
    from kvcomm.errors import ConfigError

    if not name.endswith((".yaml", ".yml")):
        return scenario_named(name, hold, seed)
    if hold is not None:
        raise ConfigError(f"--hold is for scenarios of the list; the steps of {name} have their own times")
    try:
        return parse_scenario(Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: no text, {error.reason} at byte {error.start}") from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _run_one(
    scenario: Scenario, backend: str, seed: int, out: Path | None, keep_logs: bool, instance: str | None
) -> Report:
    from kvcomm.chaos.live.story import tell
    from kvcomm.chaos.picture import draw_timeline

    place = None if out is None else out / f"{scenario.name}-{backend}-{seed}"

    def heard(line: str) -> None:
        sys.stderr.write(f"{scenario.name}: {line}\n")

    if backend == "simulator":
        from kvcomm.chaos.simulated import run_in_simulator

        report = run_in_simulator(scenario, seed)
    else:
        report = tell(scenario, backend, seed, heard, place if keep_logs else None, instance)
    if out is not None and place is not None:
        out.mkdir(parents=True, exist_ok=True)
        place.with_suffix(".json").write_bytes(report.encoded())
        if why := draw_timeline(report, place.with_suffix(".png")):
            heard(why)
    return report
