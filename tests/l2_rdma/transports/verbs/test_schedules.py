"""Any order of posting, wire, deadlines and endings: every operation ends, nothing touches its memory or the
region on its behalf once it is done, and nothing is kept."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.block import Incarnation
from kvcomm.errors import Refused, Unavailable
from l2_rdma.layout import plan_layout
from l2_rdma.region import SHM_DIRECTORY, Region
from l2_rdma.transports.port import Extent, Operation
from l2_rdma.transports.verbs.device import open_device
from l2_rdma.transports.verbs.provider import VerbsProvider
from l2_rdma.transports.verbs.registered import RegisteredMemory
from l2_rdma.transports.verbs.transport import VerbsTransport
from tests.l2_rdma.regions import TENANT
from tests.l2_rdma.transports.verbs.fabric import Card, Fabric

LENGTHS = (0, 1, 64, 4096, 5000, 300_000)
WRITE_BYTES = 5000
SCRATCH = 2 << 20
"""From the slots on; before that is what reads see."""

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.sampled_from(LENGTHS), st.booleans(), st.integers(1, 6)),
        st.tuples(st.just("write"), st.sampled_from((1, 64, WRITE_BYTES)), st.booleans(), st.integers(1, 6)),
        st.tuples(st.just("count"), st.integers(1, 6)),
        st.tuples(st.just("hold")),
        st.tuples(st.just("release"), st.one_of(st.none(), st.integers(1, 20))),
        st.tuples(st.just("turn")),
        st.tuples(st.just("tick"), st.integers(1, 3)),
        st.tuples(st.just("deregister")),
        st.tuples(st.just("reconnect"), st.integers(0, 1)),
        st.tuples(st.just("shut_out"), st.integers(0, 1)),
    ),
    max_size=40,
)


@dataclass
class Seen:
    """An operation, its memory, and what was there when it ended."""

    operation: Operation
    memory: memoryview
    expected: bytes | None = None
    """Of a read."""
    then: bytes | None = None

    def look(self) -> None:
        if self.operation.done:
            if self.then is None:
                self.then = bytes(self.memory)
            assert self.then == self.memory, "touched after it was done"
            if self.expected is not None and self.operation.error is None:
                assert self.then == self.expected


@dataclass
class Story:
    """One schedule on two channels of one device."""

    region: Region
    now: float = 100.0  # monotonic seconds
    seen: list[Seen] = field(default_factory=list)
    added: int = 0

    def __post_init__(self) -> None:
        self.fabric = Fabric(Card(max_requests=24, max_completions=30, message_bytes_max=100_000))
        self.provider = VerbsProvider(self.region, open_device(self.fabric.binding))
        self.transport = VerbsTransport(open_device(self.fabric.binding), self.clock)
        self.base = self.region.header.layout.slots_offset
        self.memory = self.region.memory
        self.registrations: list[RegisteredMemory] = []
        self.channels = [self.connected(0), self.connected(1)]
        self.next = 0

    def clock(self):
        """Looking takes time: who polls until a deadline gets there."""
        self.now += 0.002
        return self.now

    def connected(self, holder):
        held, self.fabric.held = self.fabric.held, False
        try:
            return self.transport.connect(
                self.provider.offer(),
                self.region.header,
                lambda proposal: self.provider.open(holder, TENANT, proposal),
                self.now + 0.5,
            )
        finally:
            self.fabric.held = held

    def channel(self):
        self.next += 1
        return self.channels[self.next % 2]

    def buffer(self, data, registered):
        view = memoryview(bytearray(data))
        if registered and data:
            self.registrations.append(self.transport.register(view))
        return view

    def read(self, length, registered, patience):
        into = self.buffer(bytes(length), registered)
        at = 13 * len(self.seen)
        [operation] = self.channel().read([Extent(self.base + at, length)], [into], self.now + patience)
        self.seen.append(Seen(operation, into, bytes(self.memory[self.base + at : self.base + at + length])))

    def write(self, length, registered, patience):
        data = self.buffer(bytes([len(self.seen) % 255 + 1]) * length, registered)
        begin = self.base + SCRATCH + WRITE_BYTES * len(self.seen)
        operation = self.channel().write(Extent(begin, length), data, self.now + patience)
        self.seen.append(Seen(operation, self.memory[begin : begin + length]))

    def count(self, patience):
        offset = self.region.header.layout.hazard_offset + 8 * len(self.seen)
        operation = self.channel().fetch_add(offset, 1, self.now + patience)
        self.seen.append(Seen(operation, self.memory[offset : offset + 8]))

    def hold(self):
        self.fabric.held = True

    def release(self, count):
        self.fabric.release(count)

    def turn(self):
        self.transport._hub.turn()

    def tick(self, seconds):
        self.now += seconds
        self.turn()

    def deregister(self):
        if self.registrations:
            self.registrations.pop(0).close()

    def reconnect(self, which):
        self.channels[which].close()
        with suppress(Unavailable):  # the other channel may have all places of the completion queue
            self.channels[which] = self.connected(which)

    def shut_out(self, which):
        self.provider.close_holder(which)

    def end(self):
        """Long after the last deadline, on a wire that delivers everything."""
        self.tick(100)
        assert all(each.operation.done for each in self.seen)
        for each in self.seen:
            each.look()
        self.fabric.release()
        self.turn()
        for each in self.seen:
            each.look()
            assert each.operation.error is None or isinstance(each.operation.error, Unavailable | Refused)
        hub = self.transport._hub
        assert (hub.arena.in_use, hub.places) == (0, 30)
        for registration in self.registrations:
            registration.close()
        assert hub.memory.empty
        assert list(self.fabric.regions) == [self.provider._registration.rkey, hub.piece_key]
        self.transport.close()
        self.provider.close()
        assert self.fabric.objects == []
        assert self.fabric.work_requests == 0


@pytest.fixture(scope="module")
def patterned():
    """Reads see bytes by which their place is known."""
    directory = Path(tempfile.mkdtemp(prefix="kvc-", dir=SHM_DIRECTORY))
    layout = plan_layout(5 << 20, slab_bytes=1 << 20, index_entries=64, hazard_count=64)
    region = Region.create(
        directory, instance="tests", node="pool-0", tenant=TENANT, incarnation=Incarnation(11), layout=layout
    )
    region.back(1 << 40)
    begin = layout.slots_offset
    region.memory[begin : begin + SCRATCH] = bytes(at * 7 % 251 for at in range(1 << 16)) * (SCRATCH >> 16)
    yield region
    region.close()
    shutil.rmtree(directory)


@pytest.mark.slow
@settings(max_examples=150)
@given(steps=_STEPS)
def test_any_schedule(patterned, steps):
    layout = patterned.header.layout
    patterned.memory[layout.hazard_offset : layout.slots_offset] = bytes(
        layout.slots_offset - layout.hazard_offset
    )
    begin = layout.slots_offset + SCRATCH
    patterned.memory[begin : begin + 45 * WRITE_BYTES] = bytes(45 * WRITE_BYTES)
    story = Story(patterned)
    for name, *arguments in steps:
        getattr(story, name)(*arguments)
        for each in story.seen:
            each.look()
    story.end()
