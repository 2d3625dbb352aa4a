"""Agents into racks: against all ways there are, and with rooms, prices and agents that stay."""

from __future__ import annotations

import builtins
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.grouping import grouped, inside, metis
from kvcomm.errors import ConfigError

pytest.importorskip("pymetis", reason="the extra affinity is not installed")


def linked(count: int, pairs: dict[tuple[int, int], float]) -> list[dict[int, float]]:
    edges: list[dict[int, float]] = [{} for _ in range(count)]
    for (one, other), weight in pairs.items():
        edges[one][other] = edges[other][one] = weight
    return edges


def cliques(size: int, count: int) -> list[dict[int, float]]:
    """Agent ``a`` is of clique ``a % count``."""
    pairs = {
        (one, other): 10.0
        for one in range(size * count)
        for other in range(one)
        if one % count == other % count
    }
    return linked(size * count, pairs)


def test_cliques_come_together():
    edges = cliques(5, 4)
    homes = [agent // 5 for agent in range(20)]
    racks = grouped(edges, homes, [5] * 4, 1.0)
    assert inside(edges, racks) == sum(10.0 for neighbours in edges for _ in neighbours) / 2
    assert all(racks.count(rack) == 5 for rack in range(4))


def test_each_clique_goes_where_most_of_it_is():
    edges = cliques(5, 2)
    homes = [(agent + 1) % 2 for agent in range(10)]  # together already, the labels the other way round
    homes[0], homes[1] = homes[1], homes[0]
    racks = grouped(edges, homes, [5, 5], 1.0)
    assert [agent for agent in range(10) if racks[agent] != homes[agent]] == [0, 1]


def test_nobody_moves_for_less_than_the_price():
    edges, homes = linked(6, {(0, 3): 5.0, (1, 4): 5.0, (2, 5): 5.0}), [0, 0, 0, 1, 1, 1]
    assert grouped(edges, homes, [6, 6], 5.1) == homes
    assert inside(edges, grouped(edges, homes, [6, 6], 4.9)) == 15.0


def test_those_that_stay_are_gathered_round():
    edges = linked(8, {(0, other): 4.0 for other in range(1, 4)} | {(4, other): 4.0 for other in (5, 6, 7)})
    racks = grouped(edges, [1, 0, 0, 0, 0, 1, 1, 1], [4, 4], 1.0, fixed=frozenset({0, 4}))
    assert (racks[0], racks[4]) == (1, 0)
    assert inside(edges, racks) == 24.0


def test_an_overfull_rack_may_keep_what_it_has_and_gets_no_more():
    edges = cliques(4, 2)
    homes = [0] * 6 + [1] * 2
    racks = grouped(edges, homes, [3, 5], 0.1)
    assert racks.count(0) <= 6 and racks.count(1) <= 5


def test_without_traffic_or_a_second_rack_all_stay():
    assert grouped([{}] * 3, [0, 1, 1], [3, 3], 0.0) == [0, 1, 1]
    assert grouped(cliques(3, 2), [0] * 6, [6], 0.0) == [0] * 6


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="2 agents, 1 homes"):
        grouped([{}, {}], [0], [1, 1], 0.0)
    with pytest.raises(ValueError, match="racks 0 to 0"):
        grouped([{}], [1], [1], 0.0)


def test_without_metis_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def absent(name: str, *args, **kwargs):
        if name == "pymetis":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigError, match=r"pip install 'kvcomm\[affinity\]'"):
        metis(cliques(3, 2), [1.0, 1.0])


@st.composite
def cities(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[int], list[int], float]:
    count, racks = draw(st.integers(2, 7)), draw(st.integers(1, 3))
    ends = st.integers(0, count - 1)
    pairs = draw(st.dictionaries(st.tuples(ends, ends), st.floats(0.1, 50.0), max_size=12))
    homes = draw(st.lists(st.integers(0, racks - 1), min_size=count, max_size=count))
    spare = draw(st.lists(st.integers(0, 3), min_size=racks, max_size=racks))
    rooms = [homes.count(rack) + spare[rack] for rack in range(racks)]
    edges = linked(count, {(min(p), max(p)): w for p, w in pairs.items() if p[0] != p[1]})
    return edges, homes, rooms, draw(st.floats(0.0, 30.0))


@settings(max_examples=60)
@given(cities())
def test_it_fits_and_is_never_worse_than_staying(city):
    edges, homes, rooms, price = city
    racks = grouped(edges, homes, rooms, price)
    assert all(racks.count(rack) <= room for rack, room in enumerate(rooms))
    worth = inside(edges, racks) - price * sum(a != b for a, b in zip(racks, homes, strict=True))
    assert worth >= inside(edges, homes) - 1e-6
    assert grouped(edges, homes, rooms, price) == racks, "the same question, the same answer"


@pytest.mark.slow
def test_small_planted_worlds_are_solved_as_well_as_by_trying_all():
    edges = cliques(3, 3)
    edges[0][1] = edges[1][0] = 3.0
    homes = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    racks = grouped(edges, homes, [3, 3, 3], 2.0)

    def worth(at) -> float:
        return inside(edges, at) - 2.0 * sum(a != b for a, b in zip(at, homes, strict=True))

    fitting = (at for at in product(range(3), repeat=9) if all(at.count(rack) == 3 for rack in range(3)))
    assert worth(racks) == pytest.approx(max(map(worth, fitting)))
