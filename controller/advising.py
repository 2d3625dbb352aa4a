"""``Advising``: gathers what agents report of each other's blocks, and answers where they should live.

Any controller can: all hear the same reports.  Making the graph into advice takes a thread, a question at a
time; the graph itself belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from controller.affinity import Advice, Pricing, Survey
from controller.traffic import Fetches, TrafficGraph
from kvcomm.errors import ConfigError, Refused, Unavailable
from kvcomm.wire.messages import (
    AffinityGet,
    AffinityView,
    AgentPlace,
    Failure,
    HotReport,
    Message,
)


class Advising:
    """See the module."""

    def __init__(self, graph: TrafficGraph | None = None) -> None:
        self.graph = graph or TrafficGraph()
        self._busy = False

    def heard(self, report: HotReport, now: float) -> None:
        """What shards have added up of their clients' reports."""
        for each in report.traffic:
            fetched = {one.publisher: Fetches(one.near_bytes, one.far_bytes) for one in each.fetched}
            if all(min(sizes) >= 0 for sizes in fetched.values()):
                self.graph.heard(each.agent, each.rack, fetched, now, name=each.name)

    async def answer(self, question: AffinityGet, racks: Collection[str], now: float) -> Message:
        """The view, or why there is none.

        Args:
            racks: that the cluster has nodes in.
        """
        if self._busy:
            return Failure(Unavailable.code, "another question about affinity is being answered: try again")
        rooms: dict[str, int | None] = {**dict.fromkeys(racks), **question.rooms}
        self._busy = True
        try:
            pricing = Pricing(question.horizon_s, question.move_bytes)
            survey = Survey.of(self.graph, rooms, now, pricing)
            return _view(await asyncio.to_thread(survey.advice))
        except ConfigError as error:
            return Failure(Refused.code, f"where this controller runs: {error}")
        except ValueError as error:
            return Failure(Refused.code, str(error))
        finally:
            self._busy = False


def _view(advice: Advice) -> AffinityView:
    places = [
        AgentPlace(each.agent, each.name, each.rack, each.better_rack, each.bytes_s, each.gain_bytes_s)
        for each in advice.residences
    ]
    return AffinityView(
        places,
        advice.bytes_s,
        advice.share_before,
        advice.share_after,
        advice.unplaced_bytes_s,
        advice.reason,
    )
