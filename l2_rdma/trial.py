"""One transport tried in processes of its own: ``python -m l2_rdma.trial serve`` and ``... read``.

What a driver does to the process that loads it is nobody's promise: it may crash or hang it.  So whoever
wants to know whether a wire works (``kvcomm doctor``) does not load it, but starts a small pool that offers
it and a reader that opens and measures it, gives each an :class:`Order` on standard input, and takes a crash
for a finding like any other.

Each answers with one line of JSON, then ``serve`` goes on until standard input ends.  Both are ended by a
timer of the kernel's when their time is up, also in the middle of a driver's call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import sys
import time
from pathlib import Path

import msgspec

from kvcomm.block import Incarnation
from kvcomm.credentials import Credentials
from kvcomm.errors import ConfigError, KVCommError, Refused
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import ChannelAsk, ChannelOffers, ChannelOpen, ChannelOpened
from l2_rdma.layout import RegionHeader
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from l2_rdma.probing import measure
from l2_rdma.transports.cuda.gpu import Gpu
from l2_rdma.transports.facts import facts_of
from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import Channel, Transport, WireOptions

TENANT = "doctor"
REGION_BYTES = 6 << 20
"""Small enough for a locked-memory limit of 8 MiB, which is what many systems give."""
_SLAB_BYTES = 1 << 20


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is to do."""

    transport: str
    timeout_s: float
    listen_host: str
    rdma_device: str
    cuda_device: int = 0
    directory: str = ""
    """``serve``: where the region and the socket are made."""
    secret: bytes = b""
    """``serve``: the cluster's."""
    address: str = ""
    """``read``: the pool's."""
    token: str = ""

    @property
    def wires(self) -> WireOptions:
        return WireOptions(self.listen_host, self.rdma_device, self.cuda_device)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``serve``: where it can be called, or ``refused`` says why there is no such pool."""

    address: str = ""
    refused: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``read``: measured, or ``refused`` says why not."""

    refused: str = ""
    latency_s: float = 0.0
    """Of a read of 4 KiB."""
    bytes_per_s: float = 0.0
    """Of reads of 1 MiB."""
    facts: dict[str, str] = {}
    """What the transport says of itself, for a person: ``device``, ``gid``, ``mtu``, ..."""


def main(role: str) -> None:
    """Do as told on standard input."""
    answers = _own_stdout()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves nothing where it happens to run
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    signal.setitimer(signal.ITIMER_REAL, order.timeout_s)  # its signal ends the process: we handle none
    if role == "serve":
        try:
            asyncio.run(_serve(order, answers))
        except (KVCommError, ConfigError) as error:
            _answer(answers, Serving(refused=str(error)))
    else:
        _answer(answers, _read(order))


async def _serve(order: Order, answers: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)

    def ready(running: RunningPool) -> None:
        _answer(answers, Serving(address=running.addresses[0]))

    directory = Path(order.directory)
    await run_pool(
        node="doctor",
        instance="doctor",
        incarnation=Incarnation(secrets.randbits(64) | 1),
        credentials=Credentials(order.secret),
        tenant=TENANT,
        addresses=[f"unix://{directory}/pool"],
        options=PoolOptions(
            REGION_BYTES,
            slab_bytes=_SLAB_BYTES,
            index_entries=1024,
            hazard_count=64,
            directory=directory,
            ahead_bytes=None,
            transports=(order.transport,),
            wires=order.wires,
            gpu=_gpu(order),
        ),
        stop=stop,
        ready=ready,
    )
    with contextlib.suppress(OSError):
        directory.rmdir()  # it is its maker's, who may have been killed


def _gpu(order: Order) -> Gpu | None:
    """Where the pool's slots are to be: ``cuda`` reaches those on a GPU."""
    if order.transport != "cuda":
        return None
    from l2_rdma.transports.cuda.runtime import open_gpu

    return open_gpu(order.cuda_device)


def _read(order: Order) -> Outcome:
    facts: dict[str, str] = {}
    try:
        found = find_transports([order.transport], order.wires)
        if found.refused:
            raise Refused(found.refused[order.transport])
        facts = facts_of(order.transport, order.wires)
        (transport,) = found.running.values()
        try:
            # Half of the time is the pool's: that it stands still is told before the reader counts as hung.
            return _measured(order, transport, facts, time.monotonic() + order.timeout_s / 2)
        finally:
            transport.close()
    except KVCommError as error:
        return Outcome(refused=error.message, facts=facts)


def _measured(order: Order, transport: Transport, facts: dict[str, str], deadline: float) -> Outcome:
    identity = Identity(order.token, Incarnation(secrets.randbits(64) | 1))
    connection = Connection.open(order.address, identity, deadline)
    try:
        channel = _open_channel(connection, transport, deadline)
        try:
            found = measure(transport, channel, deadline)
        finally:
            channel.close()
    finally:
        connection.close()
    return Outcome(latency_s=found.latency_s, bytes_per_s=found.bytes_per_s, facts=facts)


def _open_channel(connection: Connection, transport: Transport, deadline: float) -> Channel:
    said = connection.call(ChannelAsk(), deadline=deadline).message
    assert isinstance(said, ChannelOffers)
    name = transport.name
    for refusal in said.refused:
        if refusal.transport == name:
            raise Refused(f"by the pool: {refusal.detail.decode(errors='replace')}")
    offer = next((each.detail for each in said.offers if each.transport == name), None)
    if offer is None:
        raise Refused(
            "the pool does not offer it (its network.transports)"
            if said.header
            else "this node has no memory that this tenant may read one-sided"
        )

    def ask(proposal: bytes) -> bytes:
        answer = connection.call(ChannelOpen(name, proposal), deadline=deadline).message
        assert isinstance(answer, ChannelOpened)
        return answer.answer

    return transport.connect(offer, RegionHeader.unpack(said.header), ask, deadline)


def _own_stdout() -> int:
    """Keep standard output for the answer: drivers print to it, and that goes to standard error."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _answer(answers: int, answer: msgspec.Struct) -> None:
    os.write(answers, msgspec.json.encode(answer) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
