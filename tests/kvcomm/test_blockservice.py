"""Block messages over real sockets, served from a store of the port ``BlockStore``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from kvcomm import blockservice
from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for
from kvcomm.blockservice import BlockService
from kvcomm.errors import Refused, TooLarge, Unavailable
from kvcomm.rpc import Connection, Identity
from kvcomm.steps import Ask
from kvcomm.wire.frames import encode_frame
from kvcomm.wire.messages import (
    KEYS_MAX,
    SUSPECTS_MAX,
    BlockAbort,
    BlockCopies,
    BlockGet,
    BlockItem,
    BlockList,
    BlockListed,
    BlockLookup,
    BlockPresence,
    BlockPublish,
    BlockPublished,
    BlockPut,
    BlockReserve,
    BlockReserved,
    BlockStored,
    BlockSuspect,
    ChannelAsk,
    ChannelOffer,
    ChannelOffers,
    ChannelOpen,
    ChannelOpened,
    Done,
    Grant,
    Message,
    PinOpen,
    PinRange,
    RecordScan,
    RingGet,
    Want,
)
from tests.blockstores import DictLease, DictStore
from tests.namespaces import namespace
from tests.peers import CREDENTIALS, IDENTITY, Served, served, soon, until

NAMESPACE = namespace(head_dim=256, layers=4).for_tenant(CREDENTIALS.tenant_digest("acme"))


def make_copies(count: int) -> dict[BlockKey, bytes]:
    """Whole copies, ``header | payload``, of a chain of blocks with random payloads."""
    keys = block_keys(NAMESPACE, range(count * NAMESPACE.block_tokens))
    copies, parent = {}, NO_PARENT
    for index, key in enumerate(keys):
        payload = os.urandom(NAMESPACE.block_bytes)
        header = header_for(
            NAMESPACE, key, parent, memoryview(payload), logical_start=16 * index, producer=Incarnation(5)
        )
        copies[key] = header.pack() + payload
        parent = key
    return copies


COPIES = make_copies(6)
KEYS: list[BlockKey] = list(COPIES)
ABSENT = BlockKey(b"\xff" * 32)
COPY_BYTES = len(COPIES[KEYS[0]])


def wants(*keys: bytes, copy_bytes: int = COPY_BYTES) -> list[Want]:
    return [Want(key, copy_bytes) for key in keys]


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def server(store: DictStore) -> Iterator[Served]:
    with served(
        BlockService(store, time.monotonic, region=lambda tenant: "/r/" + tenant.hex(), epoch=lambda: 9)
    ) as s:
        yield s


@pytest.fixture
def connection(server: Served) -> Iterator[Connection]:
    with closing(Connection.open(server.address, IDENTITY, soon())) as opened:
        yield opened


def call(connection: Connection, message: Message, payload: list[bytes] | None = None) -> Message:
    return connection.call(message, payload or [], deadline=soon()).message


def put(connection: Connection, *keys: BlockKey) -> Message:
    return call(connection, BlockPut(0, wants(*keys)), [COPIES[key] for key in keys])


def test_welcome_names_the_tenant_s_region_and_the_epoch(connection: Connection) -> None:
    assert connection.welcome.region == "/r/" + CREDENTIALS.tenant_digest("acme").hex()
    assert connection.welcome.epoch == 9


def test_put_is_received_in_place_and_get_sends_it_back(connection: Connection, store: DictStore) -> None:
    assert put(connection, *KEYS[:3]) == BlockStored(["stored"] * 3)
    assert {key: bytes(copy.buffer) for key, copy in store.copies.items()} == {k: COPIES[k] for k in KEYS[:3]}
    frame = connection.call(BlockGet(0, [KEYS[2], ABSENT, KEYS[0]]), deadline=soon())
    assert frame.message == BlockCopies([COPY_BYTES, 0, COPY_BYTES])
    assert b"".join(frame.payload) == COPIES[KEYS[2]] + COPIES[KEYS[0]]


def test_leases_are_held_until_the_bytes_have_left_and_no_longer(
    connection: Connection, store: DictStore
) -> None:
    put(connection, *KEYS)
    connection.call(BlockGet(0, [*KEYS]), deadline=soon())
    until(lambda: all(copy.leases == 0 for copy in store.copies.values()))
    assert store.usage().pinned_bytes == 0


def test_a_lease_does_not_outlive_a_reader_that_vanishes(server: Served, store: DictStore) -> None:
    with closing(Connection.open(server.address, IDENTITY, soon())) as writer:
        put(writer, KEYS[0])
    copy = replace(store.copies[KEYS[0]], buffer=bytearray(32 << 20))  # more than the sockets take
    store.copies[KEYS[0]] = copy
    reader = Connection.open(server.address, IDENTITY, soon())
    reader._operation._submit([Ask(server.address, BlockGet(0, [KEYS[0]]))])
    until(lambda: copy.leases == 1)
    reader.close()
    until(lambda: copy.leases == 0)


def test_the_first_copy_wins_and_the_second_is_thrown_away(connection: Connection, store: DictStore) -> None:
    put(connection, KEYS[1])
    assert put(connection, KEYS[0], KEYS[1], KEYS[2]) == BlockStored(["stored", "present", "stored"])
    assert bytes(store.copies[KEYS[2]].buffer) == COPIES[KEYS[2]]


def test_a_batch_that_does_not_fit_stores_what_does(connection: Connection, store: DictStore) -> None:
    store.capacity_bytes = 2 * COPY_BYTES
    store.copy_bytes_max = COPY_BYTES
    big = bytes(COPY_BYTES + 1)
    message = BlockPut(0, [*wants(KEYS[0]), *wants(KEYS[5], copy_bytes=len(big)), *wants(KEYS[1], KEYS[2])])
    statuses = call(connection, message, [COPIES[KEYS[0]], big, COPIES[KEYS[1]], COPIES[KEYS[2]]])
    assert statuses == BlockStored(["stored", "too_large", "stored", "full"])
    assert sorted(store.copies) == sorted(KEYS[:2])


def test_damaged_bytes_are_not_stored(connection: Connection, store: DictStore) -> None:
    damaged = bytearray(COPIES[KEYS[0]])
    damaged[-1] ^= 1
    statuses = call(connection, BlockPut(0, wants(*KEYS[:2])), [bytes(damaged), COPIES[KEYS[1]]])
    assert statuses == BlockStored(["corrupt", "stored"])
    assert put(connection, KEYS[0]) == BlockStored(["stored"])


def test_a_put_that_lost_its_reservation_says_so(store: DictStore) -> None:
    now = [0.0]
    with (
        served(BlockService(store, lambda: now[0], region=lambda tenant: "/r")) as server,
        closing(Connection.open(server.address, IDENTITY, soon())) as connection,
    ):
        [grant] = call(connection, BlockReserve(wants(KEYS[0]))).grants  # type: ignore[attr-defined]
        now[0] = 60.0
        assert call(connection, BlockPublish([grant.token])) == BlockPublished(["expired"])
        assert put(connection, KEYS[0]) == BlockStored(["stored"])


def test_a_writer_that_dies_inside_a_put_leaves_the_key_writable(
    server: Served, store: DictStore, connection: Connection
) -> None:
    dying = Connection.open(server.address, IDENTITY, soon())
    whole = b"".join(encode_frame(1, BlockPut(0, wants(*KEYS[:2])), [COPIES[key] for key in KEYS[:2]]))
    dying._operation._links[server.address]._socket.sendall(whole[: COPY_BYTES + 1_000])
    until(lambda: len(store.reserved) == 2)
    assert put(connection, KEYS[0]) == BlockStored(["pending"])
    dying.close()
    until(lambda: not store.reserved)
    assert put(connection, *KEYS[:2]) == BlockStored(["stored"] * 2)


def test_a_put_whose_payload_is_not_what_it_names_reserves_nothing(
    connection: Connection, store: DictStore
) -> None:
    with pytest.raises(Refused, match="not as long as"):
        call(connection, BlockPut(0, wants(*KEYS[:2])), [COPIES[KEYS[0]]])
    with pytest.raises(Refused, match="without copies"):
        call(connection, BlockPut(0, wants(KEYS[0])))
    with pytest.raises(Refused, match="takes no payload"):
        call(connection, RingGet(), [b"x"])
    with pytest.raises(Refused, match="at least its header"):
        call(connection, BlockPut(0, wants(KEYS[0], copy_bytes=200)), [bytes(200)])
    assert (store.reserved, store.copies) == ({}, {})
    assert put(connection, KEYS[0]) == BlockStored(["stored"])


def test_one_sided_writes_go_through_a_reservation(connection: Connection, store: DictStore) -> None:
    reserved = call(connection, BlockReserve(wants(*KEYS[:2])))
    assert reserved == BlockReserved([Grant("granted", 1, 0, 1), Grant("granted", 2, 0, 2)])
    assert call(connection, BlockReserve(wants(KEYS[0]))) == BlockReserved([Grant("pending")])
    store.extent(1)[:] = COPIES[KEYS[0]]
    assert call(connection, BlockAbort([2])) == Done()
    assert call(connection, BlockPublish([1, 2])) == BlockPublished(["published", "expired"])
    assert call(connection, BlockLookup(0, [*KEYS[:3]])) == BlockPresence(b"\x01\x00\x00")


def test_reservations_belong_to_their_connection(
    server: Served, store: DictStore, connection: Connection
) -> None:
    with closing(Connection.open(server.address, IDENTITY, soon())) as other:
        [grant] = call(other, BlockReserve(wants(KEYS[0]))).grants  # type: ignore[attr-defined]
        assert call(connection, BlockPublish([grant.token])) == BlockPublished(["expired"])
        call(connection, BlockAbort([grant.token]))
        assert grant.token in store.reserved
    until(lambda: not store.reserved)
    assert len(store.released) == 1


def test_tenants_do_not_see_each_other(server: Served, connection: Connection) -> None:
    put(connection, KEYS[0])
    stranger = Identity(CREDENTIALS.token("globex"), Incarnation(8))
    with closing(Connection.open(server.address, stranger, soon())) as other:
        assert call(other, BlockGet(0, [KEYS[0]])) == BlockCopies([0])
        assert call(other, BlockLookup(0, [KEYS[0]])) == BlockPresence(b"\x00")
        assert call(other, BlockList(b"", 10)) == BlockListed([])
        # A tenant's bytes carry its digest: nobody can publish them as another tenant.
        assert put(other, KEYS[1]) == BlockStored(["corrupt"])


def test_listing_goes_on_where_it_stopped(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockservice, "LIST_MAX", 4)
    put(connection, *KEYS)
    items = [BlockItem(key, COPY_BYTES) for key in sorted(KEYS)]
    assert call(connection, BlockList(b"", 2)) == BlockListed(items[:2])
    assert call(connection, BlockList(items[1].key, 99)) == BlockListed(items[2:])
    assert call(connection, BlockList(b"", 99)) == BlockListed(items[:4])
    assert call(connection, BlockList(b"", -1)) == BlockListed([])


def test_pins_are_opened_for_the_connection(connection: Connection) -> None:
    assert call(connection, PinOpen(3)) == PinRange(100, 3, 1 << 20)


def test_requests_are_bounded(
    connection: Connection, store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, *KEYS)
    with pytest.raises(TooLarge, match="split the batch"):
        call(connection, BlockLookup(0, [KEYS[0]] * (KEYS_MAX + 1)))
    with pytest.raises(Refused, match="32 bytes"):
        call(connection, BlockGet(0, [b"short"]))
    monkeypatch.setattr(blockservice, "BATCH_BYTES_MAX", 3 * COPY_BYTES)
    with pytest.raises(TooLarge, match="ask for fewer"):
        call(connection, BlockGet(0, [*KEYS]))
    assert all(copy.leases == 0 for copy in store.copies.values())


def test_copies_are_made_when_they_are_sent_and_not_for_a_refusal(
    connection: Connection, store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they come from a GPU, each takes memory of this process."""
    put(connection, *KEYS)

    def failed(lease: DictLease) -> memoryview:
        raise Unavailable("the GPU failed")

    monkeypatch.setattr(DictLease, "copy", property(failed))
    with pytest.raises(Unavailable, match="the GPU failed"):
        call(connection, BlockGet(0, [*KEYS]))
    monkeypatch.setattr(blockservice, "BATCH_BYTES_MAX", 3 * COPY_BYTES)
    with pytest.raises(TooLarge, match="ask for fewer"):
        call(connection, BlockGet(0, [*KEYS]))
    assert all(copy.leases == 0 for copy in store.copies.values())


