"""``Nemesis``: breaks a cluster, one drawn fault after the other, and mends what it broke.

Faults overlap: each ends by itself after a drawn time, while others begin.  What can cost acknowledged data
by contract (a disk, a record, a power cut without fsync) is limited by the plan's ``losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvcomm.chaos.disk import Disk
from kvcomm.chaos.network import Cut, bridge, everybody_alone, halves, isolate, one_way, ring
from kvcomm.wire.messages import DrainOrder, MoveOrder, ScaleOrder

if TYPE_CHECKING:
    from kvcomm.chaos.cluster import Cluster
    from kvcomm.chaos.controllers import Controllers
    from kvcomm.wire.messages import RecordState, StrongState

EXTRA_SHARDS = 2
"""So many more than in the beginning are ordered at most."""


class Nemesis:
    """Works on ``cluster`` from now until the plan says that it is enough."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.plan = cluster, cluster.plan
        self.draw = cluster.world.draw.fork("nemesis")
        self.losses_left = self.plan.losses
        self.intact = True
        """Nothing happened that costs a replica its state or its place."""
        self._over = False
        self._cuts: list[set[Cut]] = []

    def begin(self) -> None:
        if self.plan.faults:
            self._wait()
        if self.plan.orders:
            self._operator = self.controllers.operator()
            self._wait_for_order()

    def heal(self) -> None:
        """Mend everything, for good."""
        self._over = self.cluster.calm = True
        self._cuts.clear()
        self._recut()
        network = self.cluster.network
        network.slow.clear()
        network.weather = replace(network.weather, loss=0.0, double=0.0, tail=0.0)
        for name in self.cluster.names:
            for disk in self._databases(name):
                disk.room_bytes, disk.failing, disk.stalled_until = None, False, 0.0
            if self.cluster.host(name).paused:
                self.cluster.host(name).resume()
            self.cluster.start(name)
        self._heal_controllers()
        if self.cluster.controllers is None and len(self.cluster.map.shards) != len(self.cluster.names):
            self.cluster.next_epoch(self.cluster.names)

    def strike(self, fault: str) -> None:
        """Do one thing now."""
        self.cluster.note(f"{fault}: {getattr(self, '_' + fault)()}")

    # -- the pace

    def _wait(self) -> None:
        delay_s = self.draw.uniform(0.0, 2 * self.plan.fault_every_s)
        self.cluster.world.after(delay_s, self._act)

    def _act(self) -> None:
        if not self._over and self.cluster.world.now < self.plan.active_s:
            self.strike(self.draw.choice(self.plan.faults))
            self._wait()

    def _later(self, undo: Callable[[], None]) -> None:
        def run() -> None:
            if not self._over:
                undo()

        self.cluster.world.after(self.draw.uniform(0.05, self.plan.fault_for_s), run)

    def _some_node(self) -> str:
        return self.draw.choice(self.cluster.names)

    # -- the network

    def cut(self, cut: set[Cut]) -> None:
        """Nothing passes there, until everything is healed."""
        self._cuts.append(cut)
        self._recut()

    def recut(self, cut: Collection[Cut]) -> None:
        """This and nothing else is cut from now on."""
        self._cuts = [set(cut)]
        self._recut()

    def _mend(self, cut: set[Cut]) -> None:
        if cut in self._cuts:
            self._cuts.remove(cut)
        self._recut()

    def _recut(self) -> None:
        self.cluster.network.cuts = set().union(*self._cuts)

    def _cut_for_a_while(self, cut: set[Cut]) -> None:
        self.cut(cut)
        self._later(lambda: self._mend(cut))

    def _sides(self) -> tuple[list[str], list[str]]:
        """The nodes in two parts, and each client on one of them."""
        names = self.draw.some(self.cluster.names, len(self.cluster.names))
        at = self.draw.between(0, len(names))
        one, other = names[:at], names[at:]
        for client in self.cluster.client_names():
            (one if self.draw.chance(0.5) else other).append(client)
        return one, other

    def _halves(self) -> str:
        one, other = self._sides()
        self._cut_for_a_while(halves(one, other))
        return f"{one} | {other}"

    def _bridge(self) -> str:
        names = self.draw.some(self.cluster.names, len(self.cluster.names))
        self._cut_for_a_while(bridge(names))
        return f"{names}"

    def _ring(self) -> str:
        names = self.draw.some(self.cluster.names, len(self.cluster.names))
        self._cut_for_a_while(ring(names))
        return f"{names}"

    def _isolate(self) -> str:
        name = self._some_node()
        everybody = self.cluster.names + (self.cluster.client_names() if self.draw.chance(0.5) else [])
        self._cut_for_a_while(isolate(name, everybody))
        return name

    def _one_way(self) -> str:
        source, target = (self.draw.some(self.cluster.names, 2) * 2)[:2]
        self._cut_for_a_while(one_way(source, target))
        return f"{source} to {target}"

    def _alone(self) -> str:
        self._cut_for_a_while(everybody_alone(self.cluster.names))
        return "everybody"

    def _client_cut(self) -> str:
        client, name = self.draw.choice(self.cluster.client_names()), self._some_node()
        pair = [(client, name), (name, client)]
        self._cut_for_a_while(one_way(*self.draw.choice(pair)) if self.draw.chance(0.5) else set(pair))
        return f"{client} and {name}"

    def _flapping(self) -> str:
        source, target = (self.draw.some(self.cluster.names, 2) * 2)[:2]
        cut, times = halves([source], [target]), self.draw.between(2, 8)

        def flap(left: int) -> None:
            self._mend(cut)
            if left and not self._over:
                if left % 2:
                    self.cut(cut)
                self.cluster.world.after(self.draw.uniform(0.1, 0.5), lambda: flap(left - 1))

        flap(2 * times - 1)
        return f"{source} and {target}, {times} times"

    def _swizzle(self) -> str:
        """Cut off a random part one by one, and let it back in another order."""
        names = self.draw.some(self.cluster.names, self.draw.between(1, len(self.cluster.names)))
        cuts = {name: isolate(name, self.cluster.names) for name in names}
        at = 0.0
        for name in names:
            at += self.draw.uniform(0.0, 0.5)
            self.cluster.world.after(at, self._unless_over(partial(self.cut, cuts[name])))
        for name in self.draw.some(names, len(names)):
            at += self.draw.uniform(0.0, 0.5)
            self.cluster.world.after(at, partial(self._mend, cuts[name]))
        return f"{names}"

    def _unless_over(self, action: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            if not self._over:
                action()

        return run

    def _reset(self) -> str:
        one = self._some_node()
        two = self.draw.choice(self.cluster.names + self.cluster.client_names())
        self.cluster.network.reset(one, two)
        return f"{one} and {two}"

    def _slow(self) -> str:
        name = self._some_node()
        self.cluster.network.slow[name] = self.draw.uniform(0.01, 0.4)
        self._later(partial(self._hasten, name))
        return name

    def _hasten(self, name: str) -> None:
        self.cluster.network.slow.pop(name, None)

    # -- hosts

    def _kill(self) -> str:
        name = self._some_node()
        self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return name

    def _kill_all(self) -> str:
        for name in self.cluster.names:
            self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return "everybody"

    def _power_cut(self) -> str:
        """One machine, and where nothing can be lost by it, all of them."""
        if self.plan.fsync == "always" or self.plan.strong_percent == 100:
            names = self.cluster.names if self.draw.chance(0.3) else [self._some_node()]
        elif self._may_lose():
            names = [self._some_node()]
        else:
            return "nobody"
        for name in names:
            self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
            self.cluster.disks[name].power_cut()
            self.cluster.strong_disks[name].power_cut()
        return f"{names}"

    def _pause(self) -> str:
        name = self._some_node()
        host = self.cluster.host(name)
        host.pause()
        self._later(host.resume)
        return name

    def _wall_jump(self) -> str:
        name = self._some_node()
        jump_ms = self.draw.between(-300_000, 300_000)
        self.cluster.host(name).skew_ms += jump_ms
        return f"{name} by {jump_ms} ms"

    # -- disks

    def _databases(self, name: str) -> tuple[Disk[RecordState], Disk[StrongState]]:
        return self.cluster.disks[name], self.cluster.strong_disks[name]

    def _may_lose(self) -> bool:
        if not self.losses_left:
            return False
        self.losses_left -= 1
        self.intact = False
        return True

    def _may_lose_strong(self, name: str) -> bool:
        """Any number of times, but never more than a minority before they have caught up."""
        return len(self.cluster.lost_voters() | {name}) <= self.plan.spare

    def _lose_disk(self) -> str:
        """One of the shard's databases or both."""
        name = self._some_node()
        which = [kind for kind in ("eventual", "strong") if self.draw.chance(0.7)]
        lost = [kind for kind in which if self._may(kind, name)]
        if not lost:
            return "nobody"
        self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        if "eventual" in lost:
            self.cluster.disks[name].lose()
        if "strong" in lost:
            self.cluster.lose_strong(name)
        return f"{name}: {lost}"

    def _may(self, kind: str, name: str) -> bool:
        return self._may_lose_strong(name) if kind == "strong" else self._may_lose()

    def _bit_flip(self) -> str:
        name, kind = self._some_node(), "strong" if self.draw.chance(0.3) else "eventual"
        disk = self.cluster.strong_disks[name] if kind == "strong" else self.cluster.disks[name]
        if not disk.values or not self._may(kind, name):
            return "nobody"
        keys = [disk.flip_bit() for _ in range(self.draw.between(1, 8))]
        if self.draw.chance(0.7):  # what a shard has in memory it does not read again
            self.cluster.kill(name, self.draw.uniform(0.0, 0.5))
        return f"{name}: {sorted({key[-9:] for key in keys if key is not None})}"

    def _amnesia(self) -> str:
        """One shard is away while the others decide; then it is back, one of the others has forgotten what
        was decided, and the third is away."""
        from l3_shard.entering import MEMBERSHIP_KEY

        if len(self.cluster.names) < 3:
            return "nobody"
        away, forgetful, third = self.draw.some(self.cluster.names, 3)
        gone = isolate(away, self.cluster.names)
        self.cut(gone)

        def forget() -> None:
            self._mend(gone)
            if self._may_lose_strong(forgetful):
                self.cluster.kill(forgetful, self.draw.uniform(0.0, 0.3))
                disk = self.cluster.strong_disks[forgetful]
                if self.draw.chance(0.5):
                    self.cluster.lose_strong(forgetful)
                else:
                    for key in sorted(disk.values.keys() - {MEMBERSHIP_KEY}):
                        disk.flip_bit(key)
            self._cut_for_a_while(isolate(third, self.cluster.names))

        self.cluster.world.after(self.draw.uniform(0.2, 2.0), self._unless_over(forget))
        return f"{away} is away, {forgetful} forgets"

    def _disk_full(self) -> str:
        """On one node, on some, or on all."""
        names = self.draw.some(self.cluster.names, self.draw.between(1, len(self.cluster.names)))
        disks = [disk for name in names for disk in self._databases(name)]
        for disk in disks:
            disk.room_bytes = self.draw.choice((0, 200, 400, 1_000))

        def free() -> None:
            for disk in disks:
                disk.room_bytes = None

        self._later(free)
        return f"{names}"

    def _disk_stall(self) -> str:
        """Whatever is asked of the disk takes until the stall is over."""
        name = self._some_node()
        stall_s = self.draw.uniform(0.05, 2 * self.plan.fault_for_s)
        for disk in self._databases(name):
            disk.stalled_until = self.cluster.world.now + stall_s
        return f"{name} for {stall_s:.1f} s"

    def _sync_failed(self) -> str:
        name = self._some_node()
        records, strong = self._databases(name)
        if self.draw.chance(0.5):
            records.failing = True
        else:
            strong.failing = True
        return name

    # -- the ring

    def _epoch(self) -> str:
        """The same owners under a new epoch."""
        if self.cluster.controllers is not None:
            return "nobody but controllers makes maps"
        self.cluster.next_epoch([node.node for node in self.cluster.map.shards])
        return f"{self.cluster.map.epoch}"

    def _move(self) -> str:
        """One shard leaves the ring, or those that left come back, without a controller: nothing is moved
        with it, so only where nothing is dropped either."""
        if self.cluster.controllers is not None or self.plan.repair_interval_s is not None:
            return self._epoch()
        self.intact = False
        names = self.cluster.names
        if len(self.cluster.map.shards) < len(names) or len(names) <= self.plan.replicas:
            self.cluster.next_epoch(names)
        else:
            gone = self._some_node()
            self.cluster.next_epoch([name for name in names if name != gone])
        return f"{self.cluster.map.epoch}"

    # -- controllers, and what they move

    @property
    def controllers(self) -> Controllers:
        """Of this cluster."""
        assert self.cluster.controllers is not None, "there are none to be broken"
        return self.cluster.controllers

    def _heal_controllers(self) -> None:
        if self.cluster.controllers is not None:
            for name in self.cluster.controllers.names:
                self.cluster.host(name).resume()
                self.cluster.start(name)

    def _some_controller(self) -> str:
        return self.draw.choice(self.controllers.names)

    def _controller_kill(self) -> str:
        name = self._some_controller()
        self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return name

    def _controllers_kill(self) -> str:
        for name in self.controllers.names:
            self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return "all of them"

    def _controller_pause(self) -> str:
        """For longer than its lease, now and then."""
        host = self.cluster.host(self._some_controller())
        host.pause()
        pause_s = self.draw.uniform(0.1, self.draw.choice((self.plan.fault_for_s, 12.0)))
        self.cluster.world.after(pause_s, self._unless_over(host.resume))
        return f"{host.name} for {pause_s:.1f} s"

    def _controller_cut(self) -> str:
        """From everybody, from the other controllers, or from some shards."""
        name = self._some_controller()
        others, shards = self.controllers.names, self.cluster.names
        far = self.draw.choice(([*others, *shards], others, self.draw.some(shards, len(shards) // 2 + 1)))
        self._cut_for_a_while(isolate(name, far))
        return f"{name} from {far}"

    def _controller_disk(self) -> str:
        """Of a minority at a time."""
        name, controllers = self._some_controller(), self.controllers
        if len(controllers.lost_voters() | {name}) > (len(controllers.names) - 1) // 2:
            return "nobody"
        self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        controllers.lose(name)
        return name

    def _controllers_disks(self) -> str:
        """All at once: the metadata is lost.  Of three, what two lose is lost, and the third does not know
        it: nobody may lose that."""
        names = self.controllers.names
        for name in names:
            self.cluster.kill(name)
        self.controllers.lose_all()
        for name in names:
            self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return "all of them"

    def _some_mover(self) -> str:
        """A shard that a move under way is about, or any."""
        moving = self.cluster.map.transition
        if moving is None:
            return self._some_node()
        before = {node.node for node in self.cluster.map.shards}
        after = {node.node for node in moving.shards}
        return self.draw.choice(sorted(before ^ after) or sorted(before))

    def _mover_kill(self) -> str:
        name = self._some_mover()
        self.cluster.kill(name, self.draw.uniform(0.0, self.plan.fault_for_s))
        return name

    def _mover_pause(self) -> str:
        host = self.cluster.host(self._some_mover())
        host.pause()
        self._later(host.resume)
        return host.name

    def _mover_cut(self) -> str:
        name = self._some_mover()
        self._cut_for_a_while(isolate(name, [*self.cluster.names, *self.controllers.names]))
        return name

    def _away(self) -> str:
        """For so long that the others may go on without it."""
        name, away_s = self._some_mover(), self.draw.uniform(6.0, 25.0)
        self.cluster.kill(name, away_s)
        return f"{name} for {away_s:.1f} s"

    # -- orders

    def _wait_for_order(self) -> None:
        self.cluster.world.after(self.draw.uniform(0.0, 2 * self.plan.order_every_s), self._act_as_operator)

    def _act_as_operator(self) -> None:
        if not self._over and self.cluster.world.now < self.plan.active_s:
            order = self.draw.choice(self.plan.orders)
            self.cluster.note(f"order {order}: {getattr(self, '_order_' + order)()}")
            self._wait_for_order()

    def _running(self) -> list[str]:
        return sorted(self.controllers.wanted)

    def _order_grow(self) -> str:
        return self._operator.order(
            ScaleOrder(min(len(self._running()) + 1, self.plan.shards + EXTRA_SHARDS))
        )

    def _order_shrink(self) -> str:
        return self._operator.order(ScaleOrder(max(self.plan.replicas, len(self._running()) - 1)))

    def _order_drain(self) -> str:
        if len(self._running()) <= self.plan.replicas:
            return "nobody"
        return self._operator.order(DrainOrder(self.draw.choice(self._running())))

    def _order_range(self) -> str:
        first = self.draw.bits()
        last = min(first + (self.draw.bits() >> self.draw.between(1, 4)), (1 << 64) - 1)
        return self._operator.order(MoveOrder(first, last, self.draw.choice(self._running())))

    def _order_cancel(self) -> str:
        return self._operator.cancel()
