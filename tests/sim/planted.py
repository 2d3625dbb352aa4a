"""Planted bugs: each breaks one part in a way that the simulator must notice.

A bug is a subclass or a wrapper that a test puts in by ``kvcomm.chaos.cluster.Parts``; shipped code has no
switch for any of them.  Each names the promises that it breaks: a bug that only another check notices is
noticed for the wrong reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvcomm.chaos.cluster import (
    ClientProcess,
    Cluster,
    Parts,
    ShardProcess,
    run_once,
    shipped_disk,
    shipped_shard,
)
from kvcomm.chaos.disk import Disk, Fsync, Outcome, Part
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.driver import Done
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.swarm import draw_plan
from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.machine import ConnectionId, Effect, Event, Origin
from kvcomm.machine import Reply as ReplyEffect
from kvcomm.steps import Steps
from kvcomm.version import VersionVector
from kvcomm.wire.messages import (
    Done as DoneMessage,
)
from kvcomm.wire.messages import (
    Failure,
    Message,
    RecordGet,
    RecordReplicate,
    RecordState,
    RecordWrite,
)
from l3_shard import dvv
from l3_shard.shard import Shard
from l3_shard.storage import Loaded, Persist, Persisted
from l3_shard.writing import Draft


@dataclass(frozen=True)
class Planted:
    """A bug.  ``lie`` says what the broken part does."""

    lie: str
    promises: tuple[str, ...]
    """Of these, one at least is found broken."""
    parts: Parts


def _shards(shard: type[Shard]) -> Parts:
    return Parts(shard=lambda birth: shipped_shard(birth, shard))


def _disks(disk: type[Disk]) -> Parts:
    def make(draw: Draw, fsync: Fsync, new_replica: Callable[[], str]) -> Disk:
        return shipped_disk(draw, fsync, new_replica, disk)

    return Parts(disk=make)


# -- shards


class _QuorumOneTooSmall(Shard):
    def _draft(self, tenant: bytes, write: RecordWrite) -> Draft:
        draft = super()._draft(tenant, write)
        return replace(draft, need=max(1, draft.need - 1))


class _AcknowledgedBeforePersisted(Shard):
    """Takes every write for durable as soon as it is ordered."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Persisted):
            return []
        effects = super().handle(event, now)
        for effect in effects:
            if isinstance(effect, Persist):
                effects += super().handle(Persisted(effect.ticket), now)
        return effects


class _ReplicaAnswersBeforeDurable(Shard):
    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._early: list[Effect] = []
        self._told: set[tuple[int, int]] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        kept = [effect for effect in effects if not self._is_told(effect)]
        early, self._early = self._early, []
        return kept + early

    def _replicate(self, origin: Origin, message: RecordReplicate) -> None:
        super()._replicate(origin, message)
        self._early.append(ReplyEffect(origin, DoneMessage()))
        self._told.add((origin.connection, origin.request))

    def _is_told(self, effect: Effect) -> bool:
        if not isinstance(effect, ReplyEffect):
            return False
        return (effect.origin.connection, effect.origin.request) in self._told


class _StaleEpochAccepted(Shard):
    def _check_epoch(self, epoch: int) -> None:
        if epoch > self.ring.epoch:
            super()._check_epoch(epoch)


class _SiblingsTruncated(Shard):
    """Keeps a handful, as if nobody could want more."""

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        written = super()._accept(state, draft)
        return replace(written, state=RecordState(written.state.context, written.state.siblings[-3:]))


@dataclass(eq=False)
class _Change:
    function: Callable[[RecordState], RecordState]
    done: Callable[[KVCommError | None], None]

    def apply(self, state: RecordState) -> RecordState:
        return self.function(state)

    def durable(self, state: RecordState) -> None:
        self.done(None)

    def failed(self, error: KVCommError) -> None:
        self.done(error)


class _MergeDropsSiblings(Shard):
    """Last write wins."""

    def _merge(self, key: bytes, state: RecordState, done: Callable[[KVCommError | None], None]) -> None:
        def newest(mine: RecordState) -> RecordState:
            both = dvv.merge(mine, state)
            return RecordState(both.context, sorted(both.siblings, key=lambda one: one.hlc)[-1:])

        self._lines.change(key, _Change(newest, done))


class _MergeKeepsReplaced(Shard):
    """A union of what either side holds, whatever the other has seen of it."""

    def _merge(self, key: bytes, state: RecordState, done: Callable[[KVCommError | None], None]) -> None:
        def union(mine: RecordState) -> RecordState:
            held = {(one.replica, one.counter): one for one in (*mine.siblings, *state.siblings)}
            context = VersionVector.from_wire(mine.context).merge(VersionVector.from_wire(state.context))
            return RecordState(context.to_wire(), [held[dot] for dot in sorted(held)])

        self._lines.change(key, _Change(union, done))


