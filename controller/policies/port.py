"""The port of load policies: what they see, and what they want."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from controller.policies.view import LoadView


@dataclass(frozen=True, slots=True)
class Move:
    """Give ``node`` another weight, or make it the first owner of a range of points (first and last
    included)."""

    node: str
    weight: int | None = None
    first: int | None = None
    last: int | None = None

    @property
    def what(self) -> str:
        """For a person."""
        if self.weight is not None:
            return f"{self.node} weighs {self.weight}"
        return f"{self.first:#x}..{self.last:#x} to {self.node}"


class Policy(Protocol):
    """Decides by the load alone.  Called every few seconds while no move is under way."""

    def plan(self, view: LoadView) -> list[Move]:
        """What to move now; empty = nothing."""
        ...
