"""``Exporter``: a process's :class:`~kvcomm.metrics.Metrics` at an HTTP address, in Prometheus' format."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvcomm.errors import Refused
from kvcomm.metrics import Definition, Histogram, Metrics, Series

REQUEST_TIMEOUT_S = 5.0
"""A client that does not finish its request in this time is let go."""
REFRESH_TIMEOUT_S = 1.0

_CLOSE_POLL_S = 0.1


class Exporter:
    """Serves ``/metrics`` from threads of its own.

    Args:
        metrics: what is served.
        labels: of ``kvcomm_node_info``: node, role, instance, version.
        refresh: called before each answer, in the answering thread; :func:`in_loop` makes one for numbers
            that an event loop owns.
    """

    def __init__(
        self, metrics: Metrics, labels: dict[str, str], refresh: Callable[[], None] = lambda: None
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Bridge(metrics, labels, refresh))
        ProcessCollector(registry=self._registry)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; the bound ``host:port``.

        Raises:
            Refused: the address cannot be bound.
        """
        try:
            self._server = make_server(
                host, port, make_wsgi_app(self._registry), server_class=_Server, handler_class=_Handler
            )
        except OSError as error:
            raise Refused(f"metrics cannot be served at {host}:{port}: {error.strerror}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_CLOSE_POLL_S,), name="kvcomm-metrics", daemon=True
        )
        self._thread.start()
        return f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        assert self._thread is not None
        self._thread.join()


def in_loop(
    loop: asyncio.AbstractEventLoop, refresh: Callable[[], None], metrics: Metrics
) -> Callable[[], None]:
    """``refresh`` run in ``loop`` and waited for, at most a second: then the older numbers are served, which
    is counted in ``kvcomm_scrapes_stale_total``."""
    stale = metrics.counter("kvcomm_scrapes_stale_total")

    def ask() -> None:
        done: Future[None] = Future()
        try:
            loop.call_soon_threadsafe(_run_into, done, refresh)
        except RuntimeError:  # the loop is closed: the process is ending
            return stale.add()
        try:
            done.result(REFRESH_TIMEOUT_S)
        except TimeoutError:
            done.cancel()
            stale.add()

    return ask


def _run_into(done: Future[None], work: Callable[[], None]) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)


class _Bridge(Collector):
    """Shows our cells to ``prometheus_client`` at each scrape."""

    def __init__(self, metrics: Metrics, labels: dict[str, str], refresh: Callable[[], None]) -> None:
        self._metrics, self._labels, self._refresh = metrics, labels, refresh

    def collect(self) -> Iterator[Metric]:
        self._refresh()
        yield InfoMetricFamily("kvcomm_node", "The node that serves these metrics.", value=self._labels)
        for definition, series in self._metrics.families():
            yield _family(definition, series)


def _family(definition: Definition, series: list[Series]) -> Metric:
    labels = list(definition.labels)
    if definition.kind == "histogram":
        histogram = HistogramMetricFamily(definition.name, definition.help, labels=labels)
        for values, cell in series:
            assert isinstance(cell, Histogram)
            histogram.add_metric(list(values), _cumulative(cell), cell.sum)
        return histogram
    make = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = make(definition.name, definition.help, labels=labels)
    for values, cell in series:
        assert not isinstance(cell, Histogram)
        family.add_metric(list(values), cell.value)
    return family


def _cumulative(cell: Histogram) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, cell.bounds), "+Inf"), list(cell.counts), strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


class _Server(ThreadingMixIn, WSGIServer):
    """One thread a request: a slow client delays nobody else, and none keeps the process alive."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Without the name look-up of ``HTTPServer``: it takes seconds where name servers do not answer."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up or dawdled is its own affair; anything else is ours, and told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""
