"""``Burial``: removes deleted records for good, once nothing can bring them back.

A delete leaves a tombstone: the record's context, which tells later merges that the old values were seen and
replaced.  It may go when **every** replica has it and it is older than ``tombstone_age``::

    first replica: candidates by age ─► RecordFetch from all others: the very same state?
        ─► raise the counter floor, durable ─► RecordForget to all: remove if still the very same state

* While one keeper is away nothing is removed that it keeps, so it may return after any time and with any old
  value: the tombstones are still there.
* A replica that did not hear the last message keeps its tombstone; comparing brings it back to the others,
  and the burial is tried again.  A tombstone may return, a value not: nobody had one any more.
* Messages from before the delete that are still under way are covered by the age, which is far above every
  time-out; hints are handed on as the record is *then*, and they are void when it is gone.
* A removed record takes its counters with it.  If the next write of that key began at 1 again, contexts that
  clients still hold would cover it unseen.  Therefore counters of records that do not exist start above the
  **floor**: the largest counter that this replica has ever removed (``dvv.put``).
* A context is what a client says, and the floor is for all records.  A tombstone with a counter that no
  replica can have come to (``FLOOR_MAX``) therefore stays: above such a floor there would be no dots left.

A shard that stops being a keeper of a record is not asked when its tombstone is buried.  Therefore nothing is
buried while records move, nor by a shard that still has records which it does not keep; and no move begins
before every shard that takes part is rid of those (``l3_shard.purge``): what comes back as a keeper comes
back empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.clock import Stamp
from kvcomm.errors import KVCommError
from kvcomm.version import COUNTER_MAX
from kvcomm.wire.messages import Done, Message, RecordFetch, RecordForget, RecordState, RecordStates
from l3_shard import dvv

if TYPE_CHECKING:
    from l3_shard.desk import Desk
    from l3_shard.forest import Forest
    from l3_shard.lines import Lines, Local
    from l3_shard.storage import Entry

LEAVES_AT_ONCE = 64
KEYS_AT_ONCE = 256
FLOOR_MAX = COUNTER_MAX // 2


def dead_since(state: RecordState) -> Stamp:
    """The latest tombstone's stamp of a record without a value; 0 when it has one, or does not exist."""
    if dvv.alive(state) or not state.siblings:
        return Stamp(0)
    return Stamp(max(sibling.hlc for sibling in state.siblings))


class Forget:
    """A ``Change``: remove the record if it is still exactly ``state``."""

    def __init__(self, state: RecordState, done: Callable[[bool], None]) -> None:
        self._state, self._done, self._removed = state, done, False

    def apply(self, state: RecordState) -> RecordState:
        self._removed = state == self._state
        return dvv.EMPTY if self._removed else state

    def durable(self, state: RecordState) -> None:
        self._done(self._removed)

    def failed(self, error: KVCommError) -> None:
        self._done(False)


