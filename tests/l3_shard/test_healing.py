"""Damaged strong records: their acceptor gets them back from the others before it votes on them again."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvcomm.wire.messages import Message, StrongEnter, StrongPrepare, StrongPromised, StrongSettle
from l3_shard import acceptor, healing
from l3_shard.ballot import NO_BALLOT, Ballot
from l3_shard.entering import MEMBERSHIP_KEY
from l3_shard.storage import Persist
from tests.l3_shard.cluster import TENANT, Faults
from tests.l3_shard.strong_world import History, StrongClient, StrongWorld, Violation
from tests.l3_shard.test_strong import calm, change, decided_without_two, done

KEY = TENANT + b"k"


def damage(world: StrongWorld, node: str, key: bytes = KEY) -> None:
    """Flip a bit on the disk; the node finds out when it reads it next."""
    world.strong[node].damaged.add(key)
    world.crash(node)
    if key != MEMBERSHIP_KEY:  # else it has more to do before it votes than to read that
        world.until(lambda: world.shards[node].strong_counts().votes)


def healed(world: StrongWorld, node: str) -> bool:
    return not world.strong[node].damaged


def test_a_damaged_record_is_filled_by_the_others_and_its_acceptor_votes_on_it_again():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    damage(world, "b")
    assert done(world, "a", "put", b"2").code == ""
    world.until(lambda: healed(world, "b"))
    world.run()
    assert world.shards["b"].strong_counts().healed_count == 1
    world.isolate("a")
    assert done(world, "b", "read").value == b"2"
    assert done(world, "c", "put", b"3").code == ""


def test_it_does_not_vote_on_it_until_enough_others_have_told():
    """The only other one that is left never had the record: together they would have forgotten it."""
    world = calm()
    world.isolate("c")
    done(world, "a", "put", b"1")  # on a and b
    world.run()
    world.cuts.clear()
    damage(world, "b")
    world.isolate("a")
    assert done(world, "c", "read").code == "unavailable"
    world.run(world.now + 3)
    assert not healed(world, "b")
    world.cuts.clear()
    world.until(lambda: healed(world, "b"))
    world.isolate("a")
    assert done(world, "c", "read").value == b"1"


def test_an_acceptor_that_has_lost_its_disk_has_nothing_to_tell():
    """a, b and c decide; b's bytes are damaged and c's disk is gone: b waits for a, not for c's nothing."""
    world = decided_without_two()
    world.isolate("a")
    world.lose("c")
    damage(world, "b")
    assert done(world, "d", "read").code == "unavailable"
    world.run(world.now + 3)
    assert not healed(world, "b")
    world.cuts.clear()
    world.until(lambda: healed(world, "b"))
    world.settle()
    world.isolate("a")
    assert done(world, "d", "read").value == b"1"


def test_meanwhile_it_votes_on_all_others():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    damage(world, "b", TENANT + b"other")
    world.isolate("c")
    change(world, "b", "read")
    assert done(world, "a", "put", b"2").code == ""
    assert world.shards["b"].strong_counts().votes


def test_what_nobody_else_has_is_nothing():
    """Accepted here alone: it was never decided."""
    world = calm()
    world.strong["b"].states[KEY] = world.strong["b"].states[MEMBERSHIP_KEY]
    damage(world, "b")
    assert done(world, "a", "put", b"1").code == ""
    world.until(lambda: healed(world, "b"))
    world.isolate("c")
    assert done(world, "b", "read").value == b"1"


def test_a_damaged_membership_is_entered_again():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    damage(world, "b", MEMBERSHIP_KEY)
    world.run(world.now + 0.1)
    assert not world.shards["b"].strong_counts().votes
    world.settle()
    world.isolate("a")
    assert done(world, "c", "read").value == b"1"


def test_votes_from_before_the_damage_are_not_counted_once_the_new_entry_is_known():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    entries = []
    ask = world._ask

    def noting(source, node, message, *rest):
        if isinstance(message, StrongEnter):
            entries.append((source, message.entry, list(message.keys or [])))
        ask(source, node, message, *rest)

    world._ask = noting  # type: ignore[method-assign]
    damage(world, "b")
    change(world, "b", "read")
    world.until(lambda: healed(world, "b"))
    assert set(map(str, entries)) == {str(("b", 2, [KEY]))}


Held = list[tuple[str, int, Persist]]


def hold_membership(world: StrongWorld, whose: str) -> Held:
    """From now on the membership of ``whose`` is not written."""
    held: Held = []
    write = world._strong_persist

    def hold(node: str, life: int, persist: Persist) -> None:
        if node == whose and any(key == MEMBERSHIP_KEY for key, _ in persist.writes):
            held.append((node, life, persist))
        else:
            write(node, life, persist)

    world._strong_persist = hold  # type: ignore[method-assign]
    return held


