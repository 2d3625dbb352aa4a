"""Planted bugs of moves and of controllers; see ``tests.sim.planted``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as altered

from controller import operating
from controller.controller import Controller, Note, Noted
from controller.journal import journal_of
from controller.leading import Lead
from controller.moving import Moving
from kvcomm.chaos.cluster import Parts, shipped_shard
from kvcomm.chaos.controllers import ControllerProcess, Controllers
from kvcomm.machine import Effect, Event
from kvcomm.wire.messages import RecordState, RingMap
from l3_shard.place import Place
from l3_shard.purge import Purge
from l3_shard.readiness import Readiness
from l3_shard.ring import Ring
from l3_shard.shard import TENANT_BYTES, Shard
from tests.sim.planted import Planted


def _planted(lie: str, promises: tuple[str, ...], *patches: tuple[Any, str, Any], **words: Any) -> Planted:
    return Planted(lie, promises, patches=patches, moves=True, **words)


# -- shards


def _lacks_in_one_group(self: Place, nodes: Collection[str]) -> tuple[int, int] | None:
    group = self.groups[0]
    count, need = sum(node in nodes for node in group), self.quorum(group)
    return (count, need) if count < need else None


def _ready_at_once(self: Readiness, node: str, ring: Ring) -> None:
    _begin_readiness(self, node, ring)
    self.ready = True


_begin_readiness = Readiness.__init__


class _PurgesWhileMoving(Shard):
    """Drops what the serving placement does not give it, also while that may change."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        if self._background is not None:
            purge = self._background.purge
            purge._keeps = lambda key: self.node in self.ring.replicas(key[TENANT_BYTES:])
            purge._ring = lambda: self.ring.serving


def _floor_not_raised(self: Purge, states: Sequence[RecordState], told: Callable[[bool], None]) -> None:
    told(True)


def _may_always_go(self: Purge, key: bytes, state: RecordState) -> bool:
    return not self._ring().moving and not self._keeps(key)


def _clean_at_once(self: Purge) -> None:
    ring = self._ring()
    self._clean = not ring.moving and bool(ring.names)


# -- controllers


def _arrives_at_once(ring: RingMap, epoch: int) -> RingMap:
    """From stage copy to the new placement alone."""
    assert ring.transition is not None
    return altered(
        ring, epoch=epoch, shards=ring.transition.shards, ranges=ring.transition.ranges, transition=None
    )


def _starts_unclean(self: Moving) -> str:
    missing = [node for node in self._target if self._report(node).state != "alive"]
    old = [node for node in self._target if self._report(node).epoch < self._map.epoch]
    return self._states(missing) or ", ".join(sorted(old)) or self._uncovered(self._living)


class _IssuesBeforeNoted(Controller):
    """Takes every note for made as soon as it is ordered."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        for effect in effects:  # grows while it is walked through
            if isinstance(effect, Note):
                effects += super().handle(Noted(effect.ticket, "done"), now)
        return effects


class _LeadsForEver(Controller):
    """Whoever led once goes on."""

    def _leading(self, now: float) -> Lead | None:
        lead = self._lead
        if lead is not None:
            lead.until = max(lead.until, now + 1.0)
        return lead if lead is not None and not lead.over else None

    def _take(self, event: Event, now: float) -> list[Effect]:
        from controller.controller import Deposed

        return [] if isinstance(event, Deposed) else super()._take(event, now)


def _rebuilds_at_once(self: Lead) -> None:
    newest = self._roster.ring
    if newest is None or newest.epoch < self._roster.heard_epoch:
        return
    if self.journal is None:
        self._write(journal_of(newest, self._running()))
    self._issue(self._refreshed(altered(newest, epoch=newest.epoch + 1)))


def _covers_one_too_few(self: Ring, owners: Sequence[str], nodes: Collection[str]) -> bool:
    quorum = min(self._map.write_quorum, len(owners))
    return sum(1 for node in owners if node in nodes) >= len(owners) - quorum


class _StrongByTheWholeRing(Shard):
    """Strong records are at the owners by the placement to come, from the first stage on."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        if self._strong is not None:
            self._strong._ring = self._by_the_other

    def _by_the_other(self) -> Ring:
        ring_map = self.ring.to_map()
        moving = ring_map.transition
        if moving is None:
            return self.ring
        stage = "copy" if moving.stage == "serve" else "serve"
        return Ring.from_map(altered(ring_map, transition=altered(moving, stage=stage))).serving


