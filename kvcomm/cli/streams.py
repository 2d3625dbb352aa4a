"""``kvcomm streams``: look at what streams have left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm.cli.options import JsonOption
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from kvcomm.streams.timeline import Happening, Stretch, Timeline

app = typer.Typer(help="Look at compacted rollouts.", no_args_is_help=True)

BAR_CELLS = 24
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SIGNS = {"evict": "✂", "restore": "↩", "fork": "⑂", "weights": "⟳"}
_RUNS_SHOWN = 4


@app.callback()
def streams() -> None:
    """Look at compacted rollouts."""


@app.command("inspect")
def inspect(
    file: Annotated[
        Path, typer.Argument(help="Rollouts, binary or lines of JSON.", exists=True, dir_okay=False)
    ],
    rollout: Annotated[
        int | None, typer.Option(help="Only this one of the file, counted from 0.", min=0)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what rollouts went through: rows, events, live slots.  Exit code 1 if one of them is damaged."""
    found, damage = _read(file, rollout)
    if rollout is not None and not found and not damage:
        raise typer.BadParameter(f"{file.name} has no rollout {rollout}", param_hint="--rollout")
    if as_json:
        _write_json(file, found, damage)
    else:
        _show(file, found, damage, alone=rollout is not None or len(found) == 1)
    raise typer.Exit(int(bool(damage) or any(each.damage for each in found.values())))


def _read(file: Path, wanted: int | None) -> tuple[dict[int, Timeline], str]:
    """(rollouts by their place, why the file could not be read to its end).  Nothing is read behind the
    ``wanted`` one."""
    from kvcomm.errors import KVCommError
    from kvcomm.streams.rollout_file import read_records
    from kvcomm.streams.timeline import timeline

    found: dict[int, Timeline] = {}
    count = 0
    with file.open("rb") as opened:
        try:
            for record in read_records(opened):
                if wanted in (None, count):
                    found[count] = timeline(record)
                if wanted == count:
                    break
                count += 1
        except KVCommError as error:
            return found, f"rollout {count}: {error.message}"
    return found, ""


def _write_json(file: Path, found: dict[int, Timeline], damage: str) -> None:
    import msgspec

    rollouts = [{"rollout": index, **_tree(each)} for index, each in found.items()]
    document = {"file": str(file), "rollouts": rollouts, "damage": damage}
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")


def _tree(told: Timeline) -> dict[str, Any]:
    import msgspec

    tree: dict[str, Any] = msgspec.to_builtins(told)
    return tree | {
        "weights": told.weights,
        "rows": told.row_counts(),
        "live_max": told.live_max,
        "live_after": told.live_after,
    }


def _show(file: Path, found: dict[int, Timeline], damage: str, *, alone: bool) -> None:

    console = open_console(highlight=False)
    if alone:
        for each in found.values():
            for line in _head(each):
                console.print(_shown(line), soft_wrap=True)
            console.print(_timeline_table(each))
            console.print(f"[bold red]damaged:[/] {_shown(each.damage)}" if each.damage else "sound")
    elif found:
        console.print(_summary_table(found))
        console.print("one of them: --rollout N", style="dim")
    elif not damage:
        console.print(f"{_shown(str(file))} is empty")
    if damage:
        console.print(f"[bold red]damaged:[/] {_shown(damage)}")


def _shown(text: str) -> str:
    """What a file says, as text: no markup, and nothing that a terminal obeys."""
    from rich.markup import escape

    return escape("".join(each if each.isprintable() else ascii(each)[1:-1] for each in text))


def _head(told: Timeline) -> Iterator[str]:
    rows = told.row_counts()
    yield f"rollout {told.name}"
    yield (
        f"  {told.row_count} rows in blocks of {told.block_tokens}: {rows['text']} text, "
        f"{rows['sampled']} sampled, {rows['filler']} filler"
        + (f", {rows['repeated']} repeated" if rows["repeated"] else "")
    )
    yield f"  {told.event_count} events; live slots at most {told.live_max}, at the end {told.live_after}"
    yield f"  {_samples_text(told)}"
    if len(told.weights) > 1:
        yield "  weights " + ", ".join(f"{version} from row {row}" for row, version in told.weights)
    yield f"  namespace {told.namespace[:12]}"