def test_tokens_are_bounded_too(connection: Connection) -> None:
    for message in (BlockPublish([1] * (KEYS_MAX + 1)), BlockAbort([1] * (KEYS_MAX + 1))):
        with pytest.raises(TooLarge, match="split the batch"):
            call(connection, message)


def test_one_sided_work_is_for_those_who_have_the_region(store: DictStore) -> None:
    """A few bytes of ``BlockReserve`` would empty a server for a caller who cannot even write there."""
    with (
        served(BlockService(store, time.monotonic)) as server,
        closing(Connection.open(server.address, IDENTITY, soon())) as connection,
    ):
        for message in (BlockReserve(wants(KEYS[0])), PinOpen(3)):
            with pytest.raises(Refused, match="not shared with this tenant"):
                call(connection, message)
        assert store.reserved == {}
        assert put(connection, KEYS[0]) == BlockStored(["stored"])


def test_a_suspected_copy_is_verified_here_and_hidden_if_it_is_damaged(
    server: Served, connection: Connection, store: DictStore
) -> None:
    put(connection, *KEYS[:3])
    store.copies[KEYS[0]].buffer[-1] ^= 1
    stranger = Identity(CREDENTIALS.token("globex"), Incarnation(8))
    with closing(Connection.open(server.address, stranger, soon())) as other:
        assert call(other, BlockSuspect([KEYS[0]])) == Done()
        assert KEYS[0] in store.copies, "not theirs to speak of"
    for _ in range(2):
        assert call(connection, BlockSuspect([KEYS[0], KEYS[1], ABSENT])) == Done()
        assert sorted(store.copies) == sorted(KEYS[1:3])
    assert put(connection, KEYS[0]) == BlockStored(["stored"])
    with pytest.raises(TooLarge, match="over 64"):
        call(connection, BlockSuspect([KEYS[0]] * (SUSPECTS_MAX + 1)))


