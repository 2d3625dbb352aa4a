"""``WholeTurns``: the oldest finished turns go, from the first one's first token to the last one's last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvcomm.errors import ConfigError
from kvcomm.streams.events import SlotRange
from kvcomm.streams.policies.port import Look


@dataclass(frozen=True, slots=True)
class WholeTurns:
    """At admission, ``stride`` turns as long as there are ``max_turns``: with 4 and 2, the live turns that
    messages find are 0, 1, 2, 3, 2, 3, 2, 3.

    Not inside a message: a text whose markers are cut in half is none that a model was trained on.  Where
    turns do not end on block borders, up to a block less one token of them stays in view at either end.

    Raises:
        ConfigError: the numbers contradict each other.
    """

    max_turns: int
    stride: int

    name: ClassVar[str] = "turns"
    needs_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.stride < 1:
            raise ConfigError(f"max_turns {self.max_turns}, stride {self.stride}: at least one turn each")
        if self.stride > self.max_turns:
            raise ConfigError(
                f"stride {self.stride} is more than max_turns {self.max_turns}: there are never so many "
                "turns to cut; lower the stride"
            )

    def select(self, look: Look) -> list[SlotRange]:
        if look.moment != "admission" or len(look.turns) < self.max_turns:
            return []
        return [SlotRange(look.turns[0][0], look.turns[self.stride - 1][1])]