class _RepairWithWrongContext(Shard):
    """Believes that it has seen one write more than it was told of, of every replica."""

    def _repair(self, key: bytes, state: RecordState, mends: bool) -> None:
        context = {replica: counter + 1 for replica, counter in state.context.items()}
        super()._repair(key, RecordState(context, state.siblings), mends)


class _UnknownCalledRefused(Shard):
    """Says "nothing was written" when too few replicas confirmed."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [self._lie(effect) for effect in super().handle(event, now)]

    def _lie(self, effect: Effect) -> Effect:
        if not isinstance(effect, ReplyEffect) or not isinstance(effect.message, Failure):
            return effect
        if effect.message.code != OutcomeUnknown.code:
            return effect
        return ReplyEffect(effect.origin, Failure(Unavailable.code, effect.message.text))


class _NeverTooLate(Shard):
    """Waits for its disk as long as it takes."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._desk.expire = _nothing  # type: ignore[method-assign]

    def deadline(self) -> float | None:
        return None


class _OneReadIsEnough(Shard):
    """Whoever is asked answers for all."""

    def _query(self, tenant: bytes, key: bytes):
        return super()._query(tenant, key)._replace(need=1, wide=1)


class _LeastIgnored(Shard):
    """Whatever the caller has seen before."""

    def _get(self, origin: Origin, message: RecordGet) -> None:
        super()._get(origin, RecordGet(message.epoch, message.keys))


class _DamageForgotten(Shard):
    """A damaged record is taken for one that was never written, its id included."""

    def _loaded(self, event: Loaded) -> None:
        self._lines.loaded(replace(event, damaged=()))


class _ContextCoversUnseen(Shard):
    """Gives the writer the context of the whole record, though it has not seen all of it."""

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        written = super()._accept(state, draft)
        return replace(written, context=written.state.context)


class _DuplicateDot(Shard):
    """Counts only the writes that are still there."""

    def _accept(self, state: RecordState, draft: Draft) -> dvv.Written:
        held = max((one.counter for one in state.siblings if one.replica == self.replica), default=0)
        seen = _with_counter(VersionVector.from_wire(state.context), self.replica, held)
        read = min(held, draft.context.counter(self.replica))
        context = _with_counter(draft.context, self.replica, read)
        forgetful = RecordState(seen.to_wire(), state.siblings)
        return dvv.put(forgetful, self.replica, self._stamp(state), draft.value, context)


def _with_counter(vector: VersionVector, replica: str, counter: int) -> VersionVector:
    others = tuple(entry for entry in vector.entries if entry[0] != replica)
    return VersionVector(others).merge(VersionVector(((replica, counter),) if counter else ()))


# -- disks


class _KeepsIdAfterLoss(Disk):
    def lose(self) -> None:
        replica = self.replica
        super().lose()
        self.replica = replica


class _GroupCommitLies(Disk):
    """What there was no room for is reported like what there was room for."""

    def commit_singly(self, batch: Sequence[Part]) -> list[Outcome]:
        outcomes = super().commit_singly(batch)
        return ["durable"] * len(batch) if "durable" in outcomes else outcomes


class _FailedSyncIgnored(Disk):
    def commit(self) -> list[Outcome]:
        outcomes = super().commit()
        return ["durable" if outcome == "failed" else outcome for outcome in outcomes]


class _TombstonesDropped(Disk):
    """A deleted record is removed, and what it had seen with it."""

    def _write(self, batch: Sequence[Part]) -> None:
        super()._write(batch)
        for part in batch:
            for key, state in part.writes:
                if not dvv.alive(state):
                    self.values.pop(key, None)


