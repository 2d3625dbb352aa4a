"""The record of what is to run and what was done."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from controller.journal import (
    OPERATIONS_MAX,
    Journal,
    Operation,
    decode_journal,
    encode_journal,
    first_journal,
    journal_of,
)
from kvcomm.errors import Corrupt
from kvcomm.wire.messages import (
    VALUE_BYTES_MAX,
    NodePlan,
    PlannedMove,
    RingMap,
    RingNode,
    RingRange,
    RingTransition,
)
from l3_shard.ring import RANGES_MAX

SHARDS = [NodePlan(f"shard-{index}", "shard", "r") for index in range(3)]
POOL = NodePlan("pool-0", "pool", "r")
NEW = NodePlan("shard-3", "shard", "r")


def operation(number: int = 1, **words) -> Operation:
    return replace(Operation(number, "scale", "what", [*SHARDS, NEW], [], joins=["shard-3"]), **words)


def test_it_survives_its_encoding() -> None:
    move = PlannedMove("shard-3 joins", 0.5, 1, 2, 3, 4, 5.0)
    journal = first_journal([POOL, *SHARDS]).begun(operation(moves=[move]))
    assert decode_journal(encode_journal(journal)) == journal


@pytest.mark.parametrize("data", [b"", b"\xc1", encode_journal(Journal(99, []))])
def test_what_it_cannot_read_is_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_journal(data)


def test_shards_that_join_are_planned_from_the_beginning_and_go_when_it_is_taken_back() -> None:
    journal = first_journal([POOL, *SHARDS])
    begun = journal.begun(operation())
    assert begun.nodes == [POOL, *SHARDS, NEW]
    assert begun.under_way is not None
    assert begun.now(operation(step="done")).nodes == [POOL, *SHARDS, NEW]
    for step in ("cancelled", "rolled back", "failed"):
        over = begun.now(operation(step=step))
        assert over.nodes == journal.nodes and over.under_way is None


def test_nodes_that_leave_are_planned_until_it_is_done() -> None:
    leaving = Operation(1, "drain", "drain shard-2", SHARDS[:2], [], leaves=["shard-2"])
    begun = first_journal(SHARDS).begun(leaving)
    assert begun.nodes == SHARDS
    assert begun.now(replace(leaving, step="done")).nodes == SHARDS[:2]
    assert begun.now(replace(leaving, step="cancelled")).nodes == SHARDS


def test_a_pool_that_is_drained_leaves_the_map_first() -> None:
    begun = first_journal([POOL, *SHARDS]).begun(
        Operation(1, "drain", "drain pool-0", SHARDS, [], leaves=["pool-0"])
    )
    assert begun.pools == [] and POOL in begun.nodes


def test_a_drained_pool_stays_away_however_much_is_done_after() -> None:
    draining = Operation(1, "drain", "drain pool-0", SHARDS, [], leaves=["pool-0"])
    journal = first_journal([POOL, *SHARDS]).begun(draining)
    assert POOL in journal.with_pools([POOL]).nodes, "it is planned until it has left the map"
    assert POOL in journal.now(replace(draining, step="cancelled")).with_pools([POOL]).nodes
    journal = journal.now(replace(draining, step="done"))
    for number in range(2, OPERATIONS_MAX + 3):
        each = Operation(number, "move", "what", SHARDS, [])
        journal = journal.begun(each).now(replace(each, step="done"))
    assert journal.with_pools([POOL]).nodes == SHARDS


def test_weights_hold_once_it_is_done() -> None:
    heavier = replace(SHARDS[0], weight=3)
    change = Operation(1, "rebalance", "what", [heavier, *SHARDS[1:]], [])
    begun = first_journal(SHARDS).begun(change)
    assert begun.nodes == SHARDS
    assert begun.now(replace(change, step="done")).nodes == [heavier, *SHARDS[1:]]


def test_it_remembers_the_last_operations_and_never_reuses_a_number() -> None:
    journal = first_journal(SHARDS)
    for number in range(1, 31):
        assert journal.next_number == number
        each = Operation(number, "move", "what", SHARDS, [])
        journal = journal.begun(each).now(replace(each, step="done"))
    assert [each.number for each in journal.operations] == list(range(31 - OPERATIONS_MAX, 31))


def test_a_long_history_of_many_ranges_fits_into_one_record() -> None:
    ranges = [RingRange(index << 50, (index << 50) + 9, "shard-0") for index in range(RANGES_MAX)]
    moves = [PlannedMove(f"shard-{index} gets keys", 0.1, 1, 2, 3, 4, 5.0) for index in range(500)]
    journal = first_journal(SHARDS)
    for number in range(1, 40):
        each = Operation(number, "rebalance", "what", SHARDS, ranges, moves=moves)
        journal = journal.begun(each)
        if number < 39:
            journal = journal.now(replace(each, moves=[], step="done"))
    assert len(encode_journal(journal)) < VALUE_BYTES_MAX / 2


def test_two_operations_at_a_time_are_our_mistake() -> None:
    with pytest.raises(AssertionError):
        first_journal(SHARDS).begun(operation()).begun(operation(2))


def test_without_it_the_map_tells_what_is_to_run() -> None:
    shards = [RingNode(node.node, "", "", "", "r", 2) for node in SHARDS]
    joining = RingNode("shard-3", "", "", "", "r", 1)
    ring = RingMap(
        7, 3, 2, 2, 1, shards, [RingNode("pool-0", "", "", "", "r", 1)],
        transition=RingTransition("copy", [*shards, joining], []),
    )  # fmt: skip
    journal = journal_of(ring, [NodePlan("shard-9", "shard", "q"), POOL])
    assert {node.node for node in journal.nodes} == {
        "shard-0", "shard-1", "shard-2", "shard-3", "pool-0", "shard-9",
    }  # fmt: skip
    assert journal.node("shard-1") == NodePlan("shard-1", "shard", "r", 2)
    before = replace(first_journal(SHARDS[:1]), drained=["pool-9"]).begun(operation())
    known = journal_of(ring, [NodePlan("shard-9", "shard", "q"), POOL], before)
    assert (known.nodes, known.drained) == (journal.nodes, ["pool-9"]), "what it planned may be long past"
    assert known.under_way is None and known.next_number == 2
