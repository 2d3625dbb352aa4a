"""Pictures name every curve, follow the reader's page, and are the same for the same numbers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import crossover, plots
from bench.plots import CROSSOVER, LATENCY, Line, bandwidths, crossings, latencies, spread_apart
from bench.sections import slug, tables, to_json
from tests.bench.test_crossover import curve
from tests.bench.test_curves import section

GAP = 10.0
NEEDED = "the pictures are drawn with matplotlib (the extra `bench`)"


@given(st.lists(st.floats(-1e3, 1e3), max_size=12))
def test_names_are_spread_apart_in_their_order(wanted: list[float]):
    places = spread_apart(wanted, GAP)
    in_order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    for low, high in pairwise(in_order):
        assert places[high] - places[low] >= GAP - 1e-6
    if all(high - low >= GAP for low, high in pairwise(sorted(wanted))):
        assert places == wanted, "nobody moves who need not"


def test_names_at_one_place_are_centred_on_it():
    assert spread_apart([5.0, 5.0, 5.0], GAP) == [-5.0, 5.0, 15.0]


def test_lines_are_taken_from_a_section():
    memcpy, view = latencies(section())
    assert (memcpy.name, memcpy.sizes, memcpy.values, memcpy.bold) == ("memcpy", [64, 1024], [2, 3], False)
    assert view.sizes == [1024]
    assert [line.name for line in bandwidths(section())] == ["memcpy"], "where no bytes move there is no line"


def test_variants_of_a_way_share_its_colour_and_ours_are_bold():
    assert plots._colour("KVCOMM shm read", 0) == plots.COLOURS["KVCOMM shm"]
    assert plots._colour("KVCOMM shm view", 0) == plots.COLOURS["KVCOMM shm view"]
    assert plots._colour("something new", 1) == plots.OTHERS[1]


def test_crossings_are_ratios():
    curves = [curve("life", 1.1, 0.9), curve("get of a run", 0.5, 0.4), curve("get", 1, 1)]
    found = crossover.Crossover("m", "d", curves)
    life, get = crossings(found)
    assert life.bold and get.dashed and life.values == [1.1, 0.9]
    assert life.colour == get.colour == plots.COLOURS["KVCOMM shm"], "as in the other pictures"


@pytest.mark.parametrize(
    ("machine", "name"), [("this machine", "this-machine"), ("2 × H200 (NVLink)", "2-h200-nvlink")]
)
def test_machines_make_file_names(machine: str, name: str):
    assert slug(machine) == name


def test_axes_speak_in_units():
    assert [plots._time_name(us) for us in (0.1, 10, 1e3, 1e6)] == ["0.1 µs", "10 µs", "1 ms", "1 s"]
    assert [plots._rate_name(rate) for rate in (0.001, 0.1, 10)] == ["1 MB/s", "100 MB/s", "10 GB/s"]


@pytest.mark.slow
@pytest.mark.parametrize("picture", [LATENCY, CROSSOVER])
def test_a_picture_names_its_lines_in_the_readers_ink(picture: plots.Picture):
    pytest.importorskip(
        "matplotlib", reason="the pictures are drawn with matplotlib (pip install kvcomm[bench])"
    )
    lines = [
        Line("one", [64, 256, 1024], [1.0, 2.0, 0.3], "#ff0000", bold=True),
        Line("other", [64, 256], [0.2, 3.0], "#00ff00", dashed=True),
    ]
    text = plots.svg(picture, "here", lines)
    assert text == plots.svg(picture, "here", lines)
    words = {element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("}text")}
    assert {"one", "other", picture.title, "64 B", "1 KiB"} <= words
    assert "currentColor" in text and plots.INK not in text and "prefers-color-scheme:dark" in text


@pytest.mark.slow
def test_pictures_are_written_for_each_machine(tmp_path: Path):
    pytest.importorskip(
        "matplotlib", reason="the pictures are drawn with matplotlib (pip install kvcomm[bench])"
    )
    assert plots.main([str(tmp_path)]) == 1, "there is nothing to draw"
    (tmp_path / "curves.json").write_bytes(to_json([section("here"), section("over there")]))
    found = crossover.Crossover("m", "d", [curve("life", 1.1, 0.9)])
    (tmp_path / "crossover.json").write_bytes(crossover.to_json(found))
    assert plots.main([str(tmp_path)]) == 0
    kinds = [f"{kind}-{machine}" for kind in ("bandwidth", "latency") for machine in ("here", "over-there")]
    assert sorted(path.stem for path in tmp_path.glob("*.svg")) == sorted([*kinds, "crossover"])
    for name in kinds:
        assert f"(plots/{name}.svg)" in tables([section("here"), section("over there")])
