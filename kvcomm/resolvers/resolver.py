"""``Resolver``: the port of a class of records, and the bytes that all of them share.

A stored value is ``name, 0x01, body``: a value under the wrong name, or of a later layout, is noticed.
Bodies are msgpack with everything sorted, so equal states are equal bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Generic, TypeVar

import msgspec

from kvcomm.clock import Stamp
from kvcomm.errors import Corrupt, Refused, TooLarge
from kvcomm.version import Dot, VersionError, VersionVector

S = TypeVar("S")
D = TypeVar("D")
V = TypeVar("V")

INTEGER_MAX = 2**63 - 1
"""Whole numbers are within ``[-INTEGER_MAX - 1, INTEGER_MAX]``."""

_LAYOUT = b"\x01"
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""The last for bytes that nest without end where a later layout might have one more part."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Moment:
    """When and where a delta is applied."""

    dot: Dot
    """Of the write that will carry the result; no other write ever has it."""
    stamp: Stamp
    seen: VersionVector
    """Everything of this record that the coordinator has seen; without ``dot``."""
    known: VersionVector
    """What the author of the delta had seen: perhaps at another coordinator, and more than ``seen``."""


class Resolver(ABC, Generic[S, D, V]):
    """One class of records: states ``S``, deltas ``D``, shown as ``V``.

    Subclasses say what a state is; :meth:`_merge` must be commutative, associative and idempotent.
    """

    uses_known = True
    """Whether what the author of a delta had seen matters."""
    replaces_known = False
    """Whether a write replaces what its author had seen even where its coordinator has not seen it.  Right
    only if the new state owes nothing to the old one."""

    def __init__(self, name: str, stored: type, delta: type) -> None:
        self.name = name
        self._prefix = name.encode() + _LAYOUT
        self._stored: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(stored)
        self._deltas: msgspec.msgpack.Decoder[D] = msgspec.msgpack.Decoder(delta)

    # -- on bytes

    def join(self, values: Sequence[bytes]) -> bytes:
        """One value that stands for all of ``values``, at least one.

        Raises:
            Corrupt: one of them is no value of this class, or two contradict each other.
        """
        return self._encode(reduce(self._merge, map(self._decode, values)))

    def apply(self, values: Sequence[bytes], delta: bytes, moment: Moment) -> bytes:
        """The join of ``values`` (none: a new record), changed by ``delta``.

        Raises:
            Refused: ``delta`` is not one, or leads to a state that cannot be (``TooLarge``: is too big).
            Corrupt: as :meth:`join`.
        """
        return self._encode(self._change(self._joined(values), self.delta(delta), moment))

    def show(self, values: Sequence[bytes]) -> V:
        """What the join of ``values`` means to a reader; none of them: an absent record.

        Raises:
            Corrupt: as :meth:`join`.
        """
        return self._show(self._joined(values))

    def delta(self, delta: bytes) -> D:
        """Raises ``Refused`` for bytes that are no delta of this class."""
        try:
            decoded = self._deltas.decode(delta)
            self._check_delta(decoded)
        except _UNREADABLE as error:
            raise Refused(f"not a change of a {self.name} record: {error}") from error
        return decoded

    def encode_delta(self, delta: D) -> bytes:
        """The inverse of :meth:`delta`.

        Raises:
            ValueError: it asks for something that cannot be, or is not made of the right types.
        """
        try:
            encoded = _encoder.encode(delta)
            self._check_delta(self._deltas.decode(encoded))
        except (msgspec.MsgspecError, TypeError, OverflowError) as error:
            raise ValueError(f"not a change of a {self.name} record: {error}") from error
        return encoded

    def _joined(self, values: Sequence[bytes]) -> S | None:
        return reduce(self._merge, map(self._decode, values)) if values else None

    def _encode(self, state: S) -> bytes:
        return self._prefix + _encoder.encode(self._store(state))

    def _decode(self, value: bytes) -> S:
        try:
            if not value.startswith(self._prefix):
                raise ValueError("it begins otherwise")
            state = self._load(self._stored.decode(memoryview(value)[len(self._prefix) :]))
            if self._encode(state) != value:
                raise ValueError("it is not in its canonical form")
        except (*_UNREADABLE, VersionError, TooLarge) as error:
            raise Corrupt(f"not the value of a {self.name} record: {error}") from error
        return state

    # -- on states

    @abstractmethod
    def _load(self, stored: object) -> S:
        """From what was decoded.  Raises ``ValueError`` for what no writer stores."""

    @abstractmethod
    def _store(self, state: S) -> object:
        """To what is encoded, sorted."""

    @abstractmethod
    def _merge(self, one: S, two: S) -> S:
        """The least state that has everything of both."""

    @abstractmethod
    def _change(self, state: S | None, delta: D, moment: Moment) -> S: ...

    @abstractmethod
    def _show(self, state: S | None) -> V: ...

    def _check_delta(self, delta: D) -> None:
        """Raises ``ValueError`` for what cannot be, whatever the record holds."""
