"""What ``l2_rdma.transports.port`` promises, held against every transport with a peer in another process."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcomm.errors import Corrupt, Refused, Unavailable
from l2_rdma.layout import RegionHeader
from l2_rdma.transports.port import Channel, Extent, Operation
from tests.contracts.transports.peer import MIB, READ_BYTES, expected
from tests.contracts.transports.worlds import ROOT, Link, environment
from tests.peers import PATIENCE_S, soon, until

pytestmark = pytest.mark.processes

SIZES = (1, 7, 8, 64, 255, 4096, 65_537, MIB, MIB + 1, 4 * MIB, 16 * MIB)
SLACK_S = PATIENCE_S
"""A machine under load may be late; a hang is later."""
SHORT_S = 0.3


def filled(length: int) -> memoryview:
    """A destination that shows whether anybody wrote to it."""
    return memoryview(bytearray(b"\xa5" * length))


def untouched(view: memoryview) -> bool:
    return view == filled(view.nbytes)


def read(link: Link, at: int, length: int, deadline: float | None = None) -> tuple[Operation, memoryview]:
    """One read of the peer's pattern, posted."""
    into = filled(length)
    deadline = soon() if deadline is None else deadline
    [operation] = link.channel.read([Extent(link.slots + at, length)], [into], deadline)
    return operation, into


def held(link: Link, at: int, length: int) -> bytes:
    return expected(link.peer.incarnation, at, length)


def finish(link: Link, *operations: Operation) -> None:
    """All without an error."""
    link.transport.wait(operations)
    assert all(each.done for each in operations)
    assert [each.error for each in operations] == [None] * len(operations)


def write(link: Link, offset: int, data: bytes | memoryview) -> None:
    length = memoryview(data).nbytes
    finish(link, link.channel.write(Extent(offset, length), data, soon()))


def word(link: Link, number: int, value: int = 0) -> int:
    """The offset of a word of the peer's that holds ``value`` now."""
    offset = link.words + 8 * number
    link.control.ask("poke", offset, value.to_bytes(8, sys.byteorder))
    return offset


def value_of(link: Link, offset: int) -> int:
    return int.from_bytes(link.control.peek(offset, 8), sys.byteorder)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """``work(number)`` in each; fails with what the first of them raised."""
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * PATIENCE_S)
        assert not thread.is_alive(), "a thread waits without end"
    if problems:
        raise problems[0]


# -- reads


@pytest.mark.parametrize("at", [0, 1, 4093])
@pytest.mark.parametrize("length", SIZES)
def test_a_read_brings_the_bytes_of_its_extent(link: Link, length: int, at: int) -> None:
    operation, into = read(link, at, length)
    finish(link, operation)

    assert into == held(link, at, length)


def test_a_read_of_nothing_is_done_like_any_other(link: Link) -> None:
    empty, _ = read(link, 5, 0)
    [at_the_end] = link.channel.read(
        [Extent(link.channel.header.layout.region_bytes, 0)], [memoryview(bytearray())], soon()
    )
    finish(link, empty, at_the_end)


def test_a_read_fills_its_destination_and_nothing_beside_it(link: Link) -> None:
    around = filled(3 * 4096)
    [operation] = link.channel.read([Extent(link.slots + 77, 4001)], [around[4096 : 4096 + 4001]], soon())
    finish(link, operation)

    assert around[4096 : 4096 + 4001] == held(link, 77, 4001)
    assert untouched(around[:4096])
    assert untouched(around[4096 + 4001 :])


def test_a_batch_of_reads_each_into_its_own(link: Link) -> None:
    """Neighbours, overlaps, the same bytes twice, and sizes from nothing to megabytes."""
    pick = random.Random(3)
    places = [(0, 64), (64, 64), (32, 64), (0, 64), (9, 0)]
    places += [(pick.randrange(READ_BYTES - 3 * MIB), pick.choice(SIZES[:9])) for _ in range(60)]
    into = [filled(length) for _, length in places]
    operations = link.channel.read([Extent(link.slots + at, length) for at, length in places], into, soon())
    assert len(operations) == len(places)
    finish(link, *operations)

    assert all(view == held(link, *place) for view, place in zip(into, places, strict=True))


