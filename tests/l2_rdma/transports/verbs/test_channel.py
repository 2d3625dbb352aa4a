"""Requests, completions and deadlines of one channel, on a wire that can be held."""

import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from kvcomm.errors import Refused, Unavailable
from l2_rdma.transports.port import Extent
from l2_rdma.transports.verbs import hub
from l2_rdma.transports.verbs.channel import SEND_QUEUE_DEPTH, SIGNAL_EVERY
from tests.l2_rdma.transports.verbs.fabric import CONSTANTS, Card
from tests.peers import PATIENCE_S, soon, until

KIB = 1 << 10
BRIEF_S = 0.03


@pytest.fixture
def channel(net):
    return net.connect()


@pytest.fixture
def data(net):
    """What the first slots hold."""
    made = os.urandom(2 << 20)
    begin = net.region.header.layout.slots_offset
    net.region.memory[begin : begin + len(made)] = made
    return made


def read(net, channel, at, length, into=None, deadline=None):
    into = memoryview(bytearray(length)) if into is None else into
    begin = net.region.header.layout.slots_offset + at
    deadline = soon() if deadline is None else deadline
    [operation] = channel.read([Extent(begin, length)], [into], deadline)
    return operation, into


def posted(net):
    """Requests on the wire, of all queue pairs."""
    return sum(len(pair.waiting) for pair in net.fabric.pairs.values())


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("length", [1, 64, 65, 4096, 4097, 256 * KIB, 256 * KIB + 1, 700_001, 2 << 20])
def test_reads_and_writes_of_every_size(net, channel, data, length, registered):
    into = memoryview(bytearray(length))
    registration = net.transport.register(into) if registered else None
    reading, into = read(net, channel, 0, length, into)
    net.transport.wait([reading])

    assert reading.error is None
    assert into == data[:length]

    begin = net.region.header.layout.slots_offset + (2 << 20) - 3
    into[:] = bytes(reversed(data[:length])) if length < 5000 else data[-length:]
    writing = channel.write(Extent(begin, length), into, soon())
    net.transport.wait([writing])

    assert writing.error is None
    assert net.region.memory[begin : begin + length] == into
    if registration is not None:
        registration.close()


def test_a_registered_destination_is_read_into_without_a_copy(net, channel, data):
    into = memoryview(bytearray(96 * KIB))
    registration = net.transport.register(into)
    net.fabric.held = True
    part = into[KIB : 65 * KIB]
    reading, _ = read(net, channel, 7, len(part), part)
    assert net.transport._hub.arena.in_use == 0
    net.fabric.release()

    assert part == data[7 : 7 + len(part)], "the bytes are there before anybody has looked"
    net.transport.wait([reading])
    registration.close()


def test_many_requests_are_one_chain_of_which_some_are_signaled(net, channel, data):
    net.fabric.posted_chains.clear()
    count = 2 * SIGNAL_EVERY + 5
    into = [memoryview(bytearray(8)) for _ in range(count)]
    begin = net.region.header.layout.slots_offset
    reads = channel.read([Extent(begin + 8 * at, 8) for at in range(count)], into, soon())
    net.transport.wait(reads)

    [flags] = net.fabric.posted_chains
    signaled = [at for at, flag in enumerate(flags) if flag == CONSTANTS.IBV_SEND_SIGNALED]
    assert signaled == [SIGNAL_EVERY - 1, 2 * SIGNAL_EVERY - 1, count - 1]
    assert [bytes(view) for view in into] == [data[8 * at : 8 * at + 8] for at in range(count)]


def test_a_queue_takes_what_it_has_room_for_and_the_rest_follows(net, channel, data):
    net.fabric.held = True
    into = [memoryview(bytearray(16)) for _ in range(1000)]
    begin = net.region.header.layout.slots_offset
    reads = channel.read([Extent(begin + at, 16) for at in range(1000)], into, soon())
    assert posted(net) == SEND_QUEUE_DEPTH
    net.fabric.release()
    net.transport.wait(reads)

    assert [bytes(view) for view in into] == [data[at : at + 16] for at in range(1000)]


def test_payloads_wait_for_pieces_of_the_arena(net, channel, data):
    net.fabric.held = True
    reads = [read(net, channel, 0, 256 * KIB) for _ in range(40)]
    assert posted(net) == 16
    net.fabric.release()
    net.transport.wait([operation for operation, _ in reads])

    assert all(into == data[: 256 * KIB] for _, into in reads)
    assert net.transport._hub.arena.in_use == 0


