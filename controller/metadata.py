"""``Metadata``: one member of the controllers' metadata group, and the group as its members use it.

The group is nothing of its own: it is the shard machine that ships (``l3_shard.process``), keeping strong
records over a private ring that never changes.  Its shards are the controllers, and each keeps every record::

    controller-0   controller-1   controller-2        epoch 1, replicas 3, majority 2, no blocks
         └──────────────┼──────────────┘
           lease/controller, controller/ring, controller/plan

So a change is decided by a majority of the controllers, is on their disks before it is acknowledged, and a
controller that lost its disk is told by the others before it votes again.  The ring names members, not
addresses: ``locate`` finds them, for a controller that was started again may be somewhere else.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kvcomm.block import Incarnation
from kvcomm.credentials import Credentials
from kvcomm.errors import ConfigError, Unavailable
from kvcomm.leaseplane import LeasePlane
from kvcomm.metrics import Metrics
from kvcomm.rpc.asynchronous import run_async
from kvcomm.steps import Steps
from kvcomm.strongplane import StrongPlane
from kvcomm.tally import Tally
from kvcomm.wire.messages import RingMap, RingNode
from l3_shard.process import RecordOptions, RecordProcess
from l3_shard.strong import StrongCounts
from l3_shard.tier import L3Tier

T = TypeVar("T")

VOTE_PATIENCE_S = 10.0
"""After that an operator should know."""

_log = logging.getLogger(__name__)


def metadata_ring(members: Sequence[str]) -> RingMap:
    """The private ring, the same on every member and in every life."""
    shards = [RingNode(node, f"controller://{node}", "", "", "", 1) for node in members]
    majority = len(members) // 2 + 1
    return RingMap(1, len(members), majority, majority, 1, shards, [])


class Metadata:
    """Made by :meth:`open`.  ``records`` serves the other members; ``strong`` asks the group.

    Args:
        timeout_s: how long one request to one member may take.
    """

    def __init__(
        self,
        node: str,
        incarnation: Incarnation,
        records: RecordProcess,
        ring: RingMap,
        locate: Callable[[str], str],
        timeout_s: float,
    ) -> None:
        """Use :meth:`open`."""
        self.node, self.incarnation, self.records = node, incarnation, records
        tier = L3Tier(ring, dial=lambda member: locate(member.node), timeout_s=timeout_s, clock=records.clock)
        self.strong = StrongPlane(tier, Tally(Metrics("client"), records.clock), random.random)
        self.leases = LeasePlane(self.strong, records.clock, random.random, lambda: f"{node}/{incarnation}")

    @staticmethod
    async def open(
        node: str,
        members: Sequence[str],
        directory: Path,
        *,
        credentials: Credentials,
        incarnation: Incarnation,
        locate: Callable[[str], str],
        on_stop: Callable[[str], None],
        timeout_s: float = 2.0,
        connect_timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Metadata:
        """Open this member's stores in ``directory`` and begin.

        Args:
            locate: where a member is to be called.
            on_stop: the process must end, and why.

        Raises:
            Refused: another process owns the directory.
            Unavailable: it cannot be used.
            ConfigError: ``node`` is no member.
        """
        if node not in members:
            raise ConfigError(
                f"{node} is none of the controllers {', '.join(members)}: see cluster.controllers"
            )
        await asyncio.to_thread(_check_members, directory, members)
        ring = metadata_ring(members)
        records = await RecordProcess.open(
            node,
            ring,
            RecordOptions(directory, connect_timeout_s=connect_timeout_s),
            credentials=credentials,
            incarnation=incarnation,
            resolve=lambda _, peer: locate(peer),
            on_stop=on_stop,
            clock=clock,
        )
        return Metadata(node, incarnation, records, ring, locate, timeout_s)

    async def run(self, steps: Steps[T], timeout_s: float) -> T:
        """Run an operation on the group."""
        peers = self.records.peers
        return await run_async(steps, peers, peers.clock() + max(0.0, timeout_s))

    async def wait_for_vote(self) -> None:
        """Until this member takes part in decisions, for ever if need be; it says so when that takes long."""
        warn_at = self.records.clock() + VOTE_PATIENCE_S
        while not self.counts().votes:
            if self.records.clock() >= warn_at:
                warn_at = float("inf")
                _log.warning(
                    "%s has no vote yet: not enough other controllers are there, or too few of them remember "
                    "what it has lost; if the disks of most are lost, stop all controllers, remove their "
                    "directories, and the shards will tell",
                    self.node,
                )
            await asyncio.sleep(0.01)

    def counts(self) -> StrongCounts:
        return self.records.machine.strong_counts()

    async def close(self) -> None:
        """Raises ``DiskFailed``: the last sync failed."""
        await self.records.close()


def _check_members(directory: Path, members: Sequence[str]) -> None:
    """Votes in ``directory`` were given among these members; among others they would mean something else.

    Raises:
        ConfigError: they were given among others.
        Unavailable: the directory cannot be used.
    """
    path, wanted = directory / "members", "\n".join(members) + "\n"
    try:
        if not path.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            draft.write_text(wanted)
            draft.replace(path)
        before = path.read_text()
    except OSError as error:
        raise Unavailable(f"{directory} cannot be used: {error.strerror}") from error
    if before != wanted:
        raise ConfigError(
            f"cluster.controllers is {len(members)}, but {directory} is of one of {len(before.split())}: "
            "their number is fixed for the life of a cluster"
        )
