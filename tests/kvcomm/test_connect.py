"""Which cluster a client comes to, with which token, and what happens when it is not there (yet)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcomm import connect as connect_function
from kvcomm.connect import _Door, _find, pools_near
from kvcomm.embedded import Embedded
from kvcomm.errors import ConfigError, KVCommError, Unauthenticated, Unavailable
from kvcomm.instance import Instance, InstanceMissing, NodeRecord, process_start_time
from kvcomm.machine import ConnectionId, Origin
from kvcomm.serve import ReplyFunction
from kvcomm.settings import load_config
from kvcomm.wire.messages import Message, RingGet, RingMap, RingNode
from tests.peers import CREDENTIALS, Served, dead_address

pytestmark = pytest.mark.usefixtures("alone")

ADDRESS = "tcp://10.0.0.1:7000"


@pytest.fixture
def alone(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster, no configuration, no variable of whoever runs the tests."""
    for variable in ("KVCOMM_ADDRESS", "KVCOMM_INSTANCE", "KVCOMM_TOKEN", "KVCOMM_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def find(
    *,
    address: str | None = None,
    instance: str | None = None,
    token: str | None = None,
    embed: bool = False,
    config: Path | None = None,
) -> _Door:
    return _find(load_config(config), config, address, instance, token, embed, time.monotonic() + 10)


def running(name: str, *, role: str = "shard", address: str = "unix:///s") -> Instance:
    """An instance with one node, which is this process."""
    cluster = Instance.create(name)
    (cluster.directory / "secret").write_bytes(CREDENTIALS.secret)
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    cluster.register(
        NodeRecord(
            node=f"{role}-0", role=role, pid=os.getpid(), pid_start_time=start_time, addresses=[address],
            control="", metrics="", incarnation=1, region="",
        )
    )  # fmt: skip
    return cluster


# -- which one -----------------------------------------------------------------------------------------------


def test_what_the_caller_names_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    running("default", address="unix:///default")
    running("mine", address="unix:///mine")
    running("theirs", address="unix:///theirs")
    monkeypatch.setenv("KVCOMM_ADDRESS", ADDRESS)
    monkeypatch.setenv("KVCOMM_INSTANCE", "theirs")
    monkeypatch.setenv("KVCOMM_TOKEN", "t:1")
    assert find(instance="mine").seeds == ("unix:///mine",)
    assert find(address="tcp://h:1").seeds == ("tcp://h:1",)
    assert find().seeds == (ADDRESS,)
    monkeypatch.delenv("KVCOMM_ADDRESS")
    assert find().seeds == ("unix:///theirs",)
    monkeypatch.setenv("KVCOMM_INSTANCE", "")
    monkeypatch.setenv("KVCOMM_ADDRESS", "")
    assert find().seeds == ("unix:///default",)


def test_two_clusters_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="not by both"):
        find(address=ADDRESS, instance="mine", token="t:1")


def test_a_named_instance_that_is_not_there_is_never_replaced_by_another() -> None:
    running("default")
    with pytest.raises(InstanceMissing, match="default"):
        find(instance="other", embed=True)
    Instance.create("stopped")
    with pytest.raises(Unavailable, match="kvcomm up"):
        find(instance="stopped", embed=True)
    running("pool-only", role="pool")
    with pytest.raises(Unavailable, match="no shard"):
        find(instance="pool-only", embed=True)


def test_a_default_instance_that_is_stopped_is_passed_over() -> None:
    Instance.create("default")
    with pytest.raises(Unavailable, match="no cluster found"):
        find()


def test_where_there_is_none_one_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    stopped: list[str] = []

    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def stop(self) -> None:
            stopped.append(self.name)

    def start(name: str, config: object, deadline: float) -> Any:
        started.append(name)
        if len(started) == 1:
            running(name)
        return Fake(name)

    monkeypatch.setattr(Embedded, "start", start)
    door = find(embed=True)
    assert door.embedded is not None
    door.leave()
    assert stopped == started
    with pytest.raises(KVCommError):
        find(embed=True)  # the second one is started but cannot be found
    assert stopped == started, "it was stopped again"
    assert len(set(started)) == 2, "two embedded clusters of one process have different names"


# -- which token ---------------------------------------------------------------------------------------------


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, file = tmp_path / "c.yaml", tmp_path / "token"
    file.write_text("file:1\n")
    config.write_text(f"security: {{tenant: acme, token_file: {file}}}\n")
    running("mine")
    assert find(instance="mine", config=config).token == "file:1"
    monkeypatch.setenv("KVCOMM_TOKEN", "variable:1")
    assert find(instance="mine", config=config).token == "variable:1"
    assert find(instance="mine", config=config, token="argument:1").token == "argument:1"
    monkeypatch.delenv("KVCOMM_TOKEN")
    config.write_text("security: {tenant: acme}\n")
    assert find(instance="mine", config=config).token == CREDENTIALS.token("acme")


