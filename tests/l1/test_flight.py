"""``Flights``: one load a key, whoever fails, and nobody left waiting."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from l1.flight import Flights, News, Party

NEVER = math.inf
KEYS = [bytes([letter]) for letter in b"abcdef"]
A, B, C, D = KEYS[:4]


def claim(flights: Flights[str], keys: list[bytes], now: float = 0.0, deadline: float = NEVER) -> Party[str]:
    party, _ = flights.claim(keys, now, deadline)
    flights.check()
    return party


def take(flights: Flights[str], party: Party[str], now: float = 0.0) -> News[str]:
    news, _ = flights.take(party, now)
    flights.check()
    return news


def missed(key: bytes) -> News[str]:
    return News([(key, None)], [])


def test_one_leads_and_the_rest_follow():
    flights: Flights[str] = Flights()
    leader, *others = [claim(flights, [A]) for _ in range(50)]
    assert list(leader.leads) == [A]
    assert all(not other.leads and list(other.follows) == [A] for other in others)
    assert (flights.led, flights.followed) == (1, 49)
    assert flights.land(leader, A, "value", 0.0) == others
    assert all(take(flights, other) == News([(A, "value")], []) for other in others)
    assert len(flights) == 0


def test_overlapping_runs_are_shared_key_by_key():
    flights: Flights[str] = Flights()
    a, b, c = claim(flights, [A, B]), claim(flights, [B, C]), claim(flights, [A, B, C, D, D])
    assert [list(party.leads) for party in (a, b, c)] == [[A, B], [C], [D]]
    assert [list(party.follows) for party in (a, b, c)] == [[], [B], [A, B, C]]
    assert flights.land(a, B, "b", 0.0) == [b, c]
    assert flights.land(b, C, "c", 0.0) == [c]
    assert take(flights, c) == News([(B, "b"), (C, "c")], [])
    assert flights.land(a, A, "a", 0.0) == [c]
    assert take(flights, c) == News([(A, "a")], [])
    assert c.has_news, "nothing left to wait for"


def test_a_miss_ends_the_flight_for_all():
    flights: Flights[str] = Flights()
    leader, follower = claim(flights, [A]), claim(flights, [A])
    assert flights.land(leader, A, None, 0.0) == [follower]
    assert take(flights, follower) == missed(A)


def test_a_miss_of_somebody_else_means_nothing_and_a_value_does():
    flights: Flights[str] = Flights()
    leader, first, second = (claim(flights, [A]) for _ in range(3))
    assert flights.land(first, A, None, 0.0) == []
    assert flights.land(first, A, "found it elsewhere", 0.0) == [leader, second]
    assert take(flights, leader) == News([(A, "found it elsewhere")], [])
    assert flights.land(leader, A, "late", 0.0) == [], "the first value stays"
    assert take(flights, second) == News([(A, "found it elsewhere")], [])


def test_a_leader_that_leaves_hands_over_to_exactly_one():
    flights: Flights[str] = Flights()
    leader, first, second = (claim(flights, [A, B]) for _ in range(3))
    flights.land(leader, A, "a", 0.0)
    assert flights.leave(leader, 0.0) == [first]
    assert take(flights, first) == News([(A, "a")], [B])
    assert list(first.leads) == [B]
    assert take(flights, second) == News([(A, "a")], [])
    assert not second.has_news
    assert flights.land(first, B, "b", 0.0) == [second]
    assert flights.handed_over == 1


def test_leaving_is_no_failure_and_failing_is():
    flights: Flights[str] = Flights(attempts_max=2)
    parties = [claim(flights, [A]) for _ in range(10)]
    for leaving, heir in pairwise(parties[:6]):
        assert flights.leave(leaving, 0.0) == [heir]
    assert flights.hand_over(parties[5], [A], 0.0) == [parties[6]]
    assert flights.hand_over(parties[6], [A], 0.0) == parties[7:], "the second failure is for everybody"
    assert [take(flights, party) for party in parties[7:]] == [missed(A)] * 3
    assert len(flights) == 0


def test_a_stalled_leader_loses_its_keys_and_may_still_land_them():
    flights: Flights[str] = Flights(stall_s=3.0)
    leader, follower = claim(flights, [A, B]), claim(flights, [A, B])
    flights.land(leader, A, "a", 2.0)
    assert flights.patience(follower) == 5.0
    assert flights.expire(4.9) == []
    assert take(flights, follower, 4.9) == News([(A, "a")], [])
    assert take(flights, follower, 5.0) == News([], [B])
    assert flights.stalled == 1
    assert flights.land(leader, B, "after all", 5.5) == [follower]
    assert take(flights, follower, 5.5) == News([(B, "after all")], [])


def test_the_miss_of_a_leader_that_lost_its_key_is_not_believed():
    flights: Flights[str] = Flights(stall_s=3.0)
    leader, heir, third = (claim(flights, [A]) for _ in range(3))
    assert flights.expire(3.0) == [heir]
    assert flights.land(leader, A, None, 3.1) == []
    assert flights.land(heir, A, "a", 3.2) == [third]


def test_a_leader_past_its_own_deadline_has_stalled():
    flights: Flights[str] = Flights(stall_s=3.0)
    claim(flights, [A], deadline=1.0)
    follower = claim(flights, [A])
    assert flights.patience(follower) == 1.0
    assert take(flights, follower, 1.0).inherited == [A]


def test_who_is_out_of_time_inherits_nothing_and_gets_a_miss():
    flights: Flights[str] = Flights()
    leader = claim(flights, [A])
    late, later, last = (
        claim(flights, [A], deadline=1.0),
        claim(flights, [A], deadline=2.0),
        claim(flights, [A]),
    )
    assert flights.leave(leader, 2.0) == [late, later, last]
    assert take(flights, late, 2.0) == take(flights, later, 2.0) == missed(A)
    assert take(flights, last, 2.0) == News([], [A])


def test_all_out_of_time_ends_the_flight():
    flights: Flights[str] = Flights()
    leader, late = claim(flights, [A]), claim(flights, [A], deadline=1.0)
    assert flights.leave(leader, 2.0) == [late]
    assert take(flights, late, 2.0) == missed(A)
    assert len(flights) == 0


def test_news_waits_for_whoever_was_busy():
    flights: Flights[str] = Flights()
    leader, busy = claim(flights, [A]), claim(flights, [A, B])
    flights.land(leader, A, "a", 0.0)
    assert busy.untold == [A]
    flights.land(busy, B, "b", 0.0)
    assert busy.has_news
    assert take(flights, busy) == News([(A, "a")], [])
    assert busy.untold == []


def test_what_was_inherited_and_landed_meanwhile_is_not_to_be_loaded():
    flights: Flights[str] = Flights(stall_s=3.0)
    leader, follower = claim(flights, [A]), claim(flights, [A])
    flights.expire(3.0)
    flights.land(leader, A, "a", 3.0)
    assert take(flights, follower, 3.0) == News([(A, "a")], [])


def test_who_inherits_and_does_not_notice_loses_it_again():
    flights: Flights[str] = Flights(stall_s=3.0)
    leader, sleepy, awake = (claim(flights, [A]) for _ in range(3))
    assert flights.leave(leader, 0.0) == [sleepy]
    assert take(flights, awake, 3.0) == News([], [A])
    assert take(flights, sleepy, 3.0) == missed(A)


def test_without_followers_whoever_comes_next_leads():
    flights: Flights[str] = Flights()
    flights.leave(claim(flights, [A]), 0.0)
    assert list(claim(flights, [A]).leads) == [A]


def test_leaving_twice_is_leaving_once():
    flights: Flights[str] = Flights()
    leader, follower = claim(flights, [A]), claim(flights, [A])
    assert flights.leave(leader, 0.0) == [follower]
    assert flights.leave(leader, 0.0) == []
    assert list(follower.leads) == [A]


def test_patience_of_a_party_that_follows_nothing_is_its_deadline():
    flights: Flights[str] = Flights()
    assert flights.patience(claim(flights, [A], deadline=7.0)) == 7.0


def test_its_story():
    flights: Flights[str] = Flights(stall_s=3.0)
    claim(flights, [A])
    claim(flights, [A])
    assert (
        flights.story(A) == "claim 1 loads it, until 3.000 s at the latest, followed by 2; 0 leaders failed"
    )
    assert flights.story(B) == "not in flight"


def test_nonsense_is_refused():
    for arguments in ({"stall_s": 0.0}, {"attempts_max": 0}):
        with pytest.raises(ValueError, match="must be"):
            Flights(**arguments)


class Readers(RuleBasedStateMachine):
    """Any readers in any order.  Each knows what it was promised; the end must keep every promise, once."""

    def __init__(self) -> None:
        super().__init__()
        self.flights: Flights[int] = Flights(stall_s=3.0, attempts_max=2)
        self.now = 0.0
        self.open: list[Party[int]] = []
        self.loading: dict[int, list[bytes]] = {}  # by order: what it was told to load and has not finished
        self.expecting: dict[int, set[bytes]] = {}  # by order: what it waits to be told of
        self.asleep: dict[int, Party[int]] = {}  # waits for a call
        self.value = 0

    def wake(self, woken: list[Party[int]]) -> None:
        assert len({party.order for party in woken}) == len(woken)
        for party in woken:
            assert party.has_news
            self.asleep.pop(party.order, None)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1), patience=st.sampled_from([2.0, 10.0, NEVER]))
    def claims(self, keys: list[bytes], patience: float) -> None:
        party, woken = self.flights.claim(keys, self.now, self.now + patience)
        assert sorted({*party.leads, *party.follows}) == sorted(set(keys))
        self.open.append(party)
        self.loading[party.order] = list(party.leads)
        self.expecting[party.order] = set(party.follows)
        self.wake(woken)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["value", "value", "miss", "failure"]))
    def finishes_a_key(self, data: st.DataObject, how: str) -> None:
        party = data.draw(st.sampled_from(self.open))
        if not self.loading[party.order]:
            return
        key = self.loading[party.order].pop(0)
        if how == "failure":
            self.wake(self.flights.hand_over(party, [key], self.now))
        else:
            self.value += 1
            value = self.value if how == "value" else None
            self.wake(self.flights.land(party, key, value, self.now))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def waits_or_takes(self, data: st.DataObject) -> None:
        party = data.draw(st.sampled_from(self.open))
        if not party.has_news and self.flights.patience(party) > self.now:
            self.asleep[party.order] = party
            return
        self.takes(party)

    def takes(self, party: Party[int]) -> None:
        self.asleep.pop(party.order, None)
        news, woken = self.flights.take(party, self.now)
        self.wake(woken)
        told = [*(key for key, _ in news.landed), *news.inherited]
        assert len(set(told)) == len(told), "one news of one key"
        self.expecting[party.order] -= set(told)
        self.loading[party.order] += news.inherited

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        party = data.draw(st.sampled_from(self.open))
        self.open.remove(party)
        self.asleep.pop(party.order, None)
        self.wake(self.flights.leave(party, self.now))

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nobody_sleeps_on_news(self) -> None:
        self.flights.check()
        assert not any(party.has_news for party in self.asleep.values())

    def teardown(self) -> None:
        """Whoever still waits is told of everything if only time passes: nobody hangs."""
        for _ in range(2 * len(KEYS) * (len(self.open) + 1)):
            self.now += 4.0
            for party in self.open:
                self.takes(party)
        assert not any(self.expecting[party.order] for party in self.open)
        for party in self.open:
            self.flights.leave(party, self.now)
        assert len(self.flights) == 0
        self.flights.check()


TestReaders = pytest.mark.slow(Readers.TestCase)
TestReaders.settings = settings(stateful_step_count=40)
