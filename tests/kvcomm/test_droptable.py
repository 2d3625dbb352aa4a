"""A drop table holds back what it should, in the direction that it should, and lets go of it later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kvcomm.block import Incarnation
from kvcomm.credentials import NODE_TENANT, Credentials
from kvcomm.errors import Refused, Unavailable, failure_to_error
from kvcomm.machine import ConnectionId, Origin
from kvcomm.rpc import AsyncPeers, Identity, droptable
from kvcomm.rpc.droptable import OPEN, DropTable, Gate
from kvcomm.serve import DataServer, ReplyFunction
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import DropOrder, DropPeer, Failure, Message, Ping, Pong

CREDENTIALS = Credentials(bytes(32))
CALLER = Incarnation(11)


class Nothing:
    """A service without messages of its own."""

    def welcome(self, origin: Origin) -> tuple[str, int]:
        return "", 0

    def sink(self, origin: Origin, message: Message, payload_bytes: int) -> list[memoryview] | None:
        return None

    def handle(
        self, origin: Origin, message: Message, payload: list[memoryview], reply: ReplyFunction
    ) -> None:
        raise Refused("nothing is served here")

    def closed(self, connection: ConnectionId) -> None:
        pass


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> DropTable:
    monkeypatch.setattr(droptable, "_installed", None)
    return droptable.install()


@asynccontextmanager
async def served(tenant: str = NODE_TENANT) -> AsyncIterator[tuple[AsyncPeers, str]]:
    server = DataServer(
        Nothing(), node="n", role="shard", instance="i", incarnation=Incarnation(5), credentials=CREDENTIALS
    )
    (address,) = await server.start(["tcp://127.0.0.1:0"])
    peers = AsyncPeers(Identity(CREDENTIALS.token(tenant), CALLER), connect_timeout_s=10.0)
    try:
        yield peers, address
    finally:
        await peers.close()
        await server.close()


async def ask(peers: AsyncPeers, address: str, message: Message, within_s: float = 10.0) -> Answer:
    return await peers.start([Ask(address, message)], peers.clock() + within_s)[0].answer()


def outgoing(address: str) -> DropPeer:
    return DropPeer([address], 0, True, False)


def test_a_gate_is_of_a_peer_by_address_and_by_incarnation() -> None:
    table = DropTable()
    table.set([DropPeer(["tcp://a:1", "unix:///a"], 7, True, False), DropPeer(["tcp://b:1"], 0, False, True)])
    assert table.gate("tcp://a:1") == table.gate("unix:///a") == table.gate(7) == Gate(mute=True)
    assert table.gate("tcp://b:1") == Gate(deaf=True)
    assert table.gate(0) == table.gate(None) == table.gate("tcp://c:1") == OPEN
    table.set([])
    assert table.gate(7) == OPEN


@pytest.mark.slow
@pytest.mark.parametrize("peer", [outgoing, lambda a: DropPeer([a], 0, False, True)])
def test_what_a_caller_says_or_hears_waits_until_the_table_is_empty(
    table: DropTable, peer: Callable[[str], DropPeer]
) -> None:
    async def story() -> None:
        async with served() as (peers, address):
            assert (await ask(peers, address, Ping())).message == Pong()
            table.set([peer(address)])
            held = peers.start([Ask(address, Ping())], peers.clock() + 10.0)[0]
            given_up = (await ask(peers, address, Ping(), 0.2)).message
            assert isinstance(given_up, Failure)
            assert held.exchange.answer is None
            table.set([])
            assert (await held.answer()).message == Pong()
            assert (await ask(peers, address, Ping())).message == Pong()

    asyncio.run(story())


@pytest.mark.slow
def test_a_server_that_is_deaf_to_a_caller_welcomes_it_later(table: DropTable) -> None:
    async def story() -> None:
        async with served() as (peers, address):
            table.set([DropPeer([], CALLER, False, True)])
            peers.connect_timeout_s = 0.2
            with pytest.raises(Unavailable):
                await peers.welcome(address, peers.clock() + 10.0)
            peers.connect_timeout_s = 10.0
            greeting = asyncio.create_task(peers.welcome(address, peers.clock() + 10.0))
            done, _ = await asyncio.wait([greeting], timeout=0.1)
            assert not done
            table.set([])
            assert (await greeting).node == "n"

    asyncio.run(story())


@pytest.mark.slow
def test_a_server_that_is_mute_to_a_caller_does_what_it_is_told_and_does_not_answer(table: DropTable) -> None:
    async def story() -> None:
        async with served() as (peers, address):
            assert (await ask(peers, address, Ping())).message == Pong()
            mute = DropOrder([DropPeer([], CALLER, True, False)])
            answer = (await ask(peers, address, mute, 0.2)).message
            assert isinstance(answer, Failure)  # it is held back
            assert table.gate(CALLER) == Gate(mute=True)

    asyncio.run(story())


def test_only_the_clusters_own_token_may_cut(table: DropTable) -> None:
    async def story() -> None:
        async with served("somebody") as (peers, address):
            answer = (await ask(peers, address, DropOrder([outgoing("tcp://a:1")]))).message
            assert isinstance(answer, Failure)
            with pytest.raises(Refused, match="own token"):
                raise failure_to_error(answer.code, answer.text)
            assert table.gate("tcp://a:1") == OPEN

    asyncio.run(story())


def test_a_node_without_a_table_refuses() -> None:
    async def story() -> None:
        async with served() as (peers, address):
            answer = (await ask(peers, address, DropOrder([]))).message
            assert isinstance(answer, Failure)
            assert "network.drop_table" in answer.text

    asyncio.run(story())
