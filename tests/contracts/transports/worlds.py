"""``World``: one transport, and everything that a test of it may do to its peers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvcomm.errors import KVCommError, Unavailable, failure_to_error
from l2_rdma.layout import RegionHeader
from l2_rdma.region import SHM_DIRECTORY
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import Channel, Transport, WireOptions
from tests.contracts.transports.peer import CONTROL, PACKET_BYTES_MAX, SCRATCH_BYTES
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu
from tests.peers import PATIENCE_S, soon, until

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Traits:
    """In what the wires differ, by nature."""

    peer_answers: bool
    """The peer's processor takes part: nothing is read from one that is stopped.  Otherwise the kernel, the
    NIC or the GPU serve a region whose owner sleeps."""
    death_shows: bool
    """The wire itself notices that the peer is gone.  Otherwise its memory outlives it, and the control
    connection tells."""
    revocable: bool
    """The peer can end a channel."""
    asks: bool = True
    """A channel is asked for; otherwise the offer alone is enough."""
    forks: bool = True
    """A forked child of a process that has used it can use it, too."""


TRAITS = {
    "shm": Traits(peer_answers=False, death_shows=False, revocable=False, asks=False),
    "tcp": Traits(peer_answers=True, death_shows=True, revocable=True),
    "verbs": Traits(peer_answers=False, death_shows=True, revocable=True),
    "cuda": Traits(peer_answers=False, death_shows=False, revocable=False, forks=False),
    "cuda-plain": Traits(peer_answers=False, death_shows=False, revocable=False),
}


def options() -> WireOptions:
    return WireOptions(rdma_device=os.environ.get("KVCOMM_TEST_RDMA_DEVICE", ""))


def open_transport(name: str) -> Transport:
    """A new one; whoever opens it closes it.  Raises ``Unavailable`` with the reason."""
    if name == "cuda-plain":
        return CudaTransport(HostGpu())
    found = find_transports([name], options())
    if found.refused:
        raise Unavailable(found.refused[name])
    return next(iter(found.running.values()))


def served_as(name: str) -> str:
    """What a pool calls this transport."""
    return name.removesuffix("-plain")


def environment() -> dict[str, str]:
    """Of a process that the tests start: ours, and this checkout's modules."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


class Control:
    """A control connection to a peer.  Channels that were opened through it live as long as it does."""

    def __init__(self, directory: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(str(directory / CONTROL))

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Raises ``KVCommError``: what the peer answered, or ``Unavailable``."""
        try:
            self._socket.send(msgspec.msgpack.encode([verb, *arguments]))
            packet = self._socket.recv(PACKET_BYTES_MAX + 1024)
        except OSError as error:
            raise Unavailable(f"the peer does not answer: {error}") from error
        if not packet:
            raise Unavailable("the peer is gone")
        status, value = msgspec.msgpack.decode(packet)
        if status != "ok":
            raise failure_to_error(status, value)
        return value

    def open(self, proposal: bytes) -> bytes:
        """The ``Ask`` of a transport."""
        answer: bytes = self.ask("open", proposal)
        return answer

    def peek(self, offset: int, length: int) -> bytes:
        """What the peer's region holds, as its owner sees it."""
        steps = range(offset, offset + length, PACKET_BYTES_MAX)
        return b"".join(self.ask("peek", at, min(PACKET_BYTES_MAX, offset + length - at)) for at in steps)

    def connect(self, transport: Transport, deadline: float | None = None) -> Channel:
        offer, header = self.ask("meet")
        return transport.connect(
            offer, RegionHeader.unpack(header), self.open, soon() if deadline is None else deadline
        )

    def close(self) -> None:
        self._socket.close()


class Peer:
    """An owner of a region that can be killed, paused and restarted.

    Args:
        module: what it runs (``tests.contracts.transports.peer``, or another with the same arguments).
    """

    def __init__(self, transport: str, directory: Path, incarnation: int, module: str = "peer") -> None:
        self.directory = directory
        self.transport = transport
        self.incarnation = incarnation
        self._controls: list[Control] = []
        command = [sys.executable, "-m", f"tests.contracts.transports.{module}"]
        self._process = subprocess.Popen(
            [*command, transport, str(directory), str(incarnation)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line and "refused" not in json.loads(line), f"the peer does not serve: {line}"

    def control(self) -> Control:
        """A new control connection; ends with the peer at the latest."""
        self._controls.append(Control(self.directory))
        return self._controls[-1]

    def pause(self) -> None:
        """Returns when it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        process = psutil.Process(self._process.pid)
        until(lambda: process.status() == psutil.STATUS_STOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Returns when it is gone."""
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def serves(self) -> bool:
        """Whether it can be used by another test, who finds it running; control connections end with this."""
        self._hang_up()
        self.resume()
        if self._process.poll() is not None:
            return False
        try:
            return bool(self.control().ask("serves"))
        finally:
            self._hang_up()

    def _hang_up(self) -> None:
        for control in self._controls:
            control.close()
        self._controls.clear()

    def end(self) -> None:
        self._hang_up()
        self._process.kill()
        self._process.communicate()


class World:
    """One transport.

    Args:
        directory: for the regions of its peers.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.traits = TRAITS[name]
        self.directory = directory

    def transport(self) -> Transport:
        return open_transport(self.name)

    @contextmanager
    def peer(
        self, incarnation: int = 21, *, instead_of: Peer | None = None, module: str = "peer"
    ) -> Iterator[Peer]:
        """``instead_of``: one that was killed, whose place the new one takes."""
        place = instead_of.directory if instead_of else Path(tempfile.mkdtemp(dir=self.directory))
        peer = Peer(self.name, place, incarnation, module)
        try:
            yield peer
        finally:
            peer.end()

    @contextmanager
    def link(self, peer: Peer) -> Iterator[Link]:
        """A transport of its own with one channel to ``peer``."""
        transport = self.transport()
        try:
            control = peer.control()
            yield Link(self, peer, control, transport, control.connect(transport))
            control.close()
        finally:
            transport.close()


@dataclass(frozen=True, slots=True)
class Link:
    """A channel and its two ends."""

    world: World
    peer: Peer
    control: Control
    transport: Transport
    channel: Channel

    @property
    def slots(self) -> int:
        """Where the peer's pattern begins in the region."""
        return self.channel.header.layout.slots_offset

    @property
    def scratch(self) -> int:
        return self.channel.header.layout.slots_end - SCRATCH_BYTES

    @property
    def words(self) -> int:
        return self.channel.header.layout.hazard_offset


@contextmanager
def directory_for_regions() -> Iterator[Path]:
    """In shared memory; its path is short enough for a socket's."""
    directory = Path(tempfile.mkdtemp(prefix="kvc-", dir=SHM_DIRECTORY))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def reason_to_skip(name: str) -> str | None:
    """Why this transport cannot be tested here; ``None`` = it can."""
    try:
        open_transport(name).close()
    except KVCommError as error:
        return error.message
    return None
