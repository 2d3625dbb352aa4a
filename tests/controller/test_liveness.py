"""Who is alive: by heartbeats, by what the nodes say of each other, and never by who was late itself."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.liveness import Liveness, Patience
from kvcomm.wire.messages import Heartbeat

BEAT_S = 2.0


def beat(
    node: str,
    number: int,
    *,
    life: int = 1,
    silent: tuple[str, ...] = (),
    late_s: float = 0.0,
    role: str = "shard",
) -> Heartbeat:
    return Heartbeat(node, role, "rack", life, number, "", "", "", 1, late_s, list(silent))


class Pulse:
    """Nodes that beat every two seconds, unless told otherwise."""

    def __init__(self, *names: str) -> None:
        self.liveness = Liveness(Patience())
        self.now = 0.0
        self.numbers = dict.fromkeys(names, 0)
        self.cut: set[str] = set()
        self.silent: dict[str, tuple[str, ...]] = {}
        self.late_s: dict[str, float] = {}
        self.states: dict[str, list[str]] = {name: [] for name in names}

    def run(self, seconds: float, step_s: float = 0.5) -> None:
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            for name in self.numbers:
                if name not in self.cut and self.now % BEAT_S == 0:
                    self.beat(name)
            self.liveness.judge(self.now)
            self.liveness.check()
            for name, seen in self.states.items():
                state = self.liveness.state(name)
                if not seen or seen[-1] != state:
                    seen.append(state)

    def beat(self, name: str, life: int = 1) -> bool:
        self.numbers[name] += 1
        return self.liveness.heard(
            beat(
                name,
                self.numbers[name],
                life=life,
                silent=self.silent.get(name, ()),
                late_s=self.late_s.get(name, 0.0),
            ),
            self.now,
        )


def test_a_node_is_suspect_after_two_intervals_and_dead_after_its_lease() -> None:
    liveness = Liveness(Patience())
    assert liveness.state("pool-0") == "unknown"
    liveness.heard(beat("pool-0", 1, role="pool"), 10.0)
    for now, state in ((13.9, "alive"), (14.0, "suspect"), (15.9, "suspect"), (16.0, "dead")):
        liveness.judge(now)
        assert liveness.state("pool-0") == state
    assert liveness.gone_s("pool-0", 20.0) == 4.0
    assert liveness.silent_s("pool-0", 20.0) == 10.0


def test_late_and_doubled_heartbeats_prove_nothing() -> None:
    liveness = Liveness(Patience())
    assert liveness.heard(beat("a", 5), 0.0)
    assert not liveness.heard(beat("a", 5), 3.0)
    assert not liveness.heard(beat("a", 4), 3.0)
    liveness.judge(4.0)
    assert liveness.state("a") == "suspect"


def test_a_new_life_counts_from_one_and_an_ended_one_is_over() -> None:
    liveness = Liveness(Patience())
    assert liveness.heard(beat("a", 5, life=7), 0.0)
    assert liveness.heard(beat("a", 1, life=3), 1.0)
    assert not liveness.heard(beat("a", 6, life=7), 2.0), "an overtaken message of the life before"
    assert liveness.heard(beat("a", 2, life=3), 2.0)
    assert liveness.incarnation("a") == 3


def test_whoever_is_expected_and_never_comes_is_gone() -> None:
    liveness = Liveness(Patience())
    liveness.expect(["a"], 10.0)
    assert not liveness.gone("a", 16.0 - 1e-6)
    assert liveness.gone_s("a", 20.0) == 4.0
    assert liveness.state("a") == "unknown"
    assert liveness.heard(beat("a", 1), 21.0)
    assert not liveness.gone("a", 21.0)


def test_a_bridge_makes_nobody_dead_and_changes_states_twice() -> None:
    """We hear a, b and the bridge; the bridge hears d and e, which we do not."""
    pulse = Pulse("a", "b", "bridge", "d", "e")
    pulse.run(10)
    pulse.cut = {"d", "e"}
    pulse.silent = {"a": ("d", "e"), "b": ("d", "e")}
    pulse.run(120)
    assert pulse.liveness.state("d") == "suspect"
    assert pulse.liveness.vouchers("d", pulse.now) == ["bridge"]
    assert pulse.liveness.silent_to("d", pulse.now) == ["a", "b"]
    pulse.cut, pulse.silent = set(), {}
    pulse.run(10)
    assert pulse.states["d"] == ["unknown", "alive", "suspect", "alive"]
    assert pulse.liveness.changes == 4, "two of each"


def test_the_dead_are_dead_when_nobody_hears_them() -> None:
    pulse = Pulse("a", "b", "c")
    pulse.run(10)
    pulse.cut = {"c"}
    pulse.run(4)
    pulse.silent = {"a": ("c",), "b": ("c",)}
    pulse.run(4)
    assert pulse.states["c"] == ["unknown", "alive", "suspect", "dead"]


def test_whoever_is_late_itself_is_not_believed() -> None:
    pulse = Pulse("a", "b", "c")
    pulse.late_s = {"a": 3.0}
    pulse.silent = {"a": ("b",)}
    pulse.run(10)
    assert pulse.liveness.silent_to("b", pulse.now) == []
    pulse.cut, pulse.silent = {"c"}, {"b": ("c",)}
    pulse.run(10)
    assert pulse.liveness.state("c") == "dead", "a does not say that c is silent, and is not asked"


def test_what_was_said_before_it_fell_silent_vouches_for_nobody() -> None:
    liveness = Liveness(Patience())
    liveness.heard(beat("a", 1), 0.0)
    liveness.heard(beat("b", 1), 1.0)
    for now in (3.0, 5.0):
        liveness.judge(now)
    liveness.judge(6.5)
    assert liveness.state("a") == "dead"


def test_after_standing_still_everybody_has_a_fresh_lease() -> None:
    pulse = Pulse("a", "b")
    pulse.run(10)
    pulse.now += 60
    pulse.liveness.forgive(pulse.now)
    assert pulse.liveness.judge(pulse.now) == []
    pulse.run(3)
    assert pulse.states["a"] == ["unknown", "alive"]


def test_a_flapping_link_settles_down() -> None:
    """It is heard every other six seconds, for two minutes."""
    pulse = Pulse("a", "b")
    pulse.silent = {"b": ("a",)}
    for _ in range(10):
        pulse.cut = {"a"}
        pulse.run(6)
        pulse.cut = set()
        pulse.run(6)
    flapping = pulse.liveness.changes
    assert flapping <= 8, f"not three a round: {pulse.states['a']}"
    pulse.run(30)
    assert pulse.liveness.state("a") == "alive"
    assert pulse.liveness.changes <= flapping + 2


def test_a_restart_after_death_is_noticed_with_the_first_heartbeat() -> None:
    pulse = Pulse("a", "b")
    pulse.silent = {"b": ("a",)}
    pulse.run(10)
    pulse.cut = {"a"}
    pulse.run(10)
    assert pulse.liveness.state("a") == "dead"
    pulse.numbers["a"] = 0
    assert pulse.beat("a", life=2)
    assert pulse.liveness.state("a") == "alive"


def test_who_was_dead_in_the_same_life_must_be_heard_twice() -> None:
    pulse = Pulse("a", "b")
    pulse.silent = {"b": ("a",)}
    pulse.run(10)
    pulse.cut = {"a"}
    pulse.run(10)
    pulse.beat("a")
    assert pulse.liveness.state("a") == "dead"
    pulse.beat("a")
    assert pulse.liveness.state("a") == "alive"


@pytest.mark.parametrize("seed", range(5))
def test_short_pauses_and_little_processor_time_raise_no_false_alarm(seed: int) -> None:
    """Pauses of a second often, and heartbeats that are up to three seconds late now and then."""
    draw = random.Random(seed)
    liveness = Liveness(Patience())
    arrivals = []
    for index in range(8):
        due, number = draw.uniform(0, BEAT_S), 0
        while due < 1200:
            late_s = draw.uniform(0, 3.0) if draw.random() < 0.1 else draw.choice([0.0, 0.0, 1.0])
            number += 1
            arrivals.append((due + late_s, f"shard-{index}", number, late_s))
            due += BEAT_S
    suspicions = 0
    for at, name, number, late_s in sorted(arrivals):
        suspicions += len(liveness.judge(at))
        liveness.heard(beat(name, number, late_s=late_s), at)
        assert all(liveness.state(each) != "dead" for each in liveness.names)
    assert suspicions <= 8, "one each, until it is known to be slow"


def test_how_long_it_takes_to_notice_a_death() -> None:
    """Over deaths at all phases of the beat: 6 s from the last beat on, so 4 to 6 s from the death on."""
    times = []
    for seed in range(200):
        draw = random.Random(seed)
        liveness = Liveness(Patience())
        phase, died_at = draw.uniform(0, BEAT_S), 20 + draw.uniform(0, BEAT_S)
        at, number = phase, 0
        while at <= died_at:
            number += 1
            liveness.heard(beat("a", number), at)
            at += BEAT_S
        while liveness.state("a") != "dead":
            due = liveness.deadline(at)
            assert due is not None and due > at
            at = due
            liveness.judge(at)
        times.append(at - died_at)
    assert 4.0 <= min(times) <= max(times) <= 6.0
    assert 4.7 < median(times) < 5.3


events = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(0, 3), st.integers(0, 6), st.integers(1, 3)),
        st.tuples(st.just("pass"), st.floats(0, 5), st.just(0), st.just(0)),
        st.tuples(st.just("forgive"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(events)
@settings(max_examples=60, deadline=None)
def test_any_order_of_events(events):
    """The oracle keeps, for each node, the newest beat of its newest life; dead is nobody who was accepted
    within its lease."""
    liveness = Liveness(Patience())
    now = 0.0
    lives: dict[str, list[int]] = {}
    numbers: dict[str, int] = {}
    heard: dict[str, float] = {}
    for kind, one, number, life in events:
        if kind == "pass":
            now += one
        elif kind == "forgive":
            liveness.forgive(now)
        else:
            name = f"n{one}"
            seen = lives.setdefault(name, [])
            fresh = life not in seen or (seen[-1] == life and number > numbers[name])
            assert liveness.heard(beat(name, number, life=life), now) == fresh
            if fresh:
                if life not in seen:
                    seen.append(life)
                numbers[name], heard[name] = number, now
        before = {name: liveness.state(name) for name in liveness.names}
        fallen = liveness.judge(now)
        liveness.check()
        for name in liveness.names:
            state = liveness.state(name)
            assert (state != before[name]) == (name in fallen)
            if now - heard[name] < 4.0:
                assert name not in fallen
        due = liveness.deadline(now)
        assert due is None or due > now


def test_patience_is_in_order() -> None:
    with pytest.raises(ValueError, match="suspect"):
        Patience(6.0, 4.0)
