"""``Region``: one file of shared memory, made by its owner and attached by clients.

The file lives in ``/dev/shm`` as ``kvcomm-<instance>-<node>-<random>``, mode 0600.  Its owner holds a
``flock`` on it for life: the kernel drops the lock however the process ends, so a region whose lock is free
is garbage, and :func:`reclaim_stale` removes it.  Unlinking never hurts a client: its mapping, and the views
made from it, live on.

Memory is given to the file in slices (:meth:`Region.back`) before the owner hands it out, for two reasons: a
full ``/dev/shm`` is an error at once and not a SIGBUS in the middle of a write, and first touch of a page
costs more than copying it (a 2 MiB put into untouched memory takes about ten times as long).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import threading
import weakref
from pathlib import Path

from kvcomm.block import HEADER_BYTES, Generation, Incarnation
from kvcomm.errors import ConfigError, Corrupt, Refused, Unavailable
from kvcomm.namespace import TenantDigest
from l2_rdma.layout import (
    BACKED_WORD,
    GENERATION_BASE_MAX,
    GENERATION_WINDOW,
    REGION_HEADER_BYTES,
    STATE_CLOSING,
    STATE_OPEN,
    STATE_WORD,
    WORD_BYTES,
    RegionHeader,
    RegionLayout,
)
from l2_rdma.rangelocks import is_locked, try_lock
from l2_rdma.words import Words

SHM_DIRECTORY = Path("/dev/shm")
NAME_PREFIX = "kvcomm-"
_CREATE_ATTEMPTS = 16
_MADV_POPULATE_READ = 22  # Linux >= 5.14


class Region:
    """A mapped region.  ``memory`` is all of it, writable; ``words`` is the same as 64-bit words (see
    ``layout``)."""

    def __init__(self, path: Path, descriptor: int, header: RegionHeader, mapping: mmap.mmap) -> None:
        self.path = path
        self.header = header
        self.mapping = mapping
        self.memory = memoryview(mapping)
        self.words = self.memory.cast("Q")
        self.atomics = Words(self.words, descriptor)
        self.device: object | None = None
        """What maps the slots, where ``header.device_slots``."""
        self._descriptor = descriptor
        self._backed_bytes = 0
        self._backing = threading.Lock()
        self._close_file = weakref.finalize(self, os.close, descriptor)
        self._close_file.atexit = False  # the kernel closes it when the last thread is gone, not before
        self._unlink: weakref.finalize[[int, Path], Region] | None = None  # set in the owner

    @staticmethod
    def create(
        directory: Path,
        *,
        instance: str,
        node: str,
        tenant: TenantDigest,
        incarnation: Incarnation,
        layout: RegionLayout,
        device_slots: bool = False,
    ) -> Region:
        """Make a region and become its owner.  No memory is behind the slots yet: see :meth:`back`.

        Args:
            device_slots: the slots are in a GPU's memory, and the file is full of holes; see
                :meth:`back_header`.

        Raises:
            ConfigError: ``directory`` cannot hold it.
        """
        base = Generation(1 + secrets.randbelow(GENERATION_BASE_MAX - GENERATION_WINDOW))
        header = RegionHeader(instance, node, tenant, incarnation, base, layout, device_slots)
        _require_room(directory, layout.slots_offset if device_slots else layout.region_bytes)
        path, descriptor = _create_locked(directory, f"{NAME_PREFIX}{_plain(instance)}-{_plain(node)}")
        try:
            os.ftruncate(descriptor, layout.region_bytes)
            _allocate(descriptor, 0, layout.slots_offset, directory)
            region = Region(path, descriptor, header, mmap.mmap(descriptor, layout.region_bytes))
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        region._backed_bytes = layout.slots_offset
        packed = header.pack()
        region.memory[: len(packed)] = packed
        region.words[BACKED_WORD] = layout.slots_offset
        region.words[STATE_WORD] = STATE_OPEN
        region._unlink = weakref.finalize(region, _unlink_in, os.getpid(), path)
        return region

    @staticmethod
    def attach(path: str | Path, tenant: TenantDigest, *, device_slots: bool = False) -> Region:
        """Map somebody's region.

        Args:
            device_slots: the caller knows how to reach slots in a GPU's memory, and expects them there.

        Raises:
            Unavailable: it is gone, or its owner is closing it.
            Corrupt: it is not a region, or damaged.
            Refused: it belongs to another user or another tenant, or its slots are elsewhere.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError as error:
            raise Refused(f"region {path} belongs to another user") from error
        except OSError as error:
            raise Unavailable(f"region {path} cannot be opened: {error.strerror}") from error
        except ValueError as error:  # a zero byte, from somebody who says what its path is
            raise Corrupt(f"{str(path)!r} is no path of a region: {error}") from error
        try:
            return _map_verified(path, descriptor, tenant, device_slots)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def open(self) -> bool:
        """Whether the owner still serves it, as far as memory tells."""
        return self.words[STATE_WORD] == STATE_OPEN

    @property
    def backed_bytes(self) -> int:
        """How much of it has memory behind it."""
        return self.words[BACKED_WORD]

    def back(self, slice_bytes: int) -> int:
        """Owner: put memory behind the next ``slice_bytes``; how far it reaches now.  Releases the GIL (about
        0.25 s a GiB).  Thread-safe.

        The caller passes the result to ``Owner.grow``, which tells everybody.

        Raises:
            ConfigError: the directory is full.
        """
        with self._backing:
            begin, end = self._backed_bytes, self.header.layout.slots_end
            size = min(slice_bytes, end - begin)
            if size > 0:
                _allocate(self._descriptor, begin, size, self.path.parent)
                self._backed_bytes = begin + size
            return self._backed_bytes

    def back_header(self, offset: int) -> bool:
        """Owner: put memory behind the header of the slot at ``offset``, where the payloads are elsewhere;
        False
        if the directory is full."""
        try:
            os.posix_fallocate(self._descriptor, offset, HEADER_BYTES)
        except OSError:
            return False
        return True

    def populate(self, begin: int, end: int) -> bool:
        """Client: enter ``[begin, end)`` into this process's page tables, so that first reads do not fault
        page by page.

        Releases the GIL.  False where the kernel cannot (before Linux 5.14).
        """
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping)) + begin
        advice = ctypes.c_int(_MADV_POPULATE_READ)
        return bool(_libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - begin), advice) == 0)

    def lock_hazards(self, first: int, count: int) -> bool:
        """Client: hold these hazard words until no process has this file description any more; False if
        somebody else does."""
        return try_lock(self._descriptor, *self._hazard_range(first, count))

    def hazards_locked(self, first: int, count: int) -> bool:
        """Owner: whether a client holds them."""
        return is_locked(self._descriptor, *self._hazard_range(first, count))

    def close(self) -> None:
        """Owner: tell clients, remove the file, give up the lock.  Idempotent.  Views made from it stay
        valid."""
        if self._close_file.alive and self._unlink is not None:
            self.words[STATE_WORD] = STATE_CLOSING
            self._unlink()
        self.atomics.close()
        self._close_file()

    def _hazard_range(self, first: int, count: int) -> tuple[int, int]:
        return self.header.layout.hazard_offset + first * WORD_BYTES, count * WORD_BYTES


