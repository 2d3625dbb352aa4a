"""``Plan``: everything about one simulation that is not decided by the code under test."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from kvcomm.chaos.disk import Fsync
from kvcomm.chaos.network import Weather

Mode = Literal["safety", "liveness"]

FAULTS = (
    "halves", "bridge", "ring", "isolate", "one_way", "flapping", "swizzle", "alone", "client_cut", "reset",
    "slow", "kill", "kill_all", "power_cut", "pause", "lose_disk", "bit_flip", "disk_full", "disk_stall",
    "sync_failed", "wall_jump", "epoch", "move", "amnesia",
)  # fmt: skip
"""What a nemesis can do; see ``kvcomm.chaos.nemesis``."""

CONTROLLER_FAULTS = (
    "controller_kill", "controllers_kill", "controller_pause", "controller_cut", "controller_disk",
    "controllers_disks", "mover_kill", "mover_pause", "mover_cut", "away",
)  # fmt: skip
"""And where there are controllers."""
ORDERS = ("grow", "shrink", "drain", "range", "cancel")
"""What an operator can order."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One world, drawn by ``kvcomm.chaos.swarm`` or written down by a test."""

    seed: int
    mode: Mode = "safety"
    shards: int = 3
    replicas: int = 3
    write_quorum: int = 2
    read_quorum: int = 2
    clients: int = 3
    keys: int = 3
    pace_s: float = 0.2
    """Clients rest up to so long between two operations."""
    active_s: float = 20.0
    """Clients are at work, and faults happen, this long."""
    quiet_s: float = 10.0
    """Then everything is healed, and what was begun comes to its end."""
    operation_timeout_s: float = 6.0
    request_timeout_s: float = 1.5
    """Of the shards (``ShardLimits``)."""
    ask_timeout_s: float = 2.0
    """Of the clients' requests to a shard."""
    fsync: Fsync = "always"
    load_s: float = 0.0005
    """A read from the disk takes up to this."""
    turn_s: float = 0.0
    """A turn of a shard's loop takes up to this: writes ordered in it are committed together."""
    commit_s: tuple[float, float] = (0.0005, 0.005)
    weather: Weather = field(default_factory=Weather)
    mix: tuple[tuple[str, int], ...] = (("get", 4), ("put", 4), ("blind", 1), ("delete", 1), ("batch", 1))
    """Operations and their weights."""
    strong_percent: int = 0
    """Of the operations: those on strong records."""
    registers: int = 2
    """Strong records."""
    strong_mix: tuple[tuple[str, int], ...] = (
        ("read", 4), ("set", 3), ("cas", 3), ("change", 1), ("clear", 1),
    )  # fmt: skip
    tombstone_age_s: float = 2.0
    """What is left of a deleted strong record is removed after so long."""
    spread: bool = False
    """Clients prefer different coordinators of one record, where every shard owns all records."""
    faults: tuple[str, ...] = ()
    fault_every_s: float = 2.0
    fault_for_s: float = 3.0
    """A fault that ends lasts up to this."""
    fragile: float = 0.0
    """Probability that a shard dies right after it answered, asked a peer, or ordered a write."""
    losses: int = 0
    """Disks (or single records) that may be lost in the whole run: fewer than the write quorum."""
    repair_interval_s: float | None = None
    """Between two comparisons with a neighbour, and half of what a scrub takes; ``None`` = no hints, no
    comparisons, no scrub."""
    controllers: int = 0
    """Controllers that hand out the maps and move records; 0 = the nemesis makes the maps."""
    orders: tuple[str, ...] = ()
    """What operators order, drawn from these."""
    order_every_s: float = 4.0
    replace_after_s: float = 600.0
    """Controllers go on without a shard that has been dead for so long."""
    burial_age_s: float | None = None
    """What is left of a deleted eventual record is removed after so long; ``None`` = not within a run."""
    wall_interval_s: float = 5.0
    """How often a shard looks at its wall clock."""

    @property
    def copies(self) -> int:
        """Replicas that a record has."""
        return min(self.replicas, self.shards)

    @property
    def write_need(self) -> int:
        """Disks that hold a write when it is acknowledged."""
        return min(self.write_quorum, self.copies)

    @property
    def majority(self) -> int:
        """Of a strong record's owners."""
        return self.copies // 2 + 1

    @property
    def spare(self) -> int:
        """Owners of a strong record that may have lost it at the same time: F of 2F + 1."""
        return self.copies - self.majority

    def describe(self) -> dict[str, object]:
        """For a person, and for the head of a history."""
        return asdict(self)
