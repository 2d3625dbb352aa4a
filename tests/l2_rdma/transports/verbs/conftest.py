"""One pool and one client on a network of one kind of device, in this process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcomm.block import Incarnation
from l2_rdma.layout import plan_layout
from l2_rdma.region import SHM_DIRECTORY, Region
from l2_rdma.transports.verbs.channel import VerbsChannel
from l2_rdma.transports.verbs.device import open_device
from l2_rdma.transports.verbs.provider import VerbsProvider
from l2_rdma.transports.verbs.transport import VerbsTransport
from tests.l2_rdma.regions import TENANT
from tests.l2_rdma.transports.verbs.fabric import Card, Fabric
from tests.peers import soon


@dataclass
class Net:
    """Everything that there is.  What a test changes in ``fabric`` holds for both sides."""

    fabric: Fabric
    region: Region
    provider: VerbsProvider
    transport: VerbsTransport

    def connect(self, holder: int = 1) -> VerbsChannel:
        return self.transport.connect(
            self.provider.offer(),
            self.region.header,
            lambda proposal: self.provider.open(holder, TENANT, proposal),
            soon(),
        )

    def end(self) -> None:
        self.transport.close()
        self.provider.close()
        assert self.fabric.objects == []
        assert self.fabric.work_requests == 0


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvc-", dir=SHM_DIRECTORY))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def region(directory: Path) -> Iterator[Region]:
    made = Region.create(
        directory,
        instance="tests",
        node="pool-0",
        tenant=TENANT,
        incarnation=Incarnation(11),
        layout=plan_layout(5 << 20, slab_bytes=1 << 20, index_entries=64, hazard_count=64),
    )
    made.back(1 << 40)
    yield made
    made.close()


@pytest.fixture
def card() -> Card:
    """A test may change it before it asks for ``net``; that of its own module may be another."""
    return Card()


@pytest.fixture
def net(card: Card, region: Region) -> Iterator[Net]:
    fabric = Fabric(card)
    provider = VerbsProvider(region, open_device(fabric.binding))
    made = Net(fabric, region, provider, VerbsTransport(open_device(fabric.binding)))
    yield made
    fabric.held = False
    made.end()


@pytest.fixture
def region_of_nothing(directory: Path) -> Iterator[Region]:
    """Has no memory behind its slots yet."""
    layout = plan_layout(5 << 20, slab_bytes=1 << 20, index_entries=64, hazard_count=64)
    made = Region.create(
        directory, instance="tests", node="pool-1", tenant=TENANT, incarnation=Incarnation(13), layout=layout
    )
    yield made
    made.close()