class _TornCommit(Disk):
    """A transaction that a crash cuts short leaves its first half, and its answer is out already."""

    def begin(self, batch: Sequence[Part]) -> None:
        super().begin(batch)
        self._torn = [part._replace(writes=part.writes[: len(part.writes) // 2]) for part in batch]

    def commit(self) -> list[Outcome]:
        if self._draw.chance(0.05):
            self._under_way = []
            self._write(self._torn)
            return ["durable"] * len(self._torn)
        return super().commit()


def _unverified(draw: Draw, fsync: Fsync, new_replica: Callable[[], str]) -> Disk:
    """Serves what it reads without looking at the checksum."""
    import msgspec

    def decode(key: bytes, value: bytes) -> RecordState:
        return msgspec.msgpack.decode(value[16:], type=RecordState)

    disk = shipped_disk(draw, fsync, new_replica)
    disk._decode = decode
    return disk


# -- clients


def _again_after_unknown(
    cluster: Cluster, client: ClientProcess, steps: Callable[[], Steps[object]], done: Done[object]
) -> None:
    """Sends a write again when its outcome is unknown."""

    def first(result: object, error: KVCommError | None) -> None:
        if isinstance(error, OutcomeUnknown):
            run_once(cluster, client, steps, done)
        else:
            done(result, error)

    run_once(cluster, client, steps, first)


class _ServesTwice(ShardProcess):
    """Requests that must not be repeated are, now and then."""

    def received(self, origin: Origin, message: Message, reply: Callable[[Message], None]) -> None:
        super().received(origin, message, reply)
        if not message.idempotent and self.draw.chance(0.02):
            ghost = replace(origin, connection=ConnectionId(0), request=self.cluster.network.frame_count)
            self.host.after(0.05, lambda: super(_ServesTwice, self).received(ghost, message, _nobody))


def _nothing() -> None:
    """Happens."""


def _nobody(message: Message) -> None:
    """Hears it."""


PLANTED = {
    "quorum one too small": Planted("acknowledges with W - 1", ("durability",), _shards(_QuorumOneTooSmall)),
    "acknowledged before persisted": Planted(
        "tells the client first", ("durability",), _shards(_AcknowledgedBeforePersisted)
    ),
    "replica answers before durable": Planted(
        "tells the coordinator first", ("durability",), _shards(_ReplicaAnswersBeforeDurable)
    ),
    "stale epoch accepted": Planted("serves an old map", ("epochs",), _shards(_StaleEpochAccepted)),
    "siblings truncated": Planted("keeps three", ("lost",), _shards(_SiblingsTruncated)),
    "merge drops siblings": Planted("last write wins", ("lost",), _shards(_MergeDropsSiblings)),
    "merge keeps what was replaced": Planted("plain union", ("came back",), _shards(_MergeKeepsReplaced)),
    "read repair with wrong context": Planted(
        "has seen too much", ("lost", "dots"), _shards(_RepairWithWrongContext)
    ),
    "unknown called refused": Planted("lies about failure", ("refused",), _shards(_UnknownCalledRefused)),
    "deadlines forgotten": Planted("waits for ever", ("answers",), _shards(_NeverTooLate)),
    "read quorum ignored": Planted("reads its own copy only", ("quorums",), _shards(_OneReadIsEnough)),
    "least context ignored": Planted("answers from an older copy", ("sessions",), _shards(_LeastIgnored)),
    "damage forgotten": Planted("goes on under its id", ("dots", "invariant"), _shards(_DamageForgotten)),
    "context covers unseen values": Planted(
        "lets a writer replace what it never saw", ("lost",), _shards(_ContextCoversUnseen)
    ),
    "counter of living writes only": Planted("gives a dot twice", ("dots",), _shards(_DuplicateDot)),
    "id kept after disk loss": Planted("gives dots again", ("dots",), _disks(_KeepsIdAfterLoss)),
    "group commit lies": Planted(
        "acknowledges others' failed write", ("durability",), _disks(_GroupCommitLies)
    ),
    "failed sync ignored": Planted("goes on after EIO", ("durability",), _disks(_FailedSyncIgnored)),
    "tombstones dropped": Planted(
        "deletes without a trace", ("came back", "dots", "durability"), _disks(_TombstonesDropped)
    ),
    "torn commit": Planted("half a transaction", ("durability",), _disks(_TornCommit)),
    "damaged record served": Planted(
        "no checksum", ("made up", "dots", "lost", "invariant"), Parts(disk=_unverified)
    ),
    "retry after unknown": Planted("writes again", ("once",), Parts(run=_again_after_unknown)),
    "request served twice": Planted("doubles writes", ("once",), Parts(process=_ServesTwice)),
}

SEEDS_MAX = 200


def caught_at(bug: Planted, seeds: Iterable[int] = range(SEEDS_MAX)) -> int | None:
    """The first seed in whose world a promise that ``bug`` breaks is found broken."""
    for seed in seeds:
        broken = {violation.promise for violation in simulate(draw_plan(seed), bug.parts).violations}
        if broken & set(bug.promises):
            return seed
    return None


def main() -> int:
    """Try every bug; how many were missed."""
    missed = 0
    for name, bug in PLANTED.items():
        seed = caught_at(bug)
        missed += seed is None
        verdict = f"missed in {SEEDS_MAX} seeds" if seed is None else f"caught at seed {seed}"
        sys.stdout.write(f"{name:32} {verdict}\n")
        sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
