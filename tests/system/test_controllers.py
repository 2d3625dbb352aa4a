"""Three controllers of a cluster of real processes, killed, paused and robbed of their disks, while clients
read and write: no call of theirs may notice.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcomm.block import Incarnation
from kvcomm.client import Client
from kvcomm.credentials import NODE_TENANT
from kvcomm.embedded import Embedded
from kvcomm.errors import KVCommError
from kvcomm.instance import Instance, NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import ClusterGet, ClusterView, RingMap
from tests.system.conftest import Cluster, eventually, metric

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONTROLLERS = ("controller-0", "controller-1", "controller-2")
CONFIG = """
cache: {l1_size: 8MiB, l3_size: 32MiB}
network: {request_timeout: 1s}
cluster: {shards: 3, pools: 0, controllers: 3, lease: 1500ms, heartbeat: 300ms}
storage: {fsync: interval}
"""


class Group(Cluster):
    """A cluster, seen from its controllers."""

    def records(self) -> list[NodeRecord]:
        return [node for node in self.instance.nodes() if node.role == "controller"]

    def view(self, record: NodeRecord) -> ClusterView | None:
        identity = Identity(self.instance.credentials().token(NODE_TENANT), Incarnation(5))
        try:
            connection = Connection.open(record.addresses[0], identity, time.monotonic() + 1.0)
            try:
                answer = connection.call(ClusterGet(), deadline=time.monotonic() + 1.0).message
            finally:
                connection.close()
        except KVCommError:
            return None
        assert isinstance(answer, ClusterView)
        return answer

    def leading(self) -> NodeRecord | None:
        """The controller that says that it leads, if one does."""
        for record in self.records():
            view = self.view(record)
            if view is not None and view.leader == record.node:
                return record
        return None

    def leader(self) -> NodeRecord:
        found: NodeRecord | None = eventually(self.leading)
        assert found is not None
        return found

    def led_view(self) -> ClusterView:
        found = eventually(lambda: self.view(self.leader()))
        assert found is not None
        return found

    def whole(self) -> bool:
        """Every controller is there and votes, one leads, and every shard works by its map."""
        if len(self.records()) < len(CONTROLLERS) or self.leading() is None:
            return False
        try:
            votes = all(
                metric(record, f"kvcomm_{'strong' if record.role == 'shard' else 'controller'}_votes")
                for record in self.instance.nodes()
            )
        except OSError:
            return False
        view = self.led_view()
        if view.ring is None:
            return False
        epochs = {node.node: node.epoch for node in view.nodes if node.state == "alive"}
        return votes and all(epochs.get(shard.node, 0) == view.ring.epoch for shard in view.ring.shards)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    config = tmp_path_factory.mktemp("config") / "kvcomm.yaml"
    config.write_text(CONFIG)
    name = f"g{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Group(Instance.open(name), config)
    finally:
        embedded.stop()


@pytest.fixture
def group(running: Group) -> Iterator[Group]:
    """Whole before and after each test."""
    eventually(running.whole)
    yield running
    eventually(running.whole)


@contextmanager
def traffic(group: Group) -> Iterator[None]:
    """Reads and writes of both kinds of records go on; fails if one of them did."""
    failures: list[str] = []
    enough = threading.Event()
    count = 0

    def work(kv: Client) -> None:
        nonlocal count
        state, strong, k = kv.state("traffic"), kv.strong("traffic"), f"{time.monotonic_ns()}"
        while not enough.wait(0.01):
            try:
                state.put(k, b"%d" % count)
                strong.put(k, b"%d" % count)
                assert state.get(k).value == strong.read(k).value == b"%d" % count
                count += 1
            except Exception as error:
                failures.append(f"call {count}: {error!r}")
                return

    with group.client() as kv:
        thread = threading.Thread(target=work, args=(kv,))
        thread.start()
        eventually(lambda: count or failures)
        try:
            before = count
            yield
            eventually(lambda: count > before or failures)
        finally:
            enough.set()
            thread.join()
    assert not failures


@contextmanager
def no_restarts(group: Group) -> Iterator[None]:
    """The launcher stands still."""
    pid = group.records()[0].pid
    launcher = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(launcher, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(launcher, signal.SIGCONT)


def end(group: Group, *nodes: str) -> None:
    """Kill them, and wait until they are gone."""
    for node in nodes:
        group.kill(node, signal.SIGKILL)
    eventually(lambda: not {record.node for record in group.records()} & set(nodes))


def directory(group: Group, node: str) -> Path:
    return group.instance.directory / "data" / node


def test_another_controller_leads_when_the_leader_is_killed(group: Group) -> None:
    old, before = group.leader(), group.led_view()
    with traffic(group), no_restarts(group):
        end(group, old.node)
        killed_at = time.monotonic()
        new = group.leader()
        assert new.node != old.node
        assert time.monotonic() - killed_at < 10.0
        view = group.led_view()
        assert view.term > before.term
        assert view.ring == before.ring, "nothing has changed, so there is no new map"


def test_fault_23_a_paused_leader_is_followed_by_another_and_does_nothing_when_it_goes_on(
    group: Group,
) -> None:
    old, before = group.leader(), group.led_view()
    with traffic(group):
        group.kill(old.node, signal.SIGSTOP)
        try:
            new = group.leader()
            assert new.node != old.node
            term = group.led_view().term
            assert term > before.term
        finally:
            group.kill(old.node, signal.SIGCONT)
        eventually(lambda: metric(old, "kvcomm_controller_term") == 0)

        def follows() -> bool:
            view = group.view(old)
            return view is not None and (view.leader, view.term) == (new.node, term)

        eventually(follows)
        assert group.leader().node == new.node


def test_a_controller_that_lost_its_disk_is_told_by_the_others(group: Group) -> None:
    before, old = group.led_view(), group.leader()
    lost = next(node for node in CONTROLLERS if node != old.node)
    with traffic(group):
        with no_restarts(group):
            end(group, lost)
            shutil.rmtree(directory(group, lost))
        eventually(group.whole)
    after = group.led_view()
    assert after.ring == before.ring
    assert after.leader == old.node


def test_with_all_controllers_disks_lost_everything_is_known_again(group: Group) -> None:
    before = group.led_view()
    assert before.ring is not None
    with traffic(group):
        with no_restarts(group):
            end(group, *CONTROLLERS)
            for node in CONTROLLERS:
                shutil.rmtree(directory(group, node))
        epoch = before.ring.epoch

        def issued() -> RingMap | None:
            """A new leader tells what the shards work by until it has noted a map of its own."""
            ring = group.led_view().ring
            return ring if ring is not None and ring.epoch > epoch else None

        ring = eventually(issued)  # epochs go on above all that were ever seen
        eventually(group.whole)
    assert ring is not None and ring.shards == before.ring.shards


def test_fault_25_without_most_controllers_reads_and_writes_go_on_and_nothing_changes(group: Group) -> None:
    before = group.led_view()
    with traffic(group):
        with no_restarts(group):
            left = next(node for node in CONTROLLERS if node != before.leader)
            end(group, *(node for node in CONTROLLERS if node != left))
            alone = group.node(left)
            with pytest.raises(AssertionError, match="in time"):
                eventually(group.leading, within_s=4.0)
            view = group.view(alone)
            assert view is not None and view.mode == "leaderless" and view.ring == before.ring
        eventually(group.whole)
    assert group.led_view().ring == before.ring
