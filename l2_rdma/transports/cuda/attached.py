"""``AttachedPool``: a GPU pool of this host as an agent's process has it: connection, channel, pins, reader.

The connection is the life of everything else: what the pool ties to this client (hazard words, reservations)
ends with it, and a pool that was killed is noticed by it.  Views that were handed out before stay readable,
and their bytes stay what they were.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from kvcomm.block import HEADER_BYTES, BlockHeader, BlockKey
from kvcomm.errors import Corrupt, Unavailable
from kvcomm.rpc.blocking import Connection
from kvcomm.rpc.session import Identity
from kvcomm.tier import PutStatus
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPublished,
    BlockReserve,
    BlockReserved,
    ChannelAsk,
    ChannelOffers,
    ChannelOpen,
    ChannelOpened,
    Message,
    PinOpen,
    PinRange,
    Want,
)
from l2_rdma.layout import RegionHeader
from l2_rdma.pins import PinTable
from l2_rdma.transports.cuda.gpu import DeviceBuffer
from l2_rdma.transports.cuda.reader import CudaReader, DeviceBlock, check_length
from l2_rdma.transports.cuda.transport import CudaChannel, CudaTransport

ALIVE_INTERVAL_S = 0.05
"""Reads of a dead pool stay right, they only come to an end: asking the connection costs more than a read."""

M = TypeVar("M", bound=Message)


class AttachedPool:
    """Made by :meth:`attach`.  Reading is thread-safe, also beside a :meth:`put`; two puts at a time are not,
    and nothing beside :meth:`close`."""

    def __init__(
        self, connection: Connection, channel: CudaChannel, pins: PinTable, clock: Callable[[], float]
    ) -> None:
        self.channel = channel
        self.reader = CudaReader(channel.region, pins, clock)
        self._connection = connection
        self._asking = threading.Lock()  # a connection serves one call at a time
        self._clock = clock
        self._alive_until = 0.0
        self._closed = False

    @staticmethod
    def attach(
        address: str,
        identity: Identity,
        transport: CudaTransport,
        deadline: float,
        *,
        pin_slots: int = 1024,
        pin_budget_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> AttachedPool:
        """Connect to the pool at ``address`` and map its memory.

        Raises:
            Unavailable, Refused: no such pool, not in time, or its GPU cannot be reached from here; the
            message
                says which.
        """
        connection = Connection.open(address, identity, deadline, clock=clock)
        channel: CudaChannel | None = None
        try:
            offers = _asked(connection, ChannelAsk(), ChannelOffers, deadline)
            offer = next((each.detail for each in offers.offers if each.transport == "cuda"), None)
            if offer is None:
                reasons = [each.detail.decode() for each in offers.refused if each.transport == "cuda"]
                raise Unavailable(
                    f"{address} offers no cuda channel: {' '.join(reasons) or 'not configured'}"
                )
            channel = transport.connect(
                offer,
                RegionHeader.unpack(offers.header),
                lambda proposal: (
                    _asked(connection, ChannelOpen("cuda", proposal), ChannelOpened, deadline).answer
                ),
                deadline,
            )
            given = _asked(connection, PinOpen(pin_slots), PinRange, deadline)
            pins = PinTable(channel.region.file, given.first, given.count, pin_budget_bytes)
            return AttachedPool(connection, channel, pins, clock)
        except BaseException:
            if channel is not None:
                channel.close()
            connection.close()
            raise

    def alive(self) -> bool:
        """Whether the pool still serves us, as far as is known here, :data:`ALIVE_INTERVAL_S` ago at most.
        Does
        not wait."""
        if self._closed or self.channel.broken is not None:
            return False
        now = self._clock()
        if now >= self._alive_until and self._asking.acquire(blocking=False):  # else somebody is asking
            try:
                if not self._connection.alive():
                    return False
            finally:
                self._asking.release()
            self._alive_until = now + ALIVE_INTERVAL_S
        return True

    def view(self, keys: Sequence[BlockKey]) -> list[DeviceBlock | None]:
        """As ``CudaReader.view``; all misses once the pool is gone."""
        return self.reader.view(keys) if self.alive() else [None] * len(keys)

    def fetch(
        self, keys: Sequence[BlockKey], into: Sequence[DeviceBuffer], deadline: float
    ) -> list[BlockHeader | None]:
        """As ``CudaReader.fetch``; all misses once the pool is gone."""
        return self.reader.fetch(keys, into, deadline) if self.alive() else [None] * len(keys)

    def put(self, blocks: Sequence[tuple[BlockHeader, DeviceBuffer]], deadline: float) -> list[PutStatus]:
        """Store payloads that are on this process's GPU: reserve, copy from GPU to GPU, publish.

        Args:
            blocks: each header's ``payload_checksum`` is :meth:`CudaReader.digest` of the payload, which no
                stream may be writing to any more.

        Raises:
            PayloadError: a payload is not as long as its header says; nothing was stored.
            Unavailable, OutcomeUnknown: the pool did not answer.
        """
        for header, payload in blocks:
            check_length(header, payload)
        wants = [Want(header.key, HEADER_BYTES + header.payload_bytes) for header, _ in blocks]
        grants = self._ask(BlockReserve(wants), BlockReserved, deadline).grants
        statuses: list[PutStatus] = ["refused"] * len(blocks)
        written: list[tuple[int, int]] = []
        for index, (grant, (header, payload)) in enumerate(zip(grants, blocks, strict=True)):
            if grant.status != "granted":
                statuses[index] = cast("PutStatus", grant.status)
                continue
            pin = self.reader.begin_write(grant.offset, grant.generation, wants[index].copy_bytes)
            if pin is None:
                self._ask(BlockAbort([grant.token]), Message, deadline)
                statuses[index] = "expired"
                continue
            try:
                self.reader.write(grant.offset, header.pack(), payload)
            finally:
                self.reader.end_write(pin)
            written.append((index, grant.token))
        if written:
            tokens = [token for _, token in written]
            answers = self._ask(BlockPublish(tokens), BlockPublished, deadline).statuses
            for (index, _), status in zip(written, answers, strict=True):
                statuses[index] = "stored" if status == "published" else cast("PutStatus", status)
        return statuses

    def _ask(self, question: Message, answer: type[M], deadline: float) -> M:
        with self._asking:
            return _asked(self._connection, question, answer, deadline)

    def close(self) -> None:
        """Leave the pool.  No array made from a view may be in use any more: the memory is unmapped."""
        self._closed = True
        self._connection.close()
        self.reader.close()
        self.channel.close()


def _asked(connection: Connection, question: Message, answer: type[M], deadline: float) -> M:
    reply = connection.call(question, deadline=deadline).message
    if not isinstance(reply, answer):
        raise Corrupt(f"the pool answered {type(question).__name__} with {type(reply).__name__}")
    return reply
