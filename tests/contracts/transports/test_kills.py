"""Pools and writers that are killed or stopped in the middle, over every transport.

No wrong byte, no wait past the deadline, and what they held comes back.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvcomm.block import HEADER_BYTES
from kvcomm.errors import KVCommError, Unavailable
from l2_rdma.layout import plan_layout
from l2_rdma.transports.port import Extent
from tests.contracts.transports.riders import COPY_BYTES, Came, Rider, payload, rider, rider_process
from tests.contracts.transports.worlds import World, served_as
from tests.l2_rdma.pools import PoolProcess, pool_process
from tests.peers import PATIENCE_S, soon, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

SLOTS = 8
_SLABS: dict[str, int] = {"slab_bytes": SLOTS // 2 * COPY_BYTES, "index_entries": 256, "hazard_count": 64}
SMALL = _SLABS | {"region_bytes": plan_layout(8 << 20, **_SLABS).slots_offset + SLOTS * COPY_BYTES}
"""A pool with room for so many blocks."""
BLOCKS = 48
READS = 1_000
LARGE = _SLABS | {"region_bytes": 24 << 20}
"""A pool with room for these blocks."""
DEADLINE_S = 8.0
PATIENT_S = 60.0
"""Where all of it is to come, on a machine under load."""
TTL_S = 1.0
"""Of reservations, where they are to run out; a put under load takes less."""
SLACK_S = PATIENCE_S


@pytest.fixture
def directory(world: World) -> Path:
    """Its path has to be short enough for a socket's."""
    return Path(tempfile.mkdtemp(dir=world.directory))


@pytest.fixture
def start(world: World, directory: Path) -> Iterator[Callable[..., PoolProcess]]:
    """Starts a pool; the next one takes the place of the one before."""
    with ExitStack() as stack:

        def make(**options: Any) -> PoolProcess:
            if served_as(world.name) == "cuda":
                options["gpu"] = world.name
            pool = stack.enter_context(pool_process(directory, transports=[served_as(world.name)], **options))
            assert pool.refused == {}
            return pool

        yield make


def idle(pool: PoolProcess) -> bool:
    """Nothing is reserved and nothing pinned."""
    usage = pool.usage()
    return not usage["reserved_bytes"] and not usage["pinned_bytes"]


# -- the pool


def test_a_pool_killed_in_the_middle_of_a_thousand_reads(world: World, start: Any) -> None:
    pool = start(incarnation=51, **LARGE)
    with rider(pool.address, world.name) as reading:
        assert reading.put(range(BLOCKS)) == ["published"] * BLOCKS
        left = [20]

        def kill() -> None:
            left[0] -= 1
            if not left[0]:
                pool.signal(signal.SIGKILL)

        begun = time.monotonic()
        numbers = [number % BLOCKS for number in range(READS)]
        counts = reading.get(numbers, begun + DEADLINE_S, kill)

        assert time.monotonic() - begun < DEADLINE_S + SLACK_S
        assert counts.wrong == 0
        assert counts.hits >= 20
        counters = reading.reader.counters
        assert counters.hits + counters.misses == READS
        if world.traits.death_shows:
            assert counters.unavailable > 0
            begun = time.monotonic()
            assert reading.get(range(BLOCKS)).hits == 0
            assert time.monotonic() - begun < SLACK_S, "a broken channel costs nothing"

        successor = start(incarnation=52, **LARGE)
        with rider(successor.address, world.name) as fresh:
            assert fresh.channel.header.incarnation == 52
            assert fresh.get(range(BLOCKS)) == Came(0)
            assert fresh.put(range(BLOCKS)) == ["published"] * BLOCKS
            assert fresh.get(range(BLOCKS)) == Came(BLOCKS)
        until(lambda: idle(successor))


def test_a_pool_stopped_in_the_middle_of_a_thousand_reads(world: World, start: Any) -> None:
    pool = start(**LARGE)
    with rider(pool.address, world.name) as reading:
        assert reading.put(range(BLOCKS)) == ["published"] * BLOCKS
        left = [20]

        def stop() -> None:
            left[0] -= 1
            if not left[0]:
                pool.signal(signal.SIGSTOP)

        given_s = DEADLINE_S if world.traits.peer_answers else PATIENT_S
        begun = time.monotonic()
        numbers = [number % BLOCKS for number in range(READS)]
        counts = reading.get(numbers, begun + given_s, stop)

        assert time.monotonic() - begun < given_s + SLACK_S
        assert counts.wrong == 0
        assert counts.hits >= 20
        assert reading.reader.counters.hits + reading.reader.counters.misses == READS
        if not world.traits.peer_answers:
            assert counts.hits == READS, "nobody needs the pool's processor"
        pool.signal(signal.SIGCONT)
        with rider(pool.address, world.name) as fresh:
            assert fresh.get(range(BLOCKS)) == Came(BLOCKS)
        until(lambda: idle(pool))


