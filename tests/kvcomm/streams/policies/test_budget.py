"""Which settings make sense, and which blocks a budget lets go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.budget import Budget, block_ranges
from kvcomm.streams.policies.port import Look


def look(slot_count: int, protected: int = 0, size: int = 16, scores: tuple[float, ...] = ()) -> Look:
    return Look(slot_count, protected, size, (), slot_count, "forward", scores)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"window": 0, "stride": 16}, "at least one block"),
        ({"window": -64, "stride": 16}, "at least one block"),
        ({"window": 64, "stride": 0}, "at least one block"),
        ({"window": 64, "stride": 64}, "must be larger than stride 64"),
        ({"window": 64, "stride": 512}, "a cut would take all that the window holds"),
        ({"window": 64, "stride": 16, "recent": -1}, "0 or more"),
        ({"window": 64, "stride": 16, "first": -1}, "0 or more"),
        ({"window": 64, "stride": 48, "recent": 16}, "are more than window 64"),
    ],
)
def test_a_budget_that_contradicts_itself_says_why(settings: dict[str, int], why: str):
    with pytest.raises(ConfigError, match=why):
        Budget(**settings)


def test_the_constraints_of_the_public_implementation_are_checked():
    """Its list: stride in whole blocks, window larger than stride.  The first needs the engine's blocks."""
    with pytest.raises(ConfigError, match="stride 500 is not in whole blocks of 16 tokens"):
        Budget(4096, 500).check(16)
    Budget(4096, 512).check(16)
    Budget(4096, 500).check(1)


@pytest.mark.parametrize(
    ("slot_count", "protected", "due"),
    [(144, 0, False), (145, 0, True), (145, 96, False), (160, 96, True), (300, 144, True), (300, 160, False)],
)
def test_due_means_too_long_and_enough_full_blocks_that_may_go(slot_count: int, protected: int, due: bool):
    assert Budget(144, 48, recent=16).due(look(slot_count, protected)) is due


@pytest.mark.slow
@given(
    slot_count=st.integers(0, 400),
    protected=st.integers(0, 12).map(lambda blocks: 16 * blocks),
    recent=st.integers(0, 60),
    first=st.integers(0, 40),
    ranks=st.lists(st.integers(0, 3), min_size=25, max_size=25),
)
def test_the_lowest_blocks_go_and_none_that_is_kept(slot_count, protected, recent, first, ranks):
    budget, seen = Budget(160, 48, recent=recent, first=first), look(slot_count, protected)
    if not budget.due(seen):
        return
    ranges = budget.lowest(seen, ranks.__getitem__)
    cut = [slot for start, end in ranges for slot in range(start, end)]
    assert len(cut) == 48
    assert cut == sorted(set(cut))
    assert cut[0] >= max(protected, first)
    assert cut[-1] < slot_count - recent
    assert cut[-1] < seen.full_slots
    gone = {slot // 16 for slot in cut}
    low, high = (border // 16 for border in budget.candidates(seen))
    stays = set(range(low, high)) - gone
    assert all((ranks[block], block) < (ranks[other], other) for block in gone for other in stays)


def test_neighbouring_blocks_are_one_range():
    assert block_ranges([5, 1, 2], 16) == [SlotRange(16, 48), SlotRange(80, 96)]
    assert block_ranges([], 16) == []
