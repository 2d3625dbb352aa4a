"""The owner and a real reader over one region, driven at random against a dictionary.

What must hold whatever happens: a hit has exactly the bytes that were put under its key; what is present is
found; bytes under a view, a lease or a writer's pin never change.
"""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcomm.block import HEADER_BYTES, Incarnation
from kvcomm.wire.messages import Want
from l2_rdma.owner import Owner
from l2_rdma.pins import PinTable
from l2_rdma.reader import Reader
from l2_rdma.region import Region
from tests.l2_rdma.regions import TENANT, header_of, key_of, layout_of, payload_of

NUMBERS = st.integers(0, 15)
PICKS = st.integers(0, 99)
SIZES = (768, 1496, 3000)


def bytes_of(number):
    return payload_of(number, SIZES[number % 3])


class OwnerAndReader(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.region = Region.create(
            Path(self.directory.name),
            instance="tests",
            node="pool-0",
            tenant=TENANT,
            incarnation=Incarnation(1),
            layout=layout_of(slab_count=3),
        )
        backed = self.region.back(1 << 20)
        self.owner = Owner(
            self.region.memory,
            self.region.header,
            locked=self.region.hazards_locked,
            reservation_ttl_s=1.0,
            pin_budget_bytes=1 << 20,
            backed_bytes=backed,
        )
        client = Region.attach(self.region.path, TENANT)
        first, count, _ = self.owner.open_pins(100, 8)
        self.reader = Reader(client, PinTable(client, first, count))
        self.now = 0.0
        self.writing = []  # (number, grant, holder, pin)
        self.views = []  # (number, memoryview)
        self.leases = []
        self.put_once = set()

    def teardown(self):
        self.region.close()
        self.directory.cleanup()

    @rule(number=NUMBERS, holder=st.integers(1, 3), begin=st.booleans())
    def reserve(self, number, holder, begin):
        there = self.owner.present([key_of(number)], TENANT)[0]
        pending = any(each[0] == number and self.now < each[4] for each in self.writing)
        grant = self.owner.reserve(
            [Want(key_of(number), HEADER_BYTES + SIZES[number % 3])], holder, TENANT, self.now
        )[0]
        if there or pending:
            assert grant.status == ("present" if there else "pending")
            return
        assert grant.status in ("granted", "full")
        if grant.status == "granted":
            size = HEADER_BYTES + SIZES[number % 3]
            pin = self.reader.begin_write(grant.offset, grant.generation, size) if begin else None
            self.writing.append((number, grant, holder, pin, self.now + 1.0))

    @precondition(lambda self: self.writing)
    @rule(pick=PICKS, abort=st.booleans())
    def finish(self, pick, abort):
        """Write and publish, perhaps long after the reservation expired."""
        number, grant, holder, pin, expires_at = self.writing.pop(pick % len(self.writing))
        if pin is None:
            size = HEADER_BYTES + SIZES[number % 3]
            pin = self.reader.begin_write(grant.offset, grant.generation, size)
        if pin is None:
            self.owner.abort([grant.token], holder)
            return
        self.reader.write(
            grant.offset, header_of(number, bytes_of(number)).pack(), memoryview(bytes_of(number))
        )
        self.reader.end_write(pin)
        if abort:
            self.owner.abort([grant.token], holder)
            return
        (status,) = self.owner.publish([grant.token], holder, self.now, verify=False)
        assert status == ("published" if self.now < expires_at else "expired")
        if status == "published":
            self.put_once.add(number)

    @rule(number=NUMBERS)
    def put(self, number):
        """All at once, as most writers do."""
        before = len(self.writing)
        self.reserve(number, 1, True)
        if len(self.writing) > before:
            self.finish(before, False)

    @rule(number=NUMBERS, keep=st.booleans())
    def view(self, number, keep):
        there = self.owner.present([key_of(number)], TENANT)[0]
        block = self.reader.view(key_of(number))
        assert (block is not None) == there == self.reader.lookup([key_of(number)])[0]
        if block is not None:
            assert number in self.put_once
            assert bytes(block.payload) == bytes_of(number)
            if keep:
                self.views.append((number, block.payload))

    @precondition(lambda self: self.views)
    @rule(pick=PICKS)
    def drop_view(self, pick):
        del self.views[pick % len(self.views)]

    @rule(number=NUMBERS)
    def lease(self, number):
        lease = self.owner.lease(key_of(number), TENANT)
        if lease is not None:
            self.leases.append((number, lease))

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS)
    def release(self, pick):
        _, lease = self.leases.pop(pick % len(self.leases))
        lease.release()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.5]))
    def pass_time(self, seconds):
        self.now += seconds
        self.owner.tick(self.now)

    @rule(number=NUMBERS)
    def damage(self, number):
        """A bit of an unpinned, published payload flips: a miss from now on, everywhere."""
        lease = self.owner.lease(key_of(number), TENANT)
        if lease is None or any(each == number for each, _ in [*self.views, *self.leases]):
            return
        hint = self.reader._index.probe(key_of(number))
        assert hint is not None
        lease.release()
        self.region.memory[hint.offset + HEADER_BYTES] ^= 1
        self.reader._verified.clear()  # as in a process that has not seen it yet
        assert self.reader.view(key_of(number)) is None
        self.owner.tick(self.now)
        assert self.owner.present([key_of(number)], TENANT) == [False]

    @invariant()
    def nothing_in_use_changed(self):
        for number, payload in self.views:
            assert bytes(payload) == bytes_of(number)
        for number, lease in self.leases:
            assert bytes(lease.copy[HEADER_BYTES:]) == bytes_of(number)

    @invariant()
    def owner_is_consistent(self):
        self.owner.check()


OwnerAndReader.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestOwnerAndReader = pytest.mark.slow(OwnerAndReader.TestCase)
