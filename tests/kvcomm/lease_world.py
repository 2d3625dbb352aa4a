"""``LeaseWorld``: processes that want one lease, over one linearizable record and a bad network.

Clocks run at their own rates from their own origins; processes stand still, at any moment, for any time, and
then find what came meanwhile; requests and answers are delayed, for very long at times, or lost.  The lease
plane, the machine under it and the record's change function are the shipped ones.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.lease import LeaseLost, Tenure
from kvcomm.leaseplane import LeasePlane
from kvcomm.metrics import Metrics
from kvcomm.steps import Park, Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.wire.messages import StrongOrder, StrongOutcome
from l3_shard.acceptor import NOTHING
from l3_shard.proposer import READ, apply

NAME = "leader"
DATA = b"data"


@dataclass
class Weather:
    delay_s: float = 0.05
    late: float = 0.0
    """Of requests: those that take up to ``late_s``."""
    late_s: float = 70.0
    lost: float = 0.0
    """Of answers."""
    pause: float = 0.0
    """At each step of a process: whether it stands still ..."""
    pause_s: float = 20.0
    """... and for how long at most."""
    rate: float = 1.0
    """Clocks run 1 to so many times as fast as the slowest."""
    timeout_s: float = 2.0


@dataclass
class Judge:
    """Looks at everything at once, as nobody in the world can."""

    epochs: list[int] = field(default_factory=list)
    """Of the grants, in the order in which the record was changed."""
    writes: list[int] = field(default_factory=list)
    """Epochs of the writes that the fenced record accepted, in its order."""
    fenced_count: int = 0
    overlaps: list[str] = field(default_factory=list)


class LeaseWorld:
    def __init__(
        self,
        seed: int,
        names: str = "abc",
        weather: Weather | None = None,
        *,
        ttl_s: float = 6.0,
        tenure: Callable[[str, float], Tenure] = Tenure,
    ) -> None:
        self.draw = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 0.0
        self.judge = Judge()
        self.records = {DATA: NOTHING}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._ballots = count(1)
        self.processes = [Process(self, name, tenure(f"{name}.1", ttl_s)) for name in names]

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._order), action))

    def run(self, until: float) -> None:
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, action = heapq.heappop(self._agenda)
            self._look()
            action()
            self._look()
        self.now = until

    def calm(self) -> None:
        self.weather = Weather(rate=self.weather.rate)

    def _look(self) -> None:
        """At any instant at most one process would find its lease valid, whether it runs or stands still."""
        holders = [each for each in self.processes if each.holds()]
        if len(holders) > 1:
            self.judge.overlaps.append(f"{self.now:.3f}: {[(one.name, one.tenure.epoch) for one in holders]}")

    def send(self, order: StrongOrder, answer: Callable[[StrongOutcome], None]) -> None:
        """To the record; ``answer`` hears of it, or of the time-out, once."""
        weather, draw, done = self.weather, self.draw, False

        def tell(outcome: StrongOutcome) -> None:
            nonlocal done
            if not done:
                done = True
                answer(outcome)

        def arrive() -> None:
            outcome = self._change(order)
            if draw.random() >= weather.lost:
                self.after(draw.uniform(0.001, weather.delay_s), partial(tell, outcome))

        delay_s = draw.uniform(0.001, weather.delay_s)
        if draw.random() < weather.late:
            delay_s = draw.uniform(0.0, weather.late_s)
        self.after(delay_s, arrive)
        code = Unavailable.code if order.op == READ else OutcomeUnknown.code
        self.after(weather.timeout_s, partial(tell, StrongOutcome(code, b"", None, "no answer")))

    def _change(self, order: StrongOrder) -> StrongOutcome:
        before = self.records.get(order.key, NOTHING)
        outcome, after = apply(order, before, b"%08d" % next(self._ballots))
        self.records[order.key] = after
        if order.key == DATA:
            self.judge.fenced_count += outcome.code == "fenced"
            if not outcome.code:
                self.judge.writes.append(order.fence)
        elif after.fence > before.fence:
            self.judge.epochs.append(after.fence)
        return outcome


@dataclass(frozen=True)
class _Order:
    """A step of the fake registers."""

    order: StrongOrder


class _Registers:
    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        return (yield from self._each([StrongOrder(key, READ) for key in keys]))

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        return (yield from self._each(orders))

    @staticmethod
    def _each(orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        outcomes: list[StrongOutcome] = []
        for order in orders:
            outcomes.append((yield _Order(order)))  # type: ignore[misc]
        return outcomes


class Process:
    """Acquires, renews, writes under the lease, releases or forgets it, and begins again."""

    def __init__(self, world: LeaseWorld, name: str, tenure: Tenure) -> None:
        self.world, self.name, self.tenure = world, name, tenure
        self.rate = world.draw.uniform(1.0, world.weather.rate)
        self.origin = world.draw.uniform(-1e5, 1e5)
        self.acquired_count = 0
        self.idle = True
        self._paused_until = 0.0
        strong = StrongPlane(_Registers(), Tally(Metrics("client"), self.clock), world.draw.random)
        self.strong = strong
        self.plane = LeasePlane(strong, self.clock, world.draw.random, lambda: name)
        world.after(world.draw.uniform(0.0, 1.0), self.want)

    def clock(self) -> float:
        return self.origin + self.rate * self.world.now

    def holds(self) -> bool:
        """What it would find if it looked now; looking changes nothing."""
        return not self.tenure.lost and self.clock() < self.tenure.until

    def want(self) -> None:
        self.idle = False
        self.run(self.plane.acquire(NAME, self.tenure, self.clock() + 300.0), self._acquired)

    def _acquired(self, result: object, error: KVCommError | None) -> None:
        if error is not None:
            self.later(1.0, self.want)
            return
        self.acquired_count += 1
        self._hold()

    def _hold(self) -> None:
        """As the renewing thread: the clock first."""
        if not self.tenure.valid(self.clock()):
            self._leave()
            return
        what = self.world.draw.random()
        if what < 0.04:
            self.run(self.plane.release(NAME, self.tenure), lambda *_: self._leave())
        elif what < 0.08:
            self._leave()  # as if it had died: nobody renews
        elif self.tenure.renew_at() <= self.clock():
            self.run(self.plane.renew(NAME, self.tenure), lambda *_: self.later(0.0, self._hold))
        else:
            self._write()
            self.later(self.world.draw.uniform(0.1, 0.5), self._hold)

    def _write(self) -> None:
        try:
            epoch = self.tenure.check(self.clock())
        except LeaseLost:
            return
        send = partial(self.run, self.strong.put(DATA, b"v", epoch), lambda *_: None)
        self.later(0.0, send)  # and the process may stand still between looking and sending

    def _leave(self) -> None:
        self.idle = True
        self.later(self.world.draw.uniform(0.0, 5.0), self.want)

    # -- steps and time, as this process has them

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """On our own clock, and not while we stand still."""
        self.world.after(delay_s / self.rate, partial(self._awake, action))

    def _awake(self, action: Callable[[], None]) -> None:
        world = self.world
        if world.now < self._paused_until:
            world.after(self._paused_until - world.now, partial(self._awake, action))
            return
        if world.draw.random() < world.weather.pause:
            self._paused_until = world.now + world.draw.uniform(0.0, world.weather.pause_s)
            world.after(self._paused_until - world.now, partial(self._awake, action))
            return
        action()

    def run(self, steps: Steps[Any], done: Callable[[object, KVCommError | None], None]) -> None:
        self._step(steps, None, done)

    def _step(
        self, steps: Steps[Any], result: Any, done: Callable[[object, KVCommError | None], None]
    ) -> None:
        try:
            step = steps.send(result)
        except StopIteration as end:
            done(end.value, None)
        except KVCommError as error:
            done(None, error)
        else:
            if isinstance(step, Park):
                assert step.timeout_s is not None
                self.later(step.timeout_s, lambda: self._step(steps, False, done))
            else:
                assert isinstance(step, _Order)
                self.world.send(
                    step.order,
                    lambda outcome: self.later(0.0, lambda: self._step(steps, outcome, done)),
                )
