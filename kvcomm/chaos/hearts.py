"""``Heart``: the heartbeats of one simulated process, to every controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvcomm.chaos.network import Peers
from kvcomm.chaos.world import Host, Timer
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import Heartbeat, HeartbeatAnswer, RingMap, ShardMove

ANSWER_S = 1.5
CHANGE_S = 0.05
"""What changed is told after so long, together with what else changes."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """What a process has to say of itself."""

    epoch: int = 0
    ring: RingMap | None = None
    move: ShardMove | None = None
    silent: Sequence[str] = ()
    running: Sequence[str] = ()

    @property
    def news(self) -> object:
        """What controllers should hear at once when it is another."""
        move = self.move or ShardMove()
        return (
            self.epoch, move.ready_epoch, move.strong_epoch, move.clean_epoch,
            tuple(self.running),
        )  # fmt: skip


class Heart:
    """See the module.

    Args:
        controllers: their node names.
        feel: how the process is now.
        heard: takes the answers.
    """

    def __init__(
        self,
        host: Host,
        peers: Peers,
        role: str,
        controllers: Sequence[str],
        interval_s: float,
        feel: Callable[[], Pulse],
        heard: Callable[[HeartbeatAnswer], None],
    ) -> None:
        self._host, self._peers, self._role, self._controllers = host, peers, role, controllers
        self._interval_s, self._feel, self._heard = interval_s, feel, heard
        self._number = 0
        self._told: object = None
        self._wanted: set[str] = set()
        """Controllers that asked for the map."""
        self._looking = False
        self._due = host.clock()
        self._timer: Timer | None = host.after(0.0, self._beat)

    def changed(self) -> None:
        """Something may have."""
        if not self._looking:
            self._looking = True
            self._host.after(CHANGE_S, self._look)

    def _look(self) -> None:
        self._looking = False
        if self._feel().news != self._told:
            self._due = self._host.clock()
            self._beat()

    def _beat(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now, pulse = self._host.clock(), self._feel()
        late_s = max(0.0, now - self._due)
        self._number += 1
        self._told = pulse.news
        for controller in self._controllers:
            ring = pulse.ring if controller in self._wanted else None
            self._wanted.discard(controller)
            beat = Heartbeat(
                node=self._host.name,
                role=self._role,
                rack=f"rack-{self._host.name}",
                incarnation=self._host.life,
                number=self._number,
                address=f"tcp://{self._host.name}:1",
                local_address="",
                control="",
                epoch=pulse.epoch,
                late_s=late_s,
                silent=list(pulse.silent),
                move=pulse.move,
                ring=ring,
                running=list(pulse.running),
            )
            ask = Ask(f"tcp://{controller}:1", beat)
            self._peers.start([ask], now + ANSWER_S, partial(self._took, controller))
        self._due = now + self._interval_s
        self._timer = self._host.after(self._interval_s, self._beat)

    def _took(self, controller: str, answer: Answer) -> None:
        if isinstance(answer.message, HeartbeatAnswer):
            if answer.message.wants_ring:
                self._wanted.add(controller)
                if self._feel().ring is not None:
                    self._told = None
                    self.changed()
            self._heard(answer.message)