def test_a_thousand_operations_are_under_way_at_once(link: Link) -> None:
    places = [(4096 * number + number, 1 + 7 * number) for number in range(1000)]
    reads = [(place, *read(link, *place)) for place in places]
    finish(link, *(operation for _, operation, _ in reads))

    assert all(into == held(link, *place) for place, _, into in reads)


def test_operations_are_waited_for_in_any_order(link: Link) -> None:
    reads = [read(link, 65_537 * number, 65_537) for number in range(40)]
    order = random.Random(5).sample(range(40), 40)
    for number in order:
        finish(link, reads[number][0])
        assert reads[number][1] == held(link, 65_537 * number, 65_537)
    finish(link, *(operation for operation, _ in reads))
    link.transport.wait([])


def test_a_region_is_read_from_its_first_byte_to_its_last(link: Link) -> None:
    into = filled(64)
    end = link.channel.header.layout.region_bytes
    head = filled(len(link.channel.header.pack()))
    operations = link.channel.read([Extent(0, head.nbytes), Extent(end - 64, 64)], [head, into], soon())
    finish(link, *operations)

    assert RegionHeader.unpack(head) == link.channel.header
    assert into == link.control.peek(end - 64, 64)


# -- registered memory


def test_registered_destinations_and_sources(link: Link) -> None:
    memory = filled(3 * MIB)
    registration = link.transport.register(memory)
    begin, length = 4096, MIB + 3
    [operation] = link.channel.read([Extent(link.slots, length)], [memory[begin : begin + length]], soon())
    finish(link, operation)
    assert memory[begin : begin + length] == held(link, 0, length)
    assert untouched(memory[begin + length :])

    write(link, link.scratch, memory[begin : begin + length])
    assert link.control.peek(link.scratch, length) == held(link, 0, length)
    registration.close()


