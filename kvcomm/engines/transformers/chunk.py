"""``Chunk``: the part of some feeds that one pass computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvcomm.engines.transformers.attention import Collector, Watch
from kvcomm.streams.session import Feed, Session

_ALIGNED = 16
"""Attention kernels want masks whose rows are multiples of it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """In neighbouring lanes.

    Lanes with fewer tokens than the longest are padded in front, so that each one's last token is the pass's
    last row.
    """

    lanes: range
    feeds: tuple[Feed, ...]
    sessions: tuple[Session, ...]
    parts: tuple[tuple[int, ...], ...]
    """The tokens, maybe none, of each lane."""
    firsts: tuple[int, ...]
    """The slot of the first."""
    start: int
    """Tokens of each feed before this part."""

    @classmethod
    def of(cls, by_lane: Mapping[int, tuple[Session, Feed]], start: int, end: int) -> Chunk:
        """Tokens ``[start, end)`` of the feeds; the lanes from the first to the last that has any."""
        active = [lane for lane, (_, feed) in by_lane.items() if len(feed.tokens) > start]
        lanes = range(min(active), max(active) + 1)
        feeds = tuple(by_lane[lane][1] for lane in lanes)
        return cls(
            lanes,
            feeds,
            tuple(by_lane[lane][0] for lane in lanes),
            tuple(feed.tokens[start:end] for feed in feeds),
            tuple(feed.first_slot + min(start, len(feed.tokens)) for feed in feeds),
            start,
        )

    @property
    def active(self) -> list[int]:
        return [lane for lane, part in zip(self.lanes, self.parts, strict=True) if part]

    @property
    def row_count(self) -> int:
        return max(map(len, self.parts))

    @property
    def reach(self) -> int:
        """Places that the pass looks at."""
        return -(-(max(self.firsts) + self.row_count) // _ALIGNED) * _ALIGNED

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places, positions and ids, int64 ``[lane, row]``, in one transfer."""
        places = self._places()
        shifts = torch.tensor([feed.first_row - feed.first_slot for feed in self.feeds])
        ids = torch.zeros_like(places)
        for lane, part in enumerate(self.parts):
            ids[lane, self.row_count - len(part) :] = torch.tensor(part, dtype=torch.int64)
        given = torch.stack([places, places + shifts[:, None], ids]).to(device)
        return given[0], given[1], given[2]

    def written(self, block_tokens: int, device: torch.device) -> torch.Tensor:
        """Of each real row: lane (from 0), slot, block; int64 ``[3, n]``."""
        places, counts = self._places(), torch.tensor([*map(len, self.parts)])
        lanes, rows = (torch.arange(self.row_count) >= self.row_count - counts[:, None]).nonzero(
            as_tuple=True
        )
        slots = places[lanes, rows]
        tails = [torch.tensor(feed.tail, dtype=torch.int64) for feed in self.feeds]
        before = torch.tensor([feed.first_slot // block_tokens for feed in self.feeds])
        blocks = torch.nn.utils.rnn.pad_sequence(tails, batch_first=True)
        return torch.stack([lanes, slots, blocks[lanes, slots // block_tokens - before[lanes]]]).to(device)

    def _places(self) -> torch.Tensor:
        """Where the rows stand, int64 ``[lane, row]``.

        Padding in front goes *behind* the real rows, where nothing attends it and the next rows overwrite it;
        no place of a lane is written twice.
        """
        firsts = torch.tensor(self.firsts)[:, None]
        counts = torch.tensor([*map(len, self.parts)])[:, None]
        at = torch.arange(self.row_count) - (self.row_count - counts)
        return firsts + torch.where(at < 0, at + self.row_count, at)

    def collector(self, watch: Watch, device: torch.device) -> Collector | None:
        """None if none of its rows is watched."""
        last_rows = [
            watch.last_rows(session, self.start, self.start + len(part), len(feed.tokens))
            for session, feed, part in zip(self.sessions, self.feeds, self.parts, strict=True)
        ]
        return Collector(last_rows, self.reach, device) if any(last_rows) else None
