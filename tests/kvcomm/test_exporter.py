"""What Prometheus reads is what was counted."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcomm import exporter as module
from kvcomm.errors import Refused
from kvcomm.exporter import Exporter, in_loop
from kvcomm.metrics import Metrics

LABELS = {"node": "pool-0", "role": "pool", "instance": "one", "version": "0.1.0"}
PATIENCE_S = 20.0


@contextmanager
def exporting(metrics: Metrics, **more: object) -> Iterator[str]:
    exporter = Exporter(metrics, LABELS, **more)  # type: ignore[arg-type]
    try:
        yield exporter.start()
    finally:
        exporter.close()
        exporter.close()


def get(address: str, accept: str = "") -> tuple[int, str, str]:
    host, port = address.split(":")
    connection = HTTPConnection(host, int(port), timeout=PATIENCE_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept} if accept else {})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type") or "", response.read().decode()
    finally:
        connection.close()


def scrape(address: str) -> dict[str, float]:
    status, _, text = get(address)
    assert status == 200
    numbers: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            pairs = ",".join(f'{label}="{value}"' for label, value in sorted(sample.labels.items()))
            numbers[f"{sample.name}{{{pairs}}}" if pairs else sample.name] = sample.value
    return numbers


def test_every_number_is_served() -> None:
    metrics = Metrics("client")
    metrics.counter("kvcomm_fetch_tokens_total", tier="l2").add(2048)
    metrics.counter("kvcomm_record_operations_total", operation="put", outcome="degraded").add(3)
    took = metrics.histogram("kvcomm_operation_seconds", operation="fetch")
    for seconds in (1e-5, 2e-4, 2e-4, 60.0):
        took.observe(seconds)
    with exporting(metrics) as address:
        served = scrape(address)
    assert metrics.snapshot().items() <= served.items()
    assert served['kvcomm_operation_seconds_bucket{le="1e-05",operation="fetch"}'] == 1
    assert served['kvcomm_operation_seconds_bucket{le="0.00025",operation="fetch"}'] == 3
    assert served['kvcomm_operation_seconds_bucket{le="10.0",operation="fetch"}'] == 3
    assert served['kvcomm_operation_seconds_bucket{le="+Inf",operation="fetch"}'] == 4
    assert served["process_resident_memory_bytes"] > 0


def test_each_scope_can_be_served() -> None:
    for metrics in (Metrics("pool"), Metrics("shard")):
        with exporting(metrics) as address:
            served = scrape(address)
        assert metrics.snapshot().items() <= served.items()
        info = 'kvcomm_node_info{instance="one",node="pool-0",role="pool",version="0.1.0"}'
        assert served[info] == 1


def test_the_open_format_is_spoken_too() -> None:
    with exporting(Metrics("pool")) as address:
        status, content_type, text = get(address, "application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_numbers_are_refreshed_before_each_scrape() -> None:
    metrics = Metrics("pool")
    epoch = metrics.gauge("kvcomm_ring_epoch")
    with exporting(metrics, refresh=epoch.add) as address:
        assert scrape(address)["kvcomm_ring_epoch"] == 1
        assert scrape(address)["kvcomm_ring_epoch"] == 2


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    if not running.is_closed():
        running.call_soon_threadsafe(running.stop)
        thread.join(PATIENCE_S)
        running.close()


def test_numbers_of_an_event_loop_are_read_in_it(loop: asyncio.AbstractEventLoop) -> None:
    metrics = Metrics("pool")
    threads: list[bool] = []
    refresh = in_loop(loop, lambda: threads.append(asyncio.get_running_loop() is loop), metrics)
    with exporting(metrics, refresh=refresh) as address:
        assert scrape(address)["kvcomm_scrapes_stale_total"] == 0
    assert threads == [True]


def test_a_loop_that_hangs_does_not_hang_the_scrape(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_TIMEOUT_S", 0.02)
    metrics = Metrics("pool")
    calls: list[int] = []
    free = threading.Event()
    loop.call_soon_threadsafe(free.wait, PATIENCE_S)
    with exporting(metrics, refresh=in_loop(loop, lambda: calls.append(1), metrics)) as address:
        try:
            assert scrape(address)["kvcomm_scrapes_stale_total"] == 1
        finally:
            free.set()
        monkeypatch.setattr(module, "REFRESH_TIMEOUT_S", PATIENCE_S)
        assert scrape(address)["kvcomm_scrapes_stale_total"] == 1
    assert calls == [1], "the late refresh was called off"


def test_a_closed_loop_leaves_the_last_numbers() -> None:
    closed = asyncio.new_event_loop()
    closed.close()
    metrics = Metrics("pool")
    metrics.gauge("kvcomm_ring_epoch").set(5)
    with exporting(metrics, refresh=in_loop(closed, lambda: None, metrics)) as address:
        served = scrape(address)
    assert served["kvcomm_ring_epoch"] == 5
    assert served["kvcomm_scrapes_stale_total"] == 1


def test_a_bug_in_the_refresh_is_no_success(
    loop: asyncio.AbstractEventLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = Metrics("pool")

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    with exporting(metrics, refresh=in_loop(loop, broken, metrics)) as address:
        assert get(address)[0] == 500
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


def test_a_slow_client_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module._Handler, "timeout", 0.05)
    with exporting(Metrics("pool")) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as slow:
            slow.sendall(b"GET /met")
            assert get(address)[0] == 200
            begin = time.monotonic()
            assert slow.recv(1) == b"", "it is let go"
            assert time.monotonic() - begin < PATIENCE_S
    assert capsys.readouterr().err == ""


def test_a_port_in_use_is_told() -> None:
    with exporting(Metrics("pool")) as address:
        port = int(address.split(":")[1])
        second = Exporter(Metrics("pool"), LABELS)
        with pytest.raises(Refused, match=f"cannot be served at 127.0.0.1:{port}: Address already in use"):
            second.start(port=port)
        second.close()
