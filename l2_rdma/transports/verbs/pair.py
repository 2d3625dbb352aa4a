"""``Pair``: one end of a reliable connection (an RC queue pair), and what its peer must know of it.

The two ends tell each other their :class:`Endpoint` over the data wire and connect by themselves; no
connection manager is asked.  (rdma_cm's calls block with the interpreter's lock held, and addresses and keys
need a message anyway.)
"""

from __future__ import annotations

import ipaddress
import secrets
from typing import Any

import msgspec

from kvcomm.errors import Corrupt
from l2_rdma.transports.verbs.device import Device

TIMEOUT_EXPONENT = 14
"""An unanswered packet is sent again after 4.096 us * 2**14 = 67 ms ..."""
RETRY_COUNT = 6
"""... so often; a dead peer is known after half a second.  7 would mean for ever on soft-RoCE."""
_RNR_RETRY_COUNT = 6
_RNR_TIMER = 12  # 0.64 ms; one-sided work meets no missing receive, but the field wants a value
_HOP_LIMIT = 64
_PSN_BITS = 24
MTUS = (256, 512, 1024, 2048, 4096)


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """Where a queue pair can be reached.  Fields are only ever appended."""

    queue_pair: int
    packet_number: int
    """The first that this end sends."""
    gid: str
    lid: int
    mtu_bytes: int
    reads: int
    """READs and atomics of the peer that this end answers at once."""
    message_bytes_max: int


def check(endpoint: Endpoint, node: str) -> Endpoint:
    """Raises ``Corrupt`` unless it can be connected to."""
    numbers = max(endpoint.queue_pair, endpoint.packet_number) < 1 << _PSN_BITS and (
        min(endpoint.queue_pair, endpoint.packet_number) >= 0 and 0 <= endpoint.lid < 1 << 16
    )
    amounts = endpoint.mtu_bytes in MTUS and endpoint.reads > 0 and endpoint.message_bytes_max > 0
    try:
        ipaddress.IPv6Address(endpoint.gid)
    except ValueError:
        numbers = False
    if not (numbers and amounts):
        raise Corrupt(f"{node} describes its end of an RDMA connection wrongly: {endpoint}")
    return endpoint


class Pair:
    """A queue pair.

    Args:
        domain: the ``PD``.
        queue: the ``CQ`` of its completions.
        depth: work requests that may be under way.
        rights: what the peer may do to memory that is registered with ``domain``.

    Raises the binding's ``Error``.
    """

    def __init__(self, device: Device, domain: Any, queue: Any, *, depth: int, rights: int) -> None:
        binding, constants = device.binding, device.binding.constants
        self._device = device
        self._rights = rights
        self._packet_number = secrets.randbits(_PSN_BITS)
        self._closed = False
        capacity = binding.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        attributes = binding.QPInitAttr(
            qp_type=constants.IBV_QPT_RC, scq=queue, rcq=queue, cap=capacity, sq_sig_all=0
        )
        self._queue_pair = binding.QP(domain, attributes)
        self.post = self._queue_pair.post_send
        """Takes a chain of ``SendWR``."""

    def endpoint(self) -> Endpoint:
        report = self._device.report
        return Endpoint(
            self._queue_pair.qp_num,
            self._packet_number,
            report.gid,
            self._device.lid,
            report.mtu_bytes,
            report.max_reads,
            report.message_bytes_max,
        )

    def connect(self, peer: Endpoint) -> None:
        """Ready to send and to answer."""
        binding, report = self._device.binding, self._device.report
        attributes = binding.QPAttr(port_num=report.port)
        attributes.qp_access_flags = self._rights
        attributes.pkey_index = 0
        self._queue_pair.to_init(attributes)
        attributes.ah_attr = self._path(peer)
        attributes.path_mtu = MTUS.index(min(peer.mtu_bytes, report.mtu_bytes)) + 1
        attributes.dest_qp_num = peer.queue_pair
        attributes.rq_psn = peer.packet_number
        attributes.max_dest_rd_atomic = report.max_reads
        attributes.min_rnr_timer = _RNR_TIMER
        self._queue_pair.to_rtr(attributes)
        attributes.timeout = TIMEOUT_EXPONENT
        attributes.retry_cnt = RETRY_COUNT
        attributes.rnr_retry = _RNR_RETRY_COUNT
        attributes.sq_psn = self._packet_number
        # Left at 0, a READ would never complete, without an error; more than the peer answers breaks it.
        attributes.max_rd_atomic = min(report.max_reads, peer.reads)
        self._queue_pair.to_rts(attributes)

    def stop(self) -> None:
        """Nothing more is sent; what is under way completes with an error soon."""
        binding = self._device.binding
        attributes = binding.QPAttr(qp_state=binding.constants.IBV_QPS_ERR)
        self._queue_pair.modify(attributes, binding.constants.IBV_QP_STATE)

    def close(self) -> None:
        """When this returns the device does nothing more for it, on either side.  Idempotent."""
        if not self._closed:
            self._queue_pair.close()
            self._closed = True

    def _path(self, peer: Endpoint) -> Any:
        binding, report = self._device.binding, self._device.report
        if self._device.infiniband:
            return binding.AHAttr(port_num=report.port, is_global=0, dlid=peer.lid)
        route = binding.GlobalRoute(
            dgid=binding.GID(peer.gid), sgid_index=report.gid_index, hop_limit=_HOP_LIMIT
        )
        return binding.AHAttr(port_num=report.port, is_global=1, gr=route)
