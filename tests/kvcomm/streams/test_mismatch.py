"""Reports of how far two sides' probabilities are apart, on numbers that can be computed by hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kvcomm.streams.mismatch import (
    EXACT,
    FIRST_SAMPLES,
    ROUNDED,
    Spread,
    behind_events,
    exact_kl,
    judged_samples,
    mismatch,
)
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace


@dataclass
class Scored:
    rollout: Rollout
    log_probs: torch.Tensor


def session_of(*steps: int | tuple[int, int] | str) -> Session:
    """A number is rows to feed, a pair a cut, a word new weights; blocks of 4, two of them protected."""
    session = Session(BlockPool(200), namespace(block_tokens=4), rows_max=2000)
    session.protect(4)
    version = 0
    for step in steps:
        if isinstance(step, int):
            session.commit(session.plan([step] * step))
        elif isinstance(step, tuple):
            session.evict([step])
        else:
            version += 1
            session.set_weights(version)
    return session


def rollout_of(session: Session, rows: Sequence[int], name: str = "one", logprob: float = -2.0) -> Rollout:
    following = [*session.tokens[1:], 0]
    samples = [Sample(row, following[row], logprob, Sampling()) for row in rows]
    return Rollout.sealed(name, bytes(32), 4, session.tokens, session.events, samples)


def scored(rollout: Rollout, differences: Sequence[float]) -> Scored:
    engine = [sample.logprob for sample in rollout.samples]
    pairs = zip(engine, differences, strict=True)
    return Scored(rollout, torch.tensor([ours + more for ours, more in pairs], dtype=torch.float64))


def test_k3_and_the_worst_token_are_those_of_the_definition() -> None:
    session = session_of(20)
    differences = [0.1, -0.2, 0.0, 0.05]
    report = mismatch([scored(rollout_of(session, [3, 5, 7, 9]), differences)])
    k3 = [math.exp(x) - x - 1 for x in differences]
    assert report.k3.count == 4
    assert report.k3.mean == pytest.approx(sum(k3) / 4)
    assert report.k3.worst == pytest.approx(max(k3))
    assert report.log_prob_worst == pytest.approx(0.2)
    assert (report.worst_rollout, report.worst_row) == ("one", 5)
    assert report.after_events == Spread()


def test_small_differences_are_not_lost_in_rounding() -> None:
    report = mismatch([scored(rollout_of(session_of(20), [3]), [1e-8])])
    assert report.k3.mean == pytest.approx(5e-17, rel=1e-3, abs=0)


def test_the_mean_of_k3_estimates_the_exact_kl() -> None:
    torch.manual_seed(0)
    engine, trainer = torch.randn(2, 1, 30, dtype=torch.float64)
    trainer = engine + 0.3 * trainer
    ours, its = torch.log_softmax(engine, -1)[0], torch.log_softmax(trainer, -1)[0]
    difference = its - ours
    expected = float((ours.exp() * (torch.expm1(difference) - difference)).sum())
    session = session_of(20)
    found = exact_kl(rollout_of(session, [4]), engine, trainer)
    assert found.tolist() == pytest.approx([expected])


def test_the_exact_kl_in_a_report_is_from_the_engine_and_is_held_against_the_limits() -> None:
    engine, trainer = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 1.0, -1.0]])
    ours, its = torch.softmax(engine.double(), -1), torch.softmax(trainer.double(), -1)
    rollout = rollout_of(session_of(20), [4])
    report = mismatch([scored(rollout, [0.0])], engine_logits=[engine], trainer_logits=[trainer])
    assert report.kl is not None
    assert report.kl.mean == pytest.approx(float((ours * (ours / its).log()).sum()))
    assert [problem.split(" is")[0].rpartition(" ")[0] for problem in report.beyond(ROUNDED)] == [
        "mean KL",
        "worst KL",
    ]


def test_the_exact_kl_of_the_most_probable_token_is_of_temperature_1() -> None:
    torch.manual_seed(0)
    engine, trainer = torch.randn(2, 1, 30)
    plain = rollout_of(session_of(20), [4])
    greedy = replace(plain, samples=tuple(replace(each, sampling=Sampling(0.0)) for each in plain.samples))
    assert exact_kl(greedy, engine, trainer).tolist() == exact_kl(plain, engine, trainer).tolist()


def test_the_exact_kl_is_of_the_temperatures_distributions() -> None:
    torch.manual_seed(0)
    engine, trainer = torch.randn(2, 1, 30)
    plain = rollout_of(session_of(20), [4])
    heated = [Sample(4, plain.samples[0].token, -1.0, Sampling(temperature=2.0))]
    warm = Rollout.sealed("warm", bytes(32), 4, plain.tokens, (), heated)
    assert exact_kl(warm, engine, trainer).tolist() == pytest.approx(
        exact_kl(plain, engine / 2, trainer / 2).tolist()
    )


def test_the_first_samples_behind_each_event_are_apart() -> None:
    session = session_of(16, (4, 8), 10, (8, 12), 10)
    rows = list(range(10, 36))
    found = behind_events(rollout_of(session, rows))
    assert [row for row, first in zip(rows, found, strict=True) if first] == [16, 17, 18, 26, 27, 28]
    assert FIRST_SAMPLES == 3


def test_an_event_whose_first_samples_come_late_or_never_is_no_reason_to_look_elsewhere() -> None:
    session = session_of(16, (4, 8), 10, (8, 12), 10)
    rows = [3, 24, 25, 30, 31, 32, 33]
    found = behind_events(rollout_of(session, rows))
    assert [row for row, first in zip(rows, found, strict=True) if first] == [24, 25, 30, 31, 32]


def test_a_fault_behind_an_event_that_the_mean_hides_is_seen_there() -> None:
    session = session_of(16, (4, 8), 600)
    rows = list(range(1, 616))
    differences = [0.06 if row in (16, 17, 18) else 0.0 for row in rows]
    report = mismatch([scored(rollout_of(session, rows), differences)])
    assert report.k3.mean < 1e-5 < ROUNDED.mean < report.after_events.mean
    assert report.elsewhere == Spread(612, 0.0, 0.0)
    assert report.beyond(ROUNDED) == ["mean k3 behind events 1.84e-03 is over 1e-03"]


def test_edge_17_only_samples_of_one_weights_version_are_judged() -> None:
    session = session_of(16, "new", 10)
    rollout = rollout_of(session, [10, 14, 16, 20])
    assert judged_samples(rollout, 0) == [True, True, False, False]
    assert judged_samples(rollout, 1) == [False] * 4, "what they read was written by the old weights"
    report = mismatch([scored(rollout, [0.0, 0.0, 3.0, 3.0])], weights_version=0)
    assert (report.k3.count, report.stale_count, report.beyond(EXACT)) == (2, 2, [])


def test_edge_17_weights_from_the_first_row_on_are_the_only_ones() -> None:
    session = session_of("new", 16, (4, 8), 4)
    rollout = rollout_of(session, [10, 17])
    assert judged_samples(rollout, 1) == [True, True]
    assert mismatch([scored(rollout, [0.0, 0.0])]).k3.count == 2


def test_edge_17_several_versions_ask_which_one_is_judged() -> None:
    old = rollout_of(session_of(16), [10], "old")
    new = rollout_of(session_of("new", 16), [10], "new")
    with pytest.raises(ValueError, match="weights_version="):
        mismatch([scored(old, [0.0]), scored(new, [0.0])])
    assert mismatch([scored(old, [9.0]), scored(new, [0.0])], weights_version=1).log_prob_worst == 0.0


@pytest.mark.parametrize("wrong", [math.nan, 1.0, -1.0], ids=str)
def test_what_is_over_the_limits_is_named(wrong: float) -> None:
    report = mismatch([scored(rollout_of(session_of(20), [3, 5]), [0.0, wrong])])
    assert len(report.beyond(EXACT)) == 3
    assert all("is over" in problem for problem in report.beyond(EXACT))


def test_nothing_to_judge_is_no_success() -> None:
    report = mismatch([scored(rollout_of(session_of(20), []), [])])
    assert report.beyond(EXACT) == ["no sample could be judged"]
    assert "nowhere" in str(report)
    with pytest.raises(ValueError, match="at least one rollout"):
        mismatch([])


def test_the_exact_kl_needs_both_sides() -> None:
    rollout = rollout_of(session_of(20), [3])
    with pytest.raises(ValueError, match="both sides"):
        mismatch([scored(rollout, [0.0])], engine_logits=[torch.zeros(1, 5)])


def test_log_probabilities_of_other_samples_are_refused() -> None:
    rollout = rollout_of(session_of(20), [3, 4])
    with pytest.raises(ValueError, match="1 log probabilities of 2 samples"):
        mismatch([Scored(rollout, torch.zeros(1))])


def test_a_report_reads_like_this() -> None:
    session = session_of(16, (4, 8), 8, "new", 4)
    rollout = rollout_of(session, [10, 16, 17, 24], "agent-7")
    logits = torch.zeros(4, 5)
    report = mismatch(
        [scored(rollout, [0.01, -0.02, 0.0, 4.0])],
        weights_version=0,
        engine_logits=[logits],
        trainer_logits=[logits],
    )
    assert str(report).splitlines() == [
        "mismatch of 3 samples, 1 stale",
        "  k3                     mean 8.29e-05  worst 1.99e-04  of 3",
        "  first 3 behind events  mean 9.93e-05  worst 1.99e-04  of 2",
        "  elsewhere              mean 5.02e-05  worst 5.02e-05  of 1",
        "  exact KL               mean 0.00e+00  worst 0.00e+00  of 3",
        "  largest |dlogp| 2.00e-02, worst k3 at row 16 of 'agent-7'",
    ]