def _controllers(controller: type[Controller]) -> Parts:
    def make(name: str, controllers: Controllers) -> Controller:
        from kvcomm.chaos.controllers import shipped_controller

        return shipped_controller(name, controllers, controller)

    return Parts(controller=make)


def _shards(shard: type[Shard]) -> Parts:
    return Parts(shard=lambda birth: shipped_shard(birth, shard))


MOVES = {
    "transition skips stage serve": _planted(
        "reads change owners together with writes",
        ("quorums", "sessions", "durability", "lost"),
        (operating, "_MAPS", {**operating._MAPS, "serve": _arrives_at_once}),
    ),
    "write quorum of one group": _planted(
        "counts the serving owners only", ("durability", "lost"), (Place, "lacks", _lacks_in_one_group)
    ),
    "ready without comparing": _planted(
        "takes reads over before it has anything",
        ("ready", "quorums", "sessions", "lost"),
        (Readiness, "__init__", _ready_at_once),
    ),
    "acknowledged after adopting": _planted(
        "counts for a ring that is over",
        ("placement", "lost"),
        (Shard, "_overtaken", lambda self, merges: None),
    ),
    "purge while moving": replace(
        _planted("drops what it may have to give back", ("ready", "moves", "lost", "quorums")),
        parts=_shards(_PurgesWhileMoving),
    ),
    "purge without raising the floor": _planted(
        "gives dots again",
        ("dots",),
        (Purge, "raise_floor", _floor_not_raised),
        (Purge, "may_go", _may_always_go),
    ),
    "clean without a pass": _planted("drops nothing", ("clean",), (Purge, "placed", _clean_at_once)),
    "move begins unclean": _planted(
        "asks nobody what it still has", ("came back", "lost"), (Moving, "_start", _starts_unclean)
    ),
    "map handed out before it is noted": replace(
        _planted("tells first", ("noted", "maps")), parts=_controllers(_IssuesBeforeNoted)
    ),
    "leader acts after its lease": replace(
        _planted("does not look at the time", ("leases",)), parts=_controllers(_LeadsForEver)
    ),
    "leader without lease or fence": replace(
        _planted(
            "whoever led once goes on, and nothing stops it",
            ("noted", "maps"),
            (ControllerProcess, "fence", lambda self: 0),
        ),
        parts=_controllers(_LeadsForEver),
    ),
    "rebuilt at the next epoch by anybody": _planted(
        "counts on having heard the newest map", ("maps",), (Lead, "_rebuild", _rebuilds_at_once)
    ),
    "covers one too few": _planted(
        "lets a write quorum be without a witness",
        ("lost", "quorums", "durability"),
        (Ring, "_met", _covers_one_too_few),
    ),
    "strong records by the other placement": replace(
        _planted("moves them before, and back", ("linearizable", "moves", "back")),
        parts=_shards(_StrongByTheWholeRing),
    ),
}

MASKED_MOVES = {
    "purge without raising the floor": "a shard coordinates for a record that it gains only when it is "
    "ready, and then has its own earlier counters back, unless all of the record was buried meanwhile",
    "covers one too few": "the leader waits for every shard that lives; a witness is missing only among "
    "shards that have been dead for long",
    "strong records by the other placement": "every change of the configuration goes through joint quorums, "
    "whatever stage it comes with",
    "move begins unclean": "what a shard that slept through brings back is refused by the keepers' "
    "tombstones, unless these are buried between its death and its return",
    "transition skips stage serve": "epochs fence a coordinator of the old map off from the replicas of the "
    "new one; what is left is a read that began before",
    "leader without lease or fence": "takes a leader that stands still for longer than its lease, and an "
    "order to it before it is deposed by what it hears",
    "leader acts after its lease": "as that; told in tests/sim/scenarios/test_moves.py",
    "rebuilt at the next epoch by anybody": "takes a loss of all metadata while some shard that works by the "
    "newest map cannot be heard",
}
"""Bugs that ``SEEDS_MAX`` seeds need not show, and why."""
