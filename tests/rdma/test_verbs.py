"""The transport of RDMA on real verbs: what the contract of all transports (tests/contracts/transports) does
not ask for."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvcomm.errors import Refused, Unavailable
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.port import Extent, WireOptions
from l2_rdma.transports.verbs import device_reports, make_transport
from l2_rdma.transports.verbs.provider import CHANNELS_PER_HOLDER_MAX, VerbsAnswer
from tests.contracts.transports.peer import MIB, expected
from tests.contracts.transports.worlds import Link, Peer, World, directory_for_regions
from tests.peers import soon, until
from tests.rdma.devices import devices
from tests.rdma.rack import Host

pytestmark = [pytest.mark.rdma, pytest.mark.processes]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with directory_for_regions() as directory:
        yield World("verbs", directory)


@pytest.fixture(scope="module")
def peer(world: World) -> Iterator[Peer]:
    with world.peer() as peer:
        yield peer


@pytest.fixture
def link(world: World, peer: Peer) -> Iterator[Link]:
    with world.link(peer) as link:
        yield link


@pytest.fixture
def own_link(world: World) -> Iterator[Link]:
    with world.peer(incarnation=31) as peer, world.link(peer) as link:
        yield link


def read(link: Link, at: int, into: memoryview) -> None:
    """The peer's pattern, verified."""
    [operation] = link.channel.read([Extent(link.slots + at, into.nbytes)], [into], soon())
    link.transport.wait([operation])
    assert operation.error is None
    assert into == expected(link.peer.incarnation, at, into.nbytes)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_device_is_reported() -> None:
    reports = device_reports()

    assert sorted(report.device for report in reports) == devices()
    assert {report.refused for report in reports} == {""}
    for report in reports:
        assert report.gid.startswith("0000:0000:0000:0000:0000:ffff:")
        assert (report.gid_kind, report.link_layer) == ("RoCE v2", "Ethernet")
        assert (report.mtu_bytes, report.atomics, report.on_demand) == (4096, "hca", False)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match=f"no RDMA device 'mlx5_77'.*{devices()[0]}"):
        make_transport(WireOptions(rdma_device="mlx5_77"))


@pytest.mark.parametrize("length", [1, 4097, MIB, 9 * MIB])
def test_registered_memory_is_read_into_directly(link: Link, length: int) -> None:
    around = memoryview(bytearray(length + 200))
    with_mark = bytes(100)
    registration = link.transport.register(around)
    read(link, 3, around[100 : 100 + length])
    assert around[:100] == around[-100:] == with_mark
    registration.close()
    registration.close()
    read(link, 5, around[100 : 100 + length])  # by way of the arena


def test_read_only_memory_is_written_from(link: Link) -> None:
    data = memoryview(os.urandom(3 * MIB))
    registration = link.transport.register(data)
    writing = link.channel.write(Extent(link.scratch, data.nbytes), data, soon())
    link.transport.wait([writing])

    assert writing.error is None
    assert link.control.peek(link.scratch, data.nbytes) == data
    registration.close()


def test_a_registration_keeps_its_memory(link: Link) -> None:
    """The device goes on reading the pages of memory that was freed, and the allocator may use their
    addresses for others."""
    memory = bytearray(MIB)
    registration = link.transport.register(memoryview(memory))
    with pytest.raises(BufferError):
        memory.extend(b"x")
    registration.close()
    gc.collect()
    memory.extend(b"x")


def tampered(link: Link, **changes: object) -> Link:
    """A channel beside the link's whose pool answered with something else."""
    offer, packed = link.control.ask("meet")
    header = RegionHeader.unpack(packed)

    def ask(proposal: bytes) -> bytes:
        answer = msgspec.msgpack.decode(link.control.open(proposal), type=VerbsAnswer)
        return msgspec.msgpack.encode(msgspec.structs.replace(answer, **changes))

    return replace(link, channel=link.transport.connect(offer, header, ask, soon()))


def test_a_wrong_key_is_found_out_when_connecting(link: Link) -> None:
    with pytest.raises(Unavailable, match="does not give this memory"):
        tampered(link, key=0xDEAD00)


