"""Block keys against an oracle written from the docstring; headers and copies against every flipped bit."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from array import array
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcomm.block import (
    GENERATION_OFFSET,
    HEADER_BYTES,
    NO_PARENT,
    NO_TENANT,
    POSITION_MAX,
    ROOT_LINEAGE,
    BlockHeader,
    BlockKey,
    Generation,
    Incarnation,
    block_keys,
    header_for,
    header_names,
    token_array,
    verify_copy,
)
from kvcomm.errors import Corrupt, PayloadError, TokenError
from kvcomm.namespace import DTYPE_BYTES, NamespaceId, TenantDigest
from tests.namespaces import namespace

NS = namespace()
TOKENS = list(range(100, 140))
digests = st.binary(min_size=32, max_size=32)


# -- keys ----------------------------------------------------------------------------------------------------


def oracle(
    namespace_id: bytes,
    block_tokens: int,
    tokens: list[int],
    at: list[int],
    parent: bytes,
    lineage: bytes,
    extra: bytes,
) -> list[bytes]:
    """Token by token, from what the format says: every part of fixed width, or with its length before it."""
    keys = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        some, where = tokens[first : first + block_tokens], at[first : first + block_tokens]
        text = b"kvcomm.block/1\0" + namespace_id + parent + struct.pack("<I", block_tokens)
        for token in some:
            text += struct.pack("<I", token)
        if where == list(range(where[0], where[0] + block_tokens)):
            text += b"\0" + struct.pack("<Q", where[0])
        else:
            text += b"\1"
            for position in where:
                text += struct.pack("<Q", position)
        text += lineage + struct.pack("<Q", len(extra)) + extra
        parent = hashlib.sha256(text).digest()
        keys.append(parent)
    return keys


@given(
    tokens=st.lists(st.integers(0, 999), max_size=40),
    block_tokens=st.integers(1, 9),
    start=st.integers(0, 2**40),
    parent=digests,
    lineage=digests,
    extra=st.binary(max_size=9),
)
def test_keys_are_those_of_the_oracle(
    tokens: list[int], block_tokens: int, start: int, parent: bytes, lineage: bytes, extra: bytes
):
    ns = namespace(block_tokens=block_tokens)
    rows = list(range(start, start + len(tokens)))
    expected = oracle(ns.id, block_tokens, tokens, rows, parent, lineage, extra)
    how: dict[str, Any] = {"parent": BlockKey(parent), "lineage": lineage, "extra": extra}
    assert block_keys(ns, tokens, logical_start=start, **how) == expected
    assert block_keys(ns, tokens, positions=rows, **how) == expected


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 3) | st.integers(0, POSITION_MAX)), max_size=30),
    st.integers(1, 4),
)
def test_keys_at_explicit_positions_are_those_of_the_oracle(placed: list[tuple[int, int]], block_tokens: int):
    ns = namespace(block_tokens=block_tokens)
    tokens, rows = [token for token, _ in placed], [row for _, row in placed]
    expected = oracle(ns.id, block_tokens, tokens, rows, NO_PARENT, ROOT_LINEAGE, b"")
    assert block_keys(ns, tokens, positions=rows) == expected


@given(st.lists(st.integers(0, 999), max_size=80), st.integers(0, 5))
def test_keys_continue_from_a_parent(tokens: list[int], blocks: int):
    whole = block_keys(NS, tokens)
    cut = min(blocks, len(whole))
    parent = whole[cut - 1] if cut else NO_PARENT
    rest = block_keys(NS, tokens[cut * 16 :], parent=parent, logical_start=cut * 16)
    assert whole[:cut] + rest == whole


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_full_blocks_have_a_key(count: int, blocks: int):
    assert len(block_keys(NS, range(count))) == blocks


@pytest.mark.parametrize("container", [list, tuple, lambda ids: array("I", ids), lambda ids: array("q", ids)])
def test_any_sequence_of_ids_gives_the_same_keys(container: Any):
    assert block_keys(NS, container(TOKENS)) == block_keys(NS, TOKENS)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_a_numpy_array_gives_the_same_keys(dtype: str):
    numpy = pytest.importorskip("numpy")
    assert block_keys(NS, numpy.array(TOKENS, dtype)) == block_keys(NS, TOKENS)


@pytest.mark.parametrize(
    "tokens",
    [
        [*range(15), -1],
        [*range(15), 1_000],
        [*range(15), 2**32],
        [1.0] * 16,
        ["a"] * 16,
        [None] * 16,
        b"sixteen letters!",
        bytearray(16),
        bytes(3),
        "sixteen letters!",
        None,
        7,
    ],
    ids=lambda tokens: repr(tokens)[:20],
)
def test_what_is_no_token_is_refused(tokens: Any):
    with pytest.raises(TokenError, match="token"):
        block_keys(NS, tokens)


def test_the_refusal_names_the_token_and_its_place():
    with pytest.raises(TokenError, match=r"token 1000 at index 2 is not in \[0, 1000\)"):
        token_array([1, 999, 1_000, 5_000], 1_000)


def test_the_largest_vocabulary_fits():
    assert list(token_array([0, 2**32 - 1], 2**32)) == [0, 2**32 - 1]


@pytest.mark.parametrize(
    "how",
    [
        {"logical_start": -1},
        {"logical_start": POSITION_MAX},
        {"positions": range(39)},
        {"positions": range(41)},
        {"positions": [*range(39), -1]},
        {"positions": [*range(39), 2**63]},
        {"positions": [*range(39), 1.5]},
        {"positions": range(1, 41), "logical_start": 1},
        {"parent": b""},
        {"parent": bytes(31)},
        {"parent": bytes(33)},
        {"lineage": b""},
        {"lineage": bytes(33)},
    ],
    ids=repr,
)
def test_what_is_no_place_is_refused(how: dict[str, Any]):
    with pytest.raises(TokenError):
        block_keys(NS, TOKENS, **how)


def test_the_last_position_can_be_used():
    assert block_keys(NS, range(16), logical_start=POSITION_MAX - 16)
    assert block_keys(NS, range(16), positions=[POSITION_MAX] * 16)


# -- headers -------------------------------------------------------------------------------------------------

u64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    BlockHeader,
    key=digests.map(BlockKey),
    parent=digests.map(BlockKey),
    namespace=digests.map(NamespaceId),
    lineage=digests,
    tenant=st.binary(min_size=16, max_size=16).map(TenantDigest),
    logical_start=u64,
    token_count=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(list(DTYPE_BYTES)),
    codec=st.just("raw"),
    payload_bytes=u64,
    producer=u64.map(Incarnation),
    payload_checksum=u64,
    approximate=st.booleans(),
    generation=u64.map(Generation),
)


def made(payload: bytes, **changes: Any) -> BlockHeader:
    (key,) = block_keys(NS, range(16))
    header = header_for(NS, key, NO_PARENT, memoryview(payload), logical_start=0, producer=Incarnation(7))
    return dataclasses.replace(header, **changes)


PAYLOAD = random.Random(5).randbytes(NS.block_bytes)
HEADER = made(PAYLOAD)
COPY = HEADER.pack() + PAYLOAD


@given(headers)
def test_pack_and_unpack_are_inverses(header: BlockHeader):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert BlockHeader.unpack(packed) == header
    assert BlockHeader.unpack(memoryview(bytearray(packed + b"more"))).pack() == packed


@given(headers)
def test_an_intact_header_names_its_key_and_no_other(header: BlockHeader):
    packed = header.pack()
    assert header_names(packed, header.key)
    assert not header_names(packed, BlockKey(bytes([header.key[0] ^ 1]) + header.key[1:]))


def test_every_flipped_bit_is_noticed_except_in_the_generation():
    packed = HEADER.pack()
    silent = []
    for bit in range(8 * HEADER_BYTES):
        flipped = bytearray(packed)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            seen = BlockHeader.unpack(flipped)
        except Corrupt:
            assert not header_names(flipped, HEADER.key)
            with pytest.raises(Corrupt):
                verify_copy(bytes(flipped) + PAYLOAD, HEADER.key)
        else:
            silent.append(bit)
            # What gets through is the generation, and it differs: comparing it with the reference shows it.
            assert seen == dataclasses.replace(HEADER, generation=seen.generation)
            assert seen.generation != HEADER.generation
    assert silent == list(range(8 * GENERATION_OFFSET, 8 * HEADER_BYTES))


@pytest.mark.parametrize("length", [0, 1, 8, 239, 240, 248, 255])
def test_half_a_header_is_no_header(length: int):
    with pytest.raises(Corrupt, match="needs 256 bytes"):
        BlockHeader.unpack(COPY[:length])
    assert not header_names(COPY[:length], HEADER.key)


def sealed(summed: bytes) -> bytes:
    """A header whose checksum is right: what another version, or a writer gone wrong, might produce."""
    return summed + struct.pack("<QQ", xxh3_64_intdigest(summed), 0)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"KVCBLOCX", "not a version 1 block header"),
        (8, b"\x02\x00", "version 2"),
        (10, b"\x00\x02", "not a version 1"),
        (12, b"\x02", "flags"),
        (15, b"\x80", "flags"),
        (172, b"\x06", "unknown dtype 6"),
        (173, b"\x01", "codec 1"),
        (174, b"\x01", "does not know"),
        (200, b"\x01", "does not know"),
        (239, b"\x01", "does not know"),
    ],
)
def test_what_this_version_never_writes_is_refused_though_its_checksum_is_right(
    at: int, value: bytes, why: str
):
    summed = HEADER.pack()[:240]
    assert BlockHeader.unpack(sealed(summed)) == HEADER
    with pytest.raises(Corrupt, match=why):
        BlockHeader.unpack(sealed(summed[:at] + value + summed[at + len(value) :]))


@pytest.mark.parametrize(
    "changes",
    [
        {"key": bytes(31)},
        {"parent": bytes(33)},
        {"namespace": b""},
        {"lineage": bytes(31)},
        {"tenant": b""},
        {"dtype": "int8"},
        {"codec": "zstd"},
    ],
    ids=repr,
)
def test_a_header_that_would_be_cut_or_padded_is_not_packed(changes: dict[str, Any]):
    with pytest.raises(PayloadError):
        dataclasses.replace(HEADER, **changes).pack()


# -- copies --------------------------------------------------------------------------------------------------


def test_a_good_copy_is_verified():
    assert verify_copy(COPY, HEADER.key) == HEADER
    assert verify_copy(memoryview(bytearray(COPY + b"rest of the slot")), HEADER.key) == HEADER


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 256 + 1_023])
def test_a_truncated_copy_is_refused(length: int):
    with pytest.raises(Corrupt, match=r"truncated|needs 256"):
        verify_copy(COPY[:length], HEADER.key)


def test_a_copy_of_another_block_is_refused():
    with pytest.raises(Corrupt, match="another block"):
        verify_copy(COPY, BlockKey(bytes(32)))


@given(st.integers(0, 8 * NS.block_bytes - 1))
def test_a_flipped_bit_of_the_payload_is_noticed(bit: int):
    flipped = bytearray(COPY)
    flipped[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt, match="payload checksum"):
        verify_copy(flipped, HEADER.key)


@given(st.integers(0, NS.block_bytes - 1), st.integers(1, 64), st.binary(min_size=64, max_size=64))
def test_an_overwritten_stretch_of_the_payload_is_noticed(at: int, length: int, junk: bytes):
    torn = bytearray(COPY)
    torn[HEADER_BYTES + at : HEADER_BYTES + at + length] = junk[: min(length, NS.block_bytes - at)]
    if torn == COPY:
        return
    with pytest.raises(Corrupt):
        verify_copy(torn, HEADER.key)


def test_the_payload_of_one_block_under_the_header_of_another_is_refused():
    other = made(bytes(NS.block_bytes))
    with pytest.raises(Corrupt, match="payload checksum"):
        verify_copy(other.pack() + PAYLOAD, other.key)


def test_a_new_header_says_what_its_namespace_says():
    ns = namespace(dtype="bfloat16", approximate=True, tenant=TenantDigest(b"t" * 16))
    parent, key = block_keys(ns, range(32))
    payload = memoryview(bytes(ns.block_bytes))
    header = header_for(
        ns, key, parent, payload, logical_start=16, producer=Incarnation(9), lineage=b"l" * 32
    )
    assert header == BlockHeader(
        key=key,
        parent=parent,
        namespace=ns.id,
        lineage=b"l" * 32,
        tenant=ns.tenant,
        logical_start=16,
        token_count=16,
        dtype="bfloat16",
        codec="raw",
        payload_bytes=ns.block_bytes,
        producer=Incarnation(9),
        payload_checksum=xxh3_64_intdigest(bytes(ns.block_bytes)),
        approximate=True,
        generation=Generation(0),
    )
    assert HEADER.tenant == NO_TENANT and not HEADER.approximate


def strided(buffer: Sequence[int]) -> memoryview:
    return memoryview(bytes(2 * len(buffer)))[::2]


@pytest.mark.parametrize(
    "payload",
    [
        memoryview(b""),
        memoryview(bytes(NS.block_bytes - 1)),
        memoryview(bytes(NS.block_bytes + 1)),
        strided(PAYLOAD),
    ],
    ids=["nothing", "short", "long", "strided"],
)
def test_a_payload_that_does_not_fit_is_refused(payload: memoryview):
    with pytest.raises(PayloadError, match=r"1024 contiguous bytes \(2, 2, 1, 16, 4\) float32"):
        header_for(NS, HEADER.key, NO_PARENT, payload, logical_start=0, producer=Incarnation(7))


def test_a_typed_payload_is_taken_by_its_bytes():
    floats = memoryview(bytearray(PAYLOAD)).cast("f", NS.block_shape)
    header = header_for(
        NS, HEADER.key, NO_PARENT, cast("Any", floats), logical_start=0, producer=Incarnation(7)
    )
    assert header == HEADER
