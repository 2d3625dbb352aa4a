"""``Turns``: a shipped machine in a process of a simulated host; what ``kvcomm.runtime.Runtime`` does there.

One event at a time, in order; those that an effect causes wait for their turn.  A machine whose host stood
still is told first.  When the process has ended in the middle, nothing more is handled or done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcomm.chaos.world import Host, Process, Timer
from kvcomm.machine import Effect, Event, Machine, Resumed, Tick


class Turns:
    """Drives ``machine`` for as long as ``process`` is what its host runs.

    Args:
        carry_out: does one effect.
        handled: called when all effects of an event have been carried out.
    """

    def __init__(
        self,
        machine: Machine,
        host: Host,
        process: Process,
        carry_out: Callable[[Effect], None],
        handled: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine, self._host, self._process = machine, host, process
        self._carry_out, self._handled = carry_out, handled
        self._events: deque[Event] = deque()
        self._busy = False
        self._pause_count = host.pause_count
        self._timer: Timer | None = None
        self._timer_at: float | None = None

    def deliver(self, event: Event) -> None:
        """Hand an event in, or queue it when the machine is at work."""
        if self._pause_count != self._host.pause_count:
            self._pause_count = self._host.pause_count
            self._events.append(Resumed())
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        while self._events and self._runs:
            for effect in self._machine.handle(self._events.popleft(), self._host.clock()):
                if self._runs:
                    self._carry_out(effect)
            self._machine.check()
            self._handled()
        self._busy = False
        if self._runs:
            self._arm()

    @property
    def _runs(self) -> bool:
        return self._host.process is self._process

    def _arm(self) -> None:
        """Have the next tick come when the machine wants it."""
        deadline = self._machine.deadline()
        if deadline == self._timer_at and (deadline is None) == (self._timer is None):
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            self._timer = self._host.after(max(1e-6, deadline - self._host.clock()), self._tick)

    def _tick(self) -> None:
        self._timer = self._timer_at = None
        self.deliver(Tick())
