"""Worlds written down by hand, and seeds that once showed something: each says what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest

from kvcomm.chaos.history import Returned
from kvcomm.chaos.nemesis import Nemesis
from kvcomm.chaos.network import everybody_alone, halves
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.simulation import Result, simulate

pytestmark = pytest.mark.slow

FIVE = Plan(seed=1, shards=5, clients=4, keys=4, pace_s=0.1, active_s=12.0)


def at(times: Mapping[float, Callable[[Nemesis], None]]) -> Callable[[Nemesis], None]:
    """A script: what to do when."""

    def script(nemesis: Nemesis) -> None:
        for time_s, action in times.items():
            world = nemesis.cluster.world
            world.after(time_s - world.now, partial(action, nemesis))

    return script


def kept(result: Result) -> Result:
    assert not result.violations, result.violations[:3]
    return result


def returned(result: Result, first_s: float, last_s: float) -> list[Returned]:
    return [
        operation.returned
        for operation in result.history.operations()
        if operation.returned is not None and first_s <= operation.invoked.at <= last_s
    ]


HALVES = replace(FIVE, shards=3, write_quorum=1, read_quorum=1, clients=2, keys=1)


def split(nemesis: Nemesis) -> None:
    nemesis.cut(halves(["shard0", "client0"], ["shard1", "shard2", "client1"]))


def test_halves_keep_what_they_acknowledged() -> None:
    """With W = 1 each side may write; after the heal nothing acknowledged is lost."""
    result = kept(simulate(HALVES, script=at({2.0: split})))
    assert any(line.client == "client1" and line.stored for line in returned(result, 5.0, 12.0))


def test_a_client_finds_the_one_owner_on_its_side() -> None:
    """Cut off from a record's first two owners it must not go to and fro between them: a silent shard is
    waited for longer than it is passed over the first time."""
    result = kept(simulate(HALVES, script=at({2.0: split})))
    found = [line for line in returned(result, 2.1, 12.0) if line.client == "client0" and line.at < 12.0]
    assert any(line.outcome == "ok" for line in found)


def test_all_machines_lose_power_at_once() -> None:
    """What was acknowledged under ``always`` is back; a commit under way happened or did not."""
    plan = replace(FIVE, commit_s=(0.01, 0.1), fsync="always")

    def cut(nemesis: Nemesis) -> None:
        for name in nemesis.cluster.names:
            nemesis.cluster.kill(name, 0.5)
            nemesis.cluster.disks[name].power_cut()

    kept(simulate(plan, script=at({2.0: cut, 4.0: cut, 6.0: cut})))


def test_a_coordinator_is_stopped_and_goes_on_later_with_what_it_had_in_hand() -> None:
    """SIGSTOP in the middle of writes, new maps meanwhile, SIGCONT: what it does then is refused by epoch or
    harmless."""

    def stop(nemesis: Nemesis) -> None:
        nemesis.cluster.host("shard0").pause()

    def go_on(nemesis: Nemesis) -> None:
        nemesis.cluster.host("shard0").resume()

    times = {2.0: stop, 3.0: lambda nemesis: nemesis.strike("epoch"), 7.0: go_on, 8.0: stop, 10.0: go_on}
    kept(simulate(FIVE, script=at(times)))


def test_shards_that_die_after_every_hundredth_answer() -> None:
    result = kept(simulate(replace(FIVE, fragile=0.01)))
    assert "dies at a bad moment" in result.history.encoded().decode()


def test_a_connection_dies_between_request_and_answer() -> None:
    """The client hears "unknown", never a false "refused"."""

    def reset(nemesis: Nemesis) -> None:
        for name in nemesis.cluster.names:
            nemesis.cluster.network.reset("client0", name)

    result = kept(simulate(FIVE, script=at({1.0 + index / 7: reset for index in range(60)})))
    outcomes = {line.outcome for line in returned(result, 1.0, 10.0) if line.client == "client0"}
    assert {"ok", "unknown"} <= outcomes


def test_a_full_disk_on_a_majority_refuses_and_recovers() -> None:
    def fill(nemesis: Nemesis) -> None:
        for name in nemesis.cluster.names:
            nemesis.cluster.disks[name].room_bytes = 0

    def free(nemesis: Nemesis) -> None:
        for name in nemesis.cluster.names:
            nemesis.cluster.disks[name].room_bytes = None

    result = kept(simulate(FIVE, script=at({3.0: fill, 6.0: free})))
    puts = [line for line in returned(result, 3.1, 5.0) if not line.seen]
    assert puts
    assert all(line.outcome == "refused" for line in puts), "true: nothing was written anywhere"
    assert any(line.stored for line in returned(result, 8.0, 12.0))


CROWDED = replace(FIVE, clients=8, pace_s=0.05, active_s=6.0, mix=(("blind", 5), ("batch", 3)))


def test_a_batch_that_is_refused_in_part() -> None:
    """A batch over several shards met the bound of siblings on one of them, and the others' writes were
    done: the error says of each write what became of it, and that is true."""
    result = kept(simulate(CROWDED, script=at({})))
    assert any({"ok", "refused"} <= set(line.each) for line in returned(result, 0.0, 6.0))


ALONE = replace(
    FIVE, shards=3, write_quorum=1, read_quorum=1, clients=3, keys=1, mix=(("put", 5), ("get", 1)),
    request_timeout_s=0.5, ask_timeout_s=0.7, operation_timeout_s=3.0,
)  # fmt: skip


def test_a_clients_own_last_write_may_stay_beside_its_next() -> None:
    """Where a context cannot cover the client's own write, the next put names its dot; a coordinator that
    has not heard of it lets both stand."""

    def turn(step: int, nemesis: Nemesis) -> None:
        names, clients = nemesis.cluster.names, nemesis.cluster.client_names()
        nemesis.cluster.network.cuts = everybody_alone(names) | halves([names[step % 3]], clients)

    def heal(nemesis: Nemesis) -> None:
        nemesis.cluster.network.cuts = set()

    times = {1.0 + step: partial(turn, step) for step in range(8)}
    script = at({**times, 9.0: heal})
    results = [kept(simulate(replace(ALONE, seed=seed), script=script)) for seed in range(1, 12)]
    assert any(map(_stays_beside, results)), "these worlds do not show it any more: write down others"


def _stays_beside(result: Result) -> bool:
    """Whether a read shows a client's write of its own dot together with the same client's next."""
    pairs: set[tuple[str, str]] = set()
    last: dict[str, str] = {}
    for operation in result.history.operations():
        if operation.invoked.kind != "put" or operation.returned is None or not operation.returned.stored:
            continue
        (write,), (stored,) = operation.invoked.writes, operation.returned.stored
        client = operation.invoked.client
        if write.value is not None and client in last:
            pairs.add((last[client], write.value))
        last.pop(client, None)
        if stored is not None and stored.own and write.value is not None:
            last[client] = write.value
    shown = [set(seen.values) for line in returned(result, 0.0, 1e9) for seen in line.seen]
    return any({one, other} <= values for one, other in pairs for values in shown)


SCRUBBED = replace(FIVE, shards=3, keys=6, repair_interval_s=1.0)


def rot(nemesis: Nemesis) -> None:
    """All of one disk decays after the last client has gone, and the memory of its shard is lost."""
    disk = nemesis.cluster.disks["shard1"]
    nemesis.cluster.kill("shard1", 0.1)
    for _ in range(30):
        disk.flip_bit()
    assert len(disk.states()) < len(disk.values)


def test_damaged_records_that_nobody_reads_are_found_and_mended() -> None:
    """Comparisons go by the index, where their digests are still right; only reading shows it."""
    kept(simulate(SCRUBBED, script=at({13.0: rot})))


def test_records_that_decay_in_the_middle_of_everything_are_mended() -> None:
    kept(simulate(SCRUBBED, script=at({2.0: rot, 7.0: rot, 11.9: rot})))


def test_a_record_that_is_damaged_twice_loses_its_counters_twice() -> None:
    """Written over after the first damage, damaged again before anybody had mended it: the shard went on
    under the same id and gave a dot out a second time."""
    unmended = replace(FIVE, shards=3, replicas=3, keys=3, write_quorum=1, read_quorum=1, active_s=8.0)
    times = {2.0 + 0.2 * step: rot for step in range(25)}
    kept(simulate(replace(unmended, losses=99), script=_lossy(times)))


def _lossy(times: Mapping[float, Callable[[Nemesis], None]]) -> Callable[[Nemesis], None]:
    """A script that costs replicas their state."""

    def script(nemesis: Nemesis) -> None:
        nemesis.intact = False
        at(times)(nemesis)

    return script


def test_without_a_scrub_they_stay_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the two above can condemn."""
    monkeypatch.setattr("l3_shard.scrub.Scrub.start", lambda self: None)
    result = simulate(SCRUBBED, script=at({13.0: rot}))
    assert {violation.promise for violation in result.violations} == {"converged"}


def test_the_world_can_be_told_again() -> None:
    line = simulate(replace(FIVE, active_s=1.0)).history.encoded().split(b"\n")[0]
    assert b'"event":"began"' in line
    assert b'"shards":5' in line
