"""Strong records while processes end or hang: how long nobody gets anything done, and how long one record
waits.

Several clients change a record each, one change after the other, through connections of their own.  A *gap*
is the time between two changes that were done.  The complete stop is the longest gap of all clients together,
the longest wait that of the client that fared worst: it may have asked the very process that was hit, and a
process that hangs is found out by the clients' waiting alone: the request timeout is the baseline.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from bench.report import Report
from bench.scale import FULL, Scale
from bench.service import START_DEADLINE_S, Service, service, status_of
from bench.timing import Spread
from kvcomm.client import Client, Strong
from kvcomm.errors import KVCommError

CLIENTS, VALUE_BYTES = 4, 128
REQUEST_TIMEOUT_S = 2.0
"""``network.request_timeout``, as it is by default."""
STOP_MS_MAX, HEAL_MS_MAX, REFUSAL_MS_MAX = 1_000.0, 1_500.0, 1_000.0
CALM_S, HIT_S, RECOVER_S = 0.5, 3.0, 30.0


@dataclass(slots=True)
class _Worker:
    """One client and what it got done."""

    strong: Strong
    record: str
    done: list[float] = field(default_factory=list)
    refused_s: list[tuple[float, float]] = field(default_factory=list)
    """When a change was refused, and how long that took."""

    def work(self, enough: threading.Event) -> None:
        while not enough.is_set():
            begin = time.monotonic()
            try:
                self.strong.put(self.record, bytes(VALUE_BYTES), deadline_s=10.0)
            except KVCommError:
                now = time.monotonic()
                self.refused_s.append((now, now - begin))
            else:
                self.done.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class _Hit:
    """A process of the cluster, and what happens to it."""

    name: str
    pid: int
    number: signal.Signals


def run(scale: Scale) -> Report:
    report = Report("failover", "Strong records while processes end or hang")
    repeats = 3 if scale is FULL else 1
    for number, what in ((signal.SIGKILL, "ends"), (signal.SIGSTOP, "hangs")):
        stops: list[float] = []
        waits: list[float] = []
        with service() as running, _workers(running) as workers:
            names = _names(running, number)
            for _ in range(repeats):
                for name in names if scale is FULL else names[:1]:
                    stop_s, wait_s = _hit(running, workers, name, number)
                    stops.append(stop_s)
                    waits.append(wait_s)
        _claim(report, f"one process {what}: complete stop", stops, STOP_MS_MAX)
        _tell(report, f"one process {what}: longest wait of one record", waits)
    _minority(report, repeats)
    report.notes.append(
        f"{CLIENTS} clients, a record each, three shards and a pool; each shard in turn, and the controller "
        f"where it hangs (it is the parent of all: when it ends, the cluster is told to end), "
        f"{repeats} times each; at the small scale one shard, once."
    )
    return report


def _names(running: Service, number: signal.Signals) -> list[str]:
    shards = sorted(node.node for node in running.instance.nodes() if node.role == "shard")
    return shards if number == signal.SIGKILL else [*shards, "controller"]


def _pid(running: Service, name: str) -> int:
    if name == "controller":
        return int(status_of(running.instance.nodes()[0].pid)["PPid"])
    return next(node.pid for node in running.instance.nodes() if node.node == name)


@contextmanager
def _workers(running: Service) -> Iterator[list[_Worker]]:
    """At work until the end of the block."""
    from kvcomm.connect import connect

    with ExitStack() as stack:
        clients: list[Client] = [
            stack.enter_context(connect(instance=running.instance.name)) for _ in range(CLIENTS)
        ]
        workers = [
            _Worker(client.strong("failover"), f"record-{number}") for number, client in enumerate(clients)
        ]
        enough = threading.Event()
        threads = [threading.Thread(target=worker.work, args=(enough,)) for worker in workers]
        stack.callback(_join, threads, enough)
        for thread in threads:
            thread.start()
        _wait_for_all(workers, time.monotonic(), START_DEADLINE_S)
        yield workers


def _join(threads: Sequence[threading.Thread], enough: threading.Event) -> None:
    enough.set()
    for thread in threads:
        thread.join()


def _wait_for_all(workers: Sequence[_Worker], since: float, within_s: float) -> None:
    """Until each has done something after ``since``."""
    while not all(worker.done and worker.done[-1] > since for worker in workers):
        if time.monotonic() > since + within_s:
            raise RuntimeError(f"a client got nothing done within {within_s} s")
        time.sleep(0.01)


def _hit(
    running: Service, workers: Sequence[_Worker], name: str, number: signal.Signals
) -> tuple[float, float]:
    """(complete stop, longest wait) in seconds."""
    time.sleep(CALM_S)
    pid, begin = _pid(running, name), time.monotonic()
    os.kill(pid, number)
    try:
        time.sleep(HIT_S)
    finally:
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    end = time.monotonic()
    _wait_for_all(workers, end, RECOVER_S)
    if number == signal.SIGKILL:
        _wait_for_process(running, name, pid)
    gaps = [_longest_gap(worker.done, begin, end) for worker in workers]
    together = sorted(at for worker in workers for at in worker.done)
    return _longest_gap(together, begin, end), max(gaps)


def _wait_for_process(running: Service, name: str, before: int) -> None:
    deadline = time.monotonic() + RECOVER_S
    while all(node.pid == before for node in running.instance.nodes() if node.node == name):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name} was not started again")
        time.sleep(0.05)


def _longest_gap(done: Sequence[float], begin: float, end: float) -> float:
    """Between changes around ``[begin, end]``; what lasts longer counts as long as it lasted."""
    before = max((at for at in done if at <= begin), default=begin)
    after = min((at for at in done if at >= end), default=end)
    times = [before, *(at for at in done if begin < at < end), after]
    return max(later - earlier for earlier, later in pairwise(times))


def _minority(report: Report, repeats: int) -> None:
    """Two of three shards hang: the third refuses, and goes on when one is back."""
    heals: list[float] = []
    refusals: list[float] = []
    with service() as running, _workers(running) as workers:
        for _ in range(repeats):
            time.sleep(CALM_S)
            pids = [_pid(running, name) for name in _names(running, signal.SIGKILL)[:2]]
            begin = time.monotonic()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(3 * HIT_S)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            healed = time.monotonic()
            _wait_for_all(workers, healed, RECOVER_S)
            heals += [min(at for at in worker.done if at > healed) - healed for worker in workers]
            noticed = begin + 2 * REQUEST_TIMEOUT_S
            refusals += [
                took
                for worker in workers
                for at, took in worker.refused_s
                if noticed < at - took and at < healed
            ]
    _claim(report, "two of three shards hang and go on: first change of each client", heals, HEAL_MS_MAX)
    if refusals:
        _tell(report, "meanwhile, once noticed: a change is refused after", refusals)


def _claim(report: Report, what: str, seconds: Sequence[float], most_ms: float) -> None:
    """The slowest of all is what is promised; the ratio is to the clients' request timeout."""
    worst_ms = max(seconds) * 1e3
    report.claim(
        f"{what}, slowest of {len(seconds)}", "<=", most_ms, "ms", Spread(worst_ms, worst_ms, worst_ms)
    )
    _tell(report, what, seconds)


def _tell(report: Report, what: str, seconds: Sequence[float]) -> None:
    spread, worst = Spread.of(seconds), max(seconds)
    report.notes.append(
        f"{what}: median {spread.median * 1e3:,.0f} ms, p90 {spread.p90 * 1e3:,.0f} ms, slowest "
        f"{worst * 1e3:,.0f} ms of {len(seconds)}; the slowest is {worst / REQUEST_TIMEOUT_S:.2f} x the "
        f"clients' request timeout."
    )
