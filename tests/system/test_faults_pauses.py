"""Faults 21 and 22: shards that stand still and go on.

The catalogue's pause of 10 s lasts 3 s here; ``KVCOMM_LONG_FAULTS=1`` makes it 10.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kvcomm.errors import KVCommError, OutcomeUnknown, StaleEpoch, Unavailable
from kvcomm.instance import NodeRecord
from kvcomm.rpc import Connection
from kvcomm.stateplane import record_name
from kvcomm.wire.messages import (
    Done,
    Message,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordVersions,
    RecordWrite,
    Sibling,
    StrongChange,
    StrongOrder,
    StrongOutcomes,
)
from tests.system.conftest import eventually, metric
from tests.system.lab import SHARDS, STALL_S, Lab
from tests.system.traffic import Traffic

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    try:
        yield lab
    finally:
        lab.close()


class Queued:
    """A request that lies in the socket of a shard that stands still."""

    def __init__(self, connection: Connection, message: Message) -> None:
        self.answer: Message | KVCommError | None = None
        self._connection, self._message = connection, message
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        try:
            deadline = time.monotonic() + STALL_S + 20.0
            self.answer = self._connection.call(self._message, deadline=deadline).message
        except KVCommError as error:
            self.answer = error
        finally:
            self._connection.close()

    def answered(self) -> Message | KVCommError:
        self._thread.join(STALL_S + 30.0)
        assert self.answer is not None
        return self.answer


def epoch(lab: Lab) -> int:
    ring = lab.instance.ring()
    assert ring is not None
    return ring.epoch


def new_epoch(lab: Lab, restarted: str) -> None:
    """A shard that comes back elsewhere makes one."""
    before = epoch(lab)
    lab.restarted(lab.kill(restarted, signal.SIGKILL))
    eventually(lambda: epoch(lab) > before)


def test_fault_21_an_owner_that_slept_through_an_epoch(lab: Lab) -> None:
    """Meanwhile others coordinate its records.  What waited for it, and what comes later, under the old epoch
    is refused with the new map, or was done under the new one by a majority; never by the old epoch alone."""
    traffic = Traffic(lab, "fault-21")
    with traffic.running():
        old = epoch(lab)
        key, strong_key = record_name("state", "slept", "k"), record_name("strong", "slept", "k")
        change = StrongChange(old, [StrongOrder(strong_key, "put", b"", b"queued")])
        connections = [lab.connection(lab.node("shard-0")) for _ in range(3)]
        with lab.paused("shard-0"):
            begin = time.monotonic()
            queued = [
                Queued(connections[0], RecordPut(old, [RecordWrite(key, b"queued", {})])),
                Queued(connections[1], change),
                Queued(connections[2], replication(lab, old)),
            ]
            new_epoch(lab, "shard-2")
            while time.monotonic() < begin + STALL_S:
                traffic.goes_on(10)
        for each in queued:
            check_queued(each.answered())
        eventually(lambda: metric(lab.node("shard-0"), "kvcomm_ring_epoch") == epoch(lab))
        late: list[Message] = [
            RecordPut(old, [RecordWrite(key, b"late", {})]),
            StrongChange(old, [StrongOrder(strong_key, "put", b"", b"late")]),
            replication(lab, old),
        ]
        for node in SHARDS:
            for message in late:
                with pytest.raises(StaleEpoch):
                    lab.ask(lab.node(node), message)
        traffic.goes_on()
    traffic.judge()
    with lab.client() as kv:
        assert set(kv.state("slept").get("k").values) <= {b"queued", b"replicated"}
        assert kv.strong("slept").read("k").value in (None, b"queued")


def check_queued(answer: Message | KVCommError) -> None:
    match answer:
        case Done():
            pass  # a merge of what another shard has on its disk: it may come at any time
        case RecordVersions():
            assert answer.versions[0].acks >= 2, "acknowledged by the sleeper alone"
        case StrongOutcomes():
            assert answer.outcomes[0].code in ("", "unavailable", "outcome_unknown")
        case StaleEpoch() | Unavailable() | OutcomeUnknown():
            pass
        case _:
            raise AssertionError(f"not an answer to a write: {answer}")


def replication(lab: Lab, old: int) -> RecordReplicate:
    """As from a coordinator that has not heard of the new epoch."""
    state = RecordState({"aaaaaaaaaaaaaaaa.1": 1}, [Sibling("aaaaaaaaaaaaaaaa.1", 1, 1 << 16, b"replicated")])
    return RecordReplicate(old, [lab.stored_key("state", "slept", "k")], [state])


def test_fault_22_short_pauses_change_no_ownership(lab: Lab) -> None:
    """As a collector of garbage makes them: one second, again and again, now here and now there."""
    before, pids = epoch(lab), {node.node: node.pid for node in lab.shards()}
    eventually(lambda: all(silent_peers(node) == 0 for node in lab.shards()))
    silences = {node.node: metric(node, "kvcomm_silences_total") for node in lab.shards()}
    traffic = Traffic(lab, "fault-22")
    with traffic.running():
        for node in SHARDS:
            with lab.paused(node):
                begin = time.monotonic()
                while time.monotonic() < begin + 1.0:
                    traffic.goes_on(2)
            traffic.goes_on()
    assert epoch(lab) == before
    assert {node.node: node.pid for node in lab.shards()} == pids
    assert {node.node: metric(node, "kvcomm_silences_total") for node in lab.shards()} == silences, (
        "nobody called anybody silent: neither those who stood still, nor those who watched"
    )
    traffic.judge()


def silent_peers(node: NodeRecord) -> float:
    return metric(node, "kvcomm_silent_peers")


def test_a_long_pause_is_seen_by_the_others_and_blamed_on_nobody_by_the_sleeper(lab: Lab) -> None:
    eventually(lambda: all(silent_peers(node) == 0 for node in lab.shards()))
    sleeper, others = lab.node("shard-1"), [lab.node("shard-0"), lab.node("shard-2")]
    blamed = metric(sleeper, "kvcomm_silences_total")
    split_s = [metric(node, "kvcomm_split_seconds_total") for node in others]
    with lab.paused("shard-1"):
        eventually(lambda: all(silent_peers(node) == 1 for node in others))
        assert [metric(node, "kvcomm_split_mode") for node in others] == [1, 1], "they are a majority"
    eventually(lambda: all(silent_peers(node) == 0 for node in others))
    assert [metric(node, "kvcomm_split_mode") for node in [*others, sleeper]] == [0, 0, 0]
    assert metric(sleeper, "kvcomm_silences_total") == blamed
    after = [metric(node, "kvcomm_split_seconds_total") for node in others]
    assert all(now > then for now, then in zip(after, split_s, strict=True))


def test_fault_22_the_supervisor_stands_still(lab: Lab) -> None:
    """Nobody needs it for reads and writes; it finds its nodes as it left them."""
    before, traffic = epoch(lab), Traffic(lab, "fault-22-supervisor")
    assert lab._process is not None
    with traffic.running():
        os.kill(lab._process.pid, signal.SIGSTOP)
        try:
            traffic.goes_on(60)
        finally:
            os.kill(lab._process.pid, signal.SIGCONT)
    assert traffic.eventual.counts.refused + traffic.eventual.counts.unknown == 0
    assert epoch(lab) == before
    traffic.judge()
