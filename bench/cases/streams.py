"""A context made shorter: cutting blocks out of it, beside reading what is kept again.

The schedule of the KV-streams paper (10 turns in view, 5 go at once, 32 turns of 96 + 32 tokens) on a small
random model; ``python -m bench.streams`` runs the others, and in several rounds.
"""

from __future__ import annotations

import importlib.util

from bench.arms import NAMES, Race, Run
from bench.report import Report, Row
from bench.scale import SMOKE, Scale
from bench.stream_sections import baseline, cut_ratio, described
from bench.timing import Spread

CUT_TIMES_MIN = 100.0
"""A cut moves numbers about; reading again computes."""


def run(scale: Scale) -> Report:
    report = Report("streams", "A context made shorter")
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent:
        report.skip("cutting a context", f"{' and '.join(absent)} not installed")
        return report
    from bench.streams import SCHEDULES, SMOKE_SCHEDULES, model_name, run, small_model

    model = small_model(tiny=scale is SMOKE)
    schedule = SMOKE_SCHEDULES[0] if scale is SMOKE else SCHEDULES[0]
    _tell(report, run(model, schedule))
    report.notes.append(f"Model: {model_name(model)}, float32, one stream, one thread.")
    return report


def _tell(report: Report, race: Race) -> None:
    size = f"{described(race)} tokens"
    for each in race.runs:
        floor = baseline(race, each.arm)
        ratio = None if each is floor else cut_ratio([each], [floor])
        if each.cuts:
            cuts = Spread.of(list(each.cuts.values())).scaled(1e6)
            base = "" if ratio is None else floor.arm.name
            report.rows.append(Row(f"one cut, {each.arm.name}", size, cuts, base, ratio))
        if ratio is not None:
            what = f"one cut: {NAMES[each.arm.way]} over KV-streams"
            report.claim(what, ">=", CUT_TIMES_MIN, "x faster", ratio)
        report.rows.append(_decoding(each, size))
        report.notes.append(
            f"{each.arm.name}: {each.prefilled_tokens:,} tokens prefilled, {each.prefill_s:.2f} s of "
            f"{each.total_s:.2f} s."
        )


def _decoding(run: Run, size: str) -> Row:
    steps = [turn.step_s for turn in run.turns if turn.written.tokens]
    return Row(f"a decode step, {run.arm.name}", size, Spread.of(steps).scaled(1e6))
