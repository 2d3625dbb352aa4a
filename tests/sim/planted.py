"""Planted bugs: each breaks one part in a way that the simulator must notice.

A bug is a subclass or a wrapper that a test puts in by ``kvcomm.chaos.cluster.Parts``; shipped code has no
switch for any of them.  Each names the promises that it breaks: a bug that only another check notices is
noticed for the wrong reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from kvcomm.block import Incarnation
from kvcomm.chaos.cluster import (
    Birth,
    ClientProcess,
    Cluster,
    Parts,
    ShardProcess,
    run_once,
    shipped_disk,
    shipped_shard,
    shipped_strong_disk,
)
from kvcomm.chaos.disk import Disk, Fsync, Outcome, Part
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.driver import Done
from kvcomm.chaos.simulation import simulate
from kvcomm.chaos.swarm import draw_plan
from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.machine import ConnectionId, Effect, Event, Origin, Received
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
    StrongChange,
    StrongOutcome,
    StrongOutcomes,
    StrongRead,
    StrongRegister,
    StrongState,
)
from l3_shard import acceptor, dvv, entering, proposer, quorum
from l3_shard.changing import Changing
from l3_shard.configuration import Configuration
from l3_shard.lines import Local
from l3_shard.place import Place
from l3_shard.proposer import Proposal
from l3_shard.quorum import Quorum, Standing
from l3_shard.shard import Shard
from l3_shard.storage import Loaded, Persist, Persisted
from l3_shard.writing import Draft


@dataclass(frozen=True)
class Planted:
    """A bug.  ``lie`` says what the broken part does."""

    lie: str
    promises: tuple[str, ...]
    """Of these, one at least is found broken."""
    parts: Parts = field(default_factory=Parts)
    patches: tuple[tuple[Any, str, Any], ...] = ()
    """(module or class, name, what takes its place): what no subclass reaches."""
    first_seed: int = 0
    """Of the worlds to try: where several things must come together, a test need not wait for them."""
    moves: bool = False
    """Whether it shows itself in worlds with controllers; else these are left out."""

    def plant(self) -> ExitStack:
        """Close it to dig the bug up again."""
        stack = ExitStack()
        for where, name, broken in self.patches:
            stack.enter_context(patch.object(where, name, broken))
        return stack


def _shards(shard: type[Shard]) -> Parts:
    return Parts(shard=lambda birth: shipped_shard(birth, shard))


def _disks(disk: type[Disk]) -> Parts:
    def make(draw: Draw, fsync: Fsync, new_replica: Callable[[], str]) -> Disk:
        return shipped_disk(draw, fsync, new_replica, disk)

    return Parts(disk=make)


# -- shards


def _lacks_one_less(self: Place, nodes: Collection[str]) -> tuple[int, int] | None:
    for group in self.groups:
        count, need = sum(node in nodes for node in group), max(1, self.quorum(group) - 1)
        if count < need:
            return count, need
    return None


class _AcknowledgedBeforePersisted(Shard):
    """Takes every write for durable as soon as it is ordered."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._early: set[int] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Persisted) and event.ticket in self._early:
            return []
        effects = super().handle(event, now)
        for effect in effects:
            if isinstance(effect, Persist) and effect.database == "records":
                self._early.add(effect.ticket)
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


# -- strong records: acceptors


class _StrongShard(Shard):
    """A shard whose strong part is broken by what its subclass does to ``handle``."""

    def is_accept(self, persist: Persist) -> bool:
        """Whether it writes anything but promises."""
        known = self.__dict__.setdefault("_known_accepts", {})
        fresh = [state for key, state in persist.writes if known.get(key) != state.accepted]
        known.update({key: state.accepted for key, state in persist.writes})
        return bool(fresh)


class _AcceptedBeforeSynced(_StrongShard):
    """Takes every vote for durable as soon as it is ordered."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._early: set[int] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Persisted) and event.ticket in self._early:
            return []
        effects = super().handle(event, now)
        for effect in effects:  # grows while it is walked through
            if isinstance(effect, Persist) and effect.database == "strong" and self.is_accept(effect):
                self._early.add(effect.ticket)
                effects += super().handle(Persisted(effect.ticket), now)
        return effects


class _PromiseNotSynced(_StrongShard):
    """Keeps promises in memory alone, until the record's next vote is written."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        kept: list[Effect] = []
        for effect in effects:  # grows while it is walked through
            if isinstance(effect, Persist) and effect.database == "strong" and not self.is_accept(effect):
                effects += super().handle(Persisted(effect.ticket), now)
            else:
                kept.append(effect)
        return kept


def _accept_ignoring_promise(
    state: StrongState, ballot: bytes, register: StrongRegister, following: bytes = b""
) -> StrongState:
    return StrongState(max(state.promised, ballot, following), ballot, register, True)


