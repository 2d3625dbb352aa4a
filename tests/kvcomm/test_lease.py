"""The lease machine by literal times, and in worlds with pauses, rates, lost answers and late messages."""

from __future__ import annotations

import pytest

from kvcomm import lease
from kvcomm.errors import Corrupt
from kvcomm.lease import Claim, Grant, LeaseLost, Tenure, margin_s
from kvcomm.strongplane import NO_VERSION, StrongValue
from tests.kvcomm.lease_world import LeaseWorld, Weather


def grant_of(claim: Claim, version: bytes) -> Grant:
    """What others read after the claim was done."""
    return Grant.of(StrongValue(claim.value, version, claim.fence))


NEVER_HELD = Grant.of(StrongValue(None, NO_VERSION))


def held(holder: str = "me", *, sent_at: float = 100.0, answered_at: float = 101.0) -> Tenure:
    """A tenure with a lease of 6 s, epoch 1."""
    tenure = Tenure(holder, 6.0)
    tenure.saw(NEVER_HELD, sent_at)
    claim = tenure.claim(sent_at)
    assert (claim.expected, claim.fence) == (NO_VERSION, 1)
    tenure.granted(claim, b"v1")
    assert tenure.valid(answered_at)
    return tenure


def test_the_holder_counts_from_when_it_sent() -> None:
    tenure = held(sent_at=100.0, answered_at=103.0)
    assert tenure.valid(105.999) and tenure.check(105.999) == 1
    assert not tenure.valid(106.0)
    with pytest.raises(LeaseLost, match="ran out"):
        tenure.check(106.0)


def test_others_count_from_when_they_saw_that_grant() -> None:
    mine, other = held(sent_at=100.0), Tenure("other", 2.0)
    first = Grant(1, b"v1", "me", 1, 6.0)
    assert other.free_at() == float("inf")
    other.saw(first, 103.0)
    other.saw(first, 104.0)
    assert other.free_at() == 103.0 + 6.0 + margin_s(6.0), "by the holder's time, not by its own"
    renewal = mine.renewal(105.0)
    other.saw(grant_of(renewal, b"v2"), 106.0)
    assert other.free_at() == 106.0 + 6.0 + margin_s(6.0), "a renewal is another grant"
    with pytest.raises(AssertionError):
        other.claim(112.0)
    assert other.claim(112.6).fence == 2


def test_a_released_or_unheld_lease_is_free_at_once() -> None:
    mine, other = held(), Tenure("other", 6.0)
    release = mine.release(102.0)
    assert release is not None and not mine.valid(102.0), "before anybody has heard of it"
    other.saw(grant_of(release, b"v2"), 102.5)
    assert other.free_at() == 102.5
    assert (other.claim(102.5).expected, other.claim(102.5).fence) == (b"v2", 2)
    assert Tenure("third", 6.0).release(1.0) is None


def test_a_deleted_record_still_knows_its_epoch() -> None:
    other = Tenure("other", 6.0)
    other.saw(Grant.of(StrongValue(None, b"v7", 7)), 1.0)
    assert (other.claim(1.0).expected, other.claim(1.0).fence) == (NO_VERSION, 8)


def test_a_renewal_extends_from_when_it_was_sent() -> None:
    tenure = held(sent_at=100.0)
    assert tenure.renew_at() == 102.0
    renewal = tenure.renewal(102.0)
    assert (renewal.expected, renewal.fence) == (b"v1", 1)
    tenure.granted(renewal, b"v2")
    assert (tenure.until, tenure.epoch) == (108.0, 1)
    assert tenure.renewal(103.0).expected == b"v2"


def test_a_renewal_that_failed_is_tried_again_soon_and_the_lease_goes_on() -> None:
    tenure = held(sent_at=100.0)
    tenure.refused(tenure.renewal(102.0), 103.0)
    assert tenure.renew_at() == 103.5 and tenure.valid(105.9)


def test_a_renewal_that_comes_after_the_end_does_not_revive_it() -> None:
    tenure = held(sent_at=100.0)
    renewal = tenure.renewal(105.0)
    assert not tenure.valid(106.5)
    tenure.granted(renewal, b"v2")
    assert not tenure.valid(107.0)
    tenure.saw(grant_of(renewal, b"v2"), 107.0)
    assert tenure.free_at() == 107.0, "what stands under our own name is ours to take"
    again = tenure.claim(107.0)
    assert again.fence == 2
    tenure.granted(again, b"v3")
    assert tenure.valid(107.1) and tenure.epoch == 2


def test_a_claim_whose_answer_was_lost_is_found_and_counts_from_when_it_was_sent() -> None:
    tenure = Tenure("me", 6.0)
    tenure.saw(NEVER_HELD, 100.0)
    claim = tenure.claim(100.0)
    tenure.unsure(claim, 102.0)
    assert not tenure.valid(102.0)
    tenure.saw(grant_of(claim, b"v1"), 103.0)
    assert tenure.valid(103.0) and (tenure.epoch, tenure.until) == (1, 106.0)


def test_a_lost_renewal_that_took_effect_is_found_by_the_next_one() -> None:
    tenure = held(sent_at=100.0)
    unsure = tenure.renewal(102.0)
    tenure.unsure(unsure, 103.0)
    second = tenure.renewal(104.0)
    tenure.refused(second, 104.1)  # a conflict: the version is the first one's
    tenure.saw(grant_of(unsure, b"v2"), 104.1)
    assert (tenure.until, tenure.renewal(104.2).expected) == (108.0, b"v2")


