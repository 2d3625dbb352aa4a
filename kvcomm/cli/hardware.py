"""``hardware_findings``: what the kernel tells of RDMA devices and GPUs, and what to do where they will not
do.

Everything is read from ``/sys``, ``/proc`` and ``/dev``: no driver's library is loaded, so nothing here can
crash.  Silence means that there is no such hardware.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcomm.cli.finding import Finding
from kvcomm.cli.sizes import size_text

_CAP_IPC_LOCK = 14
_GIDS_SHOWN = 4
_ROCE_MTU_BYTES = 4200
"""What a network interface must carry for RoCE's largest path MTU, 4096, and its headers."""
_ZERO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_KERNEL_WITH_DMA_BUF = (5, 12)
_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")


@dataclass(frozen=True, slots=True)
class Host:
    """Where the kernel's files are.

    Args:
        memlock_bytes: how much this process may lock; ``None`` = without limit.
        kernel: its release, as ``uname -r`` prints it.
    """

    root: Path
    memlock_bytes: int | None
    kernel: str

    @staticmethod
    def here() -> Host:
        import platform
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return Host(Path("/"), None if soft == resource.RLIM_INFINITY else soft, platform.release())

    def text(self, path: Path | str) -> str:
        """A file's content; empty where it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: Path | str) -> list[str]:
        """A directory's entries, sorted; none where there is no such directory."""
        try:
            return sorted(each.name for each in (self.root / path).iterdir())
        except OSError:
            return []


def hardware_findings(host: Host, pool_bytes: int) -> Iterator[Finding]:
    """
    Args:
        pool_bytes: memory that a pool registers (``cache.l2_size``).
    """
    devices = host.names("sys/class/infiniband")
    for device in devices:
        yield from _rdma_device(host, device)
    if devices:
        yield from _rdma_rights(host, pool_bytes)
    gpus = _gpus(host)
    yield from (gpu.finding() for gpu in gpus)
    if devices and gpus:
        yield _gpu_direct(host)
        yield from (_nearest(host, gpu, devices) for gpu in gpus)


def gpu_direct(host: Host) -> tuple[bool, str]:
    """Whether RDMA could reach GPU memory here as far as the kernel's side goes, and how or why not."""
    if not _gpus(host):
        return False, "no GPU here"
    finding = _gpu_direct(host)
    return finding.verdict == "ok", finding.text


def _rdma_device(host: Host, device: str) -> Iterator[Finding]:
    base = Path("sys/class/infiniband") / device
    firmware = host.text(base / "fw_ver")
    driver = _driver(host, base)
    for port in host.names(base / "ports"):
        at = base / "ports" / port
        state = host.text(at / "state").partition(":")[2].strip() or "unknown"
        link = host.text(at / "link_layer")
        text = ", ".join(
            filter(None, (state, link, host.text(at / "rate"), driver, firmware and f"fw {firmware}"))
        )
        subject = f"rdma {device}/{port}"
        if state != "ACTIVE":
            yield Finding(subject, "note", f"{text}; not usable: check the cable and 'ip link set ... up'")
            continue
        gids = _gids(host, at)
        if link == "Ethernet" and not any("v2" in kind for _, _, kind, _ in gids):
            yield Finding(
                subject,
                "note",
                f"{text}; no RoCE v2 GID: give its network interface an IP address (verbs refuses it else)",
            )
            continue
        shown = "; ".join(
            f"GID {index} {gid} ({kind}, {net})" for index, gid, kind, net in gids[:_GIDS_SHOWN]
        )
        yield Finding(subject, "ok", f"{text}; {shown}" if shown else text)
        yield from _mtu(host, subject, gids)


def _driver(host: Host, base: Path) -> str:
    """The kernel module behind a device and its version."""
    if interface := host.text(base / "parent"):
        return f"software (soft-RoCE) on {interface}"
    try:
        name = (host.root / base / "device" / "driver").resolve(strict=True).name
    except OSError:
        return ""
    return f"{name} {host.text(f'sys/module/{name}/version')}".strip()


def _gids(host: Host, port: Path) -> list[tuple[int, str, str, str]]:
    """(index, GID, type, network interface) of those that are set."""
    found = []
    for name in sorted(host.names(port / "gids"), key=int):
        gid = host.text(port / "gids" / name)
        if gid and gid != _ZERO_GID:
            kind = host.text(port / "gid_attrs" / "types" / name)
            found.append(
                (
                    int(name),
                    _short(gid),
                    kind or "?",
                    host.text(port / "gid_attrs" / "ndevs" / name) or "?",
                )
            )
    return found


