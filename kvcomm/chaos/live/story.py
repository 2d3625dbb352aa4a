"""``tell``: one scenario on real processes, from their start to the report."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvcomm.chaos.eventual import Ending, Replica
from kvcomm.chaos.history import History, Invoked, Line
from kvcomm.chaos.keys import eventual_keys
from kvcomm.chaos.live.cluster import Cluster
from kvcomm.chaos.live.orders import Begin, Done, End, Look, Phase, Save, States, Stored, Told
from kvcomm.chaos.live.running import RunningCluster
from kvcomm.chaos.measures import measure
from kvcomm.chaos.observed import Episode, Mark, Observed, Sample, episode_of
from kvcomm.chaos.registers import KINDS
from kvcomm.chaos.report import Report, broken_off, report_of, skipped
from kvcomm.chaos.scenario import (
    LEADER,
    OPERATION_STEPS,
    AnyStep,
    ControllerOrder,
    Cut,
    Drain,
    Heal,
    Kill,
    Loss,
    Move,
    OperationStep,
    Part,
    Pause,
    Restart,
    Resume,
    Scale,
    Scenario,
    Slow,
    Stop,
    Throttle,
    Unthrottle,
    resolved,
)
from kvcomm.chaos.shapes import Cut as Direction
from kvcomm.chaos.shapes import cuts_of
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.wire.messages import ClusterView, OrderAnswer, RecordState

FOLDER = "kvcomm-chaos"
EQUAL_EVERY_S = 0.1
BEFORE, DURING, AFTER = range(3)
"""Phases: before the first fault, until all is healed, and after that."""
LEADER_WITHIN_S = 15.0
ORDER_WITHIN_S = 60.0
RING_WITHIN_S = 30.0
SEEN_WITHIN_S = 15.0
"""By then every shard has told what it keeps at last."""
ENDED = ("done", "cancelled", "rolled back", "failed")
"""Last steps of an operation."""
POINT_MAX = (1 << 64) - 1
"""Of the circle that keys lie on."""

Listener = Callable[[str], None]


def tell(
    scenario: Scenario,
    backend: str,
    seed: int,
    heard: Listener = lambda line: None,
    keep: Path | None = None,
    instance: str | None = None,
) -> Report:
    """Run ``scenario`` and judge it.

    Args:
        backend: ``namespaces`` or ``loopback``.
        heard: told what is being done.
        keep: where to leave logs and histories; ``None`` = nowhere.
        instance: the cluster to hurt, in place of one of its own; by drop tables.
    """
    if why := unable(scenario, backend):
        return skipped(scenario, backend, seed, why)
    _sweep()
    directory = Path(tempfile.mkdtemp(prefix=f"{FOLDER}-{os.getpid()}-"))
    try:
        cluster = (
            Cluster(scenario, backend, directory, seed)
            if instance is None
            else RunningCluster(scenario, instance, directory, seed)
        )
        try:
            observed = _Story(cluster, scenario, heard).tell()
        finally:
            cluster.close()
            if keep is not None:
                shutil.copytree(directory, keep, dirs_exist_ok=True, ignore=_not_storage)
    except KVCommError as error:
        return broken_off(scenario, backend, seed, f"{error.code}: {error.message}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    heard("judging")
    return report_of(scenario, backend, seed, observed, measure(scenario, observed))


def unable(scenario: Scenario, backend: str) -> str:
    """Why ``scenario`` cannot be run there; empty = it can."""
    from kvcomm.chaos.live import namespaces, quotas
    from kvcomm.chaos.live.loopback import Loopback

    if scenario.skipped:
        return scenario.skipped
    if backend == "namespaces" and (why := namespaces.missing()):
        return why
    able = namespaces.Namespaces.able if backend == "namespaces" else Loopback.able
    needs = {type(step) for step in scenario.steps if isinstance(step, Loss | Slow)} - able
    if needs:
        names = " and ".join(sorted(kind.__name__.lower() for kind in needs))
        return f"{backend} cannot make {names}; run it in namespaces"
    return quotas.missing() if any(isinstance(step, Throttle) for step in scenario.steps) else ""


def _sweep() -> None:
    """Remove the folders of stories whose process is gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}-*-*"):
        pid = left.name.removeprefix(f"{FOLDER}-").partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _not_storage(directory: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name == "storage"]


