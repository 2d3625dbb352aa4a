"""Transports are made once, when they are needed, and end when the last user is done."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from kvcomm.errors import Unavailable
from kvcomm.slabs import Slabs
from l2_rdma.transports.known import Found
from l2_rdma.wires import Wires


class Wire:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = False
        self.registered: list[memoryview] = []

    def register(self, buffer: memoryview) -> Wire:
        assert not self.closed
        self.registered.append(buffer)
        return Known(self, buffer)  # type: ignore[return-value]

    def close(self) -> None:
        assert not self.registered, "what was registered with it is closed first"
        self.closed = True


class Known:
    def __init__(self, wire: Wire, buffer: memoryview) -> None:
        self._wire, self._buffer = wire, buffer

    def close(self) -> None:
        self._wire.registered.remove(self._buffer)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Wire]:
    wires: list[Wire] = []

    def find(names: Sequence[str], options: Any) -> Any:
        new = [Wire(name) for name in names if name != "cuda"]
        wires.extend(new)
        running: Any = {wire.name: wire for wire in new}
        return Found(running, {"cuda": "no GPU"})

    monkeypatch.setattr("l2_rdma.wires.find_transports", find)
    return wires


def test_they_are_found_once_and_shared_memory_is_not_one_of_them(made: list[Wire]) -> None:
    wires = Wires(("shm", "verbs", "cuda", "tcp"))
    assert made == []
    with wires.using():
        assert wires.found() is wires.found()

    assert [wire.name for wire in made] == ["verbs", "tcp"]
    assert wires.found().refused == {"cuda": "no GPU"}


def test_slabs_are_registered_with_those_that_are_used_only(made: list[Wire]) -> None:
    slabs = Slabs()
    wires = Wires(("verbs", "tcp"), slabs=slabs)
    with wires.using():
        wires.used("verbs")
        kept = slabs.take(1 << 20)
    verbs, tcp = made
    assert len(verbs.registered) == 1 and tcp.registered == []

    wires.close()
    assert (verbs.closed, tcp.closed) == (True, True)
    kept[:4] = b"mine"


def test_whoever_is_using_them_holds_up_the_end(made: list[Wire]) -> None:
    wires = Wires(("tcp",))
    with wires.using():
        wires.found()
        with wires.using():
            wires.close()
            wires.close()
        assert not made[0].closed
        with pytest.raises(Unavailable, match="closed"), wires.using():
            raise AssertionError
    assert made[0].closed


def test_an_end_before_they_were_found(made: list[Wire]) -> None:
    Wires(("tcp",)).close()
    assert made == []


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_and_leaves_its_parents_alone(made: list[Wire]) -> None:
    wires = Wires(("tcp",))
    with wires.using():
        wires.found()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with wires.using():
                    mine: Any = wires.found().running["tcp"]
                wires.close()
                status = 0 if made[1] is mine and made[1].closed and not made[0].closed else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(made) == 1 and not made[0].closed
    wires.close()
    assert made[0].closed