class Burial:
    """One pass over old tombstones of which we are the first replica: make one, call :meth:`start` once.

    Args:
        replicas: of a stored key.
        forget: removes (keys, states) here and calls back with how many went.
        done: hears the end; what a replica answered that could not be asked, if any.
    """

    def __init__(
        self,
        me: str,
        epoch: int,
        before: Stamp,
        desk: Desk,
        lines: Lines[RecordState],
        forest: Forest,
        *,
        replicas: Callable[[bytes], Sequence[str]],
        forget: Callable[[Sequence[bytes], Sequence[RecordState], Callable[[int], None]], None],
        done: Callable[[Message | None], None],
    ) -> None:
        self._me, self._epoch, self._before = me, epoch, before
        self._desk, self._lines, self._forest = desk, lines, forest
        self._replicas, self._forget, self._done = replicas, forget, done
        self._leaves: deque[int] = deque()
        self._groups: deque[tuple[tuple[str, ...], list[bytes]]] = deque()
        self._over = False

    def start(self) -> None:
        self._leaves.extend(self._forest.dead_before(self._before))
        self._next_leaves()

    def abandon(self) -> None:
        """Hear no more answers; ``done`` is not called."""
        self._over = True

    def _end(self, problem: Message | None) -> None:
        if not self._over:
            self._over = True
            self._done(problem)

    def _next_leaves(self) -> None:
        if not self._leaves:
            self._end(None)
            return
        leaves = [self._leaves.popleft() for _ in range(min(LEAVES_AT_ONCE, len(self._leaves)))]
        self._forest.list_leaves(leaves, self._listed)

    def _listed(self, leaves: Sequence[Sequence[Entry]] | None) -> None:
        if self._over:
            return
        groups: dict[tuple[str, ...], list[bytes]] = {}
        for entry in (entry for entries in leaves or () for entry in entries):
            if 0 < entry.dead_since < self._before:
                replicas = tuple(self._replicas(entry.key))
                if replicas and replicas[0] == self._me:
                    groups.setdefault(replicas[1:], []).append(entry.key)
        for others, keys in groups.items():
            for at in range(0, len(keys), KEYS_AT_ONCE):
                self._groups.append((others, keys[at : at + KEYS_AT_ONCE]))
        self._next_group()

    def _next_group(self) -> None:
        if self._over:
            return
        if not self._groups:
            self._next_leaves()
            return
        others, keys = self._groups.popleft()
        _Group(self, others, keys).start()

    # -- what a group needs

    def read(self, key: bytes, reader: Callable[[Local[RecordState]], None]) -> None:
        self._lines.read(key, reader)

    def ask(self, node: str, message: Message, then: Callable[[Message], None]) -> None:
        self._desk.ask(node, message, then)

    def fetch(self, keys: Sequence[bytes]) -> RecordFetch:
        return RecordFetch(self._epoch, list(keys))

    def old(self, state: RecordState) -> bool:
        return 0 < dead_since(state) < self._before and max(state.context.values()) <= FLOOR_MAX

    def agreed(self, others: Sequence[str], states: dict[bytes, RecordState]) -> None:
        """Every replica has these tombstones."""
        if self._over or not states:
            self._next_group()
            return
        keys, graves = list(states), list(states.values())
        for node in others:
            self._desk.ask(node, RecordForget(self._epoch, keys, graves), _ignored)
        self._forget(keys, graves, lambda count: self._next_group())

    def disagreed(self, problem: Message) -> None:
        self._end(problem)


def _ignored(answer: Message) -> None:
    """Who did not hear it keeps its tombstone, and the next pass asks again."""


class _Group:
    """Tombstones with the same replicas."""

    def __init__(self, burial: Burial, others: tuple[str, ...], keys: list[bytes]) -> None:
        self._burial, self._others, self._keys = burial, others, keys
        self._states: dict[bytes, RecordState] = {}
        self._open_count = len(keys)
        self._problem: Message | None = None

    def start(self) -> None:
        for key in self._keys:
            self._burial.read(key, partial(self._own, key))

    def _own(self, key: bytes, local: Local[RecordState]) -> None:
        if self._burial.old(local.state):
            self._states[key] = local.state
        self._open_count -= 1
        if not self._open_count:
            self._ask()

    def _ask(self) -> None:
        self._keys = list(self._states)
        self._open_count = len(self._others)
        if not self._keys or not self._others:
            self._burial.agreed(self._others, self._states)
            return
        for node in self._others:
            self._burial.ask(node, self._burial.fetch(self._keys), self._theirs)

    def _theirs(self, answer: Message) -> None:
        if not isinstance(answer, RecordStates) or len(answer.states) != len(self._keys):
            self._problem = Done() if isinstance(answer, RecordStates) else answer
        else:
            for key, state in zip(self._keys, answer.states, strict=True):
                if state != self._states.get(key):
                    self._states.pop(key, None)
        self._open_count -= 1
        if self._open_count:
            return
        if self._problem is not None:
            self._burial.disagreed(self._problem)
        else:
            self._burial.agreed(self._others, self._states)
