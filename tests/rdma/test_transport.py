"""The shipped transport where there are devices.

What it promises is held by ``tests/contracts/transports``, which skips a transport that does not run.  So
that nothing is skipped in the guest unseen, it must run here.
"""

from __future__ import annotations

import pytest

from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import WireOptions
from tests.rdma.devices import devices

pytestmark = pytest.mark.rdma


def test_it_runs_on_every_device() -> None:
    for device in devices():
        found = find_transports(["verbs"], WireOptions(rdma_device=device))
        assert found.refused == {}
        found.running["verbs"].close()


def test_it_takes_a_device_by_itself() -> None:
    found = find_transports(["verbs"], WireOptions())
    assert found.refused == {}
    found.running["verbs"].close()


def test_it_says_which_devices_there_are_instead_of_one_that_is_not() -> None:
    [reason] = find_transports(["verbs"], WireOptions(rdma_device="mlx5_7")).refused.values()
    assert "mlx5_7" in reason
    assert devices()[0] in reason
