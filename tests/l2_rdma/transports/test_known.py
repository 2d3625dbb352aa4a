"""What runs is found, what does not has a reason."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from kvcomm.errors import Refused, Unavailable
from l2_rdma.transports.known import find_providers, find_transports
from l2_rdma.transports.port import WireOptions
from l2_rdma.transports.shm import ShmProvider, ShmTransport

OPTIONS = WireOptions(listen_host="127.0.0.9")


@pytest.fixture
def module(monkeypatch):
    """Makes a transport's module up."""

    def make(name, **functions):
        made = ModuleType(f"l2_rdma.transports.{name}")
        vars(made).update(functions)
        monkeypatch.setitem(sys.modules, made.__name__, made)

    return make


def failing(error):
    def make(*arguments):
        raise error

    return make


def test_shared_memory_runs_on_both_sides(make_pool):
    assert isinstance(find_transports(["shm"], OPTIONS).running["shm"], ShmTransport)
    assert isinstance(find_providers(["shm"], make_pool().region, OPTIONS).running["shm"], ShmProvider)


def test_each_is_made_with_the_options_in_the_order_that_was_asked_for(module):
    module("one", make_transport=lambda options: ("one", options))
    module("two", make_transport=lambda options: ("two", options))

    found: Any = find_transports(["two", "one"], OPTIONS)

    assert list(found.running.items()) == [("two", ("two", OPTIONS)), ("one", ("one", OPTIONS))]
    assert found.refused == {}


def test_a_provider_gets_the_region(module, make_pool):
    region = make_pool().region
    module("one", make_provider=lambda *arguments: arguments)

    found: Any = find_providers(["one"], region, OPTIONS)
    assert found.running == {"one": (region, OPTIONS)}


def test_the_reason_of_what_does_not_run_is_kept_and_the_rest_runs(module):
    module("one", make_transport=failing(Unavailable("no device: plug one in")))
    module("two", make_transport=failing(Refused("not for you")))
    module("three", make_transport=lambda options: "three")

    found: Any = find_transports(["one", "two", "three"], OPTIONS)

    assert found.running == {"three": "three"}
    assert found.refused == {"one": "no device: plug one in", "two": "not for you"}


def test_a_module_that_misses_a_package_says_which(module):
    def make(options):
        importlib.import_module("a_package_that_nobody_has")

    module("one", make_transport=make)

    assert "a_package_that_nobody_has" in find_transports(["one"], OPTIONS).refused["one"]


def test_a_transport_that_nobody_has_written_is_refused(module):
    assert "carrier_pigeon" in find_transports(["carrier_pigeon"], OPTIONS).refused["carrier_pigeon"]


def test_a_bug_is_not_a_reason(module):
    module("one", make_transport=failing(TypeError("ours")))

    with pytest.raises(TypeError, match="ours"):
        find_transports(["one"], OPTIONS)


def test_slots_on_a_gpu_are_offered_by_the_wire_that_reaches_them_alone(module, make_pool):
    region = make_pool().region
    region.device = object()
    module("cuda", make_provider=lambda region, options: "cuda")
    module("tcp", make_provider=lambda region, options: "would serve holes")

    found: Any = find_providers(["shm", "cuda", "tcp"], region, OPTIONS)

    assert found.running == {"cuda": "cuda"}
    assert set(found.refused) == {"shm", "tcp"}
    assert "GPU" in found.refused["tcp"]