def test_it_is_lost_when_somebody_took_it_over() -> None:
    tenure = held(sent_at=100.0)
    tenure.saw(Grant(2, b"w1", "other", 1, 6.0), 103.0)
    with pytest.raises(LeaseLost, match="other took it over as epoch 2"):
        tenure.check(103.0)


def test_an_older_answer_of_ones_own_changes_nothing() -> None:
    tenure = held(sent_at=100.0)
    first, second = tenure.renewal(101.0), tenure.renewal(102.0)
    tenure.granted(second, b"v3")
    tenure.granted(first, b"v2")
    assert (tenure.until, tenure.renewal(103.0).expected) == (108.0, b"v3")


def test_claims_without_an_outcome_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "CLAIMS_MAX", 2)
    tenure = held(sent_at=100.0)
    claims = [tenure.renewal(101.0 + number / 10) for number in range(3)]
    tenure.granted(claims[0], b"v2")
    assert tenure.until == 106.0, "forgotten: the lease is held for less, never for more"


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 86_401.0])
def test_a_time_out_of_range_is_refused(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="seconds"):
        Tenure("me", ttl_s)


@pytest.mark.parametrize("holder", ["", "x" * 257])
def test_a_name_out_of_range_is_refused(holder: str) -> None:
    with pytest.raises(ValueError, match="name"):
        Tenure(holder)


@pytest.mark.parametrize("value", [b"", b"junk", b"\x93\xa1a\x01\xff", b"\x93\xa1a\x01\xcf" + b"\xff" * 8])
def test_a_record_that_is_no_lease_is_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt, match="no lease"):
        Grant.of(StrongValue(value, b"v", 1))


def test_the_margin_is_half_a_second_and_at_least_a_tenth() -> None:
    assert [round(margin_s(ttl_s), 6) for ttl_s in (1.0, 6.0, 60.0)] == [0.5, 0.6, 6.0]


# -- worlds


CALM = Weather()
ROUGH = Weather(delay_s=0.5, lost=0.1, late=0.1, pause=0.02, pause_s=60.0, rate=1.1)
WEATHERS = {
    "calm": CALM,
    "lost answers": Weather(lost=0.4),
    "late messages": Weather(late=0.3),
    "pauses": Weather(pause=0.05, pause_s=60.0),
    "rates": Weather(rate=1.1),
    "rates and pauses": Weather(rate=1.1, pause=0.05, pause_s=15.0, delay_s=0.3),
    "everything": ROUGH,
}


def play(seed: int, weather: Weather, **how) -> LeaseWorld:
    world = LeaseWorld(seed, "abcd", weather, **how)
    world.run(400.0)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("weather", WEATHERS.values(), ids=WEATHERS.keys())
def test_at_most_one_holds_it_and_no_smaller_epoch_is_accepted(weather: Weather) -> None:
    acquired = fenced = 0
    for seed in range(12):
        world = play(seed, weather)
        judge = world.judge
        assert judge.overlaps == []
        assert judge.epochs == list(range(1, len(judge.epochs) + 1)), "each grant one larger than the last"
        assert judge.writes == sorted(judge.writes), "accepted writes under a smaller epoch: none"
        acquired += sum(process.acquired_count for process in world.processes)
        fenced += judge.fenced_count
    assert acquired > 100
    if weather in (ROUGH, WEATHERS["pauses"], WEATHERS["late messages"]):
        assert fenced, "the fence had something to do"


@pytest.mark.slow
def test_somebody_gets_it_soon_after_the_weather_has_calmed() -> None:
    for seed in range(12):
        world = play(seed, ROUGH)
        before = len(world.judge.epochs)
        world.calm()
        world.run(world.now + 60.0 + 80.0)  # the last pause, and the last late messages
        assert len(world.judge.epochs) > before


class _CountsFromTheAnswer(Tenure):
    """Bug: the time of the answer in place of that of the request."""

    def granted(self, claim: Claim, version: bytes) -> None:
        super().granted(claim, version)
        self._until += 2.0


class _RevivedByARenewal(Tenure):
    """Bug: an answer that comes too late makes it valid again, whoever has it by then."""

    def granted(self, claim: Claim, version: bytes) -> None:
        super().granted(claim, version)
        self.lost, self._until = "", max(self._until, claim.sent_at + 60.0)


class _TakesWhatItSees(Tenure):
    """Bug: looks at when it asked first, not at when it saw that very grant."""

    def free_at(self) -> float:
        return min(super().free_at(), self._seen_at + 3.0)


@pytest.mark.slow
@pytest.mark.parametrize("bug", [_CountsFromTheAnswer, _RevivedByARenewal, _TakesWhatItSees])
def test_the_judge_of_overlaps_catches_a_planted_bug(bug: type[Tenure]) -> None:
    assert any(play(seed, ROUGH, tenure=bug).judge.overlaps for seed in range(20))


@pytest.mark.slow
def test_without_the_margin_clocks_of_different_rates_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MARGIN_S", 0.0)
    monkeypatch.setattr(lease, "RATE_MARGIN", 0.0)
    weather = Weather(rate=1.1, delay_s=0.002)
    assert any(play(seed, weather).judge.overlaps for seed in range(20))
