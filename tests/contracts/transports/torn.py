"""A reader in a process of its own: ``python -m tests.contracts.transports.torn ...``.

Reads blocks of a ``churner`` through a channel as fast as it can, and compares every byte with what the key
stands for.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from kvcomm.tier import Block
from l2_rdma.remote import RemoteReader
from tests.contracts.transports.churner import KEYS, payload
from tests.contracts.transports.peer import say
from tests.contracts.transports.worlds import Control, open_transport
from tests.l2_rdma.regions import key_of
from tests.l2_rdma.workers import NoVerification
from tests.peers import soon

BATCH = 8
LOOKED_UP_SHARE = 0.5
"""Before so many batches the index is read: what it says is a little older then."""


def read(name: str, directory: Path, reads: int, seconds: float, verify: bool) -> None:
    """So many reads, or until the first wrong byte, or for so many ``seconds``."""
    transport, control = open_transport(name), Control(directory)
    reader = RemoteReader(control.connect(transport), transport, verify=None if verify else NoVerification())
    pick, wrong, done, end = random.Random(seconds + reads), 0, 0, time.monotonic() + seconds
    while done < reads and not wrong and time.monotonic() < end:
        numbers = [pick.randrange(KEYS) for _ in range(BATCH)]
        keys = [key_of(number) for number in numbers]
        if pick.random() < LOOKED_UP_SHARE:
            reader.lookup(keys, soon())
        blocks: dict[int, Block] = {}
        reader.get(keys, blocks.__setitem__, soon())
        done += BATCH
        wrong += sum(block.payload != payload(numbers[index]) for index, block in blocks.items())
    say(reads=done, wrong=wrong, **asdict(reader.counters))
    transport.close()
    control.close()


if __name__ == "__main__":
    read(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "verify")
