"""What the curves are drawn of: every peer and every transport of ours, as a ``Source``.

Each is a context manager that yields the source, or the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bench.channels import Mapped, Reads, channel, mapped
from bench.peers.bare_verbs import BARE_READ, BareVerbs, bare_verbs
from bench.peers.memory import MEMCPY, Buffers, memcpy, memcpy_run
from bench.peers.mooncake_store import MooncakeStore, mooncake
from bench.peers.raw_socket import Family, RawSocket, raw_socket
from bench.peers.redis_server import RedisServer, redis_server
from bench.pool import REGION_BYTES, Pool, pools
from bench.timing import Operation
from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import WireOptions

OURS = "KVCOMM "
VIEW = f"{OURS}shm view, no copy"


@dataclass(frozen=True, slots=True)
class Way:
    """The two operations of a curve at one size."""

    name: str
    one: Operation
    run: Operation | None = None


class Source(Protocol):
    """Something that brings bytes of any size; made once, asked for each size in turn."""

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        """Its curves at this size; ``run`` has ``items`` reads under way."""
        ...


Open = Callable[[int, Sequence[int]], AbstractContextManager[Source | str]]
"""Args: the working set, all sizes that will be asked for."""


@dataclass(slots=True)
class _Memory:
    working_set: int

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        run = memcpy_run(self.working_set, size_bytes, items)
        return [Way(MEMCPY, memcpy(self.working_set, size_bytes), run)]


@contextmanager
def _memory(working_set: int, sizes: Sequence[int]) -> Iterator[Source]:
    yield _Memory(working_set)


@dataclass(slots=True)
class _RawSocket:
    raw: dict[int, RawSocket]

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        raw = self.raw[size_bytes]
        return [Way(raw.name, raw.one, raw.stream(items))]


@contextmanager
def _socket(family: Family, working_set: int, sizes: Sequence[int]) -> Iterator[Source]:
    with raw_socket(working_set, max(sizes), family) as raw:
        yield _RawSocket({size: raw.sized(size) for size in sizes})


@dataclass(slots=True)
class _Redis:
    server: RedisServer
    working_set: int

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        gets = self.server.gets(Buffers(self.working_set, size_bytes).all)
        runs = self.server.runs(self.working_set, items)
        return [Way(get.name, get, run) for get, run in zip(gets, runs, strict=True)]


@contextmanager
def _redis(working_set: int, sizes: Sequence[int]) -> Iterator[Source | str]:
    with redis_server() as server:
        yield server if isinstance(server, str) else _Redis(server, working_set)


@dataclass(slots=True)
class _Mooncake:
    store: MooncakeStore

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        _, into = self.store.gets(size_bytes)
        return [Way("Mooncake get, tcp", into, self.store.run(size_bytes, items))]


@contextmanager
def _mooncake(working_set: int, sizes: Sequence[int]) -> Iterator[Source | str]:
    with mooncake(working_set, *sizes) as store:
        yield store if isinstance(store, str) else _Mooncake(store)


@dataclass(slots=True)
class _BareVerbs:
    verbs: BareVerbs

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        return [Way(BARE_READ, self.verbs.one(size_bytes), self.verbs.run(size_bytes, items))]


@contextmanager
def _bare_verbs(working_set: int, sizes: Sequence[int]) -> Iterator[Source | str]:
    with bare_verbs(working_set, max(sizes)) as verbs:
        yield verbs if isinstance(verbs, str) else _BareVerbs(verbs)


@dataclass(slots=True)
class _Channel:
    name: str
    pool: Pool
    region: Mapped
    reads: Reads
    working_set: int
    gets: bool
    """Blocks by their keys too, which nobody gets through shared memory: there a view is had."""

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        keys = self.pool.fill(self.working_set, size_bytes)
        extents, reads = self.region.payloads(keys), self.reads
        one, run = f"{self.name} read", f"{self.name} reads of a run"
        ways = [Way(one, reads.of(one, extents), reads.of(run, extents, items))]
        if self.gets:
            one, run = f"{self.name} get", f"{self.name} gets of a run"
            ways.append(Way(one, reads.blocks(one, keys), reads.blocks(run, keys, items)))
        if self.reads.transport.name == "cuda":
            one, run = f"{self.name} to a GPU", f"{self.name} to a GPU, of a run"
            ways.append(Way(one, reads.to_gpu(one, extents), reads.to_gpu(run, extents, items)))
        return ways


@contextmanager
def _transport(name: str, working_set: int, sizes: Sequence[int]) -> Iterator[Source | str]:
    if refused := find_transports([name], WireOptions()).refused:
        yield refused[name]
        return
    room = _room(working_set, sizes)
    with (
        pools(1, region_bytes=room, transports=[name]) as [pool],
        mapped(pool, on_gpu=name == "cuda") as region,
        channel(pool, name) as reads,
    ):
        if isinstance(reads, str):
            yield reads
        else:
            yield _Channel(f"{OURS}{name}", pool, region, reads, working_set, gets=name != "shm")


@dataclass(slots=True)
class _Views:
    pool: Pool
    region: Mapped
    working_set: int

    def ways(self, size_bytes: int, items: int) -> list[Way]:
        return [Way(VIEW, self.region.views(VIEW, self.pool.fill(self.working_set, size_bytes)))]


@contextmanager
def _views(working_set: int, sizes: Sequence[int]) -> Iterator[Source]:
    with pools(1, region_bytes=_room(working_set, sizes)) as [pool], mapped(pool) as region:
        yield _Views(pool, region, working_set)


def _room(working_set: int, sizes: Sequence[int]) -> int:
    """A region for all blocks of all sizes; slots are rounded up, and each size class takes whole slabs, of
    which there are 64, of a power of two.  Memory comes only as it fills."""
    return max(REGION_BYTES, 3 * working_set * sum(sizes), 144 * max(sizes))


SOURCES: dict[str, Open] = {
    "memcpy": _memory,
    "socket": partial(_socket, "tcp"),
    "unix-socket": partial(_socket, "unix"),
    "redis": _redis,
    "mooncake": _mooncake,
    "bare-verbs": _bare_verbs,
    "view": _views,
    "shm": partial(_transport, "shm"),
    "tcp": partial(_transport, "tcp"),
    "verbs": partial(_transport, "verbs"),
    "cuda": partial(_transport, "cuda"),
}
