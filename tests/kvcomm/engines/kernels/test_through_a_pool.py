"""KV from one engine's pages into a pool in GPU memory and from there into another engine's: bit for bit."""

import pytest
import torch

from kvcomm.engines.kernels import paging
from kvcomm.engines.kernels.layouts import vllm_layout
from l2_rdma.transports.cuda.gpu import DeviceBuffer
from tests.kvcomm.engines.kernels.test_paging import engine_cache, expected_payloads
from tests.l2_rdma.regions import key_of
from tests.l2_rdma.transports.cuda.conftest import DevicePool, real_gpu

BLOCKS = 4

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch sees none")
    pool = DevicePool(tmp_path, real_gpu(), slab_count=16)
    yield pool
    pool.close()


def test_blocks_go_from_pages_to_pages(pool):
    torch.manual_seed(6)
    mine, whole = engine_cache("KPTHD", device="cuda")
    theirs, _ = engine_cache("PKHTD", device="cuda")
    sources, targets = torch.tensor([[7], [2], [9], [4]]), torch.tensor([[0], [5], [1], [8]])
    from_layout, to_layout = vllm_layout(mine), vllm_layout(theirs, axes="PKHTD")
    payloads = torch.zeros((BLOCKS, from_layout.block_bytes()), dtype=torch.uint8, device="cuda")

    paging.gather(from_layout, sources, payloads)
    torch.cuda.synchronize()
    for number in range(BLOCKS):
        payload = payloads[number].cpu().numpy().tobytes()
        assert pool.put(number, payload) == "published"
        assert pool.reader.digest(DeviceBuffer.of(payloads[number])) == pool_checksum(pool, number)
    blocks = pool.client().view([key_of(number) for number in range(BLOCKS)])
    paging.scatter_from(to_layout, targets, [block.payload.pointer for block in blocks])
    torch.cuda.synchronize()

    again = torch.zeros_like(payloads)
    paging.gather(to_layout, targets, again)
    assert torch.equal(again, payloads)
    assert torch.equal(again, expected_payloads(whole, sources))


def pool_checksum(pool, number):
    [block] = pool.reader.view([key_of(number)])
    return block.header.payload_checksum
