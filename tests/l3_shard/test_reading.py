"""Gets that say what their answer must have seen at least."""

from __future__ import annotations

import pytest

from kvcomm.machine import Answered, Effect, Reply, Tick
from kvcomm.wire.messages import Failure, RecordGet, RecordState, RecordStates, Sibling
from l3_shard.desk import ShardLimits
from l3_shard.reading import covers
from l3_shard.storage import Loaded
from tests.l3_shard.test_shard import DRAWN, ONE, OTHER, STAMP, Bench, asks_of, origin, owned_key, ticket_of

MINE, THEIRS = f"{DRAWN}.1", "other000.1"
NEWER = RecordState({THEIRS: 3, MINE: 1}, [Sibling(THEIRS, 3, STAMP, b"w"), Sibling(MINE, 1, STAMP, b"v")])
GONE = Failure("unavailable", "")


def get(bench: Bench, least: dict[str, int], own: RecordState | None = ONE) -> tuple[bytes, list[Effect]]:
    """A key of which the shard is the first owner, and what it does once it has read its own copy."""
    key = owned_key(bench, place=0)
    (load,) = bench.ask(RecordGet(1, [key], [least]))
    return key, bench.on(Loaded(ticket_of(load), (own,)))


def replied(effects: list[Effect]) -> RecordStates | None:
    messages = [effect.message for effect in effects if isinstance(effect, Reply)]
    if not messages:
        return None
    (message,) = messages
    assert isinstance(message, RecordStates)
    return message


@pytest.mark.parametrize(
    ("context", "least", "covered"),
    [
        ({}, {}, True),
        ({"a": 2}, {}, True),
        ({"a": 2}, {"a": 2}, True),
        ({"a": 2}, {"a": 3}, False),
        ({"a": 2}, {"a": 1, "b": 1}, False),
    ],
)
def test_what_covers_what(context: dict[str, int], least: dict[str, int], covered: bool) -> None:
    assert covers(context, least) == covered


def test_a_copy_that_has_seen_it_answers_alone() -> None:
    _, effects = get(Bench(), {MINE: 1})
    assert replied(effects) == RecordStates([ONE]) and len(effects) == 1


def test_so_does_one_in_memory_and_only_then() -> None:
    bench = Bench(limits=ShardLimits())
    key, _ = get(bench, {})
    assert bench.ask(RecordGet(1, [key], [{MINE: 1}])) == [Reply(origin(), RecordStates([ONE]))]
    effects = bench.ask(RecordGet(1, [key], [{THEIRS: 3}]), request=2)
    assert replied(effects) is None and asks_of(effects, "b", "c")


def test_what_our_copy_has_not_seen_is_looked_for_until_it_is_found() -> None:
    bench = Bench()
    _, effects = get(bench, {MINE: 1, THEIRS: 3})
    to_b, to_c = asks_of(effects, "b", "c")
    assert replied(effects) is None
    assert replied(bench.on(Answered(to_b, RecordStates([ONE])))) is None, "a quorum that has not seen it"
    assert replied(bench.on(Answered(to_c, RecordStates([OTHER])))) == RecordStates([NEWER])


def test_when_nobody_reachable_has_seen_it_the_answer_says_so() -> None:
    bench = Bench()
    _, effects = get(bench, {THEIRS: 3})
    to_b, to_c = asks_of(effects, "b", "c")
    bench.on(Answered(to_b, RecordStates([ONE])))
    assert replied(bench.on(Answered(to_c, GONE))) == RecordStates([ONE], degraded=True)
    bench = Bench()
    get(bench, {THEIRS: 3})
    assert replied(bench.on(Tick(), now=1.5)) == RecordStates([ONE], degraded=True)


def test_a_peer_that_is_not_sure_does_not_make_it_gone() -> None:
    bench = Bench()
    _, effects = get(bench, {THEIRS: 3})
    to_b, to_c = asks_of(effects, "b", "c")
    bench.on(Answered(to_b, RecordStates([ONE])))
    unsure = RecordStates([None], degraded=True)
    assert replied(bench.on(Answered(to_c, unsure))) == RecordStates([ONE], degraded=True)


def test_what_all_replicas_together_do_not_know_was_removed() -> None:
    """A tombstone goes when every replica has had it for long; who remembers the record is not told
    "degraded" for ever."""
    bench = Bench()
    _, effects = get(bench, {THEIRS: 3}, own=None)
    to_b, to_c = asks_of(effects, "b", "c")
    assert replied(bench.on(Answered(to_b, RecordStates([None])))) is None
    assert replied(bench.on(Answered(to_c, RecordStates([None])))) == RecordStates([None])


def test_each_key_has_its_own_least_or_none_has() -> None:
    bench = Bench()
    assert bench.ask(RecordGet(1, [b"k", b"l"], [{}])) == [
        Reply(origin(), Failure("refused", "2 keys with 1 least contexts"))
    ]
