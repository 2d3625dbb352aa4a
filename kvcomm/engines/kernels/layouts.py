"""``PagedLayout``: where the rows of a KV cache lie, for any engine whose cache is pages of tokens.

A *row* is ``head_dim`` elements of one token, head, layer and of K or V; rows are contiguous everywhere.  A
*page* is ``page_tokens`` tokens at a place of their own.  What differs between engines is the order of the
other axes, which strides express::

    address of a row = base[layer, K or V] + page * page_stride + token * token_stride + head * head_stride

================================================  ================================================
vLLM, K and V in front                            ``[2, page, token, head, dim]`` a layer
vLLM, page in front                               ``[page, 2, token, head, dim]`` a layer
heads before tokens                               the same with ``head, token``
transformers                                      ``[1, head, token, dim]`` for K and for V, a layer; its
                                                  pages are consecutive runs of tokens
================================================  ================================================

A block's payload is ``[layer, K or V, head, token, dim]``, C-contiguous (``LKHTD``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from kvcomm.errors import PayloadError
from kvcomm.namespace import DTYPE_BYTES, Namespace


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The cache of one sequence group: all its layers.  Strides are in bytes.

    Raises:
        PayloadError: the layers differ in shape, dtype, device or strides, or their rows are not contiguous.
    """

    tensors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(K, V) of each layer as views ``[page, token, head, dim]`` of the engine's memory."""
    page_tokens: int
    heads: int
    row_bytes: int
    page_stride: int
    token_stride: int
    head_stride: int
    bases: torch.Tensor
    """int64 ``[layer * 2]`` on the cache's device: the address of each K and V."""
    alignment: int
    """Greatest power of two that divides every row's address and length, 16 at most."""

    @property
    def layers(self) -> int:
        return len(self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0][0].device

    @property
    def page_count(self) -> int:
        return self.tensors[0][0].shape[0]

    def block_bytes(self, pages_per_block: int = 1) -> int:
        """Of a payload that holds the tokens of so many pages."""
        return self.layers * 2 * self.heads * pages_per_block * self.page_tokens * self.row_bytes

    def check(self, namespace: Namespace) -> int:
        """Pages a block of ``namespace``.

        Raises:
            PayloadError: the cache is of another shape or dtype than the namespace.
        """
        row_bytes = namespace.head_dim * DTYPE_BYTES[namespace.dtype]
        dtype = self.tensors[0][0].dtype
        if dtype not in (getattr(torch, namespace.dtype), torch.uint8):  # uint8: how engines keep float8
            raise PayloadError(f"the cache is {dtype}, the namespace {namespace.dtype}")
        mine = (self.layers, self.heads, self.row_bytes)
        if mine != (namespace.layers, namespace.kv_heads, row_bytes):
            raise PayloadError(
                f"the cache has (layers, kv heads, bytes a row) = {mine}, the namespace "
                f"{(namespace.layers, namespace.kv_heads, row_bytes)}"
            )
        if namespace.block_tokens % self.page_tokens:
            raise PayloadError(
                f"blocks of {namespace.block_tokens} tokens are not whole pages of {self.page_tokens}"
            )
        return namespace.block_tokens // self.page_tokens


def vllm_layout(caches: Sequence[torch.Tensor], *, axes: str = "KPTHD") -> PagedLayout:
    """Of vLLM's per-layer tensors.

    Args:
        caches: one a layer, five axes each.
        axes: their order; ``K`` = K or V (length 2), ``P`` page, ``T`` token, ``H`` KV head, ``D`` head dim.
            ``KPTHD`` and ``PKTHD`` are vLLM's two, ``KPHTD`` and ``PKHTD`` their heads-first variants.

    Raises:
        PayloadError: see :class:`PagedLayout`.
        ValueError: ``axes`` is not an order of K, P, T, H, D.
    """
    if sorted(axes) != sorted("KPTHD"):
        raise ValueError(f"axes must be an order of the letters K, P, T, H, D, not {axes!r}")
    pairs = []
    for layer, cache in enumerate(caches):
        if cache.dim() != 5 or cache.shape[axes.index("K")] != 2:
            raise PayloadError(f"layer {layer} is {tuple(cache.shape)}, not five axes {axes} with K = 2")
        keys, values = cache.permute([axes.index(axis) for axis in "KPTHD"])
        pairs.append((keys, values))
    return _layout(pairs)


def sequence_layout(layers: Sequence[tuple[torch.Tensor, torch.Tensor]], block_tokens: int) -> PagedLayout:
    """Of a transformers cache: (K, V) of each layer, ``[1, head, token, dim]``; page ``n`` is the tokens
    ``[n * block_tokens, (n + 1) * block_tokens)``.

    Raises:
        PayloadError: see :class:`PagedLayout`; or it is not one sequence.
    """
    pairs = []
    for layer, (keys, values) in enumerate(layers):
        if keys.dim() != 4 or keys.shape[0] != 1 or keys.shape != values.shape:
            raise PayloadError(f"layer {layer} is {tuple(keys.shape)}, not [1, head, token, dim] like its V")
        pairs.append((_paged(keys, block_tokens), _paged(values, block_tokens)))
    return _layout(pairs)


def _paged(states: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """``[1, head, token, dim]`` as ``[page, token, head, dim]``, the same memory."""
    _, heads, tokens, dim = states.shape
    _, head_stride, token_stride, dim_stride = states.stride()
    return states.as_strided(
        (tokens // block_tokens, block_tokens, heads, dim),
        (block_tokens * token_stride, token_stride, head_stride, dim_stride),
    )


def _layout(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> PagedLayout:
    if not pairs:
        raise PayloadError("a cache has at least one layer")
    first = pairs[0][0]
    for layer, each in chain.from_iterable(((n, k), (n, v)) for n, (k, v) in enumerate(pairs)):
        same = (each.shape, each.stride(), each.dtype, each.device) == (
            first.shape, first.stride(), first.dtype, first.device,
        )  # fmt: skip
        if not same:
            raise PayloadError(
                f"layer {layer} is {tuple(each.shape)} {each.stride()} {each.dtype} on {each.device}, "
                f"the first {tuple(first.shape)} {first.stride()} {first.dtype} on {first.device}"
            )
    _, page_tokens, heads, dim = first.shape
    page, token, head, element = first.stride()
    if element != 1:
        raise PayloadError("the elements of a row (the last axis) must be contiguous")
    size = first.element_size()
    addresses = [states.data_ptr() for pair in pairs for states in pair]
    together = math.gcd(dim * size, page * size, token * size, head * size, *addresses)
    return PagedLayout(
        tuple((keys, values) for keys, values in pairs),
        page_tokens, heads, dim * size, page * size, token * size, head * size,
        torch.tensor(addresses, dtype=torch.int64, device=first.device), math.gcd(together, 16),
    )  # fmt: skip
