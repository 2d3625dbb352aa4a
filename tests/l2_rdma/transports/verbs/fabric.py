"""A network of RDMA devices in this process, behind the part of pyverbs that we use.

Addresses are real: a READ copies memory, so what arrives too late shows.  The wire can be held
(``Fabric.held``): then requests stay where they are posted until ``release``.  Whatever a real device would
answer with undefined behaviour (closing in the wrong order, a full completion queue, a request that is posted
after it was freed) is an assertion here.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from l2_rdma.transports.verbs.binding import Binding

IPV4 = "0000:0000:0000:0000:0000:ffff:c633:6401"
LINK_LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
SITE = "fe80:0000:0000:0000:0002:c903:0000:1491"

CONSTANTS = SimpleNamespace(
    IBV_PORT_DOWN=1, IBV_PORT_ACTIVE=4, IBV_LINK_LAYER_INFINIBAND=1, IBV_LINK_LAYER_ETHERNET=2,
    IBV_GID_TYPE_IB=0, IBV_GID_TYPE_ROCE_V1=1, IBV_GID_TYPE_ROCE_V2=2,
    IBV_ATOMIC_NONE=0, IBV_ATOMIC_HCA=1, IBV_ATOMIC_GLOB=2,
    IBV_ODP_SUPPORT=1, IBV_ODP_SUPPORT_WRITE=4, IBV_ODP_SUPPORT_READ=8, IBV_ODP_SUPPORT_ATOMIC=16,
    IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_WRITE=2, IBV_ACCESS_REMOTE_READ=4, IBV_ACCESS_REMOTE_ATOMIC=8,
    IBV_ACCESS_ON_DEMAND=64,
    IBV_QPT_RC=2, IBV_QPS_ERR=6, IBV_QP_STATE=1, IBV_SEND_SIGNALED=2,
    IBV_WR_RDMA_WRITE=0, IBV_WR_RDMA_READ=4, IBV_WR_ATOMIC_CMP_AND_SWP=5, IBV_WR_ATOMIC_FETCH_AND_ADD=6,
    IBV_WC_SUCCESS=0, IBV_WC_LOC_PROT_ERR=4, IBV_WC_WR_FLUSH_ERR=5, IBV_WC_REM_INV_REQ_ERR=9,
    IBV_WC_REM_ACCESS_ERR=10, IBV_WC_REM_OP_ERR=11, IBV_WC_RETRY_EXC_ERR=12, IBV_WC_RNR_RETRY_EXC_ERR=13,
)  # fmt: skip
_C = CONSTANTS
_WORD = 1 << 64


class FabricError(Exception):
    """``PyverbsError``."""


class FabricRDMAError(FabricError):
    """``PyverbsRDMAError``: with the kernel's answer."""

    def __init__(self, message: str, error_code: int = -1) -> None:
        super().__init__(message)
        self.error_code = error_code


@dataclass
class Card:
    """A device as it is built in; change it before it is opened."""

    name: str = "mlx_0"
    gids: list[tuple[str, int]] = field(default_factory=lambda: [(LINK_LOCAL, 2), (IPV4, 2)])
    """With their kind."""
    port_states: tuple[int, ...] = (_C.IBV_PORT_ACTIVE,)
    link_layer: int = _C.IBV_LINK_LAYER_ETHERNET
    lid: int = 0
    active_mtu: int = 5
    atomics: int = _C.IBV_ATOMIC_HCA
    max_reads: int = 16
    max_requests: int = 256
    max_completions: int = 4096
    message_bytes_max: int = 1 << 20
    on_demand: bool = False
    dmabuf: bool = False
    locked_bytes_max: int = 1 << 40
    refuses: str = ""
    """Opening it fails with this."""
    gone: bool = False
    """Polling fails: it was unplugged."""


