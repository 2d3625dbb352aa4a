"""Between a transformers cache and block payloads.

A cache here keeps all its K/V in one tensor, the *slab* ``[layer, K or V, 1, kv head, capacity, head dim]``:

* a fetched block lands in it with one strided copy (runs of ``block_tokens * head_dim`` elements, so at
  memcpy speed);
* a decode step writes one row in place, where the stock layer copies the whole cache to append it;
* every layer keeps every token.  Sliding-window layers too: a block holds all layers of its tokens, and the
  model's own mask hides what lies outside a window.

The copies go through numpy byte views, because the pool's memory is read-only and torch has no read-only
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvcomm.block import Buffer
from kvcomm.errors import PayloadError
from kvcomm.namespace import Namespace

_GROWTH = 1.5
"""A full slab grows by this factor, so that appending costs amortised O(1) copies a token."""


def cache_from(
    payloads: Sequence[Buffer],
    namespace: Namespace,
    *,
    device: torch.device | str = "cpu",
    capacity_tokens: int = 0,
) -> DynamicCache:
    """A cache that holds the blocks ``payloads``, which start at token 0 and follow each other.

    Args:
        payloads: ``namespace.block_bytes`` bytes each, layout ``LKHTD``; copied, so pinned views can be
            dropped after.
        device: where the model computes.
        capacity_tokens: room to reserve, for what will be prefilled and generated; the cache grows past it.

    Raises:
        PayloadError: a payload does not fit the namespace.
    """
    token_count = len(payloads) * namespace.block_tokens
    slab = Slab(namespace, max(token_count, capacity_tokens), torch.device(device))
    slab.fill([_checked_payload(payload, namespace) for payload in payloads])
    cache = DynamicCache()
    cache.layers = [SlabLayer(slab, index, token_count) for index in range(namespace.layers)]
    cache.layer_class_to_replicate = None
    return cache


def blocks_of(cache: Cache, namespace: Namespace, first_block: int, last_block: int) -> list[memoryview]:
    """Payloads of the blocks ``[first_block, last_block)`` of ``cache`` (batch size 1; a slab cache or a
    stock one).

    The payloads are read-only views of one fresh buffer of ``(last_block - first_block) *
    namespace.block_bytes``.

    Raises:
        PayloadError: the cache is of another shape or dtype, dropped tokens (static or sliding), or is too
            short.
    """
    if not 0 <= first_block <= last_block:
        raise PayloadError(f"blocks [{first_block}, {last_block}) are not a range")
    tokens, count = namespace.block_tokens, last_block - first_block
    layers = _checked_layers(cache, namespace, last_block * tokens)
    if not count:
        return []
    shape, dtype, device = (count, *namespace.block_shape), _torch_dtype(namespace), layers[0][0].device
    gathered = _empty(shape, dtype, device)
    copy = _copy_on_host if device.type == "cpu" else torch.Tensor.copy_
    per_block = (namespace.kv_heads, count, tokens, namespace.head_dim)
    for index, pair in enumerate(layers):
        for which, states in enumerate(pair):  # one copy for all blocks
            rows = states[0, :, first_block * tokens : last_block * tokens].detach()
            copy(gathered[:, index, which], rows.view(per_block).transpose(0, 1))
    payloads = _bytes_of(gathered.cpu()).reshape(count, -1)
    return [payload.data.toreadonly() for payload in payloads]


def token_count_of(cache: Cache) -> int:
    """Tokens that have K/V in ``cache``."""
    return int(cache.get_seq_length())


def truncate(cache: Cache, token_count: int) -> None:
    """Forget the tokens from ``token_count`` on."""
    surplus = token_count_of(cache) - token_count
    assert surplus >= 0, "a cache cannot be truncated to more than it holds"
    if surplus:
        cache.crop(-surplus)


class Slab:
    """One sequence's K/V of all layers: ``data`` = [layer, K or V, 1, kv head, capacity, head dim]."""

    def __init__(self, namespace: Namespace, capacity_tokens: int, device: torch.device) -> None:
        self._shape = (namespace.layers, 2, 1, namespace.kv_heads)
        self._dim = namespace.head_dim
        self._dtype = _torch_dtype(namespace)
        self._device = device
        self.data = self._allocate(capacity_tokens)

    @property
    def capacity_tokens(self) -> int:
        return self.data.shape[4]

    def fill(self, payloads: Sequence[NDArray[np.uint8]]) -> None:
        """Write whole blocks from token 0 on, each [layer, K or V, kv head, token, head dim bytes]."""
        if not payloads:
            return
        tokens = payloads[0].shape[3]
        on_host = self._device.type == "cpu"
        target = self.data if on_host else self._allocate(len(payloads) * tokens, torch.device("cpu"))
        rows = _bytes_of(target)[:, :, 0]
        for index, payload in enumerate(payloads):
            rows[:, :, :, index * tokens : (index + 1) * tokens] = payload
        if not on_host:  # one transfer, not one a block
            self.data[..., : target.shape[4], :].copy_(target)

    def reserve(self, token_count: int) -> None:
        if token_count > self.capacity_tokens:
            grown = self._allocate(max(token_count, int(self.capacity_tokens * _GROWTH)))
            grown[..., : self.capacity_tokens, :].copy_(self.data)
            self.data = grown

    def _allocate(self, capacity_tokens: int, device: torch.device | None = None) -> torch.Tensor:
        # A tensor born in inference mode could not be written outside of it, and a cache outlives one forward
        # pass.
        with torch.inference_mode(False):
            shape = (*self._shape, capacity_tokens, self._dim)
            return _empty(shape, self._dtype, device or self._device)


