"""The scenarios that come with the service, by name; numbers are those of the fault catalogue.

Each is made for a *hold*, how long its fault lasts, and a seed, which only ``random-split`` draws from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvcomm.chaos.draw import Draw
from kvcomm.chaos.scenario import (
    LEADER,
    OPERATION_STEPS,
    AnyStep,
    Cut,
    Heal,
    Kill,
    Load,
    Loss,
    Move,
    OperationStep,
    Part,
    Pause,
    Promise,
    Restart,
    Resume,
    Scale,
    Scenario,
    Slow,
    Stop,
    Throttle,
    Unthrottle,
)
from kvcomm.chaos.shapes import draw_shape
from kvcomm.errors import ConfigError

WARM_S: Final = 3.0
"""Quiet time before the first fault."""
QUIET_S: Final = 10.0
"""The same where it is to be known how slow the slowest call of a hundred is."""
NODES = ["n1", "n2", "n3", "n4", "n5"]
EVERYBODY = [*NODES]

Make = Callable[[float, int], Scenario]
"""(hold in seconds, seed) -> the scenario."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One scenario of the list."""

    make: Make
    hold_s: float
    """If nobody says otherwise."""


def scenario_named(name: str, hold_s: float | None = None, seed: int = 0) -> Scenario:
    """Raises ``ConfigError``: there is none; the message lists those there are."""
    entry = SCENARIOS.get(name)
    if entry is None:
        raise ConfigError(f"no scenario {name!r}; there are: {', '.join(SCENARIOS)}")
    return entry.make(entry.hold_s if hold_s is None else hold_s, seed)


# -- what is promised


def _most(**limits: float) -> list[Promise]:
    return [Promise(measure, at_most=limit) for measure, limit in limits.items()]


def _least(**limits: float) -> list[Promise]:
    return [Promise(measure, at_least=limit) for measure, limit in limits.items()]


def _healed(*more: Promise) -> list[Promise]:
    """After every partition."""
    after = _most(first_good_s=1.5, equal_s=10.0)
    return [*after, *_most(strong_wrong_side=0, epochs_doubled=0, terms_doubled=0), *more]


CARRIED_OUT = (*_most(orders_open=0, orders_undone=0),)
UNTOUCHED = (*_most(equal_s=10.0, epochs_doubled=0, terms_doubled=0),)


# -- partitions


def _cut(hold_s: float, shape: Cut) -> list[AnyStep]:
    return [shape, Heal(at_s=shape.at_s + hold_s)]


def _halves(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "halves",
        "Of two sides the one with the majority of a strong record goes on after less than a second;"
        " the other refuses, with an error of the right kind and in time. Eventual records are served on "
        "both sides. After the heal the first call of every kind is good within 1.5 s, and replicas are "
        "equal within 10 s.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="halves", groups=[["n1", "n2"], ["n3", "n4", "n5"]])),
        _healed(*_most(strong_gap_s=1.0), *_least(strong_share=0.99)),
        faults=[1],
    )


def _halves_long(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "halves-long",
        "A partition that outlasts leases and what TCP waits between two tries: the same as `halves`, and "
        "coming back takes no longer.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="halves", groups=[["n1", "n2"], ["n3", "n4", "n5"]])),
        _healed(*_most(strong_gap_s=1.0), *_least(strong_share=0.99)),
        faults=[2],
        detect_s=7.0,
        settle_s=5.0,
    )


def _siblings(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "siblings",
        "Eventual writes to the same records on both sides of a partition: every acknowledged one is there "
        "after the heal, as a sibling, unless somebody who had seen it replaced it.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="halves", groups=[["n1", "n2"], ["n3", "n4", "n5"]])),
        _healed(*_least(eventual_answered=1)),
        faults=[3],
        load=Load(eventual=4, strong=0, blocks=0, keys=4),
    )


def _isolate(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "isolate",
        "One node hears nobody and is heard by nobody: for the others the strong records go on after less "
        "than a second.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="isolate", groups=[["n5"]])),
        _healed(*_most(strong_gap_s=1.0), *_least(strong_share=0.99)),
        faults=[4],
    )


def _isolate_leader(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "isolate-leader",
        "The same for the host of the controllers' leader: another one leads within 10 s, and calls do not "
        "wait for that.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="isolate", groups=[[LEADER]])),
        _healed(*_most(strong_gap_s=1.0, leader_back_s=10.0), *_least(strong_share=0.99)),
        faults=[4],
    )


def _bridge(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "bridge",
        "Two sides that only the node in the middle hears: no shard has two owners, and the controllers do "
        "not change their leader again and again.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="bridge", groups=[["n1", "n2"], ["n3"], ["n4", "n5"]])),
        _healed(*_most(leader_changes=2), *_least(strong_answered=1, eventual_answered=1)),
        faults=[5],
    )


