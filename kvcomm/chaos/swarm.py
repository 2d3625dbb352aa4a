"""``draw_plan``: the seed draws the whole world (swarm testing [Groce et al. 2012]).

A generator that uses every fault a little, always, misses what needs one of them a lot and another one
never.  So the seed decides first *which* kinds of trouble a world knows, and then how much of each.
"""

from __future__ import annotations

from dataclasses import replace

from kvcomm.chaos.disk import Fsync
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.network import Weather
from kvcomm.chaos.plan import CONTROLLER_FAULTS, FAULTS, ORDERS, Mode, Plan

HASTY_S = 0.05
"""Where a hop with its sync takes less, short time-outs are enough."""
PATIENT_S = 0.2
"""Where it may take more, an operator would set longer ones: a strong change is two hops."""
LASTING = (
    "halves",
    "bridge",
    "ring",
    "isolate",
    "one_way",
    "alone",
    "client_cut",
    "pause",
    "kill",
    "kill_all",
    "disk_stall",
)
"""Faults that alone can hold up a whole run: one of them at least in most worlds."""
OF_DISKS = ("lose_disk", "bit_flip", "disk_full", "disk_stall", "sync_failed", "power_cut")
"""Faults that few of the others bring to light: in half of the worlds one of them is frequent."""

CONTROLLED = 0.85
"""Share of the worlds in which controllers move records."""
OF_VOTERS = ("amnesia", "move", "lose_disk", "bit_flip", "kill", "halves")
"""Faults that make acceptors forget, or replace them: in half of the worlds with strong records one of them
is frequent."""


def draw_plan(seed: int, mode: Mode = "safety", *, controlled: bool = True) -> Plan:
    """The world of ``seed``; without controllers if it may not be ``controlled``."""
    draw, strong = Draw(seed).fork("plan"), Draw(seed).fork("strong")
    shards = draw.weighted(((1, 1), (2, 1), (3, 8), (4, 2), (5, 5), (7, 1)))
    replicas = draw.weighted(((1, 1), (2, 2), (3, 10), (5, 2)))
    copies = min(replicas, shards)
    write_quorum = draw.between(1, copies) if draw.chance(0.3) else copies // 2 + 1
    read_quorum = draw.between(1, copies)
    strong_percent = strong.choice((0, 30, 70, 100))
    policies: tuple[tuple[Fsync, int], ...] = (("always", 6), ("interval", 2), ("never", 1))
    plan = Plan(
        seed=seed,
        mode=mode,
        shards=shards,
        replicas=replicas,
        write_quorum=write_quorum,
        read_quorum=read_quorum,
        clients=draw.weighted(((1, 1), (2, 1), (3, 2), (5, 2), (8, 2))),
        keys=draw.weighted(((1, 3), (2, 2), (4, 2), (12, 3))),
        pace_s=draw.choice((0.01, 0.05, 0.2, 0.8)),
        active_s=draw.uniform(10.0, 25.0) if mode == "safety" else 30.0,
        fsync=draw.weighted(policies),
        load_s=draw.choice((0.0002, 0.002, 0.05)),
        turn_s=draw.choice((0.0, 0.0, 0.02, 0.2)),
        commit_s=draw.choice(((0.0005, 0.003), (0.002, 0.02), (0.01, 0.3))),
        weather=_weather(draw),
        mix=(
            ("get", draw.between(2, 6)),
            ("put", draw.between(2, 6)),
            ("blind", draw.choice((0, 1, 4))),
            ("delete", draw.between(0, 3)),
            ("batch", draw.between(0, 3)),
        ),
        strong_percent=strong_percent,
        registers=strong.weighted(((1, 3), (2, 2), (5, 1))),
        strong_mix=(
            ("read", strong.between(2, 6)),
            ("set", strong.between(1, 5)),
            ("cas", strong.between(1, 5)),
            ("change", strong.between(0, 2)),
            ("clear", strong.between(0, 2)),
        ),
        spread=strong.chance(0.5),
        tombstone_age_s=strong.choice((0.5, 2.0, 600.0)),
        faults=_faults(draw) + _faults_of_voters(strong, strong_percent),
        fault_every_s=draw.choice((0.3, 0.8, 2.5)),
        fault_for_s=draw.choice((0.5, 2.0, 6.0)),
        repair_interval_s=1.0 if draw.chance(0.2) else None,
        fragile=draw.choice((0.0, 0.0, 0.002, 0.01)),
        losses=min(write_quorum, copies) - 1 if draw.chance(0.7) else 0,
    )
    if controlled and mode == "safety":
        plan = _with_controllers(plan, Draw(seed).fork("moves"))
    slowest_s = plan.weather.delay_s[1] + plan.commit_s[1] + plan.turn_s + plan.load_s
    if slowest_s > PATIENT_S:
        return replace(plan, request_timeout_s=4.5, ask_timeout_s=6.0, operation_timeout_s=18.0, quiet_s=20.0)
    return _hasty(plan) if slowest_s < HASTY_S and strong.chance(0.6) else plan


def _with_controllers(plan: Plan, draw: Draw) -> Plan:
    """In most worlds controllers make the maps, and operators have them move records.  Then shards repair: a
    move is a comparison."""
    if not draw.chance(CONTROLLED):
        return plan
    shards = max(plan.shards, plan.replicas + draw.between(0, 1))
    orders = draw.some(ORDERS, draw.between(1, len(ORDERS)))
    return replace(
        plan,
        shards=shards,
        controllers=draw.weighted(((1, 1), (3, 3))),
        orders=(*orders, draw.choice(("grow", "shrink", "drain"))),
        order_every_s=draw.choice((0.8, 1.5, 3.0)),
        replace_after_s=draw.choice((8.0, 600.0)),
        repair_interval_s=3.0,
        burial_age_s=draw.choice((None, None, 1.0)),
        faults=(
            *plan.faults,
            *draw.some(CONTROLLER_FAULTS, draw.between(0, 5) if plan.faults else 0),
        ),
    )


def _hasty(plan: Plan) -> Plan:
    """Less patience: more happens while something is broken."""
    return replace(plan, request_timeout_s=0.5, ask_timeout_s=0.7, operation_timeout_s=3.0)


def _faults_of_voters(draw: Draw, strong_percent: int) -> tuple[str, ...]:
    if not strong_percent or draw.chance(0.5):
        return ()
    return (draw.choice(OF_VOTERS),) * 3


def _weather(draw: Draw) -> Weather:
    fast = draw.chance(0.7)
    return Weather(
        delay_s=(0.0002, 0.004) if fast else (0.005, 0.1),
        loss=draw.choice((0.0, 0.0, 0.0, 0.005, 0.03, 0.15)),
        double=draw.choice((0.0, 0.0, 0.05, 0.3)),
        tail=draw.choice((0.0, 0.002, 0.02)),
        tail_s=draw.choice((0.2, 1.0, 3.0)),
        late=draw.choice((0.0, 0.5, 1.0)),
        overtaking=draw.chance(0.4),
    )


def _faults(draw: Draw) -> tuple[str, ...]:
    """None in some worlds: a cluster must also work when nothing is wrong."""
    if draw.chance(0.08):
        return ()
    chosen = draw.some(FAULTS, draw.between(1, 7))
    if draw.chance(0.8):
        chosen += [draw.choice(LASTING)]
    if draw.chance(0.5):
        chosen += [draw.choice(OF_DISKS)] * 2
    return tuple(chosen)
