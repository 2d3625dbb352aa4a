"""The least of verbs: connected queue pairs of one process, to see whether the devices do what tests rely on.

Nothing here is for the transport's tests; they use the shipped transport.
"""

import ctypes
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

_ALL = (
    e.IBV_ACCESS_LOCAL_WRITE
    | e.IBV_ACCESS_REMOTE_READ
    | e.IBV_ACCESS_REMOTE_WRITE
    | e.IBV_ACCESS_REMOTE_ATOMIC
)


@dataclass(frozen=True, slots=True)
class Completion:
    status: int  # IBV_WC_*
    operation: int  # the number that `post` was given


class Side:
    """One end: a device, a queue pair, and `length` bytes of registered memory (zeroes)."""

    def __init__(self, device: str, length: int) -> None:
        self._context = Context(name=device)
        self._domain = PD(self._context)
        self._queue = CQ(self._context, 256)
        start = QPInitAttr(
            qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=QPCap(max_send_wr=64), sq_sig_all=0
        )
        self._pair = QP(self._domain, start)
        self._region = MR(self._domain, length, _ALL)
        self.memory: Any = (ctypes.c_char * length).from_address(self._region.buf)
        self.gid_index, self.gid = _ipv4_gid(self._context)

    @property
    def active_mtu(self) -> int:
        return int(self._context.query_port(1).active_mtu)

    def connect(self, other: "Side", *, timeout: int = 14, retries: int = 6) -> None:
        """Retries are at most 6: soft-RoCE takes 7 for "for ever"."""
        attributes = QPAttr(port_num=1)
        attributes.pkey_index = 0
        attributes.qp_access_flags = _ALL
        self._pair.to_init(attributes)
        route = GlobalRoute(dgid=GID(other.gid), sgid_index=self.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        attributes.path_mtu = min(self.active_mtu, other.active_mtu)
        attributes.dest_qp_num = other._pair.qp_num
        attributes.rq_psn = 7
        attributes.max_dest_rd_atomic = 16
        attributes.min_rnr_timer = 12
        self._pair.to_rtr(attributes)
        attributes.sq_psn = 7
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = timeout, retries, 6
        attributes.max_rd_atomic = 16
        self._pair.to_rts(attributes)

    def post_read(self, operation: int, source: "Side", offset: int, length: int) -> None:
        """Reads into the same place of this side's memory."""
        element = SGE(self._region.buf + offset, length, self._region.lkey)
        work = _request(operation, e.IBV_WR_RDMA_READ, element)
        work.set_wr_rdma(source._region.rkey, source._region.buf + offset)
        self._post(work)

    def post_fetch_add(self, operation: int, target: "Side", offset: int, amount: int) -> None:
        """The old value arrives at the same place of this side's memory."""
        element = SGE(self._region.buf + offset, 8, self._region.lkey)
        work = _request(operation, e.IBV_WR_ATOMIC_FETCH_AND_ADD, element)
        work.set_wr_atomic(target._region.rkey, target._region.buf + offset, amount, 0)
        self._post(work)

    def _post(self, work: Any) -> None:
        try:
            self._pair.post_send(work)
        finally:
            work.close()  # else pyverbs leaks its list of elements

    def completions(self, count: int, within_s: float) -> list[Completion]:
        found: list[Completion] = []
        deadline = time.monotonic() + within_s
        while len(found) < count:
            _, some = self._queue.poll(count - len(found))
            found += [Completion(work.status, work.wr_id) for work in some]
            assert time.monotonic() < deadline, f"{len(found)} of {count} operations completed in time"
        return found

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()  # and all that was made from it


def _request(operation: int, opcode: int, element: Any) -> Any:
    return SendWR(wr_id=operation, opcode=opcode, num_sge=1, sg=[element], send_flags=e.IBV_SEND_SIGNALED)


def _ipv4_gid(context: Any) -> tuple[int, str]:
    for index in range(16):
        gid = str(context.query_gid(1, index))
        if gid.replace(":", "").startswith("0" * 20 + "ffff"):
            return index, gid
    raise RuntimeError("the device has no GID of an IPv4 address")
