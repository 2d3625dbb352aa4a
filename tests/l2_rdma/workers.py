"""Processes for the torn-read tests: ``python -m tests.l2_rdma.workers owner|reader ...``.

The owner puts blocks into a region far too small for them, as fast as it can, so slots are reused all the
time.  Readers read as fast as they can, keep some views for a while, and compare every byte with what the key
stands for.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys
import time
from pathlib import Path

from kvcomm.block import HEADER_BYTES, BlockHeader
from kvcomm.errors import Corrupt
from l2_rdma.hazards import HazardTable
from l2_rdma.index import IndexReader
from l2_rdma.pins import PinTable
from l2_rdma.reader import Reader, Verification
from l2_rdma.region import Region
from tests.l2_rdma.conftest import SharedPool
from tests.l2_rdma.regions import TENANT, header_of, key_of, payload_of

KEYS = 24
PAYLOAD_BYTES = 4096 - HEADER_BYTES
PIN_SLOTS = 4
VIEWS_HELD_MAX = 2


class NoVerification(Verification):
    """Takes the index entry at its word, and whatever lies there for the block."""

    def current(self, word, generation):
        return True

    def header(self, copy, key):
        try:
            return BlockHeader.unpack(copy)
        except Corrupt:
            return header_of(0, bytes(copy[HEADER_BYTES:]))

    def payload(self, header, copy):
        return True


class SlowIndex(IndexReader):
    """Gives the processor away between the index and the slot, so that the slot is often reused in
    between."""

    probes = 0

    def probe(self, key):
        hint = super().probe(key)
        self.probes += 1
        if self.probes % 8 == 0:
            os.sched_yield()
        return hint


def expected_payloads() -> list[bytes]:
    return [payload_of(number, PAYLOAD_BYTES) for number in range(KEYS)]


def own(directory: Path, readers: int, ignore_pins: bool) -> None:
    """Until standard input ends."""
    if ignore_pins:
        HazardTable.pinned = lambda self: frozenset()  # type: ignore[method-assign]
    pool = SharedPool(directory, slab_count=2, slab_bytes=16 << 10, pin_slots=PIN_SLOTS, hazard_count=64)
    ranges = [pool.owner.open_pins(holder, PIN_SLOTS)[:2] for holder in range(readers)]
    say(path=str(pool.region.path), ranges=ranges)
    payloads, pick, puts = expected_payloads(), random.Random(1), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for _ in range(64):
            number = pick.randrange(KEYS)
            puts += pool.put(number, payloads[number]) == "published"
        pool.owner.tick(time.monotonic())
    pool.owner.check()
    say(puts=puts, evicted=pool.owner.usage().evicted_count)
    pool.region.close()


def read(path: str, first: int, count: int, reads: int, seconds: float, verify: bool) -> None:
    """``reads`` reads, or until the first wrong byte, or for so many ``seconds``."""
    region = Region.attach(path, TENANT)
    reader = Reader(region, PinTable(region, first, count), verify=None if verify else NoVerification())
    reader._index = SlowIndex(region.memory, region.header.layout)
    payloads, pick = expected_payloads(), random.Random(first)
    held: list[tuple[int, memoryview]] = []
    done = wrong = 0
    end = time.monotonic() + seconds
    while done < reads and (done % 64 or time.monotonic() < end) and not wrong:
        number = pick.randrange(KEYS)
        block = reader.view(key_of(number))
        done += 1
        if block is not None:
            wrong += block.payload != payloads[number]
            held.append((number, block.payload))
        if len(held) > VIEWS_HELD_MAX:
            number, payload = held.pop(0)
            wrong += payload != payloads[number]
    counters = reader.counters
    say(
        reads=done,
        wrong=wrong,
        hits=counters.hits,
        corrupt=counters.corrupt,
        retries=counters.retries,
    )


def say(**facts) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "owner":
        own(Path(arguments[0]), int(arguments[1]), arguments[2] == "ignore-pins")
    else:
        region_path, first_word, word_count, read_count, limit_s, mode = arguments
        read(region_path, int(first_word), int(word_count), int(read_count), float(limit_s), mode == "verify")