def _learned_as_voted(state: StrongState, other: StrongState) -> StrongState:
    learned = _learn(state, other)
    return StrongState(learned.promised, learned.accepted, learned.register, True)


_learn = acceptor.learn


class _StrongDamageForgotten(Shard):
    """A damaged record is taken for one that was never voted on."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if (
            isinstance(event, Loaded)
            and self._strong is not None
            and self._strong._lines.awaits(event.ticket)
        ):
            event = replace(event, damaged=())
        return super().handle(event, now)


class _DeletedIsForgotten(Disk):
    """A strong record without a value is removed, as if a cache evicted it."""

    def _write(self, batch: Sequence[Part]) -> None:
        super()._write(batch)
        for part in batch:
            for key, state in part.writes:
                if state.register.value is None and state.register.versions:
                    self.values.pop(key, None)


def _strong_disks(disk: type[Disk]) -> Parts:
    return Parts(strong_disk=lambda draw, new_member: shipped_strong_disk(draw, new_member, disk))


# -- strong records: coordinators


class _LocalRead(Shard):
    """Answers from what it has itself."""

    def _strong_read(self, origin: Origin, message: StrongRead) -> None:
        self._check_epoch(message.epoch)
        outcomes: list[StrongOutcome] = []

        def told(local: Local[StrongState]) -> None:
            register = local.state.register
            outcomes.append(StrongOutcome("", register.version, register.value))
            if len(outcomes) == len(message.keys):
                self._desk.reply(origin, StrongOutcomes(outcomes))

        for key in message.keys:
            self._strong_records()._lines.read(origin.tenant + key, told)


class _StaleLease(Shard):
    """Whoever changed a record last may answer for it alone, for two seconds."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        cache = self.__dict__.setdefault("_cache", {})
        asked = self.__dict__.setdefault("_asked", {})
        if (
            isinstance(event, Received)
            and isinstance(event.message, StrongRead)
            and len(event.message.keys) == 1
        ):
            held = cache.get(event.origin.tenant + event.message.keys[0])
            if held is not None and now < held[1] and event.message.epoch == self.ring.epoch:
                return [ReplyEffect(event.origin, StrongOutcomes([held[0]]))]
        if isinstance(event, Received) and isinstance(event.message, StrongChange):
            asked[event.origin] = event.message.changes[0]
        effects = super().handle(event, now)
        for effect in effects:
            if not isinstance(effect, ReplyEffect):
                continue
            order = asked.pop(effect.origin, None)
            if order is not None and isinstance(effect.message, StrongOutcomes):
                (outcome,) = effect.message.outcomes
                if not outcome.code:
                    told = StrongOutcome("", outcome.version, order.value)
                    cache[effect.origin.tenant + order.key] = (told, now + 2.0)
        return effects


