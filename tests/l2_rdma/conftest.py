"""A region with its owner and one client, as two sides of one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import Incarnation
from kvcomm.wire.messages import Want
from l2_rdma.fence import barrier_everywhere
from l2_rdma.owner import Owner
from l2_rdma.pins import PinTable
from l2_rdma.reader import Reader
from l2_rdma.region import Region
from tests.l2_rdma.regions import TENANT, header_of, key_of, layout_of, payload_of


class SharedPool:
    """An owner over a real region; blocks are put as a client puts them, through :attr:`reader`."""

    def __init__(self, directory: Path, *, slab_count: int = 2, pin_slots: int = 8, **layout: Any) -> None:
        self.region = Region.create(
            directory,
            instance="tests",
            node="pool-0",
            tenant=TENANT,
            incarnation=Incarnation(5),
            layout=layout_of(slab_count, **layout),
        )
        backed = self.region.back(1 << 40)
        self.owner = Owner(
            self.region.memory,
            self.region.header,
            locked=self.region.hazards_locked,
            barrier=barrier_everywhere,
            pin_budget_bytes=1 << 30,
            backed_bytes=backed,
        )
        self._holders = 100
        self.reader = self.client(pin_slots)

    def client(self, pin_slots: int = 8, *, budget_bytes: int | None = None, **options: Any) -> Reader:
        """Another process's reader."""
        self._holders += 1
        client = Region.attach(self.region.path, TENANT)
        first, count, _ = self.owner.open_pins(self._holders, pin_slots)
        return Reader(client, PinTable(client, first, count, budget_bytes), **options)

    def put(self, number: int, payload: bytes | None = None, **changes: Any) -> str:
        payload = payload_of(number) if payload is None else payload
        header = header_of(number, payload, **changes)
        grant = self.owner.reserve([Want(key_of(number), 256 + len(payload))], 1, TENANT, 0.0)[0]
        if grant.status != "granted":
            return grant.status
        pin = self.reader.begin_write(grant.offset, grant.generation, 256 + len(payload))
        assert pin is not None
        self.reader.write(grant.offset, header.pack(), memoryview(payload))
        self.reader.end_write(pin)
        return self.owner.publish([grant.token], 1, 0.0, verify=False)[0]


@pytest.fixture
def make_pool(tmp_path: Path) -> Iterator[Callable[..., SharedPool]]:
    pools: list[SharedPool] = []

    def make(**options: Any) -> SharedPool:
        pools.append(SharedPool(tmp_path, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.region.close()
