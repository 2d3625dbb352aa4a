"""Blocks between an engine's pages and payloads: plain torch, the Triton kernel interpreted, and on a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcomm.engines.kernels import paging
from kvcomm.engines.kernels.layouts import sequence_layout, vllm_layout
from kvcomm.errors import PayloadError
from kvcomm.namespace import Namespace

ROOT = Path(__file__).parents[4]
LAYERS, HEADS, PAGE_TOKENS, DIM, PAGES = 3, 2, 4, 8, 10
AXES = ["KPTHD", "PKTHD", "KPHTD", "PKHTD"]
DTYPES = ["bfloat16", "float16", "float8_e4m3fn"]


def random_bytes(*shape, device="cpu"):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def engine_cache(axes, dtype=torch.bfloat16, *, dim=DIM, device="cpu"):
    """vLLM's tensors, filled with random words, and the same as [layer, K or V, page, token, head, row]."""
    sizes = {"K": 2, "P": PAGES, "T": PAGE_TOKENS, "H": HEADS, "D": dim * dtype.itemsize}
    caches = [random_bytes(*(sizes[axis] for axis in axes), device=device) for _ in range(LAYERS)]
    whole = torch.stack([cache.permute([axes.index(axis) for axis in "KPTHD"]) for cache in caches])
    return [cache.view(dtype) for cache in caches], whole


def expected_payloads(whole, pages):
    """By the definition of LKHTD, element by element."""
    blocks = []
    for row in pages.tolist():
        tokens = torch.cat([whole[:, :, page] for page in row], dim=2)  # [layer, K or V, token, head, row]
        blocks.append(tokens.transpose(2, 3).contiguous().flatten())
    return torch.stack(blocks)


def pages_of(blocks, per_block):
    return torch.randperm(PAGES)[: blocks * per_block].reshape(blocks, per_block)


