"""``Lanes``: contiguous K/V of the sessions of one forward pass, side by side.

A lane holds a session's view in the order of its slots, so the key of slot ``s`` stands at place ``s``.  New
rows are written behind the view, and a row attends the places up to its own::

    lane 0   0 1 2 3 4 5 6 7 | 8           one more row: sees places 0 .. 8
    lane 1   0 1 2 | 3 - - - - -           sees 0 .. 3; what stands behind is not attended
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer


class LaneLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of some lanes during one forward pass.

    ``update`` writes row ``i`` of lane ``n`` to place ``places[n, i]``.
    """

    def __init__(self, states: torch.Tensor, places: torch.Tensor, held: int) -> None:
        """``states``: ``[K or V, lane, kv head, place, head dim]``; ``held`` places are attended already."""
        super().__init__()
        self._states = states
        self._places = places
        self.dtype, self.device = states.dtype, states.device
        self.is_initialized = True
        self.keys, self.values = states[0, :, :, :held], states[1, :, :, :held]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._places[:, None, :, None].expand_as(key_states)
        self._states[0].scatter_(2, places, key_states)
        self._states[1].scatter_(2, places, value_states)
        self.keys, self.values = self._states[0], self._states[1]
        return self.keys, self.values


def lane_cache(states: torch.Tensor, places: torch.Tensor, held: int) -> DynamicCache:
    """``states``: ``[layer, K or V, lane, kv head, place, head dim]``."""
    cache = DynamicCache()
    cache.layers = [LaneLayer(layer, places, held) for layer in states]
    cache.layer_class_to_replicate = None
    return cache


def lane_slots(firsts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Where the rows of a pass stand: ``[lane][row]``, lanes with fewer rows padded in front.

    Filler rows go *behind* the real ones, where nothing attends them and the next rows overwrite them; every
    place of a lane is thus written once.
    """
    most = max(counts)
    return [
        [*range(first + count, first + most), *range(first, first + count)]
        for first, count in zip(firsts, counts, strict=True)
    ]