def test_a_pool_killed_in_the_middle_of_writes(world: World, start: Any) -> None:
    pool = start(incarnation=51, **SMALL)
    with rider(pool.address, world.name) as writing:
        grants = writing.reserve(range(SLOTS))
        pool.signal(signal.SIGSTOP)
        writes = [write for number, grant in enumerate(grants) for write in writing.write(grant, number)]
        pool.signal(signal.SIGKILL)
        begun = time.monotonic()
        writing.transport.wait(writes)

        assert all(write.done for write in writes)
        assert time.monotonic() - begun < PATIENCE_S + SLACK_S
        assert {type(write.error) for write in writes} <= {type(None), Unavailable}
        with pytest.raises(KVCommError):
            writing.publish(grants)


# -- readers


def test_a_reader_that_is_killed_leaves_nothing_in_the_pool(world: World, start: Any) -> None:
    pool = start(**LARGE)
    with rider(pool.address, world.name) as writing:
        assert writing.put(range(BLOCKS)) == ["published"] * BLOCKS
        process = psutil.Process(pool.pid)
        with rider_process("reading", pool.address, world.name, *range(4)):
            pass  # what is made once and kept
        until(lambda: idle(pool))
        descriptors, threads = process.num_fds(), process.num_threads()
        with rider_process("reading", pool.address, world.name, *range(BLOCKS)) as reader:
            reader.kill()

        until(lambda: idle(pool))
        until(lambda: process.num_fds() <= descriptors and process.num_threads() <= threads)
        assert writing.get(range(BLOCKS)) == Came(BLOCKS)


def test_a_reader_that_is_stopped_costs_the_others_nothing(world: World, start: Any) -> None:
    """Whatever it has asked for and does not take waits for it alone."""
    pool = start(**LARGE)
    with rider(pool.address, world.name) as other:
        assert other.put(range(BLOCKS)) == ["published"] * BLOCKS
        with rider_process("reading", pool.address, world.name, *range(BLOCKS)) as reader:
            reader.send_signal(signal.SIGSTOP)
            for _ in range(5):
                assert other.get(range(BLOCKS)) == Came(BLOCKS)
            fresh = range(100, 108)
            assert other.put(fresh) == ["published"] * len(fresh)
            assert other.get(fresh) == Came(len(fresh))
            assert pool.usage()["reserved_bytes"] == 0
    until(lambda: idle(pool))


# -- writers


def test_a_writer_killed_between_reserve_and_publish_leaves_its_keys_writable(
    world: World, start: Any
) -> None:
    """At once, not when its reservation would have run out."""
    pool = start(reservation_ttl_s=600.0, **SMALL)
    with rider(pool.address, world.name) as other:
        with rider_process("half", pool.address, world.name, *range(SLOTS)) as writer:
            assert {grant.status for grant in other.reserve(range(SLOTS))} == {"pending"}
            assert pool.usage()["reserved_bytes"] == SLOTS * COPY_BYTES
            writer.kill()
            until(lambda: pool.usage()["reserved_bytes"] == 0)

        assert other.get(range(SLOTS)).hits == 0
        assert other.put(range(SLOTS)) == ["published"] * SLOTS
        assert other.get(range(SLOTS)) == Came(SLOTS)
    until(lambda: idle(pool))


