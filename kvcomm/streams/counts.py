"""``StreamCounts``: what an engine and its drivers count of their streams, in the process's metrics.

Events are counted where they are journalled, right before they happen; rows where they were fed.  Everything
is counted once, whoever shares an engine::

    counts = client.stream_counts()      # beside the client's own numbers; without a client: StreamCounts()
    engine = StreamEngine(model, 4096, counts=counts)
    client.metrics()["kvcomm_streams_live_slots"]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import ref

from kvcomm.metrics import Metrics
from kvcomm.streams.events import KINDS, Event
from kvcomm.streams.session import Session


class StreamCounts:
    """Counts into ``metrics`` (scope ``client``); into its own if none are given."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self.metrics = metrics if metrics is not None else Metrics("client")
        counter, gauge = self.metrics.counter, self.metrics.gauge
        self._events = {kind: counter("kvcomm_streams_events_total", kind=kind) for kind in KINDS}
        self._fed = counter("kvcomm_streams_rows_total", what="fed")
        self._evicted = counter("kvcomm_streams_rows_total", what="evicted")
        self._kept = counter("kvcomm_streams_rows_total", what="kept")
        self._restored = counter("kvcomm_streams_rows_total", what="restored")
        self._reprefilled = counter("kvcomm_streams_rows_total", what="reprefilled")
        self._live = gauge("kvcomm_streams_live_slots")
        self._archive = gauge("kvcomm_streams_archive_bytes")
        self._mean = gauge("kvcomm_streams_mismatch_kl", over="mean")
        self._worst = gauge("kvcomm_streams_mismatch_kl", over="worst")

    def watch(self, session: Session) -> None:
        """Count the events of ``session`` from now on, those that its journal takes: what it refuses does not
        happen.  Once a session, which is not kept alive by that."""
        journal, watched = session.journal, ref(session)

        def counted(event: Event) -> None:
            journal(event)
            told = watched()
            assert told is not None, "its own journal is called by itself"
            self._happens(told, event)

        session.journal = counted

    def forked(self, child: Session) -> None:
        """``child`` was forked, which its log says already; its later events are counted, too."""
        self._events["fork"].add()
        self.watch(child)

    def fed(self, feeds: Iterable[tuple[Session, Sequence[int]]]) -> None:
        """These tokens have been fed in one forward pass, and committed."""
        rows = live = 0
        for session, tokens in feeds:
            rows += len(tokens)
            live += session.slot_count
        self._fed.add(rows)
        self._live.set(live)

    def reprefilled(self, row_count: int) -> None:
        """So many of the rows that were fed repeat text whose K/V there was before: it was lost, or dropped
        to compute it again under a shorter view."""
        self._reprefilled.add(row_count)

    def archived(self, memory_bytes: int) -> None:
        """So much archived K/V is in the engine's memory now."""
        self._archive.set(memory_bytes)

    def mismatch(self, mean: float, worst: float) -> None:
        """A trainer's last replay: KL in nats a sampled token; see ``kvcomm.streams.mismatch``."""
        self._mean.set(mean)
        self._worst.set(worst)

    def _happens(self, session: Session, event: Event) -> None:
        self._events[event.kind].add()
        if event.kind == "evict":
            gone = sum(each.slot_count for each in event.ranges)
            self._evicted.add(gone)
            self._kept.add(session.slot_count - gone)
        elif event.kind == "restore":
            self._restored.add(len(session.archive[event.span].rows))
