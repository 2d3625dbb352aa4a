"""What is said of a cluster: whole, split, without a leader, moving; and what ``kvcomm top`` makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from kvcomm.cli.affinity import _rooms
from kvcomm.cli.affinity import lines as affinity_lines
from kvcomm.cli.cluster import document, last_split, lines, served
from kvcomm.cli.top import render
from kvcomm.wire.messages import (
    AffinityView,
    AgentPlace,
    ClusterView,
    NodeView,
    OperationView,
    PlannedMove,
    RingMap,
    RingNode,
    ShardLoad,
    ShardMove,
    SplitReport,
)

SHARDS = [f"shard-{index}" for index in range(5)]
LOAD = ShardLoad(120.5, 0.25, 0.0042, 1_000, 2_000_000, 7, 4 << 20, 0, 32 << 20)


def ring(replicas: int = 3) -> RingMap:
    nodes = [RingNode(name, f"tcp://{name}:1", "", "", "r", 1) for name in SHARDS]
    return RingMap(9, replicas, 2, 2, 1, nodes, [])


def node(
    name: str, state: str = "alive", silent_s: float = 0.5, *, in_ring: bool = True, **more: Any
) -> NodeView:
    return NodeView(name, name.split("-", maxsplit=1)[0], "r", state, silent_s, 9, 1, in_ring=in_ring, **more)


def view(dead: int = 0, mode: str = "whole", leader: str = "controller-0", **more) -> ClusterView:
    nodes = [node("controller-0")]
    nodes += [
        node(name, "dead", 12.4) if index < dead else node(name, load=LOAD)
        for index, name in enumerate(SHARDS)
    ]
    given: dict[str, Any] = {"ring": ring(), "nodes": nodes, "operations": []} | more
    return ClusterView("controller-0", leader, 4, mode, given["ring"], given["nodes"], given["operations"])


def test_a_whole_cluster_has_one_line():
    assert list(lines(view())) == [
        "cluster whole: controller-0 leads, term 4; ring epoch 9, as controller-0 says"
    ]


def test_a_split_says_who_is_silent_and_what_is_served():
    said = list(lines(view(dead=2, mode="partitioned")))
    assert "shard-0 is dead: not heard for 12 s" in said and "shard-1 is dead: not heard for 12 s" in said
    (strong,) = [line for line in said if line.startswith("strong records: ")]
    assert "% of the keys have a majority here, the others are refused" in strong
    assert "eventual records: all keys have a replica here" in said
    (writes,) = [line for line in said if line.startswith("writes of eventual records: ")]
    assert (
        "% of the keys have a write quorum here, the others are kept, and their outcome is unknown" in writes
    )


def test_shares_of_what_is_served_are_those_of_the_groups():
    everything = served(view())
    assert everything["strong records"] == "all keys have a majority here"
    assert everything["writes of eventual records"] == "all keys have a write quorum here"
    # Of 10 groups of 3 among 5, those with at least two of the three living shards: 7.
    some = int(served(view(dead=2))["strong records"].split()[0])
    assert 60 <= some <= 80
    nobody = served(view(dead=5))
    assert nobody["eventual records"].startswith("0 % of the keys have a replica here, what lies elsewhere")
    assert nobody["blocks"].startswith("0 % of the keys")


def test_leaderless_and_without_a_ring():
    said = list(lines(view(mode="leaderless", leader="", ring=None)))
    assert said == ["cluster leaderless: nobody leads; no ring yet, as controller-0 says"]


def test_who_is_heard_but_not_by_all_is_told():
    nodes = [node("controller-0"), node("shard-0", silent_to=["shard-1"]), node("shard-9", "unknown", -1.0)]
    said = list(lines(view(nodes=nodes)))
    assert "shard-0 is heard here, but does not answer shard-1" in said
    assert "shard-9 is unknown: not heard since this controller was started" in said


def test_who_was_drained_is_not_missed():
    nodes = [node("controller-0"), node("shard-9", "dead", 40.0, in_ring=False)]
    assert len(list(lines(view(nodes=nodes)))) == 1


def test_operations_show_their_progress_and_only_a_few_past_ones():
    past = [OperationView(number, "drain shard-4", "done", 1.0, -1.0) for number in range(6, 0, -1)]
    now = OperationView(7, "shard-5 joins", "copying", 0.25, 75.0, [], "shard-5 is not heard")
    said = list(lines(view(operations=[now, *past])))
    assert "operation 7 copying: shard-5 joins, shard-5 is not heard (25 %, 1 min 15 s left)" in said
    assert sum("drain" in line for line in said) == 3


def test_the_last_split_is_the_worst_that_any_shard_tells():
    nodes = [
        node("shard-0", split=SplitReport(3.0, 5, 10, 4, 1, 0.4)),
        node("shard-1", split=SplitReport(2.0, 1, 10, 0, 0, 0.9)),
    ]
    assert last_split(view(nodes=nodes)) == SplitReport(3.0, 6, 20, 4, 1, 0.9)
    assert (
        "4 merged, 1 kept as siblings; replicas were equal 0.9 s after" in list(lines(view(nodes=nodes)))[-1]
    )
    nodes.append(node("shard-2", split=SplitReport(1.0, 0, 0, 0, 0, -1.0)))
    assert "replicas are not equal yet" in list(lines(view(nodes=nodes)))[-1]


def test_the_document_is_json_with_names():
    move = PlannedMove("shard-5 joins", 0.2, 10, 100, 2, 200, 1.5)
    told = document(view(operations=[OperationView(7, "x", "copying", 0.5, 1.0, [move])]))
    told = json.loads(json.dumps(told))
    assert (told["mode"], told["leader"], told["epoch"], told["moving"]) == (
        "whole",
        "controller-0",
        9,
        False,
    )
    assert told["nodes"][1]["load"]["ops_s"] == 120.5
    assert told["operations"][0]["moves"][0]["what"] == "shard-5 joins"


def shown(of: ClusterView, width: int = 80) -> str:
    console = Console(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(render(of))
    return captured.get()


def test_top_shows_every_node_in_eighty_columns():
    text = shown(view(dead=1, mode="partitioned"))
    (row,) = [line for line in text.splitlines() if line.startswith("shard-2")]
    assert row.split() == [
        "shard-2",
        "alive",
        "9",
        "120.5",
        "25",
        "%",
        "4.2",
        "ms",
        "1000",
        "7",
        "5.9",
        "MiB",
        "-",
    ]
    assert "shard-0" in text and "dead 12 s" in text and "…" not in text
    assert "cluster partitioned: controller-0 leads" in text


def test_top_shows_what_is_left_to_move():
    nodes = [node("shard-0", load=LOAD, move=ShardMove(0, 0, 0, 30, 4, 3 << 20))]
    assert "34 items, 3.0 MiB" in shown(view(nodes=nodes), 100)


def test_rooms_are_read():
    assert _rooms(["rack-0=8", "a=b=0"]) == {"rack-0": 8, "a=b": 0}
    for text in ("rack-0", "=5", "rack-0=x", "rack-0=-1"):
        with pytest.raises(ValueError, match="should be RACK=N"):
            _rooms([text])


def test_advice_says_what_it_comes_to():
    places = [AgentPlace(1, "planner", "a", "b", 10.0, 5.0), AgentPlace(2, "", "a", "a", 10.0, 0.0)]
    assert affinity_lines(AffinityView(places, 2048.0, 0.1, 0.7, 10.0, "")) == [
        "2.0 KiB/s between agents, 10 % of it inside racks",
        "1 agents should move: 70 % inside racks is to be expected",
        "10 B/s with agents that do not say where they are (network.rack)",
    ]
    assert affinity_lines(AffinityView([], 0.0, 0.0, 0.0, 0.0, "there is one rack"))[1] == (
        "nobody should move: there is one rack"
    )
