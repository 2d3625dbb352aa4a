"""``python -m kvcomm.chaos.live.agent``: the clients of one host, told by orders on standard input.

It ends with its standard input, so nothing of a story outlives it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvcomm.block import Incarnation
from kvcomm.chaos.keys import state_name, strong_name
from kvcomm.chaos.live.orders import (
    AnyAnswer,
    AnyOrder,
    Begin,
    Done,
    Drop,
    End,
    Failed,
    Look,
    Phase,
    Save,
    Setup,
    States,
    Stored,
    Told,
    decode_order,
    encode,
)
from kvcomm.chaos.observed import LAST, Sample, suspects_of
from kvcomm.errors import KVCommError, Unavailable
from kvcomm.namespace import TenantDigest
from kvcomm.rpc import AsyncPeers, Identity, droptable
from kvcomm.serve import run
from kvcomm.steps import Ask
from kvcomm.wire import messages
from kvcomm.wire.messages import (
    ClusterGet,
    ClusterView,
    Failure,
    Message,
    RecordFetch,
    RecordState,
    RecordStates,
    RingGet,
    RingMap,
)

if TYPE_CHECKING:
    from kvcomm.chaos.live.load import Work

SAMPLE_EVERY_S = 0.25
SAMPLE_TIMEOUT_S = 0.2
ASK_TIMEOUT_S = 2.0
LOOK_TRIES = 8
LOOK_KEYS = 32
LINE_BYTES_MAX = 64 << 20


class Agent:
    """One host's clients and what they are asked to do."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.table = droptable.install()
        connect_timeout_s = setup.connect_timeout_s
        mine, clusters = (_incarnation(setup, number) for number in (1, 2))
        self.peers = AsyncPeers(Identity(setup.token, mine), connect_timeout_s=connect_timeout_s)
        self.nodes = AsyncPeers(Identity(setup.node_token, clusters), connect_timeout_s=connect_timeout_s)
        self.samples: list[Sample] = []
        self._work: Work | None = None
        self._sampling: asyncio.Task[None] | None = None

    @property
    def work(self) -> Work:
        assert self._work is not None, "set up first"
        return self._work

    async def begin(self) -> None:
        """Wait for a ring, and be ready to work."""
        from kvcomm.chaos.live.load import Work
        from l3_shard.tier import L3Tier

        setup = self.setup
        ring, tenant = await self._greet(time.monotonic() + setup.ring_within_s)
        tier = L3Tier(ring, dial=lambda node: node.address, timeout_s=setup.request_timeout_s)
        self._work = Work(setup.node, setup.index, setup.load, tier, self.peers, tenant, setup.seed)

    async def _greet(self, deadline: float) -> tuple[RingMap, TenantDigest]:
        """Shards answer before they have been given a ring."""
        seed = self.setup.seeds[0]
        while True:
            try:
                ring = await self._ask(self.peers, seed, RingGet())
                welcome = await self.peers.welcome(seed, time.monotonic() + ASK_TIMEOUT_S)
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)
            else:
                assert isinstance(ring, RingMap)
                return ring, TenantDigest(welcome.tenant)

    async def obey(self, order: AnyOrder) -> AnyAnswer:
        """Do what is ordered.  Raises ``KVCommError``."""
        work = self.work
        match order:
            case Begin():
                work.begin()
                self._sampling = asyncio.create_task(self._sample_on())
            case Phase():
                work.phase = order.phase
            case Drop():
                self.table.set(order.peers)
            case End():
                await work.end()
            case Look():
                await self._look(order)
            case States():
                return await self._states(order)
            case Told():
                return await self._tell(order)
            case Save():
                await self._save()
            case Setup():
                raise AssertionError("this agent is set up already")
        return Done()

    async def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        await self.peers.close()
        await self.nodes.close()

    async def _ask(
        self, peers: AsyncPeers, address: str, message: Message, timeout_s: float = ASK_TIMEOUT_S
    ) -> Message:
        """Raises ``Unavailable`` for every failure."""
        (request,) = peers.start([Ask(address, message)], time.monotonic() + timeout_s)
        answer = (await request.answer()).message
        if isinstance(answer, Failure):
            raise Unavailable(f"{address}: {answer.code}: {answer.text}")
        return answer

    # -- what is to be seen at last

    async def _look(self, order: Look) -> None:
        """Until it is seen, a few times: whoever answered before the faults ended may be passed over."""
        from kvcomm.chaos.live.load import EventualClient, StrongClient

        node = self.setup.node
        eventual = EventualClient(self.work, f"{node}.{LAST}")
        strong = StrongClient(self.work, f"{node}.s{LAST}")

        async def until_seen(read: Callable[[Sequence[str]], Awaitable[bool]], keys: Sequence[str]) -> None:
            """What cannot be read is the last that was tried: the judge goes by that."""
            for at in range(0, len(keys), LOOK_KEYS):
                for _ in range(LOOK_TRIES):
                    if await read(keys[at : at + LOOK_KEYS]):
                        break
                else:
                    return

        await until_seen(eventual.get, order.eventual)
        await until_seen(lambda keys: strong.read("final", keys), order.strong)

    async def _states(self, order: States) -> Stored:
        from l3_shard.ring import Ring

        missing: dict[str, str] = {}
        rings: list[RingMap] = []

        async def find(node: str, address: str) -> None:
            try:
                ring = await self._ask(self.nodes, address, RingGet(), order.timeout_s)
            except Unavailable as error:
                missing[node] = error.message
            else:
                assert isinstance(ring, RingMap)
                rings.append(ring)

        await asyncio.gather(*(find(*each) for each in order.shards.items()))
        if not rings:
            raise Unavailable(f"no shard answers: {missing}")
        newest = max(rings, key=lambda each: each.epoch)
        ring = Ring.from_map(newest)
        names = {key: state_name(key) for key in order.eventual}
        names |= {key: strong_name(key) for key in order.strong}
        owners = {key: list(ring.replicas(name)) for key, name in names.items()}
        states: dict[str, dict[str, RecordState | None]] = {}

        async def look(node: str, address: str) -> None:
            keys = [key for key in order.eventual if node in owners[key]]
            if not keys:
                states[node] = {}
                return
            stored = [bytes(self.work.tenant) + names[key] for key in keys]
            fetch = RecordFetch(ring.epoch, stored)
            try:
                answer = await self._ask(self.nodes, address, fetch, order.timeout_s)
            except Unavailable as error:
                missing[node] = error.message
            else:
                assert isinstance(answer, RecordStates)
                states[node] = dict(zip(keys, answer.states, strict=True))

        await asyncio.gather(*(look(*each) for each in order.shards.items() if each[0] not in missing))
        quorums = (newest.replicas, newest.write_quorum, newest.read_quorum)
        return Stored(states, owners, missing, quorums)

    async def _tell(self, order: Told) -> Done:
        """The first controller that can say counts."""
        kind: type[Message] = getattr(messages, order.name)
        said: list[str] = []
        for address in order.addresses:
            asks = [Ask(address, kind(**order.fields))]
            (request,) = self.nodes.start(asks, time.monotonic() + order.timeout_s)
            answer = (await request.answer()).message
            if not isinstance(answer, Failure):
                return Done(msgspec.json.encode(answer).decode())
            if answer.code not in ("not_leader", Unavailable.code):
                return Done(f"{answer.code}: {answer.text}", refused=True)
            said.append(f"{address}: {answer.code}: {answer.text}")
        raise Unavailable("; ".join(said))

    # -- what the cluster says of itself

    async def _sample_on(self) -> None:
        while True:
            begin = time.monotonic()
            self.samples.append(await self._sample(begin))
            await asyncio.sleep(max(0.0, SAMPLE_EVERY_S - (time.monotonic() - begin)))

    async def _sample(self, at: float) -> Sample:
        epoch, digest, leader, term, mode = 0, "", "", 0, ""
        suspects: list[str] | None = None
        try:
            ring = await self._ask(self.nodes, self.setup.seeds[0], RingGet(), SAMPLE_TIMEOUT_S)
            assert isinstance(ring, RingMap)
            epoch, digest = ring.epoch, hashlib.sha256(msgspec.msgpack.encode(ring)).hexdigest()[:16]
        except Unavailable:
            pass  # a sample of a node that does not answer says so
        for address in self.setup.controllers[:1]:
            try:
                view = await self._ask(self.nodes, address, ClusterGet(), SAMPLE_TIMEOUT_S)
            except Unavailable:
                continue
            assert isinstance(view, ClusterView)
            leader, term, mode = view.leader, view.term, view.mode
            suspects = suspects_of(view)
        return Sample(at, self.setup.node, epoch, digest, leader, term, mode, self.work.late_s, suspects)

    async def _save(self) -> None:
        history = self.work.history.encoded()
        samples = b"".join(encode(sample) for sample in self.samples)
        await asyncio.to_thread(Path(self.setup.history).write_bytes, history)
        await asyncio.to_thread(Path(self.setup.samples).write_bytes, samples)


def _incarnation(setup: Setup, number: int) -> Incarnation:
    digest = hashlib.sha256(f"{setup.seed}/{setup.node}/{number}".encode()).digest()
    return Incarnation(int.from_bytes(digest[:8]) | 1)


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    first = decode_order(await reader.readline())
    assert isinstance(first, Setup), "an agent is set up first"
    agent = Agent(first)
    try:
        answer: AnyAnswer = Done()
        try:
            await agent.begin()
        except KVCommError as error:
            answer = Failed(error.message)
        _say(answer)
        while line := await reader.readline():
            try:
                answer = await agent.obey(decode_order(line))
            except KVCommError as error:
                answer = Failed(error.message)
            _say(answer)
    finally:
        await agent.close()


def _say(answer: AnyAnswer) -> None:
    sys.stdout.buffer.write(encode(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run(_serve())
