"""Other owners take strong records over: what was decided stays decided, whoever stops when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from kvcomm.machine import Effect
from kvcomm.wire.messages import (
    Failure,
    Message,
    RingMap,
    StrongAccept,
    StrongOutcome,
    StrongPrepare,
    StrongPromised,
)
from l3_shard import settling
from l3_shard.ballot import NO_BALLOT
from l3_shard.changing import Changing
from l3_shard.configuration import decode
from l3_shard.ring import Ring
from l3_shard.settling import Settling
from l3_shard.storage import Persist, Scan
from tests.l3_shard.cluster import TENANT, Faults, ring_map
from tests.l3_shard.strong_world import History, StrongClient, StrongWorld, Violation
from tests.l3_shard.test_strong import calm, done

PLANTED_SEEDS = 60


def placed(names: str, epoch: int) -> RingMap:
    return ring_map(names, epoch=epoch, write=1)


def test_new_owners_decide_alone_once_they_have_everything():
    world = calm("abc")
    assert done(world, "a", "put", b"1").code == ""
    for name in "def":
        world.join(name, placed("abcdef"[: "abcdef".index(name) + 1], 1))  # heard of, and no owners yet
    world.adopt(placed("def", 2))
    world.until(world.settled)
    for name in "abc":
        world.isolate(name)
    assert done(world, "d", "read").value == b"1"
    assert done(world, "e", "put", b"2").code == ""
    assert done(world, "f", "read").value == b"2"


def test_until_then_the_old_majority_is_needed():
    world = calm("abc")
    assert done(world, "a", "put", b"1").code == ""
    world.run()
    for name in "def":
        world.join(name, placed("abc", 1))
    for name in "ab":
        world.isolate(name)
    world.adopt(placed("def", 2))
    world.run(world.now + 10)
    assert done(world, "d", "read").code == "unavailable" and not world.settled()
    world.cuts.clear()
    world.until(world.settled)
    assert done(world, "d", "read").value == b"1"


def test_records_are_confirmed_a_few_at_a_time_with_rests_between(monkeypatch: pytest.MonkeyPatch):
    """All at once they would hold up whoever calls meanwhile."""
    under_way: Counter[int] = Counter()
    most, begun_at = 0, list[float]()
    confirm = Changing.confirm

    def counted(self: Changing, key: bytes, then: Callable[[StrongOutcome], None]) -> None:
        nonlocal most
        under_way[id(self)] += 1
        most = max(most, under_way[id(self)])
        begun_at.append(world.now)

        def over(outcome: StrongOutcome) -> None:
            under_way[id(self)] -= 1
            then(outcome)

        confirm(self, key, over)

    monkeypatch.setattr(Changing, "confirm", counted)
    monkeypatch.setattr(settling, "WINDOW_KEYS", 1)  # a page of this world has two
    monkeypatch.setattr(settling, "REST", 50.0)
    world = calm("abc")
    for number in range(10):
        assert done(world, "a", "put", b"1", key=b"k%d" % number).code == ""
    world.join("d", placed("abc", 1))
    world.adopt(placed("bcd", 2))
    world.until(world.settled)
    assert most == 1
    hop_s = 0.001
    assert max(begun_at) - min(begun_at) >= 2 * settling.REST * 2 * hop_s, (
        "two rests, of windows of a round trip"
    )
    assert done(world, "d", "read", key=b"k9").value == b"1"


@pytest.mark.parametrize("away", ["", "b"])
def test_one_owner_confirms_a_record_and_tells_the_others(away: str, monkeypatch: pytest.MonkeyPatch):
    """All at the same time would be in each other's way; for one that is away the next one does it."""
    confirmed: Counter[bytes] = Counter()
    confirm = Changing.confirm

    def counted(self: Changing, key: bytes, then: Callable[[StrongOutcome], None]) -> None:
        confirmed[key] += 1
        confirm(self, key, then)

    monkeypatch.setattr(Changing, "confirm", counted)
    world = calm("abc")
    keys = [b"k%d" % number for number in range(12)]
    for key in keys:
        assert done(world, "a", "put", b"1", key=key).code == ""
    world.run()
    for name in "de":
        world.join(name, placed("abc", 1))
    if away:
        world.isolate(away)
    world.page_keys = len(keys)
    confirmed.clear()
    world.adopt(placed("cde", 2))
    world.until(world.settled)
    assert confirmed.keys() == {TENANT + key for key in keys}
    assert confirmed.total() <= 2 * len(keys), "each of all its owners, old and new, would be five times"
    world.isolate("c")
    assert done(world, "d", "read", key=keys[-1]).value == b"1"


