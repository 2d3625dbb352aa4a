"""What a client does before and between its tiers' calls: binding, checking, appending; over fakes."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcomm import operations
from kvcomm.block import BlockKey, Incarnation
from kvcomm.blockplane import BlockPlane
from kvcomm.errors import NamespaceError, OutcomeUnknown, PayloadError, Refused, TokenError, Unavailable
from kvcomm.manifest import Manifest
from kvcomm.metrics import Metrics
from kvcomm.namespace import Namespace, TenantDigest
from kvcomm.operations import Operations
from kvcomm.stateplane import StatePlane
from kvcomm.steps import Steps
from kvcomm.tally import Tally
from kvcomm.tier import Block, BlockCopy, Presence, PutStatus, RecordAnswer, TierName
from kvcomm.wire.messages import RecordVersion, RecordWrite
from tests.kvcomm.test_blockplane import NAMESPACE, near_with, run
from tests.kvcomm.test_stateplane import FakeRecords

TENANT = TenantDigest(b"t" * 16)
BLOCK = bytes(range(NAMESPACE.block_bytes))
HEAD = b"context/planner/main"


def operations_over(l3: KeyTier | None = None, records: FakeRecords | None = None) -> Operations:
    tally = Tally(Metrics("client"), clock=lambda: 0.0)
    state = StatePlane(records, tally) if records is not None else None
    return Operations(
        BlockPlane(near_with(), None, l3, clock=lambda: 0.0), state, tally, TENANT, Incarnation(7)
    )


def named(revision: str) -> Namespace:
    return replace(NAMESPACE, revision=revision)


class KeyTier:
    """A tier that takes everything."""

    name: TierName = "l3"

    def __init__(self) -> None:
        self.held: dict[BlockKey, bytes] = {}

    def lookup(self, keys: Sequence[BlockKey]) -> Steps[list[Presence]]:
        yield from ()
        return [key in self.held for key in keys]

    def get(self, keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
        raise AssertionError("these tests fetch nothing")

    def put(self, copies: Sequence[BlockCopy]) -> Steps[list[PutStatus]]:
        yield from ()
        self.held |= {copy.key: bytes(copy.payload) for copy in copies}
        return ["stored"] * len(copies)


class Keeping(FakeRecords):
    """Records that can be read again."""

    def record_put(self, writes: Any) -> Steps[list[RecordVersion]]:
        versions = yield from super().record_put(writes)
        for write, version in zip(writes, versions, strict=True):
            self.answers[write.key] = RecordAnswer((write.value,), version.context, False)
        return versions


# -- namespaces ----------------------------------------------------------------------------------------------


def test_a_namespace_is_bound_to_our_tenant_once() -> None:
    kv = operations_over()
    bound = kv.bind(NAMESPACE)
    assert bound.tenant == TENANT
    assert kv.bind(NAMESPACE) is bound
    assert kv.bind(bound).id == bound.id
    with pytest.raises(Refused, match="tenant"):
        kv.bind(NAMESPACE.for_tenant(TenantDigest(bytes(16))))


def test_namespaces_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "NAMESPACES_MAX", 3)
    kv = operations_over()
    for index in range(10):
        kv.bind(named(str(index)))
    assert len(kv._bound) == 3
    assert kv.bind(named("0")).tenant == TENANT, "a forgotten one is bound again"


# -- publishing ----------------------------------------------------------------------------------------------

FORMS: list[Callable[[bytes], Any]] = [
    bytes,
    bytearray,
    memoryview,
    lambda data: np.frombuffer(data, np.float16),
    lambda data: np.frombuffer(data, np.float16).reshape(NAMESPACE.block_shape),
    lambda data: np.frombuffer(data, np.dtype([("k", "u1"), ("v", "u1")])),
    lambda data: memoryview(data).cast("H"),
    lambda data: array.array("H", data),
    lambda data: (ctypes.c_uint16 * (len(data) // 2)).from_buffer_copy(data),
]


@pytest.mark.parametrize("form", FORMS)
def test_whatever_holds_the_bytes_contiguously_is_published(form: Callable[[bytes], Any]) -> None:
    l3 = KeyTier()
    flat = operations._payload(NAMESPACE, form(BLOCK))
    assert (flat.format, flat.ndim, bytes(flat)) == ("B", 1, BLOCK)
    assert run(operations_over(l3).publish(NAMESPACE, [1, 2], [form(BLOCK)])).stored == 1


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (BLOCK[:-1], "contiguous bytes"),
        (BLOCK + b"x", "contiguous bytes"),
        (memoryview(BLOCK * 2)[::2], "with gaps"),
        (np.zeros((4, NAMESPACE.block_bytes // 8), np.float16).T, "with gaps"),
        (np.zeros(NAMESPACE.block_bytes // 2, ">f2"), "little-endian"),
        (np.zeros(NAMESPACE.block_bytes // 8, "M8[s]"), "bytes-like"),
        ("text", "bytes-like"),
        (None, "bytes-like"),
    ],
)
def test_what_does_not_is_refused_and_nothing_is_written(block: Any, said: str) -> None:
    l3 = KeyTier()
    with pytest.raises(PayloadError, match=said):
        run(operations_over(l3).publish(NAMESPACE, [1, 2, 3, 4], [BLOCK, block]))
    assert l3.held == {}


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 3), (2, 1)])
def test_blocks_beyond_the_tokens_are_refused(first: int, count: int) -> None:
    with pytest.raises(PayloadError, match="full blocks"):
        run(operations_over().publish(NAMESPACE, [1, 2, 3, 4, 5], [BLOCK] * count, first_block=first))


def test_nothing_asked_for_is_nothing_done() -> None:
    kv = operations_over(KeyTier())
    hit = run(kv.fetch(NAMESPACE, []))
    assert (hit.token_count, hit.keys, hit.blocks) == (0, (), ())
    assert run(kv.fetch(NAMESPACE, [1])).keys == ()
    assert run(kv.publish(NAMESPACE, [], [])).statuses == ()


def test_token_ids_out_of_range_are_refused() -> None:
    for tokens in ([0, 100], [-1, 0]):
        with pytest.raises(TokenError):
            run(operations_over().fetch(NAMESPACE, tokens))


def test_without_any_tier_a_publish_says_that_it_failed() -> None:
    published = run(operations_over().publish(NAMESPACE, [1, 2], [BLOCK]))
    assert (published.stored, published.present, published.failed) == (0, 0, 1)


# -- contexts ------------------------------------------------------------------------------------------------


def test_an_append_stores_the_blocks_before_the_head() -> None:
    held_when_written: list[int] = []

    class Watching(Keeping):
        def record_put(self, writes: Any) -> Steps[list[RecordVersion]]:
            held_when_written.append(len(l3.held))
            return (yield from super().record_put(writes))

    l3, records = KeyTier(), Watching()
    kv = operations_over(l3, records)
    head = run(kv.append("planner", "main", NAMESPACE, [1, 2, 3], [BLOCK]))
    assert list(head.tokens) == [1, 2, 3]
    assert Manifest.decode(records.answers[HEAD].values[0]) == head
    again = run(kv.append("planner", "main", None, [4], [BLOCK]))
    assert list(again.tokens) == [1, 2, 3, 4]
    assert run(kv.head("planner", "main")) == again
    assert held_when_written == [1, 2]


def test_a_wrong_number_of_blocks_moves_no_head() -> None:
    records = Keeping()
    kv = operations_over(KeyTier(), records)
    with pytest.raises(PayloadError, match="complete 1 blocks"):
        run(kv.append("planner", "main", NAMESPACE, [1, 2, 3], [BLOCK, BLOCK]))
    with pytest.raises(PayloadError, match="complete 0 blocks"):
        run(kv.append("planner", "main", NAMESPACE, [1], [BLOCK]))
    assert records.written == []


def test_a_head_that_could_not_be_written_is_told() -> None:
    class Failing(FakeRecords):
        def record_put(self, writes: Any) -> Steps[list[RecordVersion]]:
            yield from ()
            raise OutcomeUnknown("1 of 2 replicas confirmed in time")

    with pytest.raises(OutcomeUnknown):
        run(operations_over(KeyTier(), Failing()).append("planner", "main", NAMESPACE, [1, 2], [BLOCK]))


def test_the_namespace_of_a_context_is_known_or_asked_for() -> None:
    records = Keeping()
    kv = operations_over(None, records)
    with pytest.raises(NamespaceError, match="which namespace"):
        run(kv.append("planner", "main", None, [1], []))
    kv.bind(NAMESPACE)
    run(kv.append("planner", "main", None, [1], []))  # the only one that this client uses
    kv.bind(named("other"))
    run(kv.append("planner", "main", None, [2], []))  # the context's own
    with pytest.raises(NamespaceError, match="another namespace"):
        run(kv.append("planner", "main", named("other"), [3], []))
    with pytest.raises(NamespaceError, match="which namespace"):
        run(kv.append("planner", "second", None, [1], []))


def test_without_shards_there_is_no_state() -> None:
    kv = operations_over()
    for steps in (kv.state_get("s", ["k"]), kv.append("a", "s", NAMESPACE, [1], []), kv.names(b"")):
        with pytest.raises(Unavailable, match="no shards"):
            run(steps)


def test_state_keys_come_back_as_they_were_put() -> None:
    records = Keeping()
    kv = operations_over(None, records)
    keys = ["plain", "a/b", "ä €", "%2F"]
    contexts = run(kv.state_put("s", [(key, b"v") for key in keys], None))
    assert len(contexts) == len(keys)
    assert sorted(run(kv.state_keys("s"))) == sorted(keys)
    assert [value.values for value in run(kv.state_get("s", keys))] == [(b"v",)] * len(keys)
    assert all(isinstance(write, RecordWrite) for write in records.written)
    assert run(kv.state_get("s", [])) == []
    with pytest.raises(ValueError, match="empty"):
        run(kv.state_get("s", [""]))
