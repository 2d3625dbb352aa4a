from l2_rdma.ledger import LATE_MAX, NONE, Ledger, total
from l2_rdma.reader import ReaderCounters


def test_what_is_counted_outlives_the_attachment_and_never_goes_back() -> None:
    ledger = Ledger()
    first, second = ReaderCounters(hits=1), ReaderCounters(hits=10, hit_bytes=5)
    ledger.attached("shm", first, [])
    ledger.attached("tcp", second, ["shm", "verbs"])
    first.hits += 1
    assert {used: reads.hits for used, reads in ledger.reads().items()} == {"shm": 2, "tcp": 10}

    ledger.detached(second, lost=True)
    ledger.detached(second, lost=False)
    third = ReaderCounters(hits=100)
    ledger.attached("tcp", third, ["verbs"])
    third.misses = 3

    assert ledger.reads()["tcp"] == ReaderCounters(hits=110, misses=3, hit_bytes=5)
    assert total(ledger.reads().values()).hits == 112
    assert (ledger.attach_count, ledger.lost_count) == (3, 1)
    assert ledger.fallbacks() == {("shm", "tcp"): 1, ("verbs", "tcp"): 2}


def test_reads_that_end_after_their_attachment_are_counted() -> None:
    ledger = Ledger()
    counters = [ReaderCounters(hits=1) for _ in range(3 * LATE_MAX)]
    for each in counters:
        ledger.attached("tcp", each, [])
        ledger.detached(each, lost=True)
        each.unavailable += 1
    assert ledger.reads() == {"tcp": ReaderCounters(hits=3 * LATE_MAX, unavailable=3 * LATE_MAX)}
    assert len(ledger._late) == LATE_MAX


def test_a_pool_that_nothing_reaches_is_a_fallback_to_nothing() -> None:
    ledger = Ledger()
    ledger.unusable(["verbs"])

    assert ledger.fallbacks() == {("verbs", NONE): 1}
    assert ledger.reads() == {}
