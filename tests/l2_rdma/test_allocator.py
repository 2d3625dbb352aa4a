import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from l2_rdma.allocator import SLOT_ALIGN_BYTES, SlabAllocator, class_bytes

SLAB_BYTES = 16 << 10
FIRST = 4096


def taken(allocator, slot_bytes):
    place = allocator.allocate(slot_bytes)
    assert place is not None
    return place


@given(st.integers(1, 1 << 34))
def test_a_class_holds_what_it_serves_and_wastes_little(size):
    slot = class_bytes(size)

    assert slot >= size
    assert slot % SLOT_ALIGN_BYTES == 0
    assert class_bytes(slot) == slot, "a slot's own size must map to its class"
    assert slot - size < max(SLOT_ALIGN_BYTES, size / 8 + 1)


@given(st.integers(1, 1 << 34), st.integers(1, 1 << 34))
def test_classes_are_ordered_like_sizes(one, other):
    assert (class_bytes(one) <= class_bytes(other)) or one > other


def test_what_is_larger_than_a_slab_has_no_class():
    allocator = SlabAllocator(FIRST, SLAB_BYTES, 2)

    assert allocator.slot_bytes_for(SLAB_BYTES) == SLAB_BYTES
    assert allocator.slot_bytes_for(SLAB_BYTES + 1) is None


def test_an_empty_slab_serves_any_class():
    """No calcification: a size that went out of use keeps nothing."""
    allocator = SlabAllocator(FIRST, SLAB_BYTES, 1)
    small = [taken(allocator, 512) for _ in range(SLAB_BYTES // 512)]
    assert allocator.allocate(512) is None
    assert allocator.allocate(4096) is None

    for place in small:
        allocator.free(place)

    taken(allocator, 4096)
    allocator.check()


def test_slabs_that_get_memory_later_become_usable():
    allocator = SlabAllocator(FIRST, SLAB_BYTES, 0)
    assert allocator.allocate(SLAB_BYTES) is None

    allocator.grow(2)
    assert [taken(allocator, SLAB_BYTES).offset for _ in range(2)] == [FIRST, FIRST + SLAB_BYTES]
    assert allocator.allocate(SLAB_BYTES) is None
    allocator.check()


def test_freeing_twice_is_an_error():
    allocator = SlabAllocator(FIRST, SLAB_BYTES, 1)
    place, other = taken(allocator, 512), taken(allocator, 512)
    allocator.free(place)
    with pytest.raises(KeyError):
        allocator.free(place)
    allocator.free(other)
    with pytest.raises(KeyError):
        allocator.free(other)


def test_the_slab_opened_first_is_filled_first():
    """So that the others drain and go back to the stock."""
    allocator = SlabAllocator(FIRST, SLAB_BYTES, 2)
    places = [taken(allocator, 8192) for _ in range(4)]
    allocator.free(places[3])
    allocator.free(places[0])

    assert taken(allocator, 8192).offset == places[3].offset
    assert allocator.slabs(8192) == [0, 1]


class AllocatorAgainstIntervals(RuleBasedStateMachine):
    """The oracle is a list of intervals."""

    SLABS = 4

    def __init__(self):
        super().__init__()
        self.allocator = SlabAllocator(FIRST, SLAB_BYTES, self.SLABS)
        self.held = []

    @rule(size=st.integers(1, SLAB_BYTES) | st.sampled_from([500, 4096, 5000]))
    def allocate(self, size):
        slot = self.allocator.slot_bytes_for(size)
        assert slot is not None
        free = self.allocator.free_slots(slot)
        place = self.allocator.allocate(slot)
        assert (place is not None) == (free > 0), "free_slots promised otherwise"
        if place is None:
            return
        assert place.slot_bytes >= size
        assert place.offset % SLOT_ALIGN_BYTES == 0
        assert place.offset >= FIRST and place.offset + place.slot_bytes <= FIRST + self.SLABS * SLAB_BYTES
        for other in self.held:
            apart = (
                place.offset + place.slot_bytes <= other.offset
                or other.offset + other.slot_bytes <= place.offset
            )
            assert apart, "two slots overlap"
        self.held.append(place)

    @precondition(lambda self: self.held)
    @rule(pick=st.randoms(use_true_random=False))
    def free(self, pick):
        self.allocator.free(self.held.pop(pick.randrange(len(self.held))))

    @invariant()
    def accounting(self):
        self.allocator.check()
        assert self.allocator.used_bytes == sum(place.slot_bytes for place in self.held)

    def teardown(self):
        for place in self.held:
            self.allocator.free(place)
        assert self.allocator.used_bytes == 0
        for _ in range(self.SLABS):
            assert self.allocator.allocate(SLAB_BYTES) is not None, "freed memory did not come back"


TestAllocatorAgainstIntervals = pytest.mark.slow(AllocatorAgainstIntervals.TestCase)
