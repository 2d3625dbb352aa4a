"""What the owner decides, step by step; time is a literal."""

import pytest

from kvcomm.block import HEADER_BYTES, BlockHeader
from kvcomm.blockstore import ANY_TENANT, BlockStore
from kvcomm.wire.messages import Grant, Want
from l2_rdma import owner
from l2_rdma.layout import BACKED_WORD, PIN_SHARE_WORD, RESERVED_FLAG, SUSPECT_FIRST_WORD
from l2_rdma.owner import REBALANCE_INTERVAL_S
from tests.l2_rdma.regions import (
    COPY_BYTES,
    OTHER_TENANT,
    SLAB_BYTES,
    TENANT,
    OwnedMemory,
    header_of,
    key_of,
    payload_of,
)

SLOTS = SLAB_BYTES // COPY_BYTES


def test_the_owner_is_a_block_store():
    store: BlockStore = OwnedMemory().owner

    assert store.usage().block_count == 0


# -- reserve, write, publish


def test_a_block_is_invisible_until_it_is_published():
    pool = OwnedMemory()
    grant = pool.reserve(1)
    pool.write(grant, 1)
    assert pool.present(1) == [False]
    assert pool.owner.lease(key_of(1), TENANT) is None

    assert pool.owner.publish([grant.token], 1, 0.0, verify=True) == ["published"]

    assert pool.present(1, 2) == [True, False]
    lease = pool.lease(1)
    assert BlockHeader.unpack(lease.copy) == header_of(1, generation=grant.generation)
    assert bytes(lease.copy[HEADER_BYTES:]) == payload_of(1)
    pool.owner.check()


def test_the_first_copy_wins_and_the_second_writer_is_told():
    pool = OwnedMemory()
    first = pool.reserve(1, holder=1)

    assert pool.reserve(1, holder=2).status == "pending"
    pool.write(first, 1)
    pool.owner.publish([first.token], 1, 0.0, verify=True)

    assert pool.reserve(1, holder=2) == Grant("present")


def test_a_dead_writers_key_becomes_writable_again():
    pool = OwnedMemory(reservation_ttl_s=10.0)
    late = pool.reserve(1, holder=1, now=0.0)
    assert pool.reserve(1, holder=2, now=9.9).status == "pending"

    fresh = pool.reserve(1, holder=2, now=10.0)

    assert fresh.status == "granted"
    assert fresh.generation != late.generation
    assert pool.owner.publish([late.token], 1, 10.0, verify=True) == ["expired"]
    pool.write(fresh, 1)
    assert pool.owner.publish([fresh.token], 2, 10.0, verify=True) == ["published"]
    pool.owner.check()


def test_a_closed_connection_frees_what_it_reserved_at_once():
    pool = OwnedMemory(slab_count=1)
    for number in range(SLOTS):
        assert pool.reserve(number, holder=1).status == "granted"
    assert pool.reserve(9, holder=2).status == "full"

    pool.owner.release_holder(1)

    assert pool.reserve(9, holder=2).status == "granted"
    pool.owner.check()


def test_nobody_publishes_or_aborts_anothers_reservation():
    pool = OwnedMemory()
    grant = pool.reserve(1, holder=1)
    pool.write(grant, 1)

    assert pool.owner.publish([grant.token], 2, 0.0, verify=True) == ["expired"]
    pool.owner.abort([grant.token], 2)
    assert pool.owner.publish([grant.token], 1, 0.0, verify=True) == ["published"]
    pool.owner.abort([grant.token], 1)
    assert pool.present(1) == [True], "aborting what is published changes nothing"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"key": key_of(2)}, id="another key"),
        pytest.param({"tenant": OTHER_TENANT}, id="another tenant"),
        pytest.param({"payload_bytes": 512}, id="another length"),
        pytest.param({"payload_checksum": 1}, id="damaged payload"),
    ],
)
def test_bytes_that_are_not_the_reserved_block_are_refused(changes):
    pool = OwnedMemory()
    grant = pool.reserve(1)
    pool.write(grant, 1, **changes)

    assert pool.owner.publish([grant.token], 1, 0.0, verify=True) == ["corrupt"]
    assert pool.present(1) == [False]
    assert pool.put(1) == "stored", "the key is writable again"
    pool.owner.check()


