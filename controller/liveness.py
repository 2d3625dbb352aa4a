"""``Liveness``: who is alive, suspect or dead, from heartbeats and from what the nodes say of each other.

::

                 nothing for suspect_s               nothing for dead_s, and nobody vouches
      alive ────────────────────────────► suspect ─────────────────────────────────────────► dead
        ▲  ▲                                 │                                                 │
        │  └────────── beats again ──────────┘                                                 │
        └───────────────────── beats again, or lives anew ─────────────────────────────────────┘

A lease is counted here from *receiving* a heartbeat, on this process's monotonic clock, so skewed clocks
change nothing.

**Who cannot be heard need not be dead.**  A shard that this process does not hear, but which does answer
another one that is trusted, is cut off from us, not gone: it stays suspect, and nobody acts on it.  What a
node says counts only while it is heard itself, is on time itself (Lifeguard's local health: who is late
distrusts its own view; Dadgar et al., 2018), and has spoken since the other fell silent.

**Who was late itself judges nobody.**  After this process stood still all leases start anew.

**Links that come and go.**  Whoever fell often lately must be heard several times in a row before it counts
as alive again, so one bad link changes states a few times, not with every packet that gets through.

Pure: times are arguments, monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from kvcomm.wire.messages import Heartbeat

State = Literal["alive", "suspect", "dead", "unknown"]

TRUSTED_LATE_S = 1.0
"""Whose own beat was later than this is not believed about others."""
SLACK_KEPT = 0.95
"""Of the lateness that was seen with a node, this much is still expected after its next beat."""
FLAP_WINDOW_S = 180.0
FALLS_MAX = 5
"""Falls that are remembered, and beats in a row that are asked for at most."""
LIVES_MAX = 16
"""Ended lives of a node that are remembered: heartbeats of these that come late are ignored."""
NODES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait.  Raises ``ValueError``: dead before suspect."""

    suspect_s: float = 4.0
    """Two heartbeats."""
    dead_s: float = 6.0
    """The lease."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_s < self.dead_s:
            raise ValueError(f"a node is suspect ({self.suspect_s} s) before it is dead ({self.dead_s} s)")


@dataclass(slots=True)
class _Node:
    since: float
    """Its lease counts from here: the last heartbeat, or a fresh start."""
    role: str = ""
    state: State = "unknown"
    incarnation: int = 0
    number: int = -1
    heard_at: float = -inf
    late_s: float = 0.0
    slack_s: float = 0.0
    """How late its beats have been lately."""
    silent: frozenset[str] = frozenset()
    in_row: int = 0
    """Beats since it was not heard for too long."""
    renewed: bool = False
    """It came back as a new life."""
    fallen_at: float = -inf
    falls: deque[float] = field(default_factory=lambda: deque(maxlen=FALLS_MAX))
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=LIVES_MAX))


class Liveness:
    """See the module."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._nodes: dict[str, _Node] = {}
        self.changes = 0
        """State changes so far, of all nodes; the first time that one is heard is none."""

    def heard(self, beat: Heartbeat, now: float) -> bool:
        """A heartbeat came; ``False`` = ignore it: doubled, overtaken by a newer one, or of an ended life."""
        node = self._nodes.get(beat.node)
        if node is None:
            if len(self._nodes) >= NODES_MAX:
                return False
            node = self._nodes[beat.node] = _Node(now)
        if beat.incarnation in node.ended:
            return False
        if beat.incarnation != node.incarnation:
            if node.incarnation:
                node.ended.append(node.incarnation)
            node.incarnation, node.number, node.renewed = beat.incarnation, -1, True
        if beat.number <= node.number:
            return False
        if now - node.since > self._patience.suspect_s:
            node.in_row = 0
        node.role, node.number, node.late_s = beat.role, beat.number, beat.late_s
        node.slack_s = max(beat.late_s, SLACK_KEPT * node.slack_s)
        node.silent = frozenset(beat.silent)
        node.in_row += 1
        node.heard_at = node.since = now
        self._revive(node, now)
        return True

    def expect(self, nodes: Iterable[str], now: float) -> None:
        """These should be there: whoever is not heard within a lease from now is gone."""
        for name in nodes:
            self._nodes.setdefault(name, _Node(now))

    def forget(self, name: str) -> None:
        """It is not to be there any more."""
        self._nodes.pop(name, None)

    def forgive(self, now: float) -> None:
        """We were late ourselves, or have just begun: everybody gets a fresh lease."""
        for node in self._nodes.values():
            node.since = max(node.since, now)

    def judge(self, now: float) -> list[str]:
        """Let time pass; the nodes whose state has become worse, sorted."""
        fallen = []
        for name in sorted(self._nodes):
            node = self._nodes[name]
            quiet_s = now - node.since
            if node.state == "alive" and quiet_s >= self._suspect_s(node):
                self._fall(node, "suspect", now)
                fallen.append(name)
            if node.state == "suspect" and quiet_s >= self._patience.dead_s and not self.vouchers(name, now):
                self._fall(node, "dead", now)
                fallen.append(name)
        return fallen

    def state(self, name: str) -> State:
        """As judged last; ``unknown`` = never heard."""
        node = self._nodes.get(name)
        return "unknown" if node is None else node.state

    def alive(self, name: str) -> bool:
        return self.state(name) == "alive"

    def gone(self, name: str, now: float) -> bool:
        """Dead, or expected for longer than a lease and never heard."""
        return self.gone_s(name, now) >= 0

    def gone_s(self, name: str, now: float) -> float:
        """For how long it has been gone; negative = it is not."""
        node = self._nodes.get(name)
        if node is None:
            return -1.0
        if node.state == "dead":
            return now - node.fallen_at
        return now - node.since - self._patience.dead_s if node.state == "unknown" else -1.0

    def silent_s(self, name: str, now: float) -> float:
        """Since its last heartbeat; -1 = none yet."""
        node = self._nodes.get(name)
        return -1.0 if node is None or node.heard_at == -inf else now - node.heard_at

    def incarnation(self, name: str) -> int:
        """Of its present life; 0 = never heard."""
        node = self._nodes.get(name)
        return 0 if node is None else node.incarnation

    def silent_to(self, name: str, now: float) -> list[str]:
        """Trusted nodes that say it does not answer them, sorted."""
        return sorted(
            other
            for other, node in self._nodes.items()
            if name in node.silent and self._trusted(node, now) and other != name
        )

    def vouchers(self, name: str, now: float) -> list[str]:
        """Trusted shards which have spoken since the shard ``name`` fell silent, and which it does answer,
        sorted.  Shards ask one another all the time; nobody asks others, so nobody vouches for them."""
        asked = self._nodes.get(name)
        if asked is None or asked.role != "shard":
            return []
        return sorted(
            other
            for other, node in self._nodes.items()
            if other != name
            and node.role == "shard"
            and name not in node.silent
            and self._trusted(node, now)
            and node.heard_at >= asked.since + self._patience.suspect_s
        )

    @property
    def names(self) -> list[str]:
        return sorted(self._nodes)

    def deadline(self, now: float) -> float | None:
        """When :meth:`judge` may find something next."""
        times = [
            node.since + wait_s
            for node in self._nodes.values()
            if node.state != "dead"
            for wait_s in (self._suspect_s(node), self._patience.dead_s)
            if node.since + wait_s > now
        ]
        return min(times, default=None)

    def check(self) -> None:
        for name, node in self._nodes.items():
            assert (node.state == "unknown") == (node.heard_at == -inf), name
            assert node.heard_at <= node.since, name
            assert node.incarnation not in node.ended, name

    def _suspect_s(self, node: _Node) -> float:
        """Who has little processor time beats late now and then: that alone makes nobody suspect."""
        most_s = (self._patience.suspect_s + 3 * self._patience.dead_s) / 4
        return min(self._patience.suspect_s + node.slack_s, most_s)

    def _trusted(self, node: _Node, now: float) -> bool:
        return (
            node.state == "alive"
            and node.late_s <= TRUSTED_LATE_S
            and now - node.heard_at < self._patience.suspect_s
        )

    def _revive(self, node: _Node, now: float) -> None:
        if node.state == "unknown":
            node.state, node.renewed = "alive", False
        elif node.state != "alive" and node.in_row >= self._beats_asked(node, now):
            node.state, node.renewed = "alive", False
            self.changes += 1

    def _beats_asked(self, node: _Node, now: float) -> int:
        """In a row, before it counts as alive again."""
        recent = sum(1 for at in node.falls if now - at < FLAP_WINDOW_S)
        stale = 1 if node.state == "dead" and not node.renewed else 0
        return min(max(1, recent) + stale, FALLS_MAX)

    def _fall(self, node: _Node, state: State, now: float) -> None:
        if state == "suspect":
            node.falls.append(now)
        node.state, node.fallen_at, node.in_row, node.renewed = state, now, 0, False
        self.changes += 1
