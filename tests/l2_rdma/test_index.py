import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcomm.block import BlockKey, Generation
from l2_rdma.index import IndexReader, IndexWriter, candidate_buckets
from l2_rdma.layout import ENTRY_BYTES
from tests.l2_rdma.regions import key_of, layout_of


def make_index(entries=64):
    layout = layout_of(index_entries=entries)
    memory = memoryview(bytearray(layout.region_bytes))
    return IndexWriter(memory, layout), IndexReader(memory, layout), memory, layout


def test_an_inserted_key_is_found_until_it_is_removed():
    writer, reader, _, _ = make_index()
    entry = writer.insert(key_of(1), Generation(5), 8192, 1024)

    assert reader.probe(key_of(1)) == (5, 8192, 1024, entry)
    assert reader.probe(key_of(2)) is None

    writer.remove(entry)
    assert reader.probe(key_of(1)) is None


def test_full_buckets_refuse_and_name_the_entries_that_are_in_the_way():
    writer, _, _, _ = make_index(entries=8)  # one bucket
    for number in range(8):
        assert writer.insert(key_of(number), Generation(1), 4096, 512) is not None

    assert writer.insert(key_of(8), Generation(1), 4096, 512) is None
    assert sorted(set(writer.candidates(key_of(8)))) == list(range(8))


def test_a_lookup_leaves_no_mark_and_a_read_does():
    writer, reader, _, _ = make_index()
    entry = writer.insert(key_of(1), Generation(5), 8192, 1024)

    reader.probe(key_of(1))
    assert not writer.take_referenced(entry)

    reader.mark_referenced(entry)
    assert writer.referenced(entry)
    assert reader.probe(key_of(1)) is not None, "the mark stands outside of the checksum"
    assert writer.take_referenced(entry)
    assert not writer.take_referenced(entry)


def test_an_entry_that_reuses_a_place_starts_without_the_mark():
    writer, reader, _, _ = make_index()
    entry = writer.insert(key_of(1), Generation(5), 8192, 1024)
    reader.mark_referenced(entry)
    writer.remove(entry)

    again = writer.insert(key_of(1), Generation(6), 8192, 1024)

    assert again == entry
    assert not writer.referenced(again)


@given(cut=st.integers(1, 47), old=st.integers(1, 1 << 62), new=st.integers(1, 1 << 62))
def test_an_entry_torn_between_two_writes_is_no_hint(cut, old, new):
    """A copy that holds the first ``cut`` bytes of the new entry and the rest of the old one must be either
    of the two."""
    writer, reader, memory, layout = make_index()
    entry = writer.insert(key_of(1), Generation(old), 4096, 512)
    begin = layout.index_offset + entry * ENTRY_BYTES
    before = bytes(memory[begin : begin + ENTRY_BYTES])
    writer.rewrite(entry, key_of(1), Generation(new), 8192, 1024)
    after = bytes(memory[begin : begin + ENTRY_BYTES])

    memory[begin : begin + ENTRY_BYTES] = after[:cut] + before[cut:]
    hint = reader.probe(key_of(1))

    assert hint is None or hint[:3] in ((old, 4096, 512), (new, 8192, 1024))


@given(place=st.integers(0, 47), bit=st.integers(0, 7))
def test_a_flipped_bit_makes_an_entry_invisible_and_the_owner_repairs_it(place, bit):
    writer, reader, memory, layout = make_index()
    entry = writer.insert(key_of(1), Generation(5), 8192, 1024)
    assert writer.intact(entry, key_of(1), Generation(5), 8192, 1024)
    memory[layout.index_offset + entry * ENTRY_BYTES + place] ^= 1 << bit

    assert reader.probe(key_of(1)) is None
    assert not writer.intact(entry, key_of(1), Generation(5), 8192, 1024)

    writer.rewrite(entry, key_of(1), Generation(5), 8192, 1024)
    assert reader.probe(key_of(1)) == (5, 8192, 1024, entry)


def test_a_tag_at_an_odd_place_is_not_an_entry():
    """The probe searches a bucket's bytes for the tag; only the start of an entry counts."""
    writer, reader, memory, layout = make_index(entries=8)
    entry = writer.insert(key_of(1), Generation(5), 8192, 1024)
    whole = bytes(memory[layout.index_offset + entry * ENTRY_BYTES :][:48])
    writer.remove(entry)
    memory[layout.index_offset + 8 : layout.index_offset + 56] = whole

    assert reader.probe(key_of(1)) is None


@given(key=st.binary(min_size=32, max_size=32), buckets=st.integers(2, 1 << 20))
def test_the_two_buckets_of_a_key_are_two(key, buckets):
    first, second = candidate_buckets(BlockKey(key), buckets)

    assert first != second
    assert max(first, second) < buckets


class IndexAgainstDict(RuleBasedStateMachine):
    """The oracle is a dictionary."""

    def __init__(self):
        super().__init__()
        self.writer, self.reader, _, _ = make_index(entries=32)
        self.there = {}
        self.generation = 0

    @rule(number=st.integers(0, 60))
    def insert(self, number):
        if number in self.there:
            return
        self.generation += 1
        entry = self.writer.insert(key_of(number), Generation(self.generation), 4096 * number, 512)
        if entry is None:
            taken = {held for _, held in self.there.values()}
            assert set(self.writer.candidates(key_of(number))) <= taken, "refused although there is room"
            return
        self.there[number] = (self.generation, entry)

    @precondition(lambda self: self.there)
    @rule(pick=st.randoms(use_true_random=False))
    def remove(self, pick):
        number = pick.choice(sorted(self.there))
        self.writer.remove(self.there.pop(number)[1])

    @invariant()
    def same_answers(self):
        for number in range(61):
            hint = self.reader.probe(key_of(number))
            expected = self.there.get(number)
            assert (hint and (hint.generation, hint.entry)) == expected


TestIndexAgainstDict = pytest.mark.slow(IndexAgainstDict.TestCase)
