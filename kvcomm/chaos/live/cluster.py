"""``Cluster``: the service's own processes on the hosts of a story, and the clients of each host.

Host ``n1`` has ``shard-0`` and, if the scenario has controllers for it, ``controller-0``, and so on.  Each
process is started with a configuration of its host, as an operator of several machines would.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from kvcomm.block import Incarnation
from kvcomm.chaos.live.loopback import Endpoint, Loopback
from kvcomm.chaos.live.namespaces import Namespaces
from kvcomm.chaos.live.orders import AnyAnswer, AnyOrder, Drop, Setup
from kvcomm.chaos.live.process import Agent, Process
from kvcomm.chaos.live.quotas import Quotas
from kvcomm.chaos.measures import REQUEST_TIMEOUT_S
from kvcomm.chaos.scenario import Part, Scenario, Step
from kvcomm.chaos.shapes import Cut
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.instance import Instance, NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import DropOrder, DropPeer, Message

CONTROLLER_PORT = 7400
INSTANCE = "chaos"
"""Begin of the names of clusters that are made for a story; the number of its process follows."""
TENANT = "chaos"
"""Of the clients: in a cluster of somebody's nobody else's records are touched."""
STARTED_WITHIN_S = 60.0
CONNECT_TIMEOUT_S = 0.5

_OURS = re.compile(rf"{INSTANCE}-(\d+)-[0-9a-f]+")
_CONFIG = """
cache: {{l1_size: 4MiB, l3_size: 48MiB}}
network:
  listen_host: {address}
  local_sockets: false
  drop_table: {drop_table}
  request_timeout: {request_timeout_ms}ms
  connect_timeout: 500ms
cluster:
  shards: {shards}
  pools: 0
  replicas: {replicas}
  read_quorum: {read_quorum}
  block_copies: {block_copies}
  repair_interval: 1s
  controllers: {controllers}
  controller_addresses: {controller_addresses}
