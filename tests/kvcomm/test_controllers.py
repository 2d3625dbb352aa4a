"""Where controllers are found."""

from __future__ import annotations

import os
from pathlib import Path

from kvcomm.config import Config, parse_config
from kvcomm.controllers import LOOK_S, Controllers
from kvcomm.instance import Instance, NodeRecord, process_start_time


def settings(text: str) -> Config:
    return parse_config(text, ram_bytes=1 << 30)


def record(node: str, address: str) -> NodeRecord:
    start_time = process_start_time(os.getpid())
    assert start_time is not None
    return NodeRecord(
        node=node, role="controller", pid=os.getpid(), pid_start_time=start_time, addresses=[address],
        control="", metrics="", incarnation=1, region="",
    )  # fmt: skip


def test_on_one_host_each_has_a_socket_of_its_name(runtime_dir: Path) -> None:
    instance = Instance.create("one")
    controllers = Controllers(instance, settings("cluster: {controllers: 3}"))
    assert controllers.names == ["controller-0", "controller-1", "controller-2"]
    assert controllers.locate("controller-2") == f"unix://{instance.socket_path('controller-2')}"


def test_what_the_configuration_names_goes_before(runtime_dir: Path) -> None:
    addresses = "[tcp://10.0.0.1:7400, tcp://10.0.0.2:7400, tcp://10.0.0.3:7400]"
    text = f"cluster: {{controllers: 3, controller_addresses: {addresses}}}"
    controllers = Controllers(Instance.create("many"), settings(text))
    assert controllers.locate("controller-1") == "tcp://10.0.0.2:7400"
    assert list(controllers.configured) == controllers.names


def test_without_sockets_they_are_looked_up_and_may_have_moved(runtime_dir: Path) -> None:
    instance, now = Instance.create("tcp"), [0.0]
    text = "network: {local_sockets: false}"
    controllers = Controllers(instance, settings(text), clock=lambda: now[0])
    nobody = controllers.locate("controller-0")
    assert nobody.startswith("unix://"), "nobody answers there"
    instance.register(record("controller-0", "tcp://127.0.0.1:1"))
    now[0] += LOOK_S
    assert controllers.locate("controller-0") == "tcp://127.0.0.1:1"
    instance.register(record("controller-0", "tcp://127.0.0.1:2"))
    assert controllers.locate("controller-0") == "tcp://127.0.0.1:1", "believed for a moment"
    now[0] += LOOK_S
    assert controllers.locate("controller-0") == "tcp://127.0.0.1:2"