def test_a_reservation_that_was_never_written_is_refused():
    pool = OwnedMemory()
    grant = pool.reserve(1)

    assert pool.owner.publish([grant.token], 1, 0.0, verify=False) == ["corrupt"]


def test_wants_that_cannot_be_met():
    pool = OwnedMemory()

    def ask(key, size, tenant=TENANT):
        return pool.owner.reserve([Want(key, size)], 1, tenant, 0.0)[0].status

    assert ask(b"short", COPY_BYTES) == "refused"
    assert ask(key_of(1), HEADER_BYTES - 1) == "refused"
    assert ask(key_of(1), COPY_BYTES, OTHER_TENANT) == "refused"
    assert ask(key_of(1), SLAB_BYTES + 1) == "too_large"
    assert ask(key_of(1), SLAB_BYTES) == "granted"


def test_one_key_twice_in_a_batch_is_granted_once():
    pool = OwnedMemory()
    wants = [Want(key_of(1), COPY_BYTES)] * 2

    assert [grant.status for grant in pool.owner.reserve(wants, 1, TENANT, 0.0)] == ["granted", "pending"]


def test_a_socket_may_still_write_into_an_expired_extent():
    """Its memory goes to nobody else until the receiver says that it is done."""
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    grants = [pool.reserve(number, holder=1, now=0.0) for number in range(SLOTS)]
    extent = pool.owner.extent(grants[0].token)
    pool.owner.tick(5.0)
    assert [pool.reserve(number, holder=2, now=5.0).status for number in range(10, 10 + SLOTS)] == [
        *["granted"] * (SLOTS - 1),
        "full",
    ]

    extent[:] = header_of(0).pack() + payload_of(0)
    assert pool.owner.publish([grants[0].token], 1, 5.0, verify=True) == ["expired"]

    assert pool.reserve(20, holder=2, now=5.0).status == "granted"
    pool.owner.check()


def test_an_exposed_extent_is_free_when_its_connection_ends():
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    for number in range(SLOTS):
        pool.owner.extent(pool.reserve(number, holder=1).token)
    pool.owner.tick(5.0)
    assert pool.reserve(10, holder=2, now=5.0).status == "full"

    pool.owner.release_holder(1)

    assert pool.reserve(10, holder=2, now=5.0).status == "granted"
    with pytest.raises(KeyError):
        pool.owner.extent(12345)


def test_an_expired_extent_is_not_handed_on_while_its_writer_holds_a_hazard():
    """A paused writer wakes up and goes on writing: into memory that is still its own."""
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    pool.owner.open_pins(1, 4)
    grants = [pool.reserve(number, holder=1, now=0.0) for number in range(SLOTS)]
    pool.pin(0, grants[0].offset)

    pool.owner.tick(5.0)
    fresh = [pool.reserve(number, holder=2, now=5.0) for number in range(10, 10 + SLOTS)]

    assert grants[0].offset not in [grant.offset for grant in fresh if grant.status == "granted"]
    assert fresh[-1].status == "full"
    pool.pin(0, 0)
    assert pool.reserve(20, holder=2, now=5.0).offset == grants[0].offset


# -- writers through channels, whom nobody sees


def exposed_pool():
    """Full of what holder 1 has reserved and writes to through a channel; its time is over at 5.0."""
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    pool.owner.expose(1)
    return pool, [pool.reserve(number, holder=1, now=0.0) for number in range(SLOTS)]