def told_of_before_the_next_map(monkeypatch: pytest.MonkeyPatch) -> StrongOutcome:
    """``a`` has confirmed the record for other owners, of whom ``d`` was away, and told the old ones, when
    still others are to have it; then ``a`` is away."""
    monkeypatch.setattr(settling, "TURN_S", 1.0)
    world, then = calm("abc"), placed("abd", 2)
    rings = (world.shards["a"].ring, Ring.from_map(then))
    key = next(
        key for key in (b"k%d" % number for number in range(99))
        if all(ring.replicas(key)[0] == "a" for ring in rings)
    )  # fmt: skip
    assert done(world, "a", "put", b"1", key=key).code == ""
    world.run()
    for name in "dfgh":
        world.join(name, placed("abc", 1))
    world.run(world.now + 1)
    world.isolate("d")
    world.adopt(then, "abcd")
    world.run(world.now + 0.5)
    assert not world.settled(), "b and c are still to have their turns"
    world.cuts.clear()
    world.isolate("a")
    world.adopt(placed("fgh", 3), "bcdfgh")
    world.until(world.settled)
    return done(world, "f", "read", key=key)


def test_who_was_told_of_a_record_confirms_it_for_the_owners_of_a_later_map(monkeypatch: pytest.MonkeyPatch):
    assert told_of_before_the_next_map(monkeypatch).value == b"1"


def test_if_it_did_not_the_record_would_be_gone(monkeypatch: pytest.MonkeyPatch):
    def hears(self: Settling, keys: Iterable[bytes], maps: tuple[int, ...]) -> None:
        self._told_maps = maps
        self._told_of |= dict.fromkeys(keys)

    monkeypatch.setattr(Settling, "_hear_of", hears)
    assert told_of_before_the_next_map(monkeypatch).value is None


def slept_through() -> tuple[StrongWorld, StrongOutcome]:
    """``a`` knows nothing of the new owners, and reaches one that was an owner with it: together they are a
    majority of the old ones.  What its put came to."""
    world = calm("abc")
    assert done(world, "a", "put", b"1").code == ""
    world.run()
    for name in "de":
        world.join(name, placed("abc", 1))
    world.isolate("a")
    world.adopt(placed("cde", 2), "bcde")
    world.until(world.settled)
    world.map = placed("abc", 1)  # whom the client of the cut off asks
    world.cuts.clear()
    for name in "cde":
        world.cut(("a", name), (name, "a"))
    outcome = done(world, "a", "put", b"2")
    world.map = placed("cde", 2)
    return world, outcome


def test_who_slept_through_the_change_of_owners_decides_nothing_by_the_old_map():
    world, outcome = slept_through()
    assert outcome.code in ("unavailable", "outcome_unknown"), "b was told, and refuses it"
    assert done(world, "c", "read").value == b"1"


def test_a_vote_is_refused_to_another_configuration_and_the_refusal_tells_ours():
    world = calm("abc")
    answers: list[Message] = []
    for maps in ([], [2], [1, 2], [1]):
        message = StrongPrepare(1, TENANT + b"k", NO_BALLOT, maps)
        world._ask("a", "b", message, answers.append, 1.0)
        world.run()
    *others, same = answers
    assert isinstance(same, StrongPromised)
    for answer in others:
        assert isinstance(answer, Failure) and answer.code == "unavailable"
        assert decode(answer.detail).settled == world.map


def settled_by_those_who_have_nothing() -> StrongOutcome:
    """What was decided is on ``a`` and ``b``; ``c`` never had it, and reaches the new owners first."""
    world = calm("abc")
    for name in "de":
        world.join(name, placed("abc", 1))
    world.cut(("c", "a"), ("a", "c"), ("c", "b"), ("b", "c"))
    assert done(world, "a", "put", b"1").code == ""
    world.adopt(placed("cde", 2))
    world.until(world.settled)
    return done(world, "d", "read")


def test_one_old_owner_alone_does_not_settle():
    assert settled_by_those_who_have_nothing().value == b"1"


def test_if_it_did_a_record_that_it_never_had_would_be_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(settling, "majority", lambda group: 1)
    assert settled_by_those_who_have_nothing().value is None


class SlowDisks(StrongWorld):
    """Some of the strong disks take their time with some effects; nothing overtakes what came before it."""

    def __init__(self, *args: Any, **how: Any) -> None:
        self.slow_s: dict[tuple[str, type[Effect]], float] = {}
        self._free_at: dict[tuple[str, type[Effect]], float] = {}
        super().__init__(*args, **how)

    def _perform(self, node: str, effect: Effect) -> None:
        if getattr(effect, "database", "") != "strong":
            super()._perform(node, effect)
            return
        kind = node, type(effect)
        at = max(self.now + self.slow_s.get(kind, 0.0), self._free_at.get(kind, 0.0) + 2 * self.faults.disk_s)
        self._free_at[kind] = at
        self.after(at - self.now, partial(super()._perform, node, effect))