def test_what_is_behind_the_region_is_refused_by_the_device(link: Link) -> None:
    """Our own check is told that the region is longer than it is."""
    layout = replace(link.channel.header.layout, region_bytes=link.channel.header.layout.region_bytes + MIB)
    link.channel.header = replace(link.channel.header, layout=layout)
    into = memoryview(bytearray(64))
    first, second = link.channel.read(
        [Extent(layout.region_bytes - 64, 64), Extent(link.slots, 64)], [into, into], soon()
    )
    link.transport.wait([first, second])

    assert isinstance(first.error, Refused)
    assert isinstance(second.error, Unavailable)
    assert isinstance(link.channel.broken, Unavailable)
    link.control.connect(link.transport).close()  # the next one is as good as the first


def test_memory_that_was_deregistered_is_refused(own_link: Link) -> None:
    """As after a restart at the same address: an old key opens nothing."""
    own_link.control.ask("shut")
    into = memoryview(bytearray(64))
    [reading] = own_link.channel.read([Extent(own_link.slots, 64)], [into], soon())
    own_link.transport.wait([reading])

    assert isinstance(reading.error, Unavailable)
    assert into == bytes(64)


@pytest.mark.slow
def test_a_hundred_channels_leave_nothing_behind(link: Link) -> None:
    into = memoryview(bytearray(4096))
    hub = link.transport._hub  # type: ignore[attr-defined]
    before, places = descriptors(), hub.places
    registration = link.transport.register(into)
    for number in range(100):
        channel = link.control.connect(link.transport)
        [reading] = channel.read([Extent(link.slots + number, 4096)], [into], soon())
        if number % 2:
            channel.close()
        link.transport.wait([reading])
        channel.close()
    registration.close()

    assert (descriptors(), hub.places, hub.arena.in_use) == (before, places, 0)


def test_the_oldest_of_too_many_channels_is_closed_by_the_pool(link: Link) -> None:
    control = link.peer.control()
    oldest, *_ = [control.connect(link.transport) for _ in range(CHANNELS_PER_HOLDER_MAX + 1)]
    [reading] = oldest.read([Extent(0, 8)], [memoryview(bytearray(8))], soon())
    link.transport.wait([reading])

    assert isinstance(reading.error, Unavailable)
    read(link, 0, memoryview(bytearray(8)))  # another holder's


def test_an_owner_that_is_stopped_is_read_and_one_that_is_killed_is_noticed(own_link: Link) -> None:
    """Stopped, its device answers.  Killed, the waiter sleeps until our device gives up, after half a second
    of sending again, long before the deadline."""
    own_link.peer.pause()
    read(own_link, 9, memoryview(bytearray(100_000)))
    counting = [own_link.channel.fetch_add(own_link.words, 3, soon()) for _ in range(5)]
    own_link.transport.wait(counting)
    assert [each.value for each in counting] == [0, 3, 6, 9, 12]

    own_link.peer.kill()
    begun, used = time.monotonic(), time.thread_time()
    [reading] = own_link.channel.read([Extent(0, 8)], [memoryview(bytearray(8))], soon(60.0))
    own_link.transport.wait([reading])
    took, used = time.monotonic() - begun, time.thread_time() - used

    assert isinstance(reading.error, Unavailable)
    assert took < 30.0
    assert used < took / 2


