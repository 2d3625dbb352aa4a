"""Blocks of which two shards have a copy, read while one of the shards stands still again and again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.report import Report
from bench.scale import Scale, size_name
from bench.service import DEADLINE_S, Service, identity, publish, service
from bench.timing import Call, interleave
from kvcomm.block import BlockKey
from kvcomm.errors import Unavailable
from kvcomm.rpc import Peers, run_blocking
from kvcomm.tier import Block

QUIET = "two copies: a run of blocks"
BURSTS = "two copies: a run of blocks, one shard stands still half of the time"
STOPPED_S, RUNNING_S = 0.1, 0.1
BURST_TIMES_MAX = 2.0


def run(scale: Scale) -> Report:
    report = Report("copies", "A block of which two shards have a copy")
    with ExitStack() as stack:
        running = stack.enter_context(service(pools=0, block_copies=2))
        keys = publish(running.client, scale.working_set, scale.block_bytes).keys(running)
        peers = Peers(identity(running))
        stack.callback(peers.close)
        quiet, disturbed = _gets(running, keys, peers, QUIET), _gets(running, keys, peers, BURSTS)
        rounds = interleave(
            [quiet, _Disturbed(disturbed, _shard(running))],
            rounds=scale.rounds,
            turn_s=2 * (STOPPED_S + RUNNING_S) if scale.rounds > 2 else scale.turn_s,
        )
    size = size_name(scale.block_bytes)
    report.add(rounds, size, {BURSTS: QUIET})
    report.claim(
        f"a run of {size} blocks, one of two owners stopped half of the time, over none",
        "<=",
        BURST_TIMES_MAX,
        "x",
        rounds.ratio(BURSTS, QUIET),
    )
    report.notes.append(
        f"The shard gets SIGSTOP for {STOPPED_S * 1e3:.0f} ms and runs for {RUNNING_S * 1e3:.0f} ms in turn. "
        "A single copy would wait for it each time."
    )
    return report


def _gets(running: Service, keys: list[BlockKey], peers: Peers, name: str) -> Call:
    """All blocks in one operation, as a fetch of a prefix reads them, by a client with a memory of its
    own."""
    from l3_shard.tier import L3Tier

    ring = running.instance.ring()
    if ring is None:
        raise Unavailable("the cluster wrote no ring")
    tier = L3Tier(ring, dial=lambda node: node.local_address, timeout_s=DEADLINE_S)

    def get() -> None:
        found: list[Block] = []
        steps = tier.get(keys, lambda _, block: found.append(block))
        run_blocking(steps, peers, time.monotonic() + DEADLINE_S)
        if len(found) < len(keys):
            raise RuntimeError("the shards lost a block that was to be fetched")

    return Call(name, get, items=len(keys))


def _shard(running: Service) -> int:
    """The process id of one of them."""
    return next(node.pid for node in running.instance.nodes() if node.role == "shard")


class _Disturbed:
    """An operation that runs while a process is stopped and continued."""

    def __init__(self, operation: Call, pid: int) -> None:
        self.name = operation.name
        self._operation, self._pid = operation, pid

    def times(self, number: int) -> list[float]:
        with _bursts(self._pid):
            return self._operation.times(number)


@contextmanager
def _bursts(pid: int) -> Iterator[None]:
    ended = threading.Event()

    def disturb() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            ended.wait(RUNNING_S)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
