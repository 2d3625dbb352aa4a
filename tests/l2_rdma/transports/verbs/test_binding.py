"""pyverbs in its versions, and without it."""

import enum
import importlib
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvcomm.errors import Unavailable
from l2_rdma.transports.known import find_transports
from l2_rdma.transports.port import WireOptions
from l2_rdma.transports.verbs import binding
from tests.l2_rdma.transports.verbs.fabric import Fabric, FabricError, FabricRDMAError


class _States(enum.IntEnum):
    IBV_QPS_ERR = 6


class _Flags(enum.IntFlag):
    IBV_ACCESS_LOCAL_WRITE = 1
    IBV_ACCESS_REMOTE_READ = 4


def test_members_of_enum_classes_become_flat_integers():
    module = SimpleNamespace(ibv_qp_state=_States, ibv_access_flags=_Flags, IBV_PLAIN=3, other=1)
    flat = binding.flattened(module)

    assert vars(flat) == {
        "IBV_QPS_ERR": 6,
        "IBV_ACCESS_LOCAL_WRITE": 1,
        "IBV_ACCESS_REMOTE_READ": 4,
        "IBV_PLAIN": 3,
    }
    assert all(type(value) is int for value in vars(flat).values())


def test_the_kernels_answer_is_told_once():
    assert binding.explain(FabricError("Just words.")) == "Just words"
    assert binding.explain(FabricRDMAError("Failed to find device x", -1)) == "Failed to find device x"
    assert binding.explain(FabricRDMAError("Failed to open", 13)) == "Failed to open (Permission denied)"
    told = FabricRDMAError("Failed to open.\n Errno: 13, Permission denied", 13)
    assert binding.explain(told) == "Failed to open. Errno: 13, Permission denied"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module named 'pyverbs'", name="pyverbs"), "pyverbs is not installed"),
        (
            ImportError("libibverbs.so.1: version 'IBVERBS_PRIVATE_59' not found"),
            "cannot be loaded.*PRIVATE_59",
        ),
    ],
)
def test_without_pyverbs_the_transport_is_refused_with_advice(monkeypatch, error, message):
    genuine = importlib.import_module

    def missing(name, *arguments):
        if name.startswith("pyverbs"):
            raise error
        return genuine(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(Unavailable, match=message):
        binding.load()

    found = find_transports(["verbs"], WireOptions())
    assert not found.running
    assert "python3-pyverbs" in found.refused["verbs"]


class _Channels:
    """What pyverbs 44 and 59 make, with a descriptor that can be told from others by its name, or not."""

    def __init__(self, monkeypatch, *, tells, appear=1):
        self._links: dict[str, str] = {}
        self._tells, self._appear = tells, appear
        genuine = os.readlink
        monkeypatch.setattr(os, "readlink", lambda path: self._links.get(path) or genuine(path))

    def __call__(self, _context):
        descriptors = [os.eventfd(0) for _ in range(self._appear)]
        self._links |= {f"/proc/self/fd/{each}": "anon_inode:[infinibandevent]" for each in descriptors}
        self.opened = descriptors
        return SimpleNamespace(fd=descriptors[0]) if self._tells else SimpleNamespace()


@pytest.mark.parametrize(("tells", "appear", "found"), [(True, 1, True), (False, 1, True), (False, 2, False)])
def test_the_descriptor_of_a_completion_channel(monkeypatch, tells, appear, found):
    channels = _Channels(monkeypatch, tells=tells, appear=appear)
    known = replace(Fabric().binding, CompChannel=channels)
    _, descriptor = binding.event_channel(known, None)

    assert descriptor == (channels.opened[0] if found else None)
    for each in channels.opened:
        os.close(each)
