"""``Watch``: looks over the shards' shoulders while a simulation runs; sees what no client can.

* An acknowledged write is on as many disks as the write quorum says, at the moment when the answer leaves.
* A dot names one write of its record, and a value that was written once has one dot.
* Nothing that carries an older epoch than the shard's is served.
* A request is answered within the shard's time-out.
* An acceptor that says that it promised or accepted has that on its disk, and under one ballot every acceptor
  accepts the same register.  An acknowledged strong change is on the disks of a majority.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kvcomm.chaos.disk import Disk
from kvcomm.wire.messages import (
    Done,
    Failure,
    Message,
    RecordFates,
    RecordFetch,
    RecordGet,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordVersion,
    RecordVersions,
    StrongAccept,
    StrongAccepted,
    StrongChange,
    StrongEnter,
    StrongOutcomes,
    StrongPrepare,
    StrongPromised,
    StrongRead,
    StrongRegister,
    StrongRemove,
    StrongSettle,
    StrongState,
)

_FENCED = (
    RecordGet, RecordPut, RecordReplicate, RecordFetch,
    StrongRead, StrongChange, StrongPrepare, StrongAccept, StrongEnter, StrongSettle, StrongRemove,
)  # fmt: skip
"""Requests of an epoch."""


Place = frozenset[frozenset[str]]
"""The groups of which a write needs a quorum each."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    promise: str
    """Which; one word or a few, the same for every instance."""
    text: str


