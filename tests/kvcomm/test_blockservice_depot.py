"""Block messages where a slower store lies beneath, and where the cluster's own nodes ask."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

import pytest

from kvcomm import blockservice
from kvcomm.block import BlockKey, Incarnation
from kvcomm.blockservice import BlockService
from kvcomm.credentials import NODE_TENANT
from kvcomm.errors import TooLarge
from kvcomm.rpc import Connection, Identity
from kvcomm.wire.messages import (
    BlockCopies,
    BlockGet,
    BlockLookup,
    BlockPresence,
    BlockPut,
    BlockStored,
    BlockSuspect,
    Done,
    Want,
)
from tests.blockstores import DictDepot, DictStore
from tests.l3_shard.blocks import TENANT, chain
from tests.peers import CREDENTIALS, IDENTITY, Served, served, soon

COPIES = chain(6)
KEYS = list(COPIES)
SIZE = len(COPIES[KEYS[0]])


@pytest.fixture
def depot() -> DictDepot:
    return DictDepot(TENANT)


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def server(store: DictStore, depot: DictDepot) -> Iterator[Served]:
    cluster = CREDENTIALS.tenant_digest(NODE_TENANT)
    with served(BlockService(store, time.monotonic, depot=depot, cluster=cluster)) as running:
        yield running


@pytest.fixture
def connection(server: Served) -> Iterator[Connection]:
    with closing(Connection.open(server.address, IDENTITY, soon())) as opened:
        yield opened


@pytest.fixture
def node(server: Served) -> Iterator[Connection]:
    identity = Identity(CREDENTIALS.token(NODE_TENANT), Incarnation(6))
    with closing(Connection.open(server.address, identity, soon())) as opened:
        yield opened


def put(connection: Connection, *keys: BlockKey) -> BlockStored:
    wants = [Want(key, SIZE) for key in keys]
    message = connection.call(BlockPut(0, wants), [COPIES[key] for key in keys], deadline=soon()).message
    assert isinstance(message, BlockStored)
    return message


def test_what_lies_below_is_present_and_had_in_the_order_asked(
    connection: Connection, depot: DictDepot
) -> None:
    put(connection, KEYS[1], KEYS[4])
    depot.held = {key: COPIES[key] for key in KEYS[:4]}
    depot.lost = {KEYS[2]}
    assert connection.call(BlockLookup(0, [*KEYS]), deadline=soon()).message == BlockPresence(
        bytes([1, 1, 1, 1, 1, 0])
    )
    frame = connection.call(BlockGet(0, [*KEYS]), deadline=soon())
    assert frame.message == BlockCopies([SIZE, SIZE, 0, SIZE, SIZE, 0])
    assert b"".join(frame.payload) == b"".join(COPIES[KEYS[index]] for index in (0, 1, 3, 4))


def test_the_first_copy_wins_also_where_only_the_depot_has_it(
    connection: Connection, store: DictStore, depot: DictDepot
) -> None:
    depot.held = {KEYS[1]: COPIES[KEYS[1]]}
    assert put(connection, *KEYS[:3]).statuses == ["stored", "present", "stored"]
    assert depot.queued == [KEYS[0], KEYS[2]] and KEYS[1] not in store.copies


def test_a_report_of_damage_reaches_both(connection: Connection, depot: DictDepot) -> None:
    assert connection.call(BlockSuspect([*KEYS[:2]]), deadline=soon()).message == Done()
    assert depot.suspected == KEYS[:2]


def test_too_many_bytes_from_below_are_refused_and_leases_given_back(
    connection: Connection, store: DictStore, depot: DictDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockservice, "BATCH_BYTES_MAX", 3 * SIZE - 1)
    depot.held = dict(list(COPIES.items())[:2])
    put(connection, KEYS[4])
    with pytest.raises(TooLarge, match="ask for fewer"):
        connection.call(BlockGet(0, [KEYS[0], KEYS[1], KEYS[4]]), deadline=soon())
    assert store.copies[KEYS[4]].leases == 0


def test_the_cluster_s_own_nodes_see_every_tenant_s_blocks_and_leave_no_mark(
    connection: Connection, node: Connection, store: DictStore, depot: DictDepot
) -> None:
    put(connection, *KEYS[:2])
    depot.held = {KEYS[3]: COPIES[KEYS[3]]}
    assert node.call(BlockLookup(0, [*KEYS[:4]]), deadline=soon()).message == BlockPresence(
        bytes([1, 1, 0, 1])
    )
    frame = node.call(BlockGet(0, [*KEYS[:4]]), deadline=soon())
    assert frame.message == BlockCopies([SIZE, SIZE, 0, SIZE])
    assert store.used(KEYS[:2]) == [False, False]
    connection.call(BlockGet(0, [*KEYS[:1]]), deadline=soon())
    connection.call(BlockGet(0, [KEYS[3]]), deadline=soon())
    assert store.used(KEYS[:2]) == [True, False] and depot.uses == [False, True]


def test_what_reading_from_below_evicts_is_still_sent(
    connection: Connection, store: DictStore, depot: DictDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, KEYS[1])
    depot.held = {KEYS[0]: COPIES[KEYS[0]]}
    read = depot.recall

    def evicting(
        keys: Sequence[BlockKey],
        tenant: bytes,
        done: Callable[[Mapping[BlockKey, memoryview]], None],
        *,
        use: bool,
    ) -> None:
        assert store.copies.pop(KEYS[1]).leases == 1
        read(keys, tenant, done, use=use)

    monkeypatch.setattr(depot, "recall", evicting)
    frame = connection.call(BlockGet(0, [*KEYS[:2]]), deadline=soon())
    assert b"".join(frame.payload) == COPIES[KEYS[0]] + COPIES[KEYS[1]]
