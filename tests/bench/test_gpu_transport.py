"""Pools in GPU memory: what is no figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bench.gpu_transport import all_correct, finish, interleaved
from kvcomm.errors import Unavailable
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.port import Operation
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu


def test_a_wrong_byte_anywhere_is_seen():
    results: dict[str, Any] = {
        "fetch": [{"correct": True}, {"us": 1}],
        "paging": {"fused": {"correct": True}},
    }
    assert all_correct(results)
    results["paging"]["fused"]["correct"] = False
    assert not all_correct(results)


def test_a_read_that_failed_is_no_time():
    transport = CudaTransport(HostGpu())
    good, bad = Operation(0.0), Operation(0.0)
    good.complete()
    finish(transport, [good])
    bad.fail(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        finish(transport, [good, bad])
    transport.close()


def test_who_goes_first_rotates():
    seen: list[str] = []
    calls: dict[str, Callable[[], Any]] = {name: partial(seen.append, name) for name in "abc"}
    assert set(interleaved(calls, 3)) == set("abc")
    assert "".join(seen) == "aabbcc" + "abc" + "bca" + "cab"
