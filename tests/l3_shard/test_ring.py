"""The ring against a dumb oracle, and its promises: balance, little movement, weights, racks, one answer
everywhere.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Literal

import mmh3
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.wire.messages import RingMap, RingNode, RingRange, RingTransition
from l3_shard import ring as ring_module
from l3_shard.ring import (
    NO_RING,
    POINT_MAX,
    POINTS_PER_WEIGHT,
    SHARDS_MAX,
    WEIGHT_MAX,
    Ring,
    RingError,
    point_of,
)

Stage = Literal["copy", "serve"]
KEYS = [b"key/%d" % index for index in range(2_000)]


def node(name: str, rack: str = "r", weight: int = 1) -> RingNode:
    return RingNode(name, f"tcp://host:{name}", "", "", rack, weight)


def ring_map(shards: list[RingNode], *, epoch: int = 1, replicas: int = 3, block_copies: int = 1) -> RingMap:
    return RingMap(epoch, replicas, min(2, replicas), 1, block_copies, shards, [])


def cluster(count: int, racks: int = 1) -> list[RingNode]:
    return [node(f"shard-{index}", f"rack-{index % racks}") for index in range(count)]


def oracle(shards: list[RingNode], key: bytes, count: int) -> tuple[str, ...]:
    """All points in one list, walked from the key; written from the description, shares no code with the
    ring.
    """
    points = []
    for shard in shards:
        for index in range(0, POINTS_PER_WEIGHT * shard.weight, 2):
            data = index.to_bytes(4, "little") + shard.node.encode()
            points += [(half, shard.node, shard.rack) for half in mmh3.hash64(data, 0x4B56, signed=False)]
    mine = mmh3.hash64(key, 0x4B56, signed=False)[0]
    points.sort()
    walk = [point for point in points if point[0] >= mine] + [point for point in points if point[0] < mine]
    first_of_rack: dict[str, str] = {}
    everybody: list[str] = []
    for _, name, rack in walk:
        first_of_rack.setdefault(rack, name)
        if name not in everybody:
            everybody.append(name)
    front = list(first_of_rack.values())
    return tuple((front + [name for name in everybody if name not in front])[:count])


shard_lists = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("xyz"), st.integers(1, 2)),
    min_size=1,
    max_size=6,
    unique_by=lambda shard: shard[0],
).map(lambda many: [node(f"s{number}", rack, weight) for number, rack, weight in many])


@settings(max_examples=8)
@given(shard_lists, st.binary(max_size=8), st.integers(1, 8), st.integers(1, 4))
def test_owners_are_the_oracles(shards, key, count, replicas):
    ring = Ring.from_map(ring_map(shards, replicas=replicas))
    assert ring.owners(key, count) == oracle(shards, key, count)


@pytest.mark.parametrize("racks", [1, 2, 7])
def test_more_shards_than_are_remembered_together_are_placed_alike(
    racks: int, monkeypatch: pytest.MonkeyPatch
):
    """Of a circle of a thousand shards hardly two points have the same owners."""
    monkeypatch.setattr(ring_module, "SPOTS_MAX", 5)
    shards = [node(f"many-{racks}-{index}", f"rack-{index % racks}") for index in range(7)]
    ring = Ring.from_map(ring_map(shards))
    assert all(ring.replicas(key) == oracle(shards, key, 3) for key in KEYS[:40])


def test_keepers_of_blocks_are_the_same_when_they_are_asked_for_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring_module, "KEEPERS_MAX", 3)
    ring = Ring.from_map(ring_map(cluster(5), block_copies=2))
    for _ in range(2):
        assert [ring.block_keepers(key) for key in KEYS[:9]] == [ring.owners(key, 2) for key in KEYS[:9]]


@settings(max_examples=8)
@given(shard_lists, st.binary(max_size=8))
def test_owners_are_distinct_and_in_racks_apart(shards, key):
    ring = Ring.from_map(ring_map(shards))
    racks = {shard.node: shard.rack for shard in shards}
    for count in range(1, len(shards) + 2):
        owners = ring.owners(key, count)
        assert len(set(owners)) == len(owners) == min(count, len(shards))
        assert len({racks[owner] for owner in owners}) == min(count, len(set(racks.values())))
        assert ring.owners(key, count + 1)[:count] == owners


@pytest.mark.parametrize("prefix", ["shard-", "node", "10.0.0."])
def test_shares_are_even(prefix):
    ring = Ring.from_map(ring_map([node(f"{prefix}{index}") for index in range(8)]))
    shares = Counter(ring.owners(b"balance/%d" % index, 1)[0] for index in range(40_000))
    assert len(shares) == 8
    assert max(shares.values()) / (sum(shares.values()) / 8) <= 1.15


def test_weights_are_respected():
    ring = Ring.from_map(ring_map([node("one"), node("two", weight=2), node("four", weight=4)]))
    shares = Counter(ring.owners(b"weight/%d" % index, 1)[0] for index in range(20_000))
    assert shares["two"] / shares["one"] == pytest.approx(2, rel=0.25)
    assert shares["four"] / shares["one"] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("count", [3, 8])
def test_a_new_shard_takes_its_share_and_moves_nothing_else(count):
    before = Ring.from_map(ring_map(cluster(count)))
    after = Ring.from_map(ring_map([*cluster(count), node("newcomer")], epoch=2))
    moved = 0
    for key in KEYS:
        old, new = before.owners(key, 1)[0], after.owners(key, 1)[0]
        assert new in (old, "newcomer")
        moved += new != old
    assert moved / len(KEYS) == pytest.approx(1 / (count + 1), rel=0.3)


@settings(max_examples=8)
@given(shard_lists, st.sampled_from("xyzw"), st.binary(max_size=8), st.integers(1, 5))
def test_a_new_shard_never_moves_a_copy_between_old_ones(shards, rack, key, count):
    before = Ring.from_map(ring_map(shards)).owners(key, count)
    after = Ring.from_map(ring_map([*shards, node("newcomer", rack)], epoch=2)).owners(key, count)
    assert set(after) <= {*before, "newcomer"}


@settings(max_examples=8)
@given(shard_lists, st.randoms(use_true_random=False))
def test_order_of_the_map_does_not_matter(shards, random):
    shuffled = random.sample(shards, len(shards))
    one, two = Ring.from_map(ring_map(shards)), Ring.from_map(ring_map(shuffled))
    assert all(one.owners(key, 3) == two.owners(key, 3) for key in KEYS[:50])


def test_the_map_is_kept():
    original = ring_map(cluster(3))
    ring = Ring.from_map(original)
    assert ring.to_map() == original and ring.epoch == 1
    assert ring.shard("shard-1") == original.shards[1] and "shard-9" not in ring
    assert len(ring.replicas(b"k")) == 3 and len(ring.block_owners(b"k")) == 1


def test_a_ring_without_shards_owns_nothing():
    assert Ring.from_map(ring_map([])).owners(b"k", 3) == ()
    assert Ring.from_map(NO_RING).replicas(b"k") == () and Ring.from_map(NO_RING).epoch == 0


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (ring_map([node("a"), node("a")]), "name of its own"),
        (ring_map([node("")]), "name of its own"),
        (ring_map([node("a", weight=0)]), "weight"),
        (ring_map([node("a", weight=WEIGHT_MAX + 1)]), "weight"),
        (ring_map([node("a")], epoch=-1), "epoch"),
        (ring_map([node("a")], block_copies=0), "block_copies"),
        (RingMap(1, 3, 4, 1, 1, [node("a")], []), "quorums"),
        (RingMap(1, 3, 2, 0, 1, [node("a")], []), "quorums"),
        (ring_map(cluster(SHARDS_MAX + 1)), "at most"),
    ],
)
def test_impossible_maps_are_refused(broken, word):
    with pytest.raises(RingError, match=word):
        Ring.from_map(broken)


PLACEMENT = """
import hashlib
from tests.l3_shard.test_ring import KEYS, cluster, ring_map
from l3_shard.ring import Ring
ring = Ring.from_map(ring_map(cluster(5, racks=2)))
print(hashlib.sha256(repr([ring.owners(key, 3) for key in KEYS]).encode()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_placement_does_not_depend_on_the_process(seed):
    ring = Ring.from_map(ring_map(cluster(5, racks=2)))
    here = hashlib.sha256(repr([ring.owners(key, 3) for key in KEYS]).encode()).hexdigest()
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()}
    there = subprocess.run(
        [sys.executable, "-c", PLACEMENT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert there.stdout.strip() == here


# -- ranges and transitions ----------------------------------------------------------------------------------


def moving(now: list[RingNode], then: list[RingNode], stage: Stage) -> RingMap:
    return msgspec.structs.replace(ring_map(now), transition=RingTransition(stage, then, []))


def test_a_range_puts_its_shard_first_and_moves_no_other_key() -> None:
    shards = cluster(5)
    low, high = 1 << 62, 1 << 63
    plain = Ring(ring_map(shards))
    ranged = Ring(msgspec.structs.replace(ring_map(shards), ranges=[RingRange(low, high, "shard-3")]))
    inside = [key for key in KEYS if low <= point_of(key) <= high]
    assert 100 < len(inside) < len(KEYS) - 100
    for key in KEYS:
        before, after = plain.replicas(key), ranged.replicas(key)
        if key in inside:
            rest = [name for name in plain.owners(key, 5) if name != "shard-3"]
            assert after == ("shard-3", *rest[:2])
        else:
            assert after == before


@given(shard_lists, shard_lists, st.sampled_from(["copy", "serve"]))
@settings(max_examples=15, deadline=None)
def test_a_transition_reads_one_placement_and_keeps_both(
    before: list[RingNode], after: list[RingNode], stage: Stage
) -> None:
    ring = Ring(moving(before, after, stage))
    read, other = (before, after) if stage == "copy" else (after, before)
    neighbours = {name: set(ring.neighbours(name)) for name in ring.names}
    for key in KEYS[:6]:
        groups = [oracle(read, key, 3), oracle(other, key, 3)]
        assert ring.replicas(key) == groups[0]
        assert ring.keepers(key)[: len(groups[0])] == groups[0]
        assert set(ring.keepers(key)) == set(groups[0]) | set(groups[1])
        assert len(ring.keepers(key)) == len(set(ring.keepers(key)))
        assert [set(group) for group in ring.write_groups(key)] in (
            [set(groups[0]), set(groups[1])],
            [set(groups[0])] if set(groups[0]) == set(groups[1]) else None,
        )
        assert ring.serving.replicas(key) == groups[0]
        for name in ring.keepers(key):
            assert set(ring.keepers(key)) - {name} <= neighbours[name]
            assert name in ring and ring.shard(name).node == name
            if (
                name in groups[1 if stage == "copy" else 0]
                and name not in groups[0 if stage == "copy" else 1]
            ):
                assert ring.gains(name)
    assert ring.serving.epoch == ring.epoch and not ring.serving.moving


def test_the_stages_of_a_transition_keep_records_alike() -> None:
    three, four = cluster(3), cluster(4)
    copy, serve = Ring(moving(three, four, "copy")), Ring(moving(three, four, "serve"))
    assert copy.placement == serve.placement
    assert copy.placement not in (Ring(ring_map(three)).placement, Ring(ring_map(four)).placement)
    assert copy.placement != Ring(moving(four, three, "copy")).placement
    assert serve.serving.placement == Ring(ring_map(four)).placement
    assert copy.serving.placement == Ring(ring_map(three)).placement
    assert copy.gains("shard-3") and not Ring(ring_map(four)).gains("shard-3")
    assert not Ring(moving(four, three, "copy")).gains("shard-3")


@pytest.mark.parametrize(
    "ranges",
    [
        [RingRange(5, 4, "shard-0")],
        [RingRange(0, 9, "shard-0"), RingRange(9, 12, "shard-1")],
        [RingRange(10, 12, "shard-0"), RingRange(0, 3, "shard-1")],
        [RingRange(0, 1 << 64, "shard-0")],
        [RingRange(0, 9, "nobody")],
    ],
)
def test_impossible_ranges_are_refused(ranges: list[RingRange]) -> None:
    with pytest.raises(RingError, match="range"):
        Ring(msgspec.structs.replace(ring_map(cluster(3)), ranges=ranges))
    transition = RingTransition("copy", cluster(3), ranges)
    with pytest.raises(RingError, match="range"):
        Ring(msgspec.structs.replace(ring_map(cluster(3)), transition=transition))


@settings(max_examples=8)
@given(shard_lists, shard_lists, st.integers(1, 3), st.data())
def test_covers_says_whether_a_write_could_be_met_without_them(now, then, replicas, data):
    """Against the definition: look for a write quorum of some key's owners that has none of the nodes."""
    quorum = data.draw(st.integers(1, replicas))
    stable = RingMap(1, replicas, quorum, 1, 1, now, [])
    moving = msgspec.structs.replace(stable, transition=RingTransition("copy", then, []))
    names = sorted({node.node for node in (*now, *then)})
    nodes = data.draw(st.sets(st.sampled_from(names)))
    for ring_map in (stable, moving):
        ring = Ring.from_map(ring_map)
        owners = [group for key in KEYS[:300] for group in ring.write_groups(key)]
        met = any(len(set(group) - nodes) >= min(quorum, len(group)) for group in owners)
        if ring.covers(nodes):
            assert not met
        else:
            everywhere = {group for pair in ring._pairs(replicas) for group in pair}
            assert any(len(set(group) - nodes) >= min(quorum, len(group)) for group in everywhere)
        assert ring.covers(names)
        assert not ring.covers([])


@settings(max_examples=8)
@given(shard_lists, shard_lists, st.integers(1, 3))
def test_flows_measure_the_circle(now, then, count):
    """All of it, and as many keys go each way as their share says."""
    given_away = [RingRange(0, POINT_MAX // 3, now[0].node)]
    stable = RingMap(1, 3, 2, 1, 1, now, [], given_away)
    ring = Ring.from_map(msgspec.structs.replace(stable, transition=RingTransition("copy", then, [])))
    flows = ring.flows(count)
    assert sum(flows.values()) == 2**64
    seen: Counter[tuple[tuple[str, ...], tuple[str, ...]]] = Counter()
    after = Ring.from_map(RingMap(1, 3, 2, 1, 1, then, []))
    before = Ring.from_map(stable)
    for key in KEYS:
        seen[before.owners(key, count), after.owners(key, count)] += 1
    assert set(seen) <= set(flows)
    for pair, many in seen.items():
        assert abs(many / len(KEYS) - flows[pair] / 2**64) < 0.06


def test_the_rest_of_a_stretch_whose_end_is_a_range_is_not_forgotten() -> None:
    """Policies give stretches away from their first to their last point, and in parts."""
    shards = cluster(12)
    plain = Ring(msgspec.structs.replace(ring_map(shards), replicas=4))
    points = sorted(end for _, end, _ in plain.stretches)
    owners = [plain._now.owners(point, 4) for point in points]
    counts = Counter(owners)
    at = next(at for at in range(1, len(points)) if counts[owners[at]] == 1)
    first, last = points[at - 1] + 100, points[at]
    given_away = next(node.node for node in shards if node.node not in owners[at])
    ranged = msgspec.structs.replace(plain.to_map(), ranges=[RingRange(first, last, given_away)])
    there = Ring(ranged)
    assert owners[at] in there._now.lists(4), "owners of the keys before the range"
    assert there._pairs(4) == set(there.flows(4))
    moving_on = Ring(msgspec.structs.replace(ranged, transition=RingTransition("copy", shards[1:], [])))
    assert moving_on._pairs(4) == set(moving_on.flows(4))


@settings(max_examples=8)
@given(shard_lists, st.integers(0, POINT_MAX), st.integers(0, POINT_MAX))
def test_stretches_are_the_circle_with_its_first_owners(shards, one, other):
    given_away = [RingRange(min(one, other), max(one, other), shards[-1].node)]
    ring = Ring.from_map(RingMap(1, 3, 2, 1, 1, shards, [], given_away))
    stretches = ring.stretches
    assert stretches[0][0] == 0 and stretches[-1][1] == POINT_MAX
    for (_, last, owner), (first, _, following) in pairwise(stretches):
        assert first == last + 1 and owner != following
    for key in KEYS[:200]:
        owner = next(owner for first, last, owner in stretches if first <= point_of(key) <= last)
        assert (owner,) == ring.owners(key, 1)