class Fabric:
    """All devices, queue pairs and registered memory."""

    def __init__(self, *cards: Card) -> None:
        self.cards = {card.name: card for card in cards or (Card(),)}
        self.held = False
        self.rdma = True
        self.gpu = (ctypes.c_char * (64 << 10))()
        self.pairs: dict[int, QP] = {}
        self.regions: dict[int, MR] = {}
        self.work_requests = 0
        """Made and not freed."""
        self.posted_chains: list[list[int]] = []
        """The flags of each chain's requests."""
        self.failing_posts = 0
        self.contexts: list[Context] = []
        self._numbers = itertools.count(17)

    def number(self) -> int:
        return next(self._numbers)

    @property
    def objects(self) -> list[str]:
        """What is open."""
        return [name for context in self.contexts if not context.closed for name in context.kinds()]

    def release(self, count: int | None = None) -> None:
        """Let requests that are held go on, of every queue pair; then hold no more, unless a count is
        given."""
        if count is None:
            self.held = False
        for pair in list(self.pairs.values()):
            pair.work(count)

    def break_pair(self, number: int) -> None:
        """As if its process had died."""
        self.pairs.pop(number)

    @property
    def binding(self) -> Binding:
        def within(kind: Any) -> Any:
            return lambda *args, **options: kind(self, *args, **options)

        return Binding(
            get_device_list=self._list,
            Context=within(Context),
            PD=PD,
            MR=MR,
            DmaBufMR=dmabuf_region,
            CQ=CQ,
            CompChannel=CompChannel,
            QP=QP,
            QPCap=within(_Record),
            QPInitAttr=within(_Record),
            QPAttr=within(_Record),
            AHAttr=within(_Record),
            GlobalRoute=within(_Record),
            GID=str,
            SGE=SGE,
            SendWR=within(SendWR),
            Error=FabricError,
            constants=CONSTANTS,
        )

    def _list(self) -> list[Any]:
        if not self.rdma:
            raise FabricRDMAError("Failed to get devices list")
        return [SimpleNamespace(name=name.encode()) for name in self.cards]


class _Record:
    """Attributes."""

    def __init__(self, _fabric: Fabric, **values: Any) -> None:
        self.__dict__.update(values)


class _Part:
    """What is closed before what it is made of."""

    def __init__(self, *owners: Any) -> None:
        self.children: set[_Part] = set()
        self.closed = False
        self._owners = owners
        for owner in owners:
            assert not owner.closed, f"a {type(self).__name__} of a closed {type(owner).__name__}"
            owner.children.add(self)

    def close(self) -> None:
        if self.closed:
            return
        assert not self.children, f"{type(self).__name__} is closed before {self.children}"
        self.closed = True
        for owner in self._owners:
            owner.children.discard(self)

    def kinds(self) -> list[str]:
        return [type(self).__name__] + [name for child in self.children for name in child.kinds()]


class Context(_Part):
    def __init__(self, fabric: Fabric, name: str) -> None:
        super().__init__()
        self.fabric = fabric
        self.card = fabric.cards[name]
        if self.card.refuses:
            raise FabricRDMAError(self.card.refuses, 13)
        fabric.contexts.append(self)

    def query_device(self) -> Any:
        card = self.card
        return SimpleNamespace(
            phys_port_cnt=len(card.port_states), max_qp_rd_atom=card.max_reads,
            max_qp_init_rd_atom=card.max_reads, atomic_caps=card.atomics, fw_version="1.2.3",
            max_cqe=card.max_completions, max_qp_wr=card.max_requests,
        )  # fmt: skip

    def query_device_ex(self) -> Any:
        able = 0x1D if self.card.on_demand else 0
        return SimpleNamespace(odp_caps=SimpleNamespace(general_caps=able & 1, rc_odp_caps=able & ~1))

    def query_port(self, port: int) -> Any:
        card = self.card
        return SimpleNamespace(
            state=card.port_states[port - 1], link_layer=card.link_layer, active_mtu=card.active_mtu,
            max_msg_sz=card.message_bytes_max, lid=card.lid,
        )  # fmt: skip

    def query_gid_table(self, _count_max: int) -> list[Any]:
        return [
            SimpleNamespace(gid_index=index, gid_type=kind, port_num=port)
            for port in range(1, len(self.card.port_states) + 1)
            for index, (_, kind) in enumerate(self.card.gids)
        ]

    def query_gid(self, _port: int, index: int) -> str:
        return self.card.gids[index][0]


class PD(_Part):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.context = context
        self.fabric = context.fabric