class Watch:
    """Args:
    disks: with the eventual records, by node.
    strong_disks: with the strong ones.
    need: disks that an acknowledged write is on.
    majority: disks that an acknowledged strong change is on.
    floor: what a node's disk promises for every strong record that it does not have.
    now: seconds of the simulation.
    places: (node, key, epoch) -> where the key was kept from that epoch to the node's present one, in order;
        ``None`` = it is not said, and any disks will do.
    """

    def __init__(
        self,
        disks: Mapping[str, Disk[RecordState]],
        strong_disks: Mapping[str, Disk[StrongState]],
        need: int,
        majority: int,
        floor: Callable[[str], bytes],
        now: Callable[[], float],
        places: Callable[[str, bytes, int], Sequence[Place]] | None = None,
    ) -> None:
        self.violations: list[Violation] = []
        self.acknowledged: dict[bytes, list[tuple[str, int, int]]] = {}
        """Writes by record: replica, counter, and the epoch by which the coordinator worked."""
        self._disks, self._strong_disks = disks, strong_disks
        self._need, self._majority, self._floor, self._now = need, majority, floor, now
        self._places = places
        self._accepted: dict[tuple[bytes, bytes], tuple[StrongRegister, str]] = {}
        self._written: dict[tuple[bytes, str, int], tuple[int, bytes | None]] = {}
        self._dots: dict[tuple[bytes, bytes], tuple[str, int]] = {}

    def answered(
        self, node: str, tenant: bytes, request: Message, epochs: tuple[int, int], answer: Message
    ) -> None:
        """``node`` answers a request; ``epochs``: by which ring it worked when it came, and does now."""
        if isinstance(answer, Failure):
            return
        epoch, present = epochs
        asked = getattr(request, "epoch", epoch)
        if isinstance(request, _FENCED) and 0 <= asked < epoch:
            self.report("epochs", f"{node} at epoch {epoch} served {type(request).__name__} of epoch {asked}")
        if isinstance(request, StrongPrepare | StrongAccept):
            self._check_vote(node, request, answer)
        elif isinstance(request, StrongChange) and isinstance(answer, StrongOutcomes):
            for order, outcome in zip(request.changes, answer.outcomes, strict=True):
                if not outcome.code and outcome.version:
                    self._check_decided(node, tenant + order.key, outcome.version)
        if isinstance(request, RecordPut) and isinstance(answer, RecordVersions | RecordFates):
            versions: list[RecordVersion | None] = (
                [fate.version for fate in answer.fates]
                if isinstance(answer, RecordFates)
                else list(answer.versions)
            )
            for write, version in zip(request.writes, versions, strict=True):
                if version is not None:
                    self._check_held(node, tenant + write.key, version.replica, version.counter, epoch)
                    dot = (version.replica, version.counter, present)
                    self.acknowledged.setdefault(tenant + write.key, []).append(dot)
        if isinstance(request, RecordReplicate) and isinstance(answer, Done):
            for key, state in zip(request.keys, request.states, strict=True):
                self._check_merged(node, key, state)
                self._check_placed(node, key, request.epoch)

    def _check_vote(self, node: str, request: StrongPrepare | StrongAccept, answer: Message) -> None:
        """A vote that a crash takes back lets two proposers both succeed.  A record may be removed in the
        write that its promise is in, or its deletion: then the floor has to stand for that."""
        if not isinstance(answer, StrongPromised | StrongAccepted) or not answer.granted:
            return
        held = self._strong_disks[node].held(request.key)
        promised = max((state.promised for state in held), default=b"")
        accepted = max((state.accepted for state in held), default=b"")
        if request.key not in self._strong_disks[node].values:
            promised = max(promised, self._floor(node))
            if isinstance(request, StrongAccept) and request.register.value is None:
                accepted = max(accepted, self._floor(node))
        if promised < request.ballot or (isinstance(request, StrongAccept) and accepted < request.ballot):
            self.report("votes", f"{node} granted {request} and has promised {promised!r}, {accepted!r}")

    def _check_decided(self, node: str, key: bytes, version: bytes) -> None:
        """Versions grow: a disk has the change, or one that was made after it."""
        holders = [
            name
            for name, disk in sorted(self._strong_disks.items())
            if any(state.register.version >= version for state in disk.held(key))
        ]
        if len(holders) < self._majority:
            self.report(
                "durability", f"{node} acknowledged {version!r} of {key!r}, which is on {holders} only"
            )

    def accepted(self, node: str, key: bytes, state: StrongState) -> None:
        """``state`` is on the disk of ``node``."""
        if not state.accepted:
            return
        known, first = self._accepted.setdefault((key, state.accepted), (state.register, node))
        if known != state.register:
            self.report(
                "ballots",
                f"{key!r}: {first} accepted {known} under {state.accepted!r}, {node} {state.register}",
            )

    def written(self, node: str, key: bytes, state: RecordState) -> None:
        """``state`` is on the disk of ``node``."""
        for sibling in state.siblings:
            content = (sibling.hlc, sibling.value)
            known = self._written.setdefault((key, sibling.replica, sibling.counter), content)
            if known != content:
                self.report(
                    "dots",
                    f"{key!r}: dot ({sibling.replica}, {sibling.counter}) names {known} "
                    f"and, at {node}, {content}",
                )
            if sibling.value is not None:
                dot = (sibling.replica, sibling.counter)
                first = self._dots.setdefault((key, sibling.value), dot)
                if first != dot:
                    self.report("once", f"{key!r}: {sibling.value!r} was written twice, as {first} and {dot}")

    def unanswered(self, node: str, message: Message, age_s: float) -> None:
        self.report("answers", f"{node} has not answered {type(message).__name__} for {age_s:.1f} s")

    def _check_held(self, node: str, key: bytes, replica: str, counter: int, epoch: int) -> None:
        holders = [
            name
            for name, disk in sorted(self._disks.items())
            if any(state.context.get(replica, 0) >= counter for state in disk.held(key))
        ]
        if self._places is not None and node in holders:
            places = self._places(node, key, epoch)
            if any(all(self._met(group, holders) for group in place) for place in places):
                return
            self.report(
                "durability",
                f"{node} acknowledged ({replica}, {counter}) of {key!r}, which is on {holders} only, "
                f"not on {self._need} of each of {places[-1:]}",
            )
        elif len(holders) < self._need or node not in holders:
            self.report(
                "durability",
                f"{node} acknowledged ({replica}, {counter}) of {key!r}, which is on {holders} only, "
                f"not on {self._need} disks with its own",
            )

    def _met(self, group: Collection[str], holders: Sequence[str]) -> bool:
        return sum(node in holders for node in group) >= min(self._need, len(group))

    def _check_placed(self, node: str, key: bytes, epoch: int) -> None:
        """Who acknowledges has not learned meanwhile that the record has other owners: the coordinator would
        count a copy that its own map does not."""
        places = [] if self._places is None else self._places(node, key, epoch)
        if len(places) > 1 and places[0] != places[-1]:
            self.report(
                "placement",
                f"{node} acknowledged {key!r} to epoch {epoch}, and has another map by now: {places}",
            )

    def _check_merged(self, node: str, key: bytes, state: RecordState) -> None:
        """A replica that says so has everything that it was sent."""
        held = self._disks[node].held(key)
        for replica, counter in sorted(state.context.items()):
            if not any(each.context.get(replica, 0) >= counter for each in held):
                self.report("durability", f"{node} says that it has ({replica}, {counter}) of {key!r}")

    def report(self, promise: str, text: str) -> None:
        """Note a broken promise."""
        self.violations.append(Violation(promise, f"at {self._now():.6f}: {text}"))