def _short(gid: str) -> str:
    """As people write it; RoCE v2 carries IPv4 addresses too."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return gid
    return f"::ffff:{address.ipv4_mapped}" if address.ipv4_mapped else str(address)


def _mtu(host: Host, subject: str, gids: list[tuple[int, str, str, str]]) -> Iterator[Finding]:
    for net in dict.fromkeys(net for _, _, kind, net in gids if "RoCE" in kind):
        mtu = host.text(f"sys/class/net/{net}/mtu")
        if mtu.isdecimal() and int(mtu) < _ROCE_MTU_BYTES:
            yield Finding(
                subject,
                "note",
                f"{net} has MTU {mtu}, so RDMA packets are small: 'ip link set {net} mtu 9000' on both hosts "
                f"and the switch ({_ROCE_MTU_BYTES} suffices for path MTU 4096)",
            )


def _rdma_rights(host: Host, pool_bytes: int) -> Iterator[Finding]:
    directory = Path("dev/infiniband")
    names = [name for name in host.names(directory) if name.startswith("uverbs")]
    closed = [name for name in names if not os.access(host.root / directory / name, os.R_OK | os.W_OK)]
    if not names:
        yield Finding(
            "rdma access",
            "note",
            "no /dev/infiniband/uverbs*: load the module (modprobe ib_uverbs); in a container pass the "
            "devices (--device=/dev/infiniband)",
        )
    elif closed:
        names_text = ", ".join(f"/dev/infiniband/{name}" for name in closed)
        yield Finding(
            "rdma access", "note", f"no right to read and write {names_text}: join its group (often 'rdma')"
        )
    else:
        yield Finding("rdma access", "ok", f"{len(names)} devices in /dev/infiniband can be opened")
    yield _memlock(host, pool_bytes)


def _memlock(host: Host, pool_bytes: int) -> Finding:
    if host.memlock_bytes is None or _may_lock_all(host):
        return Finding("locked memory", "ok", "without limit")
    allowed, wanted = size_text(host.memlock_bytes), size_text(pool_bytes)
    if host.memlock_bytes >= pool_bytes:
        return Finding("locked memory", "ok", f"{allowed} allowed, {wanted} wanted by cache.l2_size")
    return Finding(
        "locked memory",
        "note",
        f"{allowed} allowed, but a pool that offers verbs locks {wanted} (cache.l2_size): 'ulimit -l "
        "unlimited', LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container",
    )


def _may_lock_all(host: Host) -> bool:
    """The limit is nothing to a process with CAP_IPC_LOCK."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", host.text("proc/self/status"), re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


@dataclass(frozen=True, slots=True)
class _Gpu:
    address: str
    """On the PCI bus."""
    model: str
    driver: str

    def finding(self) -> Finding:
        return Finding(f"gpu {self.address}", "ok", ", ".join(filter(None, (self.model, self.driver))))


def _gpus(host: Host) -> list[_Gpu]:
    version = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", host.text("proc/driver/nvidia/version"))
    driver = f"driver {version[1]}" if version else ""
    found = []
    for address in host.names("proc/driver/nvidia/gpus"):
        said = host.text(f"proc/driver/nvidia/gpus/{address}/information")
        model = re.search(r"^Model:\s*(.+)$", said, re.MULTILINE)
        found.append(_Gpu(address.lower(), model[1].strip() if model else "NVIDIA GPU", driver))
    return found


def _gpu_direct(host: Host) -> Finding:
    """Whether a NIC could be let at a GPU's memory, as far as the kernel's side goes."""
    modules = set(host.names("sys/module"))
    peer = next((name for name in _PEER_MODULES if name in modules), None)
    if peer:
        return Finding("gpudirect", "ok", f"module {peer} {host.text(f'sys/module/{peer}/version')}".strip())
    if _kernel(host.kernel) >= _KERNEL_WITH_DMA_BUF and "Open Kernel" in host.text(
        "proc/driver/nvidia/version"
    ):
        return Finding("gpudirect", "ok", f"dma-buf (Linux {host.kernel}, open NVIDIA kernel modules)")
    return Finding(
        "gpudirect",
        "note",
        "neither the module nvidia-peermem (modprobe nvidia-peermem) nor dma-buf (Linux 5.12 "
        "and NVIDIA's open kernel modules); a GPU's blocks travel through host memory",
    )


def _kernel(release: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _nearest(host: Host, gpu: _Gpu, devices: list[str]) -> Finding:
    """The NICs by their way to the GPU over PCI Express: bytes that cross sockets are slow."""
    ways = sorted((*_way(host, gpu.address, device), device) for device in devices)
    nearest = [device for rank, _, device in ways if rank == ways[0][0]]
    others = [f"{device} {name}" for rank, name, device in ways if rank != ways[0][0]]
    text = f"nearest RDMA device: {', '.join(nearest)} ({ways[0][1]})"
    return Finding(f"gpu {gpu.address}", "ok", text + (f"; others: {', '.join(others)}" if others else ""))


def _way(host: Host, gpu: str, device: str) -> tuple[int, str]:
    """How far apart they are: rank (0 = next to each other) and its name."""
    one = _bus(host, f"sys/bus/pci/devices/{gpu}")
    other = _bus(host, f"sys/class/infiniband/{device}/device")
    if not one or not other:
        return 4, "unknown: not on the PCI bus"
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    if shared > 1:  # below the same root port, that is, of one switch
        return 0, "same PCIe switch"
    if shared == 1:
        return 1, "same PCIe root complex"
    numa = [host.text(at) for at in (f"sys/bus/pci/devices/{gpu}/numa_node",
                                     f"sys/class/infiniband/{device}/device/numa_node")]  # fmt: skip
    if numa[0] == numa[1] and numa[0] not in ("", "-1"):
        return 2, "same NUMA node"
    return 3, "another NUMA node"


def _bus(host: Host, path: str) -> list[str]:
    """The bridges above a PCI device, from the root complex down."""
    try:
        parts = (host.root / path).resolve(strict=True).parts
    except OSError:
        return []
    begin = next(
        (number for number, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4}:[0-9a-f]{2}", part)),
        None,
    )
    return [] if begin is None else list(parts[begin:-1])