@pytest.mark.parametrize("first", "abc")
def test_a_vote_that_is_still_being_written_is_in_the_scan(first: str):
    """``a`` has just voted for a change when it hears of new owners, and its disk is slow: the others are
    fenced long before that vote is where a scan finds it.  ``b``, which has it too, scans late and is not
    heard then; ``c`` was not asked, and has what was there before, under the same promise.  Who of them is
    the first to confirm the record is no matter: what ``c`` confirms then is not all that there is."""
    world = SlowDisks(1, "abc", Faults(delay_s=0.02, disk_s=0.001), replicas=3, write=1)
    world.settle()
    world.join("d", placed("abc", 1))
    ring = world.shards["a"].ring
    key = next(key for key in (b"k%d" % number for number in range(99)) if ring.replicas(key)[0] == first)
    assert done(world, "b", "put", b"1", key=key).code == ""
    world.run()
    send, begun = world._send, ""

    def from_now(node: str, number: int, message: Message) -> None:
        nonlocal begun
        if not isinstance(message, StrongAccept) or {*begun} == {*"ac"}:
            send(node, number, message)
            return
        begun += node
        if node == "a":
            send(node, number, message)
            world.slow_s = {("a", Persist): 0.9, ("b", Scan): 5.0, ("a", Scan): 0.3, ("c", Scan): 0.3}
            world.after(0.1, partial(world.adopt, placed("acd", 2)))
            world.after(0.3, partial(world.cut, ("b", "a"), ("b", "c"), ("d", "a"), ("d", "c")))
            world.after(1.0, world.slow_s.clear)
            world.after(1.5, world.cuts.clear)

    world._send = from_now  # type: ignore[method-assign]
    assert done(world, "b", "put", b"2", key=key).code == ""
    world.until(world.settled)
    world.run(world.now + 2)
    world.isolate("a")
    assert done(world, "c", "read", key=key).value == b"2"


def test_equal_owners_at_other_addresses_are_no_change():
    world = calm("abc")
    done(world, "a", "put", b"1")
    world.adopt(placed("abc", 2))
    world.run(world.now + 1)
    assert world.settled() and "maps [1]" in world.story("a")


@pytest.mark.parametrize("at_ms", range(20, 700, 85))
def test_a_voter_that_stops_at_any_step_goes_on_from_there(at_ms):
    world = calm("abc", seed=at_ms)
    for number in range(5):
        done(world, "a", "put", b"%d" % number)
    world.run()
    for name in "de":
        world.join(name, placed("abc", 1))
    world.adopt(placed("bde", 2))
    for name in "abcde":
        world.after(at_ms / 1_000, partial(world.crash, name))
    world.run(world.now + at_ms / 1_000)
    world.until(world.settled)
    world.isolate("a")
    world.isolate("c")
    assert done(world, "d", "read").value == b"4"


def moving(seed: int) -> tuple[StrongWorld, History]:
    """Clients at work while the ring changes three times, with cuts and crashes."""
    draw = random.Random(seed)
    faults = Faults(delay_s=draw.choice((0.02, 0.1, 0.2)), disk_s=draw.choice((0.001, 0.05)))
    world = StrongWorld(seed, "abc", faults, twice=draw.choice((0, 0.3)), write=1)
    world.settle()
    for name in "def":
        world.join(name, placed("abc", 1))
    history = History()
    for client in range(4):
        actor = StrongClient(world, history, seed * 31 + client, nodes="abcdef")
        actor.act([b"key/%d" % index for index in range(2)], 0.3, 30)
    for epoch, names in enumerate(draw.choice((("abcd", "bcde", "cdef"), ("def",), ("ade", "bdf"))), 2):
        told = "".join(draw.sample("abcdef", draw.randint(3, 6)))
        world.after((epoch - 1) * draw.uniform(0.5, 2), partial(world.adopt, placed(names, epoch), told))
    for _ in range(draw.randint(1, 6)):
        at, node = draw.uniform(0, 5), draw.choice("abcdef")
        world.after(at, partial(draw.choice((world.crash, world.isolate)), node))
        world.after(at + draw.uniform(0.5, 2), world.cuts.clear)
    world.run(8.0)
    world.cuts.clear()
    world.adopt(world.map)
    return world, history


def finish(world: StrongWorld, history: History) -> None:
    world.until(world.settled)
    reader = StrongClient(world, history, 7, nodes="".join(world.map_names))
    for _ in range(4):
        reader.act([b"key/0", b"key/1"], 0.1, 6)
    world.run(world.now + 15)
    history.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_histories_stay_linearizable_while_owners_come_and_go(seed):
    world, history = moving(seed)
    finish(world, history)
    assert history.outcomes.get("done", 0) > 5


# -- the rules, each planted away


def no_scan(patch: pytest.MonkeyPatch) -> None:
    """The new owners decide before they have what was decided."""
    patch.setattr(Settling, "_has_all", lambda self, known: True)


def told_too_early(patch: pytest.MonkeyPatch) -> None:
    """The other owners are told of records that are still to be confirmed."""
    go_on = Settling._go_on

    def tells(self: Settling, rest_s: float) -> None:
        self._done, self._turn = [key for _, key in self._keys], -1
        go_on(self, rest_s)

    patch.setattr(Settling, "_go_on", tells)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [no_scan, told_too_early])
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(_violates(seed) for seed in range(PLANTED_SEEDS)), f"not noticed in {PLANTED_SEEDS} seeds"


def _violates(seed: int) -> bool:
    world, history = moving(seed)
    try:
        finish(world, history)
    except Violation:
        return True
    return False
