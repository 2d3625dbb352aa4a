"""Faults of strong records that have a name, each as a world written down by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import pytest

from kvcomm.chaos.cluster import Cluster
from kvcomm.chaos.history import Operation
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.network import Weather, halves, isolate
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.registers import KINDS, READS
from kvcomm.chaos.simulation import FOUNDED_WITHIN_S, Result, simulate
from kvcomm.errors import OutcomeUnknown, Unavailable
from tests.sim.planted import PLANTED
from tests.sim.scenarios.test_named import at, kept

pytestmark = pytest.mark.slow

THREE = Plan(
    seed=1, shards=3, clients=5, registers=2, strong_percent=100, pace_s=0.1, active_s=12.0, spread=True,
    request_timeout_s=0.5, ask_timeout_s=0.7, operation_timeout_s=3.0,
)  # fmt: skip
FIVE = replace(THREE, shards=5, replicas=5, clients=8)


def strong(result: Result, first_s: float, last_s: float) -> list[Operation]:
    """Operations on strong records that were begun then."""
    return [
        operation
        for operation in result.history.operations()
        if operation.invoked.kind in KINDS and first_s <= operation.invoked.at <= last_s
    ]


def done_at(operations: list[Operation]) -> list[float]:
    return sorted(each.returned.at for each in operations if each.returned and each.outcome == "ok")


DUEL = replace(
    THREE, registers=1, pace_s=0.02, active_s=8.0, strong_mix=(("set", 2), ("cas", 2), ("read", 1))
)


def never_stops(result: Result) -> None:
    """Something is written in every simulated second."""
    ends = done_at([each for each in strong(result, 1.0, 8.0) if each.invoked.kind not in READS])
    assert all(any(second <= end < second + 1 for end in ends) for second in range(1, 8))


def test_a_lost_frame_costs_a_new_cluster_less_than_the_request_timeout() -> None:
    """A shard that enters asks nearly all others, twice.  With every seventh frame lost, a wait of the whole
    time-out for each, and shards that die meanwhile, founding took four time-outs and more."""
    patient = replace(
        FIVE, request_timeout_s=4.5, ask_timeout_s=6.0, operation_timeout_s=18.0, replicas=3,
        weather=Weather(loss=0.15), fragile=0.01,
    )  # fmt: skip
    clusters = [Cluster(replace(patient, seed=seed)) for seed in range(1, 10)]
    for cluster in clusters:
        cluster.found(FOUNDED_WITHIN_S)
        assert not cluster.violations
    assert median(cluster.world.now for cluster in clusters) < 3 * patient.request_timeout_s


def test_forty_clients_duel_about_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 43: proposers meet all the time.  So many at once are too hard for the judge of the order."""
    monkeypatch.setattr("kvcomm.chaos.registers.check_register", lambda accesses: None)
    never_stops(kept(simulate(replace(DUEL, clients=40), script=at({}))))


def test_eight_clients_duel_about_one_record() -> None:
    """Fault 43, with the order judged too."""
    never_stops(kept(simulate(replace(DUEL, clients=8), script=at({}))))


def test_the_majority_goes_on_and_the_minority_refuses() -> None:
    """Fault 1: an isolated part is told within the deadline that nothing is done, or known to be, and nobody
    else stops for a second."""

    def split(nemesis: Nemesis) -> None:
        few, many = ["shard0", "shard1", "client0"], ["shard2", "shard3", "shard4"]
        nemesis.cut(halves(few, [*many, *nemesis.cluster.client_names()[1:]]))

    result = kept(simulate(FIVE, script=at({3.0: split})))
    within = strong(result, 4.0, 11.0)
    ended = [each for each in within if each.returned and each.returned.at < FIVE.active_s]  # then it heals
    alone = [each for each in ended if each.invoked.client == "client0"]
    assert alone and not done_at(alone)
    codes = {each.returned.error.partition(":")[0] for each in alone if each.returned}
    assert codes <= {Unavailable.code, OutcomeUnknown.code}
    ends = done_at([each for each in within if each.invoked.client != "client0"])
    assert max(later - sooner for sooner, later in pairwise(ends)) < 1.0


