"""One connection among many: what it may do in one turn of the loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from kvcomm.rpc.stream import FrameStream
from kvcomm.wire.frames import FrameReader
from kvcomm.wire.outbox import Outbox

PIECE_BYTES = 1 << 20
PIECE_COUNT = 64


class FastReader(socket.socket):
    """A peer that takes everything at once."""

    sent_bytes = 0

    def send(self, piece: Any, flags: int = 0) -> int:
        self.sent_bytes += len(piece)
        return len(piece)

    def sendmsg(self, pieces: Any, *rest: Any) -> int:
        return self.send(pieces[0])


def test_a_fast_reader_of_much_leaves_others_their_turn() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        outbox, turns = Outbox(), 0
        with far, FastReader(fileno=near.detach()) as connection:
            connection.setblocking(False)
            stream = FrameStream(
                asyncio.get_running_loop(), connection, reader=FrameReader(), outbox=outbox,
                received=lambda received_bytes: None, lost=lambda error: None,
            )  # fmt: skip
            outbox.put([bytes(PIECE_BYTES)] * PIECE_COUNT)
            stream.flush()
            while outbox:
                assert connection.sent_bytes <= 5 * PIECE_BYTES * (turns + 1)
                turns += 1
                await asyncio.sleep(0)
            stream.close()
        assert connection.sent_bytes == PIECE_BYTES * PIECE_COUNT
        assert turns > 10

    asyncio.run(asyncio.wait_for(main(), 10))
