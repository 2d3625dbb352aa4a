"""Resolved records of real processes: both faces, a shard that stands still while the others go on, rules."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvcomm import connect_async
from kvcomm.client import Client
from kvcomm.embedded import Embedded
from kvcomm.errors import OutcomeUnknown, Rejected, Unavailable
from kvcomm.instance import Instance, NodeRecord
from tests.system.conftest import CONFIG, Cluster, eventually, metric
from tests.system.test_cli import kvcomm

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RULES = """
records:
  validators:
    - {names: "counter/budget/*", min: 0, max: 100}
    - {names: "state/lamps/*", value_bytes_max: 8, matches: "[a-z]+"}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Like the others', with rules."""
    config = tmp_path_factory.mktemp("config") / "kvcomm.yaml"
    config.write_text(CONFIG + RULES)
    name = f"t{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


def shards(cluster: Cluster) -> list[NodeRecord]:
    return [node for node in cluster.instance.nodes() if node.role == "shard"]


def test_every_class_by_the_blocking_face(kv: Client) -> None:
    tokens = kv.counter("tokens")
    tokens.add("a", 5)
    tokens.add("a", -2)
    tokens.add_many({"a": 1, "b": 7})
    assert {key: found.value for key, found in tokens.get_many(["a", "b", "c"]).items()} == {
        "a": 4, "b": 7, "c": 0,
    }  # fmt: skip
    tags = kv.set("tags")
    tags.add("doc", b"x", b"y")
    tags.remove("doc", b"x")
    assert tags.get("doc").value == {b"y"}
    pose = kv.map("robots")
    pose.put("r1", "x", b"1")
    pose.put_many({"r1": {"y": b"2", "z": b"3"}})
    pose.remove("r1", "x")
    assert pose.get("r1").value == {"y": b"2", "z": b"3"}
    kv.maximum("seen").offer_many({"step": 7, "loss": 0.5})
    kv.maximum("seen").offer("step", 3)
    assert kv.maximum("seen").get("step").value == 7
    kv.minimum("seen").offer("loss", 0.25)
    assert kv.minimum("seen").get("loss").value == 0.25
    kv.register("cursor").put("p", b"1")
    kv.register("cursor").put("p", b"2")
    assert kv.register("cursor").get("p").value == b"2"
    assert sorted(tokens.keys()) == ["a", "b"]
    tokens.delete("a")
    assert tokens.get("a").value == 0
    assert kv.maximum("seen").get("loss").value == 0.5, "a name of another class is another record"


async def _asynchronous(cluster: Cluster) -> None:
    kv = await connect_async(cluster.config, instance=cluster.instance.name)
    try:
        await asyncio.gather(*(kv.counter("together").add("k") for _ in range(20)))
        assert (await kv.counter("together").get("k")).value == 20
        await kv.set("together").add_many({"k": [b"1", b"2"], "l": [b"3"]})
        await kv.set("together").remove("k", b"1")
        found = await kv.set("together").get_many(["k", "l"])
        assert {key: each.value for key, each in found.items()} == {"k": {b"2"}, "l": {b"3"}}
        await kv.map("together").put("k", "f", b"v")
        assert (await kv.map("together").get("k")).value == {"f": b"v"}
        await kv.maximum("together").offer("k", 4)
        await kv.minimum("together").offer("k", -4)
        assert (await kv.maximum("together").get("k")).value == 4
        assert (await kv.minimum("together").get("k")).value == -4
        await kv.register("together").put("k", b"v")
        assert (await kv.register("together").get("k")).value == b"v"
        await kv.register("together").delete("k")
        assert (await kv.register("together").get("k")).value is None
        assert await kv.counter("together").keys() == ["k"]
    finally:
        await kv.close()


def test_every_class_by_the_asyncio_face(cluster: Cluster) -> None:
    asyncio.run(_asynchronous(cluster))


