"""The floor under a transport over RDMA: two processes, one queue pair, READs posted and polled for.

Nothing of ours is between pyverbs and the loop: the work requests are made and chained before the time, a
chain is posted by one call and its last READ alone is signaled, memory is registered on both sides, nothing
is checked but the status.  Run as a module it is the side that is read,
which ends when its standard input closes, so also when the benchmark dies.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.peers.memory import Buffers
from bench.timing import Call, round_robin

BARE_READ = "bare pyverbs READ"
BARE_READ_MADE = "bare pyverbs READ, request made for it"
DEPTH_MAX = 64
RD_ATOMIC = 16
"""READs that the peer answers at once."""
TIMEOUT_S = 30.0
POLLS = 256
"""Between two looks at the clock, which costs as much as several where a guest traps it."""
_PORT = 1
_IPV4_MAPPED = "0" * 20 + "ffff"
_TIMEOUT_EXPONENT, _RETRIES = 14, 6


@dataclass(slots=True)
class BareVerbs:
    """A connected queue pair and the other process's registered memory."""

    end: _End
    address: int
    rkey: int
    size_bytes: int
    pieces: int
    kept: list[object] = field(default_factory=list)

    def one(self, size_bytes: int) -> Call:
        """Read each piece in turn, waiting for it."""
        return self._reads(BARE_READ, size_bytes, 1)

    def making(self, size_bytes: int) -> Call:
        """Like :meth:`one`, with the work request made in the time: whoever reads here and there cannot have
        it beforehand."""
        into = Buffers(1, size_bytes)
        [to] = into.addresses()
        region = self.end.registered(to, size_bytes)
        self.kept += [into, region]

        def read(piece: int) -> None:
            request = self._request(to, region, self.address + piece * self.size_bytes, size_bytes)
            self.end.perform(request)
            request.close()  # pyverbs frees what it holds only then

        return Call(BARE_READ_MADE, round_robin(read, range(self.pieces)))

    def run(self, size_bytes: int, items: int) -> Call:
        """``items`` READs under way at once; the time is for one."""
        return self._reads(f"{BARE_READ}, run", size_bytes, items)

    def _reads(self, name: str, size_bytes: int, items: int) -> Call:
        into = Buffers(items, size_bytes)
        regions = [self.end.registered(address, size_bytes) for address in into.addresses()]
        self.kept += [into, regions]
        chains = []
        for first in range(self.pieces):
            sources = [self.address + (first + at) % self.pieces * self.size_bytes for at in range(items)]
            targets = list(zip(into.addresses(), regions, sources, strict=True))
            following = None
            for to, region, source in reversed(targets):
                following = self._request(to, region, source, size_bytes, following)
                self.kept.append(following)
            chains.append(following)
        return Call(name, round_robin(self.end.perform, chains), items=items)

    def _request(self, to: int, region: Any, source: int, size_bytes: int, following: Any = None) -> Any:
        from pyverbs.wr import SGE, SendWR

        request = SendWR(
            opcode=self.end.read,
            num_sge=1,
            sg=[SGE(to, size_bytes, region.lkey)],
            send_flags=self.end.signaled if following is None else 0,
            next_wr=following,
        )
        request.set_wr_rdma(self.rkey, source)
        return request


