"""Bugs that the random runs must notice, each planted from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcomm.wire.messages import StrongRegister
from l3_shard import entering, quorum
from l3_shard.proposer import Proposal, Step
from tests.l3_shard import test_strong as runs
from tests.l3_shard.strong_world import Violation

SEEDS_MAX = 40


def minority(patch: pytest.MonkeyPatch) -> None:
    """Half of the owners is enough."""
    patch.setattr(quorum, "majority", lambda group: max(1, len(group) // 2))


def made_twice(patch: pytest.MonkeyPatch) -> None:
    """A change that was sent out is made again without looking whether it has happened."""
    propose = Proposal._propose

    def forgetful(self: Proposal, register: StrongRegister, *, chosen: bool = False) -> Step:
        self._attempts.clear()
        return propose(self, register, chosen=chosen)

    patch.setattr(Proposal, "_propose", forgetful)


def unconfirmed(patch: pytest.MonkeyPatch) -> None:
    """What a round finds is told without having been accepted by a majority."""
    propose = Proposal._propose

    def hasty(self: Proposal, register: StrongRegister, *, chosen: bool = False) -> Step:
        return propose(self, register, chosen=True)

    patch.setattr(Proposal, "_propose", hasty)


def votes_while_empty(patch: pytest.MonkeyPatch) -> None:
    """An acceptor that lost its disk votes without having heard from anybody."""
    patch.setattr(entering, "informed", lambda groups, node, told: True)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [minority, made_twice, unconfirmed, votes_while_empty])
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    assert any(_violates(seed) for seed in range(SEEDS_MAX)), f"not noticed in {SEEDS_MAX} seeds"


def _violates(seed: int) -> bool:
    return any(_fails(run, seed) for run in _runs())


def _runs() -> Iterator[Callable[[int], None]]:
    yield runs.test_loss_doubling_reordering_cuts_and_crashes
    yield runs.test_lost_disks_one_at_a_time


def _fails(run: Callable[[int], None], seed: int) -> bool:
    try:
        run(seed)
    except Violation:
        return True
    return False