class _Story:
    def __init__(self, cluster: Cluster, scenario: Scenario, heard: Listener) -> None:
        self._cluster, self._scenario, self._heard = cluster, scenario, heard
        self._marks: list[Mark] = []
        self._episodes: list[Episode] = []
        self._broken: dict[str, frozenset[Direction]] = {}
        """What is broken at present, and what it cuts."""
        self._since = 0.0
        self._equal_at: float | None = None
        self._healed_at: float | None = None
        self._unequal: list[str] = []
        """What stood against it when it was looked at last."""
        self._begin = 0.0
        self._leader_then: dict[Part, str] = {}
        """Whoever it was when it was hurt, by what was hurt of it: that comes back."""
        self._open: set[int] = set()
        """Orders that are being carried out."""
        self._late_s = 0.0
        """What follows something that had to be waited for is done so much later than it says."""
        self._taken = self._done = self._undone = self._refused = 0

    def tell(self) -> Observed:
        cluster, scenario = self._cluster, self._scenario
        self._heard(f"starting {scenario.nodes} nodes ({cluster.hosts.kind})")
        cluster.start()
        cluster.everybody(Begin())
        self._begin = time.monotonic()
        last = _last_heal(scenario)
        for number, step in enumerate(scenario.steps):
            self._wait_until(self._begin + step.at_s + self._late_s)
            if number == last:
                cluster.everybody(Phase(AFTER))
            self._do(step)
            if isinstance(step, Restart | ControllerOrder) or (isinstance(step, Kill) and step.when):
                self._late_s = max(self._late_s, time.monotonic() - self._begin - step.at_s)
            if number == last:
                self._healed_at = time.monotonic()
        self._wait_until(self._begin + scenario.end_s + self._late_s)
        cluster.everybody(End(), scenario.load.deadline_s + 30.0)
        end = time.monotonic()
        self._mend()
        if self._healed_at is None and last is None:
            self._healed_at = end
        return self._look(end)

    # -- the steps

    def _do(self, step: AnyStep) -> None:
        cluster, what = self._cluster, type(step).__name__.lower()
        node = self._node(step)
        match step:
            case Cut():
                leader = self._leader() if any(LEADER in group for group in step.groups) else ""
                groups = resolved(step.groups, leader)
                cuts = cuts_of(step.shape, groups, cluster.nodes)
                what = f"cut {step.shape} {' | '.join(' '.join(group) for group in groups)}".strip()
                self._change("fault", what, lambda: cluster.hosts.cut(cuts), {"cut": cuts})
            case Heal():
                gone = [each for each in self._broken if each == "cut" or each.startswith(("loss", "slow"))]
                self._change("heal", what, cluster.hosts.heal, {}, gone)
            case Loss():
                what = f"loss {step.percent:g} %"
                self._change("fault", what, lambda: cluster.hosts.lose(step.percent), {"loss": frozenset()})
            case Slow():
                what = f"slow {node} to {step.kbit_s} kbit/s"
                change = {f"slow {node}": frozenset[Direction]()}
                self._change("fault", what, lambda: cluster.hosts.slow(node, step.kbit_s), change)
            case Pause():
                broken = {f"down {node} {step.part}": frozenset[Direction]()}
                stop = lambda: cluster.signal(node, step.part, signal.SIGSTOP)  # noqa: E731
                self._change("fault", f"pause {node} {step.part}", stop, broken)
            case Resume():
                go_on = lambda: cluster.signal(node, step.part, signal.SIGCONT)  # noqa: E731
                self._change("heal", f"resume {node} {step.part}", go_on, {}, [f"down {node} {step.part}"])
            case Kill():
                what = f"kill {node} {step.part}{self._await_step(step.when)}"
                kill = lambda: cluster.kill(node, step.part)  # noqa: E731
                self._change("fault", what, kill, {f"down {node} {step.part}": frozenset[Direction]()})
            case Stop():
                stop = lambda: cluster.stop(node, step.part)  # noqa: E731
                broken = {f"down {node} {step.part}": frozenset()}
                self._change("fault", f"stop {node} {step.part}", stop, broken)
            case Throttle():
                what = f"throttle {node} {step.part} to {step.percent:g} %"
                limit = lambda: cluster.throttle(node, step.part, step.percent)  # noqa: E731
                self._change("fault", what, limit, {f"throttled {node} {step.part}": frozenset()})
            case Unthrottle():
                free = lambda: cluster.throttle(node, step.part, None)  # noqa: E731
                what = f"unthrottle {node} {step.part}"
                self._change("heal", what, free, {}, [f"throttled {node} {step.part}"])
            case Restart():
                again = lambda: self._restart(node, step.part)  # noqa: E731
                self._change("heal", f"restart {node} {step.part}", again, {}, [f"down {node} {step.part}"])
            case Scale() | Move() | Drain():
                self._order(step)
        self._heard(f"{time.monotonic() - self._begin:6.2f} s: {self._marks[-1].what}")

    def _restart(self, node: str, part: Part) -> None:
        """It is broken until it serves again, and the others know where: a restart may change its address."""
        cluster, begin = self._cluster, time.monotonic()
        cluster.restart(node, part)
        address = cluster.await_back(node, part)
        while address and part != "controller" and time.monotonic() < begin + RING_WITHIN_S:
            try:
                ring = self._view().ring
            except Unavailable:
                ring = None  # the controllers are on their way back as well
            if ring is not None and any(shard.address == address for shard in ring.shards):
                break
            time.sleep(0.05)

    def _order(self, step: Scale | Move | Drain) -> None:
        """Give an operator's order to the controllers."""
        cluster = self._cluster
        deadline = time.monotonic() + ORDER_WITHIN_S
        while step.waits and self._open and time.monotonic() < deadline:
            self._follow_orders()
            time.sleep(0.1)
        if isinstance(step, Scale) and (missing := cluster.missing(step.shards)):
            self._marks.append(Mark(time.monotonic(), f"start shards on {' '.join(missing)}", "order"))
            cluster.launch(missing)
        name, fields, what = self._message(step)
        answer = self._tell_controllers(name, fields, ORDER_WITHIN_S)
        if answer.refused:
            self._refused += 1
            what += f": {answer.text}"
        else:
            if number := msgspec.json.decode(answer.text, type=OrderAnswer).operation:
                self._taken += 1
                self._open.add(number)
        self._marks.append(Mark(time.monotonic(), what, "order"))

    def _await_step(self, wanted: OperationStep | None) -> str:
        """Until what was ordered is so far; which step it is at then."""
        deadline = time.monotonic() + ORDER_WITHIN_S
        while wanted is not None and self._open:
            with suppress(Unavailable):
                for each in self._view().operations:
                    reached = each.step not in OPERATION_STEPS or (
                        OPERATION_STEPS.index(each.step) >= OPERATION_STEPS.index(wanted)
                    )
                    if each.operation in self._open and reached:
                        return f" while {each.step}"
            if time.monotonic() > deadline:
                raise Unavailable(f"no order came as far as {wanted}")
        return ""

    def _message(self, step: Scale | Move | Drain) -> tuple[str, dict[str, Any], str]:
        """(name of the message, its fields, the order in words)."""
        if isinstance(step, Scale):
            return "ScaleOrder", {"shards": step.shards}, f"scale to {step.shards}"
        node = self._node(step)
        shard = self._cluster.name(node, "shard")
        if isinstance(step, Drain):
            return "DrainOrder", {"node": shard}, f"drain {node}"
        first, last = (int(share * POINT_MAX) for share in (step.first_share, step.last_share))
        fields = {"first": first, "last": min(last, POINT_MAX), "node": shard}
        return (
            "MoveOrder",
            fields,
            f"move {step.first_share:g} to {step.last_share:g} of the circle to {node}",
        )

    def _follow_orders(self) -> None:
        """See which have been carried out."""
        try:
            view = self._view()
        except Unavailable:
            return  # the controllers are what is broken; there is another time
        for each in view.operations:
            if each.operation in self._open and each.step in ENDED:
                self._open.discard(each.operation)
                self._done += each.step == "done"
                self._undone += each.step != "done"
                self._marks.append(Mark(time.monotonic(), f"{each.what}: {each.step}", "order"))
                self._heard(f"{time.monotonic() - self._begin:6.2f} s: {self._marks[-1].what}")

    def _open_orders(self) -> list[str]:
        """Those that are not carried out yet, and why."""
        if not self._open:
            return []
        try:
            view = self._view()
        except Unavailable as error:
            return [f"no controller says what became of the orders: {error.message}"]
        return [
            f"{each.what}: {each.step}, {each.done_share:.0%} done; {each.trouble or 'no trouble is told'}"
            for each in view.operations
            if each.operation in self._open
        ]

    def _node(self, step: AnyStep) -> str:
        node = getattr(step, "node", "")
        if node != LEADER:
            return str(node)
        if isinstance(step, Resume | Restart | Unthrottle):
            return self._leader_then[step.part]
        leader = self._leader()
        if isinstance(step, Pause | Kill | Stop | Throttle):
            self._leader_then[step.part] = leader
        return leader

    def _change(
        self,
        kind: str,
        what: str,
        action: Callable[[], None],
        broken: Mapping[str, frozenset[Direction]],
        mended: Sequence[str] = (),
    ) -> None:
        """Do something, and know since when what is broken."""
        if kind == "fault" and not self._episodes and not self._broken:
            self._cluster.everybody(Phase(DURING))
        begin = time.monotonic()
        action()
        now = time.monotonic()
        stopping = what.startswith("stop")  # it takes nothing more on from its begin
        self._close_episode(begin if stopping or (kind == "heal" and "restart" not in what) else now)
        for each in mended:
            self._broken.pop(each, None)
        self._broken |= broken
        self._since = begin if stopping else now
        self._marks.append(Mark(now, what, "fault" if kind == "fault" else "heal"))

    def _close_episode(self, now: float) -> None:
        if self._broken:
            self._episodes.append(episode_of(self._since, now, self._cluster.nodes, self._broken))

    def _mend(self) -> None:
        """What a scenario leaves broken is mended to look at what is left."""
        if not self._broken:
            return
        cluster = self._cluster
        self._close_episode(time.monotonic())
        for each in list(self._broken):
            if each.startswith("throttled"):
                _, node, part = each.split()
                cluster.throttle(node, part, None)  # type: ignore[arg-type]
            if each.startswith("down"):
                _, node, part = each.split()
                cluster.signal(node, part, signal.SIGCONT)  # type: ignore[arg-type]
                cluster.restart(node, part)  # type: ignore[arg-type]
        cluster.hosts.heal()
        self._broken.clear()

    def _leader(self) -> str:
        """The host of the controllers' leader."""
        deadline = time.monotonic() + LEADER_WITHIN_S
        while True:
            if leader := self._view().leader:
                return self._cluster.host_of(leader)
            if time.monotonic() > deadline:
                raise Unavailable("the controllers name no leader")
            time.sleep(0.1)

    def _view(self) -> ClusterView:
        """What the leader knows, or if none can be asked, what another controller does: only the leader knows
        of operations."""
        addresses = self._cluster.controller_addresses()
        view = self._view_of(addresses)
        if view.leader and view.leader != view.controller:
            address = self._cluster.controller_address(view.leader)
            with suppress(Unavailable):
                return self._view_of([address] if address else [])
        return view

    def _view_of(self, addresses: list[str]) -> ClusterView:
        answer = next(iter(self._cluster.agents.values())).ask(Told(addresses, "ClusterGet", {}, 1.0))
        assert isinstance(answer, Done)
        return msgspec.json.decode(answer.text, type=ClusterView)

    def _tell_controllers(self, name: str, fields: dict[str, Any], within_s: float) -> Done:
        """Raises ``Unavailable``: none that can be reached leads, in all this time."""
        cluster, deadline = self._cluster, time.monotonic() + within_s
        agent = next(iter(cluster.agents.values()))
        while True:
            try:
                answer = agent.ask(Told(cluster.controller_addresses(), name, fields, 1.0))
                assert isinstance(answer, Done)
                return answer
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    # -- waiting

    def _wait_until(self, at: float) -> None:
        """Meanwhile, once all is healed, see when the replicas are equal."""
        while (now := time.monotonic()) < at:
            if self._open:
                self._follow_orders()
            if self._healed_at is not None and self._equal_at is None:
                self._see_equal()
                time.sleep(min(EQUAL_EVERY_S, max(0.0, at - time.monotonic())))
            else:
                time.sleep(min(0.05, at - now))

    def _see_equal(self) -> None:
        cluster, scenario = self._cluster, self._scenario
        phases = [BEFORE, DURING] if _last_heal(scenario) is not None else [BEFORE, DURING, AFTER]
        keys = eventual_keys(cluster.nodes, scenario.load.eventual, scenario.load.keys, phases)
        if not keys:
            self._equal_at = self._healed_at
            return
        try:
            stored = self._stored(keys, [])
        except Unavailable:
            return
        self._unequal = [f"{node} does not answer: {why}" for node, why in stored.missing.items()]
        self._unequal += [_told(stored, key) for key in keys if not _equal(stored, key)]
        if not self._unequal:
            self._equal_at = time.monotonic()
            self._heard(f"{self._equal_at - self._begin:6.2f} s: the replicas are equal")

    def _stored(self, eventual: Sequence[str], strong: Sequence[str]) -> Stored:
        order = States(list(eventual), list(strong), self._cluster.shard_addresses())
        answer = next(iter(self._cluster.agents.values())).ask(order)
        assert isinstance(answer, Stored)
        return answer

    # -- what is left

    def _look(self, end: float) -> Observed:
        cluster, scenario = self._cluster, self._scenario
        assert self._healed_at is not None
        deadline = self._healed_at + scenario.equal_within_s
        while (self._equal_at is None or self._open) and time.monotonic() < max(deadline, end + 1.0):
            self._follow_orders()
            if self._equal_at is None:
                self._see_equal()
            time.sleep(EQUAL_EVERY_S)
        self._heard("looking at what is left")
        cluster.everybody(Save())
        eventual, strong = self._keys(self._history())
        cluster.everybody(Look(eventual, strong), 120.0)
        stored = self._stored(eventual, strong)
        seen_by = time.monotonic() + SEEN_WITHIN_S
        while stored.missing and time.monotonic() < seen_by:
            stored = self._stored(eventual, strong)
        cluster.everybody(Save())
        return Observed(
            cluster.nodes, self._begin, end, self._history(), self._marks, self._episodes, self._samples(),
            ending=None if stored.missing else _ending(stored, eventual),
            equal_s=None if self._equal_at is None else self._equal_at - self._healed_at,
            owners={key: [cluster.host_of(each) for each in those] for key, those in stored.owners.items()},
            unequal=self._unequal, quorums=stored.quorums,
            orders_taken=self._taken, orders_done=self._done, orders_undone=self._undone,
            orders_refused=self._refused, orders_open=self._open_orders(),
        )  # fmt: skip

    def _history(self) -> History:
        history = History()
        decoder = msgspec.json.Decoder(Line)
        for node in self._cluster.nodes:
            lines = self._cluster.history_path(node).read_bytes().splitlines()
            history.lines += [decoder.decode(line) for line in lines]
        return history

    def _samples(self) -> list[Sample]:
        """With hosts in the place of their processes."""
        decoder = msgspec.json.Decoder(Sample)
        return [
            self._by_hosts(decoder.decode(line))
            for node in self._cluster.nodes
            for line in self._cluster.samples_path(node).read_bytes().splitlines()
        ]

    def _by_hosts(self, sample: Sample) -> Sample:
        if sample.suspects is None:
            return sample
        hosts = {self._cluster.host_of(each) for each in sample.suspects}
        return msgspec.structs.replace(sample, suspects=sorted(hosts))

    @staticmethod
    def _keys(history: History) -> tuple[list[str], list[str]]:
        """Records that somebody used: (eventual, strong)."""
        eventual: set[str] = set()
        strong: set[str] = set()
        for line in history.lines:
            if isinstance(line, Invoked) and line.kind not in ("publish", "fetch"):
                (strong if line.kind in KINDS else eventual).update(line.keys)
        return sorted(eventual), sorted(strong)