def test_destinations_that_lie_half_in_registered_memory(link: Link) -> None:
    memory = filled(2 * MIB)
    registration = link.transport.register(memory[:MIB])
    [operation] = link.channel.read([Extent(link.slots, MIB)], [memory[MIB // 2 : MIB // 2 + MIB]], soon())
    finish(link, operation)

    assert memory[MIB // 2 : MIB // 2 + MIB] == held(link, 0, MIB)
    registration.close()


def test_memory_is_memory_after_its_registration(link: Link) -> None:
    memory = filled(MIB)
    registration = link.transport.register(memory)
    registration.close()
    registration.close()
    [operation] = link.channel.read([Extent(link.slots, MIB)], [memory], soon())
    finish(link, operation)

    assert memory == held(link, 0, MIB)


# -- writes


@pytest.mark.parametrize("at", [0, 1, 4093])
@pytest.mark.parametrize("length", SIZES)
def test_what_is_written_is_in_the_region(link: Link, length: int, at: int) -> None:
    data = os.urandom(length)
    write(link, link.scratch + at, data)

    assert link.control.peek(link.scratch + at, length) == data
    into = filled(length)
    finish(link, *link.channel.read([Extent(link.scratch + at, length)], [into], soon()))
    assert into == data


def test_a_write_changes_its_extent_and_nothing_beside_it(link: Link) -> None:
    write(link, link.scratch, bytes(16_384))
    write(link, link.scratch + 4099, b"x" * 4099)

    assert link.control.peek(link.scratch, 16_384) == bytes(4099) + b"x" * 4099 + bytes(16_384 - 2 * 4099)


def test_many_writes_are_under_way_at_once(link: Link) -> None:
    pieces = [bytes([number & 0xFF]) * (1 + number) for number in range(1000)]
    extents = [Extent(link.scratch + 1024 * number, 1 + number) for number in range(1000)]
    writes = [
        link.channel.write(extent, piece, soon()) for extent, piece in zip(extents, pieces, strict=True)
    ]
    finish(link, *writes)

    into = [filled(len(piece)) for piece in pieces]
    finish(link, *link.channel.read(extents, into, soon()))
    assert [bytes(view) for view in into] == pieces


def test_a_write_of_nothing_is_done_like_any_other(link: Link) -> None:
    write(link, link.scratch, b"")


# -- atomics


def test_fetch_add_returns_what_was_there_and_wraps(link: Link) -> None:
    offset = word(link, 0, 41)
    first = link.channel.fetch_add(offset, 1, soon())
    finish(link, first)
    second = link.channel.fetch_add(offset, 2**64 - 1, soon())  # minus one
    finish(link, second)

    assert (first.value, second.value, value_of(link, offset)) == (41, 42, 41)
    offset = word(link, 0, 2**64 - 1)
    third = link.channel.fetch_add(offset, 3, soon())
    finish(link, third)
    assert (third.value, value_of(link, offset)) == (2**64 - 1, 2)


def test_compare_swap_stores_only_if_the_word_is_as_expected(link: Link) -> None:
    offset = word(link, 1, 2**63 + 5)
    missed = link.channel.compare_swap(offset, 5, 6, soon())
    finish(link, missed)
    assert (missed.value, value_of(link, offset)) == (2**63 + 5, 2**63 + 5)

    stored = link.channel.compare_swap(offset, 2**63 + 5, 2**64 - 1, soon())
    finish(link, stored)
    assert (stored.value, value_of(link, offset)) == (2**63 + 5, 2**64 - 1)


def test_atomics_leave_the_neighbours_alone(link: Link) -> None:
    before, offset, after = word(link, 2, 7), word(link, 3, 2**64 - 1), word(link, 4, 9)
    finish(link, link.channel.fetch_add(offset, 1, soon()), link.channel.compare_swap(after, 9, 10, soon()))

    assert [value_of(link, each) for each in (before, offset, after)] == [7, 0, 10]


def test_additions_under_way_at_once_sum_exactly(link: Link) -> None:
    offset = word(link, 5)
    adding = [link.channel.fetch_add(offset, 1, soon()) for _ in range(500)]
    finish(link, *adding)

    assert sorted(each.value for each in adding) == list(range(500))
    assert value_of(link, offset) == 500


@pytest.mark.slow
def test_atomics_of_many_threads_sum_exactly(link: Link) -> None:
    added, swapped = word(link, 6), word(link, 7)

    def work(number: int) -> None:
        for _ in range(100):
            adding = link.channel.fetch_add(added, number + 1, soon())
            finish(link, adding)
            seen = 0
            while True:
                swapping = link.channel.compare_swap(swapped, seen, seen + 1, soon())
                finish(link, swapping)
                if swapping.value == seen:
                    break
                seen = swapping.value

    in_threads(4, work)

    assert value_of(link, added) == 100 * (1 + 2 + 3 + 4)
    assert value_of(link, swapped) == 400


@pytest.mark.slow
def test_atomics_of_many_processes_sum_exactly(link: Link) -> None:
    offset = word(link, 8)
    command = [sys.executable, "-m", "tests.contracts.transports.worker"]
    with ExitStack() as stack:
        workers = []
        for _ in range(4):
            worker = subprocess.Popen(
                [*command, link.world.name, str(link.peer.directory), "8", "300"],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(worker.communicate)
            stack.callback(worker.kill)
            workers.append(worker)
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            assert worker.wait(6 * PATIENCE_S) == 0

    assert value_of(link, offset) == 4 * 300


WORDS = 8
SPACE = 512
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, SPACE), st.integers(0, SPACE)),
        st.tuples(st.just("write"), st.integers(0, SPACE - 1), st.binary(max_size=64)),
        st.tuples(st.just("add"), st.integers(0, WORDS - 1), st.integers(0, 2**64 - 1)),
        st.tuples(st.just("swap"), st.integers(0, WORDS - 1), st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=30,
)


@pytest.mark.slow
def test_any_sequence_of_operations_does_what_it_would_in_plain_memory(link: Link) -> None:
    @settings(max_examples=30)
    @given(steps=_STEPS)
    def run(steps: list[tuple]) -> None:
        space, words = bytearray(SPACE), [0] * WORDS
        write(link, link.scratch, bytes(SPACE))
        write(link, link.words + 8 * 16, bytes(8 * WORDS))
        for kind, at, *arguments in steps:
            offset = link.words + 8 * (16 + at)
            match kind:
                case "read":
                    length = min(arguments[0], SPACE - at)
                    into = filled(length)
                    finish(link, *link.channel.read([Extent(link.scratch + at, length)], [into], soon()))
                    assert into == space[at : at + length]
                case "write":
                    data = arguments[0][: SPACE - at]
                    write(link, link.scratch + at, data)
                    space[at : at + len(data)] = data
                case "add":
                    operation = link.channel.fetch_add(offset, arguments[0], soon())
                    finish(link, operation)
                    assert operation.value == words[at]
                    words[at] = (words[at] + arguments[0]) % 2**64
                case "swap":
                    operation = link.channel.compare_swap(offset, arguments[0], arguments[1], soon())
                    finish(link, operation)
                    assert operation.value == words[at]
                    words[at] = arguments[1] if words[at] == arguments[0] else words[at]
        assert link.control.peek(link.scratch, SPACE) == space

    run()


# -- bounds and mistakes


def leaving_extents(link: Link) -> list[Extent]:
    end = link.channel.header.layout.region_bytes
    return [Extent(end - 1, 2), Extent(end, 1), Extent(end + 1, 0), Extent(2**40, 8), Extent(2**63, 8)]


def test_what_leaves_the_region_is_refused_and_the_channel_goes_on(link: Link) -> None:
    destinations = [filled(extent.length) for extent in leaving_extents(link)]
    reads = link.channel.read(leaving_extents(link), destinations, soon())
    writes = [link.channel.write(extent, bytes(extent.length), soon()) for extent in leaving_extents(link)]
    end = link.channel.header.layout.region_bytes
    words = [link.channel.fetch_add(end, 1, soon()), link.channel.compare_swap(2**48, 0, 1, soon())]
    link.transport.wait([*reads, *writes, *words])

    assert [type(each.error) for each in (*reads, *writes, *words)] == [Refused] * 12
    assert all(map(untouched, destinations))
    assert link.channel.broken is None
    operation, into = read(link, 0, 64)
    finish(link, operation)
    assert into == held(link, 0, 64)


def test_one_bad_extent_spares_the_rest_of_its_batch(link: Link) -> None:
    end = link.channel.header.layout.region_bytes
    extents = [Extent(link.slots, 64), Extent(end - 8, 64), Extent(link.slots + 64, 64)]
    into = [filled(64) for _ in extents]
    operations = link.channel.read(extents, into, soon())
    link.transport.wait(operations)

    assert [type(each.error) for each in operations] == [type(None), Refused, type(None)]
    assert into[0] == held(link, 0, 64) and untouched(into[1]) and into[2] == held(link, 64, 64)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda channel: channel.read([Extent(0, 8)], [], soon()),
        lambda channel: channel.read([Extent(0, 8)], [filled(7)], soon()),
        lambda channel: channel.read([Extent(-8, 8)], [filled(8)], soon()),
        lambda channel: channel.read([Extent(0, 8)], [memoryview(bytes(8))], soon()),
        lambda channel: channel.read([Extent(0, 8)], [filled(16)[::2]], soon()),
        lambda channel: channel.write(Extent(0, 8), bytes(9), soon()),
        lambda channel: channel.write(Extent(-1, 8), bytes(8), soon()),
        lambda channel: channel.fetch_add(4, 1, soon()),
        lambda channel: channel.fetch_add(-8, 1, soon()),
        lambda channel: channel.fetch_add(4096, 2**64, soon()),
        lambda channel: channel.fetch_add(4096, -1, soon()),
        lambda channel: channel.compare_swap(12, 0, 1, soon()),
        lambda channel: channel.compare_swap(4096, 0, 2**64, soon()),
        lambda channel: channel.compare_swap(4096, -1, 0, soon()),
    ],
    ids=[
        "fewer destinations", "shorter destination", "negative read", "read-only", "not contiguous",
        "longer data", "negative write", "unaligned word", "negative word", "large amount",
        "negative amount", "unaligned swap", "large desired", "negative expected",
    ],
)  # fmt: skip
def test_a_mistake_raises_and_posts_nothing(link: Link, mistake: Callable[[Channel], object]) -> None:
    before = link.control.peek(0, 8192)
    with pytest.raises(ValueError):  # noqa: PT011, each says it in its own words
        mistake(link.channel)

    assert link.control.peek(0, 8192) == before
    assert link.channel.broken is None
    finish(link, read(link, 0, 8)[0])


# -- deadlines


def test_what_begins_after_its_deadline_is_not_done(link: Link) -> None:
    write(link, link.scratch, bytes(64))
    offset = word(link, 9, 1)
    past = time.monotonic() - 1
    reading, into = read(link, 0, 4096, past)
    others = [
        link.channel.write(Extent(link.scratch, 64), b"x" * 64, past),
        link.channel.fetch_add(offset, 1, past),
        link.channel.compare_swap(offset, 1, 5, past),
    ]
    link.transport.wait([reading, *others])

    assert [type(each.error) for each in (reading, *others)] == [Unavailable] * 4
    assert untouched(into)
    assert link.control.peek(link.scratch, 64) == bytes(64)
    assert value_of(link, offset) == 1


@pytest.mark.slow
def test_a_paused_peer_costs_no_more_than_the_deadline(own_link: Link) -> None:
    finish(own_link, read(own_link, 0, 64)[0])
    own_link.peer.pause()
    begun = time.monotonic()
    length = 64 << 10  # a wire in software on a busy processor brings so much in that time
    reads = [read(own_link, MIB * number, length, begun + SHORT_S) for number in range(8)]
    own_link.transport.wait([operation for operation, _ in reads])
    took_s = time.monotonic() - begun

    assert all(operation.done for operation, _ in reads)
    assert took_s < SHORT_S + SLACK_S
    if own_link.world.traits.peer_answers:
        assert took_s >= SHORT_S, "an operation has all the time that it was given"
        assert {type(operation.error) for operation, _ in reads} == {Unavailable}
    else:
        assert {type(operation.error) for operation, _ in reads} == {type(None)}
        assert all(into == held(own_link, MIB * number, length) for number, (_, into) in enumerate(reads))


@pytest.mark.slow
@pytest.mark.parametrize("registered", [False, True])
def test_nothing_arrives_after_an_operation_is_done(own_link: Link, registered: bool) -> None:
    """The peer is stopped with megabytes under way; when it goes on, they come to nobody."""
    link = own_link
    memory = filled(16 * MIB)
    registration = link.transport.register(memory) if registered else None
    deadline = time.monotonic() + SHORT_S
    views = [memory[MIB * number : MIB * (number + 1)] for number in range(16)]
    operations = link.channel.read([Extent(link.slots, MIB)] * 16, views, deadline)
    link.peer.pause()
    link.transport.wait(operations)
    assert all(each.done for each in operations)
    then = bytes(memory)
    for view, operation in zip(views, operations, strict=True):
        assert operation.error is not None or view == held(link, 0, MIB)

    link.peer.resume()
    with link.world.link(link.peer) as fresh:
        operation, into = read(fresh, 0, 16 * MIB)
        finish(fresh, operation)
        assert into == held(fresh, 0, 16 * MIB)
    late = [read(link, 0, 64)[0]]  # whatever has arrived for the old channel is taken in by this
    link.transport.wait(late)

    assert memory == then
    if registration is not None:
        registration.close()


@pytest.mark.slow
def test_a_deadline_that_nobody_waits_for_is_kept_by_whoever_comes_next(own_link: Link) -> None:
    if not own_link.world.traits.peer_answers:
        pytest.skip("without its peer's processor an operation is never late here")
    own_link.peer.pause()
    forgotten, into = read(own_link, 0, 4096, time.monotonic() + 0.05)
    other, _ = read(own_link, 0, 4096, time.monotonic() + SHORT_S)
    own_link.transport.wait([other])

    assert forgotten.done
    assert isinstance(forgotten.error, Unavailable)
    assert untouched(into)


@pytest.mark.slow
def test_a_short_deadline_is_kept_while_another_thread_waits_for_longer(own_link: Link) -> None:
    """Whoever polls for all sees it, also if it was posted after the polling began."""
    if not own_link.world.traits.peer_answers:
        pytest.skip("without its peer's processor an operation is never late here")
    own_link.peer.pause()
    long, _ = read(own_link, 0, 4096, soon(6 * PATIENCE_S))
    waiter = threading.Thread(target=own_link.transport.wait, args=([long],), daemon=True)
    waiter.start()
    for _ in range(3):
        begun = time.monotonic()
        short, into = read(own_link, 0, 4096, begun + SHORT_S)
        own_link.transport.wait([short])
        assert isinstance(short.error, Unavailable)
        assert untouched(into)
        assert time.monotonic() - begun < SHORT_S + SLACK_S
        if own_link.channel.broken is not None:  # a wire may have to give up the channel for it
            break
    own_link.channel.close()
    waiter.join(PATIENCE_S)

    assert not waiter.is_alive()
    assert long.done


# -- the end of a channel


def dead(link: Link) -> None:
    """The channel is broken for good: everything that is posted fails at once."""
    assert link.channel.broken is not None
    offset = link.words
    begun = time.monotonic()
    reading, into = read(link, 0, 4096, begun + 6 * PATIENCE_S)
    rest = [
        link.channel.write(Extent(link.scratch, 8), bytes(8), begun + 6 * PATIENCE_S),
        link.channel.fetch_add(offset, 1, begun + 6 * PATIENCE_S),
        link.channel.compare_swap(offset, 0, 1, begun + 6 * PATIENCE_S),
    ]
    link.transport.wait([reading, *rest])

    assert time.monotonic() - begun < SLACK_S
    assert [type(each.error) for each in (reading, *rest)] == [Unavailable] * 4
    assert untouched(into)


@pytest.mark.slow
def test_a_peer_that_is_killed_ends_every_operation(own_link: Link) -> None:
    link = own_link
    deadline = soon()
    reads = [(number * 4096, *read(link, number * 4096, 65_536, deadline)) for number in range(1000)]
    link.peer.kill()
    link.transport.wait([operation for _, operation, _ in reads])

    assert time.monotonic() < deadline + SLACK_S
    assert all(operation.done for _, operation, _ in reads)
    assert {type(operation.error) for _, operation, _ in reads} <= {type(None), Unavailable}
    assert all(into == held(link, at, 65_536) for at, operation, into in reads if operation.error is None)
    after, into = read(link, 0, 64)
    link.transport.wait([after])
    if link.world.traits.death_shows:
        assert isinstance(after.error, Unavailable)
        dead(link)
    else:
        assert into == held(link, 0, 64), "the memory outlives its owner"


@pytest.mark.slow
def test_an_operation_on_its_way_to_a_killed_peer_does_not_wait_for_its_deadline(own_link: Link) -> None:
    if not own_link.world.traits.peer_answers:
        pytest.skip("without its peer's processor an operation is never under way for long here")
    own_link.peer.pause()
    begun = time.monotonic()
    operation, _ = read(own_link, 0, MIB, begun + 6 * PATIENCE_S)
    own_link.peer.kill()
    own_link.transport.wait([operation])

    assert isinstance(operation.error, Unavailable)
    assert time.monotonic() - begun < 2 * PATIENCE_S


@pytest.mark.slow
def test_a_restarted_peer_is_another_and_the_old_channel_stays_broken(own_link: Link) -> None:
    old = own_link
    offer, header = old.control.ask("meet")
    old.peer.kill()
    with old.world.peer(incarnation=32, instead_of=old.peer) as successor, old.world.link(successor) as fresh:
        assert fresh.channel.header.incarnation == 32
        operation, into = read(fresh, 0, MIB)
        finish(fresh, operation)
        assert into == held(fresh, 0, MIB) != expected(31, 0, MIB)

        late, _ = read(old, 0, 64)
        old.transport.wait([late])
        if old.world.traits.death_shows:
            dead(old)
        with pytest.raises((Unavailable, Refused, Corrupt)):
            # as by a client that has not noticed: what the old life offered is asked of the new one
            old.transport.connect(offer, RegionHeader.unpack(header), fresh.control.open, soon())
        finish(fresh, read(fresh, 0, 64)[0])


def test_a_closed_channel_fails_everything(link: Link) -> None:
    reads = [read(link, MIB * number, MIB) for number in range(8)]
    link.channel.close()
    link.channel.close()
    link.transport.wait([operation for operation, _ in reads])

    for number, (operation, into) in enumerate(reads):
        assert operation.done
        assert isinstance(operation.error, Unavailable) or into == held(link, MIB * number, MIB)
    dead(link)


@pytest.mark.slow
def test_closing_ends_what_others_wait_for(own_link: Link) -> None:
    """A thread waits for a peer that does not answer; another one closes the channel."""
    own_link.peer.pause()
    operation, _ = read(own_link, 0, MIB, soon(6 * PATIENCE_S))
    waiter = threading.Thread(target=own_link.transport.wait, args=([operation],), daemon=True)
    begun = time.monotonic()
    waiter.start()
    own_link.channel.close()
    waiter.join(3 * PATIENCE_S)

    assert not waiter.is_alive()
    assert operation.done
    assert time.monotonic() - begun < 3 * PATIENCE_S


def test_a_closed_transport_takes_its_channels_with_it(link: Link) -> None:
    operation, _ = read(link, 0, MIB)
    link.transport.close()
    link.transport.close()

    assert operation.done
    dead(link)
    with pytest.raises(ValueError, match="closed"):
        link.control.connect(link.transport)
    with pytest.raises(ValueError, match="closed"):
        link.transport.register(memoryview(bytearray(4096)))


def test_a_holder_that_is_shut_out_writes_no_more(own_link: Link) -> None:
    link = own_link
    if not link.world.traits.revocable:
        pytest.skip("who maps memory keeps it: its writers pin what they write to")
    holder = link.control.ask("who")
    other = link.peer.control()
    writes = [
        link.channel.write(Extent(link.scratch + MIB * number, MIB), b"x" * MIB, soon(1.0))
        for number in range(16)
    ]
    other.ask("revoke", holder)
    other.ask("poke", link.scratch + 16 * MIB - 4096, b"y" * 4096)  # it was the holder's; now another's
    link.transport.wait(writes)
    late = link.channel.write(Extent(link.scratch + 16 * MIB - 4096, 4096), b"z" * 4096, soon(SHORT_S))
    link.transport.wait([late])

    assert isinstance(late.error, Unavailable | Refused)
    assert all(each.done for each in writes)
    assert other.peek(link.scratch + 16 * MIB - 4096, 4096) == b"y" * 4096
    with link.world.link(link.peer) as fresh:  # nobody else has noticed
        finish(fresh, read(fresh, 0, MIB)[0])
    other.ask("revoke", holder)


def test_the_end_of_the_control_connection_is_the_end_of_the_channel(own_link: Link) -> None:
    link = own_link
    if not link.world.traits.revocable:
        pytest.skip("who maps memory keeps it")
    finish(link, read(link, 0, 64)[0])
    link.control.close()

    def ended() -> bool:
        operation, _ = read(link, 0, 64)
        link.transport.wait([operation])
        return operation.error is not None

    until(ended)
    dead(link)


def test_a_provider_that_is_closed_ends_its_channels(own_link: Link) -> None:
    if not own_link.world.traits.revocable:
        pytest.skip("who maps memory keeps it")
    finish(own_link, read(own_link, 0, 64)[0])
    own_link.control.ask("shut")
    own_link.control.ask("shut")
    operation, _ = read(own_link, 0, 64)  # the wire says so, long before its deadline
    own_link.transport.wait([operation])

    assert isinstance(operation.error, Unavailable)
    dead(own_link)


# -- meeting


@pytest.mark.parametrize("offer", [b"", b"\x00", b"no offer of anybody's", bytes(64)], ids=len)
def test_an_offer_that_is_none_is_an_error_of_the_peer(link: Link, offer: bytes) -> None:
    with pytest.raises((Corrupt, Refused, Unavailable)):
        link.transport.connect(offer, link.channel.header, link.control.open, soon())
    finish(link, read(link, 0, 64)[0])


def test_what_the_peer_refuses_is_raised(link: Link) -> None:
    """Where a transport asks at all."""
    offer, header = link.control.ask("meet")
    asked = []

    def refuse(proposal: bytes) -> bytes:
        asked.append(proposal)
        raise Refused("not today")

    if link.world.traits.asks:
        with pytest.raises(Refused, match="not today"):
            link.transport.connect(offer, RegionHeader.unpack(header), refuse, soon())
        assert asked
    else:
        link.transport.connect(offer, RegionHeader.unpack(header), refuse, soon()).close()
        assert not asked


def test_an_answer_that_is_none_is_an_error_of_the_peer(link: Link) -> None:
    offer, header = link.control.ask("meet")
    if not link.world.traits.asks:
        pytest.skip("nothing is asked")
    for answer in (b"", b"\x00", bytes(16), b"\xff" * 300):
        with pytest.raises((Corrupt, Refused, Unavailable)):
            link.transport.connect(offer, RegionHeader.unpack(header), partial(_answering, answer), soon())
    finish(link, read(link, 0, 64)[0])


def _answering(answer: bytes, _proposal: bytes) -> bytes:
    return answer


def test_a_proposal_that_is_none_opens_nothing(link: Link) -> None:
    for proposal in (b"", b"\x00", b"no proposal of anybody's", bytes(64), b"\xff" * 300):
        with pytest.raises((Corrupt, Refused, Unavailable)):
            link.control.open(proposal)
    finish(link, read(link, 0, 64)[0])


# -- many at once, and nothing left


@pytest.mark.slow
def test_many_threads_wait_at_once(link: Link) -> None:
    def work(number: int) -> None:
        pick = random.Random(number)
        for _ in range(25):
            places = [(pick.randrange(16 * MIB), pick.choice((64, 4096, 65_536))) for _ in range(8)]
            reads = [(place, *read(link, *place)) for place in places]
            finish(link, *(operation for _, operation, _ in reads))
            assert all(into == held(link, *place) for place, _, into in reads)

    in_threads(8, work)


@pytest.mark.slow
def test_many_channels_share_one_transport(link: Link) -> None:
    """Of one process to one peer, used by a thread each; closing one leaves the others alone."""
    channels = [link.peer.control().connect(link.transport) for _ in range(6)]

    def work(number: int) -> None:
        for step in range(20):
            into = filled(4096)
            [operation] = channels[number].read([Extent(link.slots + step, 4096)], [into], soon())
            link.transport.wait([operation])
            assert operation.error is None and into == held(link, step, 4096)
        channels[number].close()

    in_threads(6, work)
    finish(link, read(link, 0, 64)[0])


@pytest.mark.slow
def test_channels_leave_no_descriptor_and_no_thread_on_either_side(link: Link) -> None:
    def use() -> None:
        with link.world.link(link.peer) as each:
            finish(each, read(each, 0, MIB)[0])
            write(each, each.scratch, bytes(4096))
        gc.collect()

    def facts() -> list[int]:
        here = [len(os.listdir("/proc/self/fd")), threading.active_count()]
        return [*here, *link.control.ask("facts")]

    use()  # what is made once and kept
    use()
    before = facts()
    for _ in range(10):
        use()

    until(lambda: all(now <= then for now, then in zip(facts(), before, strict=True)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_and_harms_nobody(link: Link) -> None:
    if not link.world.traits.forks:
        pytest.skip("CUDA does not work in the child of a process that has used it")
    finish(link, read(link, 0, MIB)[0])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with link.world.link(link.peer) as own:
                operation, into = read(own, 5, MIB)
                own.transport.wait([operation])
                status = 0 if operation.error is None and into == held(own, 5, MIB) else 2
        finally:
            os._exit(status)
    statuses: list[int] = []
    try:
        operation, into = read(link, 7, MIB)
        finish(link, operation)
        assert into == held(link, 7, MIB)

        def ended() -> bool:
            process, status = os.waitpid(child, os.WNOHANG)
            statuses.extend([status] if process else [])
            return bool(process)

        until(ended)
    finally:
        if not statuses:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert statuses == [0]
    operation, into = read(link, 9, MIB)
    finish(link, operation)
    assert into == held(link, 9, MIB)
