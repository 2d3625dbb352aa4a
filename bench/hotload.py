"""One record that everybody reads while it is written: how many of the reads its shard sees, and how old what
they show is.  Beside it a strong record, written and read alike.

Each reader is a client of its own, in a thread, at a fixed rate; one writer counts both records up.  A read
is *stale* by the time between the acknowledgement of the write that replaced what it shows and the moment in
which the read was begun; all times are of one clock.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from kvcomm.client import Client
from kvcomm.instance import Instance

NAME = "hot"
_ASKED = 'kvcomm_requests_total{message="RecordGet"}'
_COPIES = "kvcomm_hot_record_reads_total"


@dataclass(frozen=True, slots=True)
class HotLoad:
    """Nine reads to one write at 9 times as many of them a second."""

    readers: int
    reads_s: float
    """Of each reader."""
    writes_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one stretch of time."""

    seconds: float
    reads: int
    writes: int
    asked: int
    """Reads of records that the shards saw, all together."""
    from_copies: int
    stale_max_s: float
    strong_stale_max_s: float

    @property
    def read_share(self) -> float:
        return self.reads / max(1, self.reads + self.writes)

    @property
    def asked_share(self) -> float:
        """Of the reads, what the shards saw."""
        return self.asked / max(1, self.reads)


@dataclass(slots=True)
class _Log:
    """What one thread saw: (begun at, value), or of the writer (acknowledged at, value)."""

    eventual: list[tuple[float, int]] = field(default_factory=list)
    strong: list[tuple[float, int]] = field(default_factory=list)


class Running:
    """A load under way; look at it in stretches."""

    def __init__(self, instance: Instance, readers: Sequence[Client], writer: Client, load: HotLoad) -> None:
        self._instance, self._readers, self._writer = instance, readers, writer
        self._stop = threading.Event()
        self._written, self._read = _Log(), [_Log() for _ in readers]
        self._problems: list[BaseException] = []
        self._value, self._key = 0, f"{time.monotonic_ns():x}"  # a record of this load's own
        self._write()  # so that there is something to read
        acts: list[tuple[float, Callable[[], None]]] = [(1.0 / load.writes_s, self._write)]
        for reader, log in zip(readers, self._read, strict=True):
            acts.append((1.0 / load.reads_s, lambda reader=reader, log=log: self._look(reader, log)))  # type: ignore[misc]
        self._threads = [threading.Thread(target=self._repeat, args=act, daemon=True) for act in acts]
        for thread in self._threads:
            thread.start()

    def watch(self, seconds: float) -> Seen:
        """What happens from now on, for so long."""
        before = self._counts()
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        asked, from_copies = (now - then for now, then in zip(self._counts(), before, strict=True))
        if self._problems:
            raise self._problems[0]
        reads = [each for log in self._read for each in list(log.eventual) if begin <= each[0] <= end]
        strong = [each for log in self._read for each in list(log.strong) if begin <= each[0] <= end]
        writes = sum(begin <= at <= end for at, _ in list(self._written.eventual))
        return Seen(
            end - begin,
            len(reads),
            writes,
            int(asked),
            int(from_copies),
            _stale_max_s(reads, self._written.eventual),
            _stale_max_s(strong, self._written.strong),
        )

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _counts(self) -> tuple[float, float]:
        asked = sum(
            series_of(node.metrics, _ASKED) for node in self._instance.nodes() if node.role == "shard"
        )
        return asked, sum(reader.metrics()[_COPIES] for reader in self._readers)

    def _write(self) -> None:
        self._value += 1
        value = str(self._value).encode()
        self._writer.state(NAME).put(self._key, value)
        self._written.eventual.append((time.monotonic(), self._value))
        self._writer.strong(NAME).put(self._key, value)
        self._written.strong.append((time.monotonic(), self._value))

    def _look(self, client: Client, log: _Log) -> None:
        """A strong read to ten eventual ones: it costs too much to be as many."""
        begun = time.monotonic()
        log.eventual.append((begun, int(client.state(NAME).get(self._key).value or b"0")))
        if len(log.eventual) % 10 == 0:
            begun = time.monotonic()
            log.strong.append((begun, int(client.strong(NAME).read(self._key).value or b"0")))

    def _repeat(self, every_s: float, act: Callable[[], None]) -> None:
        due = time.monotonic()
        try:
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                act()
                due = max(due + every_s, time.monotonic() - 1.0)
        except BaseException as error:
            self._problems.append(error)


def _stale_max_s(reads: Sequence[tuple[float, int]], written: Sequence[tuple[float, int]]) -> float:
    """``written`` counts up from 1."""
    acknowledged = [at for at, _ in written]
    stale_s = 0.0
    for begun, value in reads:
        if value < bisect_right(acknowledged, begun):  # a newer one was acknowledged before
            stale_s = max(stale_s, begun - acknowledged[value])
    return stale_s


def series_of(address: str, series: str) -> float:
    """A number of a node's exporter."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series)


@contextmanager
def hot_load(instance: Instance, connect: Callable[[], Client], load: HotLoad) -> Iterator[Running]:
    """Run it until the context ends; ``connect`` makes a client."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect()) for _ in range(load.readers + 1)]
        running = Running(instance, clients[1:], clients[0], load)
        stack.callback(running.close)
        yield running
