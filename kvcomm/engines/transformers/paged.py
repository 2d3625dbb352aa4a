"""``PagedKV``: the K/V memory of an engine, in blocks.

One tensor ``[layer, K or V, block, kv head, token, head dim]``, so that a block's payload (``LKHTD``) is a
slice of it, and so that rows of all layers are written with one indexed copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcomm.block import Buffer
from kvcomm.errors import PayloadError
from kvcomm.namespace import Namespace
from kvcomm.streams.pool import BlockId


class PagedKV:
    """``block_count`` blocks of ``namespace`` on ``device``, all zero.

    ``states`` is the tensor; it belongs to the engine, who reads it whole.
    """

    def __init__(self, namespace: Namespace, block_count: int, device: torch.device) -> None:
        layers, two, heads, tokens, dim = namespace.block_shape
        dtype = getattr(torch, namespace.dtype)
        self.namespace = namespace
        with torch.inference_mode(False):  # written in and outside of it
            shape = (layers, two, block_count, heads, tokens, dim)
            self.states = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows into their places, bit for bit.

        Args:
            blocks: int64 ``[row]``, ``offsets`` the places in them.
            rows: ``[row, layer, K or V, kv head, head dim]``.
        """
        self.states[:, :, blocks, :, offsets] = rows

    def read(self, blocks: torch.Tensor, slot_count: int, target: torch.Tensor) -> None:
        """The first ``slot_count`` rows of ``blocks`` (int64), after each other.

        Args:
            target: ``[layer, K or V, kv head, place, head dim]``, written from place 0 on.
        """
        size = self.namespace.block_tokens
        full = slot_count // size
        for layer, places in zip(self.states, target, strict=True):  # all at once would need a second copy
            taken = layer.index_select(1, blocks)  # [K or V, block, kv head, token, head dim]
            whole = places[:, :, : full * size].unflatten(2, (full, size))
            whole.copy_(taken[:, :full].transpose(1, 2))
            if slot_count % size:
                places[:, :, full * size : slot_count] = taken[:, full, :, : slot_count % size]

    def copy(self, source: Sequence[BlockId], target: Sequence[BlockId]) -> None:
        for before, after in zip(source, target, strict=True):
            self.states[:, :, after].copy_(self.states[:, :, before])

    def payload(self, block: BlockId) -> memoryview:
        """``namespace.block_bytes`` bytes, a copy."""
        states = torch.empty(self.namespace.block_shape, dtype=self.states.dtype)
        states.copy_(self.states[:, :, block])
        return states.view(torch.uint8).numpy().reshape(-1).data.toreadonly()

    def load(self, block: BlockId, payload: Buffer) -> None:
        """Raises ``PayloadError`` if the bytes are not a block of the namespace."""
        view = memoryview(payload)
        if not view.c_contiguous or view.nbytes != self.namespace.block_bytes:
            raise PayloadError(
                f"a block of this namespace is {self.namespace.block_bytes} contiguous bytes, got "
                f"{view.nbytes} bytes{'' if view.c_contiguous else ', not contiguous'}"
            )
        # A copy: torch has no read-only tensors, and a pool's memory is read-only.
        states = torch.frombuffer(bytearray(view), dtype=self.states.dtype)
        self.states[:, :, block].copy_(states.view(self.namespace.block_shape))
