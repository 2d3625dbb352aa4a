"""Fixtures of the tests with real verbs; `make test-rdma` runs them in a guest with a rack of three."""

from collections.abc import Iterator

import pytest

from tests.rdma.devices import devices
from tests.rdma.rack import Host


@pytest.fixture(scope="session")
def device() -> str:
    """One RDMA device, whichever; it also reaches itself."""
    return devices()[0]


@pytest.fixture
def rack() -> Iterator[list[Host]]:
    """Three hosts whose cables are in; they are put in again afterwards."""
    if not {"rx1", "rx2", "rx3"} <= set(devices()):
        pytest.skip("needs the devices rx1, rx2 and rx3; make test-rdma runs it in a guest that has them")
    hosts = [Host(1), Host(2), Host(3)]
    yield hosts
    for host in hosts:
        host.plug()
