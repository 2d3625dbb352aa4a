"""Memory is found by its address, and deregistered when nobody uses it any more."""

import threading
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from l2_rdma.transports.verbs.registered import MemoryTable, RegisteredMemory


def registered(table, address, length, **options):
    closed = []
    region = SimpleNamespace(lkey=1, close=lambda: closed.append(1))
    memory = RegisteredMemory(region, object(), address, length, table, **options)
    table.add(memory)
    return memory, closed


RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.booleans()), max_size=6)


@given(RANGES, st.integers(0, 60), st.integers(1, 10), st.booleans(), st.sets(st.integers(0, 5)))
def test_what_covers_all_of_it_is_found(ranges, address, length, writable, removed):
    table = MemoryTable(threading.RLock())
    memories = [registered(table, begin, size, writable=may_write)[0] for begin, size, may_write in ranges]
    for number in removed & set(range(len(memories))):
        memories[number].close()
    alive = [memory for number, memory in enumerate(memories) if number not in removed]
    fitting = [
        memory
        for memory in alive
        if memory.address <= address
        and address + length <= memory.address + memory.length
        and (memory.writable or not writable)
    ]
    found = table.find(address, length, writable=writable)

    assert (found in fitting) if fitting else found is None
    assert table.empty == (not alive)


def test_it_is_deregistered_when_it_is_closed_and_unused():
    table = MemoryTable(threading.RLock())
    memory, closed = registered(table, 0, 10)
    memory.use()
    memory.use()
    memory.close()
    memory.close()
    assert table.find(0, 10, writable=True) is None
    memory.release()
    assert closed == []
    memory.release()
    assert closed == [1]


def test_closing_all():
    table = MemoryTable(threading.RLock())
    all_closed = [registered(table, 0, 10)[1] for _ in range(3)]
    table.close_all()
    assert all_closed == [[1]] * 3
    assert table.empty


def test_an_abandoned_table_leaves_registrations_to_the_parent():
    table = MemoryTable(threading.RLock())
    memory, closed = registered(table, 0, 10)
    table.abandon(threading.RLock())
    memory.close()
    table.close_all()
    assert closed == []