class MR(_Part):
    def __init__(self, domain: PD, length: int, access: int, address: int) -> None:
        if length > domain.context.card.locked_bytes_max:
            raise FabricRDMAError("Failed to register a MR", 12)
        super().__init__(domain)
        self.domain, self.length, self.access, self.address = domain, length, access, address
        self.base = 0
        self.lkey = self.rkey = domain.fabric.number()
        domain.fabric.regions[self.rkey] = self

    def close(self) -> None:
        super().close()
        self.domain.fabric.regions.pop(self.rkey, None)


def dmabuf_region(domain: PD, length: int, access: int, *, dmabuf: int, offset: int) -> MR:
    """Its addresses are offsets; the bytes are those of ``fabric.gpu``."""
    if not domain.context.card.dmabuf:
        raise FabricRDMAError("Failed to register a dma-buf MR", 95)
    assert dmabuf >= 0
    region = MR(domain, length, access, offset)
    region.base = ctypes.addressof(domain.fabric.gpu)
    return region


class CompChannel(_Part):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self.event_count = 0
        """That wait to be taken."""
        self.armed = False

    def get_cq_event(self, _queue: CQ) -> None:
        self.event_count -= 1
        os.eventfd_read(self.fd)  # would block for ever: BlockingIOError here

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        super().close()


class CQ(_Part):
    def __init__(
        self, context: Context, places: int, _data: Any = None, channel: Any = None, _vector: int = 0
    ) -> None:
        super().__init__(context, *filter(None, [channel]))
        self.context, self.places, self.channel = context, places, channel
        self.completions: deque[Any] = deque()
        self.unacknowledged = 0

    def poll(self, count: int) -> tuple[int, list[Any]]:
        assert not self.closed
        if self.context.card.gone:
            raise FabricRDMAError("Failed to poll CQ", 5)
        taken = [self.completions.popleft() for _ in range(min(count, len(self.completions)))]
        return len(taken), taken

    def req_notify(self) -> None:
        assert not self.closed
        self.channel.armed = True

    def ack_events(self, count: int) -> None:
        assert count == 1

    def add(self, wr_id: int, status: int) -> None:
        self.completions.append(SimpleNamespace(wr_id=wr_id, status=status))
        assert len(self.completions) <= self.places, "the completion queue overflows"
        if self.channel is not None and self.channel.armed:
            self.channel.armed = False
            self.channel.event_count += 1
            os.eventfd_write(self.channel.fd, 1)


class SGE:
    def __init__(self, address: int, length: int, key: int) -> None:
        self.address, self.length, self.key = address, length, key


class SendWR:
    def __init__(self, fabric: Fabric, *, num_sge: int, sg: list[SGE], next_wr: SendWR | None) -> None:
        assert num_sge == len(sg) == 1
        self.fabric = fabric
        self.element = sg[0]
        self.following = next_wr
        self.freed = False
        self.wr_id = self.opcode = self.send_flags = 0
        fabric.work_requests += 1

    @property
    def next_wr(self) -> None:
        raise AssertionError("not readable in pyverbs")

    @next_wr.setter
    def next_wr(self, following: SendWR) -> None:
        assert isinstance(following, SendWR), "pyverbs takes no None"
        self.following = following

    def set_wr_rdma(self, key: int, address: int) -> None:
        self.remote = (key, address, 0, 0)

    def set_wr_atomic(self, key: int, address: int, compare_add: int, swap: int) -> None:
        self.remote = (key, address, compare_add, swap)

    def close(self) -> None:
        assert not self.freed, "a double free"
        self.freed = True
        self.fabric.work_requests -= 1


@dataclass
class _Posted:
    wr_id: int
    opcode: int
    signaled: bool
    element: SGE
    key: int
    address: int
    compare_add: int
    swap: int


