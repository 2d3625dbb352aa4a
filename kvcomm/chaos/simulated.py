"""``run_in_simulator``: a scenario (``kvcomm.chaos.scenario``) in virtual time, judged like one on processes.

Host ``n1`` is the first shard, the first controller and their clients, which are cut off, paused and killed
together.  Blocks are not simulated, and nothing has a bandwidth: scenarios that need it are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from xxhash import xxh3_64_hexdigest

from kvcomm.chaos.history import History
from kvcomm.chaos.keys import clients_of
from kvcomm.chaos.measures import measure
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.observed import Episode, Mark, Observed, Sample, episode_of, suspects_of
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import StrongWorkload
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
from kvcomm.chaos.splits import SplitWork, equal_replicas
from kvcomm.chaos.workload import Act, EventualWorkload
from kvcomm.wire.messages import ClusterView, DrainOrder, Message, MoveOrder, OrderAnswer, ScaleOrder

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import ClientProcess, Cluster
    from kvcomm.chaos.eventual import Ending
    from kvcomm.chaos.watch import Violation

LOOK_S = 0.05
SAMPLE_S = 0.25
FOUNDED_WITHIN_S = 60.0
QUIET_S = 8.0
ORDER_WITHIN_S = 60.0
POINT_MAX = (1 << 64) - 1
REPAIR_INTERVAL_S = 60.0
"""As shipped."""
OVER = ("done", "cancelled", "rolled back", "failed")


def run_in_simulator(scenario: Scenario, seed: int = 0) -> Report:
    """Run ``scenario`` on a simulated cluster; the same seed gives the same report."""
    if scenario.skipped:
        return skipped(scenario, "simulator", seed, scenario.skipped)
    if any(isinstance(step, Slow) for step in scenario.steps):
        return skipped(scenario, "simulator", seed, "the simulator's network has no bandwidth")
    if any(isinstance(step, Stop) for step in scenario.steps):
        return skipped(scenario, "simulator", seed, "the simulator's processes end by crashing only")
    if any(isinstance(step, Throttle) for step in scenario.steps):
        return skipped(scenario, "simulator", seed, "the simulator's processes have no processor to share")
    story = _Story(scenario, seed)
    try:
        observed = story.tell()
    except AssertionError as error:
        return broken_off(scenario, "simulator", seed, f"an invariant is broken: {error}")
    if story.cluster.violations:  # seen while it ran; nobody looks over the shoulders of real processes
        text = "; ".join(f"{each.promise}: {each.text}" for each in story.cluster.violations[:3])
        return broken_off(scenario, "simulator", seed, text)
    return report_of(scenario, "simulator", seed, observed, measure(scenario, observed))


class _Workload:
    """Some clients do eventual things, the others strong ones; with each fault and heal they take new
    records."""

    def __init__(self, plan: Plan) -> None:
        self._operations, self._plan = count(), plan
        self._eventual = EventualWorkload(plan, self._operations)
        self._strong = StrongWorkload(plan, self._operations)
        self.phase(0)

    def phase(self, number: int) -> None:
        self._eventual.use([f"{number}.key{index}" for index in range(self._plan.keys)])
        self._strong.use([f"{number}.register{index}" for index in range(self._plan.registers)])

    def act(self, client: ClientProcess, at: float) -> Act:
        strong = client.host.name.partition(".")[2].startswith("s")
        return (self._strong if strong else self._eventual).act(client, at)

    def last(self, client: ClientProcess, at: float) -> Sequence[Act]:
        strong = client.host.name.partition(".")[2].startswith("s")
        return (self._strong if strong else self._eventual).last(client, at)

    def after_power_cut(self, client: ClientProcess, at: float) -> Sequence[Act]:
        return ()

    def check(self, history: History, ending: Ending) -> list[Violation]:
        return []  # ``measure`` does


class _Story:
    """See ``kvcomm.chaos.live.story``: the same, where time is virtual."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        from kvcomm.chaos.cluster import Cluster

        load, self._scenario = scenario.load, scenario
        names = [
            name
            for node in scenario.node_names
            for kind, count in (("eventual", load.eventual), ("strong", load.strong))
            for name in clients_of(node, kind, count)
        ]
        shards = scenario.shards or scenario.nodes
        replicas = min(scenario.replicas, shards)
        self._quorums = (replicas, replicas // 2 + 1, replicas // 2 + 1)
        plan = Plan(
            seed=seed,
            shards=shards,
            replicas=replicas,
            write_quorum=replicas // 2 + 1,
            read_quorum=replicas // 2 + 1,
            clients=len(names),
            keys=load.keys,
            registers=load.keys,
            pace_s=2 * load.pace_s,
            active_s=1e9,
            quiet_s=QUIET_S,
            operation_timeout_s=load.deadline_s,
            strong_percent=50 if load.strong else 0,
            mix=(("get", 4), ("put", 4), ("blind", 1), ("delete", 1)),
            controllers=scenario.controllers,
            repair_interval_s=REPAIR_INTERVAL_S,
            replace_after_s=600.0,
        )
        self.cluster: Cluster = Cluster(plan, client_names=names)
        self._clients = names
        self._nemesis = Nemesis(self.cluster)
        self._workload = _Workload(plan)
        self._work = SplitWork(self.cluster, self._workload)
        self._operator = self._nemesis.controllers.operator()
        self._hosts: dict[str, str] = {}
        self._marks: list[Mark] = []
        self._episodes: list[Episode] = []
        self._samples: list[Sample] = []
        self._broken: dict[str, frozenset[Direction]] = {}
        self._since = self._begin = 0.0
        self._phase = 0
        self._healed_at: float | None = None
        self._equal_at: float | None = None
        self._leader_then: dict[str, str] = {}
        """Whoever it was when it was hurt, by what was hurt of it: that comes back."""
        self._open: set[int] = set()
        self._doing: dict[int, str] = {}
        """What the controllers say of each order."""
        self._at: dict[int, str] = {}
        """At which step it is."""
        self._taken = self._done = self._undone = self._refused = 0

    def tell(self) -> Observed:
        from kvcomm.chaos.simulation import ending

        cluster, scenario = self.cluster, self._scenario
        cluster.found(FOUNDED_WITHIN_S)
        self._begin = cluster.world.now
        self._work.begin()
        for step in scenario.steps:
            self._run(self._begin + step.at_s)
            self._await(step)
            self._do(step)
        self._run(self._begin + scenario.end_s)
        self._work.stop()
        end = cluster.world.now
        self._mend()
        self._nemesis.heal()
        healed_at = end if self._healed_at is None else self._healed_at
        while self._equal_at is None and cluster.world.now < max(
            healed_at + scenario.equal_within_s, end + 1.0
        ):
            self._run(cluster.world.now + LOOK_S)
        self._run(cluster.world.now + QUIET_S)
        self._work.finish()
        until = cluster.world.now + FOUNDED_WITHIN_S
        while self._work.looking and cluster.world.now < until:
            self._run(cluster.world.now + LOOK_S)
        left = ending(cluster, self._nemesis)
        return Observed(
            scenario.node_names, self._begin, end, cluster.history, self._marks, self._episodes,
            self._samples, left,
            None if self._equal_at is None else self._equal_at - healed_at,
            () if self._equal_at is not None else ("some owners of a record differ",),
            {key: [self._host_of(node) for node in nodes] for key, nodes in self._owners().items()},
            self._quorums, self._taken, self._done, self._undone, self._refused,
            [self._doing[number] for number in sorted(self._open)],
        )  # fmt: skip

    def _owners(self) -> dict[str, Sequence[str]]:
        from l3_shard.ring import Ring

        place = Ring.from_map(self.cluster.map)
        keys = {key for each in self.cluster.history.operations() for key in each.invoked.keys}
        return {key: place.replicas(key.encode()) for key in sorted(keys)}

    # -- hosts

    def _host_of(self, node: str) -> str:
        """Of a shard or controller.  New shards go to the hosts that have none, one after the other."""
        names = self._scenario.node_names
        if node not in self._hosts:
            digits = node.removeprefix("shard").removeprefix("controller")
            if digits.isdigit():
                self._hosts[node] = names[int(digits)]
            else:
                used = {host for each, host in self._hosts.items() if each.startswith("shard")}
                used |= {names[index] for index in range(self.cluster.plan.shards)}
                free = [name for name in names if name not in used]
                self._hosts[node] = free[0] if free else names[-1]
        return self._hosts[node]

    def _processes(self, host: str, part: str) -> list[str]:
        parts = {"shard": self.cluster.names, "controller": self._nemesis.controllers.names}
        chosen = [*parts["shard"], *parts["controller"]] if part == "all" else parts[part]
        return [node for node in chosen if self._host_of(node) == host]

    def _endpoints(self, host: str) -> list[str]:
        return [
            *self._processes(host, "all"),
            *(name for name in self._clients if name.startswith(f"{host}.")),
        ]

    def _leader(self) -> str:
        controllers = self._nemesis.controllers
        leaders = [name for name in controllers.names if controllers.leads(name)]
        return self._host_of(leaders[0] if leaders else controllers.names[0])

    def _node(self, step: AnyStep) -> str:
        node = str(getattr(step, "node", ""))
        if node != LEADER:
            return node
        if isinstance(step, Resume | Restart):
            return self._leader_then[step.part]
        leader = self._leader()
        if isinstance(step, Pause | Kill):
            self._leader_then[step.part] = leader
        return leader

    # -- the steps

    def _await(self, step: AnyStep) -> None:
        """What a step waits for: that orders have been carried out, or are so far."""
        until = self.cluster.world.now + ORDER_WITHIN_S
        while self._open and self.cluster.world.now < until and self._waits(step):
            self._run(self.cluster.world.now + LOOK_S)

    def _waits(self, step: AnyStep) -> bool:
        if isinstance(step, ControllerOrder):
            return step.waits
        if not isinstance(step, Kill) or step.when is None:
            return False
        wanted = OPERATION_STEPS.index(step.when)
        steps = {self._at.get(number, OPERATION_STEPS[0]) for number in self._open}
        return all(each in OPERATION_STEPS and OPERATION_STEPS.index(each) < wanted for each in steps)

    def _do(self, step: AnyStep) -> None:
        nemesis, what = self._nemesis, type(step).__name__.lower()
        node = self._node(step)
        match step:
            case Cut():
                groups = resolved(step.groups, self._leader())
                cuts = cuts_of(step.shape, groups, self._scenario.node_names)
                ends = {host: self._endpoints(host) for host in self._scenario.node_names}
                pairs = {(a, b) for one, other in cuts for a in ends[one] for b in ends[other]}
                told = f"cut {step.shape} {' | '.join(' '.join(group) for group in groups)}".strip()
                self._change("fault", told, lambda: nemesis.recut(pairs), {"cut": cuts})
            case Heal():
                gone = [each for each in self._broken if each in ("cut", "loss")]
                self._change("heal", what, self._heal_network, {}, gone)
            case Loss():
                told, lost = f"loss {step.percent:g} %", {"loss": frozenset[Direction]()}
                self._change("fault", told, lambda: self._lose(step.percent / 100), lost)
            case Pause() | Kill():
                self._hurt(step, node, what)
            case Resume() | Restart():
                processes = self._processes(node, step.part)
                self._change("heal", f"{what} {node} {step.part}", lambda: self._bring_back(processes), {},
                             [f"down {node} {step.part}"])  # fmt: skip
            case Scale() | Move() | Drain():
                self._order(step, node)
            case Slow() | Stop() | Throttle() | Unthrottle():
                raise AssertionError("skipped before")

    def _hurt(self, step: Pause | Kill, node: str, what: str) -> None:
        processes = self._processes(node, step.part)

        def hurt() -> None:
            for name in processes:
                if isinstance(step, Pause):
                    self.cluster.host(name).pause()
                else:
                    self.cluster.broken.add(name)
                    self.cluster.kill(name)

        down = {f"down {node} {step.part}": frozenset[Direction]()}
        self._change("fault", f"{what} {node} {step.part}", hurt, down)

    def _bring_back(self, processes: Sequence[str]) -> None:
        for name in processes:
            self.cluster.broken.discard(name)
            self.cluster.host(name).resume()
            self.cluster.start(name)

    def _heal_network(self) -> None:
        self._nemesis.recut(())
        self._lose(0.0)

    def _lose(self, share: float) -> None:
        self.cluster.network.weather = replace(self.cluster.network.weather, loss=share)

    def _change(
        self,
        kind: str,
        what: str,
        action: Callable[[], None],
        broken: Mapping[str, frozenset[Direction]],
        mended: Sequence[str] = (),
    ) -> None:
        """Do something, and know since when what is broken."""
        now = self.cluster.world.now
        self._close_episode(now)
        if kind == "fault" and not self._broken:
            self._next_phase()
        action()
        for each in mended:
            self._broken.pop(each, None)
        self._broken |= broken
        self._since = now
        self._marks.append(Mark(now, what, "fault" if kind == "fault" else "heal"))
        if self._broken:
            self._healed_at = self._equal_at = None
        elif kind == "heal":
            self._healed_at = now
            self._next_phase()

    def _next_phase(self) -> None:
        self._phase += 1
        self._workload.phase(self._phase)

    def _close_episode(self, now: float) -> None:
        if self._broken:
            self._episodes.append(episode_of(self._since, now, self._scenario.node_names, self._broken))

    def _mend(self) -> None:
        self._close_episode(self.cluster.world.now)
        self._broken.clear()
        self.cluster.broken.clear()

    def _order(self, step: Scale | Move | Drain, node: str) -> None:
        shard = next(iter(self._processes(node, "shard")), "") if node else ""
        message: Message
        if isinstance(step, Scale):
            message, what = ScaleOrder(step.shards), f"scale to {step.shards}"
        elif isinstance(step, Drain):
            message, what = DrainOrder(shard), f"drain {node}"
        else:
            first, last = (int(share * POINT_MAX) for share in (step.first_share, step.last_share))
            message, what = MoveOrder(first, min(last, POINT_MAX), shard), f"move to {node}"

        def answered(answer: Message) -> None:
            if not isinstance(answer, OrderAnswer):
                self._refused += 1
            elif answer.operation:
                self._taken += 1
                self._open.add(answer.operation)
                self._doing[answer.operation] = what

        self._marks.append(Mark(self.cluster.world.now, what, "order"))
        self._operator.order(message, answered)

    # -- time

    def _run(self, until: float) -> None:
        """Look now and then at what there is to see."""
        world = self.cluster.world
        while world.now < until:
            world.run(min(until, world.now + LOOK_S))
            if not self._samples or world.now - self._samples[-1].at >= SAMPLE_S:
                self._sample()
            if self._healed_at is None and not self._episodes and not self._broken:
                continue
            past = tuple(f"{number}." for number in range(self._phase))
            if self._equal_at is None and not self._broken and equal_replicas(self.cluster, past):
                self._equal_at = world.now

    def _follow(self, view: ClusterView) -> None:
        """See which orders have been carried out."""
        for each in view.operations:
            if each.operation not in self._open:
                continue
            self._doing[each.operation] = f"{each.what}: {each.step} {each.trouble}".strip()
            self._at[each.operation] = each.step
            if each.step in OVER:
                self._open.discard(each.operation)
                self._done += each.step == "done"
                self._undone += each.step != "done"
                self._marks.append(
                    Mark(self.cluster.world.now, f"order {each.operation} {each.step}", "order")
                )

    def _sample(self) -> None:
        from l3_shard.ring import encode_map

        controllers, now = self._nemesis.controllers, self.cluster.world.now
        for node in [*self.cluster.names, *controllers.names]:
            view = controllers.view(node) if node in controllers.names else None
            shard = self.cluster.shard(node) if view is None and node in self.cluster.names else None
            if view is not None:
                suspects = suspects_of(view)
                self._samples.append(
                    Sample(
                        now, self._host_of(node), leader=view.leader, term=view.term, mode=view.mode,
                        suspects=None if suspects is None else [*map(self._host_of, suspects)],
                    )
                )  # fmt: skip
                self._follow(view)
            elif shard is not None and shard.machine.ring.epoch:
                ring_map = shard.machine.ring.to_map()
                digest = xxh3_64_hexdigest(encode_map(ring_map))
                self._samples.append(Sample(now, self._host_of(node), ring_map.epoch, digest))
