"""``Device``: one opened RDMA device with a usable port and GID, and why the others are none.

The port's GID decides which network the packets take, so it is chosen with care: on RoCE the IPv4-mapped one
of RoCE v2 (routable, and what everybody else on the network uses), then a global IPv6 one, then a link-local
one; RoCE v1 never, since it ends at the first router.  On InfiniBand it is GID 0, and the path is by LID.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcomm.errors import KVCommError, Refused, Unavailable
from l2_rdma.transports.verbs.binding import Binding, explain

READS_MAX = 16
"""READs and atomics that a queue pair has under way on the wire at once; more wait in the device."""
_GID_TABLE_MAX = 1024
_NO_DEVICE = (
    "this host has no RDMA device (if /sys/class/infiniband has one, its driver for libibverbs is missing: "
    "ibverbs-providers)"
)


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    address: str
    """As IPv6, all eight groups."""
    kind: str
    """``RoCE v2``, ``RoCE v1`` or ``IB``."""

    @property
    def rank(self) -> int:
        """The lower the better; 9 = not usable."""
        address = ipaddress.IPv6Address(self.address)
        if self.kind == "RoCE v1" or int(address) == 0:
            return 9
        if address.ipv4_mapped is not None:
            return 0
        return 2 if address.is_link_local else 1


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What there is to say about one device, for the operator."""

    device: str
    refused: str = ""
    """Why it cannot be used; empty = it can."""
    port: int = 0
    state: str = ""
    link_layer: str = ""
    gid: str = ""
    gid_index: int = 0
    gid_kind: str = ""
    mtu_bytes: int = 0
    """Of a packet's payload: the port's active MTU."""
    max_reads: int = 0
    """READs and atomics that it has under way at once for one connection."""
    atomics: str = ""
    """``none``, ``hca`` (atomic among the users of this device) or ``global`` (and with the CPU)."""
    on_demand: bool = False
    """Whether registered memory may be paged in when it is first used (ODP), for all that we do."""
    message_bytes_max: int = 0
    firmware: str = ""


