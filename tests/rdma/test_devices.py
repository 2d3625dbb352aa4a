"""The devices are what the tests of this folder take them for: real verbs, and packets that really travel."""

import os
import struct

import pytest

from tests.rdma.devices import counters, devices
from tests.rdma.rack import Host

pytestmark = pytest.mark.rdma

MIB = 1 << 20


def test_the_library_lists_the_devices_of_the_kernel() -> None:
    from pyverbs.device import get_device_list

    assert sorted(found.name.decode() for found in get_device_list()) == devices() != []


def test_a_device_reads_its_own_memory(device: str) -> None:
    import pyverbs.enums as e

    from tests.rdma.pairs import Completion, Side

    with Side(device, 4096) as reader, Side(device, 4096) as owner:
        reader.connect(owner)
        owner.connect(reader)
        owner.memory[:] = data = os.urandom(4096)
        reader.post_read(1, owner, 0, 4096)
        assert reader.completions(1, within_s=5.0) == [Completion(e.IBV_WC_SUCCESS, 1)]
        assert bytes(reader.memory) == data


def test_reads_cross_the_wire(rack: list[Host]) -> None:
    import pyverbs.enums as e

    from tests.rdma.pairs import Side

    here, there, aside = (host.device for host in rack)
    before = {name: counters(name) for name in (here, there, aside)}
    with Side(here, MIB) as reader, Side(there, MIB) as owner:
        reader.connect(owner)
        owner.connect(reader)
        assert reader.active_mtu == e.IBV_MTU_4096
        owner.memory[:] = data = os.urandom(MIB)
        for operation in range(8):
            reader.post_read(operation, owner, operation * MIB // 8, MIB // 8)
        done = reader.completions(8, within_s=20.0)
        assert {each.status for each in done} == {e.IBV_WC_SUCCESS}
        assert sorted(each.operation for each in done) == list(range(8))
        assert bytes(reader.memory) == data
    sent = {name: counters(name)["sent_pkts"] - before[name]["sent_pkts"] for name in before}
    assert sent[there] >= MIB // 4096  # the answers
    assert 0 < sent[here] < sent[there]  # the requests
    assert sent[aside] == 0


def test_counters_at_a_distance_wrap(rack: list[Host]) -> None:
    from tests.rdma.pairs import Side

    with Side(rack[0].device, 4096) as client, Side(rack[2].device, 4096) as owner:
        client.connect(owner)
        owner.connect(client)
        seen = []
        for amount in (5, 2**64 - 3, 1):
            client.post_fetch_add(amount % 64, owner, 64, amount)
            client.completions(1, within_s=5.0)
            seen.append(struct.unpack_from("=Q", client.memory, 64)[0])
        assert seen == [0, 5, 2]
        assert struct.unpack_from("=Q", owner.memory, 64)[0] == 3


def test_lost_packets_are_sent_again(rack: list[Host]) -> None:
    """Soft-RoCE repeats as a NIC does, so that a test with loss tests more than an error path."""
    import pyverbs.enums as e

    from tests.rdma.pairs import Side

    here, there = rack[0], rack[1]
    with Side(here.device, 4 * MIB) as reader, Side(there.device, 4 * MIB) as owner:
        reader.connect(owner, timeout=12)
        owner.connect(reader, timeout=12)
        owner.memory[:] = data = os.urandom(4 * MIB)
        before = counters(here.device)
        with here.losing(2), there.losing(2):
            for operation in range(64):
                reader.post_read(operation, owner, operation * MIB // 16, MIB // 16)
            done = reader.completions(64, within_s=60.0)
        assert {each.status for each in done} == {e.IBV_WC_SUCCESS}
        assert bytes(reader.memory) == data
    assert counters(here.device)["completer_retry_err"] > before["completer_retry_err"]


def test_a_pulled_cable_ends_a_read_with_an_error(rack: list[Host]) -> None:
    import pyverbs.enums as e

    from tests.rdma.pairs import Completion, Side

    with Side(rack[0].device, 4096) as reader, Side(rack[1].device, 4096) as owner:
        reader.connect(owner, timeout=8, retries=2)
        owner.connect(reader, timeout=8, retries=2)
        rack[1].pull()
        reader.post_read(1, owner, 0, 4096)
        assert reader.completions(1, within_s=10.0) == [Completion(e.IBV_WC_RETRY_EXC_ERR, 1)]