def test_a_sum_is_exact_after_shards_stood_still_in_turn(cluster: Cluster, kv: Client) -> None:
    """The others take the adds meanwhile, so each record is coordinated by several shards, some of which have
    not heard of what the others took."""
    keys = [f"k{number}" for number in range(12)]
    sums = _Sums(dict.fromkeys(keys, 0), dict.fromkeys(keys, 0))
    elements: dict[str, set[bytes]] = {key: set() for key in keys}
    with cluster.client() as other:
        for round_ in range(6):
            node = shards(cluster)[round_ % 3]
            os.kill(node.pid, signal.SIGSTOP)
            try:
                for amount, client in ((1, kv), (100, other)):
                    for key in keys:
                        sums.add(client, key, amount)
                        _add_element(client, key, b"%d/%d" % (amount, round_))
                        elements[key].add(b"%d/%d" % (amount, round_))
            finally:
                os.kill(node.pid, signal.SIGCONT)

    def settled() -> bool:
        try:
            found = kv.counter("split").get_many(keys)
            sets = kv.set("split").get_many(keys)
        except Unavailable:
            return False
        return sums.fit({key: each.value for key, each in found.items()}) and all(
            sets[key].value == elements[key] for key in keys
        )

    eventually(settled)
    assert any(sums.least[key] == sums.most[key] == 6 * 101 for key in keys), "the sum of some is exact"


@dataclass
class _Sums:
    """What was acknowledged, and that with what may have been done: it is not sent again."""

    least: dict[str, int]
    most: dict[str, int]

    def add(self, client: Client, key: str, amount: int) -> None:
        def done() -> bool:
            try:
                client.counter("split").add(key, amount)
            except Unavailable:
                return False
            except OutcomeUnknown:
                self.most[key] += amount
                return True
            self.least[key] += amount
            self.most[key] += amount
            return True

        eventually(done)

    def fit(self, found: dict[str, int]) -> bool:
        return all(self.least[key] <= found[key] <= self.most[key] for key in found)


def _add_element(client: Client, key: str, element: bytes) -> None:
    """An element may be added again."""

    def done() -> bool:
        try:
            client.set("split").add(key, element)
        except (OutcomeUnknown, Unavailable):
            return False
        return True

    eventually(done)


def test_a_rule_of_the_configuration_refuses_and_is_counted(cluster: Cluster, kv: Client) -> None:
    def rejected() -> float:
        return sum(metric(node, "kvcomm_rejected_writes_total") for node in shards(cluster))

    before = rejected()
    kv.counter("budget").add("a", 90)
    with pytest.raises(Rejected, match="largest is 100"):
        kv.counter("budget").add("a", 20)
    with pytest.raises(Rejected, match="smallest is 0"):
        kv.counter("budget").add("b", -1)
    assert kv.counter("budget").get("a").value == 90
    kv.state("lamps").put("hall", b"red")
    for value in (b"much too long", b"RED", b"\xff"):
        with pytest.raises(Rejected):
            kv.state("lamps").put("hall", value)
    assert kv.state("lamps").get("hall").value == b"red"
    eventually(lambda: rejected() == before + 5)


def test_resolved_records_from_the_shell(cluster: Cluster, kv: Client) -> None:
    at = ("--instance", cluster.instance.name, "--config", str(cluster.config))

    def put(kind: str, value: str) -> None:
        # "--": a negative number is no option
        done = kvcomm("put", "--as", kind, *at, "--", "shell", "k", value)
        assert done.returncode == 0, done.stderr

    for kind, value in (("counter", "5"), ("counter", "-2"), ("set", "b"), ("set", "a"), ("map", "f=v=w")):
        put(kind, value)
    for kind, value in (("max", "2"), ("max", "2.5"), ("register", "one"), ("register", "two")):
        put(kind, value)
    shown = {
        kind: kvcomm("get", "shell", "k", "--as", kind, *at).stdout
        for kind in ("counter", "set", "map", "max", "register")
    }
    assert shown == {
        "counter": b"3\n", "set": b"a\nb\n", "map": b"f=v=w\n", "max": b"2.5\n", "register": b"two\n",
    }  # fmt: skip
    document = json.loads(kvcomm("get", "shell", "k", "--as", "counter", "--json", *at).stdout)
    assert document["value"] == 3 and document["context"] and document["degraded"] is False
    elements = json.loads(kvcomm("get", "shell", "k", "--as", "set", "--json", *at).stdout)["elements_base64"]
    assert elements == ["YQ==", "Yg=="]
    assert kvcomm("get", "shell", "absent", "--as", "counter", *at).returncode == 1
    kv.register("shell").delete("k")
    assert kvcomm("get", "shell", "k", "--as", "register", *at).returncode == 1, "deleted"
    assert kvcomm("put", "shell", "k", "many", "--as", "counter", *at).returncode == 2
    assert b"counter/shell/k\n" in kvcomm("ls", "counter", *at).stdout
