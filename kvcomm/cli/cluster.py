"""What the controllers say of a cluster, for a person (``kvcomm status``, ``kvcomm top``) and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcomm.cli.following import ENDS, described, left_text

if TYPE_CHECKING:
    from kvcomm.wire.messages import ClusterView, NodeView, RingMap, SplitReport

PAST_SHOWN = 3
"""Operations that have ended."""


def lines(view: ClusterView) -> Iterator[str]:
    """Who leads, what is served, who is silent, what is going on, what became of the last split."""
    leads = f"{view.leader} leads, term {view.term}" if view.leader else "nobody leads"
    epoch = f"ring epoch {view.ring.epoch}" if view.ring is not None else "no ring yet"
    yield f"cluster {view.mode}: {leads}; {epoch}, as {view.controller} says"
    for node in view.nodes:
        if was_drained(node):
            continue
        if node.state != "alive":
            yield f"{node.node} is {node.state}: {_silence(node)}"
        elif node.silent_to:
            yield f"{node.node} is heard here, but does not answer {', '.join(node.silent_to)}"
    if view.mode != "whole" and view.ring is not None:
        yield from (f"{what}: {how}" for what, how in served(view).items())
    under_way = [each for each in view.operations if each.step not in ENDS]
    for each in under_way:
        share = f"{100 * each.done_share:.0f} %, {left_text(each.eta_s)}"
        yield f"operation {each.operation} {described(each)} ({share})"
    for each in [each for each in view.operations if each.step in ENDS][:PAST_SHOWN]:
        yield f"operation {each.operation} {described(each)}"
    split = last_split(view)
    if split is not None:
        yield f"last split: {_split_text(split)}"


def served(view: ClusterView) -> dict[str, str]:
    """What is served of each class of data by the shards that this controller hears, of all keys.

    A controller on one side of a split tells of its side.
    """
    assert view.ring is not None
    alive = {node.node for node in view.nodes if node.state == "alive"}
    groups = _groups(view.ring)
    total = len(groups) or 1
    majority = sum(2 * sum(node in alive for node in group) > len(group) for group in groups) / total
    need = view.ring.write_quorum
    writable = sum(sum(node in alive for node in group) >= min(need, len(group)) for group in groups) / total
    any_copy = sum(any(node in alive for node in group) for group in groups) / total
    first = sum(any(node in alive for node in group[: view.ring.block_copies]) for group in groups) / total
    return {
        "eventual records": _text(any_copy, "have a replica here", "what lies elsewhere waits here as hints"),
        "writes of eventual records": _text(
            writable, "have a write quorum here", "the others are kept, and their outcome is unknown"
        ),
        "strong records": _text(majority, "have a majority here", "the others are refused"),
        "blocks": _text(first, "can be read from shards", "the others are misses unless a pool has them"),
    }


def _text(share: float, here: str, rest: str) -> str:
    if share == 1.0:
        return f"all keys {here}"
    return f"{100 * share:.0f} % of the keys {here}, {rest}"


def last_split(view: ClusterView) -> SplitReport | None:
    """The worst that any shard reports of its last split: times are maxima, counts are sums."""
    from kvcomm.wire.messages import SplitReport

    reports = [node.split for node in view.nodes if node.split is not None]
    if not reports:
        return None
    unequal = any(report.equal_after_s < 0 for report in reports)
    return SplitReport(
        max(report.lasted_s for report in reports),
        sum(report.hints_drained for report in reports),
        sum(report.records_compared for report in reports),
        sum(report.merged for report in reports),
        sum(report.siblings_kept for report in reports),
        -1.0 if unequal else max(report.equal_after_s for report in reports),
    )


def document(view: ClusterView) -> dict[str, Any]:
    """For ``--json``."""
    split = last_split(view)
    return {
        "controller": view.controller,
        "leader": view.leader,
        "term": view.term,
        "mode": view.mode,
        "epoch": view.ring.epoch if view.ring is not None else 0,
        "moving": bool(view.ring is not None and view.ring.transition is not None),
        "nodes": [
            fields(node) | {name: fields(getattr(node, name)) for name in ("load", "move", "split")}
            for node in view.nodes
        ],
        "served": served(view) if view.ring is not None else {},
        "operations": [
            fields(each) | {"moves": [fields(move) for move in each.moves]} for each in view.operations
        ],
        "last_split": fields(split),
    }


def fields(of: Any) -> dict[str, Any]:
    """A struct of the wire as a dictionary."""
    return {} if of is None else {name: getattr(of, name) for name in of.__struct_fields__}


def _groups(ring: RingMap) -> Sequence[tuple[str, ...]]:
    """The replica groups of evenly spread keys; at most as many as tell the shares to a percent."""
    from l3_shard.ring import Ring

    circle = Ring.from_map(ring)
    return [circle.replicas(index.to_bytes(4, "big")) for index in range(1_000)]


def was_drained(node: NodeView) -> bool:
    """Whether it was drained and stopped; the controllers remember it for a while."""
    return node.role in ("shard", "pool") and not node.in_ring and node.state != "alive"


def _silence(node: NodeView) -> str:
    if node.silent_s < 0:
        return "not heard since this controller was started"
    return f"not heard for {node.silent_s:.0f} s"


def _split_text(split: SplitReport) -> str:
    equal = "replicas are not equal yet"
    if split.equal_after_s >= 0:
        equal = f"replicas were equal {split.equal_after_s:.1f} s after its end was noticed"
    return (
        f"lasted {split.lasted_s:.1f} s; {split.hints_drained} hints drained, {split.records_compared} "
        f"records compared, {split.merged} merged, {split.siblings_kept} kept as siblings; {equal}"
    )