def _ring(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "ring",
        "Everybody hears two neighbours only, so everybody is in a majority and no two in the same: strong "
        "records stay linearizable, and some are served.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="ring")),
        _healed(*_least(strong_answered=1, eventual_answered=1)),
        faults=[6],
    )


def _one_way(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "one-way",
        "A node that can send and hears nobody, for ever: it gets no lease and holds nobody up. The"
        " others go on.",
        [Cut(at_s=WARM_S, shape="one-way", groups=[["n2", "n3", "n4", "n5"], ["n1"]])],
        [
            *_most(strong_gap_s=1.0, epochs_doubled=0, terms_doubled=0, leader_changes=2),
            *_least(strong_answered=1, eventual_answered=1),
        ],
        faults=[7],
        settle_s=hold_s,
    )


def _flapping(hold_s: float, seed: int) -> Scenario:
    steps: list[AnyStep] = []
    for turn in range(max(1, int(hold_s))):
        at_s = WARM_S + turn
        steps += [
            Cut(at_s=at_s, shape="halves", groups=[["n1", "n2"], ["n3", "n4", "n5"]]),
            Heal(at_s=at_s + 0.5),
        ]
    return Scenario(
        "flapping",
        "A partition that comes and goes, half a second each: no shard has two owners, and the state of the "
        "cluster does not change with every turn.",
        steps,
        _healed(*_most(leader_changes=2, epochs=6), *_least(strong_answered=1, eventual_answered=1)),
        faults=[8],
    )


def _alone(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "alone",
        "Nobody hears anybody: strong records refuse; eventual ones are served where a replica is. All is "
        "whole again after the heal.",
        _cut(hold_s, Cut(at_s=WARM_S, shape="alone")),
        _healed(*_least(eventual_answered=1)),
        faults=[10],
    )


def _random_split(hold_s: float, seed: int) -> Scenario:
    draw = Draw(seed).fork("random-split")
    drawn = draw_shape(draw, NODES)
    groups = [list(group) for group in drawn.groups]
    steps: list[AnyStep] = []
    each_s = hold_s / drawn.flaps
    for turn in range(drawn.flaps):
        at_s = WARM_S + turn * each_s
        up_s = each_s if drawn.flaps == 1 else each_s * draw.uniform(0.3, 0.8)
        steps += [Cut(at_s=round(at_s, 3), shape=drawn.shape, groups=groups)]
        steps += [Heal(at_s=round(at_s + up_s, 3))]
    return Scenario(
        "random-split",
        f"A partition drawn from the seed, here {drawn.describe()}: nothing acknowledged is "
        "lost, nothing strong is done on a side without a majority, and all is well soon after the heal.",
        steps,
        _healed(),
        faults=[1, 3, 4, 5, 6, 7, 8, 10],
    )


# -- a network that is there, but bad


def _loss(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "loss",
        "15 % of all packets between nodes are lost: calls are slower or fail, none of them wrongly, and "
        "nothing takes effect twice. (Doubled and reordered messages are tried in the simulator.)",
        [Loss(at_s=WARM_S, percent=15), Heal(at_s=WARM_S + hold_s)],
        [*UNTOUCHED, *_most(first_good_s=3.0), *_least(eventual_answered=1, strong_answered=1)],
        faults=[11],
    )


def _slow_link(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "slow-link",
        "One node's network carries 1 Mbit/s: what a quorum without it can do is not slower, so "
        "the others go on. (Delay by itself needs a queueing discipline that many kernels lack; the "
        "simulator has it.)",
        [Slow(at_s=WARM_S, node="n5", kbit_s=1000), Heal(at_s=WARM_S + hold_s)],
        [*UNTOUCHED, *_most(strong_gap_s=1.0), *_least(eventual_share=0.95)],
        faults=[12],
    )


# -- processes that end or stand still


def _rolling_restart(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "rolling-restart",
        "One node after the other is stopped as an operator does, and started again, under load: no eventual "
        "call fails, and there is no gap of a second in strong records.",
        _in_turn(Stop, hold_s),
        [*UNTOUCHED, *_most(eventual_failed=0, strong_gap_s=1.0)],
        faults=[20],
        settle_s=max(5.0, hold_s),
    )


def _rolling_kill(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "rolling-kill",
        "One node after the other is killed and started again under load: no gap of a second in strong "
        "records.",
        _in_turn(Kill, hold_s),
        [*UNTOUCHED, *_most(strong_gap_s=1.0)],
        faults=[20],
        settle_s=max(5.0, hold_s),
    )