class QP(_Part):
    def __init__(self, domain: PD, options: Any) -> None:
        super().__init__(domain, options.scq)
        self.fabric = domain.fabric
        self.domain = domain
        self.queue = options.scq
        self.depth = options.cap.max_send_wr
        assert options.qp_type == _C.IBV_QPT_RC
        assert options.sq_sig_all == 0
        assert self.depth <= domain.context.card.max_requests
        self.qp_num = self.fabric.number()
        self.state = "reset"
        self.waiting: deque[_Posted] = deque()
        self.attributes: Any = None
        self.fabric.pairs[self.qp_num] = self

    def to_init(self, attributes: Any) -> None:
        assert self.state == "reset"
        self.rights = attributes.qp_access_flags
        self.state = "init"

    def to_rtr(self, attributes: Any) -> None:
        assert self.state == "init"
        assert attributes.max_dest_rd_atomic > 0
        self.peer = attributes.dest_qp_num
        self.state = "rtr"

    def to_rts(self, attributes: Any) -> None:
        assert self.state == "rtr"
        assert attributes.max_rd_atomic > 0, "a READ would never complete"
        assert attributes.retry_cnt < 7, "a dead peer would never be noticed"
        self.attributes = attributes
        self.state = "rts"

    def modify(self, attributes: Any, mask: int) -> None:
        assert (attributes.qp_state, mask) == (_C.IBV_QPS_ERR, _C.IBV_QP_STATE)
        if self.state == "reset":
            raise FabricRDMAError("Failed to modify QP", 22)
        self.state = "error"
        if not self.fabric.held:
            self.work(None)

    def post_send(self, first: SendWR) -> None:
        assert not self.closed
        assert self.state in ("rts", "error")
        if self.fabric.failing_posts:
            self.fabric.failing_posts -= 1
            raise FabricRDMAError("Failed to post send", 12)
        flags = []
        work: SendWR | None = first
        while work is not None:
            assert not work.freed, "posted after it was freed"
            signaled = work.send_flags == _C.IBV_SEND_SIGNALED
            self.waiting.append(_Posted(work.wr_id, work.opcode, signaled, work.element, *work.remote))
            flags.append(work.send_flags)
            work = work.following
        self.fabric.posted_chains.append(flags)
        assert len(self.waiting) <= self.depth, "the send queue overflows"
        if not self.fabric.held:
            self.work(None)

    def work(self, count: int | None) -> None:
        """Do what was posted, or so many of it, in order."""
        done = 0
        while self.waiting and (count is None or done < count):
            posted = self.waiting.popleft()
            status = _C.IBV_WC_WR_FLUSH_ERR if self.state == "error" else self._perform(posted)
            if status:
                self.state = "error"
            if status or posted.signaled:
                self.queue.add(posted.wr_id, status)
            done += 1

    def close(self) -> None:
        super().close()
        self.waiting.clear()
        self.fabric.pairs.pop(self.qp_num, None)

    def _perform(self, posted: _Posted) -> int:
        peer = self.fabric.pairs.get(self.peer)
        if peer is None or peer.state not in ("rtr", "rts"):
            return _C.IBV_WC_RETRY_EXC_ERR
        element = posted.element
        local = self.fabric.regions.get(element.key)
        if local is None or not _inside(local, element.address, element.length):
            return _C.IBV_WC_LOC_PROT_ERR
        remote = self.fabric.regions.get(posted.key)
        right = {
            _C.IBV_WR_RDMA_READ: _C.IBV_ACCESS_REMOTE_READ,
            _C.IBV_WR_RDMA_WRITE: _C.IBV_ACCESS_REMOTE_WRITE,
        }.get(posted.opcode, _C.IBV_ACCESS_REMOTE_ATOMIC)
        if (
            remote is None
            or not _inside(remote, posted.address, element.length)
            or not remote.access & peer.rights & right
        ):
            return _C.IBV_WC_REM_ACCESS_ERR
        if posted.opcode != _C.IBV_WR_RDMA_WRITE and not local.access & _C.IBV_ACCESS_LOCAL_WRITE:
            return _C.IBV_WC_LOC_PROT_ERR
        if posted.opcode == _C.IBV_WR_RDMA_READ:
            ctypes.memmove(local.base + element.address, posted.address, element.length)
        elif posted.opcode == _C.IBV_WR_RDMA_WRITE:
            ctypes.memmove(posted.address, element.address, element.length)
        else:
            _atomic(posted)
        return _C.IBV_WC_SUCCESS


def _inside(region: MR, address: int, length: int) -> bool:
    return region.address <= address and address + length <= region.address + region.length


def _atomic(posted: _Posted) -> None:
    word = ctypes.c_uint64.from_address(posted.address)
    before = word.value
    if posted.opcode == _C.IBV_WR_ATOMIC_FETCH_AND_ADD:
        word.value = (before + posted.compare_add) % _WORD
    elif before == posted.compare_add:
        word.value = posted.swap
    ctypes.c_uint64.from_address(posted.element.address).value = before