def _last_heal(scenario: Scenario) -> int | None:
    """The number of the step after which nothing is broken any more."""
    broken: set[str] = set()
    last: int | None = None
    for number, step in enumerate(scenario.steps):
        match step:
            case Cut() | Loss() | Slow():
                broken.add("network")
                last = None
            case Pause() | Kill() | Stop():
                broken.add(f"{step.node} {step.part}")
                last = None
            case Throttle():
                broken.add(f"throttled {step.node} {step.part}")
                last = None
            case Heal():
                broken.discard("network")
            case Resume() | Restart():
                broken.discard(f"{step.node} {step.part}")
            case Unthrottle():
                broken.discard(f"throttled {step.node} {step.part}")
        if last is None and not broken and isinstance(step, Heal | Resume | Restart | Unthrottle):
            last = number
    return last


def _equal(stored: Stored, key: str) -> bool:
    owners = _copies(stored, key)
    return len(owners) == len(stored.owners[key]) and all(each == owners[0] for each in owners)


def _told(stored: Stored, key: str) -> str:
    """How the owners of a record differ."""
    return f"{key}: {dict(zip(stored.owners[key], _copies(stored, key), strict=False))}"


def _copies(stored: Stored, key: str) -> list[Replica | None]:
    """Of the owners that answered."""
    return [_plain(stored.states[owner][key]) for owner in stored.owners[key] if owner in stored.states]


def _plain(state: RecordState | None) -> Replica | None:
    return None if state is None else _replica(state)


def _replica(state: RecordState) -> Replica:
    held = {
        (each.replica, each.counter): None if each.value is None else each.value.decode()
        for each in state.siblings
    }
    return Replica(dict(state.context), held)


def _ending(stored: Stored, keys: Sequence[str]) -> Ending:
    records: dict[str, dict[str, Replica]] = {key: {} for key in keys}
    for node, states in stored.states.items():
        for key, state in states.items():
            if state is not None:
                records[key][node] = _replica(state)
    return Ending(records, intact=True)