@contextmanager
def bare_verbs(working_set: int, size_bytes: int) -> Iterator[BareVerbs | str]:
    """Reads of up to ``size_bytes`` from another process over the first RDMA device, or the reason why there
    are none."""
    reason = missing()
    if reason:
        yield reason
        return
    command = [sys.executable, "-m", "bench.peers.bare_verbs", str(working_set), str(size_bytes)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    with server, server.stdin:  # closing it ends the server, leaving ``server`` waits for that
        end, theirs = _End(), json.loads(server.stdout.readline())
        print(json.dumps(end.described()), file=server.stdin, flush=True)
        end.connect(theirs)
        server.stdout.readline()  # it is connected too
        try:
            yield BareVerbs(end, theirs["address"], theirs["rkey"], size_bytes, working_set)
        finally:
            end.close()


def missing() -> str | None:
    """Why nothing can be read over RDMA here."""
    try:
        from pyverbs.device import get_device_list
        from pyverbs.pyverbs_error import PyverbsRDMAError
    except ImportError as error:
        return f"pyverbs is not installed here: {error}"
    try:
        return None if get_device_list() else "this machine has no RDMA device"
    except PyverbsRDMAError:
        return "this machine has no RDMA subsystem"


def constants() -> dict[str, int]:
    """The constants of libibverbs by name: flat in pyverbs 44, members of enumerations from 59 on."""
    try:
        from pyverbs import enums
    except ImportError:
        from pyverbs import libibverbs_enums

        kinds = [kind for kind in vars(libibverbs_enums).values() if hasattr(kind, "__members__")]
        return {name: int(value) for kind in kinds for name, value in kind.__members__.items()}
    return {name: value for name, value in vars(enums).items() if name.startswith("IBV")}


class _End:
    """One end of the queue pair."""

    def __init__(self) -> None:
        from pyverbs.cq import CQ
        from pyverbs.device import Context, get_device_list
        from pyverbs.pd import PD
        from pyverbs.qp import QP, QPCap, QPInitAttr

        verbs = constants()
        self._context = Context(name=get_device_list()[0].name.decode())
        self._domain = PD(self._context)
        self._completions = CQ(self._context, 2 * DEPTH_MAX)
        self._access = verbs["IBV_ACCESS_LOCAL_WRITE"] | verbs["IBV_ACCESS_REMOTE_READ"]
        capacity = QPCap(max_send_wr=DEPTH_MAX, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self._pair = QP(
            self._domain,
            QPInitAttr(
                qp_type=verbs["IBV_QPT_RC"], scq=self._completions, rcq=self._completions, cap=capacity,
                sq_sig_all=0,
            ),
        )  # fmt: skip
        self._packet = secrets.randbits(24)
        self._gid_index, self._gid = _routable_gid(self._context)
        self._success = verbs["IBV_WC_SUCCESS"]
        self.read, self.signaled = verbs["IBV_WR_RDMA_READ"], verbs["IBV_SEND_SIGNALED"]

    def registered(self, address: int, length: int) -> Any:
        from pyverbs.mr import MR

        return MR(self._domain, length, self._access, address=address)

    def described(self) -> dict[str, Any]:
        return {"pair": self._pair.qp_num, "packet": self._packet, "gid": self._gid}

    def connect(self, theirs: dict[str, Any]) -> None:
        """Through the states of the queue pair; ``QPAttr`` fills in each one's mask."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        attributes = QPAttr(port_num=_PORT)
        attributes.qp_access_flags = self._access
        self._pair.to_init(attributes)
        route = GlobalRoute(dgid=GID(theirs["gid"]), sgid_index=self._gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=_PORT, is_global=1, gr=route)
        attributes.path_mtu = self._context.query_port(_PORT).active_mtu
        attributes.dest_qp_num, attributes.rq_psn = theirs["pair"], theirs["packet"]
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = RD_ATOMIC, 12
        self._pair.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = _TIMEOUT_EXPONENT, _RETRIES, _RETRIES
        attributes.sq_psn, attributes.max_rd_atomic = self._packet, RD_ATOMIC
        self._pair.to_rts(attributes)

    def perform(self, chain: Any) -> None:
        """Post it, poll until its last one is done: READs of a queue pair complete in order."""
        self._pair.post_send(chain)
        poll, deadline = self._completions.poll, time.monotonic() + TIMEOUT_S
        while True:
            for _ in range(POLLS):
                done, completions = poll(1)
                if done:
                    if completions[0].status != self._success:
                        raise ConnectionError(f"a READ ended with status {completions[0].status}")
                    return
            if time.monotonic() > deadline:  # not before: a guest that traps the clock slows down the floor
                raise ConnectionError("a READ did not end")

    def close(self) -> None:
        self._context.close()


def _routable_gid(context: Any) -> tuple[int, str]:
    """The first GID of the port that is an IPv4 address (RoCE), else the first there is."""
    for index in range(context.query_port(_PORT).gid_tbl_len):
        gid = str(context.query_gid(_PORT, index))
        if gid.replace(":", "").startswith(_IPV4_MAPPED):
            return index, gid
    return 0, str(context.query_gid(_PORT, 0))


def _serve(working_set: int, size_bytes: int, hello: Callable[[], str]) -> None:
    end = _End()
    memory = Buffers(1, working_set * size_bytes, seed=3)
    [address] = memory.addresses()
    region = end.registered(address, working_set * size_bytes)
    print(json.dumps(end.described() | {"address": address, "rkey": region.rkey}), flush=True)
    end.connect(json.loads(hello()))
    print("connected", flush=True)
    sys.stdin.read()
    region.close()
    end.close()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.readline)
