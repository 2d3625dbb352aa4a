"""A trial whose GPU is plain memory: ``python -m tests.kvcomm.cli.trial_on_host_gpu ROLE``."""

from __future__ import annotations

import sys
from typing import Any

from l2_rdma import trial
from l2_rdma.transports.cuda import runtime
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu


class NamedGpu(HostGpu):
    name = "Plain memory"
    capability = (9, 0)


def main(role: str) -> None:
    patched: Any = runtime
    patched.open_gpu = lambda ordinal=0: NamedGpu()
    patched.dma_buf_support = lambda gpu, pointer, nbytes: "no: plain memory"
    trial.main(role)


if __name__ == "__main__":
    main(sys.argv[1])
