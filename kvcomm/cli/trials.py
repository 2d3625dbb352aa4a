"""``Trials``: tries transports, each in processes that may crash or hang without harm (``l2_rdma.trial``)."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from l2_rdma.transports.port import WireOptions
    from l2_rdma.trial import Order

Answer = TypeVar("Answer", bound=msgspec.Struct)

TIMEOUT_S = 20.0
"""For one transport: two interpreters are started and load their drivers, on a slow machine too."""
_END_S = 5.0
"""An interpreter with a large driver in it is given so long to end, also on a busy machine."""
_DYING_S = 0.5
"""From the end of its connections to the end of a process."""
_SHM = Path("/dev/shm")
_COMMAND = (sys.executable, "-m", "l2_rdma.trial")


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one transport to one pool."""

    transport: str
    verdict: Literal["works", "refused", "failed"]
    """``failed``: a process crashed, hung, or did what it must not."""
    reason: str = ""
    """Of a verdict that is not ``works``, or why it is not used although it does."""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    facts: dict[str, str] = field(default_factory=dict)
    """What the transport says of itself: ``device``, ``gid``, ``mtu``, ..."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Every method waits for ``timeout_s`` at most, and for the children to end after that."""

    wires: WireOptions
    timeout_s: float = TIMEOUT_S
    command: tuple[str, ...] = _COMMAND
    """Of the children, without their role."""

    def between_processes(self, transport: str) -> Trial:
        """Try it on this host: a small pool of its own, and a reader."""
        from kvcomm.credentials import SECRET_BYTES, Credentials
        from l2_rdma.trial import TENANT, Serving

        deadline = time.monotonic() + self.timeout_s
        secret = secrets.token_bytes(SECRET_BYTES)
        token = Credentials(secret).token(TENANT)
        try:
            with _directory() as directory, self._child("serve") as server, self._child("read") as reader:
                server.tell(self._order(transport, directory=str(directory), secret=secret))
                serving = server.answer(Serving, deadline)
                if serving.refused:
                    return Trial(transport, "refused", f"no pool can be made: {serving.refused}")
                reader.tell(self._order(transport, address=serving.address, token=token))
                trial = self._trial(transport, reader, deadline)
                if trial.verdict != "works":
                    server.check_alive()  # else the reader only saw it go
                reader.check_end()
                server.check_end()
                return trial
        except (_Lost, OSError) as error:  # without processes, memory or files there is nothing to try with
            return Trial(transport, "failed", str(error))

    def to_pool(self, transport: str, address: str, token: str) -> Trial:
        """Try it with a pool that runs."""
        deadline = time.monotonic() + self.timeout_s
        try:
            with self._child("read") as reader:
                reader.tell(self._order(transport, address=address, token=token))
                trial = self._trial(transport, reader, deadline)
                reader.check_end()
                return trial
        except (_Lost, OSError) as error:  # without processes, memory or files there is nothing to try with
            return Trial(transport, "failed", str(error))

    def _trial(self, transport: str, reader: _Child, deadline: float) -> Trial:
        from l2_rdma.trial import Outcome

        outcome = reader.answer(Outcome, deadline)
        if outcome.refused:
            return Trial(transport, "refused", outcome.refused, facts=outcome.facts)
        return Trial(transport, "works", "", outcome.latency_s, outcome.bytes_per_s, outcome.facts)

    def _order(
        self, transport: str, *, directory: str = "", secret: bytes = b"", address: str = "", token: str = ""
    ) -> Order:
        from l2_rdma.trial import Order

        return Order(
            transport=transport,
            timeout_s=self.timeout_s,
            listen_host=self.wires.listen_host,
            rdma_device=self.wires.rdma_device,
            cuda_device=self.wires.cuda_device,
            directory=directory,
            secret=secret,
            address=address,
            token=token,
        )

    @contextmanager
    def _child(self, role: str) -> Iterator[_Child]:
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [*self.command, role], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
            child = _Child(process, errors, "client" if role == "read" else "pool")
            try:
                yield child
            finally:
                child.kill()


class _Lost(Exception):
    """A child did not do what it was to do; the text says what became of it."""


class _Child:
    """One process of a trial."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes], side: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._input, self._output = process.stdin, process.stdout
        self._errors = errors
        self._side = side

    def tell(self, order: Order) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has died: what it answers will say so
            self._input.write(msgspec.json.encode(order) + b"\n")
            self._input.flush()

    def answer(self, kind: type[Answer], deadline: float) -> Answer:
        """What it says.

        Raises:
            _Lost: it ended instead, talks nonsense, or its time is up.
        """
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise _Lost(f"the probe process of the {self._side} did not answer in time")
            read = os.read(self._output.fileno(), 1 << 16)
            if not read:
                raise _Lost(self._death() or f"the probe process of the {self._side} hung when it ended")
            line += read
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise _Lost(f"the probe process of the {self._side} answered nonsense: {error}") from error

    def check_alive(self) -> None:
        """Raise ``_Lost`` if it has just died."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DYING_S)
            raise _Lost(self._death())

    def check_end(self) -> None:
        """Have it end, and raise ``_Lost`` unless it does so in order: drivers also crash when they close."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise _Lost(f"the probe process of the {self._side} worked, but did not end") from None
        if code:
            raise _Lost(f"{self._death()} after it had done its work")

    def kill(self) -> None:
        """Also one that hangs in a driver, if the kernel lets go of it."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _death(self) -> str:
        """How it ended; empty if it has not."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return ""
        if code == -signal.SIGALRM:
            return f"the probe process of the {self._side} did not answer in time"
        said = self._last_words()
        how = f"died with {_signal_name(-code)}" if code < 0 else f"failed (status {code})"
        return f"the probe process of the {self._side} {how}" + (f": {said}" if said else "")

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4096))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _directory() -> Iterator[Path]:
    """For the region and the socket; in shared memory, where there is any."""
    directory = Path(tempfile.mkdtemp(prefix="kvcomm-doctor-", dir=_SHM if _SHM.is_dir() else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
