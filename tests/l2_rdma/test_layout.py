import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.block import Generation, Incarnation
from kvcomm.errors import ConfigError, Corrupt
from kvcomm.namespace import TenantDigest
from l2_rdma.layout import (
    GENERATION_BASE_MAX,
    GENERATION_WINDOW,
    WORDS_OFFSET,
    RegionHeader,
    RegionLayout,
    plan_layout,
)
from tests.l2_rdma.regions import layout_of, region_header

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF), max_size=20)


@given(
    instance=NAMES,
    node=NAMES,
    tenant=st.binary(min_size=16, max_size=16),
    incarnation=st.integers(1, 2**64 - 1),
    base=st.integers(1, GENERATION_BASE_MAX),
    region_bytes=st.integers(4 << 20, 1 << 40),
)
def test_a_region_header_reads_back_as_written(instance, node, tenant, incarnation, base, region_bytes):
    header = RegionHeader(
        instance,
        node,
        TenantDigest(tenant),
        Incarnation(incarnation),
        Generation(base),
        plan_layout(region_bytes),
    )

    packed = header.pack()

    assert len(packed) == WORDS_OFFSET
    assert RegionHeader.unpack(packed + bytes(4096 - WORDS_OFFSET)) == header


@given(place=st.integers(0, WORDS_OFFSET - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(place, bit):
    packed = bytearray(region_header(layout_of()).pack())
    packed[place] ^= 1 << bit

    with pytest.raises(Corrupt):
        RegionHeader.unpack(packed)


def test_a_file_that_is_no_region_is_refused():
    for garbage in (b"", bytes(4096), b"KVCREGN\x01".ljust(4096, b"x")):
        with pytest.raises(Corrupt):
            RegionHeader.unpack(garbage)


def test_a_header_that_contradicts_itself_is_refused_even_with_a_valid_checksum():
    """A layout that points outside of the region must not be followed."""
    layout = layout_of()
    wrong = object.__new__(RegionLayout)
    for name in RegionLayout.__slots__:
        object.__setattr__(wrong, name, getattr(layout, name))
    object.__setattr__(wrong, "slab_count", layout.slab_count + 1)

    with pytest.raises(Corrupt, match="contradicts itself"):
        RegionHeader.unpack(region_header(wrong).pack())


@given(
    region_bytes=st.integers(1 << 20, 1 << 36),
    slab_kib=st.integers(1, 1 << 16) | st.none(),
    entries=st.integers(1, 1 << 20) | st.none(),
)
def test_the_parts_never_overlap(region_bytes, slab_kib, entries):
    try:
        layout = plan_layout(
            region_bytes, slab_bytes=slab_kib and slab_kib << 10, index_entries=entries, hazard_count=100
        )
    except ConfigError:
        assert region_bytes < (slab_kib or 1024) * 1024 + (entries or region_bytes >> 15) * 64 + (1 << 20)
        return
    ends = [
        (layout.index_offset, layout.index_offset + layout.bucket_count * 512),
        (layout.hazard_offset, layout.hazard_offset + layout.hazard_count * 8),
        (layout.slots_offset, layout.slots_end),
    ]
    assert ends == sorted(ends)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(ends))
    assert layout.slots_end <= layout.region_bytes <= region_bytes
    assert layout.bucket_count * 8 >= (entries or 1024)


def test_names_and_numbers_out_of_range_are_refused():
    layout = layout_of()
    for changes in ({"instance": "x" * 65}, {"node": "a\0b"}, {"tenant": b"short"}, {"generation_base": 0}):
        with pytest.raises(ValueError, match="must be"):
            region_header(layout, **changes)
    with pytest.raises(ValueError, match="incarnation"):
        region_header(layout, incarnation=0)


def test_a_generation_belongs_to_one_life():
    header = region_header(layout_of())

    assert header.owns_generation(1_000)
    assert header.owns_generation(1_000 + GENERATION_WINDOW - 1)
    assert not header.owns_generation(999)
    assert not header.owns_generation(1_000 + GENERATION_WINDOW)


def test_native_words_are_the_little_endian_bytes_that_the_codecs_write():
    """The shared words are accessed natively, headers and entries by struct: they must agree."""
    memory = memoryview(bytearray(16))
    memory.cast("Q")[1] = 0x1122334455667788

    assert struct.unpack_from("<Q", memory, 8) == (0x1122334455667788,)
