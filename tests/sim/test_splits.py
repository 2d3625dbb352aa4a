"""Splits of random shapes: every one heals in bounded time, and its judge can condemn."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace

import pytest

from kvcomm.chaos.campaign import run_campaign
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.network import Weather
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.splits import (
    EQUAL_WITHIN_S,
    GOOD_WITHIN_S,
    SHAPES,
    SPLITS,
    Heal,
    Splits,
    distribution,
    draw_shape,
    splits_plan,
)
from l3_shard.repair import Repair

WORLDS = 30
NAMES, CLIENTS = [f"shard{index}" for index in range(5)], ["client0", "client1"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_every_split_heals_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """0 of 300 bounds the share of splits that do not heal in time by 1 % with 95 % confidence."""
    reports: list[str] = []
    summary = run_campaign(
        range(WORLDS),
        "safety",
        os.cpu_count() or 1,
        lambda verdict: reports.append(verdict.report()) if verdict.violations else None,
        "splits",
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{summary.text()}\n")
    assert not reports, "".join(reports)
    assert len(summary.heals) == WORLDS * SPLITS
    assert {heal.shape for heal in summary.heals} == set(SHAPES)
    assert sum(heal.equal_s > 0 for heal in summary.heals) > 0.9 * len(summary.heals), "they differed before"


class _RepairsNever(Repair):
    def _turn(self, neighbour: object, turn: int) -> None:
        """It is never its turn."""


@pytest.mark.slow
def test_a_cluster_that_does_not_repair_is_condemned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l3_shard.shard.Repair", _RepairsNever)
    plan = replace(splits_plan(1), keys=12, mix=(("put", 1),), weather=Weather(late=0.0))
    result = simulate(plan, splits=Splits(5))
    assert {"heal", "converged"} <= {violation.promise for violation in result.violations}


def test_shapes_are_drawn_alike_and_say_what_they_are() -> None:
    draw = Draw(3)
    shapes = [draw_shape(draw, NAMES, CLIENTS) for _ in range(1_100)]
    counts = Counter(shape.name for shape in shapes)
    assert set(counts) == set(SHAPES)
    assert min(counts.values()) > 60
    for shape in shapes:
        cut = frozenset().union(*(cuts for _, cuts in shape.steps))
        assert cut and all(a != b for a, b in cut), shape
        assert all(0.0 <= at <= shape.lasts_s for at, _ in shape.steps)
        mutual = all((b, a) in cut for a, b in cut)
        assert mutual == (shape.name not in ("one way", "one side deaf")), shape
        assert bool(shape.stays) == (shape.name == "one way for ever")


def test_a_ring_of_five_leaves_everyone_a_majority() -> None:
    draw = Draw(1)
    while (shape := draw_shape(draw, NAMES, CLIENTS)).name != "ring":
        pass
    ((_, cuts),) = shape.steps
    for name in NAMES:
        heard = {other for other in NAMES if other != name and (other, name) not in cuts}
        assert len(heard) == 2


def test_the_distribution_names_every_shape_and_what_never_happened() -> None:
    heal = Heal("halves", 2.0, [0.2, 0.4], [0.5, 0.6], 1.5)
    text = distribution([heal, replace(heal, shape="one way for ever", equal_s=float("inf"))])
    assert "2 splits" in text and "equal after halves" in text and "inf" in text
    assert distribution([]) == ""
    assert EQUAL_WITHIN_S >= GOOD_WITHIN_S