class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's window onto a slab; for inference only (no gradients flow through it).

    ``keys`` and ``values`` are views ``[1, kv head, token, head dim]``.  Whoever replaces them (beam search,
    a reset) gets the stock layer's behaviour from then on.
    """

    def __init__(self, slab: Slab, index: int, token_count: int) -> None:
        super().__init__()
        self._slab = slab
        self._index = index
        self.dtype, self.device = slab.data.dtype, slab.data.device
        self.is_initialized = True
        self._show(token_count)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._is_mine():
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        begin = self.keys.shape[-2]
        end = begin + key_states.shape[-2]
        self._slab.reserve(end)
        row = self._slab.data[self._index]
        row[0, :, :, begin:end].copy_(key_states)
        row[1, :, :, begin:end].copy_(value_states)
        return self._show(end)

    def _show(self, token_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = self._slab.data[self._index]
        self.keys, self.values = row[0, :, :, :token_count], row[1, :, :, :token_count]
        self._storage = self.keys.untyped_storage().data_ptr()
        return self.keys, self.values

    def _is_mine(self) -> bool:
        """Whether ``keys`` is still a view that this layer made, of the slab or of the smaller one before."""
        keys: torch.Tensor | None = self.keys
        if keys is None or keys.shape[0] != 1:
            return False
        return keys.untyped_storage().data_ptr() == self._storage


def _checked_payload(payload: Buffer, namespace: Namespace) -> NDArray[np.uint8]:
    view = memoryview(payload)
    if not view.c_contiguous or view.nbytes != namespace.block_bytes:
        raise PayloadError(
            f"a block of this namespace is {namespace.block_bytes} contiguous bytes {namespace.block_shape} "
            f"{namespace.dtype}; got {view.nbytes} bytes{'' if view.c_contiguous else ', not contiguous'}"
        )
    if view.ndim > 1 and view.shape != namespace.block_shape:
        raise PayloadError(
            f"a block of this namespace has the shape {namespace.block_shape}, got {view.shape}"
        )
    *axes, dim = namespace.block_shape
    bytes_each = namespace.block_bytes // (namespace.layers * 2 * namespace.kv_heads * namespace.block_tokens)
    assert bytes_each % dim == 0
    return np.frombuffer(view, dtype=np.uint8).reshape(*axes, bytes_each)


def _checked_layers(
    cache: Cache, namespace: Namespace, token_count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of each layer, ``[1, kv heads, at least token_count, head dim]`` of the namespace's dtype."""
    if len(cache.layers) != namespace.layers:
        raise PayloadError(f"the cache has {len(cache.layers)} layers, the namespace {namespace.layers}")
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise PayloadError(f"layer {index} ({type(layer).__name__}) holds no K/V")
        for states in (keys, values):
            _check_states(states, index, namespace, int(layer.get_seq_length()), token_count)
        pairs.append((keys, values))
    return pairs


def _check_states(
    states: torch.Tensor, index: int, namespace: Namespace, seen: int, token_count: int
) -> None:
    if states.dtype != _torch_dtype(namespace):
        raise PayloadError(f"layer {index} is {states.dtype}, the namespace {namespace.dtype}")
    batch, heads, held, dim = states.shape
    if (batch, heads, dim) != (1, namespace.kv_heads, namespace.head_dim):
        raise PayloadError(
            f"layer {index} has (batch, kv heads, head dim) = {(batch, heads, dim)}, "
            f"the namespace (1, {namespace.kv_heads}, {namespace.head_dim})"
        )
    if held != seen:
        raise PayloadError(
            f"layer {index} holds {held} rows for {seen} tokens: use a cache that keeps every token, as "
            "cache_from makes"
        )
    if held < token_count:
        raise PayloadError(f"layer {index} holds {held} tokens, the blocks end at {token_count}")


def _copy_on_host(target: torch.Tensor, source: torch.Tensor) -> None:
    np.copyto(_bytes_of(target), _bytes_of(source))


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Like ``torch.empty``; on the host from numpy, which asks for huge pages.

    Writing to fresh memory is what a fetch spends its time on: 90 MB took 50 ms from torch's allocator, 10 ms
    so.
    """
    if device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A byte view whose last axis is ``head_dim`` elements wide; numpy knows neither bfloat16 nor float8."""
    view: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return view


def _torch_dtype(namespace: Namespace) -> torch.dtype:
    dtype = getattr(torch, namespace.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype
