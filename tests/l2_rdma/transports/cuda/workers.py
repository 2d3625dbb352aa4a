"""Processes for the tests of GPU pools: ``python -m tests.l2_rdma.transports.cuda.workers pool|write|read
...``.

A GPU is named ``host`` (plain shared memory in the directory), ``cuda:0``, ``cuda:1``, ...  The pool is far
too small for its blocks, so slots are reused under the readers all the time, who compare every byte with
what the key stands for.
"""

from __future__ import annotations

import asyncio
import json
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kvcomm.block import GENERATION_OFFSET, verify_copy
from kvcomm.errors import Corrupt, KVCommError
from l2_rdma.copying import address_of
from l2_rdma.layout import WORD_BYTES
from l2_rdma.pool import RunningPool
from l2_rdma.transports.cuda.attached import AttachedPool
from l2_rdma.transports.cuda.gpu import DeviceBuffer, Gpu
from l2_rdma.transports.cuda.runtime import open_gpu
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.port import Extent
from tests.l2_rdma.pools import run_pool_at
from tests.l2_rdma.regions import header_of, key_of, payload_of
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu
from tests.peers import CREDENTIALS, IDENTITY, soon

KEYS = 24
PAYLOAD_BYTES = 4096 - 256
VIEWS_HELD_MAX = 2
TENANT_DIGEST = CREDENTIALS.tenant_digest("acme")
POOL = {"region_bytes": 1 << 20, "slab_bytes": 16 << 10, "index_entries": 256, "hazard_count": 256}
"""Some 240 slots; ``small`` leaves 8."""


def gpu_named(name: str, directory: Path) -> Gpu:
    return HostGpu(directory) if name == "host" else open_gpu(int(name.removeprefix("cuda:")))


def attach(address: str, name: str, directory: Path, pin_slots: int = 16) -> AttachedPool:
    return AttachedPool.attach(
        address, IDENTITY, CudaTransport(gpu_named(name, directory)), soon(), pin_slots=pin_slots
    )


def expected(number: int) -> bytes:
    return payload_of(number, PAYLOAD_BYTES)


def header(number: int):
    return header_of(number, expected(number), tenant=TENANT_DIGEST)


class Mirror:
    """Host and device buffers of one payload, and copies between them."""

    def __init__(self, gpu: Gpu, nbytes: int = PAYLOAD_BYTES) -> None:
        self.device = DeviceBuffer(gpu.allocate(nbytes), nbytes)
        self.host = memoryview(bytearray(nbytes))
        self._stream = gpu.stream()

    def up(self, data: bytes) -> DeviceBuffer:
        self._stream.copy(self.device.pointer, address_of(memoryview(data)), len(data))
        self._stream.wait()
        return self.device

    def down(self, buffer: DeviceBuffer | None = None) -> memoryview:
        source = buffer or self.device
        self._stream.copy(address_of(self.host), source.pointer, source.nbytes)
        self._stream.wait()
        return self.host


async def pool(directory: Path, name: str, size: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def ready(running: RunningPool) -> None:
        say(address=running.addresses[0], refused=dict(running.refused_transports))

    options: dict[str, Any] = dict(POOL)
    if size == "small":
        options["region_bytes"] = 64 << 10
    elif size != "usual":
        options |= {"region_bytes": int(size), "slab_bytes": 64 << 20, "reservation_ttl_s": 60.0}
    gpu = gpu_named(name, directory)
    await run_pool_at(directory, ready, stop, 21, transports=("cuda", "shm"), gpu=gpu, **options)


def write(address: str, name: str, directory: Path) -> None:
    """All keys once, then any until standard input ends."""
    attached = attach(address, name, directory)
    mirror = Mirror(attached.channel.region.gpu)
    pick, stored = random.Random(1), 0
    numbers = list(range(KEYS))
    while len(numbers) == KEYS or not select.select([sys.stdin], [], [], 0)[0]:
        for number in numbers:
            status = attached.put([(header(number), mirror.up(expected(number)))], soon())[0]
            assert status in ("stored", "present", "full", "pending", "expired"), status
            stored += status == "stored"
        if len(numbers) == KEYS:
            say(begun=True)
        numbers = [pick.randrange(KEYS) for _ in range(16)]
    say(stored=stored)
    attached.close()


def read(address: str, name: str, directory: Path, wanted: int, seconds: float, mode: str) -> None:
    """Until so many hits, for so many ``seconds``, until the first wrong byte, or the end of the pool."""
    attached = attach(address, name, directory, 0 if mode == "copy" else 8)
    reader, pick = attached.reader, random.Random(len(mode))
    mirror = Mirror(attached.channel.region.gpu)
    held: list[tuple[int, DeviceBuffer]] = []
    done = wrong = hits = 0
    said_held = False
    end = time.monotonic() + seconds
    say(ready=True)
    while hits < wanted and not wrong and time.monotonic() < end and attached.alive():
        number = pick.randrange(KEYS)
        done += 1
        if mode in ("remote", "trust"):
            copy = remote_copy(attached, number, verify=mode == "remote")
            hits += copy is not None
            wrong += copy is not None and bytes(copy[256:]) != expected(number)
            continue
        if mode == "copy" or done % 2:
            [found] = reader.fetch([key_of(number)], [mirror.device], soon())
            hits += found is not None
            wrong += found is not None and bytes(mirror.down()) != expected(number)
            continue
        [block] = reader.view([key_of(number)])
        if block is not None:
            hits += 1
            wrong += bytes(mirror.down(block.payload)) != expected(number)
            held.append((number, block.payload))
            if not said_held:
                said_held = True
                say(held=True)
        if len(held) > VIEWS_HELD_MAX:
            number, payload = held.pop(0)
            wrong += bytes(mirror.down(payload)) != expected(number)
    alive = attached.alive()
    for number, payload in held:  # a view outlives its pool
        wrong += bytes(mirror.down(payload)) != expected(number)
    kept = len(held)
    del held
    counters = reader.counters
    say(
        reads=done, hits=hits, wrong=wrong, corrupt=counters.corrupt, retries=counters.retries, alive=alive,
        verified=counters.payloads_verified, unpinned=counters.unpinned_copies, kept=kept,
    )  # fmt: skip
    attached.close()


def remote_copy(attached: AttachedPool, number: int, *, verify: bool) -> memoryview | None:
    """One slot as any remote client reads it: whole, then the generation word again, then verified."""
    hint = attached.reader._index.probe(key_of(number))
    if hint is None:
        return None
    copy = memoryview(bytearray(hint.copy_bytes))
    word = memoryview(bytearray(WORD_BYTES))
    channel = attached.channel
    [first] = channel.read([Extent(hint.offset, hint.copy_bytes)], [copy], soon())
    while not first.done:
        channel.progress()
    [second] = channel.read([Extent(hint.offset + GENERATION_OFFSET, WORD_BYTES)], [word], soon())
    while not second.done:
        channel.progress()
    if not verify:
        return copy
    if first.error or second.error or int.from_bytes(word, "little") != hint.generation:
        return None
    try:
        verify_copy(copy, key_of(number))
    except Corrupt:
        return None
    return copy


def say(**facts) -> None:
    """One line for the test."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(role: str, *arguments: str) -> None:
    if role == "pool":
        asyncio.run(pool(Path(arguments[0]), arguments[1], arguments[2]))
    elif role == "write":
        write(arguments[0], arguments[1], Path(arguments[2]))
    else:
        address, name, directory, wanted, seconds, mode = arguments
        read(address, name, Path(directory), int(wanted), float(seconds), mode)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KVCommError as error:
        say(failed=f"{error.code}: {error.message}")
        raise