def _half(group: Sequence[str]) -> int:
    return max(1, len(group) // 2)


_quorum = Configuration.quorum


def _owners_only(self: Configuration, name: bytes) -> Quorum:
    joint = _quorum(self, name)
    return replace(joint, groups=joint.groups[-1:])


def _everybody_counts(standings: Mapping[str, Standing]) -> list[str]:
    return list(standings)


_propose = Proposal._propose


def _forgets_attempts(self: Proposal, register: StrongRegister, *, chosen: bool = False) -> Any:
    self._attempts.clear()
    return _propose(self, register, chosen=chosen)


def _tells_unconfirmed(self: Proposal, register: StrongRegister, *, chosen: bool = False) -> Any:
    return _propose(self, register, chosen=True)


def _promise_used_again(self: Changing, key: bytes) -> Any:
    return self._promises.get(key)


def _one_incarnation(birth: Birth) -> Shard:
    return shipped_shard(replace(birth, incarnation=Incarnation(1)))


class _StrongUnknownCalledRefused(Shard):
    """Says "not done" of what may have been done."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [self._lie(effect) for effect in super().handle(event, now)]

    def _lie(self, effect: Effect) -> Effect:
        if not isinstance(effect, ReplyEffect) or not isinstance(effect.message, StrongOutcomes):
            return effect
        outcomes = [
            StrongOutcome(Unavailable.code, b"", None, one.text) if one.code == OutcomeUnknown.code else one
            for one in effect.message.outcomes
        ]
        return ReplyEffect(effect.origin, StrongOutcomes(outcomes))


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


LIN = "linearizable"

PLANTED = {
    "quorum one too small": Planted(
        "acknowledges with W - 1", ("durability",), patches=((Place, "lacks", _lacks_one_less),)
    ),
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
    "own last write not looked for": Planted(
        "replaces only what is here",
        ("came back",),
        patches=((Draft, "replaces_unseen", lambda draft, state: False),),
        first_seed=208,
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

STRONG = {
    "accept before sync": Planted("votes first", ("votes", LIN), _shards(_AcceptedBeforeSynced)),
    "promise not synced": Planted("promises in memory", ("votes", LIN), _shards(_PromiseNotSynced)),
    "accept ignores promise": Planted(
        "accepts what comes", (LIN,), patches=((acceptor, "accept", _accept_ignoring_promise),)
    ),
    "strong quorum one too small": Planted(
        "half is enough", (LIN, "durability"), patches=((quorum, "majority", _half),)
    ),
    "local read": Planted("asks nobody", (LIN,), _shards(_LocalRead)),
    "stale lease read": Planted("trusts the time", (LIN,), _shards(_StaleLease)),
    "unconfirmed value told": Planted(
        "tells what one acceptor has", (LIN,), patches=((Proposal, "_propose", _tells_unconfirmed),)
    ),
    "change made twice": Planted(
        "does not look for its earlier rounds", (LIN,), patches=((Proposal, "_propose", _forgets_attempts),)
    ),
    "strong retry after unknown": Planted("writes again", (LIN,), Parts(run=_again_after_unknown)),
    "strong request served twice": Planted("doubles changes", (LIN,), Parts(process=_ServesTwice)),
    "strong unknown called refused": Planted(
        "lies about failure", (LIN, "refused"), _shards(_StrongUnknownCalledRefused)
    ),
    "empty acceptor votes": Planted(
        "asks nobody what it had",
        (LIN, "back"),
        patches=((entering, "informed", lambda groups, node, told: True),),
    ),
    "votes of an earlier entry count": Planted(
        "believes whoever answers", (LIN,), patches=((quorum, "counted", _everybody_counts),)
    ),
    "learned register counts as a vote": Planted(
        "counts copies", (LIN,), patches=((acceptor, "learn", _learned_as_voted),)
    ),
    "move without joint quorum": Planted(
        "asks the new owners only", (LIN, "durability"), patches=((Configuration, "quorum", _owners_only),)
    ),
    "ballot reused after restart": Planted(
        "has the same incarnation", ("ballots", LIN), Parts(shard=_one_incarnation)
    ),
    "promise used again": Planted(
        "two changes under one ballot",
        ("ballots", LIN),
        patches=((Changing, "_take_promise", _promise_used_again),),
    ),
    "deleted record is forgotten": Planted(
        "evicts an acceptor's state", (LIN, "votes"), _strong_disks(_DeletedIsForgotten)
    ),
    "strong damage forgotten": Planted(
        "votes from nothing", (LIN, "ballots", "votes"), _shards(_StrongDamageForgotten)
    ),
    "strong failed sync ignored": Planted(
        "goes on after EIO", ("votes", LIN), _strong_disks(_FailedSyncIgnored)
    ),
    "compare-and-set compares nothing": Planted(
        "sets", (LIN,), patches=((proposer, "_expected", lambda order, register: True),)
    ),
}
PLANTED |= STRONG
MASKED = {
    "votes of an earlier entry count": "takes a vote that is on its way while its acceptor loses its disk, "
    "enters again and votes, within one round",
    "learned register counts as a vote": "takes a register that one acceptor voted for, others learned, and "
    "nobody had decided",
    "ballot reused after restart": "an acceptor that took part in the earlier round has promised more since, "
    "or tells its higher promise first",
    "strong damage forgotten": "takes a damaged record, read again, beside an acceptor that missed its "
    "decision, while the third is away",
}
"""Bugs that ``SEEDS_MAX`` seeds need not show, and what it takes; two of them are told message by message in
``tests/l3_shard/test_strong_stories.py``."""

SEEDS_MAX = 200


def caught_at(bug: Planted) -> int | None:
    """The first of ``SEEDS_MAX`` seeds in whose world a promise that ``bug`` breaks is found broken."""
    with bug.plant():
        for seed in range(bug.first_seed, bug.first_seed + SEEDS_MAX):
            plan = draw_plan(seed, controlled=bug.moves)
            if bug.moves and not plan.controllers:
                continue
            broken = {violation.promise for violation in simulate(plan, bug.parts).violations}
            if broken & set(bug.promises):
                return seed
    return None


def main(names: Sequence[str]) -> int:
    """Try every bug, or those that are named; how many were missed."""
    from tests.sim.planted_moves import MASKED_MOVES, MOVES

    missed, masked, planted = 0, MASKED | MASKED_MOVES, PLANTED | MOVES
    for name in names or planted:
        bug = planted[name]
        seed = caught_at(bug)
        missed += seed is None and name not in masked
        because = f" ({masked[name]})" if name in masked else ""
        verdict = f"missed in {SEEDS_MAX} seeds{because}" if seed is None else f"caught at seed {seed}"
        sys.stdout.write(f"{name:32} {verdict}\n")
        sys.stdout.flush()
    return missed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
