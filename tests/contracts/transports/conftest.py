"""Every test here that asks for ``world`` runs once for each transport; what ran where is listed at the
end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.contracts.transports.worlds import Link, Peer, World, directory_for_regions, reason_to_skip

NEEDS = {
    "verbs": "needs an RDMA device; make test-rdma runs it in a guest that has one",
    "cuda": "needs an NVIDIA GPU",
}
"""What is not on every machine.  The others run everywhere, or fail."""
_PROPERTY = "transport"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("shm"),
        pytest.param("tcp"),
        pytest.param("verbs", marks=pytest.mark.rdma),
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("cuda-plain"),  # the same over a GPU of plain memory
    ],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with directory_for_regions() as directory:
        yield World(request.param, directory)


@pytest.fixture(scope="module")
def peer(world: World) -> Iterator[Peer]:
    """Shared by the tests of a module: they leave it as it is, but for what is in its scratch."""
    with world.peer() as peer:
        yield peer


@pytest.fixture(scope="module")
def _kept(world: World) -> Iterator[list[tuple[Peer, ExitStack]]]:
    """The peer of the test before, if it still serves: to start one takes long."""
    kept: list[tuple[Peer, ExitStack]] = []
    yield kept
    for _, stack in kept:
        stack.close()


@pytest.fixture
def own_peer(world: World, _kept: list[tuple[Peer, ExitStack]]) -> Iterator[Peer]:
    """To be killed, paused and written to; nobody else uses it."""
    if _kept:
        peer, stack = _kept.pop()
    else:
        stack = ExitStack()
        peer = stack.enter_context(world.peer(incarnation=31))
    with ExitStack() as failing:
        failing.push(stack)
        yield peer
        if peer.serves():
            _kept.append((peer, stack))
            failing.pop_all()


@pytest.fixture
def link(world: World, peer: Peer) -> Iterator[Link]:
    with world.link(peer) as link:
        yield link


@pytest.fixture
def own_link(world: World, own_peer: Peer) -> Iterator[Link]:
    with world.link(own_peer) as link:
        yield link


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        call = getattr(item, "callspec", None)
        transport = call.params.get("world") if call is not None else None
        if transport is None:
            continue
        item.user_properties.append((_PROPERTY, transport))
        if transport in NEEDS and (reason := _missing(transport)):
            item.add_marker(pytest.mark.skip(f"{NEEDS[transport]} ({reason})"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A transport that is missing is one line of the summary with a count, not one for each test."""
    report = yield
    if report.skipped and dict(item.user_properties).get(_PROPERTY) in NEEDS:
        assert isinstance(report.longrepr, tuple)
        path, _, reason = report.longrepr
        report.longrepr = (path, None, reason)  # type: ignore[assignment]
    return report


@cache
def _missing(transport: str) -> str | None:
    return reason_to_skip(transport)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which transports were tested, and why the others were not."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            transport = dict(getattr(report, "user_properties", [])).get(_PROPERTY)
            if transport is None:
                continue
            counts[transport][outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[transport][report.longrepr[2].removeprefix("Skipped: ")] += 1
    if not counts:
        return
    terminalreporter.section("transports", sep="-")
    for transport, outcomes in counts.items():
        numbers = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        terminalreporter.write_line(f"{transport:<10} {numbers}")
        for reason, count in reasons[transport].items():
            terminalreporter.write_line(f"{'':<10} {count} skipped: {reason}")
