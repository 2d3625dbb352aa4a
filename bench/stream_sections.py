"""``Recorded``: what one machine measured of KV-streams; JSON for the record, Markdown for
``docs/benchmarks.md``, lines for the picture of step times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import msgspec

from bench.arms import Arm, Race, Run
from bench.report import number
from bench.sections import slug
from bench.timing import Spread

STEP_TURNS = 3
STREAMS_FILE = "streams.json"
STEPS_FILE = "plots/steps-{}.svg"
"""Beside ``docs/benchmarks.md``; drawn by ``bench.plots``."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a replay's log probabilities lie from those of the generation, over the tokens that were drawn
    behind the first event."""

    what: str
    tokens: int
    k3: float
    """Mean of exp(x) - x - 1, x = replay's less generation's log probability of the token drawn."""
    kl: float
    """Mean of the exact KL(generation || replay)."""
    kl_worst: float
    """Of one token."""
    kl_behind_events: float
    """Mean over the first three tokens behind each event."""
    logprob_gap_max: float


@dataclass(slots=True)
class Recorded:
    """What one machine measured."""

    machine: str
    described: str
    model: str
    device: str
    dtype: str
    races: list[Race] = field(default_factory=list)
    """Several of one text and the same arms are rounds."""
    gaps: list[Gap] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def to_json(found: Sequence[Recorded]) -> bytes:
    """As JSON; ``from_json`` is the inverse."""
    return msgspec.json.encode(list(found)).replace(b'{"arm"', b'\n{"arm"') + b"\n"


def from_json(text: bytes) -> list[Recorded]:
    """Raises ``msgspec.ValidationError`` if the text does not hold such records."""
    return msgspec.json.decode(text, type=list[Recorded])


def tables(found: Sequence[Recorded]) -> str:
    """Everything as Markdown."""
    parts: list[str] = []
    for each in found:
        parts += [f"### Rollouts: {each.machine}", each.described]
        parts += [f"Model: {each.model}; {each.dtype}."]
        parts += [races_table(each.races)]
        if longest(each.races):
            parts += [f"![Step time over length]({STEPS_FILE.format(slug(each.machine))})"]
        if each.gaps:
            parts += [gaps_table(each.gaps)]
        parts += each.notes
    return "\n\n".join(parts)


def rounds_of(races: Sequence[Race]) -> Iterator[list[Race]]:
    """Races of one text and the same arms together, in the order of their first."""
    keys = [(race.text, race.streams, tuple(run.arm for run in race.runs)) for race in races]
    order = list(dict.fromkeys(keys))
    together = sorted(zip(keys, races, strict=True), key=lambda pair: order.index(pair[0]))
    for _, group in groupby(together, key=lambda pair: pair[0]):
        yield [race for _, race in group]


def races_table(races: Sequence[Race]) -> str:
    """An arm a line; ratios are to the KV-streams arm that cuts alike, in the same round."""
    lines = [
        "| rollout | way | cuts | prefilled tokens | prefill, s | × KV-streams | all, s | × KV-streams | "
        "one cut, ms | × KV-streams | a step, ms: first cut → end | K/V held, tokens |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for rounds in rounds_of(races):
        for at, run in enumerate(rounds[0].runs):
            runs = [race.runs[at] for race in rounds]
            floors = [baseline(race, run.arm) for race in rounds]
            cells = [described(rounds[0]) if not at else "", run.arm.name, *_cells(runs, floors)]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def described(race: Race) -> str:
    """The rollout of a table's line."""
    text = race.text
    streams = f"{race.streams} × " if race.streams > 1 else ""
    return f"{streams}{race.turns_run} turns of {text.read:,} + {text.written:,}"


def baseline(race: Race, arm: Arm) -> Run:
    """The run that an arm is held against."""
    found = race.run_of("splice", arm.live, arm.stride)
    assert found is not None, "every race has an arm that splices for each way to cut"
    return found


def cut_ratio(runs: Sequence[Run], floors: Sequence[Run]) -> Spread | None:
    """What a cut takes, over what KV-streams take for that of the same turn and round."""
    pairs = [
        (seconds, floor.cuts[turn])
        for run, floor in zip(runs, floors, strict=True)
        for turn, seconds in run.cuts.items()
        if turn in floor.cuts
    ]
    return Spread.of([mine / theirs for mine, theirs in pairs]) if pairs else None


def gaps_table(gaps: Sequence[Gap]) -> str:
    """A replay a line."""
    lines = [
        "| replay | tokens | k3, mean | KL, mean | KL, worst token | first 3 behind an event | largest "
        "difference of a log probability |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gap in gaps:
        figures = (gap.k3, gap.kl, gap.kl_worst, gap.kl_behind_events, gap.logprob_gap_max)
        lines.append(
            f"| {gap.what} | {gap.tokens:,} | " + " | ".join(f"{each:.2g}" for each in figures) + " |"
        )
    return "\n".join(lines)


def longest(races: Sequence[Race]) -> Race | None:
    """Whose steps are drawn."""
    return max(races, key=lambda race: race.runs[0].turns[-1].rows, default=None)


def steps(run: Run) -> list[tuple[int, float]]:
    """(rows of the text, milliseconds of a decode step) by turn."""
    return [(turn.rows, 1e3 * turn.step_s) for turn in run.turns if turn.written.tokens]


def _cells(runs: Sequence[Run], floors: Sequence[Run]) -> list[str]:
    first, pairs = runs[0], list(zip(runs, floors, strict=True))
    itself = first is floors[0]
    cuts = [seconds for run in runs for seconds in run.cuts.values()]
    ratio = None if itself else cut_ratio(runs, floors)
    return [
        str(len(first.cuts)),
        f"{first.prefilled_tokens:,}",
        number(Spread.of([run.prefill_s for run in runs]).median),
        "" if itself else _ratio([(run.prefill_s, floor.prefill_s) for run, floor in pairs]),
        number(Spread.of([run.total_s for run in runs]).median),
        "" if itself else _ratio([(run.total_s, floor.total_s) for run, floor in pairs]),
        number(1e3 * Spread.of(cuts).median) if cuts else "",
        number(ratio.median) if ratio else "",
        _steps_over_length(runs, min(floors[0].cuts, default=1)),
        f"{first.held_tokens_max:,}",
    ]


def _steps_over_length(runs: Sequence[Run], first: int) -> str:
    """Medians of the ``STEP_TURNS`` turns from ``first`` on, and of the last ones, over all rounds."""
    begin, end = (
        Spread.of([step_ms for run in runs for _, step_ms in steps(run)[part]]).median
        for part in (slice(first - 1, first - 1 + STEP_TURNS), slice(-STEP_TURNS, None))
    )
    return f"{number(begin)} → {number(end)}"


def _ratio(pairs: Sequence[tuple[float, float]]) -> str:
    spread = Spread.of([mine / theirs for mine, theirs in pairs])
    if len(pairs) < 2:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.p10)} – {number(spread.p90)})"