storage: {{directory: {storage}}}
"""


class Hosts(Protocol):
    """Machines and the network between them."""

    kind: str
    nodes: list[str]
    able: frozenset[type[Step]]
    """Kinds of steps that only some networks can do, and this one can."""

    def address(self, node: str) -> str: ...

    def command(self, node: str, command: Sequence[str]) -> list[str]: ...

    def cut(self, cuts: Iterable[Cut]) -> None: ...

    def lose(self, percent: float) -> None: ...

    def slow(self, node: str, kbit_s: int) -> None: ...

    def heal(self) -> None: ...

    def close(self) -> None: ...


class Cluster:
    """Everything of one story.  ``close`` ends every process and removes every file, in any state.

    Args:
        kind: ``namespaces`` or ``loopback``.
        directory: for logs, histories and storage; the caller removes it.

    Raises:
        Unavailable: it did not come up; nothing is left running.
    """

    def __init__(self, scenario: Scenario, kind: str, directory: Path, seed: int) -> None:
        self.scenario, self.directory = scenario, directory
        self._seed = seed
        self._ends = ExitStack()
        self._processes: dict[tuple[str, str], Process] = {}
        """By host and role."""
        self.agents: dict[str, Agent] = {}
        self._quotas = Quotas()
        self._ends.callback(self._quotas.close)
        self._paused: set[tuple[str, str]] = set()
        self._ports: dict[str, int] = {}
        """Of controllers whose hosts share an address."""
        try:
            self._open(kind)
        except BaseException:
            self.close()
            raise

    def _open(self, kind: str) -> None:
        _sweep()
        self.instance = Instance.create(f"{INSTANCE}-{os.getpid()}-{secrets.token_hex(4)}")
        self._ends.callback(self._remove_instance)
        self.hosts: Hosts = (
            Namespaces(self.scenario.nodes)
            if kind == "namespaces"
            else Loopback(self.scenario.nodes, self._endpoints, self._tell_drops)
        )
        self._ends.callback(self.hosts.close)
        self._ends.callback(self._end_processes)
        for node in self.hosts.nodes:
            self._write_config(node)

    def close(self) -> None:
        self._ends.close()

    # -- the processes

    def start(self) -> None:
        """Start controllers, the first shards, and the clients; wait for a ring.

        Raises:
            Unavailable: not in time; the message has the last words of what ended.
        """
        deadline = time.monotonic() + STARTED_WITHIN_S
        for node in self.nodes[: self.scenario.controllers]:
            self.spawn(node, "controller")
        first = self.nodes[: self.scenario.shards or self.scenario.nodes]
        for node in first:
            self.spawn(node, "shard")
        self._wait(lambda: {*first} <= self._serving(), deadline, "the shards do not start")
        self._start_agents(deadline)

    def spawn(self, node: str, role: str) -> None:
        """Start a host's shard or controller.  Over what is on its disk, if it has been there before."""
        name = self.name(node, role)
        arguments = ["--node", name, "--instance", self.instance.name, "--config", str(self._config(node))]
        command = [sys.executable, "-m", "kvcomm.cli", role, *arguments, "--lifeline"]
        self._processes[node, role] = self._process(f"{name}", node, command)

    def missing(self, shards: int) -> list[str]:
        """Hosts that have no shard yet, of the first so many."""
        return [node for node in self.nodes[:shards] if (node, "shard") not in self._processes]

    def launch(self, nodes: Sequence[str]) -> None:
        """Start shards on these hosts, as a launcher does beside others that serve: one after the other.  The
        controllers take those in that they order, by these names.

        Raises:
            Unavailable: one does not come up.
        """
        for node in nodes:
            self.spawn(node, "shard")
            self.await_back(node, "shard")

    def kill(self, node: str, part: Part) -> None:
        for process in self._chosen(node, part):
            process.kill()

    def stop(self, node: str, part: Part) -> None:
        for process in self._chosen(node, part):
            process.stop()

    def restart(self, node: str, part: Part) -> None:
        for role in self._roles(node, part):
            process = self._processes[node, role]
            if not process.alive:
                process.end()
                self.spawn(node, role)

    def signal(self, node: str, part: Part, number: signal.Signals) -> None:
        for role in self._roles(node, part):
            self._processes[node, role].signal(number)
            (self._paused.add if number == signal.SIGSTOP else self._paused.discard)((node, role))

    def throttle(self, node: str, part: Part, percent: float | None) -> None:
        """Give the processes of a part ``percent`` of one core together; ``None`` = all that there is."""
        group = f"{node}-{part}"
        if percent is None:
            self._quotas.lift(group)
        else:
            self._quotas.limit(group, self._pids(node, part), percent)

    def await_back(self, node: str, part: Part) -> str:
        """Wait until a host's restarted processes serve; the address of its shard, "" if it has none.

        Raises:
            Unavailable: they do not, in time.
        """
        names = {self.name(node, role) for role in self._roles(node, part)}
        deadline, those = time.monotonic() + STARTED_WITHIN_S, self._chosen(node, part)
        there = lambda: names <= {each.node for each in self._records()}  # noqa: E731
        self._wait(there, deadline, f"{node} is not back", those)
        if isinstance(self.hosts, Loopback):
            self.hosts.repeat(self.nodes)  # it knows nothing of the cuts that stand
        return self.shard_addresses().get(self.name(node, "shard"), "")

    # -- what they are called

    @property
    def nodes(self) -> list[str]:
        return self.hosts.nodes

    def name(self, node: str, role: str) -> str:
        """Of a host's process in the cluster."""
        return f"{role}-{self.nodes.index(node)}"

    def host_of(self, name: str) -> str:
        """The inverse."""
        return self.nodes[int(name.rpartition("-")[2])]

    def controller_addresses(self) -> list[str]:
        """Those that are configured, the first host's first."""
        return [
            f"tcp://{self.hosts.address(node)}:{self._controller_port(node)}"
            for node in self.nodes[: self.scenario.controllers]
        ]

    def controller_address(self, name: str) -> str:
        """Of one of them, by its name in the cluster; "" = it is not known."""
        return dict(
            zip(
                (self.name(node, "controller") for node in self.nodes),
                self.controller_addresses(),
                strict=False,
            )
        ).get(name, "")

    def shard_addresses(self) -> dict[str, str]:
        """Of the living shards, by name."""
        return {each.node: over_tcp(each) for each in self._records() if each.role == "shard"}

    def _controller_port(self, node: str) -> int:
        """Hosts that share an address have different ports."""
        if self.hosts.kind == "namespaces":
            return CONTROLLER_PORT
        return self._ports.setdefault(node, _free_port(self.hosts.address(node)))

    # -- the clients

    def everybody(self, order: AnyOrder, within_s: float = 30.0) -> dict[str, AnyAnswer]:
        """Have all agents do the same at the same time; their answers by host."""
        for agent in self.agents.values():
            agent.tell(order)
        return {node: agent.answer(within_s) for node, agent in self.agents.items()}

    def _start_agents(self, deadline: float) -> None:
        credentials = self.instance.credentials()
        addresses = self.shard_addresses()
        controllers = self.controller_addresses()
        for index, node in enumerate(self.nodes):
            mine = addresses.get(self.name(node, "shard"))
            seeds = ([mine] if mine else []) + [each for each in addresses.values() if each != mine]
            process = self._process(
                f"clients-{node}", node, [sys.executable, "-m", "kvcomm.chaos.live.agent"], speaks=True
            )
            own = controllers[index : index + 1]
            agent = self.agents[node] = Agent(node, process)
            agent.tell(
                Setup(
                    node, index, seeds, own + [each for each in controllers if each not in own],
                    credentials.token(TENANT), credentials.token(NODE_TENANT),
                    self.scenario.load, self._seed, REQUEST_TIMEOUT_S, CONNECT_TIMEOUT_S,
                    max(1.0, deadline - time.monotonic()),
                    str(self.history_path(node)), str(self.samples_path(node)),
                )
            )  # fmt: skip
        for agent in self.agents.values():
            agent.answer(max(1.0, deadline - time.monotonic()) + 1.0)

    def history_path(self, node: str) -> Path:
        return self.directory / f"history-{node}.jsonl"

    def samples_path(self, node: str) -> Path:
        return self.directory / f"samples-{node}.jsonl"

    # -- inside

    def _roles(self, node: str, part: Part) -> list[str]:
        wanted = ("shard", "controller") if part == "all" else (part,)
        return [role for role in wanted if (node, role) in self._processes]

    def _chosen(self, node: str, part: Part) -> list[Process]:
        return [self._processes[node, role] for role in self._roles(node, part)]

    def _pids(self, node: str, part: Part) -> list[int]:
        return [process.pid for process in self._chosen(node, part) if process.alive]

    def _process(self, name: str, node: str, command: Sequence[str], *, speaks: bool = False) -> Process:
        variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        log = self.directory / f"{name}.log"
        return Process(name, self.hosts.command(node, command), log, variables, speaks=speaks)

    def _config(self, node: str) -> Path:
        return self.directory / f"{node}.yaml"

    def _write_config(self, node: str) -> None:
        scenario = self.scenario
        shards = scenario.shards or scenario.nodes
        replicas = min(scenario.replicas, shards)
        self._config(node).write_text(
            _CONFIG.format(
                address=self.hosts.address(node),
                request_timeout_ms=round(1000 * REQUEST_TIMEOUT_S),
                drop_table="true" if self.hosts.kind == "loopback" else "false",
                shards=shards,
                replicas=replicas,
                read_quorum=replicas // 2 + 1,
                block_copies=min(2, shards),
                controllers=scenario.controllers,
                controller_addresses=f"[{', '.join(self.controller_addresses())}]",
                storage=self.directory / "storage",
            )
        )

    def _records(self) -> list[NodeRecord]:
        return self.instance.nodes()

    def _serving(self) -> set[str]:
        """Hosts whose shard is registered."""
        return {self.host_of(each.node) for each in self._records() if each.role == "shard"}

    def _wait(
        self, look: Callable[[], bool], deadline: float, what: str, those: Sequence[Process] | None = None
    ) -> None:
        """Until it is so, ``deadline``, or one of ``those`` processes (``None`` = any) has ended."""
        those = list(self._processes.values()) if those is None else those
        while not look():
            ended = [each for each in those if not each.alive]
            if ended or time.monotonic() > deadline:
                words = "; ".join(f"{each.name}: {each.last_words()}" for each in ended)
                raise Unavailable(f"{what}{': ' + words if words else ' in time'}")
            time.sleep(0.02)

    def _endpoints(self) -> Mapping[str, Sequence[Endpoint]]:
        found: dict[str, list[Endpoint]] = {node: [] for node in self.nodes}
        for each in self._records():
            found[self.host_of(each.node)].append(Endpoint(tuple(each.addresses), each.incarnation))
        return found

    def _tell_drops(self, node: str, peers: Sequence[DropPeer]) -> None:
        if node in self.agents:
            self.agents[node].ask(Drop(list(peers)))
        for each in self._records():
            role = each.role
            if self.host_of(each.node) == node and (node, role) not in self._paused:
                with suppress(Unavailable):  # it has just been killed: there is nobody to tell
                    self._ask(each.addresses[0], DropOrder(list(peers)))

    def _ask(self, address: str, message: Message, within_s: float = 2.0) -> Message:
        """From the machine itself: of loopback only."""
        identity = Identity(self.instance.credentials().token(NODE_TENANT), Incarnation(3))
        deadline = time.monotonic() + within_s
        connection = Connection.open(address, identity, deadline)
        try:
            return connection.call(message, deadline=deadline).message
        finally:
            connection.close()

    def _end_processes(self) -> None:
        everything = [*self._processes.values(), *(agent.process for agent in self.agents.values())]
        for process in everything:
            process.ask_to_end()
        for agent in self.agents.values():
            agent.end()
        for process in everything:
            process.end()

    def _remove_instance(self) -> None:
        """With the memory that killed shards left behind."""
        plain = "".join(each if each.isalnum() else "_" for each in self.instance.name)
        for path in Path("/dev/shm").glob(f"kvcomm-{plain}-*"):
            path.unlink(missing_ok=True)
        with suppress(KVCommError):
            self.instance.remove()


def over_tcp(node: NodeRecord) -> str:
    """A node's address for callers of other hosts; a drop table is told all of them."""
    return next((each for each in node.addresses if each.startswith("tcp:")), node.addresses[0])


def _free_port(host: str) -> int:
    """Nobody listens there now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _sweep() -> None:
    """Remove the clusters of stories whose process is gone."""
    for instance in Instance.list():
        found = _OURS.fullmatch(instance.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            for each in instance.nodes():
                with suppress(ProcessLookupError):  # one that stands still ends now, its input is closed
                    os.kill(each.pid, signal.SIGCONT)
            with suppress(KVCommError):  # some of its nodes are still on their way out
                instance.remove()
