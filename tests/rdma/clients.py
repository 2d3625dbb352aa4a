"""A client on one host of the rack: the shipped tier over the rack's pools, and verbs alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm.block import BlockKey
from kvcomm.rpc import Peers, run_blocking
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus
from l2_rdma.attachment import AttachOptions
from l2_rdma.rack import Pool
from l2_rdma.tier import L2Tier
from l2_rdma.transports.port import WireOptions
from l2_rdma.wires import Wires
from tests.l2_rdma.regions import header_of, key_of, payload_of
from tests.peers import CREDENTIALS, IDENTITY, soon
from tests.rdma.pools import TENANT_NAME

_TENANT = CREDENTIALS.tenant_digest(TENANT_NAME)


def key(number: int) -> BlockKey:
    return key_of(number)


def payload(number: int, length: int) -> bytes:
    """What the block of this number and length holds."""
    return payload_of(number, length)


def copy(number: int, length: int) -> BlockCopy:
    data = payload(number, length)
    return BlockCopy(header_of(number, data, tenant=_TENANT), memoryview(data))


class Client:
    """Blocks are named by numbers."""

    def __init__(self, device: str, pools: Sequence[Pool], *, request_timeout_s: float = 2.0) -> None:
        self.pools = list(pools)
        self.tier = L2Tier(
            lambda: self.pools,
            IDENTITY,
            wires=Wires(("verbs",), WireOptions(rdma_device=device)),
            options=AttachOptions(prefault=False, attach_timeout_s=5.0, request_timeout_s=request_timeout_s),
        )
        self._peers = Peers(IDENTITY)

    def put(self, numbers: Sequence[int], length: int) -> list[PutStatus]:
        copies = [copy(number, length) for number in numbers]
        return run_blocking(self.tier.put(copies), self._peers, soon())

    def get(self, numbers: Sequence[int], within_s: float = 10.0) -> dict[int, Block]:
        found: dict[int, Block] = {}
        run_blocking(
            self.tier.get(
                [key(number) for number in numbers], lambda at, block: found.update({numbers[at]: block})
            ),
            self._peers,
            soon(within_s),
        )
        return found

    def lookup(self, numbers: Sequence[int], within_s: float = 10.0) -> list[Presence]:
        return run_blocking(
            self.tier.lookup([key(number) for number in numbers]), self._peers, soon(within_s)
        )

    def close(self) -> None:
        self.tier.close()
        self._peers.close()
