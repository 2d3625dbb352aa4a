"""``Arm``: how a conversation keeps within a context; three to compare.

All see the same turns.  What differs is what remains of those that go::

    full context    nothing goes
    KV-streams      whole turns are cut out of the view; what is kept stays as it was computed, so it may
                    have learned something of what was cut
    re-prefill      the text that is kept is computed again in a new stream, as if the rest had never been
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.streams.policies.full import Full
from kvcomm.streams.policies.port import Policy
from kvcomm.streams.policies.restarts import Reprefill
from kvcomm.streams.policies.turns import WholeTurns


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    policy: Policy
    """Cuts."""
    restart: Reprefill | None = None
    """Moves to new streams."""


def arms(turns_max: int, stride: int) -> tuple[Arm, Arm, Arm]:
    """Those above, in this order; the last two keep the same turns."""
    turns = WholeTurns(turns_max, stride)
    return (
        Arm("full context", Full()),
        Arm("KV-streams", turns),
        Arm("re-prefill", Full(), restart=Reprefill(turns)),
    )
