"""A shard that was killed, or stood still, during writes has everything again, and nobody had to read."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvcomm.block import Incarnation
from kvcomm.client import Client
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError, OutcomeUnknown, Unavailable
from kvcomm.instance import NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.stateplane import record_name
from kvcomm.wire.messages import RecordFetch, RecordStates
from tests.system.conftest import Cluster, eventually, metric

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PULLED, PUSHED = (f'kvcomm_repaired_records_total{{direction="{way}"}}' for way in ("pulled", "pushed"))


def has(cluster: Cluster, node: NodeRecord, expected: dict[str, bytes]) -> bool:
    """Whether the shard's own store, without asking others, holds these values of state "repair".  Beside
    one there may be an older: of a put with an unknown outcome that was put again."""
    credentials, ring = cluster.instance.credentials(), cluster.instance.ring()
    assert ring is not None
    identity = Identity(credentials.token(NODE_TENANT), Incarnation(5))
    tenant = bytes(credentials.tenant_digest("default"))
    keys = [tenant + record_name("state", "repair", name) for name in expected]
    deadline = time.monotonic() + 5.0
    try:
        connection = Connection.open(node.addresses[0], identity, deadline)
        try:
            answer = connection.call(RecordFetch(ring.epoch, keys), deadline=deadline).message
        finally:
            connection.close()
    except KVCommError:  # it has just started, or has not heard of the newest ring
        return False
    assert isinstance(answer, RecordStates)
    held = [set() if state is None else {each.value for each in state.siblings} for state in answer.states]
    return all(value in values for values, value in zip(held, expected.values(), strict=True))


def total(cluster: Cluster, series: str) -> float:
    return sum(metric(node, series) for node in cluster.instance.nodes() if node.role == "shard")


def repaired(cluster: Cluster, name: str) -> float:
    """Records that a shard took from others, and that the others gave away: since the start of each."""
    pushed = [metric(each, PUSHED) for each in others_of(cluster, name)]
    return metric(cluster.node(name), PULLED) + sum(pushed)


def others_of(cluster: Cluster, name: str) -> list[NodeRecord]:
    return [each for each in cluster.instance.nodes() if each.role == "shard" and each.node != name]


def some_shard(cluster: Cluster) -> str:
    return next(node.node for node in cluster.instance.nodes() if node.role == "shard")


def put_all(kv: Client, round_: int) -> dict[str, bytes]:
    """Also while a shard is dying: what has an unknown outcome is put again."""
    values = {f"key-{number}": b"%d/%d" % (round_, number) for number in range(60)}

    def done() -> bool:
        try:
            kv.state("repair").put_many(values)
        except (OutcomeUnknown, Unavailable):
            return False
        return True

    eventually(done)
    return values


def test_a_shard_that_was_killed_during_writes_catches_up(cluster: Cluster, kv: Client) -> None:
    put_all(kv, 1)
    before = cluster.kill(some_shard(cluster), signal.SIGKILL)
    values = put_all(kv, 2)
    after = cluster.restarted(before)
    eventually(lambda: has(cluster, after, values))


def test_a_shard_that_stood_still_is_told_what_it_missed(cluster: Cluster, kv: Client) -> None:
    put_all(kv, 3)
    node = cluster.node(some_shard(cluster))
    delivered = total(cluster, 'kvcomm_hints_total{outcome="delivered"}')
    with stopped(node):
        values = put_all(kv, 4)
        others = others_of(cluster, node.node)
        eventually(lambda: sum(metric(each, "kvcomm_hints") for each in others) > 0)
    eventually(lambda: has(cluster, node, values))
    eventually(lambda: total(cluster, "kvcomm_hints") == 0)
    assert total(cluster, 'kvcomm_hints_total{outcome="delivered"}') > delivered


@contextmanager
def stopped(node: NodeRecord) -> Iterator[None]:
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def test_a_shard_whose_disk_was_replaced_is_filled_by_the_others(cluster: Cluster, kv: Client) -> None:
    values = put_all(kv, 5)
    name = some_shard(cluster)
    # What it had not confirmed would wait as hints for it, and come back that way.
    eventually(lambda: has(cluster, cluster.node(name), values))
    directory = cluster.instance.directory / "data" / name
    before = cluster.kill(name, signal.SIGSTOP)
    already = sum(metric(each, PUSHED) for each in others_of(cluster, name))
    shutil.rmtree(directory)
    os.kill(before.pid, signal.SIGKILL)
    after = cluster.restarted(before)
    eventually(lambda: has(cluster, after, values))
    eventually(lambda: metric(after, "kvcomm_caught_up") == 1)
    eventually(lambda: repaired(cluster, name) - already >= len(values))  # counters are shown a moment later
