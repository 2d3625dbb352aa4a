"""``LeaseWorkload`` and its judge: who holds a lease, and what is written under it, whatever faults happen.

Clients contend for one lease through the shipped ``LeasePlane`` and write one fenced record under it, also
under epochs that they know to be over, as a message does that was held up.  Promised:

* **epochs**: no two grants have the same;
* **one holder**: nobody begins to hold the lease before everybody with a smaller epoch has stopped by its own
  clock, whether it runs or stands still;
* **fenced**: no change of the record took effect after one with a larger epoch.  Versions are ordered as the
  changes took effect.

The judge looks at what each client believes, at the moment when an operation ends, in the time of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvcomm.chaos.eventual import Ending
from kvcomm.chaos.history import History, Invoked, Returned, Write
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.watch import Violation
from kvcomm.chaos.workload import Act
from kvcomm.errors import KVCommError
from kvcomm.lease import Tenure
from kvcomm.leaseplane import LeasePlane
from kvcomm.steps import Steps
from kvcomm.strongplane import StrongValue

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess

LEASE = "leader"
RECORD = "fenced"
TTL_S = 1.5
PATIENCE = 0.8
"""Part of an operation's time that an acquisition may wait."""


@dataclass(eq=False, slots=True)
class Hold:
    """One grant, as its holder believes."""

    client: str
    epoch: int
    since: float
    until: float


class LeaseWorkload:
    """See the module; ``tenure`` makes the machine of each client."""

    def __init__(self, plan: Plan, tenure: Callable[[str, float], Tenure] = Tenure) -> None:
        self.holds: list[Hold] = []
        self.writes: list[tuple[str, int]] = []
        """(version, epoch) of the changes that were done."""
        self.fenced_count = 0
        self._plan, self._make = plan, tenure
        self._operations = count()
        self._values = count()
        self._tenures: dict[str, Tenure] = {}

    def act(self, client: ClientProcess, at: float) -> Act:
        tenure, draw = self._tenure(client), client.draw
        if not tenure.valid(client.host.clock()):
            return self._write(client, at) if tenure.epoch and draw.chance(0.4) else self._acquire(client, at)
        kind = draw.weighted((("write", 6), ("renew", 4), ("release", 1)))
        if kind == "write":
            return self._write(client, at)
        return self._renew(client, at) if kind == "renew" else self._release(client, at)

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return ()

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return ()

    def check(self, history: History, ending: Ending) -> list[Violation]:
        return check_leases(self.holds, self.writes)

    # -- operations

    def _acquire(self, client: ClientProcess, at: float) -> Act:
        tenure, plane = self._tenure(client), self._plane(client)
        until = client.host.clock() + PATIENCE * self._plan.operation_timeout_s
        return self._act(client, at, "acquire", partial(plane.acquire, LEASE, tenure, until))

    def _renew(self, client: ClientProcess, at: float) -> Act:
        return self._act(client, at, "renew", partial(self._plane(client).renew, LEASE, self._tenure(client)))

    def _release(self, client: ClientProcess, at: float) -> Act:
        tenure, plane = self._tenure(client), self._plane(client)

        def steps() -> Steps[None]:
            self._ended(client, tenure.epoch)  # before anybody can hear of it
            return plane.release(LEASE, tenure)

        return self._act(client, at, "release", steps)

    def _write(self, client: ClientProcess, at: float) -> Act:
        epoch, value = self._tenure(client).epoch, f"e{next(self._values)}"
        steps = partial(client.strong.put, RECORD.encode(), value.encode(), epoch)
        return self._act(client, at, "write", steps, value=value, epoch=epoch)

    def _act(
        self,
        client: ClientProcess,
        at: float,
        kind: str,
        steps: Callable[[], Steps[object]],
        *,
        value: str | None = None,
        epoch: int = 0,
    ) -> Act:
        number, name = next(self._operations), client.host.name
        key = RECORD if value is not None else LEASE
        writes = [] if value is None else [Write(key, value)]

        def returned(at: float, result: object) -> Returned:
            self._note(client)
            if not isinstance(result, StrongValue):
                return Returned(at, name, number, "ok", version=str(self._tenure(client).epoch))
            self.writes.append((result.version.hex(), epoch))
            return Returned(at, name, number, "ok", version=result.version.hex())

        def raised(line: Returned, error: KVCommError) -> Returned:
            self.fenced_count += error.code == "fenced"
            self._note(client)
            return line

        return Act(Invoked(at, name, number, kind, [key], writes), steps, returned, raised)

    # -- what clients believe

    def _tenure(self, client: ClientProcess) -> Tenure:
        name = client.host.name
        if name not in self._tenures:
            self._tenures[name] = self._make(name, TTL_S)
        return self._tenures[name]

    @staticmethod
    def _plane(client: ClientProcess) -> LeasePlane:
        return LeasePlane(client.strong, client.host.clock, client.draw.unit, lambda: client.host.name)

    def _note(self, client: ClientProcess) -> None:
        """What a client holds now."""
        tenure, now = self._tenure(client), client.cluster.world.now
        until = now + tenure.until - client.host.clock()
        if tenure.lost or until <= now:
            return
        last = self._last(client)
        if last is None or last.epoch != tenure.epoch:
            self.holds.append(Hold(client.host.name, tenure.epoch, now, until))
        else:
            last.until = max(last.until, until)

    def _ended(self, client: ClientProcess, epoch: int) -> None:
        last = self._last(client)
        if last is not None and last.epoch == epoch:
            last.until = min(last.until, client.cluster.world.now)

    def _last(self, client: ClientProcess) -> Hold | None:
        mine = [hold for hold in self.holds if hold.client == client.host.name]
        return mine[-1] if mine else None


def check_leases(holds: Sequence[Hold], writes: Sequence[tuple[str, int]]) -> list[Violation]:
    """The broken promises."""
    found: list[Violation] = []
    ended_at, before = 0.0, None
    for hold in sorted(holds, key=lambda each: each.epoch):
        if before is not None and hold.epoch == before.epoch:
            found.append(Violation("epochs", f"{before} and {hold} have one epoch"))
        elif hold.since < ended_at:
            found.append(Violation("one holder", f"{hold} begins before {ended_at:.6f}: {before}"))
        ended_at, before = max(ended_at, hold.until), hold
    largest = 0
    for version, epoch in sorted(writes):
        if epoch < largest:
            found.append(Violation("fenced", f"version {version} under {epoch} after one under {largest}"))
        largest = max(largest, epoch)
    return found
