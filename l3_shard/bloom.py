"""``LayeredBloom``: a set of keys that never calls a member absent and grows without losing its error bound.

Scalable Bloom filters (Almeida, Baquero, Preguiça, Hutchison 2007): when a layer holds as many keys as it was
sized for, a layer of twice the size and half the error rate goes on top.  A key is present if any layer says
so, hence the compound rate is below ``rate * SHARE * (1/2 + 1/4 + ...)``, however many layers there are.
Over-filling one plain filter twofold takes its rate from 0.1 % to 3 %.

Keys are hashed by 128-bit MurmurHash3, which is the same in every process; the layers derive their bits from
that one number.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mmh3 import hash128

from kvcomm.errors import ConfigError

if TYPE_CHECKING:
    from rbloom import Bloom

# The library is imported where a filter is made: most processes never have one.

GROWTH = 2
TIGHTENING = 0.5
HASHES_MAX = 64
_HASHES = struct.Struct("<Q")
SHARE = 0.8
"""Part of the rate that the layers are given.  The rest covers that real filters deviate from the formula of
their size, and costs half a bit a key."""


class Layers:
    """Layers of filters that were made elsewhere, to look keys up in.

    Raises:
        ValueError: these bytes are no filter's.
    """

    __slots__ = ("_layers",)

    def __init__(self, layers: Iterable[bytes]) -> None:
        self._layers = [_loaded(layer) for layer in layers]

    def __contains__(self, key: bytes) -> bool:
        """False = in none of them."""
        digest = hash128(key, signed=True)
        return any(digest in layer for layer in self._layers)


def _loaded(layer: bytes) -> Bloom:
    """The library trusts what it reads: the number of hash functions, then the bits."""
    if len(layer) <= _HASHES.size or not 1 <= _HASHES.unpack_from(layer)[0] <= HASHES_MAX:
        raise ValueError("not a filter")
    from rbloom import Bloom

    return Bloom.load_bytes(layer, operator.index)


class LayeredBloom:
    """Keys that were added, and few others.  Not thread-safe; keys cannot be taken out.

    Args:
        capacity: keys the first layer is sized for.
        rate: bound on the share of absent keys that are called present.
        keys_max: a bound on the memory, about 4 bytes a key.  One key more and the filter is *saturated*: it
            frees its layers and calls every key present, which is useless and never wrong.

    Raises:
        ConfigError: a size or rate that no filter can have.
    """

    __slots__ = ("_layers", "_room", "capacity", "key_count", "keys_max", "rate", "saturated")

    def __init__(self, capacity: int, rate: float = 0.001, *, keys_max: int = 1 << 24) -> None:
        if not 1 <= capacity <= keys_max or not 0.0 < rate < 1.0:
            raise ConfigError(
                f"Bloom filter: capacity {capacity} must be in [1, {keys_max}] and rate {rate} in (0, 1)"
            )
        self.capacity = capacity
        self.rate = rate
        self.keys_max = keys_max
        self.key_count = 0
        """Keys that set bits; one that was called present already needs none."""
        self.saturated = False
        self._layers: list[Bloom] = []
        self._room = 0  # keys that the last layer still takes

    def add(self, key: bytes) -> None:
        if key in self:
            return
        if self.key_count == self.keys_max:
            self.saturated = True
            self._layers.clear()
            return
        if self._room == 0:
            self._grow()
        self._layers[-1].add(hash128(key, signed=True))
        self.key_count += 1
        self._room -= 1

    def __contains__(self, key: bytes) -> bool:
        """False = certainly never added."""
        if self.saturated:
            return True
        digest = hash128(key, signed=True)
        return any(digest in layer for layer in reversed(self._layers))  # the last layer holds the most keys

    def to_layers(self) -> list[bytes]:
        """The layers, to be sent; a saturated filter has none.  See :class:`Layers`."""
        return [layer.save_bytes() for layer in self._layers]

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_in_bits for layer in self._layers) // 8

    def _grow(self) -> None:
        from rbloom import Bloom

        depth = len(self._layers)
        self._room = self.capacity * GROWTH**depth
        rate = self.rate * SHARE * (1.0 - TIGHTENING) * TIGHTENING**depth
        self._layers.append(Bloom(self._room, rate, operator.index))
