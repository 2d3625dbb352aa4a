"""``Chunk``: the part of some feeds that one pass computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        most, counts = self.row_count, [*map(len, self.parts)]
        places = lane_places(self.firsts, counts)
        shifts = [feed.first_row - feed.first_slot for feed in self.feeds]
        given = torch.tensor(
            [
                [shift, *at, *[0] * (most - len(part)), *part]
                for shift, at, part in zip(shifts, places, self.parts, strict=True)
            ],
            device=device,
        )
        at = given[:, 1 : most + 1]
        return at, at + given[:, :1], given[:, most + 1 :]

    def written(self, block_tokens: int) -> tuple[list[int], list[int], list[int]]:
        """Of each real row: lane (from 0), slot, block."""
        lanes: list[int] = []
        slots: list[int] = []
        blocks: list[int] = []
        for lane, (feed, first, part) in enumerate(zip(self.feeds, self.firsts, self.parts, strict=True)):
            mine = range(first, first + len(part))
            before = feed.first_slot // block_tokens
            lanes += [lane] * len(part)
            slots += mine
            blocks += [feed.tail[slot // block_tokens - before] for slot in mine]
        return lanes, slots, blocks

    def collector(self, watch: Watch, device: torch.device) -> Collector | None:
        """None if none of its rows is watched."""
        last_rows = [
            watch.last_rows(session, self.start, self.start + len(part), len(feed.tokens))
            for session, feed, part in zip(self.sessions, self.feeds, self.parts, strict=True)
        ]
        return Collector(last_rows, self.reach, device) if any(last_rows) else None


def lane_places(firsts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Where the rows of a pass stand: ``[lane][row]``, lanes with fewer rows padded in front.

    The padding goes *behind* the real rows, where nothing attends it and the next rows overwrite it; no place
    of a lane is written twice.
    """
    most = max(counts)
    return [
        [*range(first + count, first + most), *range(first, first + count)]
        for first, count in zip(firsts, counts, strict=True)
    ]
