"""``World``: virtual time, and the hosts that live in it.

Time stands still while something is decided and jumps to the next thing on the agenda; what is due at the
same time happens in the order in which it was put there.  A :class:`Host` is one machine with one process on
it::

            start                kill: nothing of the process runs any more, not even a ``finally``
    down ─────────► running ──────────► down
                    │    ▲
              pause │    │ resume: what was due meanwhile runs now, in order
                    ▼    │
                    paused

Hosts do not agree on the time: each has a monotonic clock with an origin of its own and a wall clock that is
off and may jump.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from kvcomm.chaos.draw import Draw

WALL_EPOCH_MS = 1_700_000_000_000
LATE_S = 1e-6
"""Timers come this much late: clocks of hosts are sums of floats, and a timer must not come early."""

Action = Callable[[], None]


class Timer:
    """Something on the agenda."""

    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class World:
    """The agenda of one simulation."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        """Seconds since the simulation began; no host knows it."""
        self.draw = Draw(seed)
        self.hosts: dict[str, Host] = {}
        self.event_count = 0
        self._order = 0
        self._agenda: list[tuple[float, int, Timer]] = []

    def after(self, delay_s: float, action: Action) -> Timer:
        timer = Timer(action)
        self._order += 1
        heapq.heappush(self._agenda, (self.now + max(0.0, delay_s), self._order, timer))
        return timer

    def run(self, until: float) -> None:
        """Play the agenda up to ``until``."""
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._agenda)
            if timer.action is not None:
                self.event_count += 1
                timer.action()
        self.now = max(self.now, until)

    def host(self, name: str, *, origin_s: float = 0.0, skew_ms: int = 0) -> Host:
        assert name not in self.hosts, f"two hosts {name}"
        self.hosts[name] = Host(self, name, origin_s, skew_ms)
        return self.hosts[name]


class Process(Protocol):
    """What runs on a host."""

    def killed(self) -> None:
        """It is over: drop what is held outside the process.  Runs nothing of the process itself."""
        ...


class Host:
    """One machine; see the module.

    Args:
        origin_s: what its monotonic clock shows at the beginning.
        skew_ms: how far its wall clock is off.
    """

    def __init__(self, world: World, name: str, origin_s: float, skew_ms: int) -> None:
        self.world, self.name = world, name
        self.process: Process | None = None
        self.paused = False
        self.pause_count = 0
        self.life = 0
        """Counts starts; what belongs to an earlier life is over."""
        self.skew_ms = skew_ms
        self._origin_s = origin_s
        self._parked: list[Action] = []

    @property
    def running(self) -> bool:
        return self.process is not None

    def clock(self) -> float:
        """Monotonic seconds of this host."""
        return self.world.now + self._origin_s

    def wall_origin_ms(self) -> int:
        """What the wall clock shows less what the monotonic clock shows, milliseconds."""
        return WALL_EPOCH_MS + self.skew_ms - int(self._origin_s * 1_000)

    def start(self, boot: Callable[[Host], Process]) -> None:
        """Start a process.  ``boot`` may use the host's timers already."""
        assert self.process is None, f"{self.name} runs already"
        self.life += 1
        self.process = boot(self)

    def kill(self) -> None:
        """As ``kill -9``: the disk stays, everything else is gone."""
        if self.process is None:
            return
        process, self.process = self.process, None
        self.life += 1
        self.paused = False
        self._parked.clear()
        process.killed()

    def pause(self) -> None:
        """As SIGSTOP: the kernel keeps what arrives."""
        self.paused = self.running
        self.pause_count += 1

    def resume(self) -> None:
        """As SIGCONT: what came meanwhile is handled now, in the order in which it came."""
        self.paused = False
        parked, self._parked = self._parked, []
        for action in parked:
            self.world.after(0.0, self._of_this_life(action))

    def after(self, delay_s: float, action: Action) -> Timer:
        """Run ``action`` in the process that runs now, not before ``delay_s``; never in a later life."""
        return self.world.after(delay_s + LATE_S if delay_s > 0 else 0.0, self._of_this_life(action))

    def soon(self, action: Action) -> None:
        """Run ``action`` after everything that is due now."""
        self.after(0.0, action)

    def _of_this_life(self, action: Action) -> Action:
        life = self.life

        def run() -> None:
            if life != self.life:
                return
            if self.paused:
                self._parked.append(action)
            else:
                action()

        return run
