"""What a client counts of its own operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcomm.blockplane import Prefix, Stored
from kvcomm.errors import Unavailable
from kvcomm.metrics import Metrics
from kvcomm.stateplane import StatePlane
from kvcomm.steps import Emit, Steps
from kvcomm.tally import Tally
from kvcomm.tier import RecordAnswer
from tests.kvcomm.test_blockplane import NAMESPACE, block_of, run
from tests.kvcomm.test_stateplane import FakeRecords


def ticking() -> Iterator[float]:
    yield from (float(second) for second in range(1000))


def make() -> Tally:
    return Tally(Metrics("client"), clock=ticking().__next__)


def touched(tally: Tally) -> dict[str, float]:
    numbers = tally.metrics.snapshot()
    return {name.removeprefix("kvcomm_"): number for name, number in numbers.items() if number}


def test_a_fetch_counts_by_tier_and_what_it_missed() -> None:
    tally = make()
    tally.fetched(Prefix((block_of(0, "l1"), block_of(1, "l3"), block_of(2, "l3")), asked_count=5), 2)
    size = NAMESPACE.block_bytes
    assert touched(tally) == {
        'fetch_tokens_total{tier="l1"}': 2,
        'fetch_tokens_total{tier="l3"}': 4,
        'fetch_blocks_total{tier="l1"}': 1,
        'fetch_blocks_total{tier="l3"}': 2,
        'fetch_bytes_total{tier="l1"}': size,
        'fetch_bytes_total{tier="l3"}': 2 * size,
        "fetch_missed_blocks_total": 2,
    }


def test_a_publish_counts_what_became_of_each_block_in_each_tier() -> None:
    tally = make()
    tally.published([Stored("stored", "present"), Stored(None, "full"), Stored("stored", None)], 100)
    assert touched(tally) == {
        'publish_blocks_total{status="stored",tier="l2"}': 2,
        'publish_blocks_total{status="present",tier="l3"}': 1,
        'publish_blocks_total{status="full",tier="l3"}': 1,
        'publish_bytes_total{tier="l2"}': 200,
    }


def test_records_count_one_by_one_also_where_they_fail() -> None:
    class Failing(FakeRecords):
        def record_get(self, keys: object, least: object = ()) -> Steps[list[RecordAnswer]]:
            yield from ()
            raise Unavailable("nobody")

    tally = make()
    state = StatePlane(FakeRecords({b"a": RecordAnswer((b"1", b"2", b"3"), {}, True)}), tally)
    run(state.get([b"a", b"b"]))
    run(state.put([(b"c", b"v", None), (b"d", b"v", None)]))
    run(state.names(b"a"))
    with pytest.raises(Unavailable):
        run(StatePlane(Failing(), tally).get([b"a", b"b", b"c"]))
    counts = {name: number for name, number in touched(tally).items() if name.startswith("record_")}
    assert counts == {
        'record_operations_total{operation="get",outcome="degraded"}': 1,
        'record_operations_total{operation="get",outcome="ok"}': 1,
        'record_operations_total{operation="get",outcome="failed"}': 3,
        'record_operations_total{operation="put",outcome="ok"}': 2,
        'record_operations_total{operation="scan",outcome="ok"}': 1,
        "record_siblings_total": 2,
    }


def test_an_operation_is_timed_also_when_it_is_given_up() -> None:
    def endless() -> Steps[None]:
        while True:
            yield Emit(None)

    tally = make()
    steps = tally.timed("fetch", endless())
    next(steps)
    steps.close()
    assert touched(tally) == {
        'operation_seconds_count{operation="fetch"}': 1,
        'operation_seconds_sum{operation="fetch"}': 1,
    }
