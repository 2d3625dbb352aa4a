"""``MerkleTree``: one hash for many records, and a way down to those in which two replicas differ (Merkle
1987; as anti-entropy: Dynamo, SOSP 2007).

A record belongs to one of ``LEAVES`` leaves by the hash of its key, on every shard to the same.  A leaf's
digest is the sum of its records' digests, each node above the hash of the ``FAN_OUT`` digests below it::

    depth 0                      root
    depth 1         0      1    ...     15
    depth 2       0..15  16..31      240..255
    ...
    depth 4       65,536 leaves; equal digests: equal records (but for a collision, 2^-64 a comparison)

Two replicas that agree learn it from one question; each differing record costs a path, shared at the top.
The
digests are no proof against somebody who makes collisions on purpose: a tenant could only hide its own
records' differences that way, and reads repair those.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import cache

import msgspec
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvcomm.wire.messages import RecordState

FAN_OUT = 16
DEPTH = 4
LEAVES = FAN_OUT**DEPTH
DIGEST_MASK = 2**64 - 1

Node = tuple[int, int]
"""(depth, index): the root is (0, 0), leaf n is (DEPTH, n)."""


def leaf_of(key: bytes) -> int:
    """The leaf of a stored key, in ``[0, LEAVES)``; the same on every shard and for ever."""
    return int.from_bytes(xxh3_64_digest(key)[:2], "big")


def state_digest(key: bytes, state: RecordState) -> int:
    """64 bits of a record's key and canonical state: equal on replicas that hold the same, hardly ever
    else."""
    return encoded_digest(key, msgspec.msgpack.encode(state))


def encoded_digest(key: bytes, body: bytes) -> int:
    """:func:`state_digest` of a state in its stored encoding (msgpack)."""
    return xxh3_64_intdigest(len(key).to_bytes(2, "little") + key + body)


class MerkleTree:
    """Digests of one set of records; 560 KiB, whatever it stands for.  A new one stands for no records."""

    def __init__(self) -> None:
        self._levels = [level[:] for level in _empty_levels()]
        self._stale: set[int] = set()  # nodes of depth DEPTH - 1 with a leaf that changed

    @property
    def root(self) -> int:
        """Digest of everything."""
        self._settle()
        return self._levels[0][0]

    def update(self, leaf: int, digest: int) -> None:
        """Say what ``leaf`` holds now: the sum of its records' digests, modulo 2^64."""
        if self._levels[DEPTH][leaf] != digest:
            self._levels[DEPTH][leaf] = digest
            self._stale.add(leaf // FAN_OUT)

    def children(self, node: Node) -> list[int]:
        """The ``FAN_OUT`` digests below an inner node.

        Raises:
            IndexError: there is no such inner node.
        """
        depth, index = node
        if not (0 <= depth < DEPTH and 0 <= index < FAN_OUT**depth):
            raise IndexError(f"a tree has no inner node {index} at depth {depth}")
        self._settle()
        return list(self._levels[depth + 1][index * FAN_OUT : (index + 1) * FAN_OUT])

    def _settle(self) -> None:
        """Hash what stands above changed leaves, once, however many of them changed."""
        stale, self._stale = self._stale, set()
        for depth in range(DEPTH - 1, -1, -1):
            above, below = self._levels[depth], self._levels[depth + 1]
            for index in stale:
                above[index] = _hash(below[index * FAN_OUT : (index + 1) * FAN_OUT])
            stale = {index // FAN_OUT for index in stale}


class Descent:
    """Compares our tree with another's, which is reached by questions: ask :meth:`next`, give the answer to
    :meth:`told`, until there is no question; then ``leaves`` are those that differ, in order.

    Goes deep first, so what waits stays small: at most ``FAN_OUT - 1`` nodes a depth and question besides
    those of the question itself.
    """

    def __init__(self, tree: MerkleTree, nodes_max: int) -> None:
        self.leaves: list[int] = []
        self._tree = tree
        self._nodes_max = nodes_max
        self._waiting: list[list[int]] = [[0], *([] for _ in range(DEPTH - 1))]  # by depth
        self._asked: list[Node] = []

    def next(self) -> tuple[int, list[int]] | None:
        """(depth, indices) of inner nodes whose children are to be asked for; ``None`` = all is known."""
        for depth in range(DEPTH - 1, -1, -1):
            if waiting := self._waiting[depth]:
                indices, self._waiting[depth] = waiting[: self._nodes_max], waiting[self._nodes_max :]
                self._asked = [(depth, index) for index in indices]
                return depth, indices
        self.leaves.sort()
        return None

    def told(self, digests: Sequence[int]) -> None:
        """The other's ``FAN_OUT`` digests below each node of the last question, one after the other.

        Raises:
            ValueError: not as many as were asked for.
        """
        if len(digests) != FAN_OUT * len(self._asked):
            raise ValueError(f"{len(digests)} digests are no answer to {len(self._asked)} nodes")
        theirs = iter(digests)
        for depth, index in self._asked:
            ours = self._tree.children((depth, index))
            below = self.leaves if depth + 1 == DEPTH else self._waiting[depth + 1]
            # every child takes one of `theirs`, also those that turn out equal
            below += [index * FAN_OUT + child for child, digest in enumerate(ours) if digest != next(theirs)]
        self._asked = []


def leaf_digest(digests: Iterable[int]) -> int:
    """The digest of a leaf with these records; 0 for none."""
    return sum(digests) & DIGEST_MASK


@cache
def _empty_levels() -> list[array[int]]:
    """As hashing would make them, without hashing 4,369 times."""
    digests = [0]
    for _ in range(DEPTH):
        digests.insert(0, _hash(array("Q", [digests[0]] * FAN_OUT)))
    return [array("Q", [digest]) * FAN_OUT**depth for depth, digest in enumerate(digests)]


def _hash(digests: array[int]) -> int:
    return int(xxh3_64_intdigest(digests))
