"""``Rider``: a client of a real pool over one transport.

``python -m tests.contracts.transports.riders ...`` is one that can be killed in the middle of a write.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from kvcomm.block import GENERATION_OFFSET, HEADER_BYTES, BlockHeader
from kvcomm.errors import KVCommError
from kvcomm.rpc import Connection
from kvcomm.tier import Block
from kvcomm.wire.messages import (
    BlockAbort,
    BlockCopies,
    BlockGet,
    BlockPublish,
    BlockPublished,
    BlockReserve,
    BlockReserved,
    ChannelAsk,
    ChannelOffers,
    ChannelOpen,
    ChannelOpened,
    Grant,
    Message,
    Want,
)
from l2_rdma.layout import RegionHeader
from l2_rdma.remote import RemoteReader
from l2_rdma.transports.port import Extent, Operation
from tests.contracts.transports.peer import say
from tests.contracts.transports.worlds import ROOT, environment, open_transport, served_as
from tests.l2_rdma.pools import TENANT_NAME
from tests.l2_rdma.regions import header_of, key_of, payload_of
from tests.peers import CREDENTIALS, IDENTITY, PATIENCE_S, soon

COPY_BYTES = 64 << 10
PAYLOAD_BYTES = COPY_BYTES - HEADER_BYTES
ROUND_S = 4.0
"""What a reader gives one round of reads."""
TENANT = CREDENTIALS.tenant_digest(TENANT_NAME)


@cache
def payload(number: int) -> bytes:
    """Every eight bytes of it name the block."""
    return payload_of(number, PAYLOAD_BYTES)


@cache
def header(number: int) -> BlockHeader:
    return header_of(number, payload(number), tenant=TENANT)


@dataclass(slots=True)
class Came:
    """What a batch of reads brought."""

    hits: int = 0
    wrong: int = 0
    """Of these."""


class Rider:
    """A control connection to the pool at ``address`` and a channel into its region."""

    def __init__(self, address: str, name: str) -> None:
        self.transport = open_transport(name)
        try:
            self.connection = Connection.open(address, IDENTITY, soon())
        except KVCommError:
            self.transport.close()
            raise
        self._name = served_as(name)
        self.open_channel()

    def open_channel(self) -> None:
        """Another one, instead of the one there was."""
        offers = self._call(ChannelAsk())
        assert isinstance(offers, ChannelOffers)
        [offer] = [each.detail for each in offers.offers if each.transport == self._name]
        self.channel = self.transport.connect(offer, RegionHeader.unpack(offers.header), self._open, soon())
        self.reader = RemoteReader(self.channel, self.transport, timeout_s=ROUND_S)

    def get(
        self, numbers: Sequence[int], deadline: float | None = None, each: Callable[[], None] = lambda: None
    ) -> Came:
        """Read them all; ``each`` is called whenever one has come."""
        came = Came()

        def found(index: int, block: Block) -> None:
            came.hits += 1
            came.wrong += block.payload != payload(numbers[index])
            each()

        keys = [key_of(number) for number in numbers]
        self.reader.get(keys, found, soon() if deadline is None else deadline)
        return came

    def reserve(self, numbers: Sequence[int]) -> list[Grant]:
        reply = self._call(BlockReserve([Want(key_of(number), COPY_BYTES) for number in numbers]))
        assert isinstance(reply, BlockReserved)
        return reply.grants

    def write(self, grant: Grant, number: int) -> list[Operation]:
        """Post the writes of one block."""
        packed = header(number).pack()[:GENERATION_OFFSET]
        return [
            self.channel.write(Extent(grant.offset, GENERATION_OFFSET), packed, soon()),
            self.channel.write(Extent(grant.offset + HEADER_BYTES, PAYLOAD_BYTES), payload(number), soon()),
        ]

    def publish(self, grants: Sequence[Grant]) -> list[str]:
        reply = self._call(BlockPublish([grant.token for grant in grants]))
        assert isinstance(reply, BlockPublished)
        return reply.statuses

    def abort(self, grants: Sequence[Grant]) -> None:
        self._call(BlockAbort([grant.token for grant in grants]))

    def put(self, numbers: Sequence[int]) -> list[str]:
        """Reserve, write through the channel, publish; the status of each."""
        grants = self.reserve(numbers)
        granted = [place for place, grant in enumerate(grants) if grant.status == "granted"]
        writes = [each for place in granted for each in self.write(grants[place], numbers[place])]
        self.transport.wait(writes)
        assert [write.error for write in writes] == [None] * len(writes)
        published = self.publish([grants[place] for place in granted])
        statuses = [grant.status for grant in grants]
        for place, status in zip(granted, published, strict=True):
            statuses[place] = status
        return statuses

    def copies(self, numbers: Sequence[int]) -> list[bytes]:
        """What the pool has under these keys, as it lies there: nobody has verified it."""
        frame = self.connection.call(BlockGet(0, [key_of(number) for number in numbers]), deadline=soon())
        assert isinstance(frame.message, BlockCopies)
        whole, copies = b"".join(frame.payload), []
        for size in frame.message.copy_bytes:
            copies.append(whole[:size])
            whole = whole[size:]
        return copies

    def close(self) -> None:
        self.transport.close()
        self.connection.close()

    def _open(self, proposal: bytes) -> bytes:
        answer = self._call(ChannelOpen(self._name, proposal))
        assert isinstance(answer, ChannelOpened)
        return answer.answer

    def _call(self, message: Message) -> Message:
        return self.connection.call(message, [], deadline=soon()).message


@contextmanager
def rider(address: str, name: str) -> Iterator[Rider]:
    made = Rider(address, name)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def rider_process(role: str, address: str, name: str, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    """See :func:`main`; it has said that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contracts.transports.riders", role, address, name, *map(str, numbers)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def main(role: str, address: str, name: str, numbers: Sequence[int]) -> None:
    """``half``: reserve, write half of each block, say so, publish when told to, say the statuses.

    ``endless``: reserve, and write to each block again and again until that fails; say the error.

    ``reading``: read again and again, until the end of the process.
    """
    mine = Rider(address, name)
    if role == "reading":
        assert mine.get(numbers).hits == len(numbers)
        say(ready=True)
        while True:
            mine.get(numbers)
    grants = mine.reserve(numbers)
    assert [grant.status for grant in grants] == ["granted"] * len(numbers)
    writes = [mine.write(grant, number)[0] for grant, number in zip(grants, numbers, strict=True)]
    mine.transport.wait(writes)
    say(ready=True)
    if role == "half":
        sys.stdin.readline()
        say(statuses=mine.publish(grants))
        return
    while all(write.error is None for write in writes):
        writes = [
            each for grant, number in zip(grants, numbers, strict=True) for each in mine.write(grant, number)
        ]
        mine.transport.wait(writes)
    say(error=next(write.error.code for write in writes if write.error is not None))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], [int(each) for each in sys.argv[4:]])
