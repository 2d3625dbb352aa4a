"""The fault lab: a cluster of real processes on disks, clocks and signals that a test has in its hand.

Disks are small ext4 file systems, each in a file on a loop device, mounted where one shard keeps its records:
they can be full, stalled, damaged, or cut off from power, and nothing else of the machine notices.  They need
root and loop devices; ``disks_missing`` says what is not there, and the tests are skipped with that reason.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import KVCommError
from kvcomm.instance import Instance, NodeRecord
from kvcomm.rpc import Connection, Identity
from kvcomm.stateplane import record_name
from kvcomm.wire.messages import Message, RecordFetch, RecordState, RecordStates
from tests.system.conftest import Cluster, eventually, metric
from tests.system.staged import STAGE_VARIABLE, Stage

ROOT = Path(__file__).parents[2]
SHARDS = ("shard-0", "shard-1", "shard-2")
LONG = bool(os.environ.get("KVCOMM_LONG_FAULTS"))
"""Whether stalls and pauses last as long as in the fault catalogue (10 s); the mechanism is the same."""
STALL_S = 10.0 if LONG else 3.0

CONFIG = """
cache: {{l1_size: 8MiB, l3_size: 32MiB}}
network: {{request_timeout: 1s, connect_timeout: 1s}}
cluster: {{shards: 3, pools: 0, repair_interval: 1s, hint_age: {hint_age}, tombstone_age: {tombstone_age}}}
storage: {{directory: {storage}, fsync: {fsync}, fsync_interval: {fsync_interval}}}
"""

_FS_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_LOG_FLUSH = struct.pack("I", 2)
_FAKETIME = ("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")


# -- disks


@cache
def disks_missing() -> str:
    """Why there can be no file system of a test's own here; empty = there can."""
    if os.geteuid() != 0:
        return "file systems of a test's own need root"
    for tool in ("mkfs.ext4", "mount", "umount", "fsfreeze"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    with tempfile.TemporaryDirectory() as directory:
        try:
            disk = Disk(Path(directory) / "image", Path(directory) / "mounted", size_mib=4)
            disk.mount()
        except subprocess.CalledProcessError as error:
            return f"loop devices cannot be mounted here: {error.stderr.strip()}"
        disk.close()
    return ""


class Disk:
    """A file system in a file.  ``mount`` it to use it; ``close`` is idempotent."""

    def __init__(self, image: Path, mounted_at: Path, *, size_mib: int = 96) -> None:
        self.image, self.mounted_at = image, mounted_at
        self._mounted = self._frozen = False
        mounted_at.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(size_mib << 20)
        _run("mkfs.ext4", "-q", "-m", "0", str(image))

    def mount(self) -> None:
        _run("mount", "-o", "loop,noatime", str(self.image), str(self.mounted_at))
        self._mounted = True

    def unmount(self) -> None:
        """Waits for the last process that has a file of it open."""

        def gone() -> bool:
            command = ["umount", str(self.mounted_at)]
            return subprocess.run(command, check=False, capture_output=True).returncode == 0

        eventually(gone, 10.0)
        self._mounted = False

    def cut_power(self) -> None:
        """What was not synced is gone at once; processes with open files get EIO until it is mounted anew."""
        descriptor = os.open(self.mounted_at, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, _WITHOUT_LOG_FLUSH)
        finally:
            os.close(descriptor)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Not one block is free."""
        filler = self.mounted_at / "filler"
        with filler.open("wb", buffering=0) as file:
            at = os.statvfs(self.mounted_at)
            os.posix_fallocate(file.fileno(), 0, at.f_bavail * at.f_frsize * 98 // 100)
            with suppress(OSError):
                while True:
                    file.seek(0, os.SEEK_END)
                    file.write(bytes(4096))
        try:
            yield
        finally:
            filler.unlink()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Writes wait, reads of what is in memory do not."""
        _run("fsfreeze", "-f", str(self.mounted_at))
        self._frozen = True
        try:
            yield
        finally:
            self.thaw()

    def thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            _run("fsfreeze", "-u", str(self.mounted_at))

    def close(self) -> None:
        self.thaw()
        if self._mounted:
            _run("umount", "-l", str(self.mounted_at))  # the last user's end frees the device
            self._mounted = False


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


# -- clocks


def faketime_library() -> str | None:
    """The library that shows a process another wall clock, if it is installed."""
    machine = os.uname().machine
    return next((path for each in _FAKETIME if Path(path := each.format(machine)).exists()), None)


class WallClock:
    """The wall clock of one node's processes; its monotonic clock stays right."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, offset_s: int) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{offset_s:+d}s\n")
        draft.replace(self._file)

    def close(self) -> None:
        """Processes that were killed leave the library's shared memory behind."""
        for left in Path("/dev/shm").glob("*faketime_*_*"):
            if not Path(f"/proc/{left.name.rpartition('_')[2]}").exists():
                left.unlink(missing_ok=True)

    def variables(self) -> Mapping[str, str]:
        library = faketime_library()
        assert library is not None
        return {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            # both: the library reads one of them, by version
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }


# -- the cluster


class Lab(Cluster):
    """``kvcomm up`` with staged nodes.  ``close`` ends everything, whatever state it is in."""

    def __init__(
        self,
        directory: Path,
        *,
        fsync: str = "always",
        fsync_interval: str = "50ms",
        on_disks: bool = False,
        hint_age: str = "60s",
        tombstone_age: str = "1h",
        variables: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.directory = directory
        self.storage = directory / "storage"
        self.storage.mkdir()
        self.stage = Stage(directory)
        self.stage.boot.write_text("first boot")
        for node, theirs in (variables or {}).items():
            self.stage.variables(node).write_text(
                "\n".join(f"{name}={value}" for name, value in theirs.items())
            )
        self.config = directory / "kvcomm.yaml"
        self.config.write_text(
            CONFIG.format(
                storage=self.storage,
                fsync=fsync,
                fsync_interval=fsync_interval,
                hint_age=hint_age,
                tombstone_age=tombstone_age,
            )
        )
        self.disks: dict[str, Disk] = {}
        self.name = f"lab-{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: set[int] = set()
        try:
            if on_disks:
                self._make_disks()
            self.start()
        except BaseException:
            self.close()
            raise

    def _make_disks(self) -> None:
        for node in SHARDS:
            disk = self.disks[node] = Disk(self.directory / f"{node}.image", self.storage / node)
            disk.mount()

    def start(self) -> None:
        """Also again after ``stop``, over what is on the disks."""
        said_before = len(self.said())
        command = [sys.executable, "-m", "tests.system.staged", "up"]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--instance", self.name, "--config", str(self.config)],
                cwd=ROOT,
                env=os.environ | {STAGE_VARIABLE: str(self.directory)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

        def up() -> bool:
            assert self._process is not None and self._process.poll() is None, self.said()
            return "is up" in self.said()[said_before:]

        eventually(up, 60.0)
        self.instance = Instance.open(self.name)
        self._pids |= {node.pid for node in self.instance.nodes()}
        eventually(self.votes)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the supervisor; its nodes end with it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(KVCommError):
            eventually(lambda: not Instance.open(self.name).nodes(), 15.0)

    def close(self) -> None:
        for disk in self.disks.values():
            disk.thaw()  # or its shard could not end
        with suppress(KVCommError):
            for node in Instance.open(self.name).nodes():
                self._pids.add(node.pid)
                os.kill(node.pid, signal.SIGCONT)
        try:
            self.stop()
        finally:
            for disk in self.disks.values():
                disk.close()
        with suppress(KVCommError):
            Instance.open(self.name).remove()

    def votes(self) -> bool:
        """Whether strong records can be changed, and every shard has a vote: a cluster whose third shard is
        still on its way in is up, but one that pauses and one that is killed are then too many."""
        try:
            with self.client() as kv:
                kv.strong("lab").put("votes", b"yes")
        except KVCommError:
            return False
        return all(metric(node, "kvcomm_strong_votes") == 1 for node in self.shards())

    def shards(self) -> list[NodeRecord]:
        """The living."""
        return [node for node in self.instance.nodes() if node.role == "shard"]

    def arm(self, node: str, step: str, passes: int = 0) -> None:
        """The node's process will end at this step (see ``staged``), after it passed it so often."""
        draft = self.stage.directory / f"{node}.draft"
        draft.write_text(f"{passes} {step}")
        draft.replace(self.stage.point(node))

    def armed(self, node: str) -> bool:
        return self.stage.point(node).exists()

    @contextmanager
    def paused(self, node: str) -> Iterator[NodeRecord]:
        record = self.kill(node, signal.SIGSTOP)
        try:
            yield record
        finally:
            with suppress(ProcessLookupError):  # it was killed meanwhile
                os.kill(record.pid, signal.SIGCONT)

    @property
    def _output(self) -> Path:
        return self.directory / "output"

    def said(self) -> str:
        """What the supervisor printed."""
        return self._output.read_text() if self._output.exists() else ""

    def log(self, node: str) -> str:
        """What the node printed, in all its lives."""
        return (self.instance.directory / "logs" / f"{node}.log").read_text()

    def connection(self, node: NodeRecord) -> Connection:
        """As another node of the cluster opens it."""
        identity = Identity(self.instance.credentials().token(NODE_TENANT), Incarnation(5))
        return Connection.open(node.addresses[0], identity, time.monotonic() + 5.0)

    def ask(self, node: NodeRecord, message: Message) -> Message:
        """As another node of the cluster would.  Raises the ``KVCommError`` that is answered."""
        connection = self.connection(node)
        try:
            return connection.call(message, deadline=time.monotonic() + 5.0).message
        finally:
            connection.close()

    def stored_key(self, plane: str, name: str, key: str) -> bytes:
        return bytes(self.instance.credentials().tenant_digest("default")) + record_name(plane, name, key)

    def states(self, node: NodeRecord, name: str, keys: Sequence[str]) -> list[RecordState | None]:
        """What one shard's own store has, without asking others.

        Raises ``KVCommError``: it does not answer (yet).
        """
        ring = self.instance.ring()
        assert ring is not None
        stored = [self.stored_key("state", name, key) for key in keys]
        answer = self.ask(node, RecordFetch(ring.epoch, stored))
        assert isinstance(answer, RecordStates)
        return list(answer.states)

    def agreed(self, name: str, keys: Sequence[str]) -> list[RecordState | None]:
        """The states, as soon as all shards have the same."""
        found: list[list[RecordState | None]] = []

        def same() -> bool:
            found.clear()
            try:
                shards = self.shards()
                found.extend(self.states(node, name, keys) for node in shards)
            except KVCommError:
                return False
            return len(found) == len(SHARDS) and all(states == found[0] for states in found)

        eventually(same, 40.0)
        return found[0]