def test_an_address_needs_a_token() -> None:
    with pytest.raises(Unavailable, match="token"):
        find(address=ADDRESS)


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe"])
def test_a_token_file_that_cannot_be_used_is_a_mistake_in_the_configuration(
    tmp_path: Path, content: bytes | None
) -> None:
    config, file = tmp_path / "c.yaml", tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    config.write_text(f"security: {{token_file: {file}}}\n")
    with pytest.raises(ConfigError, match="token_file"):
        find(address=ADDRESS, config=config)


# -- meeting it ----------------------------------------------------------------------------------------------


class FakeShard:
    """Answers ``RingGet``: ``None`` = not yet."""

    def __init__(self, rings: list[RingMap | None]) -> None:
        self.rings = rings
        self.asked = 0

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return "", 0

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        return None

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        assert isinstance(message, RingGet)
        ring = self.rings[min(self.asked, len(self.rings) - 1)]
        self.asked += 1
        if ring is None:
            raise Unavailable("not been given a ring yet")
        reply(ring)

    def closed(self, connection: ConnectionId) -> None:
        return


RING = RingMap(1, 1, 1, 1, 1, [RingNode("shard-0", "tcp://127.0.0.1:1", "", "", "r", 1)], [])


@contextmanager
def shard(rings: list[RingMap | None], role: str = "shard") -> Iterator[tuple[FakeShard, str]]:
    service = FakeShard(rings)
    serving = Served(service, ["tcp://127.0.0.1:0"])
    serving.server.role = role
    try:
        yield service, serving.address
    finally:
        serving.close()


def test_a_cluster_that_is_being_started_is_waited_for() -> None:
    with shard([None, None, RING]) as (service, address):
        with connect_function(address=address, token=CREDENTIALS.token("t"), deadline_s=10) as kv:
            assert kv.metrics()
        assert service.asked == 3


def test_a_cluster_that_never_starts_is_not_waited_for_longer_than_asked() -> None:
    with shard([None]) as (service, address), pytest.raises(Unavailable, match="ring yet"):
        connect_function(address=address, token=CREDENTIALS.token("t"), deadline_s=0.2)
    assert service.asked >= 1


def test_a_dead_address_is_told_at_once_and_a_pool_is_no_way_in() -> None:
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="no node answers"):
        connect_function(address=dead_address(), token=CREDENTIALS.token("t"), deadline_s=60)
    with shard([RING], role="pool") as (service, address), pytest.raises(Unavailable, match="name a shard"):
        connect_function(address=address, token=CREDENTIALS.token("t"), deadline_s=60)
    assert service.asked == 0
    assert time.monotonic() - begin < 30


def test_a_wrong_token_is_not_tried_twice() -> None:
    with shard([RING]) as (service, address), pytest.raises(Unauthenticated):
        connect_function(address=address, token="t:" + "0" * 64, deadline_s=60)
    assert service.asked == 0


def test_many_threads_may_look_at_the_metrics_at_once() -> None:
    """Each look takes over the tiers' counts; an older one must not come after a newer one."""
    problems: list[BaseException] = []

    def guarded(look: Callable[[], object]) -> None:
        try:
            for _ in range(20):
                look()
        except BaseException as error:
            problems.append(error)

    with shard([RING]) as (_, address), connect_function(address=address, token=CREDENTIALS.token("t")) as kv:
        near: Any = kv._operations._blocks._l1
        stats, inside = near.stats, threading.Lock()

        def counted() -> Any:
            assert inside.acquire(blocking=False), "two looks at once"
            try:
                time.sleep(0)
                return stats()
            finally:
                inside.release()

        near.stats = counted
        lookers = [threading.Thread(target=guarded, args=(kv.metrics,)) for _ in range(4)]
        for looker in lookers:
            looker.start()
        for looker in lookers:
            looker.join()
    assert problems == []


def test_the_pools_of_the_own_rack_are_near_and_without_any_all_are() -> None:
    pools = [RingNode(f"pool-{rack}", "", "", "", f"rack-{rack}", 1) for rack in "aab"]
    ring = RingMap(1, 1, 1, 1, 1, [], pools)
    assert pools_near(ring, "rack-a") == pools[:2]
    assert pools_near(ring, "rack-c") == pools_near(ring, "") == pools
