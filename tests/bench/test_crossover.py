"""Where by reference and inline cross: found in given curves, and measured in small."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from bench import crossover
from bench.crossover import TRANSPORTS, Crossover, Curve, Pair, Verb, from_json, rendered, to_json, with_lives
from bench.timing import Rounds, Spread

ROOT = Path(__file__).parents[2]
SAME = Spread(1, 1, 1)


def curve(verb: Verb, *ratios: float, transport: str = "shm") -> Curve:
    pairs = [Pair(64 << step, SAME, SAME, Spread(0, ratio, 9)) for step, ratio in enumerate(ratios)]
    return Curve(transport, verb, pairs)


@pytest.mark.parametrize(
    ("ratios", "at"),
    [
        ([0.9, 0.8, 0.7], 64),
        ([1.2, 1.0, 0.7], 128),
        ([0.9, 1.1, 0.7], 256),  # a dip before the last time inline wins is no crossover
        ([1.3, 1.2, 1.1], None),
        ([0.5, 0.5, 1.1], None),
    ],
)
def test_they_cross_where_inline_wins_for_the_last_time(ratios: list[float], at: int | None):
    assert curve("get", *ratios).crossover_bytes() == at


def test_the_default_suits_a_blocks_life_in_this_hosts_pool():
    found = Crossover("m", "d", [curve("life", 1.1, 1.1, 1.1, transport="tcp"), curve("get", 0.5, 0.5, 0.5)])
    assert found.recommended_bytes() is None
    found.curves.append(curve("life", 1.1, 0.9, 0.8))
    assert found.recommended_bytes() == 128


@pytest.mark.parametrize(("gets_inline", "lives"), [(True, [6.0, 60.0]), (False, [5.0, 50.0])])
def test_a_life_is_a_put_and_a_get_of_the_same_round(gets_inline: bool, lives: list[float]):
    seconds = {
        "get of a run by reference": [[1.0, 1.0], [10.0]],
        "get of a run inline": [[2.0], [20.0]],
        "put of a run by reference": [[3.0, 5.0, 9.0], [30.0]],
        "put of a run inline": [[4.0], [40.0]],
    }
    found = with_lives(Rounds(seconds, (0.0, 0.0)), gets_inline=gets_inline)
    assert found.seconds["life by reference"] == [[6.0], [40.0]]
    assert found.seconds["life inline"] == [[each] for each in lives]


def test_it_survives_json_and_is_rendered():
    found = Crossover("here", "a machine", [curve("life", 1.1, 0.9), curve("put", 1.2, 1.1)], {"tcp": "gone"})
    assert from_json(to_json(found)) == found
    text = rendered(found)
    assert "life over shm: by reference from 128 B on" in text
    assert "put over shm: inline is faster at every size" in text
    assert "Recommended `network.zero_copy_threshold`: 128 B." in text and "Not run: tcp (gone)." in text


@pytest.mark.slow
@pytest.mark.processes
def test_it_measures_every_verb_both_ways(tmp_path: Path):
    result = tmp_path / "crossover.json"
    command = [sys.executable, "-m", "bench.crossover", "--smoke", "--json", str(result)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = from_json(result.read_bytes())
    assert {(curve.transport, curve.verb) for curve in found.curves} == set(
        product(TRANSPORTS, get_args(Verb))
    )
    for each in found.curves:
        assert [pair.size_bytes for pair in each.pairs] == list(crossover.SMOKE_SIZES)
        assert all(pair.reference_us.median > 0 < pair.inline_us.median for pair in each.pairs)