def test_other_messages_are_refused_by_name(connection: Connection, server: Served) -> None:
    with pytest.raises(Refused, match="does not answer RecordScan"):
        call(connection, RecordScan(b"", b"", 1))
    service = server.service
    assert isinstance(service, BlockService)
    assert service.answers(BlockGet(0, []))
    assert service.answers(PinOpen(1))
    assert not service.answers(RingGet())


# -- one-sided channels


class Ways:
    """``Channels``: a holder that proposes ``write`` writes unseen."""

    def __init__(self, store: DictStore) -> None:
        self._store = store
        self.before: list[tuple[list[int], set[int]]] = []
        """What the store had released, and who wrote unseen, when a holder's channels were closed."""
        self.opened: list[tuple[int, bytes, str, bytes]] = []
        self.closed: list[int] = []
        self.unseen: set[int] = set()

    def offers(self, tenant: bytes) -> ChannelOffers:
        return ChannelOffers(b"header for " + tenant, [ChannelOffer("tcp", b"port")], [])

    def open(self, holder: int, tenant: bytes, transport: str, proposal: bytes) -> bytes:
        if proposal == b"refuse":
            raise Refused("not like this")
        self.opened.append((holder, tenant, transport, proposal))
        if proposal == b"write":
            self.unseen.add(holder)
        return b"welcome"

    def writes_unseen(self, holder: int) -> bool:
        return holder in self.unseen

    def close(self, holder: int) -> None:
        self.before.append((list(self._store.released), set(self._store.unseen)))
        self.closed.append(holder)
        self.unseen.discard(holder)