@pytest.fixture(params=["plain", pytest.param("triton", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "plain":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch sees none")
    return "cuda"


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_block", [1, 2])
def test_gather_makes_the_payloads_that_the_layout_defines(axes, dtype, per_block, device):
    torch.manual_seed(1)
    caches, whole = engine_cache(axes, getattr(torch, dtype), device=device)
    pages = pages_of(4, per_block)
    layout = vllm_layout(caches, axes=axes)
    payloads = torch.full((4, layout.block_bytes(per_block)), 0xAA, dtype=torch.uint8, device=device)

    paging.gather(layout, pages, payloads)

    assert torch.equal(payloads, expected_payloads(whole, pages))


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("per_block", [1, 2])
def test_scatter_writes_these_pages_and_no_other(axes, per_block, device):
    torch.manual_seed(2)
    caches, before = engine_cache(axes, device=device)
    before = before.clone()
    layout = vllm_layout(caches, axes=axes)
    pages = pages_of(3, per_block)
    payloads = random_bytes(3, layout.block_bytes(per_block), device=device)

    paging.scatter(layout, pages, payloads)

    after = torch.stack([c.view(torch.uint8).permute([axes.index(a) for a in "KPTHD"]) for c in caches])
    assert torch.equal(expected_payloads(after, pages), payloads)
    others = [page for page in range(PAGES) if page not in pages.flatten().tolist()]
    assert torch.equal(after[:, :, others], before[:, :, others])


@pytest.mark.parametrize("dim", [5, 6, 20, 24])
def test_rows_of_odd_lengths(dim, device):
    torch.manual_seed(3)
    caches, whole = engine_cache("PKTHD", dim=dim, device=device)
    layout = vllm_layout(caches, axes="PKTHD")
    pages = pages_of(5, 1)
    payloads = torch.zeros((5, layout.block_bytes()), dtype=torch.uint8, device=device)

    paging.gather(layout, pages, payloads)

    assert torch.equal(payloads, expected_payloads(whole, pages))


def test_a_transformers_cache_is_pages_of_consecutive_tokens(device):
    torch.manual_seed(4)
    tokens = 5 * PAGE_TOKENS + 2  # the last, partial block has no page
    slab = random_bytes(LAYERS, 2, 1, HEADS, tokens + 7, DIM * 2, device=device).view(torch.bfloat16)
    window = slab[..., :tokens, :]
    layers = [(window[layer, 0], window[layer, 1]) for layer in range(LAYERS)]
    layout = sequence_layout(layers, PAGE_TOKENS)
    pages = torch.arange(5).reshape(5, 1)
    payloads = torch.zeros((5, layout.block_bytes()), dtype=torch.uint8, device=device)

    paging.gather(layout, pages, payloads)

    assert layout.page_count == 5
    for block in range(5):
        rows = window[:, :, 0, :, block * PAGE_TOKENS : (block + 1) * PAGE_TOKENS].contiguous()
        assert torch.equal(payloads[block], rows.view(torch.uint8).flatten())
    slab.view(torch.uint8).zero_()
    paging.scatter(layout, pages, payloads)
    again = torch.zeros_like(payloads)
    paging.gather(layout, pages, again)
    assert torch.equal(again, payloads)


def test_no_blocks_are_nothing_to_do(device):
    caches, _ = engine_cache("KPTHD", device=device)
    layout = vllm_layout(caches)
    paging.gather(
        layout,
        torch.zeros((0, 1), dtype=torch.int64),
        torch.zeros((0, layout.block_bytes()), dtype=torch.uint8, device=device),
    )


def test_what_does_not_fit_is_refused():
    caches, _ = engine_cache("KPTHD")
    layout = vllm_layout(caches)
    good = torch.zeros((2, layout.block_bytes()), dtype=torch.uint8)
    with pytest.raises(PayloadError, match="not all in"):
        paging.gather(layout, torch.tensor([[0], [PAGES]]), good)
    with pytest.raises(PayloadError, match="integers"):
        paging.gather(layout, torch.tensor([[0]]), good)
    with pytest.raises(PayloadError, match="uint8"):
        paging.scatter(layout, torch.tensor([[0], [1]]), good[:, :-1])
    with pytest.raises(PayloadError, match="contiguous"):
        paging.scatter(layout, torch.tensor([[0], [1]]), torch.zeros_like(good).T.contiguous().T)
    with pytest.raises(PayloadError, match="five axes"):
        vllm_layout([caches[0][0]])
    with pytest.raises(ValueError, match="order of the letters"):
        vllm_layout(caches, axes="KPTH")
    with pytest.raises(PayloadError, match="the first"):
        vllm_layout([caches[0], caches[1].half()])
    with pytest.raises(PayloadError, match="last axis"):
        vllm_layout([cache.transpose(3, 4) for cache in caches])
    with pytest.raises(PayloadError, match=r"\[1, head"):
        sequence_layout([(caches[0][0], caches[0][1])], 4)


def test_a_layout_is_checked_against_the_namespace():
    caches, _ = engine_cache("KPTHD")
    layout = vllm_layout(caches)
    options: dict[str, Any] = {
        "model": "m", "revision": "r", "tokenizer": "t", "vocab_size": 10, "dtype": "bfloat16", "layout":
        "LKHTD", "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "block_tokens": 2 * PAGE_TOKENS,
        "rope": "none", "rope_parameters": {},
    }  # fmt: skip

    assert layout.check(Namespace(**options)) == 2
    assert layout.block_bytes(2) == Namespace(**options).block_bytes
    for change in ({"dtype": "float16"}, {"kv_heads": 1}, {"block_tokens": 6}):
        with pytest.raises(PayloadError):
            layout.check(Namespace(**options | change))


@pytest.mark.gpu
def test_foreign_addresses_are_scattered_without_a_copy_in_between(device):
    if device == "cpu":
        pytest.skip("addresses are of GPU memory")
    torch.manual_seed(5)
    caches, whole = engine_cache("KPTHD", device=device)
    layout = vllm_layout(caches)
    pages = pages_of(3, 1)
    payloads = torch.zeros((3, layout.block_bytes()), dtype=torch.uint8, device=device)
    addresses = [payloads[row].data_ptr() for row in range(3)]

    paging.gather_to(layout, pages, addresses)
    assert torch.equal(payloads, expected_payloads(whole, pages))
    payloads.random_(0, 256)
    paging.scatter_from(layout, pages, addresses)

    now = torch.stack([cache.view(torch.uint8) for cache in caches])
    assert torch.equal(expected_payloads(now, pages), payloads)


@pytest.mark.slow
def test_the_triton_kernel_interpreted_on_the_host():
    """The kernel's arithmetic, where there is no GPU: Triton runs it in Python, one program after the
    other."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (pip install kvcomm[gpu])")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvcomm.engines.kernels.interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["24", "layouts"]