def test_an_expired_reservation_of_a_channels_is_handed_on_when_its_holder_is_fenced():
    pool, grants = exposed_pool()
    assert pool.owner.late_writers() == []
    pool.owner.tick(5.0)

    assert pool.owner.late_writers() == [1]
    assert pool.reserve(0, holder=2, now=5.0).status == "full", "the key is free, the memory is not"
    pool.write(grants[0], 0)  # the late writer, while nobody has stopped it
    pool.owner.check()

    pool.owner.fenced(1)

    assert pool.owner.late_writers() == []
    assert [pool.reserve(number, holder=2, now=5.0).status for number in range(SLOTS)] == ["granted"] * SLOTS
    assert pool.owner.usage().reserved_bytes == pool.owner.usage().used_bytes
    pool.owner.check()


def test_what_is_published_in_time_exposes_nothing():
    pool, grants = exposed_pool()
    for number, grant in enumerate(grants):
        pool.write(grant, number)
    tokens = [grant.token for grant in grants]
    assert pool.owner.publish(tokens, 1, 0.5, verify=False) == ["published"] * SLOTS
    pool.owner.tick(5.0)

    assert pool.owner.late_writers() == []
    assert pool.reserve(9, holder=2, now=5.0).status == "granted"


def test_what_is_reserved_before_the_channel_is_exposed_by_it_too():
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    for number in range(SLOTS):
        pool.reserve(number, holder=1, now=0.0)
    pool.owner.expose(1)
    pool.owner.tick(5.0)

    assert pool.owner.late_writers() == [1]
    assert pool.reserve(9, holder=2, now=5.0).status == "full"


def test_a_holder_that_comes_back_with_a_new_channel_exposes_what_it_still_has():
    """One reservation is late and its holder is fenced; it opens another channel and writes to the rest."""
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    pool.owner.expose(1)
    pool.reserve(0, holder=1, now=0.0)
    young = [pool.reserve(number, holder=1, now=0.9) for number in range(1, SLOTS)]
    pool.owner.tick(1.0)
    assert pool.owner.late_writers() == [1]
    pool.owner.fenced(1)
    pool.owner.expose(1)

    pool.owner.tick(5.0)

    assert pool.owner.late_writers() == [1]
    offsets = [pool.reserve(number, holder=2, now=5.0).offset for number in range(10, 10 + SLOTS)]
    assert not {grant.offset for grant in young} & {offset for offset in offsets if offset}


def test_a_fenced_holder_may_publish_what_it_had_written_before():
    pool, grants = exposed_pool()
    pool.write(grants[0], 0)
    pool.owner.fenced(1)

    assert pool.owner.publish([grants[0].token], 1, 0.5, verify=True) == ["published"]
    pool.owner.check()


@pytest.mark.parametrize("aborted_at", [0.5, 5.0])
def test_an_aborted_write_may_still_be_on_its_way(aborted_at):
    """In time or too late: the word of a writer that has given up says nothing about what it has sent."""
    pool, grants = exposed_pool()
    pool.owner.tick(aborted_at)
    pool.owner.abort([grants[0].token], 1)

    assert pool.owner.late_writers() == [1]
    assert pool.reserve(9, holder=2, now=aborted_at).status == "full"
    pool.owner.fenced(1)
    assert pool.reserve(9, holder=2, now=aborted_at).status == "granted"


def test_a_late_publish_says_that_the_writes_are_done():
    """A writer waits for its writes before it publishes."""
    pool, grants = exposed_pool()
    pool.owner.tick(5.0)
    tokens = [grant.token for grant in grants]
    assert pool.owner.publish(tokens, 1, 5.0, verify=False) == ["expired"] * SLOTS

    assert pool.owner.late_writers() == []
    assert pool.reserve(9, holder=2, now=5.0).status == "granted"


def test_the_end_of_a_holder_ends_its_writes():
    pool, _ = exposed_pool()
    pool.owner.tick(5.0)
    pool.owner.release_holder(1)

    assert pool.owner.late_writers() == []
    assert pool.reserve(9, holder=2, now=5.0).status == "granted"
    assert pool.reserve(10, holder=1, now=5.0).status == "granted"
    pool.owner.tick(50.0)
    assert pool.owner.late_writers() == [], "the holder's number may be another's now"


