"""The Merkle tree beside a dumb comparison of two dictionaries."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.wire.messages import RecordState, Sibling
from l3_shard.merkle import (
    DEPTH,
    DIGEST_MASK,
    FAN_OUT,
    LEAVES,
    Descent,
    MerkleTree,
    encoded_digest,
    leaf_digest,
    leaf_of,
    state_digest,
)

Leaves = dict[int, int]
LEAF_DIGESTS = st.dictionaries(
    st.integers(0, LEAVES - 1) | st.integers(0, 40), st.integers(1, DIGEST_MASK), max_size=60
)


def tree_of(leaves: Leaves) -> MerkleTree:
    tree = MerkleTree()
    for leaf, digest in leaves.items():
        tree.update(leaf, digest)
    return tree


def compare(ours: MerkleTree, theirs: MerkleTree, nodes_max: int) -> tuple[list[int], int]:
    """(leaves found, inner nodes asked for)."""
    descent, asked = Descent(ours, nodes_max), 0
    while (question := descent.next()) is not None:
        depth, indices = question
        assert 1 <= len(indices) <= nodes_max
        asked += len(indices)
        descent.told([digest for index in indices for digest in theirs.children((depth, index))])
    return descent.leaves, asked


def differing(one: Leaves, two: Leaves) -> list[int]:
    return [leaf for leaf in sorted(one.keys() | two.keys()) if one.get(leaf, 0) != two.get(leaf, 0)]


@settings(max_examples=25, deadline=None)
@given(LEAF_DIGESTS, LEAF_DIGESTS, st.integers(1, 300))
def test_a_descent_finds_exactly_the_leaves_that_differ(shared: Leaves, changed: Leaves, nodes_max: int):
    theirs = shared | changed
    found, asked = compare(tree_of(shared), tree_of(theirs), nodes_max)
    assert found == differing(shared, theirs)
    assert asked <= 1 + (DEPTH - 1) * len(found), "one path a leaf at most"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, LEAVES - 1), st.integers(0, DIGEST_MASK)), max_size=60), st.data())
def test_a_tree_is_what_its_leaves_are_in_whatever_order_they_came(
    updates: list[tuple[int, int]], data: st.DataObject
):
    tree = MerkleTree()
    for leaf, digest in updates:
        tree.update(leaf, digest)
        if data.draw(st.booleans()):
            assert tree.root == tree.root
    final = dict(updates)
    again = tree_of(dict(sorted(final.items())))
    assert tree.root == again.root
    assert [tree.children((0, 0)), tree.children((DEPTH - 1, 0))] == [
        again.children((0, 0)),
        again.children((DEPTH - 1, 0)),
    ]
    for leaf in final:
        tree.update(leaf, 0)
    assert tree.root == MerkleTree().root, "nothing left is nothing ever"


def test_equal_trees_ask_one_question():
    tree = tree_of({leaf: leaf + 1 for leaf in range(0, LEAVES, 7)})
    assert compare(tree, tree, 256) == ([], 1)


def test_everything_different_is_found_and_what_waits_stays_bounded():
    ours, theirs = MerkleTree(), tree_of(dict.fromkeys(range(LEAVES), 1))
    descent, widest = Descent(ours, 16), 0
    while (question := descent.next()) is not None:
        depth, indices = question
        descent.told([digest for index in indices for digest in theirs.children((depth, index))])
        widest = max(widest, sum(len(waiting) for waiting in descent._waiting))
    assert descent.leaves == list(range(LEAVES))
    assert widest <= (DEPTH - 1) * 16 * FAN_OUT


def test_a_wrong_answer_is_refused():
    descent = Descent(MerkleTree(), 4)
    assert descent.next() == (0, [0])
    with pytest.raises(ValueError, match="15 digests"):
        descent.told([0] * 15)


@pytest.mark.parametrize("node", [(DEPTH, 0), (-1, 0), (1, FAN_OUT), (2, -1)])
def test_there_are_no_other_inner_nodes(node: tuple[int, int]):
    with pytest.raises(IndexError):
        MerkleTree().children(node)


def test_leaves_are_used_evenly_and_are_the_same_everywhere():
    draw = random.Random(1)
    counts = [0] * FAN_OUT
    for _ in range(16_000):
        counts[leaf_of(draw.randbytes(24)) // (LEAVES // FAN_OUT)] += 1
    assert 850 < min(counts) <= max(counts) < 1_150
    assert [leaf_of(b""), leaf_of(b"key"), leaf_of(bytes(40))] == [11526, 48106, 4429]


def test_a_digest_tells_keys_and_states_apart():
    state = RecordState({"r": 1}, [Sibling("r", 1, 5, b"v")])
    other = RecordState({"r": 1}, [Sibling("r", 1, 6, b"v")])
    digests = {state_digest(b"k", state), state_digest(b"l", state), state_digest(b"k", other)}
    assert len(digests) == 3 and all(0 <= digest <= DIGEST_MASK for digest in digests)
    assert encoded_digest(b"ab", b"c") != encoded_digest(b"a", b"bc")


def test_a_leaf_is_the_sum_of_its_records():
    assert leaf_digest([]) == 0
    assert leaf_digest([DIGEST_MASK, 3]) == 2


RECORDS = st.dictionaries(st.binary(min_size=1, max_size=3), st.integers(1, 3), max_size=80)


def summed(records: dict[bytes, int]) -> MerkleTree:
    leaves: dict[int, list[int]] = {}
    for key, version in records.items():
        leaves.setdefault(leaf_of(key), []).append(encoded_digest(key, b"%d" % version))
    return tree_of({leaf: leaf_digest(digests) for leaf, digests in leaves.items()})


@settings(max_examples=25, deadline=None)
@given(RECORDS, RECORDS, st.integers(1, 300))
def test_the_records_that_differ_are_those_of_a_naive_diff(
    shared: dict[bytes, int], changed: dict[bytes, int], nodes_max: int
):
    """Descend to the leaves, then compare what lies in them; the naive way looks at every record."""
    ours, theirs = shared, {key: version for key, version in shared.items() if key[0] % 5} | changed
    naive = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    leaves, _ = compare(summed(ours), summed(theirs), nodes_max)
    listed = {key for key in ours.keys() | theirs.keys() if leaf_of(key) in leaves}
    assert {key for key in listed if ours.get(key) != theirs.get(key)} == naive
