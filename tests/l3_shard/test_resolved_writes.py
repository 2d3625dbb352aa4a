"""Deltas through the shard machine: what it takes, writes, refuses and counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvcomm.machine import Effect, Reply
from kvcomm.resolvers import Resolver
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, MAXIMUM, SET
from kvcomm.validators import Rule, Validators
from kvcomm.wire.messages import (
    VALUE_BYTES_MAX,
    Failure,
    Message,
    RecordFates,
    RecordPut,
    RecordState,
    RecordVersions,
    RecordWrite,
    Sibling,
)
from l3_shard import dvv
from l3_shard.shard import Shard
from l3_shard.storage import Load, Loaded, Persist, Persisted
from tests.l3_shard.cluster import NODE_TENANT, TENANT, ring_map
from tests.l3_shard.test_shard import Bench

NAME = b"counter/tokens/agent-7"


class Lone(Bench):
    """A shard that is the only replica; its disk does what it is told at once."""

    def __init__(self, *rules: Rule) -> None:
        super().__init__("a", replicas=1, write=1)
        self.shard = Shard(
            "a", "r1", ring_map("a", replicas=1, write=1), node_tenant=NODE_TENANT, origin_ms=1_000_000,
            validators=Validators(rules),
        )  # fmt: skip
        self.disk: dict[bytes, RecordState] = {}

    def send(self, *writes: RecordWrite) -> Message:
        replies = self._settle(self.ask(RecordPut(1, list(writes))))
        assert len(replies) == 1
        return replies[0]

    def _settle(self, effects: list[Effect]) -> list[Message]:
        replies: list[Message] = []
        while effects:
            effect = effects.pop(0)
            match effect:
                case Load(ticket, keys):
                    effects += self.on(Loaded(ticket, tuple(self.disk.get(key) for key in keys)))
                case Persist(ticket, writes):
                    self.disk.update(writes)
                    effects += self.on(Persisted(ticket))
                case Reply(_, message):
                    assert isinstance(message, Message)
                    replies.append(message)
        return replies

    def shown(self, resolver: Resolver[Any, Any, Any], name: bytes) -> Any:
        state = self.disk.get(TENANT + name, dvv.EMPTY)
        return resolver.show(dvv.living_values(state))


def delta(resolver: Resolver[Any, Any, Any], change: Any, name: bytes = NAME, **known: int) -> RecordWrite:
    return RecordWrite(name, None, known, None, resolver.encode_delta(change))


def refused(answer: Message, code: str) -> str:
    assert isinstance(answer, Failure)
    assert answer.code == code, answer.text
    return answer.text


def test_a_delta_becomes_one_ordinary_write() -> None:
    lone = Lone()
    first = lone.send(delta(COUNTER, 3))
    assert isinstance(first, RecordVersions)
    assert first.versions[0].context == {"r1": 1} and not first.versions[0].own
    lone.send(delta(COUNTER, 4))
    assert lone.shown(COUNTER, NAME) == 7
    state = lone.disk[TENANT + NAME]
    assert (state.context, len(state.siblings)) == ({"r1": 2}, 1)


def test_deltas_of_one_record_in_one_batch_all_count() -> None:
    lone = Lone()
    lone.send(*(delta(COUNTER, 1) for _ in range(5)), delta(COUNTER, 9, b"counter/tokens/other"))
    assert (lone.shown(COUNTER, NAME), lone.shown(COUNTER, b"counter/tokens/other")) == (5, 9)


def test_siblings_from_elsewhere_are_joined_by_the_next_write_and_not_before() -> None:
    lone = Lone()
    lone.send(delta(COUNTER, 1))
    value = dvv.living_values(lone.disk[TENANT + NAME])[0]
    theirs = RecordState({"r9": 1}, [Sibling("r9", 1, 1, value.replace(b"r1", b"r9"))])
    lone.disk[TENANT + NAME] = dvv.merge(lone.disk[TENANT + NAME], theirs)
    lone = _restarted(lone)
    assert len(lone.disk[TENANT + NAME].siblings) == 2
    assert lone.shown(COUNTER, NAME) == 2
    lone.send(delta(COUNTER, 1))
    assert len(lone.disk[TENANT + NAME].siblings) == 1
    assert lone.shown(COUNTER, NAME) == 3


def _restarted(lone: Lone) -> Lone:
    after = Lone()
    after.disk = lone.disk
    return after


def test_values_and_deltas_keep_to_their_own_names() -> None:
    lone = Lone()
    value = RecordWrite(NAME, b"7", {})
    assert "changed by deltas" in refused(lone.answer(RecordPut(1, [value])), "refused")
    stray = delta(COUNTER, 1, b"state/tokens/agent-7")
    assert "changed by values" in refused(lone.answer(RecordPut(1, [stray])), "refused")
    wide = RecordWrite(NAME, None, {}, None, bytes(VALUE_BYTES_MAX + 1))
    refused(lone.answer(RecordPut(1, [wide])), "too_large")
    assert not lone.disk


def test_what_is_no_delta_is_refused_and_writes_nothing() -> None:
    lone = Lone()
    lone.send(delta(COUNTER, 1))
    assert "not a change" in refused(lone.send(delta(SET, FieldsDelta({b"x": b""}), NAME)), "refused")
    assert lone.shown(COUNTER, NAME) == 1


def test_a_delete_takes_what_was_seen_and_counting_begins_anew() -> None:
    lone = Lone()
    lone.send(delta(COUNTER, 5))
    lone.send(RecordWrite(NAME, None, {}))  # blind: what the coordinator holds goes all the same
    assert lone.shown(COUNTER, NAME) == 0
    assert not dvv.alive(lone.disk[TENANT + NAME])
    lone.send(delta(COUNTER, 2))
    assert lone.shown(COUNTER, NAME) == 2


def test_a_corrupt_value_is_told_and_a_delete_helps() -> None:
    lone = Lone()
    lone.disk[TENANT + NAME] = RecordState({"r1": 1}, [Sibling("r1", 1, 1, b"not a counter")])
    refused(lone.send(delta(COUNTER, 1)), "corrupt")
    lone.send(RecordWrite(NAME, None, {}))
    lone.send(delta(COUNTER, 1))
    assert lone.shown(COUNTER, NAME) == 1


def test_a_rule_refuses_and_the_old_value_stays() -> None:
    lone = Lone(Rule("counter/tokens/*", max=10), Rule("state/notes/*", value_bytes_max=4))
    lone.send(delta(COUNTER, 8))
    before = dict(lone.disk)
    assert "largest is 10" in refused(lone.send(delta(COUNTER, 3)), "rejected")
    assert "limit is 4" in refused(lone.send(RecordWrite(b"state/notes/x", b"too long", {})), "rejected")
    assert lone.disk == before
    counts = lone.shard.counts()
    assert (counts.rejected_count, counts.conflict_count) == (2, 0)
    lone.send(delta(COUNTER, 2), RecordWrite(b"state/notes/x", b"fits", {}))
    assert lone.shown(COUNTER, NAME) == 10


def test_a_batch_of_which_a_part_was_rejected_says_which() -> None:
    lone = Lone(Rule("max/*/*", max=10))
    answer = lone.send(delta(MAXIMUM, 99, b"max/a/b"), delta(COUNTER, 1))
    assert isinstance(answer, RecordFates)
    assert [fate.code for fate in answer.fates] == ["rejected", ""]
    assert (lone.shown(COUNTER, NAME), lone.shown(MAXIMUM, b"max/a/b")) == (1, None)


@pytest.mark.parametrize("known", [{"r1": 9}, {"": 1}])
def test_a_context_that_cannot_be_is_refused(known: dict[str, int]) -> None:
    answer = Lone().send(RecordWrite(b"set/a/b", None, known, None, SET.encode_delta(FieldsDelta())))
    assert isinstance(answer, Failure) and answer.code in ("conflict", "refused")