class TestScarceCompletions:
    @pytest.fixture
    def card(self):
        return Card(max_completions=12)

    def test_channels_share_the_places_of_the_completion_queue(self, net, data):
        """The fabric fails a test whose completion queue overflows."""
        channels = [net.connect(holder) for holder in (1, 2, 3)]
        net.fabric.held = True
        reads = [read(net, channel, 0, 64) for channel in channels for _ in range(30)]
        assert posted(net) == 12
        net.fabric.release()
        net.transport.wait([operation for operation, _ in reads])

        assert all(into == data[:64] for _, into in reads)
        assert net.transport._hub.places == 12

    def test_a_channel_that_breaks_gives_its_places_back(self, net, data):
        lost, other = net.connect(1), net.connect(2)
        net.fabric.held = True
        reads = [read(net, lost, 0, 64)[0] for _ in range(30)]
        waiting, into = read(net, other, 0, 64)
        lost.close()
        net.fabric.release()
        net.transport.wait([waiting, *reads])

        assert waiting.error is None
        assert into == data[:64]
        assert {type(each.error) for each in reads} == {Unavailable}
        assert net.transport._hub.places == 12


def test_atomics(net, channel):
    offset = net.region.header.layout.hazard_offset
    values = []
    for operation in (
        channel.fetch_add(offset, 5, soon()),
        channel.fetch_add(offset, (1 << 64) - 2, soon()),
        channel.compare_swap(offset, 4, 9, soon()),
        channel.compare_swap(offset, 3, 9, soon()),
    ):
        net.transport.wait([operation])
        values.append(operation.value)

    assert values == [0, 5, 3, 3]
    assert net.region.words[offset // 8] == 9


class TestWithoutAtomics:
    @pytest.fixture
    def card(self):
        return Card(atomics=CONSTANTS.IBV_ATOMIC_NONE)

    def test_a_device_without_atomics_says_so(self, channel):
        operation = channel.fetch_add(0, 1, soon())
        assert isinstance(operation.error, Refused)
        assert channel.broken is None


def test_an_overdue_read_into_registered_memory_breaks_the_channel_first(net, channel, data):
    into = memoryview(bytearray(4096))
    registration = net.transport.register(into)
    net.fabric.held = True
    reading, _ = read(net, channel, 0, 4096, into, soon(BRIEF_S))
    pairs = len(net.fabric.pairs)
    net.transport.wait([reading])

    assert isinstance(reading.error, Unavailable)
    assert isinstance(channel.broken, Unavailable)
    assert len(net.fabric.pairs) == pairs - 1, "the queue pair is destroyed"
    net.fabric.release()
    assert into == bytes(4096)
    registration.close()


def test_an_overdue_read_into_the_arena_harms_nobody(net, channel, data):
    net.fabric.held = True
    late, late_into = read(net, channel, 0, 4096, deadline=soon(BRIEF_S))
    patient, into = read(net, channel, 1, 4096)
    net.transport.wait([late])

    assert isinstance(late.error, Unavailable)
    assert channel.broken is None
    net.fabric.release()
    net.transport.wait([patient])

    assert into == data[1:4097]
    assert late_into == bytes(4096), "what arrives late stays in the arena"
    assert net.transport._hub.arena.in_use == 0


@pytest.mark.parametrize("kind", ["write", "fetch_add"])
def test_an_overdue_write_never_arrives(net, channel, kind):
    net.fabric.held = True
    offset = net.region.header.layout.slots_offset
    if kind == "write":
        operation = channel.write(Extent(offset, 5), b"later", soon(BRIEF_S))
    else:
        operation = channel.fetch_add(offset, 1, soon(BRIEF_S))
    net.transport.wait([operation])
    net.fabric.release()

    assert isinstance(operation.error, Unavailable)
    assert channel.broken is not None
    assert net.region.memory[offset : offset + 5] == bytes(5)


def test_what_is_overdue_before_it_was_posted_costs_the_channel_nothing(net, channel, data):
    net.fabric.held = True
    first = [read(net, channel, 0, 64) for _ in range(SEND_QUEUE_DEPTH)]
    offset = net.region.header.layout.slots_offset
    queued = channel.write(Extent(offset, 5), b"later", soon(BRIEF_S))
    net.transport.wait([queued])
    net.fabric.release()
    net.transport.wait([operation for operation, _ in first])

    assert isinstance(queued.error, Unavailable)
    assert channel.broken is None
    assert net.region.memory[offset : offset + 5] == data[:5]


def test_a_deadline_that_is_over_posts_nothing(net, channel):
    net.fabric.posted_chains.clear()
    operation = channel.write(Extent(0, 4), b"late", time.monotonic())

    assert isinstance(operation.error, Unavailable)
    assert net.fabric.posted_chains == []


def test_a_peer_that_is_gone_breaks_the_channel(net, channel):
    for number in list(net.fabric.pairs):
        if net.fabric.pairs[number].domain is net.provider._domain:
            net.fabric.break_pair(number)
    reads = [read(net, channel, 0, 64)[0] for _ in range(3)]
    net.transport.wait(reads)

    assert {type(each.error) for each in reads} == {Unavailable}
    assert "pool-0" in reads[0].error.message
    begun = channel.fetch_add(0, 1, soon())
    assert begun.done
    assert begun.error is channel.broken


def test_a_stale_key_is_refused_and_the_channel_is_over(net, channel):
    net.provider._registration.close()
    net.fabric.held = True
    first, _ = read(net, channel, 0, 64)
    second, into = read(net, channel, 0, 64)
    net.fabric.release()
    net.transport.wait([first, second])

    assert isinstance(first.error, Refused)
    assert isinstance(second.error, Unavailable)
    assert isinstance(channel.broken, Unavailable)
    assert into == bytes(64)


def test_a_device_that_takes_no_more_work(net, channel):
    net.fabric.failing_posts = 1
    operation, _ = read(net, channel, 0, 64)

    assert isinstance(operation.error, Unavailable)
    assert "takes no more work" in operation.error.message
    assert channel.broken is not None


def test_a_device_that_is_unplugged(net, channel, card):
    net.fabric.held = True
    reading, _ = read(net, channel, 0, 64)
    card.gone = True
    net.transport.wait([reading])

    assert isinstance(reading.error, Unavailable)
    assert "is gone" in reading.error.message
    card.gone = False  # only so that everything can be closed


def test_memory_under_way_outlives_its_registration(net, channel, data):
    into = memoryview(bytearray(4096))
    registration = net.transport.register(into)
    regions = len(net.fabric.regions)
    net.fabric.held = True
    reading, _ = read(net, channel, 0, 4096, into)
    registration.close()
    assert len(net.fabric.regions) == regions
    net.fabric.release()
    net.transport.wait([reading])

    assert reading.error is None
    assert into == data[:4096]
    assert len(net.fabric.regions) == regions - 1


def test_what_came_before_a_refusal_has_been_done(net, channel, data):
    """Only the refused one of a chain tells; that the others were done follows from their order."""
    end = channel.header.layout.region_bytes
    longer = replace(channel.header.layout, region_bytes=end + 4096)
    channel.header = replace(channel.header, layout=longer)
    into = [memoryview(bytearray(64)) for _ in range(4)]
    begin = net.region.header.layout.slots_offset
    extents = [Extent(begin, 64), Extent(begin + 64, 64), Extent(end, 64), Extent(begin, 64)]
    reads = channel.read(extents, into, soon())
    net.transport.wait(reads)

    assert [type(each.error) for each in reads] == [type(None), type(None), Refused, Unavailable]
    assert b"".join(into[:2]) == data[:128]
    assert not any(map(any, into[2:]))


def test_ending_one_channel_keeps_the_completions_of_the_others(net, channel, data):
    other = net.connect(2)
    net.fabric.held = True
    mine, _ = read(net, channel, 0, 64)
    patient, into = read(net, other, 64, 64, deadline=soon(2.0))
    net.fabric.release()
    channel.close()
    net.transport.wait([mine, patient])

    assert patient.error is None
    assert into == data[64:128]


@pytest.fixture
def no_short_naps(monkeypatch):
    """Who is not woken sleeps until its deadline."""
    monkeypatch.setattr(hub, "SLEEP_S_MAX", 60.0)


@pytest.mark.usefixtures("no_short_naps")
@pytest.mark.parametrize("end", ["completion", "close"])
def test_a_sleeping_waiter_is_woken(net, channel, end):
    net.fabric.held = True
    reading, _ = read(net, channel, 0, 64)
    waiter = threading.Thread(target=net.transport.wait, args=([reading],), daemon=True)
    waiter.start()
    until(lambda: net.transport._hub._sleeper is not None)
    begun = time.monotonic()
    if end == "completion":
        net.fabric.release()
    else:
        channel.close()
    waiter.join(PATIENCE_S / 2)

    assert not waiter.is_alive()
    assert reading.done
    assert time.monotonic() - begun < PATIENCE_S / 2
    assert (reading.error is None) == (end == "completion")


@pytest.mark.usefixtures("no_short_naps")
def test_what_another_thread_has_reaped_wakes_the_sleeper_too(net, channel):
    net.fabric.held = True
    reading, _ = read(net, channel, 0, 64)
    waiter = threading.Thread(target=net.transport.wait, args=([reading],), daemon=True)
    waiter.start()
    until(lambda: net.transport._hub._sleeper is not None)
    with net.transport._hub.lock:  # the waiter cannot take its completion before we do
        net.fabric.release()
        net.transport._hub.turn()
        assert reading.done
    waiter.join(PATIENCE_S / 2)

    assert not waiter.is_alive()


def test_events_that_came_while_falling_asleep_do_not_pile_up(net, channel, monkeypatch):
    """The queue is armed, the completion arrives, the last look finds it: nobody takes the event."""
    shared = net.transport._hub
    look = shared.turn
    for _ in range(5):
        net.fabric.held = True
        reading, _ = read(net, channel, 0, 64)
        shared._seen_count = shared._ended_count
        monkeypatch.setattr(shared, "turn", lambda: (net.fabric.release(), look())[1])
        shared._sleep(5.0)
        monkeypatch.undo()

        assert reading.done
        assert shared._channel.event_count <= 1


@pytest.mark.usefixtures("no_short_naps")
def test_each_sleep_can_be_ended(net, channel):
    for _ in range(3):
        net.fabric.held = True
        reading, _ = read(net, channel, 0, 64)
        waiter = threading.Thread(target=net.transport.wait, args=([reading],), daemon=True)
        waiter.start()
        until(lambda: net.transport._hub._sleeper is not None)
        net.fabric.release()
        waiter.join(PATIENCE_S / 2)
        assert not waiter.is_alive()


def test_closing_ends_what_is_under_way_and_frees_everything(net, channel):
    net.fabric.held = True
    reads = [read(net, channel, 0, 64)[0] for _ in range(200)]
    channel.close()
    channel.close()
    net.transport.wait(reads)

    assert {type(each.error) for each in reads} == {Unavailable}
    assert net.transport._hub.arena.in_use == 0


def test_a_forked_child_touches_nothing(net, channel):
    """As the child sees it: what it closes would be the parent's."""
    shared = net.transport._hub
    memory = memoryview(bytearray(64))
    registration = net.transport.register(memory)
    before = net.fabric.objects
    shared.abandon()
    registration.close()
    channel.close()
    net.transport.close()
    after = net.fabric.objects
    with pytest.raises(ValueError, match="closed"):
        net.transport.register(memory)

    assert after == before
    shared.closed, channel._broken = False, None  # the parent again
    registration._region.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_thread_that_stayed_with_the_parent(net, channel):
    registration = net.transport.register(memoryview(bytearray(64)))
    with net.transport._hub.lock:  # as another thread may have it, whose copy would never give it back
        child = os.fork()
        if not child:
            signal.alarm(int(PATIENCE_S))  # it would wait for ever
            registration.close()
            channel.close()
            net.transport.close()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    registration.close()


def test_misuse_raises(net, channel):
    into = memoryview(bytearray(8))
    for call in (
        lambda: channel.read([Extent(0, 9)], [into], soon()),
        lambda: channel.read([Extent(0, 8)], [into, into], soon()),
        lambda: channel.read([Extent(0, 8)], [into.toreadonly()], soon()),
        lambda: channel.write(Extent(0, 9), into, soon()),
        lambda: channel.write(Extent(0, 4), into[::2], soon()),
        lambda: channel.fetch_add(4, 1, soon()),
        lambda: channel.compare_swap(8, -1, 1, soon()),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            call()
    assert channel.broken is None
