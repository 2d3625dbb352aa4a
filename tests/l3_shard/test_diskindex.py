"""What a disk tier has and what goes next, against a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from kvcomm.block import NO_PARENT, BlockKey
from kvcomm.blockstore import ANY_TENANT
from kvcomm.wire.messages import BlockItem
from l3_shard.diskindex import DISK_BLOCK_BYTES, DiskEntry, DiskIndex, room_bytes

OURS, THEIRS = b"o" * 16, b"t" * 16


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(1, "big") * 32)


def entry(number: int, parent: int = 0, blocks: int = 1, tenant: bytes = OURS) -> DiskEntry:
    return DiskEntry(
        key_of(number), key_of(parent) if parent else NO_PARENT, tenant, blocks * DISK_BLOCK_BYTES
    )


def test_room_is_counted_in_whole_blocks():
    assert [room_bytes(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_room_is_promised_before_it_is_used():
    index = DiskIndex(3 * DISK_BLOCK_BYTES)
    assert index.promise(4096) == [] and index.promise(5000) == []
    assert index.promise(1) is None, "what is under way cannot be evicted"
    index.kept(entry(1))
    assert index.used_bytes == 4096 and index.promise(1) == [entry(1)]
    index.not_kept(5000)
    index.not_kept(1)
    assert index.promise(4 * 4096) is None and index.used_bytes == 0
    index.check()


def test_room_may_be_asked_for_only_where_nothing_has_to_go():
    index = DiskIndex(2 * DISK_BLOCK_BYTES)
    index.add(entry(1))
    assert index.promise(4096, evict=False) == []
    index.kept(entry(2))
    assert index.promise(1, evict=False) is None and len(index) == 2
    index.check()


def test_tenants_see_their_own_and_the_cluster_sees_all():
    index = DiskIndex(1 << 20)
    index.add(entry(1))
    index.add(entry(2, tenant=THEIRS))
    assert index.find(key_of(1), OURS) == entry(1) and index.find(key_of(2), OURS) is None
    assert index.find(key_of(2), ANY_TENANT) is not None and index.find(key_of(3), ANY_TENANT) is None
    assert index.listing(b"", 5) == [BlockItem(key_of(1), 4096), BlockItem(key_of(2), 4096)]
    assert index.listing(key_of(1), 5) == [BlockItem(key_of(2), 4096)]


def test_leaves_go_before_their_parents_and_what_was_read_stays():
    index = DiskIndex(4 * DISK_BLOCK_BYTES)
    for number, parent in ((1, 0), (2, 1), (3, 2), (4, 0)):
        index.add(entry(number, parent))
    assert not index.touch(key_of(3)) and index.touch(key_of(3)), "the second time it is known"
    victims = [index.promise(1) for _ in range(4)]
    assert victims == [[entry(4)], [entry(3, 2)], [entry(2, 1)], [entry(1)]]
    index.check()


def test_a_circle_of_parents_does_not_stand_in_the_way():
    index = DiskIndex(2 * DISK_BLOCK_BYTES)
    index.add(entry(1, 2))
    index.add(entry(2, 1))
    victims = index.promise(2 * 4096)
    assert victims is not None and {each.key for each in victims} == {key_of(1), key_of(2)}
    index.check()


def test_what_is_over_a_smaller_capacity_goes():
    index = DiskIndex(2 * DISK_BLOCK_BYTES)
    for number in (1, 2, 3, 4):
        index.add(entry(number))
    assert index.shrink(1) == [entry(1)] and index.shrink(9) == [entry(2)] and index.evicted_count == 2
    index.check()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["promise", "keep", "lose", "remove", "touch"]),
        st.integers(1, 8),
        st.integers(0, 8),
        st.integers(1, 3),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_it_holds_what_a_dictionary_holds(operations):
    index = DiskIndex(8 * DISK_BLOCK_BYTES)
    held: dict[BlockKey, DiskEntry] = {}
    promised: list[int] = []
    for what, number, parent, blocks in operations:
        match what:
            case "promise":
                victims = index.promise(blocks * 4096)
                if victims is not None:
                    promised.append(blocks)
                    for victim in victims:
                        assert held.pop(victim.key) == victim
            case "keep" if promised:
                kept = entry(number, parent, promised.pop())
                index.kept(kept)
                held[kept.key] = kept
            case "lose" if promised:
                index.not_kept(promised.pop() * 4096)
            case "remove":
                assert index.remove(key_of(number)) == held.pop(key_of(number), None)
            case "touch":
                index.touch(key_of(number))
        index.check()
        assert {key: index.find(key, ANY_TENANT) for key in held} == held and len(index) == len(held)
