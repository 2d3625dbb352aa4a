"""``RunningCluster``: a story on a cluster that somebody runs on this host, with all that this can cost them.

Its nodes are cut off by their drop tables (``network.drop_table: true``), paused, stopped and killed by
signals; whoever keeps them running (``kvcomm up``) starts them again.  The first shard and the first
controller are host ``n1``, and so on.  Clients use a tenant of their own.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from kvcomm.chaos.live.cluster import STARTED_WITHIN_S, Cluster, over_tcp
from kvcomm.chaos.live.loopback import Loopback
from kvcomm.chaos.live.process import END_WITHIN_S
from kvcomm.chaos.scenario import Part, Scenario
from kvcomm.errors import KVCommError, Refused, Unavailable
from kvcomm.instance import Instance, NodeRecord, process_start_time
from kvcomm.wire.messages import DropOrder

_NUMBER = re.compile(r"(\d+)$")


class RunningCluster(Cluster):
    """The instance ``name``.

    Raises:
        InstanceMissing: there is none.
        Refused: it has fewer shards than the scenario has nodes, or a node takes no drop table.
    """

    def __init__(self, scenario: Scenario, name: str, directory: Path, seed: int) -> None:
        self._name = name
        self._hurt: dict[str, NodeRecord] = {}
        """Processes that were paused, killed or stopped, as they were."""
        super().__init__(scenario, "loopback", directory, seed)

    def _open(self, kind: str) -> None:
        self.instance = Instance.open(self._name)
        count = self.scenario.nodes
        shards, controllers = self._of_role("shard"), self._of_role("controller")
        if len(shards) < count:
            raise Refused(
                f"{self.scenario.name} needs {count} nodes, and {self._name!r} has {len(shards)} shards: "
                f"write a scenario with nodes: {len(shards)} (kvcomm chaos show), or start more"
            )
        nodes = [f"n{index}" for index in range(1, count + 1)]
        self._names = {(node, "shard"): each.node for node, each in zip(nodes, shards, strict=False)}
        self._names |= {
            (node, "controller"): each.node for node, each in zip(nodes, controllers, strict=False)
        }
        self._hosts_of = {name: node for (node, _), name in self._names.items()}
        self.hosts = Loopback(count, self._endpoints, self._tell_drops)
        for each in (*shards[:count], *controllers[:count]):
            self._ask(each.addresses[0], DropOrder([]))  # refused, if it takes none: before anything is hurt
        self._ends.callback(self._end_processes)
        self._ends.callback(self._mend)

    def start(self) -> None:
        self._start_agents(time.monotonic() + STARTED_WITHIN_S)

    def missing(self, shards: int) -> list[str]:
        """Whoever runs the cluster starts them, by the controllers' plan."""
        return []

    def kill(self, node: str, part: Part) -> None:
        self.signal(node, part, signal.SIGKILL)

    def stop(self, node: str, part: Part) -> None:
        self.signal(node, part, signal.SIGTERM)
        self.signal(node, part, signal.SIGCONT)
        stopped = [self._hurt[self._names[node, role]] for role in self._roles(node, part)]
        ended = lambda: all(process_start_time(each.pid) != each.pid_start_time for each in stopped)  # noqa: E731
        self._wait(ended, time.monotonic() + END_WITHIN_S, f"{node} does not end when it is told to")

    def restart(self, node: str, part: Part) -> None:
        """Whoever runs the cluster does that; it is waited for."""

    def signal(self, node: str, part: Part, number: signal.Signals) -> None:
        for role in self._roles(node, part):
            record = self._node_record(self._names[node, role])
            if process_start_time(record.pid) != record.pid_start_time:
                continue  # it has ended by itself: the number may be another process's by now
            os.kill(record.pid, number)
            if number == signal.SIGCONT:
                self._hurt.pop(record.node, None)
                self._paused.discard((node, role))
            else:
                self._hurt[record.node] = record
                if number == signal.SIGSTOP:
                    self._paused.add((node, role))

    def _pids(self, node: str, part: Part) -> list[int]:
        records = [self._node_record(self._names[node, role]) for role in self._roles(node, part)]
        return [each.pid for each in records if process_start_time(each.pid) == each.pid_start_time]

    def await_back(self, node: str, part: Part) -> str:
        names = [self._names[node, role] for role in self._roles(node, part)]
        before = {name: self._hurt[name].pid for name in names if name in self._hurt}

        def back() -> bool:
            living = {each.node: each.pid for each in self._records()}
            return all(living.get(name, pid) != pid for name, pid in before.items())

        self._wait(back, time.monotonic() + STARTED_WITHIN_S, f"nobody has started {node} again")
        for name in names:
            self._hurt.pop(name, None)
        self.hosts.repeat(self.nodes)  # type: ignore[attr-defined]
        return self.shard_addresses().get(self._names.get((node, "shard"), ""), "")

    def name(self, node: str, role: str) -> str:
        return self._names[node, role]

    def host_of(self, name: str) -> str:
        """A node that the scenario does not name is with the last one."""
        return self._hosts_of.get(name, self.nodes[-1])

    def controller_addresses(self) -> list[str]:
        return [over_tcp(each) for each in self._of_role("controller")]

    def controller_address(self, name: str) -> str:
        return next((over_tcp(each) for each in self._of_role("controller") if each.node == name), "")

    def _roles(self, node: str, part: Part) -> list[str]:
        wanted = ("shard", "controller") if part == "all" else (part,)
        return [role for role in wanted if (node, role) in self._names]

    def _of_role(self, role: str) -> list[NodeRecord]:
        return sorted((each for each in self._records() if each.role == role), key=_number)

    def _node_record(self, name: str) -> NodeRecord:
        found = [each for each in self._records() if each.node == name]
        if not found:
            raise Unavailable(f"{name} is not running")
        return found[0]

    def _mend(self) -> None:
        """Whatever happened, nothing stays cut or paused."""
        for record in self._hurt.values():
            if process_start_time(record.pid) == record.pid_start_time:
                os.kill(record.pid, signal.SIGCONT)
        self._paused.clear()
        troubles: list[str] = []
        for each in self._records():
            if each.role in ("shard", "controller"):
                try:
                    self._ask(each.addresses[0], DropOrder([]))
                except KVCommError as error:
                    troubles.append(f"{each.node}: {error.message}")
        if troubles:
            raise Unavailable(f"these may still be cut off; restart them: {'; '.join(troubles)}")


def _number(record: NodeRecord) -> tuple[int, str]:
    found = _NUMBER.search(record.node)
    return (int(found[1]) if found else 0, record.node)