def _in_turn(hurt: type[Kill | Stop], hold_s: float) -> list[AnyStep]:
    steps: list[AnyStep] = []
    for turn, node in enumerate(NODES):
        at_s = WARM_S + turn * hold_s
        steps += [hurt(at_s=at_s, node=node), Restart(at_s=at_s + 0.5, node=node)]
    return steps


def _pause_shard(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "pause-shard",
        "A shard stands still and goes on: nothing that it has promised or queued before is done under its "
        "old right, and the others do not wait for it.",
        [
            Pause(at_s=WARM_S, node="n5", part="shard"),
            Resume(at_s=WARM_S + hold_s, node="n5", part="shard"),
        ],
        [*UNTOUCHED, *_most(first_good_s=1.5)],
        faults=[21],
    )


def _short_pauses(hold_s: float, seed: int) -> Scenario:
    steps: list[AnyStep] = []
    for turn in range(max(1, int(hold_s / 3))):
        at_s = WARM_S + 3 * turn
        steps += [Pause(at_s=at_s, node="n3"), Resume(at_s=at_s + 1.0, node="n3")]
    return Scenario(
        "short-pauses",
        "A node stands still for a second, again and again, as in a long garbage collection: it is not "
        "replaced, and the leader stays.",
        steps,
        [*UNTOUCHED, *_most(epochs=1, leader_changes=0, false_alarms=0)],
        faults=[22],
    )


def _cpu_quota(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "cpu-quota",
        "The host of the controllers' leader gets a tenth of a core: it is not replaced and suspects nobody "
        "else, and the others do not wait for it.",
        [Throttle(at_s=WARM_S, node=LEADER, percent=10), Unthrottle(at_s=WARM_S + hold_s, node=LEADER)],
        [
            *UNTOUCHED,
            *_most(epochs=1, false_alarms=0, leader_changes=1, strong_gap_s=1.0, first_good_s=1.5),
            *_least(eventual_share=0.95),
        ],
        faults=[46],
    )


def _pause_leader(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "pause-leader",
        "The controllers' leader stands still: another one leads within 10 s, and no call "
        "fails because of it.",
        [
            Pause(at_s=WARM_S, node=LEADER, part="controller"),
            Resume(at_s=WARM_S + hold_s, node=LEADER, part="controller"),
        ],
        [*UNTOUCHED, *_most(leader_back_s=10.0, failed_share=0.01)],
        faults=[23],
    )


def _ray_head(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "ray-head",
        "The Ray head ends: reads and writes go on.",
        [],
        faults=[24],
        skipped="no Ray launcher in this version; counted as skipped",
    )


def _control_service(hold_s: float, seed: int) -> Scenario:
    hosts = NODES[:3]
    return Scenario(
        "control-service",
        "All controllers are killed: reads and writes go on by the map that stands. Within 10 s after they "
        "are back one of them leads in a new term, and an order is carried out by all nodes.",
        [
            *(Kill(at_s=WARM_S, node=node, part="controller") for node in hosts),
            *(Restart(at_s=WARM_S + hold_s, node=node, part="controller") for node in hosts),
            Move(at_s=WARM_S + hold_s + 10.0, first_share=0.2, last_share=0.4, node="n2"),
        ],
        [*UNTOUCHED, *CARRIED_OUT, *_most(failed_share=0.01), *_least(leader_changes=1)],
        faults=[24],
        settle_s=10.0,
    )


def _lose_controllers(hold_s: float, seed: int) -> Scenario:
    back_s = WARM_S + hold_s
    return Scenario(
        "lose-controllers",
        "Two of three controllers are killed: nothing can be changed, and reads and writes go on by the map "
        "that stands.",
        [
            Kill(at_s=WARM_S, node="n1", part="controller"),
            Kill(at_s=WARM_S, node="n2", part="controller"),
            Restart(at_s=back_s, node="n1", part="controller"),
            Restart(at_s=back_s, node="n2", part="controller"),
        ],
        [*UNTOUCHED, *_most(epochs=1, failed_share=0.01)],
        faults=[25],
    )


# -- shards that move


def _move(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "move",
        "A fifth of the circle is given to another shard under load, and the shard is killed in the "
        "middle of it: no acknowledged write is lost, no record stops for more than a second without a "
        "fault.",
        [
            Move(at_s=WARM_S, first_share=0.2, last_share=0.4, node="n2"),
            Kill(at_s=WARM_S + 1.0, node="n2", part="shard"),
            Restart(at_s=WARM_S + 1.0 + hold_s, node="n2", part="shard"),
        ],
        [*UNTOUCHED, *_most(orders_open=0)],
        faults=[34],
        settle_s=10.0,
    )


