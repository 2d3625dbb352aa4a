"""Both faces of a lease over registers in memory, in real time but for short leases."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import pytest

from kvcomm.aioleasing import AsyncLease
from kvcomm.errors import OutcomeUnknown, Unavailable
from kvcomm.lease import LeaseHeld, LeaseLost
from kvcomm.leaseplane import LeasePlane
from kvcomm.leasing import Lease, epoch_of
from kvcomm.metrics import Metrics
from kvcomm.rpc import AsyncPeers, Peers, run_async, run_blocking
from kvcomm.steps import Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.wire.messages import FENCE_MAX, StrongOrder, StrongOutcome
from l3_shard.acceptor import NOTHING, changed
from l3_shard.proposer import READ, apply
from tests.peers import IDENTITY, until

TTL_S = 1.0


class Registers:
    """Linearizable, in memory, with a switch."""

    def __init__(self) -> None:
        self.records = {b"lease/l": NOTHING}
        self.reachable = True
        self.answer_lost = False
        self._ballots = count(1)
        self._lock = threading.Lock()

    def strong_read(self, keys: Sequence[bytes]) -> Steps[list[StrongOutcome]]:
        return (yield from self.strong_change([StrongOrder(key, READ) for key in keys]))

    def strong_change(self, orders: Sequence[StrongOrder]) -> Steps[list[StrongOutcome]]:
        yield from ()
        if not self.reachable:
            raise Unavailable("no majority")
        outcomes: list[StrongOutcome] = []
        with self._lock:
            for order in orders:
                outcome, after = apply(order, self.records[order.key], b"%08d" % next(self._ballots))
                self.records[order.key] = after
                outcomes.append(outcome)
        if self.answer_lost:
            self.answer_lost = False
            raise OutcomeUnknown("no answer")
        return outcomes

    def take_away(self) -> None:
        """Somebody else has a later epoch."""
        with self._lock:
            held = self.records[b"lease/l"]
            later = changed(held, b"%08d" % next(self._ballots), held.value, held.fence + 1)
            self.records[b"lease/l"] = later

    def renewal_count(self) -> int:
        return int(self.records[b"lease/l"].version)


@pytest.fixture
def registers() -> Registers:
    return Registers()


def plane(registers: Registers) -> LeasePlane:
    strong = StrongPlane(registers, Tally(Metrics("client"), time.monotonic), random.random)
    names = count(1)
    return LeasePlane(strong, time.monotonic, random.random, lambda: f"{id(names)}.{next(names)}")


@pytest.fixture
def contender(registers: Registers) -> Iterator[Callable[[], Lease]]:
    with closing(Peers(IDENTITY)) as peers:

        def run(steps: Steps[Any], deadline_s: float) -> Any:
            return run_blocking(steps, peers, time.monotonic() + deadline_s)

        leases = plane(registers)
        yield lambda: Lease(leases, "l", TTL_S, run)


@pytest.mark.slow
def test_one_has_it_and_the_other_gets_it_after_a_release(contender: Callable[[], Lease]) -> None:
    one, other = contender(), contender()
    assert not one.valid() and one.epoch == 0
    assert one.acquire() == 1 and one.valid() and one.check() == epoch_of(one) == 1
    assert one.acquire() == 1, "it has it already"
    with pytest.raises(LeaseHeld, match="held by"):
        other.acquire(deadline_s=0.05)
    one.renew()
    one.release()
    assert not one.valid()
    assert other.acquire() == 2
    with pytest.raises(LeaseLost, match="released"):
        one.check()
    one.release()
    assert other.valid(), "a second release is of no account"


def test_a_lost_answer_costs_nothing(contender: Callable[[], Lease], registers: Registers) -> None:
    one, other = contender(), contender()
    registers.answer_lost = True
    assert one.acquire() == 1, "the read was lost"
    registers.answer_lost = True
    with pytest.raises(OutcomeUnknown):
        one.renew()
    assert one.valid()
    one.renew()
    registers.answer_lost = True
    with pytest.raises(OutcomeUnknown):
        one.renew()
    one.release()
    assert other.acquire(deadline_s=0.1) == 2, "it was released under the version that the lost renewal made"


@pytest.mark.slow
def test_a_dead_holder_is_waited_out(contender: Callable[[], Lease]) -> None:
    dead, heir = contender(), contender()
    dead.acquire()
    assert heir.acquire() == 2
    assert not dead.valid()
    with pytest.raises(LeaseLost, match="ran out"):
        dead.renew()


@pytest.mark.slow
def test_held_renews_until_its_end_and_releases(contender: Callable[[], Lease], registers: Registers) -> None:
    with contender().held() as lease:
        begin = time.monotonic()
        until(lambda: time.monotonic() > begin + 2 * TTL_S)
        assert lease.valid() and lease.epoch == 1
        assert registers.renewal_count() >= 3
    assert not lease.valid()
    assert contender().acquire(deadline_s=0.05) == 2


@pytest.mark.slow
def test_a_loss_is_told_to_the_callback_and_at_the_end(
    contender: Callable[[], Lease], registers: Registers
) -> None:
    told: list[LeaseLost] = []

    def body() -> None:
        with contender().held(lost=told.append) as lease:
            registers.take_away()
            until(lambda: bool(told))
            assert not lease.valid()
            with pytest.raises(LeaseLost):
                epoch_of(lease)

    with pytest.raises(LeaseLost, match="took it over as epoch 2"):
        body()
    assert len(told) == 1


@pytest.mark.slow
def test_it_is_lost_when_nobody_answers_for_its_whole_time(
    contender: Callable[[], Lease], registers: Registers
) -> None:
    told: list[LeaseLost] = []

    def body() -> None:
        with contender().held(lost=told.append):
            registers.reachable = False
            until(lambda: bool(told))

    with pytest.raises(LeaseLost, match="ran out"):
        body()


def test_an_error_of_the_body_is_the_bodys(contender: Callable[[], Lease], registers: Registers) -> None:
    def body() -> None:
        with contender().held():
            registers.take_away()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()


def test_an_unreachable_majority_is_told(contender: Callable[[], Lease], registers: Registers) -> None:
    registers.reachable = False
    with pytest.raises(Unavailable, match="majority"):
        contender().acquire(deadline_s=0.05)


def test_a_forked_child_does_not_hold_what_its_parent_holds(
    contender: Callable[[], Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = contender()
    lease.acquire()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert not lease.valid()
    with pytest.raises(LeaseLost, match="parent"):
        lease.check()


def test_valid_may_be_asked_of_a_time_to_come(contender: Callable[[], Lease]) -> None:
    lease = contender()
    lease.acquire()
    assert not lease.valid(time.monotonic() + TTL_S)
    assert lease.valid(), "asking loses nothing"


@pytest.mark.parametrize("epoch", [0, -1, FENCE_MAX + 1])
def test_a_number_that_is_no_epoch_is_the_callers_mistake(epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch"):
        epoch_of(epoch)


def test_an_epoch_from_elsewhere_and_none() -> None:
    assert (epoch_of(7), epoch_of(None)) == (7, 0)


async def _async(registers: Registers) -> None:
    peers = AsyncPeers(IDENTITY)

    async def run(steps: Steps[Any], deadline_s: float) -> Any:
        return await run_async(steps, peers, time.monotonic() + deadline_s)

    leases = plane(registers)
    told: list[LeaseLost] = []
    async with AsyncLease(leases, "l", TTL_S, run).held() as lease:
        other = AsyncLease(leases, "l", TTL_S, run)
        with pytest.raises(LeaseHeld):
            await other.acquire(deadline_s=2 * TTL_S)
        assert lease.valid() and registers.renewal_count() >= 2, "renewed meanwhile"
    assert await other.acquire() == 2
    await other.renew()
    await other.release()

    async def body() -> None:
        async with AsyncLease(leases, "l", TTL_S, run).held(lost=told.append):
            registers.take_away()
            while not told:
                await asyncio.sleep(0.001)

    with pytest.raises(LeaseLost, match="took it over"):
        await body()
    await peers.close()


@pytest.mark.slow
def test_the_asyncio_face_does_the_same(registers: Registers) -> None:
    asyncio.run(asyncio.wait_for(_async(registers), 60.0))
