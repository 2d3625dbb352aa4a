"""``Marking``: what a shard knows of hot keys: it adds up what its clients report, counts what it is asked
for itself, and marks its answers about records that the controllers have found hot.

Whoever has told a shard may be wrong or gone: a client's report is bounded in every number, the controllers'
list is void when its time is up, and both change nothing but how long an answer may be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvcomm.errors import Refused, TooLarge
from kvcomm.heat import Window, heats, heaviest, summed
from kvcomm.machine import Origin
from kvcomm.sketch import Counted
from kvcomm.wire.messages import (
    HOT_KEYS_MAX,
    TRAFFIC_AGENTS_MAX,
    TRAFFIC_PUBLISHERS_MAX,
    AgentTraffic,
    Done,
    Fetched,
    HotRecords,
    HotReport,
    KeyHeat,
    Message,
    RecordStates,
)

COUNT_MAX = 1e7
"""Most that one report may say of one key: faster than any client reads."""
TRAFFIC_MAX = 1 << 50
"""Most bytes, and blocks, told of one publisher: sums of what clients say must fit into a message."""
NAME_BYTES_MAX = 480
BLOCK_KEY_BYTES = 32
TEXT_MAX = 200
TTL_MAX_S = 60.0


class Marking:
    """See the module.  ``now`` is monotonic seconds.

    Args:
        node_tenant: tenant digest of the cluster's own processes.
    """

    def __init__(self, node_tenant: bytes) -> None:
        self.marked_count = 0
        """Answers that were marked, since start."""
        self._node_tenant = node_tenant
        self._blocks, self._records, self._served = Window(), Window(), Window()
        self._traffic: dict[int, tuple[str, str, dict[int, Fetched]]] = {}
        self._reported_at: float | None = None
        self._hot: frozenset[bytes] = frozenset()
        self._void_at = 0.0

    def take(self, origin: Origin, message: HotReport | HotRecords, now: float) -> Done:
        """A client's report, or the controllers' list.

        Raises:
            TooLarge: it names too many keys.
            Refused: the list is not from a node of the cluster.
        """
        if isinstance(message, HotRecords):
            self._told(origin, message, now)
        else:
            self._heard(origin, message)
        return Done()

    def asked(self, tenant: bytes, names: Sequence[bytes]) -> None:
        """A client reads these records here."""
        self._served.add([tenant + name for name in names])

    def hot_count(self, now: float) -> int:
        """Records that are hot, as far as we were told."""
        return len(self._hot) if now < self._void_at else 0

    def among(self, tenant: bytes, names: Sequence[bytes], now: float) -> list[int]:
        """Indices of the hot ones."""
        if not self.hot_count(now):
            return []
        hot = self._hot
        return [index for index, name in enumerate(names) if tenant + name in hot]

    def marked(self, answer: Message, hot: list[int]) -> Message:
        """``answer`` with a mark at those records, if it is one that may be kept."""
        if not isinstance(answer, RecordStates) or answer.degraded:
            return answer
        self.marked_count += 1
        return msgspec.structs.replace(answer, hot=hot)

    def report(self, now: float) -> HotReport | None:
        """What came since the last one, for the controllers; ``None`` = nothing did."""
        lasted_s = 0.0 if self._reported_at is None else now - self._reported_at
        self._reported_at = now
        if not (self._blocks.total or self._records.total or self._served.total or self._traffic):
            return None
        traffic, self._traffic = self._traffic, {}
        return HotReport(
            lasted_s,
            heats(self._blocks.drain(HOT_KEYS_MAX)),
            heats(self._records.drain(HOT_KEYS_MAX)),
            heats(self._served.drain(HOT_KEYS_MAX)),
            [
                AgentTraffic(agent, rack, heaviest(fetched.values()), name)
                for agent, (rack, name, fetched) in traffic.items()
            ],
        )

    def reports(self, now: float) -> Sequence[Message]:
        """:meth:`report`, for a node's heart."""
        report = self.report(now)
        return () if report is None else (report,)

    def _told(self, origin: Origin, message: HotRecords, now: float) -> None:
        if origin.tenant != self._node_tenant:
            raise Refused("only the cluster's own nodes say which records are hot")
        _check_count(len(message.keys))
        self._hot = frozenset(message.keys)
        self._void_at = now + min(max(message.ttl_s, 0.0), TTL_MAX_S)

    def _heard(self, origin: Origin, report: HotReport) -> None:
        for named in (report.blocks, report.records):
            _check_count(len(named))
        if sound := [_counted(each) for each in report.blocks if len(each.key) == BLOCK_KEY_BYTES]:
            self._blocks.take(sound)
        names = [each for each in report.records if 0 < len(each.key) <= NAME_BYTES_MAX]
        if names:
            self._records.take([_counted(each, origin.tenant) for each in names])
        for told in report.traffic[:1]:  # a client speaks for itself
            self._fetched(origin.caller, told)

    def _fetched(self, agent: int, told: AgentTraffic) -> None:
        if agent not in self._traffic and len(self._traffic) >= TRAFFIC_AGENTS_MAX:
            return
        _, _, known = self._traffic.get(agent, ("", "", {}))
        for each in told.fetched[:TRAFFIC_PUBLISHERS_MAX]:
            if min(each.blocks, each.near_bytes, each.far_bytes) < 0:
                continue
            before = known.get(each.publisher)
            if before is not None or len(known) < 4 * TRAFFIC_PUBLISHERS_MAX:
                known[each.publisher] = _bounded(each if before is None else summed(before, each))
        self._traffic[agent] = told.rack[:TEXT_MAX], told.name[:TEXT_MAX], known


def _check_count(count: int) -> None:
    if count > HOT_KEYS_MAX:
        raise TooLarge(f"at most {HOT_KEYS_MAX} hot keys are named at once, got {count}")


def _bounded(each: Fetched) -> Fetched:
    blocks, near_bytes, far_bytes = (
        min(number, TRAFFIC_MAX) for number in (each.blocks, each.near_bytes, each.far_bytes)
    )
    return Fetched(each.publisher, blocks, near_bytes, far_bytes)


def _counted(each: KeyHeat, tenant: bytes = b"") -> Counted:
    """Numbers of a client are bounded, also those that are none."""
    count = min(each.count, COUNT_MAX) if each.count > 0 else 0.0
    error = min(each.error, count) if each.error > 0 else 0.0
    return Counted(tenant + each.key, count, error)