def test_each_node_in_turn_is_isolated() -> None:
    """Fault 4."""

    def turn(away: int, nemesis: Nemesis) -> None:
        nemesis.cluster.network.cuts = isolate(f"shard{away % 5}", nemesis.cluster.names)

    result = kept(simulate(FIVE, script=at({1.0 + step: partial(turn, step) for step in range(10)})))
    assert len(done_at(strong(result, 1.0, 11.0))) > 100


def test_a_delete_while_an_acceptor_is_away_is_final() -> None:
    """Fault 40: one that did not hear of it is back, while one that did is away or has lost its disk."""
    deleting = replace(THREE, registers=1, strong_mix=(("set", 2), ("clear", 3), ("read", 3)))

    def turn(step: int, nemesis: Nemesis) -> None:
        away, forgets = f"shard{step % 3}", f"shard{(step + 1) % 3}"
        nemesis.cluster.network.cuts = isolate(away, nemesis.cluster.names)
        if step % 4 == 3 and not nemesis.cluster.lost_voters():
            nemesis.cluster.kill(forgets, 0.1)
            nemesis.cluster.lose_strong(forgets)
            nemesis.cluster.network.cuts = set()

    result = kept(
        simulate(deleting, script=at({1.0 + 0.4 * step: partial(turn, step) for step in range(25)}))
    )
    assert sum(each.invoked.kind == "clear" for each in strong(result, 1.0, 11.0)) > 20


def forgets(nemesis: Nemesis) -> None:
    """shard2 did not hear what shard0 and shard1 decided; then shard1 forgets it and shard0 is away."""
    everybody = nemesis.cluster.names
    nemesis.cluster.network.cuts = isolate("shard2", everybody)

    def lose() -> None:
        nemesis.cluster.kill("shard1", 0.05)
        nemesis.cluster.lose_strong("shard1")
        nemesis.cluster.network.cuts = isolate("shard0", everybody)

    nemesis.cluster.world.after(1.0, lose)


def heal(nemesis: Nemesis) -> None:
    nemesis.cluster.network.cuts = set()


def test_an_emptied_acceptor_does_not_vote_before_it_knows() -> None:
    """Fault 16: its empty state and one that was not asked are no majority."""
    kept(simulate(THREE, script=at({3.0: forgets, 7.0: heal})))


def test_the_judge_of_that_can_condemn() -> None:
    with PLANTED["empty acceptor votes"].plant():
        result = simulate(THREE, script=at({3.0: forgets, 7.0: heal}))
    assert {"linearizable"} <= {violation.promise for violation in result.violations}


def test_all_machines_lose_power_again_and_again() -> None:
    """Faults 18, 19: every acknowledged change is back (P16)."""

    def cut(nemesis: Nemesis) -> None:
        nemesis.cluster.power_cut()

    result = kept(simulate(FIVE, script=at({2.0: cut, 5.0: cut, 8.0: cut})))
    assert len(done_at(strong(result, 1.0, 12.0))) > 100


def test_a_coordinator_is_stopped_in_the_middle_of_a_change() -> None:
    """Fault 21: what it had in hand when it is continued is decided by ballots, not by its clock."""

    def stop(name: str, nemesis: Nemesis) -> None:
        nemesis.cluster.host(name).pause()

    def go_on(name: str, nemesis: Nemesis) -> None:
        nemesis.cluster.host(name).resume()

    times = {}
    for step in range(5):
        name = f"shard{step % 3}"
        times[1.5 + 2 * step] = partial(stop, name)
        times[3.0 + 2 * step] = partial(go_on, name)
    result = kept(simulate(THREE, script=at(times)))
    assert len(done_at(strong(result, 1.0, 12.0))) > 100


def test_owners_move_while_records_are_changed() -> None:
    """Fault 34, for strong records: five shards, three owners a record; one leaves, and comes back."""
    moving = replace(FIVE, replicas=3, registers=5)
    times = {1.0 + step: lambda nemesis: nemesis.strike("move") for step in range(10)}
    result = kept(simulate(moving, script=at(times)))
    assert len(done_at(strong(result, 1.0, 11.0))) > 100
