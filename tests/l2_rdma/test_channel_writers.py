"""No two may write to one slot.

Any sequence of grants, channels, publications and ends, against a plain list of who may still be writing
where.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcomm.wire.messages import Grant
from tests.l2_rdma.regions import COPY_BYTES, SLAB_BYTES, OwnedMemory, key_of

TTL_S = 10.0
HOLDERS = st.integers(1, 2)
SLOTS = SLAB_BYTES // COPY_BYTES
KEYS = 3 * SLOTS


@dataclass
class Writer:
    """A grant that its holder has not given back."""

    holder: int
    token: int
    offset: int
    expires_at: float
    aborted: bool = False
    """Its holder has given it up; what it had sent may be on its way."""


@dataclass
class Model:
    writers: list[Writer] = field(default_factory=list)
    channels: set[int] = field(default_factory=set)
    """Holders with an open one."""

    def may_write(self) -> list[Writer]:
        """Through a channel, now."""
        return [each for each in self.writers if each.holder in self.channels]

    def forget(self, gone: list[Writer]) -> None:
        self.writers = [each for each in self.writers if each not in gone]


class ChannelWriters(RuleBasedStateMachine):
    """An owner, and writers that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = OwnedMemory(slab_count=1, reservation_ttl_s=TTL_S)
        self.model = Model()
        self.now = 0.0

    @rule(holder=HOLDERS, first=st.integers(0, KEYS - SLOTS), count=st.integers(1, SLOTS))
    def reserve(self, holder: int, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.reserve_one(holder, number)

    def reserve_one(self, holder: int, number: int) -> None:
        grant = self.pool.reserve(number, holder=holder, now=self.now)
        if grant.status != "granted":
            return
        there = [each for each in self.model.may_write() if each.offset == grant.offset]
        assert not there, f"{grant} while {there} may be written to"
        # Whoever had it without a channel had its time, and knows from the owner that it is over.
        self.model.forget([each for each in self.model.writers if each.offset == grant.offset])
        self.model.writers.append(Writer(holder, grant.token, grant.offset, self.now + TTL_S))

    @rule(holder=HOLDERS)
    def open_channel(self, holder: int) -> None:
        self.pool.owner.expose(holder)
        if holder not in self.model.channels:  # nothing is written through it that was over before
            mine = [each for each in self.model.writers if each.holder == holder]
            self.model.forget([each for each in mine if each.expires_at <= self.now])
        self.model.channels.add(holder)

    @rule(data=st.data(), whole=st.booleans())
    def publish(self, data: st.DataObject, whole: bool) -> None:
        mine = [each for each in self.model.writers if not each.aborted]
        if not mine:
            return
        writer = data.draw(st.sampled_from(mine))
        number = self.number_of(writer)
        if whole and number is not None:
            self.pool.write(Grant("granted", writer.token, writer.offset, writer.token), number)
        self.pool.owner.publish([writer.token], writer.holder, self.now, verify=True)
        self.model.forget([writer])

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        mine = [each for each in self.model.writers if not each.aborted]
        if not mine:
            return
        writer = data.draw(st.sampled_from(mine))
        self.pool.owner.abort([writer.token], writer.holder)
        writer.aborted = True
        if writer.holder not in self.model.channels:
            self.model.forget([writer])

    @rule()
    def fence(self) -> None:
        """What the pool does after a tick."""
        for holder in self.pool.owner.late_writers():
            assert holder in self.model.channels
            self.model.channels.discard(holder)
            self.pool.owner.fenced(holder)
            over = [
                each
                for each in self.model.writers
                if each.holder == holder and (each.aborted or each.expires_at <= self.now)
            ]
            self.model.forget(over)

    @rule(holder=HOLDERS)
    def hang_up(self, holder: int) -> None:
        self.model.channels.discard(holder)
        self.pool.owner.release_holder(holder)
        self.model.forget([each for each in self.model.writers if each.holder == holder])

    @rule(seconds=st.sampled_from([0.0, 1.0, TTL_S / 2, TTL_S, 3 * TTL_S]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.pool.owner.tick(self.now)

    @invariant()
    def consistent(self) -> None:
        self.pool.owner.check()

    def number_of(self, writer: Writer) -> int | None:
        """Which block it reserved for, if it still is reserved."""
        slot = self.pool.owner._reserved.get(writer.token)
        return next((each for each in range(KEYS) if slot and slot.key == key_of(each)), None)

    def teardown(self) -> None:
        """When all have hung up and been fenced, every slot can be had again."""
        for holder in (1, 2):
            self.pool.owner.release_holder(holder)
        self.pool.owner.tick(self.now + 1)
        assert self.pool.owner.late_writers() == []
        usage = self.pool.owner.usage()
        assert (usage.reserved_bytes, usage.pinned_bytes) == (0, 0)
        statuses = [self.pool.reserve(100 + number, now=self.now + 1).status for number in range(SLOTS)]
        assert statuses == ["granted"] * SLOTS
        self.pool.owner.check()


TestChannelWriters = pytest.mark.slow(ChannelWriters.TestCase)
