"""Promises of eventual records that take real processes and many clients to try: bounded versions (P7, fault
41) and deletes that stay (P8, fault 38)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcomm.block import Incarnation
from kvcomm.client import Client
from kvcomm.errors import KVCommError
from kvcomm.rpc import Connection, Identity
from kvcomm.stateplane import record_name
from kvcomm.wire.messages import Failure, Message, RecordPut, RecordState, RecordVersions, RecordWrite
from l3_shard.dvv import SIBLINGS_MAX, alive
from tests.system.conftest import eventually, metric
from tests.system.lab import SHARDS, Lab

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CLIENTS = 1_000
AT_ONCE = 16
HINT_AGE_S, TOMBSTONE_AGE_S = 1.0, 2.0


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(
        tmp_path_factory.mktemp("lab"),
        fsync="interval",
        hint_age=f"{HINT_AGE_S:g}s",
        tombstone_age=f"{TOMBSTONE_AGE_S:g}s",
    )
    try:
        yield lab
    finally:
        lab.close()


@pytest.fixture
def kv(lab: Lab) -> Iterator[Client]:
    with lab.client() as client:
        yield client


def test_a_thousand_clients_without_context_meet_the_bound_and_nothing_is_dropped(lab: Lab) -> None:
    """Each is a connection and a caller of its own, and writes once without having read."""
    record = record_name("state", "crowd", "k")
    ring, token = lab.instance.ring(), lab.instance.credentials().token("default")
    assert ring is not None
    addresses = [node.addresses[0] for node in lab.shards()]

    def write(number: int) -> Message:
        deadline = time.monotonic() + 20.0
        identity = Identity(token, Incarnation(1_000 + number))
        connection = Connection.open(addresses[number % len(addresses)], identity, deadline)
        try:
            put = RecordPut(ring.epoch, [RecordWrite(record, b"%d" % number, {})])
            return connection.call(put, deadline=deadline).message
        except KVCommError as error:
            return Failure(error.code, error.message)
        finally:
            connection.close()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(write, range(CLIENTS)))

    done = {b"%d" % number for number, answer in enumerate(answers) if isinstance(answer, RecordVersions)}
    refused = [answer for answer in answers if isinstance(answer, Failure)]
    assert {answer.code for answer in refused} == {"conflict"}, "typed, and nothing else goes wrong"
    assert all(f"limit {SIBLINGS_MAX}" in answer.text for answer in refused)
    assert len(done) + len(refused) == CLIENTS

    (state,) = lab.agreed("crowd", ["k"])
    assert state is not None
    values = {sibling.value for sibling in state.siblings}
    assert values == done, "every acknowledged value, and no other"
    assert SIBLINGS_MAX <= len(values) <= SIBLINGS_MAX * len(SHARDS), "no shard had heard of the others"
    assert len(state.context) <= len(SHARDS), "an entry a shard that coordinated, not one a client"
    with lab.client() as kv:
        read = kv.state("crowd").get("k")
        assert set(read.values) == done
        kv.state("crowd").put("k", b"merged", context=read.context)
        assert kv.state("crowd").get("k").values == (b"merged",)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_no_deleted_record_returns_with_a_shard_that_was_away_longer_than_hints_and_tombstones(
    lab: Lab, kv: Client, how: signal.Signals
) -> None:
    """It has the values, and nobody keeps a hint for it any more.  While it is away no tombstone goes."""
    name = f"graves{how.value}"
    keys = [f"key-{number}" for number in range(20)]
    state, away = kv.state(name), SHARDS[1]
    state.put_many(dict.fromkeys(keys, b"deleted later"))
    lab.agreed(name, keys)
    others = [node for node in lab.shards() if node.node != away]

    def counted(series: str) -> float:
        return sum(metric(node, series) for node in others)

    expired = 'kvcomm_hints_total{outcome="expired"}'
    expired_before, removed_before = counted(expired), counted("kvcomm_tombstones_removed_total")
    with lab.paused(away) as before:
        contexts = {key: state.get(key).context for key in keys}
        for key in keys:
            eventually(lambda key=key: deleted(kv, name, key, contexts[key]))  # type: ignore[misc]
        gone_at = time.monotonic() + 2 * TOMBSTONE_AGE_S
        eventually(lambda: counted(expired) > expired_before and counted("kvcomm_hints") == 0)
        eventually(lambda: time.monotonic() > gone_at)
        assert counted("kvcomm_tombstones_removed_total") == removed_before, "one shard has not seen them"
        if how is signal.SIGKILL:
            lab.kill(away, how)
    if how is signal.SIGKILL:
        lab.restarted(before)

    returned: list[object] = []

    def buried() -> bool:
        """What the returned shard still has by itself may be shown as ``degraded``, once: it is not back."""
        returned.extend(found for key in keys if (found := state.get(key)).values and not found.degraded)
        try:
            held = {node.node: lab.states(node, name, keys) for node in lab.shards()}
        except KVCommError:
            return False
        returned.extend(living(node, states) for node, states in held.items() if node != away)
        return len(held) == len(SHARDS) and not any(any(states) for states in held.values())

    eventually(buried, 60.0)
    assert not any(returned)
    assert state.keys() == []


def living(node: str, states: list[RecordState | None]) -> list[str]:
    return [f"{node}: {state}" for state in states if state is not None and alive(state)]


def deleted(kv: Client, name: str, key: str, context: dict[str, int]) -> bool:
    """Also while its first owner stands still."""
    try:
        kv.state(name).delete(key, context=context)
    except KVCommError:
        return False
    return True
