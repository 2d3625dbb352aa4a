"""What a trainer would compute if something went wrong: the controls without which a passing gate says
nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvcomm.engines.transformers.forward import FULL, SLIDING, forward, window_of
from kvcomm.engines.transformers.replaying import pack_logits, replay
from kvcomm.errors import Corrupt
from kvcomm.streams.events import Event, SlotRange
from kvcomm.streams.replay import pack, segments
from kvcomm.streams.rollout import Rollout
from kvcomm.streams.view import View

Change = Callable[[Event], Event]


def rewritten(rollout: Rollout, events: Sequence[Event]) -> Rollout:
    """As if it had been recorded with those events: digests and header fit, so nothing is noticed.

    Raises:
        Corrupt: they cannot happen one after the other.
    """
    view, told = View(), []
    for event in events:
        if event.at_row < view.next_row:
            raise Corrupt("out of order")
        view.feed(event.at_row - view.next_row)
        told.append(view.stamped(event))
        view.apply(told[-1])
    digest = {"view_digest": told[-1].view_digest} if told else {"view_digest": bytes(32)}
    return replace(rollout, events=tuple(told), event_count=len(told), **digest)


def lost(rollout: Rollout) -> Rollout:
    return rewritten(rollout, [])


def late(rollout: Rollout) -> Rollout:
    """Every event one row later."""
    return rewritten(rollout, [replace(event, at_row=event.at_row + 1) for event in rollout.events])


def one_block_off(rollout: Rollout) -> Rollout:
    """Each cut a block further back, and where there is no room for that a block further ahead."""
    block = rollout.block_tokens

    def moved(event: Event, by: int) -> Event:
        return replace(event, ranges=tuple(SlotRange(a + by, b + by) for a, b in event.ranges))

    told: list[Event] = []
    for event in rollout.events:
        try:
            told = list(rewritten(rollout, [*told, moved(event, block)]).events)
        except Corrupt:
            told = list(rewritten(rollout, [*told, moved(event, -block)]).events)
    return rewritten(rollout, told)


def slots_of_rows(rollout: Rollout) -> torch.Tensor:
    """int64 ``[rows]``: the slot in which each row was fed."""
    places = [
        len(segment.view_rows) + at
        for segment in segments(rollout)
        for at in range(segment.end_row - segment.first_row)
    ]
    return torch.tensor(places)


def slot_positions_logits(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """A trainer that rotates by slot: positions that the first cut makes wrong."""
    return pack_logits(model, replace(pack([rollout]), positions=slots_of_rows(rollout)))


def reprefilled_logits(model: PreTrainedModel, rollout: Rollout, *, old_positions: bool) -> torch.Tensor:
    """Another way to compact: at each event everything in view is computed anew, of the tokens in view alone.
    Logits of the samples' query rows, ``[samples, vocab_size]``."""
    found = torch.empty(0)
    for segment in segments(rollout):
        rows = torch.tensor([*segment.view_rows, *range(segment.first_row, segment.end_row)])
        rows = rows.sort().values
        positions = rows if old_positions else torch.arange(len(rows))
        seen = rows[None] <= rows[:, None]
        masks = {FULL: seen[None, None]}
        if window_of(model):
            near = positions[:, None] - positions[None] < window_of(model)
            masks[SLIDING] = (seen & near)[None, None]
        ids = torch.tensor(rollout.tokens)[rows]
        first = int((rows >= segment.first_row).nonzero()[0])
        logits = forward(model, ids[None], positions[None], masks)[0, first:]
        found = torch.cat([found, logits.float()])
    return found[[sample.query_row for sample in rollout.samples]]


def replayed_logits(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    return replay(model, [rollout])[0].logits


CONTROLS: dict[str, Callable[[PreTrainedModel, Rollout], torch.Tensor]] = {
    "events lost": lambda model, rollout: replayed_logits(model, lost(rollout)),
    "one row late": lambda model, rollout: replayed_logits(model, late(rollout)),
    "one block off": lambda model, rollout: replayed_logits(model, one_block_off(rollout)),
    "positions are slots": slot_positions_logits,
    "re-prefill, new positions": lambda model, rollout: reprefilled_logits(
        model, rollout, old_positions=False
    ),
    "re-prefill, old positions": lambda model, rollout: reprefilled_logits(
        model, rollout, old_positions=True
    ),
}


def slot_distance_logits(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Sliding layers that count slots: after a cut, rows of long ago are near again."""
    packed = pack([rollout])
    full = packed.dense()
    near = torch.zeros_like(full)
    for segment in segments(rollout):
        rows = torch.tensor([*segment.view_rows, *range(segment.first_row, segment.end_row)])
        slots = torch.arange(len(rows))
        fed = slots[len(segment.view_rows) :]
        near[rows[fed][:, None], rows[None]] = fed[:, None] - slots[None] < window_of(model)
    masks = {FULL: full[None, None], SLIDING: (full & near)[None, None]}
    logits = forward(model, packed.tokens[None], packed.positions[None], masks, last=packed.query_rows)
    return logits[0]
