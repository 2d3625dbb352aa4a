"""Two kinds of fences: lease epochs in strong records, and ring epochs in everything that writes."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import Corrupt, StaleEpoch
from kvcomm.machine import Reply
from kvcomm.wire.messages import (
    FENCE_MAX,
    MESSAGES,
    BlockFilterGet,
    BlockGet,
    BlockHoldings,
    BlockLookup,
    BlockPut,
    Failure,
    LeafGet,
    Message,
    RecordFetch,
    RecordForget,
    RecordGet,
    RecordPut,
    RecordReplicate,
    RecordScan,
    RecordState,
    RecordWrite,
    Sibling,
    StrongAccept,
    StrongChange,
    StrongEnter,
    StrongOrder,
    StrongOutcome,
    StrongOutcomes,
    StrongPrepare,
    StrongRead,
    StrongRegister,
    StrongRemove,
    StrongSettle,
    StrongState,
    TreeGet,
    Want,
)
from l3_shard import acceptor
from l3_shard.ballot import Ballot
from l3_shard.proposer import apply
from l3_shard.server import ShardService
from l3_shard.shard import RingChanged
from tests.l3_shard.cluster import NODE_TENANT, TENANT, Faults, ring_map
from tests.l3_shard.strong_world import StrongWorld
from tests.l3_shard.test_shard import Bench, origin


def ballot(counter: int) -> bytes:
    return Ballot(counter, "a", 1).code


def register(value: bytes | None, fence: int) -> StrongRegister:
    return StrongRegister([ballot(1)], value, fence)


# -- lease epochs, at the change function


@pytest.mark.parametrize("op", ["put", "cas", "delete"])
@pytest.mark.parametrize(("fence", "done"), [(0, False), (4, False), (5, True), (6, True), (FENCE_MAX, True)])
def test_a_change_under_an_earlier_epoch_or_none_is_refused(op: str, fence: int, done: bool) -> None:
    before = register(b"v", 5)
    order = StrongOrder(b"k", op, ballot(1) if op == "cas" else b"", b"w", fence)
    outcome, after = apply(order, before, ballot(2))
    if done:
        assert (outcome.code, after.version, after.fence) == ("", ballot(2), fence)
    else:
        assert after == before
        assert (outcome.code, outcome.version, outcome.value, outcome.fence) == (
            "fenced", ballot(1), b"v", 5,
        )  # fmt: skip


def test_a_fence_comes_before_the_expected_version() -> None:
    """Who is fenced must not be told to try again with another version."""
    outcome, _ = apply(StrongOrder(b"k", "cas", ballot(9), b"w", 4), register(b"v", 5), ballot(2))
    assert outcome.code == "fenced"
    outcome, _ = apply(StrongOrder(b"k", "cas", ballot(9), b"w", 5), register(b"v", 5), ballot(2))
    assert (outcome.code, outcome.fence) == ("conflict", 5)


def test_a_delete_keeps_the_fence_and_a_delete_of_nothing_raises_it() -> None:
    _, deleted = apply(StrongOrder(b"k", "delete", fence=5), register(b"v", 4), ballot(2))
    assert (deleted.value, deleted.fence) == (None, 5)
    _, raised = apply(StrongOrder(b"k", "delete", fence=6), deleted, ballot(3))
    assert (raised.version, raised.fence) == (ballot(3), 6)
    outcome, same = apply(StrongOrder(b"k", "delete", fence=6), raised, ballot(4))
    assert (outcome.code, same) == ("", raised)


def test_a_read_tells_the_fence_and_needs_none() -> None:
    assert apply(StrongOrder(b"k", "read"), register(b"v", 5), ballot(2))[0] == StrongOutcome(
        "", ballot(1), b"v", fence=5
    )


@pytest.mark.parametrize("fence", [-1, FENCE_MAX + 1])
def test_a_fence_out_of_range_is_refused_by_shard_and_acceptor(fence: int) -> None:
    with pytest.raises(Corrupt, match="fence"):
        acceptor.checked(StrongState(ballot(1), ballot(1), register(b"v", fence), True))
    world = StrongWorld(1, "a", replicas=1, write=1)
    world.settle()
    answers: list[Message] = []
    world.call("a", StrongChange(1, [StrongOrder(b"k", "put", b"", b"v", fence)]), answers.append)
    world.run(world.now + 5)
    (answer,) = answers
    assert isinstance(answer, Failure) and answer.code == "refused" and "fence" in answer.text


def test_a_fence_of_no_change_is_no_acceptors_state() -> None:
    with pytest.raises(Corrupt, match="fence"):
        acceptor.checked(StrongState(ballot(1), ballot(1), StrongRegister([], None, 3), True))


@given(st.lists(st.tuples(st.sampled_from(["put", "cas", "delete"]), st.integers(0, 6), st.booleans())))
def test_the_fence_of_a_register_never_falls_and_no_smaller_one_changes_it(
    steps: list[tuple[str, int, bool]],
) -> None:
    held, largest = acceptor.NOTHING, 0
    for number, (op, fence, right) in enumerate(steps, 1):
        expected = (held.version if held.value is not None else b"") if right else ballot(10**6)
        outcome, after = apply(StrongOrder(b"k", op, expected, b"v", fence), held, ballot(number))
        if after != held:
            assert outcome.code == "" and fence >= largest
            largest = max(largest, fence)
        assert after.fence == largest
        assert (outcome.code == "fenced") == (fence < held.fence)
        held = after


# -- lease epochs, where the majority decides


def stale_accepts(done: list[tuple[bytes, int]]) -> list[tuple[int, int]]:
    """Of changes as (version, fence): those that took effect after one with a larger fence.  Versions are
    ballots: their order is the order in which the changes took effect."""
    found, largest = [], 0
    for _, fence in sorted(done):
        if fence < largest:
            found.append((fence, largest))
        largest = max(largest, fence)
    return found


def test_the_judge_of_fences_can_fire() -> None:
    assert stale_accepts([(b"3", 2), (b"1", 1), (b"2", 2)]) == []
    assert stale_accepts([(b"3", 1), (b"1", 1), (b"2", 2)]) == [(1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_smaller_fence_is_accepted_after_a_larger_one(seed: int) -> None:
    """Holders of growing epochs write through any shard, with loss, doubling, late messages, crashes and
    pauses; each goes on long after its successor has begun."""
    draw = random.Random(seed)
    faults = Faults(loss=draw.choice((0.0, 0.1)), delay_s=draw.choice((0.05, 0.4)))
    world = StrongWorld(seed, "abc", faults, twice=0.3)
    world.settle()
    done: list[tuple[bytes, int]] = []
    codes: dict[str, int] = {}

    def write(fence: int, left: int) -> None:
        if not left:
            return

        def then(answer: Message) -> None:
            code = answer.code if isinstance(answer, Failure) else ""
            if isinstance(answer, StrongOutcomes):
                (outcome,) = answer.outcomes
                code = outcome.code
                if not code:
                    done.append((outcome.version, fence))
            codes[code] = codes.get(code, 0) + 1
            world.after(draw.uniform(0.0, 0.3), partial(write, fence, left - 1))

        order = StrongOrder(b"k", "put", b"", b"%d" % fence, fence)
        world.call(draw.choice("abc"), StrongChange(world.map.epoch, [order]), then)

    for fence in range(1, 5):
        world.after(1.0 * fence, partial(write, fence, 12))
    for _ in range(3):
        trouble = draw.choice((world.crash, partial(world.pause, pause_s=2)))
        world.after(draw.uniform(1, 5), partial(trouble, draw.choice("abc")))
    world.run()
    assert stale_accepts(done) == []
    assert done and codes.get("fenced", 0) > 0, codes


def put_all(world: StrongWorld, node: str, *fences: int, op: str = "put") -> list[str]:
    """Changes that are asked for at the same moment; their codes, in that order."""
    codes = ["unanswered"] * len(fences)

    def told(index: int, answer: Message) -> None:
        if isinstance(answer, StrongOutcomes):
            codes[index] = answer.outcomes[0].code
        else:
            assert isinstance(answer, Failure)
            codes[index] = answer.code

    for index, fence in enumerate(fences):
        value = b"%d" % fence if op == "put" else None
        order = StrongOrder(b"k", op, b"", value, fence)
        world.call(node, StrongChange(world.map.epoch, [order]), partial(told, index))
    world.run(world.now + 10.0)
    return codes


def settled_world(seed: int) -> StrongWorld:
    world = StrongWorld(seed, "abc", Faults(delay_s=0.002))
    world.settle()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_changes_that_wait_for_one_record_are_fenced_among_each_other(seed: int) -> None:
    """However many of them share a round, the largest fence is what the record remembers."""
    world = settled_world(seed)
    codes = put_all(world, "a", 1, 3, 2, 3, 0, 5, 4)
    assert codes[5] == "" and "fenced" in codes
    for node in "abc":
        assert put_all(world, node, 4, 0) == ["fenced", "fenced"]
    assert put_all(world, "b", 5) == [""]


def test_what_a_deletion_leaves_behind_goes_only_without_a_fence() -> None:
    """A record that was removed and begun anew would take the writes of every holder there ever was."""
    world = settled_world(1)
    assert put_all(world, "a", 5) == [""]
    assert put_all(world, "a", 5, op="delete") == [""]
    world.run(world.now + 7_200.0)
    for node in "abc":
        assert put_all(world, node, 4, 0) == ["fenced", "fenced"]
    assert put_all(world, "a", 6) == [""]


# -- ring epochs


TOMBSTONE = RecordState({"other000.1": 1}, [Sibling("other000.1", 1, 1 << 20, None)])
WRITTEN = RecordState({"other000.1": 1}, [Sibling("other000.1", 1, 1 << 20, b"v")])
K = TENANT + b"k"
OLD = 1
STALE: list[Message] = [
    RecordGet(OLD, [b"k"]),
    RecordPut(OLD, [RecordWrite(b"k", b"v", {})]),
    RecordReplicate(OLD, [K], [WRITTEN]),
    RecordFetch(OLD, [K]),
    RecordForget(OLD, [K], [TOMBSTONE]),
    RecordScan(b"", b"", 1, OLD),
    TreeGet(OLD, "b", 0, [0]),
    LeafGet(OLD, "b", [0]),
    StrongRead(OLD, [b"k"]),
    StrongChange(OLD, [StrongOrder(b"k", "put", b"", b"v")]),
    StrongPrepare(OLD, K, ballot(1)),
    StrongAccept(OLD, K, ballot(1), register(b"v", 0), b""),
    StrongSettle(OLD, ring_map("abc"), [], b""),
    StrongRemove(OLD, [1], [K], [ballot(1)], ballot(1)),
    StrongEnter(OLD, "b", 1, b""),
]
STALE_BLOCKS: list[Message] = [
    BlockLookup(OLD, [bytes(32)]),
    BlockGet(OLD, [bytes(32)]),
    BlockPut(OLD, [Want(bytes(32), 1_000)]),
    BlockHoldings(OLD, "b", b"", 1),
    BlockFilterGet(OLD),
]
NOT_REQUESTS = {"Welcome", "RingMap", "RingTaken", "Heartbeat", "HeartbeatAnswer", "BlockFilter"}
"""They tell an epoch and do nothing by it."""


def test_every_message_with_an_epoch_is_in_the_table() -> None:
    """Hints and hand-offs travel as ``RecordReplicate``."""
    with_epoch = {kind.__name__ for kind in MESSAGES if "epoch" in kind.__struct_fields__}
    assert with_epoch == {type(message).__name__ for message in STALE + STALE_BLOCKS} | NOT_REQUESTS


@pytest.mark.parametrize("message", STALE, ids=lambda message: type(message).__name__)
def test_nothing_of_an_earlier_ring_epoch_is_done(message: Message) -> None:
    """Accepted stale epochs: 0.  The answer brings the map, and nothing is ordered from the disk or peers."""
    bench = Bench()
    bench.on(RingChanged(ring_map("abc", epoch=OLD + 1)))
    tenant = TENANT if type(message).__name__ in CALLERS else NODE_TENANT
    effects = bench.ask(message, tenant=tenant)
    assert [type(effect) for effect in effects] == [Reply], effects
    (reply,) = effects
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == StaleEpoch.code and reply.message.detail
    assert bench.shard.counts().stale_request_count == 1


class _NoBlocks:
    """Says that it answers everything, and can do nothing."""

    def answers(self, message: Message) -> bool:
        return True


@pytest.mark.parametrize("message", STALE_BLOCKS, ids=lambda message: type(message).__name__)
def test_nothing_of_blocks_is_done_under_an_earlier_ring_epoch(message: Message) -> None:
    """Neither when their payload begins to arrive nor when they are handled."""
    bench = Bench()
    bench.on(RingChanged(ring_map("abc", epoch=OLD + 1)))
    nothing: Any = _NoBlocks()
    service = ShardService(bench.shard, nothing, nothing, nothing, nothing, nothing)
    for begin in (
        lambda: service.sink(origin(), message, 1_000),
        lambda: service.handle(origin(), message, [], nothing),
    ):
        with pytest.raises(StaleEpoch, match="epoch 1 is over, this is 2"):
            begin()


CALLERS = ("RecordGet", "RecordPut", "RecordScan", "StrongRead", "StrongChange")


def test_the_table_is_about_the_epoch_alone() -> None:
    """Each of these is good under its own epoch (or refused for another reason than the epoch)."""
    for message in STALE:
        bench = Bench()
        tenant = TENANT if type(message).__name__ in CALLERS else NODE_TENANT
        for effect in bench.ask(message, tenant=tenant):
            if isinstance(effect, Reply) and isinstance(effect.message, Failure):
                assert effect.message.code != StaleEpoch.code
