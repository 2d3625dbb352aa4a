"""What CUDA's bindings are asked for, as far as that needs no GPU."""

from types import SimpleNamespace

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.cuda import checksum
from l2_rdma.transports.cuda.gpu import HANDLE_BYTES
from l2_rdma.transports.cuda.runtime import handle_bytes, handle_from


def test_a_handle_goes_through_the_bindings_structure_and_back():
    runtime = pytest.importorskip(
        "cuda.bindings.runtime", reason="needs CUDA's bindings (pip install kvcomm[gpu])"
    )

    assert handle_bytes(handle_from(runtime, bytes(range(HANDLE_BYTES)))) == bytes(range(HANDLE_BYTES))


def test_without_the_run_time_compiler_there_is_a_reason():
    def missing(*arguments):
        raise RuntimeError("no libnvrtc")

    with pytest.raises(Unavailable, match="no libnvrtc"):
        checksum._compiled(SimpleNamespace(nvrtcCreateProgram=missing), (9, 0))
