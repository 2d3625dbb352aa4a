"""``Instance``: one running cluster on one host, as a directory that its processes and agents find each other
by.

::

    <runtime_dir>/                  0700, ours alone
        <name>/                     0700
            secret                  0600, 32 bytes: whoever reads it belongs to the cluster
            lock                    taken for the moment of a change
            ring                    newest ring map that the leading controller told this host of
            nodes/<node>            one NodeRecord each, written by the node
            <node>.sock             data wire of the node

Several instances live side by side; everything they own carries their name.  The files are written whole
(temporary file, fsync, rename) and end with a checksum, so a reader sees the old content, the new one, or
damage that it can tell, never a mixture.  A record of a process that is gone is recognised by pid *and* start
time, so a reused pid revives nobody.

Pids mean something within one pid namespace only: processes in different containers must not share a runtime
directory.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
from xxhash import xxh3_64_hexdigest

from kvcomm.credentials import SECRET_BYTES, Credentials
from kvcomm.errors import ConfigError, Conflict, Corrupt, Refused, Unavailable
from kvcomm.wire.messages import RingMap

RUNTIME_VARIABLE = "KVCOMM_RUNTIME_DIR"
SOCKET_PATH_BYTES_MAX = 107
"""``sun_path`` holds 108 bytes, one of them the end."""

_NAME = re.compile(r"[a-z0-9-]{1,40}")
_NODE_FILE_BYTES_MAX = 64 << 10
_RING_FILE_BYTES_MAX = 16 << 20
_LOCK_TIMEOUT_S = 2.0
_LOCK_POLL_S = 0.005
_CHECKSUM_BYTES = len(xxh3_64_hexdigest(b"")) + 1  # and a newline


class InstanceExists(Refused):
    """An instance of this name is there already."""

    code: ClassVar[str] = "instance_exists"


class InstanceMissing(Refused):
    """There is no instance of this name."""

    code: ClassVar[str] = "instance_missing"


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself to the others on its host."""

    node: str
    role: str
    """``pool``, ``shard`` or ``controller``."""
    pid: int
    pid_start_time: int
    """Clock ticks from the machine's start to the process's: :func:`process_start_time`."""
    addresses: list[str]
    """Of the data wire, nearest first: ``unix:///path``, then ``tcp://host:port``."""
    control: str
    """``host:port`` of the control wire, or empty."""
    metrics: str
    """``host:port`` of the Prometheus endpoint, or empty."""
    incarnation: int
    region: str
    """Path of the shared-memory region, or empty."""
    transports: list[str] = []
    """One-sided ways into the region that the node serves, preferred first."""
    refused_transports: dict[str, str] = {}
    """Those that it was to serve and cannot, and why."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What one look at an instance's directory found."""

    nodes: list[NodeRecord]
    """The living, by name."""
    ring: RingMap | None
    damaged: list[str]
    """One sentence for each file that was ignored because its content cannot be trusted."""


def runtime_dir() -> Path:
    """The directory of all instances: ``$KVCOMM_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvcomm``, else
    ``/tmp/kvcomm-<uid>``.  Made (0700) where it is missing.

    Raises:
        Refused: it is somebody else's, not a directory, or open to others; secrets are not put there.
    """
    if named := os.environ.get(RUNTIME_VARIABLE):
        path = Path(named)
    elif session := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(session) / "kvcomm"
    else:
        path = Path(f"/tmp/kvcomm-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{path} cannot be made: {error.strerror}; set {RUNTIME_VARIABLE}") from error
    found = path.lstat()  # not stat: in /tmp anybody could have put a link here
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise Refused(f"{path} is not a directory of this user alone (mode 0700); set {RUNTIME_VARIABLE}")
    return path.resolve()