def move_kills(
    steps: Sequence[OperationStep] = OPERATION_STEPS,
    victims: Sequence[str] = ("source", "target", "leader"),
    back_s: float = 0.5,
) -> Scenario:
    """A part of the circle goes to and fro, and each time one of those that take part is killed at a step."""
    done: list[AnyStep] = []
    source, target = "n2", "n4"
    at_s = WARM_S
    done.append(Move(at_s=at_s, first_share=0.2, last_share=0.5, node=source))
    for step in steps:
        for victim in victims:
            part: Part = "controller" if victim == "leader" else "shard"
            node = {"source": source, "target": target, "leader": LEADER}[victim]
            at_s += 1.0
            done += [
                Move(at_s=at_s, first_share=0.2, last_share=0.5, node=target),
                Kill(at_s=at_s, node=node, part=part, when=step),
                Restart(at_s=at_s + back_s, node=node, part=part),
            ]
            source, target = target, source
    return Scenario(
        "move-kills",
        "A part of the circle is moved to and fro under load, and each time the shard that gives, the one "
        "that takes or the controllers' leader is killed, at every step of the move: it goes on or is taken "
        "back, and no acknowledged write is lost.",
        done,
        [*UNTOUCHED, *_most(orders_open=0)],
        faults=[34],
        settle_s=8.0,
        equal_within_s=40.0,
    )


def _two_orders(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "two-orders",
        "Two changes of the ring at once: the second is refused with what is under way, and the first is "
        "carried out.",
        [
            Move(at_s=WARM_S, first_share=0.2, last_share=0.4, node="n2"),
            Move(at_s=WARM_S + 0.1, first_share=0.6, last_share=0.8, node="n3", waits=False),
        ],
        [*UNTOUCHED, *CARRIED_OUT, *_most(orders_refused=1, key_stop_s=1.0)],
        faults=[35],
        settle_s=max(8.0, hold_s),
    )


def _old_map(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "old-map",
        "Clients work by the map that they had when they began, and the ring changes beneath them: each "
        "learns the new one from a refusal, and at most 1 % of the calls fail.",
        [Move(at_s=WARM_S, first_share=0.0, last_share=0.5, node="n4")],
        [
            *UNTOUCHED,
            *_most(orders_open=0, orders_undone=0, failed_share=0.01, key_stop_s=1.0),
        ],
        faults=[36],
        settle_s=max(8.0, hold_s),
    )


def _scale(hold_s: float, seed: int) -> Scenario:
    return Scenario(
        "scale-3-6-4",
        "Three shards become six and then four, under load: no acknowledged write is lost or "
        "doubled, no byte is wrong, no record stops for more than a second, and the 99th percentile at "
        "most triples.",
        [Scale(at_s=QUIET_S, shards=6), Scale(at_s=QUIET_S + hold_s, shards=4)],
        [*UNTOUCHED, *CARRIED_OUT, *_most(key_stop_s=1.0, p99_ratio=3.0)],
        faults=[34],
        nodes=6,
        shards=3,
        load=Load(pace_s=0.2),  # six hosts share this machine's cores, which are not to be what is measured
        settle_s=max(5.0, hold_s),
        equal_within_s=30.0,
    )


SCENARIOS: Final[dict[str, Entry]] = {
    "halves": Entry(_halves, 5.0),
    "halves-long": Entry(_halves_long, 60.0),
    "siblings": Entry(_siblings, 5.0),
    "isolate": Entry(_isolate, 5.0),
    "isolate-leader": Entry(_isolate_leader, 12.0),
    "bridge": Entry(_bridge, 5.0),
    "ring": Entry(_ring, 5.0),
    "one-way": Entry(_one_way, 10.0),
    "flapping": Entry(_flapping, 20.0),
    "alone": Entry(_alone, 5.0),
    "loss": Entry(_loss, 8.0),
    "slow-link": Entry(_slow_link, 8.0),
    "rolling-restart": Entry(_rolling_restart, 5.0),
    "rolling-kill": Entry(_rolling_kill, 5.0),
    "pause-shard": Entry(_pause_shard, 10.0),
    "short-pauses": Entry(_short_pauses, 15.0),
    "cpu-quota": Entry(_cpu_quota, 20.0),
    "pause-leader": Entry(_pause_leader, 12.0),
    "ray-head": Entry(_ray_head, 0.0),
    "control-service": Entry(_control_service, 10.0),
    "lose-controllers": Entry(_lose_controllers, 10.0),
    "move": Entry(_move, 2.0),
    "move-kills": Entry(lambda hold_s, seed: move_kills(back_s=hold_s), 0.5),
    "two-orders": Entry(_two_orders, 10.0),
    "old-map": Entry(_old_map, 10.0),
    "scale-3-6-4": Entry(_scale, 20.0),
    "random-split": Entry(_random_split, 5.0),
}


def listing() -> Sequence[tuple[str, Scenario]]:
    """All of them, as they are by default."""
    return [(name, scenario_named(name)) for name in SCENARIOS]
