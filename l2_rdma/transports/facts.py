"""``facts_of``: what a transport's driver tells of this host, in a few words for the operator.

``device``, ``mtu`` and ``gid`` (its index and type) are what would be used; every other key is something to
know beside it.
"""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Callable
from typing import Any

from l2_rdma.transports.port import WireOptions

Facts = dict[str, str]


def facts_of(transport: str, options: WireOptions) -> Facts:
    """Nothing for transports without a device.

    Raises:
        Unavailable: there is no driver, or nothing that it drives.
        ImportError: the transport is none.
    """
    tell = _TELLERS.get(transport)
    return tell(importlib.import_module(f"l2_rdma.transports.{transport}"), options) if tell else {}


def _verbs(module: Any, options: WireOptions) -> Facts:
    reports = module.device_reports()
    named = options.rdma_device
    used = next((each for each in reports if not each.refused and named in ("", each.device)), None)
    facts: Facts = {}
    if used is not None:
        facts |= {
            "device": f"{used.device}/{used.port}",
            "mtu": str(used.mtu_bytes),
            "gid": f"{used.gid_index} {used.gid_kind}",
            "GID": _gid(used.gid),
            "atomics": used.atomics,
            "on-demand paging": "yes" if used.on_demand else "no: a pool's memory is locked whole",
        }
        if used.firmware:
            facts["firmware"] = used.firmware
    for each in reports:
        if each is not used:
            why = each.refused or "not the one that is used (network.rdma_device)"
            facts[f"other device {each.device}"] = why
    return facts


def _cuda(module: Any, options: WireOptions) -> Facts:
    from l2_rdma.transports.cuda.runtime import ALLOCATION_UNIT_BYTES, dma_buf_support, open_gpu

    gpu = open_gpu(options.cuda_device)
    pointer = gpu.allocate(ALLOCATION_UNIT_BYTES)
    try:
        exported = dma_buf_support(gpu, pointer, ALLOCATION_UNIT_BYTES)
    finally:
        gpu.free(pointer)
    major, minor = gpu.capability
    return {
        "device": f"{options.cuda_device}: {gpu.name}",
        "compute capability": f"{major}.{minor}",
        "dma-buf export (for GPUDirect RDMA)": exported,
    }


def _gid(address: str) -> str:
    """The form that people know: RoCE v2 carries IPv4 addresses."""
    parsed = ipaddress.IPv6Address(address)
    return f"::ffff:{parsed.ipv4_mapped}" if parsed.ipv4_mapped else str(parsed)


_TELLERS: dict[str, Callable[[Any, WireOptions], Facts]] = {"verbs": _verbs, "cuda": _cuda}