def test_a_writer_that_is_stopped_loses_its_reservation_and_learns_so(world: World, start: Any) -> None:
    pool = start(reservation_ttl_s=TTL_S, **SMALL)
    with (
        rider(pool.address, world.name) as other,
        rider_process("half", pool.address, world.name, *range(SLOTS)) as writer,
    ):
        writer.send_signal(signal.SIGSTOP)
        put_all(other, range(SLOTS))
        writer.send_signal(signal.SIGCONT)

        assert told(writer)["statuses"] == ["expired"] * SLOTS
        assert other.get(range(SLOTS)) == Came(SLOTS)
        until(lambda: idle(pool))


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_late_bytes_never_land_in_somebody_elses_slot(world: World, start: Any, paused: bool) -> None:
    """A writer writes to its extents without end, or is stopped while it does; their time runs out, and they
    are given to another."""
    if not world.traits.revocable:
        pytest.skip("who maps memory pins what it writes to: tests/l2_rdma/test_owner.py")
    pool = start(reservation_ttl_s=TTL_S, **SMALL)
    mine = range(100, 100 + SLOTS)
    with (
        rider(pool.address, world.name) as other,
        rider_process("endless", pool.address, world.name, *range(SLOTS)) as writer,
    ):
        if paused:
            writer.send_signal(signal.SIGSTOP)
        put_all(other, mine)
        if paused:
            writer.send_signal(signal.SIGCONT)

        assert told(writer, "")["error"] == "unavailable", "the writer was shut out"
        assert [copy[HEADER_BYTES:] for copy in other.copies(mine)] == [payload(number) for number in mine]
        assert other.get(mine) == Came(SLOTS)
        assert other.channel.broken is None, "nobody else was shut out"
        until(lambda: idle(pool))


def test_the_test_sees_late_bytes_when_nobody_is_shut_out(world: World, start: Any) -> None:
    if not world.traits.revocable:
        pytest.skip("who maps memory pins what it writes to: tests/l2_rdma/test_owner.py")
    pool = start(reservation_ttl_s=TTL_S, unfenced=True, **SMALL)
    mine = range(100, 100 + SLOTS)
    with (
        rider(pool.address, world.name) as other,
        rider_process("endless", pool.address, world.name, *range(SLOTS)),
    ):
        put_all(other, mine)

        until(
            lambda: any(
                copy[HEADER_BYTES:] != payload(number)
                for copy, number in zip(other.copies(mine), mine, strict=True)
            )
        )


def test_a_writer_that_gives_up_is_shut_out_before_its_slot_goes_to_another(world: World, start: Any) -> None:
    """It aborts while its bytes are still on their way."""
    if not world.traits.revocable:
        pytest.skip("who maps memory pins what it writes to: tests/l2_rdma/test_owner.py")
    pool = start(**SMALL)
    mine = range(100, 100 + SLOTS)
    with rider(pool.address, world.name) as other, rider(pool.address, world.name) as writer:
        grants = writer.reserve(range(SLOTS))
        writes = [write for number, grant in enumerate(grants) for write in writer.write(grant, number)]
        writer.abort(grants)
        put_all(other, mine)
        writer.transport.wait(writes)

        assert all(write.done for write in writes)
        assert [copy[HEADER_BYTES:] for copy in other.copies(mine)] == [payload(number) for number in mine]
        assert other.get(mine) == Came(SLOTS)
    until(lambda: idle(pool))


def test_a_writer_that_was_shut_out_may_come_back(world: World, start: Any) -> None:
    """Over the same control connection: with a new channel it is watched as before."""
    if not world.traits.revocable:
        pytest.skip("who maps memory pins what it writes to: tests/l2_rdma/test_owner.py")
    pool = start(reservation_ttl_s=TTL_S, **SMALL)
    with rider(pool.address, world.name) as writer:
        for _ in range(2):
            assert {grant.status for grant in writer.reserve(range(SLOTS))} == {"granted"}
            until(lambda: shut_out(writer))
            writer.open_channel()
        put_all(writer, range(SLOTS))
        assert writer.get(range(SLOTS)) == Came(SLOTS)
    until(lambda: idle(pool))


def shut_out(client: Rider) -> bool:
    """Looks by reading: who does nothing learns nothing."""
    [operation] = client.channel.read([Extent(0, 8)], [memoryview(bytearray(8))], soon(1.0))
    client.transport.wait([operation])
    return client.channel.broken is not None


def put_all(client: Rider, numbers: range) -> None:
    """As soon as there is room for all of them."""
    deadline = soon()
    lacking = list(numbers)
    while lacking:
        assert time.monotonic() < deadline, "the slots do not come back"
        statuses = client.put(lacking)
        lacking = [
            number
            for number, status in zip(lacking, statuses, strict=True)
            if status not in ("published", "present")
        ]


def told(writer: subprocess.Popen[str], line: str = "publish\n") -> dict[str, Any]:
    """What it says when it has been told ``line``."""
    assert writer.stdin is not None and writer.stdout is not None
    writer.stdin.write(line)
    writer.stdin.flush()
    heard: dict[str, Any] = json.loads(writer.stdout.readline())
    return heard