def test_fencing_one_holder_leaves_the_others_exposed():
    pool = OwnedMemory(slab_count=1, reservation_ttl_s=1.0)
    for holder in (1, 2):
        pool.owner.expose(holder)
        pool.reserve(holder, holder=holder, now=0.0)
    pool.owner.tick(5.0)
    assert pool.owner.late_writers() == [1, 2]

    pool.owner.fenced(1)

    assert pool.owner.late_writers() == [2]


def test_a_socket_that_receives_is_not_stopped_by_closing_channels():
    pool, grants = exposed_pool()
    extent = pool.owner.extent(grants[0].token)
    pool.owner.tick(5.0)
    pool.owner.fenced(1)
    offsets = [pool.reserve(number, holder=2, now=5.0).offset for number in range(10, 10 + SLOTS)]
    assert grants[0].offset not in offsets

    extent[:] = header_of(0).pack() + payload_of(0)
    assert pool.owner.publish([grants[0].token], 1, 5.0, verify=True) == ["expired"]
    assert pool.reserve(20, holder=2, now=5.0).offset == grants[0].offset


# -- generations


def test_a_generation_is_never_used_twice():
    pool = OwnedMemory(slab_count=1)
    seen = set()
    for number in range(50):
        grant = pool.reserve(number)
        assert grant.generation not in seen
        assert pool.header.owns_generation(grant.generation)
        assert pool.words[(grant.offset + 248) // 8] == grant.generation | RESERVED_FLAG
        seen.add(grant.generation)
        pool.owner.abort([grant.token], 1)
        assert pool.words[(grant.offset + 248) // 8] == 0


# -- eviction


def test_a_full_pool_evicts_the_oldest():
    pool = OwnedMemory(slab_count=1)
    for number in range(SLOTS + 1):
        assert pool.put(number) == "stored"

    assert pool.present(*range(SLOTS + 1)) == [False] + [True] * SLOTS
    assert pool.owner.usage().evicted_count == 1
    pool.owner.check()


def test_a_lookup_does_not_keep_a_block_and_a_lease_does():
    pool = OwnedMemory(slab_count=1)
    for number in range(SLOTS):
        pool.put(number)
    pool.present(0, 1)
    pool.lease(0).release()

    pool.put(10)

    assert pool.present(0, 1, 10) == [True, False, True]


def test_leaves_go_before_their_parents():
    pool = OwnedMemory(slab_count=1)
    pool.put(0)
    for number in range(1, SLOTS):
        pool.put(number, parent=key_of(number - 1))

    for round_, newcomer in enumerate(range(10, 10 + SLOTS - 1)):
        pool.put(newcomer, parent=key_of(0))
        tail = SLOTS - 1 - round_
        assert pool.present(tail) == [False], "the end of the chain goes first"
        assert pool.present(*range(tail)) == [True] * tail
        pool.owner.check()


def test_headers_that_claim_a_circle_of_parents_are_still_evictable():
    pool = OwnedMemory(slab_count=1)
    for number in range(SLOTS):
        assert pool.put(number, parent=key_of((number + 1) % SLOTS)) == "stored"

    assert pool.put(10) == "stored"
    assert pool.put(11, parent=key_of(11)) == "stored"
    pool.owner.check()


def test_a_pinned_block_is_never_evicted_and_all_pinned_is_full():
    pool = OwnedMemory(slab_count=1)
    pool.owner.open_pins(5, SLOTS)
    for number in range(SLOTS):
        pool.put(number)
        pool.pin(number, pool.offset_of(number))

    assert pool.put(10) == "full"
    assert pool.present(*range(SLOTS)) == [True] * SLOTS
    assert pool.owner.usage().pinned_bytes == SLAB_BYTES

    pool.pin(2, 0)
    assert pool.put(10) == "stored"
    assert pool.present(*range(SLOTS)) == [True, True, False, True]


def test_a_slot_pinned_between_retiring_and_the_scan_rests_until_it_is_unpinned():
    """The reader won the race: its hazard is visible when the owner scans, so its bytes stay."""
    races: list = []
    pool = OwnedMemory(slab_count=1, barrier=lambda: races and races.pop()())
    pool.owner.open_pins(5, 4)
    for number in range(SLOTS):
        pool.put(number)
    victim = pool.offset_of(0)
    pool.lease(0).release()
    for number in range(1, SLOTS):
        pool.pin(number, pool.offset_of(number))
    races.append(lambda: pool.pin(0, victim))

    assert pool.put(10) == "full"
    assert pool.words[(victim + 248) // 8] == 0, "retired: no new reader gets in"
    assert bytes(pool.memory[victim + HEADER_BYTES :][:8]) == payload_of(0)[:8], "but not reused"

    pool.pin(0, 0)
    assert pool.put(10) == "stored"
    pool.owner.check()


def test_a_leased_copy_stays_until_it_was_sent():
    pool = OwnedMemory(slab_count=1)
    for number in range(SLOTS):
        pool.put(number)
    leases = [pool.lease(number) for number in range(SLOTS)]
    assert pool.put(10) == "full"

    leases[1].release()
    leases[1].release()

    assert pool.put(10) == "stored"
    assert pool.present(1) == [False]
    assert bytes(leases[0].copy[HEADER_BYTES:]) == payload_of(0)
    with pytest.raises(TypeError):
        leases[0].copy[0] = 1


def test_what_is_dropped_is_hidden_and_a_view_of_it_stays_whole():
    pool = OwnedMemory(slab_count=1)
    pool.owner.open_pins(5, SLOTS)
    for number in range(SLOTS):
        pool.put(number, parent=key_of(number - 1))
    pinned, leased = pool.offset_of(0), pool.lease(1)
    pool.pin(0, pinned)

    pool.owner.drop([key_of(number) for number in range(SLOTS)] + [key_of(77)])

    assert pool.present(*range(SLOTS)) == [False] * SLOTS and pool.owner.listing(b"", 9, ANY_TENANT) == []
    assert {pool.put(number) for number in range(10, 10 + SLOTS - 2)} == {"stored"}
    assert bytes(pool.memory[pinned + HEADER_BYTES :][:8]) == payload_of(0)[:8]
    assert bytes(leased.copy[HEADER_BYTES:]) == payload_of(1)
    pool.pin(0, 0)
    leased.release()
    assert [pool.put(number) for number in (30, 31)] == ["stored"] * 2
    assert pool.owner.usage().evicted_count == 0 and pool.owner.usage().block_count == SLOTS
    pool.owner.check()


def test_retired_slots_rest_for_the_grace_period():
    pool = OwnedMemory(slab_count=1, grace_s=0.01)
    for number in range(SLOTS):
        pool.put(number, now=0.0)

    assert pool.put(10, now=0.0) == "full", "evicted, but the memory must rest"
    assert pool.put(10, now=0.02) == "stored"


def test_a_starving_size_takes_a_slab_from_another_size():
    pool = OwnedMemory(slab_count=2)
    for number in range(2 * SLOTS):
        assert pool.put(number) == "stored"

    grant = pool.reserve(50, copy_bytes=SLAB_BYTES)

    assert grant.status == "granted"
    assert pool.present(*range(2 * SLOTS)).count(True) == SLOTS
    pool.owner.check()


def test_taking_a_slab_weighs_a_few_and_passes_over_those_in_use(monkeypatch):
    """Weighing all would stop the loop of a large pool for tenths of a second."""
    pool = OwnedMemory(slab_count=20, layout={"index_entries": 1024})
    for number in range(20 * SLOTS):
        assert pool.put(number) == "stored"
    held = [pool.lease(number) for number in range(10 * SLOTS)]
    weighed = []
    marked = pool.owner._marked

    def weigh(slot):
        weighed.append(slot)
        return marked(slot)

    monkeypatch.setattr(pool.owner, "_marked", weigh)

    for number in range(100, 104):
        assert pool.reserve(number, copy_bytes=3 * COPY_BYTES).status == "granted"

    assert 0 < len(weighed) <= 4 * owner.SLABS_COMPARED * SLOTS
    assert all(not slot.leases for slot in weighed)
    assert len({slot.offset // SLAB_BYTES for slot in weighed}) > owner.SLABS_COMPARED, "others each time"
    for lease in held:
        lease.release()
    pool.owner.check()


def test_a_slab_with_something_pinned_is_not_taken():
    pool = OwnedMemory(slab_count=1)
    pool.owner.open_pins(5, 4)
    pool.put(0)
    pool.pin(0, pool.offset_of(0))

    assert pool.reserve(50, copy_bytes=SLAB_BYTES).status == "full"
    assert pool.present(0) == [True]


def test_a_slab_that_somebody_may_still_write_to_is_not_taken():
    pool = OwnedMemory(slab_count=2, reservation_ttl_s=1.0)
    pool.owner.extent(pool.reserve(0, holder=2).token)
    for number in range(1, 2 * SLOTS):
        assert pool.put(number) == "stored"
    pool.owner.tick(5.0)

    grant = pool.reserve(50, copy_bytes=SLAB_BYTES, now=5.0)

    assert grant.status == "granted"
    assert pool.present(*range(1, 2 * SLOTS)).count(True) == SLOTS - 1, "the slab with the late writer"
    pool.owner.check()


def test_a_size_out_of_use_gives_its_slabs_to_the_one_in_demand():
    pool = OwnedMemory(slab_count=4)
    for number in range(100, 103):
        grant = pool.reserve(number, copy_bytes=SLAB_BYTES)
        pool.write(grant, number, payload_of(number, SLAB_BYTES - HEADER_BYTES))
        assert pool.owner.publish([grant.token], 1, 0.0, verify=True) == ["published"]
    pool.owner.tick(0.0)

    now = 0.0
    for number in range(6 * SLOTS):
        assert pool.put(number, now=now) == "stored"
        now += REBALANCE_INTERVAL_S / SLOTS
        pool.owner.tick(now)

    assert pool.present(*range(100, 103)).count(True) < 3
    assert sum(pool.present(*range(6 * SLOTS))) > SLOTS
    pool.owner.check()


def test_a_tick_keeps_some_slots_free():
    pool = OwnedMemory(slab_count=32, layout={"index_entries": 512})
    for number in range(32 * SLOTS):
        pool.put(number)
    assert pool.owner.usage().used_bytes == 32 * SLAB_BYTES

    pool.owner.tick(1.0)

    assert pool.owner.usage().used_bytes == (32 * SLOTS - 2) * COPY_BYTES


def test_more_blocks_than_index_entries_displace_each_other():
    pool = OwnedMemory(slab_count=16, layout={"index_entries": 16})
    for number in range(60):
        assert pool.put(number) == "stored"

    assert pool.present(59) == [True]
    assert 16 <= pool.owner.usage().block_count <= 32
    pool.owner.check()


# -- damage


def test_a_report_of_damage_is_checked_before_it_is_believed():
    pool = OwnedMemory()
    pool.put(1)
    pool.owner.quarantine([key_of(1), key_of(2)], TENANT)
    assert pool.present(1) == [True], "a broken reader cannot empty the pool"

    pool.memory[pool.offset_of(1) + 300] ^= 1
    pool.owner.quarantine([key_of(1)], OTHER_TENANT)
    assert pool.present(1) == [True], "not theirs to speak of"
    pool.owner.quarantine([key_of(1)], TENANT)

    assert pool.present(1) == [False]
    assert pool.owner.usage().quarantined_count == 1
    assert pool.put(1) == "stored"
    pool.owner.check()


def test_readers_report_through_memory():
    pool = OwnedMemory()
    pool.put(1)
    pool.put(2)
    damaged, intact = pool.offset_of(1), pool.offset_of(2)
    pool.memory[damaged + 300] ^= 1
    pool.words[SUSPECT_FIRST_WORD], pool.words[SUSPECT_FIRST_WORD + 63] = damaged, intact
    pool.words[SUSPECT_FIRST_WORD + 1] = 77  # nonsense is ignored

    pool.owner.tick(1.0)

    assert pool.present(1, 2) == [False, True]
    assert pool.words[SUSPECT_FIRST_WORD] == 0


def test_a_flood_of_reports_is_looked_at_piece_by_piece(monkeypatch):
    monkeypatch.setattr(owner, "INSPECT_BYTES_MAX", 2 * COPY_BYTES)
    pool = OwnedMemory()
    for number in range(6):
        pool.put(number)
    for number, offset in [(number, pool.offset_of(number)) for number in range(6)]:
        pool.memory[offset + 300] ^= 1
        pool.words[SUSPECT_FIRST_WORD + number] = offset if number < 3 else 0

    pool.owner.tick(1.0)
    assert pool.owner.usage().quarantined_count == 2
    pool.owner.tick(2.0)
    assert pool.owner.usage().quarantined_count == 3
    pool.owner.quarantine([key_of(number) for number in range(3, 6)], TENANT)
    assert pool.present(3, 4, 5) == [False, False, True]


def test_a_batch_that_meets_a_full_class_looks_for_room_once():
    """Finding out that nothing can go takes a look at every slot: a large batch would stop the loop."""
    asked = []
    pool = OwnedMemory(more=lambda: asked.append("more"))
    held = pool.owner.reserve([Want(key_of(number), COPY_BYTES) for number in range(8)], 1, TENANT, 0.0)
    assert {grant.status for grant in held} == {"granted"}

    late = pool.owner.reserve([Want(key_of(number), COPY_BYTES) for number in range(50, 90)], 2, TENANT, 1.0)
    assert {grant.status for grant in late} == {"full"}
    assert len(asked) == 1

    pool.owner.abort([held[0].token], 1)
    assert pool.reserve(50, holder=2, now=1.0).status == "granted", "the next batch looks again"


def test_a_scribbled_index_entry_is_repaired_by_the_next_writer():
    pool = OwnedMemory()
    pool.put(1)
    index = slice(pool.layout.index_offset, pool.layout.hazard_offset)
    before = bytes(pool.memory[index])
    pool.memory[index] = bytes(len(before))

    assert pool.reserve(1).status == "present"

    assert bytes(pool.memory[index]) == before


# -- pins, tenants, growth, time


def test_pin_budget_is_shared_by_the_clients_there_are():
    pool = OwnedMemory(pin_budget_bytes=12_000)

    assert pool.owner.open_pins(1, 4) == (0, 4, 12_000)
    assert pool.owner.open_pins(2, 4) == (4, 4, 6_000)
    assert pool.words[PIN_SHARE_WORD] == 6_000
    pool.owner.release_holder(1)
    assert pool.words[PIN_SHARE_WORD] == 12_000
    assert pool.owner.open_pins(3, 1 << 20)[:2] == (8, 8), (
        "an eighth of the table, past the words not yet swept"
    )


def test_tenants_do_not_see_each_other_in_a_shared_region():
    pool = OwnedMemory(region_tenant=bytes(16))
    assert pool.put(1) == "stored"

    assert pool.owner.present([key_of(1)], OTHER_TENANT) == [False]
    assert pool.owner.lease(key_of(1), OTHER_TENANT) is None
    assert pool.owner.listing(b"", 10, OTHER_TENANT) == []
    assert pool.owner.reserve([Want(key_of(1), COPY_BYTES)], 1, OTHER_TENANT, 0.0)[0].status == "refused"
    assert pool.owner.present([key_of(1)], ANY_TENANT) == [True]


def test_a_listing_is_in_order_and_can_be_continued():
    pool = OwnedMemory()
    for number in range(6):
        pool.put(number)
    keys = sorted(key_of(number) for number in range(6))

    first = pool.owner.listing(b"", 4, TENANT)
    rest = pool.owner.listing(first[-1].key, 4, TENANT)

    assert [item.key for item in [*first, *rest]] == keys
    assert {item.copy_bytes for item in first} == {COPY_BYTES}


def test_memory_that_arrives_later_is_used_then():
    pool = OwnedMemory(slab_count=2, backed_bytes=0)
    assert pool.reserve(1).status == "full"

    pool.owner.grow(pool.layout.slots_offset + SLAB_BYTES)

    assert pool.reserve(1).status == "granted"
    assert pool.owner.usage().capacity_bytes == SLAB_BYTES
    assert pool.words[BACKED_WORD] == pool.layout.slots_offset + SLAB_BYTES


def test_memory_is_asked_for_before_anything_is_evicted():
    reaches: list[int] = []
    pool = OwnedMemory(slab_count=2, backed_bytes=0, more=lambda: reaches.pop(0) if reaches else None)
    first = pool.layout.slots_offset + SLAB_BYTES
    reaches += [first, first + SLAB_BYTES]

    assert [pool.put(number) for number in range(2 * SLOTS)] == ["stored"] * 2 * SLOTS
    assert pool.owner.usage().evicted_count == 0
    assert pool.owner.spare_bytes == 0

    assert pool.put(50) == "stored"
    assert pool.owner.usage().evicted_count == 1


def test_no_reserve_of_free_slots_is_made_by_evicting_while_there_is_memory():
    reaches: list[int] = []
    pool = OwnedMemory(
        slab_count=17,
        layout={"index_entries": 1024},
        backed_bytes=0,
        more=lambda: reaches.pop(0) if reaches else None,
    )
    first = pool.layout.slots_offset + 16 * SLAB_BYTES
    reaches.append(first)
    assert [pool.put(number) for number in range(16 * SLOTS)] == ["stored"] * 16 * SLOTS

    reaches.append(first + SLAB_BYTES)
    pool.owner.tick(1.0)
    assert pool.owner.usage().evicted_count == 0
    assert pool.owner.spare_bytes == SLAB_BYTES

    assert [pool.put(100 + number) for number in range(SLOTS)] == ["stored"] * SLOTS
    pool.owner.tick(2.0)
    assert pool.owner.usage().evicted_count == 1


def test_the_deadline_is_the_next_expiry_or_the_next_look():
    pool = OwnedMemory(reservation_ttl_s=0.1)
    assert pool.owner.deadline() == 0.0
    pool.owner.tick(5.0)
    assert pool.owner.deadline() == 5.25

    pool.reserve(1, now=5.0)
    assert pool.owner.deadline() == 5.1
    pool.owner.tick(5.1)
    assert pool.owner.deadline() == 5.35
    assert pool.owner.usage().reserved_bytes == 0


def test_a_reservation_that_may_not_evict_leaves_what_is_there():
    pool = OwnedMemory()
    fitting = 0
    while pool.owner.reserve([Want(key_of(fitting), COPY_BYTES)], 1, TENANT, 0.0, evict=False)[0].token:
        fitting += 1
    assert fitting and pool.owner.usage().evicted_count == 0
    pool.owner.release_holder(1)
    for number in range(fitting):
        assert pool.put(number) == "stored"
    kept = pool.owner.listing(b"", 10 * fitting, TENANT)
    refused = pool.owner.reserve([Want(key_of(1000), COPY_BYTES)], 1, TENANT, 0.0, evict=False)
    assert [grant.status for grant in refused] == ["full"]
    assert pool.owner.listing(b"", 10 * fitting, TENANT) == kept


def test_a_lease_that_is_no_use_leaves_no_mark():
    pool = OwnedMemory()
    pool.put(1)
    lease = pool.owner.lease(key_of(1), TENANT, use=False)
    assert lease is not None and pool.owner.used([key_of(1), key_of(2)]) == [False, False]
    lease.release()
    lease = pool.owner.lease(key_of(1), TENANT)
    assert lease is not None and pool.owner.used([key_of(1)]) == [True]
    lease.release()
