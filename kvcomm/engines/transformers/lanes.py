"""``Lanes``: contiguous working copies of the K/V of sessions that are fed, side by side.

A lane holds a session's view in the order of its slots, so the key of slot ``s`` stands at place ``s``.  New
rows are written behind the view, and a row attends the places up to its own::

    lane 0   0 1 2 3 4 5 6 7 | 8           one more row: sees places 0 .. 8
    lane 1   0 1 2 | 3 - - - - -           sees 0 .. 3; what stands behind is not attended

A lane stays its session's as long as nothing but feeds happens to it: a decode step then copies nothing but
its own row.  After a cut, a restore or a fork the lane is gathered from the paged memory again, which is the
truth; losing a lane costs a gather and nothing else, so a session that needs one takes that of whoever was
fed longest ago.

A pass computes neighbouring lanes, so that they are one tensor without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvcomm.engines.transformers.paged import PagedKV
from kvcomm.streams.pool import BlockId
from kvcomm.streams.session import Session

_GROWTH = 1.5
"""Lanes that are too short grow by this factor, so that rows cost amortised O(1) copies."""
_PLACES = 64
"""Lengths are multiples of it: attention kernels want aligned masks."""


@dataclass(slots=True)
class _Seat:
    """Whose lane it is, and what it holds."""

    session: ReferenceType[Session]
    pass_number: int
    table: list[BlockId] | None = None
    """Another list after the session was swapped in."""
    slot_count: int = 0
    event_count: int = 0

    def holds(self, session: Session) -> bool:
        """Whether nothing but feeds happened to the session since."""
        now = (session.slot_count, len(session.events))
        return self.table is session.table and (self.slot_count, self.event_count) == now

    def filled(self, session: Session) -> None:
        self.table, self.slot_count = session.table, session.slot_count
        self.event_count = len(session.events)


class Lanes:
    """At most ``lanes_max`` sessions, or as many as one pass computes if those are more."""

    def __init__(self, paged: PagedKV, lanes_max: int) -> None:
        layers, two, _, heads, _, dim = paged.states.shape
        self._paged = paged
        self._lanes_max = lanes_max
        self._seats: list[_Seat | None] = []
        self._lane_by_session: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self._pass_number = 0
        self.gathered_count = 0
        """How often a lane was made from the paged memory: once a cut, restore, fork or change of lanes."""
        with torch.inference_mode(False):  # they outlive a pass, and are written in and outside of it
            self.states = paged.states.new_zeros(layers, two, 0, heads, 0, dim)
            """``[layer, K or V, lane, kv head, place, head dim]``."""
            self.rows = torch.zeros(0, 0, dtype=torch.int64, device=paged.states.device)
            """int64 ``[lane, place]``: the row at each place."""

    def seat(self, sessions: Sequence[Session], place_count: int) -> list[int]:
        """Give all of them neighbouring lanes with room for ``place_count`` places, filled with their views.

        Returns the lane of each.  Who sits among the right ones already stays, so the lanes are in any order.
        """
        self._pass_number += 1
        self._reserve(sessions, place_count)
        found = [self._lane_by_session.get(session) for session in sessions]
        lanes = [lane for lane in found if lane is not None]
        if len(lanes) < len(sessions) or max(lanes) - min(lanes) >= len(sessions):
            lanes = self._seated(sessions)
        for lane, session in zip(lanes, sessions, strict=True):
            self._fill(lane, session)
        return lanes

    def fed(self, session: Session) -> None:
        """The rows of the last pass are in view, so the lane holds all of it, if there is one."""
        lane = self._lane_by_session.get(session)
        if lane is None:
            return
        seat = self._seats[lane]
        assert seat is not None and seat.session() is session
        seat.filled(session)

    def leave(self, session: Session) -> None:
        """The session's rows were written to the memory alone, or it is not fed for a while."""
        lane = self._lane_by_session.pop(session, None)
        seat = None if lane is None else self._seats[lane]
        if lane is not None and seat is not None and seat.session() is session:  # not of whoever came after
            self._seats[lane] = None

    # -- inside

    def _session(self, lane: int) -> Session | None:
        seat = self._seats[lane]
        session = seat.session() if seat else None
        return None if session is None or session.closed else session

    def _seated(self, sessions: Sequence[Session]) -> list[int]:
        """In the window of lanes where most sit already; the others take the empty places, and those of
        strangers."""
        first = self._best_window(sessions)
        window = range(first, first + len(sessions))
        staying = {lane for session in sessions if (lane := self._lane_by_session.get(session)) in window}
        free = iter([lane for lane in window if lane not in staying])
        for session in sessions:
            if self._lane_by_session.get(session) in staying:
                continue
            lane = next(free)
            if (stranger := self._session(lane)) is not None:
                self.leave(stranger)
            self.leave(session)
            self._seats[lane] = _Seat(ref(session), self._pass_number)
            self._lane_by_session[session] = lane
        return [self._lane_by_session[session] for session in sessions]

    def _best_window(self, sessions: Sequence[Session]) -> int:
        """Where most of them sit, then where least strangers do, then those fed longest ago."""

        def cost(first: int) -> tuple[int, int, int]:
            held = {lane: self._session(lane) for lane in range(first, first + len(sessions))}
            strangers = [lane for lane, session in held.items() if session and session not in sessions]
            mine = sum(session in sessions for session in held.values() if session)
            recent = max((seat.pass_number for lane in strangers if (seat := self._seats[lane])), default=0)
            return -mine, len(strangers), recent

        return min(range(len(self._seats) - len(sessions) + 1), key=cost)

    def _fill(self, lane: int, session: Session) -> None:
        seat, count = self._seats[lane], session.slot_count
        assert seat is not None
        seat.pass_number = self._pass_number
        if count and seat.holds(session):
            return
        self.states[:, :, lane, :, count:].zero_()  # what is not attended still has to be a number
        if count:
            blocks = torch.tensor(session.table, dtype=torch.int64, device=self.states.device)
            self._paged.read(blocks, count, self.states[:, :, lane])
        self.rows[lane, :count] = torch.tensor(session.view.rows, dtype=torch.int64)
        seat.filled(session)
        self.gathered_count += bool(count)

    def _reserve(self, sessions: Sequence[Session], place_count: int) -> None:
        lanes, places = self.rows.shape
        taken = sum(self._session(lane) is not None for lane in range(lanes))
        newcomers = sum(session not in self._lane_by_session for session in sessions)
        lanes_wanted = max(lanes, len(sessions), min(taken + newcomers, self._lanes_max))
        places_wanted = places
        if place_count > places:
            places_wanted = -(-max(place_count, int(places * _GROWTH)) // _PLACES) * _PLACES
        if (lanes_wanted, places_wanted) == (lanes, places):
            return
        with torch.inference_mode(False):
            layers, two, _, heads, _, dim = self.states.shape
            states = self.states.new_zeros(layers, two, lanes_wanted, heads, places_wanted, dim)
            rows = self.rows.new_zeros(lanes_wanted, places_wanted)
        states[:, :, :lanes, :, :places].copy_(self.states)
        rows[:lanes, :places].copy_(self.rows)
        self.states, self.rows = states, rows
        self._seats += [None] * (lanes_wanted - lanes)


class LaneLayer(DynamicLayer):  # type: ignore[misc]
    """One layer of neighbouring lanes during one pass: row ``i`` of lane ``n`` goes to ``places[n, i]``."""

    def __init__(self, states: torch.Tensor, places: torch.Tensor, held: int) -> None:
        """``states``: ``[K or V, lane, kv head, place, head dim]``, all of which is attended as far as the
        mask says; ``held`` = places before this pass, for models that ask."""
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
        self.keys, self.values = self._states[0], self._states[1]
        self.keys.scatter_(2, places, key_states.to(self.dtype))
        self.values.scatter_(2, places, value_states.to(self.dtype))
        # Where K/V are kept in fewer bits than the model computes in, new rows are read as old ones will be.
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)


def lane_cache(states: torch.Tensor, places: torch.Tensor, held: int) -> DynamicCache:
    """What a model takes: ``states`` is ``[layer, K or V, lane, kv head, place, head dim]``."""
    cache = DynamicCache()
    cache.layers = [LaneLayer(layer, places, held) for layer in states]
    cache.layer_class_to_replicate = None
    return cache