def let_go(world: StrongWorld, held: Held) -> None:
    del world._strong_persist
    for each in held:
        world._strong_persist(*each)


def test_an_entry_is_heard_of_when_a_crash_cannot_take_it_back_any_more():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    held = hold_membership(world, "b")
    damage(world, "b")
    change(world, "b", "read")
    world.until(lambda: bool(held))
    assert looked_at(world, "b").entry == 1
    let_go(world, held)
    assert looked_at(world, "b").entry == 2
    world.until(lambda: healed(world, "b"))


def test_a_floor_holds_when_a_crash_cannot_take_it_back_any_more():
    """Else a tombstone could go because of a floor that is not there after the crash."""
    world = calm()
    floor = Ballot(9, "a", 1).code
    held = hold_membership(world, "b")
    world._ask("a", "b", StrongSettle(1, world.map, [], floor), lambda answer: None, 1.0)
    world.until(lambda: bool(held))
    before = looked_at(world, "b")
    assert before.floor == before.state.promised == NO_BALLOT
    let_go(world, held)
    after = looked_at(world, "b")
    assert after.floor == after.state.promised == floor


def looked_at(world: StrongWorld, node: str) -> StrongPromised:
    """What the node has of a record that nobody has."""
    answers: list[Message] = []
    world._ask("a", node, StrongPrepare(1, TENANT + b"other", NO_BALLOT, [1]), answers.append, 1.0)
    world.until(lambda: bool(answers))
    assert isinstance(answers[0], StrongPromised)
    return answers[0]


def test_a_lost_disk_has_taken_no_entry_that_its_successor_takes():
    """``b`` took one to heal and could tell nobody; votes under it may be on their way."""
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    damage(world, "b")
    world.isolate("b")
    change(world, "b", "read")
    world.run(world.now + 1)
    assert "heal as entry 2" in world.story("b")
    world.lose("b")
    world.cuts.clear()
    world.settle()
    assert looked_at(world, "b").entry > 2


def test_a_copy_of_another_acceptors_disk_holds_no_votes_of_its_own():
    world = calm()
    done(world, "a", "put", b"1")
    world.run()
    votes = dict(world.strong["a"].states)
    world.lose("b")
    world.strong["b"].states = votes
    world.settle()
    copied = world.strong["b"].states[KEY]
    assert copied.register.value == b"1" and not copied.voted and world.strong["a"].states[KEY].voted


def rotting(seed: int) -> tuple[StrongWorld, History]:
    draw = random.Random(seed)
    faults = Faults(delay_s=draw.choice((0.02, 0.1, 0.3)), disk_s=draw.choice((0.001, 0.05)))
    world = StrongWorld(seed, "abc", faults, twice=draw.choice((0, 0.3)), write=1)
    world.settle()
    history = History()
    keys = [b"key/%d" % index for index in range(2)]
    for client in range(4):
        StrongClient(world, history, seed * 31 + client).act(keys, 0.2, 20)

    def rot() -> None:
        """At one node after the other: what two of three have forgotten is gone."""
        if all(healed(world, name) for name in "abc") and all(map(calm_now, "abc")):
            node = draw.choice("abc")
            world.strong[node].damaged.update(TENANT + key for key in keys)
            world.crash(node)

    def calm_now(name: str) -> bool:
        return world.shards[name].strong_counts().votes

    for _ in range(6):
        world.after(draw.uniform(0, 5), rot)
        world.after(draw.uniform(0, 5), partial(world.isolate, draw.choice("abc")))
        world.after(draw.uniform(0, 6), world.cuts.clear)
    world.run(7.0)
    world.cuts.clear()
    for client in range(2):
        StrongClient(world, history, client).act(keys, 0.2, 8)
    world.run(world.now + 20)
    return world, history


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_histories_stay_linearizable_while_bits_flip(seed: int):
    _, history = rotting(seed)
    history.check()
    assert history.outcomes.get("done", 0) > 20


@pytest.mark.slow
def test_healing_from_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The bug planted: a damaged record is taken for one that was never there."""
    monkeypatch.setattr(healing, "informed", lambda groups, node, told: True)
    monkeypatch.setattr(acceptor, "learn", lambda state, other: state)
    assert any(_violates(seed) for seed in range(40))


def _violates(seed: int) -> bool:
    _, history = rotting(seed)
    try:
        history.check()
    except Violation:
        return True
    return False