def host_id() -> bytes:
    """Names this host and its shared memory: equal for two processes exactly if a path in ``/dev/shm`` means
    the same file to both (containers of one host may each have their own)."""
    there = os.stat(SHM_DIRECTORY)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{there.st_dev}/{there.st_ino}".encode()


def reclaim_stale(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove the regions whose owner is gone without having removed them (``kill -9``); their paths, sorted.

    Files of other users, and files that are no regions, are left alone.
    """
    return _stale(directory, remove=True)


def stale_regions(directory: Path = SHM_DIRECTORY) -> list[str]:
    """What :func:`reclaim_stale` would remove."""
    return _stale(directory, remove=False)


def _stale(directory: Path, *, remove: bool) -> list[str]:
    found = []
    for path in sorted(directory.glob(f"{NAME_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            if _flock(descriptor) and _is_region_file(descriptor):
                found.append(str(path))
                if remove:
                    path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return found


def _create_locked(directory: Path, stem: str) -> tuple[Path, int]:
    """A new file that is ours before anybody can think it stale.

    Between creating and locking it, a reclaimer may have locked and removed it: then a lock is refused, or is
    on a file without a name; take another name.
    """
    for _ in range(_CREATE_ATTEMPTS):
        path = directory / f"{stem}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        if _flock(descriptor) and os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)
        path.unlink(missing_ok=True)
    raise Unavailable(f"could not create a region in {directory}: something keeps removing it")


def _map_verified(path: Path, descriptor: int, tenant: TenantDigest, device_slots: bool) -> Region:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise Refused(f"region {path} is not a private file of this user")
    if status.st_size < REGION_HEADER_BYTES:
        raise Corrupt(f"region {path} is shorter than its header")
    header = RegionHeader.unpack(os.pread(descriptor, REGION_HEADER_BYTES, 0))
    if header.layout.region_bytes != status.st_size:
        raise Corrupt(
            f"region {path} is {status.st_size} bytes, its header says {header.layout.region_bytes}"
        )
    if header.tenant != tenant:
        raise Refused(f"region {path} belongs to another tenant")
    if header.device_slots != device_slots:
        where = (
            "a GPU's memory (add cuda to network.transports)" if header.device_slots else "the file itself"
        )
        raise Refused(f"the slots of region {path} are in {where}")
    try:
        mapping = mmap.mmap(descriptor, status.st_size)
    except OSError as error:
        raise Unavailable(f"region {path} cannot be mapped: {error.strerror}") from error
    region = Region(path, descriptor, header, mapping)
    if not region.open:
        region._close_file.detach()  # the caller closes it
        raise Unavailable(f"region {path} is being closed by its owner")
    return region


def _require_room(directory: Path, region_bytes: int) -> None:
    try:
        usage = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot hold shared memory: {error.strerror}") from error
    free_bytes = usage.f_bavail * usage.f_frsize
    if free_bytes < region_bytes:
        raise ConfigError(
            f"a region of {region_bytes} bytes is asked for but {directory} has {free_bytes} free; "
            f"{_advice(directory)}"
        )


def _allocate(descriptor: int, begin: int, size: int, directory: Path) -> None:
    try:
        os.posix_fallocate(descriptor, begin, size)
    except OSError as error:
        raise ConfigError(
            f"{directory} is full at {begin} bytes of the region ({error.strerror}); {_advice(directory)}"
        ) from error


def _advice(directory: Path) -> str:
    return f"lower cache.l2_size (a pool's) or cache.l3_size (a shard's), or enlarge {directory}"


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_region_file(descriptor: int) -> bool:
    """Ours, private; empty = its maker died before it wrote the header."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return False
    head = os.pread(descriptor, REGION_HEADER_BYTES, 0)
    if not any(head):
        return True
    try:
        RegionHeader.unpack(head)
    except Corrupt:
        return False
    return True


def _unlink_in(process: int, path: Path) -> None:
    if os.getpid() == process:  # a forked child's exit must not remove its parent's region
        path.unlink(missing_ok=True)


def _plain(name: str) -> str:
    return "".join(each if each.isalnum() else "_" for each in name)[:48]


_libc = ctypes.CDLL(None, use_errno=True)