def test_many_threads_share_one_queue(link: Link) -> None:
    channels = [link.channel, link.control.connect(link.transport)]
    wrong = []

    def work(number: int) -> None:
        into = memoryview(bytearray(2000))
        for step in range(25):
            at = 1000 * number + step
            [reading] = channels[number % 2].read([Extent(link.slots + at, 2000)], [into], soon())
            link.transport.wait([reading])
            if reading.error or into != expected(link.peer.incarnation, at, 2000):
                wrong.append((number, step, reading.error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert wrong == []


def test_a_forked_child_closes_nothing_of_its_parents(link: Link) -> None:
    child = os.fork()
    if not child:
        status = 1
        try:
            link.channel.close()
            link.transport.close()
            try:
                link.transport.register(memoryview(bytearray(8)))
            except ValueError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    read(link, 0, memoryview(bytearray(4096)))


def test_a_forked_child_that_ends_like_any_program_neither(link: Link) -> None:
    """It runs its finalizers and frees its objects."""
    child = os.fork()
    if not child:
        channel = link.channel
        del channel
        gc.collect()
        ctypes.pythonapi.Py_Exit(0)
    assert os.waitpid(child, 0)[1] == 0
    read(link, 0, memoryview(bytearray(4096)))


def test_soft_roce_has_no_gpudirect(link: Link) -> None:
    descriptor = os.memfd_create("no-dmabuf")
    try:
        with pytest.raises(Refused, match="cannot reach GPU memory"):
            link.transport.register_dmabuf(descriptor, 0, 4096)  # type: ignore[attr-defined]
    finally:
        os.close(descriptor)
    read(link, 0, memoryview(bytearray(64)))


def test_the_region_is_pinned_and_comes_back(world: World) -> None:
    """The pages of a pool that was killed are free again: its kernel-side registration goes with it."""
    shared = Path("/proc/meminfo")

    def in_use() -> int:
        lines = dict(line.split(":", 1) for line in shared.read_text().splitlines())
        return int(lines["Shmem"].split()[0]) << 10

    before = in_use()
    with world.peer(incarnation=41) as peer:
        assert in_use() - before > 30 * MIB
        peer.kill()
        for left in peer.directory.glob("kvcomm-*"):
            left.unlink()
        until(lambda: in_use() - before < 8 * MIB)


def test_signals_do_not_disturb_a_wait(link: Link) -> None:
    """A handler runs in between; the wait goes on."""
    rung = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        until(lambda: bool(rung))
        for at in range(20):
            read(link, at, memoryview(bytearray(50_000)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def far_peer(world: World) -> Iterator[Peer]:
    """On the second host of the rack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCOMM_TEST_RDMA_PEER_DEVICE", Host(2).device)
        with world.peer(incarnation=51) as peer:
            yield peer


@pytest.fixture
def across(
    rack: list[Host], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Link]:
    """From the first host of the rack to the second."""
    monkeypatch.setenv("KVCOMM_TEST_RDMA_DEVICE", rack[0].device)
    world, peer = (request.getfixturevalue(name) for name in ("world", "far_peer"))
    with world.link(peer) as link:
        yield link


@pytest.mark.parametrize("kind", ["read", "write", "fetch_add"])
def test_what_a_pulled_cable_held_up_never_arrives(kind: str, rack: list[Host], across: Link) -> None:
    """The device would have sent it again for half a second; the deadline is over before that, and the cable
    is in again."""
    into = memoryview(bytearray(4096))
    registration = across.transport.register(into)
    rack[1].pull()
    deadline = soon(0.15)
    if kind == "read":
        [late] = across.channel.read([Extent(across.slots, 4096)], [into], deadline)
    elif kind == "write":
        late = across.channel.write(Extent(across.scratch, 4), b"late", deadline)
    else:
        late = across.channel.fetch_add(across.words, 1, deadline)
    across.transport.wait([late])
    assert isinstance(late.error, Unavailable)
    assert isinstance(across.channel.broken, Unavailable)

    rack[1].plug()
    again = replace(across, channel=across.control.connect(across.transport))
    read(again, 100, memoryview(bytearray(300_000)))  # whatever was on the way has arrived by now
    assert into == bytes(4096)
    assert across.control.peek(across.scratch, 4) == bytes(4)
    assert across.control.peek(across.words, 8) == bytes(8)
    registration.close()


def test_a_read_that_only_the_arena_waits_for_survives_a_short_cut(rack: list[Host], across: Link) -> None:
    """Lost packets are sent again, and one operation's deadline is not the end of the others."""
    late_into, into = memoryview(bytearray(4096)), memoryview(bytearray(4096))
    rack[1].pull()
    [late] = across.channel.read([Extent(across.slots, 4096)], [late_into], soon(0.1))
    [patient] = across.channel.read([Extent(across.slots + 7, 4096)], [into], soon())
    across.transport.wait([late])
    rack[1].plug()
    across.transport.wait([patient])

    assert isinstance(late.error, Unavailable)
    assert late_into == bytes(4096)
    if patient.error is None:  # else this machine took longer to plug it in than the device tries
        assert into == expected(51, 7, 4096)
        assert across.channel.broken is None
