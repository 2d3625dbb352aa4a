"""What a shard does before it answers callers again after it stood still."""

from __future__ import annotations

import pytest

from kvcomm.machine import Answered, AskPeer, Effect, Reply, Resumed, Tick
from kvcomm.wire.messages import (
    Failure,
    RecordFetch,
    RecordGet,
    RecordStates,
    RingGet,
    RingMap,
    StrongRead,
)
from l3_shard import recheck
from l3_shard.recheck import RECHECK_S
from l3_shard.shard import RingChanged
from l3_shard.storage import Load, Loaded
from tests.l3_shard.cluster import NODE_TENANT, ring_map
from tests.l3_shard.test_shard import ONE, Bench, K, asks_of, origin, owned_key, put, ticket_of

SAME, NEWER = ring_map("abc"), ring_map("abc", epoch=2)


def resumed(now: float = 10.0, names: str = "abc", **quorums: int) -> tuple[Bench, list[Effect]]:
    bench = Bench(names, None, **quorums)
    return bench, bench.on(Resumed(), now)


def failure_of(effects: list[Effect]) -> Failure:
    (reply,) = effects
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    return reply.message


def test_all_others_are_asked_and_callers_wait() -> None:
    bench, effects = resumed()
    assert [(type(each), each.node, each.message) for each in effects if isinstance(each, AskPeer)] == [
        (AskPeer, "b", RingGet()),
        (AskPeer, "c", RingGet()),
    ]
    for request, message in enumerate((RecordGet(1, [b"k"]), put(), StrongRead(1, [b"k"]), RingGet()), 1):
        assert bench.ask(message, request, now=10.01) == []


def test_what_waited_is_refused_when_the_ring_has_gone_on() -> None:
    bench, effects = resumed()
    to_b, to_c = asks_of(effects, "b", "c")
    bench.ask(RecordGet(1, [b"k"]), now=10.01)
    assert bench.on(Answered(to_b, SAME), now=10.02) == [], "it may not have heard of it yet"
    failure = failure_of(bench.on(Answered(to_c, NEWER), now=10.02))
    assert failure.code == "stale_epoch" and bench.shard.ring.epoch == 2


def test_what_waited_is_served_when_nobody_knows_anything_newer() -> None:
    bench, effects = resumed()
    to_b, to_c = asks_of(effects, "b", "c")
    key = owned_key(bench, place=0)
    bench.ask(RecordGet(1, [key]), now=10.01)
    assert bench.on(Answered(to_c, SAME), now=10.02) == []
    (load,) = bench.on(Answered(to_b, Failure("unavailable", "it is dead")), now=10.02)
    assert isinstance(load, Load)
    assert bench.on(Loaded(load.ticket, (ONE,)), now=10.03) == [Reply(origin(), RecordStates([ONE]))]
    (again,) = bench.ask(RecordGet(1, [key]), request=2, now=10.04)
    assert isinstance(again, Load), "and from then on nothing waits"


def test_who_hears_nobody_goes_on_with_what_it_has() -> None:
    gone = Failure("unavailable", "")
    bench, effects = resumed()
    to_b, to_c = asks_of(effects, "b", "c")
    bench.ask(RecordGet(1, [owned_key(bench, place=0)]), now=10.01)
    assert bench.on(Answered(to_b, gone), now=10.02) == []
    assert len(bench.on(Answered(to_c, gone), now=10.03)) == 1, "there is nobody left to ask"
    bench, _ = resumed()
    bench.ask(RecordGet(1, [owned_key(bench, place=0)]), now=10.01)
    assert bench.shard.deadline() == 10.0 + RECHECK_S
    (load,) = bench.on(Tick(), now=10.0 + RECHECK_S)
    assert isinstance(load, Load)


def test_a_request_has_its_time_from_when_it_came() -> None:
    bench, _ = resumed()
    bench.ask(RecordGet(1, [owned_key(bench, place=0)]), now=10.1)
    bench.on(Tick(), now=10.0 + RECHECK_S)
    assert bench.shard.deadline() == 10.1 + 1.5
    assert failure_of(bench.on(Tick(), now=11.6)).code == "unavailable"


def test_what_waited_through_another_pause_is_not_done_late() -> None:
    bench, _ = resumed()
    bench.ask(put(), now=10.01)
    bench.on(Resumed(), now=30.0)
    reply, load = bench.on(Tick(), now=30.0 + RECHECK_S)
    assert failure_of([reply]).code == "unavailable" and isinstance(load, Load), "its sender has given up"
    assert bench.on(Loaded(load.ticket, (None,)), now=31.0) == [], "and nothing is written"


def test_peers_do_not_wait() -> None:
    """Their requests are compared with the epoch anyhow; two that stood still would wait for each other."""
    bench, _ = resumed()
    (reply,) = bench.ask(RingGet(), now=10.01, tenant=NODE_TENANT)
    assert isinstance(reply, Reply) and isinstance(reply.message, RingMap)
    (load,) = bench.ask(RecordFetch(1, [K]), request=2, now=10.01, tenant=NODE_TENANT)
    assert isinstance(load, Load)


def test_a_late_word_of_an_earlier_pause_still_brings_its_map() -> None:
    bench, effects = resumed()
    (to_b,) = asks_of(effects, "b")
    bench.on(Tick(), now=10.0 + RECHECK_S)
    bench.on(Resumed(), now=20.0)
    bench.ask(RecordGet(1, [b"k"]), now=20.01)
    assert bench.on(Answered(to_b, NEWER), now=20.02) == [], "it counts for nothing else"
    assert bench.shard.ring.epoch == 2


def test_what_waited_is_refused_when_we_stood_still_again_and_are_no_owner_any_more() -> None:
    """The second time nobody is asked; what was held since the first must not wait for ever."""
    bench, _ = resumed()
    bench.ask(RecordGet(1, [b"k"]), now=10.01)
    assert bench.on(RingChanged(ring_map("bc", epoch=2)), now=10.02) == []
    assert failure_of(bench.on(Resumed(), now=10.03)).code == "stale_epoch"
    assert bench.on(Tick(), now=10.0 + RECHECK_S) == []


def test_alone_there_is_nobody_to_ask() -> None:
    bench, effects = resumed(names="a", replicas=1, write=1)
    assert effects == [] and bench.shard.counts().stood_still_count == 1
    (load,) = bench.ask(RecordGet(1, [b"k"]), now=10.01)
    assert ticket_of(load)


def test_requests_from_before_that_are_over_are_ended_first() -> None:
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [owned_key(bench, place=0)]))
    effects = bench.on(Resumed(), now=10.0)
    assert failure_of([each for each in effects if isinstance(each, Reply)]).code == "unavailable"
    assert bench.on(Loaded(ticket_of(load), (ONE,)), now=10.0) == []


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recheck, "HELD_MAX", 2)
    monkeypatch.setattr(recheck, "HELD_BYTES_MAX", 10)
    bench, _ = resumed()
    assert failure_of(bench.ask(put(bytes(11)), 1, now=10.01)).code == "refused"
    assert bench.ask(put(bytes(10)), 2, now=10.01) == []
    assert failure_of(bench.ask(put(b"x"), 3, now=10.01)).code == "refused"
    assert bench.ask(RecordGet(1, [b"k"]), 4, now=10.01) == []
    assert "busy" in failure_of(bench.ask(RecordGet(1, [b"k"]), 5, now=10.01)).text
