"""Manifests: equal contexts are equal bytes, appending never rehashes wrongly, and wrong keys are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcomm.block import POSITION_MAX, BlockKey, block_keys
from kvcomm.errors import Corrupt, ManifestError, NamespaceError, TokenError, TooLarge
from kvcomm.manifest import MANIFEST_BYTES_MAX, Manifest, Run
from kvcomm.namespace import Namespace, TenantDigest
from tests.golden import vectors
from tests.namespaces import namespace

NS = namespace(block_tokens=4)
LINEAGE = b"\x05" * 32
# Each piece: its tokens, and how far its first position lies from where the last piece ended.
pieces = st.lists(
    st.tuples(st.lists(st.integers(0, 999), max_size=9), st.sampled_from([0, 0, 0, 1, 7, -1])), max_size=6
)


def built(parts: list[tuple[list[int], int]], ns: Namespace = NS) -> tuple[Manifest, list[int], list[int]]:
    """A manifest put together piece by piece, with its tokens and positions kept the dumb way."""
    manifest = Manifest.empty(ns, logical_start=50, lineage=LINEAGE)
    tokens: list[int] = []
    positions: list[int] = []
    for some, jump in parts:
        start = (positions[-1] + 1 if positions else 50) + (jump if some else 0)
        manifest = manifest.append(some, ns, position=start if jump else None)
        tokens += some
        positions += range(start, start + len(some))
    return manifest, tokens, positions


@given(pieces)
def test_however_it_is_built_the_keys_are_those_of_the_whole(parts: list[tuple[list[int], int]]):
    manifest, tokens, positions = built(parts)
    assert list(manifest.keys) == block_keys(NS, tokens, positions=positions, lineage=LINEAGE)
    assert list(manifest.tokens) == tokens
    assert list(manifest.tail) == tokens[len(tokens) // 4 * 4 :]
    assert manifest.token_count == len(tokens)
    assert manifest.covered_tokens == len(tokens) // 4 * 4
    assert manifest.next_position == (positions[-1] + 1 if positions else 50)
    manifest.verify(NS)


@given(pieces)
def test_runs_say_where_every_token_stands(parts: list[tuple[list[int], int]]):
    manifest, tokens, positions = built(parts)
    seen = []
    for index in range(len(tokens)):
        run = next(run for run in reversed(manifest.runs) if run.first_token <= index)
        seen.append(run.position + index - run.first_token)
    assert seen == positions


@given(pieces)
def test_equal_contexts_are_equal_however_they_were_cut(parts: list[tuple[list[int], int]]):
    manifest, tokens, positions = built(parts)
    one_by_one = Manifest.empty(NS, logical_start=50, lineage=LINEAGE)
    for token, position in zip(tokens, positions, strict=True):
        one_by_one = one_by_one.append([token], NS, position=position)
    assert one_by_one == manifest and one_by_one.encode() == manifest.encode()


@given(pieces)
def test_encode_and_decode_are_inverses(parts: list[tuple[list[int], int]]):
    manifest, _, _ = built(parts)
    encoded = manifest.encode()
    assert Manifest.decode(encoded) == manifest
    assert Manifest.decode(memoryview(bytearray(encoded))).encode() == encoded


@given(pieces)
def test_every_token_has_its_position(parts: list[tuple[list[int], int]]):
    manifest, tokens, positions = built(parts)
    assert [manifest.position(index) for index in range(len(tokens))] == positions


@given(pieces, st.integers(0, 6), pieces)
def test_a_context_extends_exactly_what_it_begins_with(
    parts: list[tuple[list[int], int]], shared: int, others: list[tuple[list[int], int]]
):
    contexts = built(parts), built(parts[:shared] + others)
    for longer, shorter in (contexts, contexts[::-1]):
        begins = all(mine[: len(its)] == its for mine, its in zip(longer[1:], shorter[1:], strict=True))
        assert longer[0].extends(shorter[0]) == begins


def test_a_position_moved_in_the_unfinished_block_is_another_context():
    five = Manifest.empty(NS).append(range(5), NS)
    moved = five.append([5], NS, position=9).append(range(6, 9), NS)
    assert moved.extends(five)
    assert not moved.extends(five.append([5], NS))


def test_a_context_of_another_lineage_or_namespace_is_not_extended():
    ns = namespace(block_tokens=4, revision="weights-2")
    manifest = Manifest.empty(NS).append(range(10), NS)
    assert manifest.extends(Manifest.empty(NS))
    assert not manifest.extends(Manifest.empty(NS, lineage=LINEAGE))
    assert not manifest.extends(Manifest.empty(ns))


def test_different_contexts_have_different_bytes():
    ns = namespace(block_tokens=4, tenant=TenantDigest(b"t" * 16))
    some = [
        Manifest.empty(NS),
        Manifest.empty(ns),
        Manifest.empty(NS, logical_start=1),
        Manifest.empty(NS, lineage=LINEAGE),
        Manifest.empty(NS).append([1], NS),
        Manifest.empty(NS).append([1, 2], NS),
        Manifest.empty(NS).append([1], NS).append([2], NS, position=9),
    ]
    assert len({manifest.encode() for manifest in some}) == len(some)


def test_append_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch):
    hashed = []

    def watched(ns: Namespace, tokens: Any, **how: Any) -> list[BlockKey]:
        hashed.append(list(tokens))
        return block_keys(ns, tokens, **how)

    manifest = Manifest.empty(NS).append(range(10), NS)
    monkeypatch.setattr("kvcomm.manifest.block_keys", watched)
    manifest.append([10, 11, 12], NS)
    assert hashed == [[8, 9, 10, 11, 12]]


def test_append_leaves_the_old_manifest_alone():
    manifest = Manifest.empty(NS).append(range(10), NS)
    before = manifest.encode()
    manifest.append(range(10), NS)
    assert manifest.encode() == before
    assert manifest.append([], NS) is manifest


@pytest.mark.parametrize(
    "other",
    [
        namespace(block_tokens=4, revision="weights-2"),
        namespace(block_tokens=8),
        namespace(block_tokens=4, tenant=TenantDigest(b"t" * 16)),
    ],
)
def test_another_namespace_is_refused(other: Namespace):
    manifest = Manifest.empty(NS).append(range(10), NS)
    with pytest.raises(NamespaceError, match="of namespace"):
        manifest.append([1], other)
    with pytest.raises(NamespaceError, match="of namespace"):
        manifest.verify(other)


@pytest.mark.parametrize("position", [-1, POSITION_MAX, POSITION_MAX - 1, 2**64])
def test_a_position_out_of_range_is_refused(position: int):
    with pytest.raises(TokenError, match="position"):
        Manifest.empty(NS).append([1, 2], NS, position=position)


def test_the_last_position_can_be_used_and_not_passed():
    manifest = Manifest.empty(NS).append([1, 2], NS, position=POSITION_MAX - 2)
    assert Manifest.decode(manifest.encode()) == manifest
    with pytest.raises(TokenError, match="position"):
        manifest.append([1], NS)


@pytest.mark.parametrize("tokens", [[1_000], [-1], ["a"], b"text"])
def test_what_is_no_token_is_refused(tokens: Any):
    with pytest.raises(TokenError):
        Manifest.empty(NS).append(tokens, NS)


# -- damage --------------------------------------------------------------------------------------------------

GOOD = Manifest.empty(NS, logical_start=3).append(range(10), NS).append(range(20, 31), NS, position=40)


def test_every_flipped_bit_is_noticed():
    encoded = GOOD.encode()
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            Manifest.decode(flipped)


def test_every_truncation_and_anything_appended_is_noticed():
    encoded = GOOD.encode()
    for length in range(len(encoded)):
        with pytest.raises(Corrupt):
            Manifest.decode(encoded[:length])
    for more in (b"\x00", encoded[-8:], encoded):
        with pytest.raises(Corrupt):
            Manifest.decode(encoded + more)


@given(st.binary(max_size=300))
def test_noise_is_corrupt_and_nothing_else(noise: bytes):
    with pytest.raises(Corrupt):
        Manifest.decode(noise)
    with pytest.raises(Corrupt):
        Manifest.decode(sealed(GOOD.encode()[:12] + noise))


def sealed(body: bytes) -> bytes:
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"X", "not a version 1 manifest"),
        (8, b"\x02", "version 2"),
        (10, b"\x01", "counts"),
        (12, b"\x00", "counts"),
        (12, b"\x05", "counts"),
        (12, b"\x00\x00\x00\x01", "counts"),
        (80, b"\x14", "counts"),
        (80, b"\xff\xff\xff\xff", "counts"),
        (84, b"\x03", "counts"),
        (84, b"\xff\xff\xff\xff", "counts"),
        (88, b"\x01", "first run"),
        (88 + 11, b"\xff", "positions"),
        (88 + 12, b"\x00", "order"),
        (88 + 12, b"\x15", "no token"),
        (88 + 12 + 4, b"\x0d", "continues"),
    ],
)
def test_contradictions_are_corrupt_though_the_checksum_is_right(at: int, value: bytes, why: str):
    body = GOOD.encode()[:-8]
    assert Manifest.decode(sealed(body)) == GOOD
    with pytest.raises(Corrupt, match=why):
        Manifest.decode(sealed(body[:at] + value + body[at + len(value) :]))


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": GOOD.keys[:-1]},
        {"keys": (*GOOD.keys, GOOD.keys[0])},
        {"keys": (*GOOD.keys[:-1], BlockKey(b"short"))},
        {"token_bytes": GOOD.token_bytes[:-1]},
        {"block_tokens": 0},
        {"block_tokens": 5},
        {"lineage": b""},
        {"namespace": b""},
        {"runs": ()},
        {"runs": (Run(1, 3),)},
        {"runs": (Run(0, -1),)},
        {"runs": (Run(0, 3), Run(5, 8))},
        {"runs": (Run(0, 3), Run(30, 8))},
    ],
    ids=lambda changes: repr(changes)[:30],
)
def test_parts_that_contradict_each_other_are_refused(changes: dict[str, Any]):
    with pytest.raises(ManifestError):
        dataclasses.replace(GOOD, **changes)


@pytest.mark.parametrize("index", range(len(GOOD.keys)))
def test_a_key_that_does_not_follow_is_refused(index: int):
    keys = list(GOOD.keys)
    keys[index] = BlockKey(bytes(32))
    with pytest.raises(Corrupt, match=f"key {index} does not follow"):
        Manifest.decode(dataclasses.replace(GOOD, keys=tuple(keys)).encode()).verify(NS)


@pytest.mark.parametrize("index", [0, 3, 4, 19])
def test_a_token_that_is_not_the_one_hashed_is_refused(index: int):
    changed = bytearray(GOOD.token_bytes)
    changed[4 * index] ^= 1
    with pytest.raises(Corrupt, match=f"key {index // 4} does not follow"):
        dataclasses.replace(GOOD, token_bytes=bytes(changed)).verify(NS)


def test_a_token_outside_the_vocabulary_is_refused():
    changed = bytearray(GOOD.token_bytes)
    changed[-1] = 255
    with pytest.raises(Corrupt, match="token"):
        dataclasses.replace(GOOD, token_bytes=bytes(changed)).verify(NS)


@pytest.mark.parametrize(
    "changes",
    [{"runs": (Run(0, 3),)}, {"runs": (Run(0, 4), *GOOD.runs[1:])}, {"lineage": LINEAGE}],
    ids=repr,
)
def test_positions_and_lineage_that_were_not_hashed_are_refused(changes: dict[str, Any]):
    with pytest.raises(Corrupt, match="does not follow"):
        dataclasses.replace(GOOD, **changes).verify(NS)


def test_a_manifest_too_large_for_a_record_is_refused_with_advice():
    ns = namespace(block_tokens=16, vocab_size=50_000)
    fits = (MANIFEST_BYTES_MAX - 108) // (16 * 4 + 32) * 16
    manifest = Manifest.empty(ns).append([7] * fits, ns)
    assert len(manifest.encode()) <= MANIFEST_BYTES_MAX
    with pytest.raises(TooLarge, match="larger blocks or a new session"):
        manifest.append([7] * 32, ns).encode()
    with pytest.raises(Corrupt, match="cannot have"):
        Manifest.decode(bytes(MANIFEST_BYTES_MAX + 1))


def test_the_recorded_manifest_verifies():
    vectors.manifest().verify(namespace(tenant=vectors.TENANT))
