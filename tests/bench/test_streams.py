"""What is made of races: tables, pictures, records; and the GPU's script, in small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import streams
from bench.arms import Arm, Part, Race, Run, Text, Turn
from bench.gpu_streams import first_behind, late, one_block_off
from bench.plots import step_lines
from bench.stream_sections import (
    Gap,
    Recorded,
    baseline,
    cut_ratio,
    from_json,
    longest,
    rounds_of,
    tables,
    to_json,
)
from bench.streams import SMOKE_SCHEDULES, blocks_for
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace

ROOT = Path(__file__).parents[2]
TEXT = Text(turns=2, read=32, written=16, system=16)
NONE = Part(0.0, 0)


def raced(splice_cut_s: float, again_cut_s: float, *, text: Text = TEXT) -> Race:
    def of(arm: Arm, cut: Part | None, held: int) -> Run:
        first = Turn(16, 16, None, Part(0.5, 16), NONE, 0.0, 16)
        turns = [
            Turn(16 + 48 * n, 64, cut if n == 2 else None, Part(1.0, 32), Part(2.0, 16), 0.125 * n, held)
            for n in (1, 2)
        ]
        return Run(arm, [first, *turns])

    return Race(
        text, 1,
        [
            of(Arm("splice", 1, 1), Part(splice_cut_s, 0), 64),
            of(Arm("again", 1, 1), Part(again_cut_s, 16), 64),
            of(Arm("never"), None, 112),
        ],
    )  # fmt: skip


def recorded() -> Recorded:
    gap = Gap("with its events", 96, 1e-4, 2e-4, 3e-4, 4e-4, 0.5)
    return Recorded("a machine", "quiet", "a model", "cpu", "float32", [raced(0.001, 0.5)], [gap], ["Noted."])


def test_records_survive_json():
    assert from_json(to_json([recorded()])) == [recorded()]


def test_a_run_counts_what_its_turns_did():
    splice, again, never = raced(0.25, 0.5).runs
    assert (splice.prefilled_tokens, again.prefilled_tokens) == (80, 96)
    assert (splice.prefill_s, again.prefill_s, never.prefill_s) == (2.75, 3.0, 2.5)
    assert (splice.total_s, splice.cuts, never.cuts) == (6.75, {2: 0.25}, {})
    assert never.held_tokens_max == 112


def test_cuts_are_compared_turn_by_turn():
    rounds = [raced(0.001, 0.5), raced(0.002, 0.5), raced(0.001, 0.4)]
    ratio = cut_ratio([race.runs[1] for race in rounds], [race.runs[0] for race in rounds])
    assert ratio is not None and (ratio.p10, ratio.median, ratio.p90) == (250, 400, 500)
    assert cut_ratio([rounds[0].runs[2]], [rounds[0].runs[0]]) is None, "what never cuts has no ratio"


def test_an_arm_is_held_against_the_one_that_cuts_alike():
    turns = raced(0.1, 0.2).runs[0].turns
    runs = [Run(arm, turns) for arm in (Arm("splice", 8, 4), Arm("splice", 8, 1), Arm("again", 8, 1))]
    race = Race(TEXT, 1, runs)
    assert baseline(race, runs[2].arm) is runs[1]
    assert baseline(race, Arm("never")) is runs[0]


def test_races_of_one_kind_are_rounds():
    other = raced(0.1, 0.2, text=Text(2, 48, 16, system=16))
    found = list(rounds_of([raced(0.001, 0.5), other, raced(0.002, 0.5)]))
    assert [len(rounds) for rounds in found] == [2, 1] and found[1] == [other]


def test_tables_say_everything():
    text = tables([recorded()])
    assert "| 2 turns of 32 + 16 | KV-streams, 1/1 | 1 | 80 |" in text
    assert "| re-prefill, 1/1 | 1 | 96 | 3 | 1.2 | 7 | 1.08 | 500 | 500 | 250 → 188 | 64 |" in text
    assert "| with its events | 96 | 0.0001 | 0.0002 | 0.0003 | 0.0004 | 0.5 |" in text
    assert "plots/steps-a-machine.svg" in text and "Noted." in text


def test_steps_are_drawn_of_the_longest_text():
    short, long = raced(1, 1), raced(1, 1, text=Text(2, 48, 16, system=16))
    long.runs[0].turns.append(Turn(200, 64, None, NONE, Part(1.0, 16), 0.5, 64))
    assert longest([short, long]) is long and longest([]) is None
    splice, again, never = step_lines(short)
    assert splice.bold and not again.bold and never.dashed
    assert (splice.sizes, splice.values) == ([64, 112], [125.0, 250.0]), "the system prompt has no step"


def cut_rollout() -> Rollout:
    session = Session(BlockPool(9), namespace(block_tokens=16, vocab_size=100), rows_max=200)
    for count in (64, 8, 8):
        session.commit(session.plan([7] * count))
        if session.next_row < 80:
            session.evict([(16, 32)], reason="turns")
    samples = [Sample(row, 7, -1.0, Sampling()) for row in (62, 64, 66, 68, 70, 73, 79)]
    return Rollout.sealed("r", session.namespace.id, 16, session.tokens, session.events, samples)


def test_a_late_event_is_one_row_late_and_fits_its_log():
    rollout = cut_rollout()
    assert [event.at_row for event in rollout.events] == [64, 72]
    wrong = late(rollout)
    assert [event.at_row for event in wrong.events] == [65, 73]
    before, after = rollout.visibility(), wrong.visibility()
    assert before.intervals[16] == ((16, 64),) and after.intervals[16] == ((16, 65),)
    off = one_block_off(rollout).visibility()
    assert off.intervals[16] == ((16, 80),) and off.intervals[47] == ((47, 64),)


def test_the_first_samples_behind_each_event():
    rollout = cut_rollout()
    assert first_behind(rollout, rollout.events, 2) == [1, 2, 5, 6]


def test_memory_is_for_the_turns_in_view():
    arm, text = Arm("again", 2, 1), Text(turns=8, read=32, written=16, system=16)
    assert blocks_for(arm, text, streams=3) == 3 * (1 + 2 * 3 + 1)
    assert blocks_for(Arm("never"), text, streams=1) == 1 + 8 * 3 + 1


@pytest.mark.slow
def test_a_race_on_a_model_forces_the_same_text_on_every_arm():
    pytest.importorskip("transformers", reason="arms run a transformers model")
    model = streams.small_model(tiny=True)
    schedule = SMOKE_SCHEDULES[1]
    found = streams.run(model, schedule, streams=2)
    assert found.turns_run == schedule.text.turns
    splice, again, kept, never = found.runs
    assert splice.prefilled_tokens == never.prefilled_tokens < kept.prefilled_tokens < again.prefilled_tokens
    assert all(turn.step_s > 0 for run in found.runs for turn in run.turns[1:])


@pytest.mark.slow
@pytest.mark.processes
def test_the_gpus_script_runs_on_a_cpu_in_small(tmp_path: Path):
    pytest.importorskip("transformers", reason="arms run a transformers model")
    command = [sys.executable, "-m", "bench.gpu_streams", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = from_json((tmp_path / "streams.json").read_bytes())
    assert not found.notes and found.races[0].turns_run == 5, "nothing was left out"
    right, floor, *wrong = found.gaps
    assert right.kl < 1e-9 and floor.kl < 1e-9, "fp32: the replay is what was generated"
    assert len(wrong) == 3 and all(gap.kl > 1e3 * right.kl for gap in wrong)
    assert (tmp_path / "streams.md").read_text().strip() == tables([found]).strip()
