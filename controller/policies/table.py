"""Load policies by name."""

from __future__ import annotations

from controller.policies.greedy import Greedy
from controller.policies.port import Policy
from controller.policies.threshold import Threshold, ThresholdOptions
from kvcomm.errors import Refused

NAMES = ("threshold", "greedy")


def policy_named(name: str, *, at_once: bool = False) -> Policy:
    """A new one.  ``at_once``: for an order, which waits for nothing that a standing policy waits for.

    Raises:
        Refused: there is none of this name.
    """
    if name == "threshold":
        return Threshold(ThresholdOptions(sustain_s=0.0, cool_down_s=0.0) if at_once else None)
    if name == "greedy":
        return Greedy()
    raise Refused(f"there is no policy {name!r}, only: {', '.join(NAMES)}")
