"""What deletions leave behind goes, and nothing of it comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from kvcomm.wire.messages import StrongRegister, StrongState
from l3_shard import acceptor, removing
from l3_shard.ballot import NO_BALLOT, Ballot
from l3_shard.quorum import Quorum, Standing
from l3_shard.removing import _Case, verdict
from tests.l3_shard.cluster import TENANT, Faults, ring_map
from tests.l3_shard.strong_world import History, StrongClient, StrongWorld, Violation
from tests.l3_shard.test_strong import calm, done

KEY = TENANT + b"k"
AGE_S = 0.3


def holders(world: StrongWorld) -> str:
    return "".join(name for name in world.names if KEY in world.strong[name].states)


def played(world: StrongWorld, seconds: float) -> None:
    world.run(world.now + seconds)


def test_a_tombstone_that_all_owners_have_goes_everywhere():
    world = calm(tombstone_age_s=AGE_S)
    first = done(world, "a", "put", b"1").version
    deleted = done(world, "b", "delete").version
    world.until(lambda: not holders(world))
    assert sum(shard.strong_counts().removed_count for shard in world.shards.values()) == 3
    assert done(world, "c", "read").value is None
    again = done(world, "c", "cas", b"2").version
    assert again > deleted > first, "no version is ever given out twice"
    assert done(world, "a", "cas", b"3", first).code == "conflict"
    assert done(world, "a", "read").value == b"2"


def test_while_an_owner_is_away_the_tombstone_stays_and_its_old_value_is_not_revived():
    world = calm(tombstone_age_s=AGE_S)
    done(world, "a", "put", b"42")
    played(world, 0.2)
    world.isolate("a")
    assert done(world, "b", "delete").code == ""
    played(world, 5)
    assert holders(world) == "abc"
    world.cuts.clear()
    world.until(lambda: not holders(world))
    world.isolate("c")
    assert done(world, "a", "read").value is None
    assert done(world, "b", "read").value is None


def test_an_owner_that_missed_the_removal_keeps_a_tombstone_and_a_sweep_sees_to_it():
    world = calm(tombstone_age_s=AGE_S)
    done(world, "a", "put", b"1")
    done(world, "a", "delete")
    ask = world._ask
    lost: list[str] = []

    def losing(source, node, message, *rest):
        if type(message).__name__ == "StrongRemove" and not lost:
            lost.append(node)
            return
        ask(source, node, message, *rest)

    world._ask = losing  # type: ignore[method-assign]
    world.until(lambda: bool(lost) and holders(world) == lost[0])
    assert done(world, lost[0], "read").value is None
    world.crash(lost[0])  # it looks through its records soon after its start
    world.until(lambda: not holders(world))


def test_a_record_that_has_a_value_again_is_left_alone():
    world = calm(tombstone_age_s=AGE_S)
    done(world, "a", "put", b"1")
    done(world, "a", "delete")
    done(world, "b", "put", b"2")
    played(world, 4)
    assert holders(world) == "abc" and done(world, "c", "read").value == b"2"


def test_a_late_accept_from_before_the_removal_is_refused():
    """It was on its way all the time; the acceptor has nothing of the record any more, only its floor."""
    old = Ballot(1, "a", 1).code
    floor = Ballot(7, "b", 1).code
    before = acceptor.floored(acceptor.EMPTY, floor)
    assert acceptor.accept(before, old, StrongRegister([old], b"42")) is None
    assert acceptor.accept(acceptor.EMPTY, old, StrongRegister([old], b"42")) is not None, "without a floor"
    assert acceptor.prepare(before, Ballot(8, "a", 1).code) is not None


def held(ballot: bytes, value: bytes | None) -> StrongState:
    return StrongState(ballot, ballot, StrongRegister([ballot], value), True)


@pytest.mark.parametrize(
    ("third", "expected"),
    [
        (held(Ballot(5, "a", 1).code, None), "remove"),
        (held(Ballot(3, "a", 1).code, b"old"), "confirm"),
        (held(Ballot(9, "a", 1).code, b"new"), "drop"),
        (acceptor.floored(acceptor.EMPTY, Ballot(6, "a", 1).code), "remove"),
        (acceptor.floored(acceptor.EMPTY, Ballot(4, "a", 1).code), "confirm"),
        (acceptor.EMPTY, "confirm"),
        (None, "later"),
    ],
)
def test_when_a_tombstone_may_go(third: StrongState | None, expected: str):
    case = _Case(b"k", Quorum((("a", "b", "c"),)))
    states = {"a": held(Ballot(5, "a", 1).code, None), "b": held(Ballot(5, "a", 1).code, None), "c": third}
    for node, state in states.items():
        if state is not None:
            case.states[node], case.standings[node] = state, Standing(1, {})
    assert verdict(case) == expected


def test_answers_of_an_owner_that_has_lost_its_disk_since_do_not_count():
    case = _Case(b"k", Quorum((("a", "b", "c"),)))
    for node in "abc":
        case.states[node] = held(Ballot(5, "a", 1).code, None)
        case.standings[node] = Standing(1, {"a": 2} if node == "b" else {})
    assert verdict(case) == "later"


def deleting(seed: int) -> tuple[StrongWorld, History]:
    """Much is deleted and removed at once, with crashes, cuts and lost disks, one at a time."""
    draw = random.Random(seed)
    faults = Faults(delay_s=draw.choice((0.02, 0.1, 0.3)), disk_s=draw.choice((0.001, 0.05)))
    age_s = draw.choice((0.0, 0.05, 0.3))
    world = StrongWorld(seed, "abc", faults, twice=draw.choice((0, 0.3)), tombstone_age_s=age_s, write=1)
    world.settle()
    history = History()
    keys = [b"key/%d" % index for index in range(2)]
    for client in range(4):
        StrongClient(world, history, seed * 31 + client).act(keys, 0.6, 30)

    def lose() -> None:
        if all(shard.strong_counts().votes for shard in world.shards.values()):
            world.lose(draw.choice(world.names))

    for _ in range(draw.randint(2, 7)):
        at, node = draw.uniform(0, 8), draw.choice("abc")
        world.after(at, draw.choice((partial(world.crash, node), partial(world.isolate, node), lose)))
        world.after(at + draw.uniform(0.5, 2), world.cuts.clear)
    world.run(12.0)
    world.cuts.clear()
    for client in range(2):
        StrongClient(world, history, client).act(keys, 0.3, 8)
    world.run(world.now + 20)
    return world, history


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_histories_stay_linearizable_while_deleted_records_are_removed(seed: int):
    world, history = deleting(seed)
    history.check()
    assert sum(shard.strong_counts().removed_count for shard in world.shards.values()) > 0


def at_once(patch: pytest.MonkeyPatch) -> None:
    """A tombstone goes where a majority has it."""

    def hasty(case: _Case) -> str:
        newest = max(case.states.values(), key=lambda state: state.accepted, default=acceptor.EMPTY)
        return "remove" if acceptor.is_tombstone(newest) else "drop"

    patch.setattr(removing, "verdict", hasty)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [at_once])
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    assert any(_violates(seed) for seed in range(60))


def _violates(seed: int) -> bool:
    _, history = deleting(seed)
    try:
        history.check()
    except Violation:
        return True
    return False


def test_nothing_is_promised_where_nothing_was_removed():
    assert acceptor.floored(acceptor.EMPTY, NO_BALLOT) == acceptor.EMPTY


def test_a_restored_backup_does_not_bring_back_what_was_removed_since():
    world = calm(tombstone_age_s=AGE_S)
    done(world, "a", "put", b"42")
    done(world, "a", "put", b"43", b"")
    played(world, 0.2)
    backup = dict(world.strong["b"].states)
    done(world, "a", "delete")
    world.until(lambda: not holders(world))
    world.lose("b")
    world.strong["b"].states.update(backup)
    world.crash("b")
    world.settle()
    world.isolate("a")
    assert done(world, "c", "read").value is None
    assert "b" not in holders(world)


def test_removal_goes_on_after_any_number_of_changes_of_owners():
    world = calm("abc", tombstone_age_s=AGE_S)
    for name in "de":
        world.join(name, ring_map("abc", epoch=1, write=1))
    for epoch, names in enumerate(("bcd", "cde", "abe", "abc"), 2):
        done(world, world.map_names[0], "put", b"%d" % epoch)
        world.adopt(ring_map(names, epoch=epoch, write=1))
        world.until(world.settled)
        assert done(world, names[0], "read").value == b"%d" % epoch
        assert done(world, names[1], "delete").code == ""
        world.until(lambda: not holders(world))


def test_a_tombstone_stays_while_other_owners_are_taking_over():
    world = calm("abc", tombstone_age_s=AGE_S)
    world.join("d", ring_map("abc", epoch=1, write=1))
    done(world, "a", "put", b"1")
    done(world, "a", "delete")
    world.isolate("a")
    world.adopt(ring_map("bcd", epoch=2, write=1), "abc")
    world.isolate("b")
    played(world, 5)
    assert set("abc") <= set(holders(world))
    world.cuts.clear()
    world.adopt(world.map)
    world.until(lambda: not holders(world))