@pytest.fixture
def ways(store: DictStore) -> Ways:
    return Ways(store)


@pytest.fixture
def channelled(store: DictStore, ways: Ways) -> Iterator[Served]:
    with served(BlockService(store, time.monotonic, region=lambda tenant: "/r", channels=ways)) as s:
        yield s


def test_channels_are_offered_and_opened(channelled: Served, ways: Ways, store: DictStore) -> None:
    tenant = CREDENTIALS.tenant_digest("acme")
    with closing(Connection.open(channelled.address, IDENTITY, soon())) as reader:
        assert call(reader, ChannelAsk()) == ways.offers(tenant)
        assert call(reader, ChannelOpen("tcp", b"read")) == ChannelOpened(b"welcome")
        with pytest.raises(Refused, match="not like this"):
            call(reader, ChannelOpen("tcp", b"refuse"))
        assert store.unseen == set()
        assert [(each[1:]) for each in ways.opened] == [(tenant, "tcp", b"read")]


def test_who_writes_unseen_is_told_to_the_store(channelled: Served, ways: Ways, store: DictStore) -> None:
    with closing(Connection.open(channelled.address, IDENTITY, soon())) as writer:
        call(writer, ChannelOpen("tcp", b"write"))
        assert store.unseen == {ways.opened[0][0]}


def test_the_channels_of_a_connection_end_before_what_it_reserved(
    channelled: Served, ways: Ways, store: DictStore
) -> None:
    with closing(Connection.open(channelled.address, IDENTITY, soon())) as writer:
        call(writer, ChannelOpen("tcp", b"write"))
    until(lambda: bool(store.released))

    holder = ways.opened[0][0]
    assert ways.closed == store.released == [holder]
    assert ways.before == [([], {holder})]


def test_a_late_writers_channels_are_closed_before_its_memory_goes_to_others(
    store: DictStore, ways: Ways
) -> None:
    service = BlockService(store, time.monotonic, channels=ways)
    store.unseen |= {7, 8}
    store.late = [7]

    service.fence_late_writers()

    assert ways.closed == [7]
    assert ways.before == [([], {7, 8})]
    assert (store.unseen, store.late) == ({8}, [])


def test_a_server_without_channels_says_so(connection: Connection) -> None:
    assert call(connection, ChannelAsk()) == ChannelOffers(b"", [], [])
    with pytest.raises(Refused, match="one-sided"):
        call(connection, ChannelOpen("tcp", b""))
