"""``Watch``: looks over the shards' shoulders while a simulation runs; sees what no client can.

* An acknowledged write is on as many disks as the write quorum says, at the moment when the answer leaves.
* A dot names one write of its record, and a value that was written once has one dot.
* Nothing that carries an older epoch than the shard's is served.
* A request is answered within the shard's time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvcomm.chaos.disk import Disk
from kvcomm.wire.messages import (
    Done,
    Failure,
    Message,
    RecordFates,
    RecordFetch,
    RecordGet,
    RecordPut,
    RecordReplicate,
    RecordState,
    RecordVersion,
    RecordVersions,
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise."""

    promise: str
    """Which; one word or a few, the same for every instance."""
    text: str


class Watch:
    """Args:
    disks: by node.
    need: disks that an acknowledged write is on.
    now: seconds of the simulation.
    """

    def __init__(self, disks: Mapping[str, Disk], need: int, now: Callable[[], float]) -> None:
        self.violations: list[Violation] = []
        self._disks, self._need, self._now = disks, need, now
        self._written: dict[tuple[bytes, str, int], tuple[int, bytes | None]] = {}
        self._dots: dict[tuple[bytes, bytes], tuple[str, int]] = {}

    def answered(self, node: str, tenant: bytes, request: Message, epoch: int, answer: Message) -> None:
        """``node`` answers a request that came when it was at ``epoch``."""
        if isinstance(answer, Failure):
            return
        asked = getattr(request, "epoch", epoch)
        if isinstance(request, RecordGet | RecordPut | RecordReplicate | RecordFetch) and 0 <= asked < epoch:
            self._report(
                "epochs", f"{node} at epoch {epoch} served {type(request).__name__} of epoch {asked}"
            )
        if isinstance(request, RecordPut) and isinstance(answer, RecordVersions | RecordFates):
            versions: list[RecordVersion | None] = (
                [fate.version for fate in answer.fates]
                if isinstance(answer, RecordFates)
                else list(answer.versions)
            )
            for write, version in zip(request.writes, versions, strict=True):
                if version is not None:
                    self._check_held(node, tenant + write.key, version.replica, version.counter)
        if isinstance(request, RecordReplicate) and isinstance(answer, Done):
            for key, state in zip(request.keys, request.states, strict=True):
                self._check_merged(node, key, state)

    def written(self, node: str, key: bytes, state: RecordState) -> None:
        """``state`` is on the disk of ``node``."""
        for sibling in state.siblings:
            content = (sibling.hlc, sibling.value)
            known = self._written.setdefault((key, sibling.replica, sibling.counter), content)
            if known != content:
                self._report(
                    "dots",
                    f"{key!r}: dot ({sibling.replica}, {sibling.counter}) names {known} "
                    f"and, at {node}, {content}",
                )
            if sibling.value is not None:
                dot = (sibling.replica, sibling.counter)
                first = self._dots.setdefault((key, sibling.value), dot)
                if first != dot:
                    self._report(
                        "once", f"{key!r}: {sibling.value!r} was written twice, as {first} and {dot}"
                    )

    def unanswered(self, node: str, message: Message, age_s: float) -> None:
        self._report("answers", f"{node} has not answered {type(message).__name__} for {age_s:.1f} s")

    def _check_held(self, node: str, key: bytes, replica: str, counter: int) -> None:
        holders = [
            name
            for name, disk in sorted(self._disks.items())
            if any(state.context.get(replica, 0) >= counter for state in disk.held(key))
        ]
        if len(holders) < self._need or node not in holders:
            self._report(
                "durability",
                f"{node} acknowledged ({replica}, {counter}) of {key!r}, which is on {holders} only, "
                f"not on {self._need} disks with its own",
            )

    def _check_merged(self, node: str, key: bytes, state: RecordState) -> None:
        """A replica that says so has everything that it was sent."""
        held = self._disks[node].held(key)
        for replica, counter in sorted(state.context.items()):
            if not any(each.context.get(replica, 0) >= counter for each in held):
                self._report("durability", f"{node} says that it has ({replica}, {counter}) of {key!r}")

    def _report(self, promise: str, text: str) -> None:
        self.violations.append(Violation(promise, f"at {self._now():.6f}: {text}"))