@dataclass(slots=True)
class Device:
    """An opened device.  Close what was made of it first, then it."""

    binding: Binding
    context: Any
    report: DeviceReport
    lid: int
    _closed: bool = field(default=False, repr=False)

    @property
    def infiniband(self) -> bool:
        return self.report.link_layer == "InfiniBand"

    def close(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self.context.close()


def survey(binding: Binding) -> list[DeviceReport]:
    """What each device of this host is good for.

    Raises:
        Unavailable: there is no RDMA here at all.
    """
    reports = []
    for name in device_names(binding):
        try:
            device = _open(binding, name)
        except KVCommError as error:
            reports.append(_refusal(error, name))
        else:
            reports.append(device.report)
            device.close()
    return reports


def open_device(binding: Binding, name: str = "") -> Device:
    """Open the device ``name``, or the first one that can be used.

    Raises:
        Unavailable: there is none; the message says why not, device by device.
    """
    names = device_names(binding)
    if name and name not in names:
        there = ", ".join(names) or "none"
        raise Unavailable(f"there is no RDMA device {name!r} (network.rdma_device); there are: {there}")
    reasons = []
    for each in [name] if name else names:
        try:
            return _open(binding, each)
        except KVCommError as error:
            reasons.append(f"{each}: {error.message}")
    raise Unavailable("; ".join(reasons) or _NO_DEVICE)


def device_names(binding: Binding) -> list[str]:
    """Raises ``Unavailable`` if the kernel has no RDMA at all."""
    try:
        return [_text(each.name) for each in binding.get_device_list()]
    except binding.Error as error:
        raise Unavailable(
            f"no RDMA on this host ({explain(error)}): load its driver, and see that /dev/infiniband exists"
        ) from error


@contextmanager
def no_device_error(binding: Binding, doing: str) -> Iterator[None]:
    """What pyverbs raises inside becomes ``Unavailable``."""
    try:
        yield
    except binding.Error as error:
        advice = ""
        if getattr(error, "error_code", None) == 12:  # ENOMEM
            advice = "; raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity)"
        raise Unavailable(f"{doing}: {explain(error)}{advice}") from error


def _open(binding: Binding, name: str) -> Device:
    try:
        context = binding.Context(name=name)
    except binding.Error as error:
        raise Unavailable(
            f"cannot be opened ({explain(error)}): see the rights of /dev/infiniband"
        ) from error
    try:
        with no_device_error(binding, "cannot be asked what it can do"):
            return _examined(binding, name, context)
    except BaseException:
        context.close()
        raise


def _examined(binding: Binding, name: str, context: Any) -> Device:
    """With its first active port; raises ``Unavailable`` with a report in ``detail`` if it has none."""
    constants = binding.constants
    able = context.query_device()
    states = []
    for port in range(1, able.phys_port_cnt + 1):
        attributes = context.query_port(port)
        if attributes.state != constants.IBV_PORT_ACTIVE:
            states.append(f"port {port} is not active: cable, or ip link set ... up")
            continue
        infiniband = attributes.link_layer != constants.IBV_LINK_LAYER_ETHERNET
        gid = _choose_gid(_gids(binding, context, port), infiniband)
        if gid is None:
            states.append(f"port {port} has no RoCE v2 GID: give its network interface an IP address")
            continue
        report = DeviceReport(
            device=name,
            port=port,
            state="active",
            link_layer="InfiniBand" if infiniband else "Ethernet",
            gid=gid.address,
            gid_index=gid.index,
            gid_kind=gid.kind,
            mtu_bytes=128 << attributes.active_mtu,
            max_reads=min(READS_MAX, able.max_qp_rd_atom, able.max_qp_init_rd_atom),
            atomics={constants.IBV_ATOMIC_NONE: "none", constants.IBV_ATOMIC_HCA: "hca"}.get(
                able.atomic_caps, "global"
            ),
            on_demand=_on_demand(binding, context),
            message_bytes_max=attributes.max_msg_sz,
            firmware=_text(able.fw_version),
        )
        if report.max_reads < 1:
            raise Refused("it has no one-sided reads")
        return Device(binding, context, report, attributes.lid)
    raise Unavailable("; ".join(states) or "it has no port")


def _gids(binding: Binding, context: Any, port: int) -> list[Gid]:
    constants = binding.constants
    kinds = {constants.IBV_GID_TYPE_ROCE_V1: "RoCE v1", constants.IBV_GID_TYPE_ROCE_V2: "RoCE v2"}
    entries = context.query_gid_table(_GID_TABLE_MAX)
    return [
        Gid(each.gid_index, str(context.query_gid(port, each.gid_index)), kinds.get(each.gid_type, "IB"))
        for each in entries
        if each.port_num == port
    ]


def _choose_gid(gids: list[Gid], infiniband: bool) -> Gid | None:
    if infiniband:
        return next((gid for gid in gids if gid.index == 0), None)
    usable = [gid for gid in gids if gid.rank < 9]
    return min(usable, key=lambda gid: (gid.rank, gid.index), default=None)


def _on_demand(binding: Binding, context: Any) -> bool:
    constants = binding.constants
    wanted = (
        constants.IBV_ODP_SUPPORT_READ | constants.IBV_ODP_SUPPORT_WRITE | constants.IBV_ODP_SUPPORT_ATOMIC
    )
    try:
        able = context.query_device_ex().odp_caps
    except binding.Error:
        return False  # a kernel that does not know the question
    return bool(able.general_caps & constants.IBV_ODP_SUPPORT) and able.rc_odp_caps & wanted == wanted


def _refusal(error: KVCommError, name: str) -> DeviceReport:
    return DeviceReport(device=name, refused=error.message)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else os.fsdecode(str(name))


class OfParent(Protocol):
    """What holds objects of a device."""

    def abandon(self) -> None:
        """In a forked child: call nothing of the device any more."""
        ...


def in_child(holder: OfParent) -> None:
    """See to it that a forked child leaves ``holder`` 's device alone.

    A child shares the parent's descriptor of the device: what it closed, by hand or when its objects die,
    would be closed in the parent.  So they live for ever there.
    """
    _holders.add(holder)


def _abandon_all() -> None:
    for holder in list(_holders):
        holder.abandon()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(holder))


_holders: weakref.WeakSet[OfParent] = weakref.WeakSet()
os.register_at_fork(after_in_child=_abandon_all)
