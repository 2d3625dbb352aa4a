"""``Work``: what the clients of one host do, and the history of it.

Kinds of calls, all with values that are written once:

* *eventual*: put with the context last seen, blind put, delete, get; some keys are shared by all clients of
  all hosts, some belong to one client;
* *strong*: read, set, compare-and-set of shared registers;
* *blocks*: publish a short chain of blocks whose bytes follow from their name, fetch one that this host has
  published, and compare every byte.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for
from kvcomm.chaos.history import (
    History,
    Invoked,
    Outcome,
    Returned,
    Seen,
    Write,
    outcome_of,
    outcome_of_each,
    seen_of,
    stored_in_part,
    stored_of,
)
from kvcomm.chaos.keys import clients_of, own_keys, registers, shared_keys, state_name, strong_name
from kvcomm.chaos.observed import HIT, MISS, UNTYPED, WRONG
from kvcomm.chaos.witness import Witness
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.metrics import Metrics
from kvcomm.namespace import Namespace, TenantDigest
from kvcomm.rpc import AsyncPeers, run_async
from kvcomm.stateplane import StatePlane, StateValue
from kvcomm.steps import Steps
from kvcomm.strongplane import NO_VERSION, StrongConflict, StrongPlane, StrongValue
from kvcomm.tally import Tally
from kvcomm.tier import Block, BlockCopy
from kvcomm.wire.messages import Dots

if TYPE_CHECKING:
    from kvcomm.chaos.scenario import Load
    from l3_shard.tier import L3Tier

OPERATIONS_MAX = 10_000_000
"""Of one host: its numbers of operations are its own."""
GENERATION_S = 4.0
"""Registers are used for so long."""
CHAIN_BLOCKS = 2
PUBLISHED_MAX = 64
"""Chains that a client still fetches."""


def chaos_namespace(tenant: TenantDigest) -> Namespace:
    """Of a model that does not exist; blocks of 16 KiB."""
    return Namespace(
        model="chaos", revision="1", tokenizer="1", vocab_size=65_536, dtype="float16", layout="LKHTD",
        layers=2, kv_heads=2, head_dim=64, block_tokens=16, rope="none", rope_parameters={},
    ).for_tenant(tenant)  # fmt: skip


class Work:
    """Clients of ``node``, all through one tier, as the agents of one process have it."""

    def __init__(
        self,
        node: str,
        index: int,
        load: Load,
        tier: L3Tier,
        peers: AsyncPeers,
        tenant: TenantDigest,
        seed: int,
    ) -> None:
        self.history = History()
        self.phase = 0
        self.late_s = 0.0
        """The longest that this process was late by itself."""
        self.node, self.load, self.tier, self.peers, self.tenant = node, load, tier, peers, tenant
        self.random = random.Random(f"{seed}/{node}")
        self._numbers = count(index * OPERATIONS_MAX)
        self._namespace = chaos_namespace(tenant)
        self._began = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()

    def begin(self) -> None:
        for name in clients_of(self.node, "eventual", self.load.eventual):
            self._keep_on(EventualClient(self, name).act)
        for name in clients_of(self.node, "strong", self.load.strong):
            self._keep_on(StrongClient(self, name).act)
        for name in clients_of(self.node, "blocks", self.load.blocks):
            self._keep_on(BlockClient(self, name, self._namespace).act)
        self._tasks.append(asyncio.create_task(self._watch_myself()))

    async def end(self) -> None:
        """Let every call come to its end."""
        self._over.set()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()

    @property
    def generation(self) -> int:
        return int((time.monotonic() - self._began) / GENERATION_S)

    async def call(
        self,
        invoked: Invoked,
        steps: Steps[Any],
        returned: Callable[[Any], Returned],
        raised: Callable[[Returned, KVCommError], Returned] = lambda line, error: line,
    ) -> bool:
        """Run one operation and write down what came of it; whether it was done."""
        self.history.add(invoked)
        try:
            result = await run_async(steps, self.peers, invoked.at + self.load.deadline_s)
        except KVCommError as error:
            stored = [stored_in_part(one) for one in error.outcomes]
            line = Returned(
                time.monotonic(), invoked.client, invoked.operation, outcome_of(error),
                error=f"{error.code}: {error.message}", stored=stored, each=outcome_of_each(error),
            )  # fmt: skip
            self.history.add(raised(line, error))
            return False
        except Exception as error:  # the judge condemns it; the other clients go on
            at, text = time.monotonic(), f"{UNTYPED}: {error!r}"
            self.history.add(Returned(at, invoked.client, invoked.operation, "unknown", error=text))
            return False
        self.history.add(returned(result))
        return True

    def invoked(self, client: str, kind: str, keys: Sequence[str], writes: Sequence[Write] = ()) -> Invoked:
        return Invoked(time.monotonic(), client, next(self._numbers), kind, list(keys), list(writes))

    def _keep_on(self, act: Callable[[], Any]) -> None:
        self._tasks.append(asyncio.create_task(self._keep(act)))

    async def _keep(self, act: Callable[[], Any]) -> None:
        pace_s = self.load.pace_s
        await asyncio.sleep(self.random.uniform(0, pace_s))
        while not self._over.is_set():
            await act()
            await asyncio.sleep(self.random.uniform(0.5 * pace_s, 1.5 * pace_s))

    async def _watch_myself(self) -> None:
        while not self._over.is_set():
            before = time.monotonic()
            await asyncio.sleep(0.05)
            self.late_s = max(self.late_s, time.monotonic() - before - 0.05)


class EventualClient:
    """Puts, deletes and gets, with the memory that one ``StatePlane`` has."""

    def __init__(self, work: Work, name: str) -> None:
        self.work, self.name = work, name
        self.records = Witness(work.tier)
        self._plane = StatePlane(self.records, Tally(Metrics("client"), time.monotonic))
        self._values = count()

    async def act(self) -> None:
        work, draw = self.work, self.work.random
        own = draw.random() < 0.5
        keys = (
            own_keys(work.phase, self.name, work.load.keys)
            if own
            else shared_keys(work.phase, work.load.keys)
        )
        key, at = draw.choice(keys), draw.random()
        if at < 0.4:
            await self.get([key])
            return
        kind = "delete" if at > 0.95 else "blind" if at > 0.9 and not own else "put"
        value = None if kind == "delete" else f"{self.name}/{next(self._values)}"
        await self._put(kind, Write(key, value, blind=kind == "blind"))

    async def get(self, keys: Sequence[str]) -> bool:
        invoked = self.work.invoked(self.name, "get", keys)

        def returned(values: list[StateValue]) -> Returned:
            seen = [seen_of(value) for value in values]
            return Returned(time.monotonic(), self.name, invoked.operation, "ok", seen=seen)

        return await self.work.call(invoked, self._plane.get([state_name(key) for key in keys]), returned)

    async def _put(self, kind: str, write: Write) -> None:
        invoked = self.work.invoked(self.name, kind, [write.key], [write])
        value = None if write.value is None else write.value.encode()
        context: Dots | None = {} if write.blind else None

        def returned(result: object) -> Returned:
            stored = [stored_of(version) for version in self.records.versions]
            return Returned(time.monotonic(), self.name, invoked.operation, "ok", stored=stored)

        await self.work.call(invoked, self._plane.put([(state_name(write.key), value, context)]), returned)


class StrongClient:
    """Reads, sets and compare-and-sets of registers that all hosts share."""

    def __init__(self, work: Work, name: str) -> None:
        self.work, self.name = work, name
        tally = Tally(Metrics("client"), time.monotonic)
        self._plane = StrongPlane(work.tier, tally, random.random)
        self._values = count()
        self._known: dict[str, StrongValue] = {}

    async def act(self) -> None:
        work, draw = self.work, self.work.random
        key = draw.choice(registers(work.phase, work.generation, work.load.keys))
        at = draw.random()
        if at < 0.4:
            await self.read("read", [key])
        else:
            await self._change("cas" if at > 0.7 else "set", key)

    async def read(self, kind: str, keys: Sequence[str]) -> bool:
        invoked = self.work.invoked(self.name, kind, keys)

        def returned(values: list[StrongValue]) -> Returned:
            self._known.update(zip(keys, values, strict=True))
            version = values[0].version.hex() if len(keys) == 1 else ""
            seen = [_strong_seen(value) for value in values]
            return Returned(time.monotonic(), self.name, invoked.operation, "ok", seen=seen, version=version)

        return await self.work.call(invoked, self._plane.read([strong_name(key) for key in keys]), returned)

    async def _change(self, kind: str, key: str) -> None:
        value, name = f"{self.name}/{next(self._values)}", strong_name(key)
        known = self._known.pop(key, StrongValue(None, NO_VERSION))
        write = Write(key, value, expected=None if known.value is None else known.value.decode())
        invoked = self.work.invoked(self.name, kind, [key], [write])
        expected = NO_VERSION if known.value is None else known.version

        def returned(result: StrongValue) -> Returned:
            self._known[key] = result
            version = result.version.hex()
            return Returned(time.monotonic(), self.name, invoked.operation, "ok", version=version)

        def raised(line: Returned, error: KVCommError) -> Returned:
            if not isinstance(error, StrongConflict):
                return line
            found = self._known[key] = error.found
            return Returned(
                line.at, line.client, line.operation, line.outcome, line.error,
                seen=[_strong_seen(found)], version=found.version.hex(),
            )  # fmt: skip

        steps = (
            self._plane.compare_and_set(name, expected, value.encode())
            if kind == "cas"
            else self._plane.put(name, value.encode())
        )
        await self.work.call(invoked, steps, returned, raised)


@dataclass(frozen=True, slots=True)
class Chain:
    """A few blocks, and the bytes that each must have."""

    name: str
    keys: tuple[BlockKey, ...]
    payloads: tuple[bytes, ...]


class BlockClient:
    """Publishes chains of blocks and fetches those that it has published.  A lost block is a miss."""

    def __init__(self, work: Work, name: str, namespace: Namespace) -> None:
        self.work, self.name, self._namespace = work, name, namespace
        self._numbers = count()
        self._published: list[Chain] = []

    async def act(self) -> None:
        if not self._published or self.work.random.random() < 0.4:
            await self._publish(self._chain(next(self._numbers)))
        else:
            await self._fetch(self.work.random.choice(self._published))

    def _chain(self, number: int) -> Chain:
        name = f"{self.name}/{number}"
        content, size = random.Random(name), self._namespace.block_bytes
        tokens = [content.randrange(self._namespace.vocab_size) for _ in range(16 * CHAIN_BLOCKS)]
        payloads = tuple(content.randbytes(size) for _ in range(CHAIN_BLOCKS))
        return Chain(name, tuple(block_keys(self._namespace, tokens)), payloads)

    async def _publish(self, chain: Chain) -> None:
        invoked = self.work.invoked(self.name, "publish", [chain.name])

        def returned(statuses: Sequence[str]) -> Returned:
            """Refused, if not one block was stored: that is a value of the operation, and nothing lost."""
            stored = [status in ("stored", "present") for status in statuses]
            if any(stored):
                self._published = [*self._published, chain][-PUBLISHED_MAX:]
            outcome: Outcome = "ok" if all(stored) else "refused"
            error = "" if all(stored) else f"{Unavailable.code}: {', '.join(statuses)}"
            return Returned(time.monotonic(), self.name, invoked.operation, outcome, error)

        copies = [self._copy(chain, index) for index in range(len(chain.keys))]
        await self.work.call(invoked, self.work.tier.put(copies), returned)

    def _copy(self, chain: Chain, index: int) -> BlockCopy:
        payload = memoryview(chain.payloads[index])
        parent = chain.keys[index - 1] if index else NO_PARENT
        header = header_for(
            self._namespace, chain.keys[index], parent, payload,
            logical_start=16 * index, producer=Incarnation(1),
        )  # fmt: skip
        return BlockCopy(header, payload)

    async def _fetch(self, chain: Chain) -> None:
        invoked = self.work.invoked(self.name, "fetch", [chain.name])
        found: dict[int, Block] = {}

        def returned(_: object) -> Returned:
            wrong = [index for index, block in found.items() if bytes(block.payload) != chain.payloads[index]]
            seen = WRONG if wrong else HIT if len(found) == len(chain.keys) else MISS
            lines = [Seen([seen], {}, degraded=seen != HIT)]
            return Returned(time.monotonic(), self.name, invoked.operation, "ok", seen=lines)

        await self.work.call(invoked, self.work.tier.get(chain.keys, partial(found.__setitem__)), returned)


def _strong_seen(value: StrongValue) -> Seen:
    return Seen([] if value.value is None else [value.value.decode()], {}, False)
