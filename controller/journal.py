"""``Journal``: what is to run, and what has been done to the cluster: the record ``plan`` of the metadata.

An operation is written here before anything of it is done, and when it is over.  Between these the ring map
itself says how far it is: a transition carries its stage and where it goes, so a leader that finds the map
alone can go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from kvcomm.errors import Corrupt
from kvcomm.wire.messages import NodePlan, PlannedMove, RingMap, RingRange

VERSION = 1
OPERATIONS_MAX = 20
"""Operations that are remembered, the one under way included."""
MOVES_MAX = 64
"""Moves of an operation that are remembered."""

Step = Literal[
    "planned", "copying", "verifying", "serving", "purging", "done", "cancelled", "rolled back", "failed"
]
Kind = Literal["scale", "drain", "move", "rebalance", "replace", "resume"]
Back = Literal["", "cancelled", "rolled back", "failed"]
OVER: frozenset[Step] = frozenset(("done", "cancelled", "rolled back", "failed"))


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One change of who keeps what."""

    number: int
    """Counts up, for ever."""
    kind: Kind
    what: str
    """For a person."""
    shards: list[NodePlan]
    """The placement to reach, until it is over."""
    ranges: list[RingRange]
    joins: list[str] = []
    """Nodes that were planned for it; they go again when it is taken back."""
    leaves: list[str] = []
    """Nodes that are planned no more when it is done."""
    step: Step = "planned"
    back: Back = ""
    """How it is to end instead of ``done``: it is being taken back."""
    served: bool = False
    """Its transition may have been in stage serve."""
    moves: list[PlannedMove] = []
    trouble: str = ""
    """Why it was taken back."""
    spent_s: float = 0.0

    @property
    def over(self) -> bool:
        return self.step in OVER


class Journal(msgspec.Struct, frozen=True, array_like=True):
    """Immutable; every change is a new one."""

    version: int
    nodes: list[NodePlan]
    """All that launchers are to run."""
    operations: list[Operation] = []
    """Oldest first; at most the last is not over."""
    drained: list[str] = []
    """Pools that an operator has drained, whatever the configuration says; sorted."""

    @property
    def under_way(self) -> Operation | None:
        last = self.operations[-1] if self.operations else None
        return None if last is None or last.over else last

    @property
    def next_number(self) -> int:
        return self.operations[-1].number + 1 if self.operations else 1

    def of_role(self, role: str) -> list[NodePlan]:
        return [node for node in self.nodes if node.role == role]

    @property
    def pools(self) -> list[NodePlan]:
        """That the map is to hold: not those that the operation under way drains."""
        operation = self.under_way
        leaving = operation.leaves if operation is not None and not operation.back else []
        return [node for node in self.of_role("pool") if node.node not in leaving]

    def node(self, name: str) -> NodePlan | None:
        return next((node for node in self.nodes if node.node == name), None)

    def begun(self, operation: Operation) -> Journal:
        """With one more operation, whose joining shards are planned from now on."""
        assert self.under_way is None and operation.number == self.next_number
        known = {node.node for node in self.nodes}
        joining = [
            node for node in operation.shards if node.node in operation.joins and node.node not in known
        ]
        kept = [*self.operations, replace(operation, moves=operation.moves[:MOVES_MAX])][-OPERATIONS_MAX:]
        return replace(self, nodes=[*self.nodes, *joining], operations=kept)

    def now(self, operation: Operation) -> Journal:
        """With the last operation in another step; when it is over, with what is to run from then on."""
        assert self.operations and self.operations[-1].number == operation.number
        nodes, drained = self.nodes, self.drained
        if operation.over:
            gone = operation.leaves if operation.step == "done" else operation.joins
            weights = {node.node: node for node in operation.shards} if operation.step == "done" else {}
            pools = {node.node for node in self.of_role("pool") if node.node in gone}
            drained = sorted({*drained, *pools})
            nodes = [weights.get(node.node, node) for node in nodes if node.node not in gone]
            operation = replace(operation, shards=[], ranges=[])  # long lists, and nobody needs them any more
        operations = [*self.operations[:-1], operation]
        return replace(self, nodes=nodes, operations=operations, drained=drained)

    def with_pools(self, pools: Iterable[NodePlan]) -> Journal:
        """With the pools of the configuration, which may have changed, but for those that an operator has
        drained."""
        others = [node for node in self.nodes if node.role != "pool"]
        return replace(self, nodes=[*others, *(pool for pool in pools if pool.node not in self.drained)])

    def without(self, names: Iterable[str]) -> Journal:
        """These are not to run any more."""
        gone = set(names)
        return replace(self, nodes=[node for node in self.nodes if node.node not in gone])


def first_journal(nodes: Sequence[NodePlan]) -> Journal:
    return Journal(VERSION, list(nodes))


def journal_of(ring: RingMap, others: Iterable[NodePlan], before: Journal | None = None) -> Journal:
    """What can be told from a map and from what is running, when the journal is lost.

    Args:
        before: an older one, whose past counts, but not what it plans: the map may have gone on without it.
    """
    shards = {node.node: node for node in ring.shards}
    if ring.transition is not None:
        shards.update((node.node, node) for node in ring.transition.shards)
    nodes = [NodePlan(node.node, "shard", node.rack, node.weight) for node in shards.values()]
    nodes += [NodePlan(node.node, "pool", node.rack, node.weight) for node in ring.pools]
    known = {node.node for node in nodes}
    journal = first_journal([*nodes, *(node for node in others if node.node not in known)])
    if before is None:
        return journal
    lost = before.under_way
    if lost is not None:
        before = before.now(replace(lost, step="failed", trouble="the controllers' records were lost"))
    return replace(journal, operations=before.operations, drained=before.drained)


def encode_journal(journal: Journal) -> bytes:
    return msgspec.msgpack.encode(journal)


def decode_journal(data: bytes) -> Journal:
    """The inverse of :func:`encode_journal`.

    Raises:
        Corrupt: it is no journal, or one of a version that this code does not know.
    """
    try:
        journal = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise Corrupt(f"the plan cannot be read: {error}") from error
    if journal.version != VERSION:
        raise Corrupt(f"the plan has version {journal.version}, this program knows {VERSION}")
    return journal


_decoder = msgspec.msgpack.Decoder(Journal)
