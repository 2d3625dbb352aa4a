"""A client in a process of its own: ``python -m tests.contracts.transports.worker ...`` counts on a word."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.contracts.transports.worlds import Control, open_transport
from tests.peers import soon


def count(name: str, directory: Path, word: int, times: int) -> None:
    """Adds one, ``times`` times, in batches."""
    transport = open_transport(name)
    control = Control(directory)  # the channel lives as long as it does
    channel = control.connect(transport)
    offset = channel.header.layout.hazard_offset + word * 8
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for begin in range(0, times, 50):
        adding = [channel.fetch_add(offset, 1, soon()) for _ in range(min(50, times - begin))]
        transport.wait(adding)
        failed = [each.error for each in adding if each.error is not None]
        assert not failed, failed[0]
    transport.close()
    control.close()


if __name__ == "__main__":
    count(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
