"""The asyncio faces of resolved records.  Same operations, same answers as ``kvcomm.merging``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvcomm.deadline import DEADLINE_S
from kvcomm.mergeplane import Merged
from kvcomm.operations import Operations
from kvcomm.resolvers import Resolver
from kvcomm.resolvers.counter import Entries
from kvcomm.resolvers.extreme import Number
from kvcomm.resolvers.fields import Fields, FieldsDelta
from kvcomm.resolvers.register import Held

if TYPE_CHECKING:
    from kvcomm.aio import AsyncClient

S = TypeVar("S")
D = TypeVar("D")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class _Resolved(Generic[S, D, V]):
    """What all classes have in common."""

    _client: AsyncClient
    _operations: Operations
    _resolver: Resolver[S, D, V]
    name: str

    async def get(self, key: str, *, deadline_s: float = DEADLINE_S) -> Merged[V]:
        """See ``Counter.get``."""
        return (await self.get_many([key], deadline_s=deadline_s))[key]

    async def get_many(self, keys: Sequence[str], *, deadline_s: float = DEADLINE_S) -> dict[str, Merged[V]]:
        """See ``Counter.get_many``."""
        steps = self._operations.merging().get(self._resolver, self.name, keys)
        return dict(zip(keys, await self._client.run(steps, deadline_s), strict=True))

    async def delete(self, key: str, *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Counter.delete``."""
        steps = self._operations.merging().delete(self._resolver, self.name, [key])
        await self._client.run(steps, deadline_s)

    async def keys(self, *, deadline_s: float = DEADLINE_S) -> list[str]:
        """See ``Counter.keys``."""
        return await self._client.run(self._operations.merging().keys(self._resolver, self.name), deadline_s)

    async def _change(self, deltas: Mapping[str, D], deadline_s: float) -> None:
        steps = self._operations.merging().change(self._resolver, self.name, list(deltas.items()))
        await self._client.run(steps, deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncCounter(_Resolved[Entries, int, int]):
    """See ``kvcomm.merging.Counter``."""

    async def add(self, key: str, amount: int = 1, *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Counter.add``."""
        await self.add_many({key: amount}, deadline_s=deadline_s)

    async def add_many(self, amounts: Mapping[str, int], *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Counter.add_many``."""
        await self._change(amounts, deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncElementSet(_Resolved[Fields, FieldsDelta, frozenset[bytes]]):
    """See ``kvcomm.merging.ElementSet``."""

    async def add(self, key: str, *elements: bytes, deadline_s: float = DEADLINE_S) -> None:
        """See ``ElementSet.add``."""
        await self.add_many({key: elements}, deadline_s=deadline_s)

    async def add_many(
        self, elements: Mapping[str, Iterable[bytes]], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """See ``ElementSet.add_many``."""
        deltas = {key: FieldsDelta(dict.fromkeys(each, b"")) for key, each in elements.items()}
        await self._change(deltas, deadline_s)

    async def remove(self, key: str, *elements: bytes, deadline_s: float = DEADLINE_S) -> None:
        """See ``ElementSet.remove``."""
        await self.remove_many({key: elements}, deadline_s=deadline_s)

    async def remove_many(
        self, elements: Mapping[str, Iterable[bytes]], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """See ``ElementSet.remove_many``."""
        await self._change({key: FieldsDelta({}, list(each)) for key, each in elements.items()}, deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncFieldMap(_Resolved[Fields, FieldsDelta, dict[str, bytes]]):
    """See ``kvcomm.merging.FieldMap``."""

    async def put(self, key: str, field: str, value: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """See ``FieldMap.put``."""
        await self.put_many({key: {field: value}}, deadline_s=deadline_s)

    async def put_many(
        self, fields: Mapping[str, Mapping[str, bytes]], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """See ``FieldMap.put_many``."""
        deltas = {
            key: FieldsDelta({field.encode(): value for field, value in each.items()})
            for key, each in fields.items()
        }
        await self._change(deltas, deadline_s)

    async def remove(self, key: str, *fields: str, deadline_s: float = DEADLINE_S) -> None:
        """See ``FieldMap.remove``."""
        await self.remove_many({key: fields}, deadline_s=deadline_s)

    async def remove_many(
        self, fields: Mapping[str, Iterable[str]], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """See ``FieldMap.remove_many``."""
        deltas = {key: FieldsDelta({}, [field.encode() for field in each]) for key, each in fields.items()}
        await self._change(deltas, deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncExtreme(_Resolved[Number, Number, Number | None]):
    """See ``kvcomm.merging.Extreme``."""

    async def offer(self, key: str, number: Number, *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Extreme.offer``."""
        await self.offer_many({key: number}, deadline_s=deadline_s)

    async def offer_many(self, numbers: Mapping[str, Number], *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Extreme.offer_many``."""
        await self._change(numbers, deadline_s)


@dataclass(frozen=True, slots=True)
class AsyncRegister(_Resolved[Held, bytes, bytes | None]):
    """See ``kvcomm.merging.Register``."""

    async def put(self, key: str, value: bytes, *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Register.put``."""
        await self.put_many({key: value}, deadline_s=deadline_s)

    async def put_many(self, items: Mapping[str, bytes], *, deadline_s: float = DEADLINE_S) -> None:
        """See ``Register.put_many``."""
        await self._change(items, deadline_s)
