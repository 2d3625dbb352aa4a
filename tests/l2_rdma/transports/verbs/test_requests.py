"""Work requests are used again, and freed once."""

import pytest

from l2_rdma.transports.verbs.requests import KEPT_MAX, Local, WorkRequests
from tests.l2_rdma.transports.verbs.fabric import Fabric


@pytest.fixture
def fabric():
    return Fabric()


@pytest.fixture
def requests(fabric):
    made = WorkRequests(fabric.binding)
    yield made
    made.close()
    made.close()
    assert fabric.work_requests == 0


def test_the_same_memory_gets_the_same_request(requests, fabric):
    local = Local(64, 8, 3, last=True)
    first = requests.take(local, None)
    second = requests.take(local, None)
    assert first is not second, "both are lent"
    requests.give_back([(local, first), (local, second)])

    assert {requests.take(local, None), requests.take(local, None)} == {first, second}
    assert fabric.work_requests == 2
    requests.give_back([(local, first), (local, second)])


def test_one_within_a_chain_is_never_used_at_its_end(requests):
    within, end = Local(64, 8, 3, last=False), Local(64, 8, 3, last=True)
    last = requests.take(end, None)
    inner = requests.take(within, last)
    requests.give_back([(end, last), (within, inner)])

    assert requests.take(end, None) is last
    again = requests.take(within, last)
    assert again is inner
    assert again.following is last
    requests.give_back([(end, last), (within, inner)])


def test_those_kept_are_bounded(requests, fabric):
    for number in range(KEPT_MAX + 10):
        local = Local(number, 8, 3, last=True)
        requests.give_back([(local, requests.take(local, None))])
    assert fabric.work_requests <= KEPT_MAX
