"""A pool without a cluster: its blocks can be read, and nothing is left of it."""

from __future__ import annotations

import os
import time

import pytest

from bench.channels import channel, mapped
from bench.pool import Made, identity, pools
from kvcomm.rpc import Connection


def test_made_blocks_differ_by_number_and_by_payload():
    made = Made(2, 64)
    [first, second], [third, _] = made.copies(range(2)), made.copies([7, 8])
    assert len({first.key, second.key, third.key}) == 3
    assert bytes(first.payload) == bytes(third.payload) != bytes(second.payload)
    assert Made(2, 64).copies(range(2))[1].key == second.key


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_pool_was_filled_with_is_read_over_a_channel():
    with pools(1) as [pool], mapped(pool) as region, channel(pool, "shm") as reads:
        assert not isinstance(reads, str), reads
        for size in (64, 4096, 1 << 20):
            extents = region.payloads(pool.fill(2, size))
            assert [extent.length for extent in extents] == [size, size]
            into = [memoryview(bytearray(size)) for _ in extents]
            reads.transport.wait(reads.channel.read(extents, into, time.monotonic() + 10))
            assert [bytes(view) for view in into] == [
                bytes(copy.payload) for copy in Made(2, size).copies(range(2))
            ]
            assert len(reads.of("read", extents, 3).times(4)) == 4
            assert len(region.views("view", pool.fill(2, size)).times(4)) == 4


@pytest.mark.slow
@pytest.mark.processes
def test_pools_count_their_processors_time_and_end():
    with pools(2) as both:
        assert len({pool.address for pool in both}) == 2
        before = both[0].processor_seconds()
        assert before > 0
        for _ in range(3):
            Connection.open(both[0].address, identity(), time.monotonic() + 10).close()
        assert both[0].processor_seconds() > before
        pids = [pool.pid for pool in both]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.processes
def test_a_transport_that_is_not_offered_has_a_reason():
    with pools(1) as [pool], channel(pool, "tcp") as reads:
        assert "does not offer tcp" in str(reads)