def process_start_time(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; ``None`` if it has ended (a zombie has)."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = content.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    return None if state in "ZX" else int(rest[18])


class Instance:
    """A handle on one instance's directory; cheap, holds nothing open."""

    def __init__(self, directory: Path) -> None:
        """Use :meth:`create` or :meth:`open`."""
        self.directory = directory
        self.name = directory.name

    @staticmethod
    def create(name: str | None = None) -> Instance:
        """A new instance with a fresh secret; without a name one is drawn.

        Raises:
            InstanceExists: the name is taken, maybe by an instance whose processes are all gone.
            ConfigError: the name cannot be used.
        """
        name = f"kv-{secrets.token_hex(3)}" if name is None else _checked(name, "an instance's name")
        root = runtime_dir()
        draft = root / f".{name}.{secrets.token_hex(4)}"
        draft.mkdir(mode=0o700)
        try:
            _write_whole(draft / "secret", secrets.token_bytes(SECRET_BYTES))
            (draft / "nodes").mkdir(mode=0o700)
            draft.rename(root / name)  # refused unless the name is free: two creators cannot both win
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise InstanceExists(
                    f"an instance {name!r} exists already in {root}: choose another name, open or remove it"
                ) from error
            raise
        return Instance(root / name)

    @staticmethod
    def open(name: str) -> Instance:
        """An instance that was created before.

        Raises:
            InstanceMissing: there is none of this name; the message lists those there are.
        """
        root = runtime_dir()
        directory = root / _checked(name, "an instance's name")
        if not (directory / "secret").is_file():
            known = ", ".join(each.name for each in Instance.list()) or "none"
            raise InstanceMissing(f"no instance {name!r} in {root}; there are: {known}")
        return Instance(directory)

    @staticmethod
    def list() -> list[Instance]:
        """Every instance of this user on this host, by name, running or not."""
        found = sorted(entry for entry in runtime_dir().iterdir() if _NAME.fullmatch(entry.name))
        return [Instance(entry) for entry in found if (entry / "secret").is_file()]

    def secret(self) -> bytes:
        """The cluster's secret.

        Raises:
            Refused: others may read the file, or it is not 32 bytes.
            InstanceMissing: it is gone.
        """
        path = self.directory / "secret"
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(SECRET_BYTES + 1)
        except FileNotFoundError as error:
            raise InstanceMissing(f"{path} is gone: the instance was removed") from error
        if mode & 0o077:
            raise Refused(f"{path} can be read by others; a secret that others know protects nothing")
        if len(content) != SECRET_BYTES:
            raise Refused(f"{path} is damaged: not {SECRET_BYTES} bytes; remove the instance and start again")
        return content

    def keep_secret_in(self, directory: Path) -> None:
        """Let the secret last as long as the records in ``directory``: their names are made with it, so under
        another one nobody finds them.  What is kept there already becomes this instance's, if it is new.

        Raises:
            ConfigError: the directory holds another instance's records, or cannot be used.
            Refused: others may read the secret there.
        """
        kept = directory / "secret"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not kept.exists():
                _write_whole(kept, self.secret())
            if kept.stat().st_mode & 0o077:
                raise Refused(f"{kept} can be read by others; a secret that others know protects nothing")
            secret = kept.read_bytes()
        except OSError as error:
            raise ConfigError(f"storage.directory {directory}: {error.strerror}") from error
        if len(secret) != SECRET_BYTES:
            raise ConfigError(f"{kept} is damaged: not {SECRET_BYTES} bytes")
        if secret == self.secret():
            return
        if self.ring() is not None:
            raise ConfigError(f"storage.directory {directory} holds the records of another instance")
        _write_whole(self.directory / "secret", secret)

    def credentials(self) -> Credentials:
        """For checking and making tokens; raises as :meth:`secret`."""
        return Credentials(self.secret())

    def socket_path(self, node: str) -> Path:
        """Where ``node`` listens for agents of this host.

        Raises:
            ConfigError: the path would be longer than a unix socket's may be.
        """
        path = self.directory / f"{_checked(node, 'a node')}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"{path} is too long for a unix socket ({SOCKET_PATH_BYTES_MAX} bytes); "
                f"choose shorter names, or a shorter {RUNTIME_VARIABLE}"
            )
        return path

    def register(self, record: NodeRecord) -> None:
        """Make this node known; its process's end is its departure.  Registering again replaces.

        Raises:
            Conflict: another living process has this node's name.
            InstanceMissing: the instance was removed.
        """
        path = self.directory / "nodes" / _checked(record.node, "a node")
        with self._locked():
            standing = _read_record(path)
            if isinstance(standing, NodeRecord) and _alive(standing) and standing.pid != record.pid:
                raise Conflict(f"node {record.node!r} of {self.name!r} runs already: process {standing.pid}")
            _write_checked(path, msgspec.json.encode(record))

    def unregister(self, record: NodeRecord) -> None:
        """Take the record back before an orderly end; one that has been replaced meanwhile stays."""
        self._drop(self.directory / "nodes" / _checked(record.node, "a node"), record)

    def nodes(self) -> builtins.list[NodeRecord]:
        """The living nodes, by name.  Records of the dead are deleted."""
        return self.survey().nodes

    def node(self, name: str) -> NodeRecord | None:
        """One of them, if it lives."""
        record = _read_record(self.directory / "nodes" / _checked(name, "a node"))
        return record if isinstance(record, NodeRecord) and _alive(record) else None

    def survey(self) -> Survey:
        """Everything that is known, with what had to be ignored."""
        living: builtins.list[NodeRecord] = []
        damaged: builtins.list[str] = []
        for path in self._node_paths():
            record = _read_record(path)
            if record is None:
                continue
            if isinstance(record, Corrupt):
                damaged.append(record.message)
            elif _alive(record):
                living.append(record)
            else:
                self._drop(path, record)
        ring: RingMap | None = None
        try:
            ring = _read_ring(self.directory / "ring")
        except Corrupt as error:
            damaged.append(error.message)
        return Survey(living, ring, damaged)

    def write_ring(self, ring: RingMap) -> None:
        """Keep the newest ring for processes that start later.

        Raises:
            Conflict: the one that stands is newer, or is another one of the same epoch.
            InstanceMissing: the instance was removed.
        """
        path = self.directory / "ring"
        with self._locked():
            try:
                standing = _read_ring(path)
            except Corrupt:
                standing = None  # the leader knows better than a damaged file
            if standing is not None and standing != ring and standing.epoch >= ring.epoch:
                raise Conflict(f"ring epoch {standing.epoch} stands; epoch {ring.epoch} cannot replace it")
            _write_checked(path, msgspec.json.encode(ring))

    def ring(self) -> RingMap | None:
        """The newest ring written; ``None`` where there is none, or a damaged one (see :meth:`survey`)."""
        return self.survey().ring

    def remove(self) -> None:
        """Delete the directory with all that is in it, records of shards included where they are kept here.

        Raises:
            Refused: nodes are still running.
        """
        if running := self.nodes():
            names = ", ".join(f"{node.node} (process {node.pid})" for node in running)
            raise Refused(f"instance {self.name!r} is still running: {names}; stop it first")
        grave = self.directory.with_name(f".{self.name}.{secrets.token_hex(4)}")
        try:
            self.directory.rename(grave)  # at once gone for everybody else; the deletion may take its time
        except FileNotFoundError:
            return
        shutil.rmtree(grave)

    def _node_paths(self) -> builtins.list[Path]:
        try:
            return sorted(each for each in (self.directory / "nodes").iterdir() if _NAME.fullmatch(each.name))
        except FileNotFoundError:
            return []  # removed

    def _drop(self, path: Path, record: NodeRecord) -> None:
        """Delete the record if it is still this one: a new process may have taken the name meanwhile."""
        try:
            with self._locked():
                if _read_record(path) == record:
                    path.unlink()
        except (InstanceMissing, Unavailable):
            pass  # tidying up, not worth a failure: the record stays dead and the next reader tries again

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the processes that change this instance; changes are short, so waiting is too."""
        path = self.directory / "lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _take(lock, path)
                yield
            finally:
                os.close(lock)
        except FileNotFoundError as error:
            raise InstanceMissing(f"instance {self.name!r} was removed") from error


def _take(lock: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                message = f"{path} has been held for {_LOCK_TIMEOUT_S:g} s; is its holder paused?"
                raise Unavailable(message) from None
            time.sleep(_LOCK_POLL_S)


def _checked(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{what} is 1 to 40 of a-z, 0-9 and '-', got {name!r}")
    return name


def _alive(record: NodeRecord) -> bool:
    return process_start_time(record.pid) == record.pid_start_time


def _read_record(path: Path) -> NodeRecord | Corrupt | None:
    """The record, the reason why it cannot be trusted, or ``None`` where there is no file (any more)."""
    try:
        content = _read_checked(path, _NODE_FILE_BYTES_MAX)
        if content is None:
            return None
        record = msgspec.json.decode(content, type=NodeRecord)
    except Corrupt as error:
        return error
    except msgspec.DecodeError as error:
        return Corrupt(f"{path} is ignored: {error}")
    if record.node != path.name:
        return Corrupt(f"{path} is ignored: it is the record of {record.node!r}")
    return record


def _read_ring(path: Path) -> RingMap | None:
    content = _read_checked(path, _RING_FILE_BYTES_MAX)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=RingMap)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} is ignored: {error}") from error


def _read_checked(path: Path, bytes_max: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except FileNotFoundError:
        return None
    body, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    if len(content) > bytes_max or checksum != _checksum_line(body):
        raise Corrupt(f"{path} is ignored: its checksum does not match")
    return body


def _write_checked(path: Path, content: bytes) -> None:
    body = content + b"\n"
    _write_whole(path, body + _checksum_line(body))


def _checksum_line(body: bytes) -> bytes:
    return xxh3_64_hexdigest(body).encode() + b"\n"


def _write_whole(path: Path, content: bytes) -> None:
    """Replace the file at once, 0600; after a power cut it is the old one or the new one."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