def _samples_text(told: Timeline) -> str:
    if told.mean_logprob is None:
        return "no samples"
    ways = ", ".join(_way(*each) for each in told.samplings)
    return (
        f"{told.sample_count} samples, {told.loss_count} with loss, mean log probability "
        f"{told.mean_logprob:.3f}; {ways}"
    )


def _way(temperature: float, top_k: int, top_p: float) -> str:
    more = [f"top-k {top_k}"] * (top_k > 0) + [f"top-p {top_p:g}"] * (top_p < 1)
    return " ".join(["greedy" if temperature == 0 else f"temperature {temperature:g}", *more])


def _timeline_table(told: Timeline) -> Any:
    from rich.table import Table

    from kvcomm.streams.timeline import Stretch

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("row", justify="right")
    table.add_column("what", ratio=1)
    table.add_column("live", justify="right")
    table.add_column("", width=BAR_CELLS, no_wrap=True)
    for entry in told.entries:
        bar = _bar(entry.live_after, told.live_max)
        if isinstance(entry, Stretch):
            table.add_row(str(entry.first_row), _shown(_fed_text(entry)), str(entry.live_after), bar)
        else:
            text = _shown(_event_text(entry))
            table.add_row(str(entry.at_row), f"[yellow]{text}[/]", str(entry.live_after), f"[yellow]{bar}[/]")
    return table


def _fed_text(entry: Stretch) -> str:
    counts = (
        (entry.text_count, "text"),
        (entry.sampled_count, "sampled"),
        (entry.filler_count, "filler"),
        (entry.repeated_count, "repeated"),
    )
    text = ", ".join(f"{count} {name}" for count, name in counts if count)
    turns = entry.completion_count
    return f"+ {text}" + (f" in {turns} turns" if turns > 1 else "")


def _event_text(entry: Happening) -> str:
    sign = _SIGNS[entry.kind]
    why = f" ({entry.reason})" if entry.reason and entry.reason != entry.kind else ""
    if entry.kind == "weights":
        return f"{sign} weights {entry.weights_version}{why}"
    if entry.kind == "fork":
        return f"{sign} fork of {entry.span[:12]}{why}"
    parts = [f"{sign} {entry.kind}{why} {entry.row_count} rows", _spans("rows", entry.rows)]
    if entry.kind == "restore":
        parts.append(f"at slot {entry.insert_at}")
    else:
        cut = tuple((start, end - start) for start, end in entry.ranges)
        parts += [_spans("slots", cut)] + [f"archived as {entry.span[:12]}"] * bool(entry.span)
    return " · ".join(parts)


def _spans(name: str, runs: tuple[tuple[int, int], ...]) -> str:
    shown = [f"{first}-{first + count - 1}" for first, count in runs[:_RUNS_SHOWN]]
    return " ".join([name, *shown, *["..."] * (len(runs) > _RUNS_SHOWN)])


def _bar(count: int, most: int) -> str:
    eighths = round(8 * BAR_CELLS * count / most) if most else 0
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _summary_table(found: dict[int, Timeline]) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("", "rollout", "rows", "sampled", "events", "live", "mean logp", ""):
        table.add_column(column, justify="left" if column == "rollout" else "right")
    for index, each in found.items():
        mean = "-" if each.mean_logprob is None else f"{each.mean_logprob:.3f}"
        table.add_row(
            str(index), _shown(each.name), str(each.row_count), str(each.sample_count), str(each.event_count),
            str(each.live_after), mean, "[bold red]damaged[/]" if each.damage else "",
        )  # fmt: skip
    return table
