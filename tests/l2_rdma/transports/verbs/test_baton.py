"""A lock made of a token."""

import threading

import pytest

from l2_rdma.transports.verbs.baton import Baton
from tests.peers import PATIENCE_S


def test_one_at_a_time():
    baton, inside, most = Baton(), [], []

    def enter_often():
        for _ in range(300):
            with baton:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=enter_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert len(most) == 4 * 300
    assert set(most) == {1}


def test_who_waits_gets_it_when_it_is_given_back():
    baton, entered = Baton(), threading.Event()

    def enter():
        with baton:
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    with baton:
        thread.start()
        assert not entered.wait(0.02)
    assert entered.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert baton.qsize() == 1


class Empty(Exception):
    """False, like an empty container."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Empty])
def test_an_exception_goes_on_its_way_and_gives_it_back(kind):
    baton = Baton()
    for _ in range(3):
        with pytest.raises(kind), baton:
            raise kind
    assert baton.qsize() == 1
