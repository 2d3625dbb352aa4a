"""A peer with an ``Owner``: ``python -m tests.contracts.transports.churner ...``.

It holds a few slots for many keys.  Told to churn it puts block after block, as fast as it can, so that every
slot is reused all the time under whoever reads; else it does what the test asks for.  Now and then it rests
for a moment: a reader that needs its processor for every answer would find no slot as the index had it.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES
from kvcomm.wire.messages import Want
from l2_rdma.fence import barrier_everywhere
from l2_rdma.owner import Owner
from l2_rdma.region import reclaim_stale
from tests.contracts.transports.peer import Answers, Listening, Memory, open_memory, open_provider, say
from tests.l2_rdma.regions import TENANT, header_of, key_of, layout_of, payload_of

KEYS = 24
SLOTS = 8
COPY_BYTES = 64 << 10
PAYLOAD_BYTES = COPY_BYTES - HEADER_BYTES
LAYOUT = layout_of(2, slab_bytes=SLOTS // 2 * COPY_BYTES, index_entries=64, hazard_count=64)
PUTS_A_TURN = 32
REST_SHARE = 0.25
"""Of the turns: after them it rests."""
REST_S = 0.01
"""At most."""


@cache
def payload(number: int) -> bytes:
    """Every eight bytes of it name the block."""
    return payload_of(number, PAYLOAD_BYTES)


@cache
def packed(number: int) -> bytes:
    return header_of(number, payload(number)).pack()[:GENERATION_OFFSET]


class Churner:
    """Puts blocks into the region of ``memory``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.owner = Owner(
            memory.region.memory,
            memory.region.header,
            locked=memory.region.hazards_locked,
            barrier=barrier_everywhere,
            slot_memory=memory.slots(),
        )
        self.churning = False
        self.put_count = 0
        self._pick = random.Random(1)

    def put(self, number: int) -> str:
        want = Want(key_of(number), COPY_BYTES)
        grant = self.owner.reserve([want], 1, TENANT, time.monotonic())[0]
        if grant.status != "granted":
            return grant.status
        self._memory.poke(grant.offset, packed(number))
        self._memory.poke(grant.offset + HEADER_BYTES, payload(number))
        self.put_count += 1
        return self.owner.publish([grant.token], 1, time.monotonic(), verify=False)[0]

    def turn(self) -> None:
        for _ in range(PUTS_A_TURN):
            self.put(self._pick.randrange(KEYS))
        self.owner.tick(time.monotonic())

    def rest_s(self) -> float | None:
        """How long to wait for questions before the next turn; ``None`` = there is none."""
        if not self.churning:
            return None
        return self._pick.uniform(0.0, REST_S) if self._pick.random() < REST_SHARE else 0.0

    def churn(self, on: bool) -> list[int]:
        """How many were put and evicted until now."""
        self.churning = on
        self.owner.check()
        return [self.put_count, self.owner.usage().evicted_count]


def main(transport: str, directory: Path, incarnation: int) -> None:
    """Until standard input ends."""
    reclaim_stale(directory)
    memory = open_memory(transport, directory, incarnation, LAYOUT)
    churner = Churner(memory)
    provider = open_provider(transport, memory)
    if provider is not None:
        questions: dict[str, Callable[..., Any]] = {
            "put": lambda holder, number: churner.put(number),
            "churn": lambda holder, on: churner.churn(on),
            "tick": lambda holder: churner.owner.tick(time.monotonic()),
            "quarantined": lambda holder: churner.owner.usage().quarantined_count,
        }
        listening = Listening(directory, Answers(memory, provider, questions))
        say(incarnation=incarnation)
        while listening.step(churner.rest_s()):
            if churner.churning:
                churner.turn()
        provider.close()
    memory.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
