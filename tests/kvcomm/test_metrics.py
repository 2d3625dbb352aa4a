"""Cells that count exactly, and one table that everything else is held to."""

import re
import subprocess
import sys
import threading
from bisect import bisect_left
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.blockstore import StoreUsage
from kvcomm.metrics import (
    DEFINITIONS,
    SECONDS_BOUNDS,
    Counter,
    Gauge,
    Histogram,
    Metrics,
    Scope,
    reference,
)

ROOT = Path(__file__).resolve().parents[2]
SCOPES: tuple[Scope, ...] = ("client", "pool", "shard")


def test_a_cell_is_one_series() -> None:
    metrics = Metrics("client")
    hits = metrics.counter("kvcomm_fetch_blocks_total", tier="l2")
    hits.add()
    hits.add(4)
    assert metrics.counter("kvcomm_fetch_blocks_total", tier="l2") is hits
    assert metrics.counter("kvcomm_fetch_blocks_total", tier="l1").value == 0
    assert metrics.snapshot()['kvcomm_fetch_blocks_total{tier="l2"}'] == 5


def test_each_process_has_the_metrics_of_its_role() -> None:
    for scope in SCOPES:
        names = {definition.name for definition, _ in Metrics(scope).families()}
        assert names == {each.name for each in DEFINITIONS if scope in each.scopes}
    with pytest.raises(ValueError, match="a pool has no metric 'kvcomm_fsyncs_total'"):
        Metrics("pool").counter("kvcomm_fsyncs_total")


def test_every_series_is_there_from_the_start() -> None:
    snapshot = Metrics("client").snapshot()
    assert snapshot['kvcomm_copies_refused_total{tier="l3"}'] == 0
    assert snapshot['kvcomm_record_operations_total{operation="put",outcome="failed"}'] == 0
    assert snapshot['kvcomm_operation_seconds_count{operation="fetch"}'] == 0
    assert len(snapshot) < 200, "labels multiply"


@pytest.mark.parametrize(
    ("name", "labels", "says"),
    [
        ("kvcomm_typo_total", {}, "has no metric"),
        ("kvcomm_fetch_blocks_total", {}, "has the labels"),
        ("kvcomm_fetch_blocks_total", {"tire": "l1"}, "has the labels"),
        ("kvcomm_fetch_blocks_total", {"tier": "l4"}, "has no series"),
        ("kvcomm_negative_hits_total", {"tier": "l1"}, "has the labels"),
        ("kvcomm_operation_seconds", {"operation": "fetch"}, "is a histogram"),
    ],
)
def test_what_is_not_declared_cannot_be_counted(name: str, labels: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Metrics("client").counter(name, **labels)


def test_gauges_and_store_usage() -> None:
    metrics = Metrics("pool")
    connections = metrics.gauge("kvcomm_connections")
    connections.add()
    connections.add()
    connections.add(-1)
    metrics.store(StoreUsage(100, 90, 5, 7, 3, 11, 1))
    metrics.store(StoreUsage(100, 80, 0, 0, 2, 12, 1))
    snapshot = metrics.snapshot()
    assert snapshot["kvcomm_connections"] == 1
    assert snapshot["kvcomm_store_capacity_bytes"] == 100
    assert snapshot["kvcomm_store_used_bytes"] == 80
    assert snapshot["kvcomm_store_reserved_bytes"] == snapshot["kvcomm_store_pinned_bytes"] == 0
    assert snapshot["kvcomm_store_blocks"] == 2
    assert snapshot["kvcomm_store_evictions_total"] == 12
    assert snapshot["kvcomm_store_quarantines_total"] == 1


def test_a_counter_that_went_back_is_our_bug() -> None:
    counter = Counter()
    counter.advance_to(7)
    with pytest.raises(AssertionError, match="went back from 7 to 6"):
        counter.advance_to(6)


@given(st.lists(st.floats(0, 100, allow_nan=False)))
def test_a_histogram_equals_sorting_by_hand(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    for index, bound in enumerate(SECONDS_BOUNDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_bounds_ascend_and_belong_to_their_bucket() -> None:
    assert sorted(set(SECONDS_BOUNDS)) == list(SECONDS_BOUNDS)
    assert [bisect_left(SECONDS_BOUNDS, bound) for bound in SECONDS_BOUNDS] == list(
        range(len(SECONDS_BOUNDS))
    )


@pytest.mark.slow
def test_no_increment_of_many_threads_is_lost() -> None:
    counter, gauge, histogram = Counter(), Gauge(), Histogram()
    begin = threading.Barrier(8)

    def count() -> None:
        begin.wait(20)
        for _ in range(20_000):
            counter.add()
            gauge.add(2)
            histogram.observe(0.5)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=count) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval_s)
    assert counter.value == 160_000
    assert gauge.value == 320_000
    assert (histogram.count, histogram.sum) == (160_000, 80_000.0)


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_names_follow_the_rules_of_prometheus(definition: object) -> None:
    from kvcomm.metrics import Definition

    assert isinstance(definition, Definition)
    assert re.fullmatch(r"kvcomm_[a-z0-9_]*[a-z0-9]", definition.name)
    assert (definition.kind == "counter") == definition.name.endswith("_total")
    assert (definition.kind == "histogram") == definition.name.endswith("_seconds")
    assert definition.help.endswith(".")
    for label, values in definition.labels.items():
        assert re.fullmatch(r"[a-z]+", label)
        assert len(set(values)) == len(values) > 1


def test_names_are_given_once() -> None:
    names = [definition.name for definition in DEFINITIONS]
    assert len(set(names)) == len(names)


def test_the_page_is_what_the_code_says() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert page == reference(), "run scripts/gen-docs"
    assert all(f"| `{definition.name}` |" in page for definition in DEFINITIONS)


@pytest.mark.processes
def test_the_pages_are_made_by_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "scripts/gen-docs"), str(tmp_path)], check=True, timeout=60)
    for page in ("configuration.md", "metrics.md"):
        assert (tmp_path / "docs" / page).read_text() == (ROOT / "docs" / page).read_text()


@pytest.mark.processes
def test_counting_does_not_load_the_prometheus_client() -> None:
    program = "import sys, kvcomm.metrics\nassert 'prometheus_client' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
