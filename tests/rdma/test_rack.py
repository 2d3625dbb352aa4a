"""A rack over RDMA: pools and clients on hosts of their own, real packets, and what happens to them.

Every pool is a process bound to one device; its data wire is on 127.0.0.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest

from tests.peers import PATIENCE_S, until
from tests.rdma.clients import Client, payload
from tests.rdma.devices import counters
from tests.rdma.pools import PoolProcess, pool_process
from tests.rdma.rack import Host

pytestmark = [pytest.mark.rdma, pytest.mark.processes, pytest.mark.slow]

KIB = 1 << 10
PACKET_BYTES = 4096
BLOCK_BYTES = 128 * KIB


@pytest.fixture
def pools(rack: list[Host], tmp_path) -> Iterator[Callable[[Sequence[Host]], list[PoolProcess]]]:
    """Start a pool on each of the hosts."""
    with ExitStack() as stack:

        def start(hosts: Sequence[Host]) -> list[PoolProcess]:
            return [
                stack.enter_context(pool_process(f"pool-{host.number}", host.device, tmp_path))
                for host in hosts
            ]

        yield start


@pytest.fixture
def client_on() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(host: Host, pools: Sequence[PoolProcess], **options: float) -> Client:
        clients.append(Client(host.device, [each.pool for each in pools], **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def _sent(hosts: Sequence[Host]) -> dict[int, int]:
    return {host.number: counters(host.device)["sent_pkts"] for host in hosts}


def _homes(client: Client, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Numbers by the name of their home."""
    from l2_rdma.rack import Rack
    from tests.rdma.clients import key

    homes: dict[str, list[int]] = {pool.node: [] for pool in client.pools}
    for number, home in zip(
        numbers,
        Rack([(pool.node, pool.weight) for pool in client.pools]).homes([key(each) for each in numbers]),
        strict=True,
    ):
        assert home is not None
        homes[home].append(number)
    return homes


@pytest.mark.parametrize("size", [2, 3])
def test_every_host_reads_what_any_host_has_put(size, rack, pools, client_on):
    hosts, numbers = rack[:size], range(24)
    running = pools(hosts)
    clients = [client_on(host, running) for host in hosts]
    for client, host in zip(clients, hosts, strict=True):
        mine = list(numbers[host.number - 1 :: size])
        assert client.put(mine, BLOCK_BYTES) == ["stored"] * len(mine)

    for client, host in zip(clients, hosts, strict=True):
        before = _sent(rack)
        found = client.get(list(numbers))
        sent = {number: count - before[number] for number, count in _sent(rack).items()}

        assert sorted(found) == list(numbers)
        assert all(bytes(block.payload) == payload(number, BLOCK_BYTES) for number, block in found.items())
        for other in hosts:
            held = len(_homes(client, list(numbers))[f"pool-{other.number}"])
            assert held, "every pool is the home of some"
            if other != host:  # what a device reads from itself does not leave it
                assert sent[other.number] >= held * BLOCK_BYTES // PACKET_BYTES
        assert all(sent[other.number] == 0 for other in rack if other not in hosts)


def test_lookups_of_absent_keys_cost_the_pools_nothing(rack, pools, client_on):
    here, *there = rack
    running = pools(there)
    client = client_on(here, running)
    assert client.lookup(range(4)) == [False] * 4

    before = _sent(rack)
    pool_cpu_s, wakeups = sum(each.cpu_s for each in running), sum(each.wakeups for each in running)
    client_cpu_s = time.process_time()
    for number in range(1_000):
        assert client.lookup([100 + number]) == [False]
    client_cpu_s = time.process_time() - client_cpu_s
    pool_cpu_s = sum(each.cpu_s for each in running) - pool_cpu_s
    wakeups = sum(each.wakeups for each in running) - wakeups
    sent = {number: count - before[number] for number, count in _sent(rack).items()}

    assert sum(sent[host.number] for host in there) >= 1_000, "each was answered by a pool's device"
    assert wakeups < 500, "a pool that answered would have woken up for each"
    assert pool_cpu_s < client_cpu_s / 20


def test_a_wire_that_loses_packets_loses_no_block(rack, pools, client_on):
    here, *there = rack
    running = pools(there)
    client = client_on(here, running)
    numbers = list(range(48))
    with ExitStack() as stack:
        for host in rack:
            stack.enter_context(host.losing(2))
        before = {host.number: counters(host.device) for host in rack}
        assert client.put(numbers, BLOCK_BYTES) == ["stored"] * len(numbers)
        found = client.get(numbers)
        after = {host.number: counters(host.device) for host in rack}

    assert sorted(found) == numbers
    assert all(bytes(block.payload) == payload(number, BLOCK_BYTES) for number, block in found.items())
    again = {
        name: sum(after[number][name] - before[number][name] for number in after)
        for name in ("completer_retry_err", "out_of_seq_request", "duplicate_request")
    }
    assert any(again.values()), "packets were lost and sent again"


def test_a_pulled_cable_is_misses_in_time_and_the_others_go_on(rack, pools, client_on):
    here, near, far = rack
    running = pools([near, far])
    client = client_on(here, running, request_timeout_s=1.0)
    numbers = list(range(24))
    assert client.put(numbers, BLOCK_BYTES) == ["stored"] * len(numbers)
    homes = _homes(client, numbers)
    assert sorted(client.get(numbers)) == numbers

    far.pull()
    begun = time.monotonic()
    found = client.get(numbers, within_s=5.0)
    assert time.monotonic() - begun < 5.0
    assert sorted(found) == homes["pool-2"]
    assert all(bytes(block.payload) == payload(number, BLOCK_BYTES) for number, block in found.items())

    far.plug()
    until(lambda: sorted(client.get(numbers)) == numbers, 2 * PATIENCE_S)


def test_a_pool_that_stands_still_is_read_all_the_same(rack, pools, client_on):
    """Nobody but its device answers."""
    here, there, _ = rack
    [pool] = pools([there])
    client = client_on(here, [pool])
    numbers = list(range(8))
    assert client.put(numbers, BLOCK_BYTES) == ["stored"] * len(numbers)
    assert client.lookup(numbers) == [True] * len(numbers)
    pool.pause()
    try:
        found = client.get(numbers)
    finally:
        pool.resume()
    assert sorted(found) == numbers
    assert all(bytes(block.payload) == payload(number, BLOCK_BYTES) for number, block in found.items())


def test_a_killed_pool_is_misses_and_its_successor_is_found(rack, pools, client_on, tmp_path):
    here, there, _ = rack
    [pool] = pools([there])
    client = client_on(here, [pool], request_timeout_s=1.0)
    numbers = list(range(8))
    assert client.put(numbers, BLOCK_BYTES) == ["stored"] * len(numbers)
    pool.kill()
    assert client.get(numbers, within_s=5.0) == {}

    with pool_process(pool.node, there.device, tmp_path, address=pool.address, incarnation=22):
        until(lambda: client.put([1], BLOCK_BYTES) == ["stored"])
        assert client.lookup(numbers) == [number == 1 for number in numbers]
        assert bytes(client.get([1])[1].payload) == payload(1, BLOCK_BYTES)
