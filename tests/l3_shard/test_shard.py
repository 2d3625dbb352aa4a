"""The shard machine by literal events and effects."""

import pytest

from kvcomm.clock import pack
from kvcomm.machine import (
    Answered,
    AskPeer,
    Closed,
    ConnectionId,
    Effect,
    Event,
    Origin,
    Received,
    Reply,
    Stop,
    Tick,
    Ticket,
)
from kvcomm.version import COUNTER_MAX, ENTRIES_MAX
from kvcomm.wire.messages import (
    KEYS_MAX,
    VALUE_BYTES_MAX,
    BlockGet,
    Done,
    Failure,
    Message,
    RecordFates,
    RecordFetch,
    RecordGet,
    RecordKeys,
    RecordPut,
    RecordReplicate,
    RecordScan,
    RecordState,
    RecordStates,
    RecordVersion,
    RecordVersions,
    RecordWrite,
    RingGet,
    RingOffer,
    RingTaken,
    Sibling,
)
from l3_shard import dvv
from l3_shard.desk import ShardLimits
from l3_shard.ring import NO_RING, decode_map, encode_map
from l3_shard.shard import RECORD_KEY_BYTES_MAX, RingChanged, Shard, WallAdjusted
from l3_shard.storage import Load, Loaded, Persist, Persisted, Scan, Scanned
from tests.l3_shard.cluster import NODE_TENANT, TENANT, ring_map

ME, DRAWN = "a", "replica0"
STAMP = pack(1_000_000)
K = TENANT + b"k"
V1 = Sibling(f"{DRAWN}.1", 1, STAMP, b"v")
ONE = RecordState({f"{DRAWN}.1": 1}, [V1])
OTHER = RecordState({"other000.1": 3}, [Sibling("other000.1", 3, STAMP, b"w")])


class Bench:
    """One machine, events with numbered requests."""

    def __init__(self, names: str = "abc", limits: ShardLimits | None = None, **quorums: int) -> None:
        self.map = ring_map(names, **quorums)
        limits = limits or ShardLimits(recent_bytes_max=0)
        self.shard = Shard(
            ME, f"{DRAWN}.1", self.map, node_tenant=NODE_TENANT, origin_ms=1_000_000, limits=limits
        )

    def on(self, event: Event, now: float = 0.0) -> list[Effect]:
        effects = self.shard.handle(event, now)
        self.shard.check()
        return effects

    def ask(
        self, message: Message, request: int = 1, now: float = 0.0, tenant: bytes = TENANT
    ) -> list[Effect]:
        return self.on(Received(origin(request, tenant), message), now)

    def answer(self, message: Message, **how: object) -> Message:
        """The reply to a request that is answered at once."""
        effects = self.ask(message, **how)  # type: ignore[arg-type]
        assert len(effects) == 1 and isinstance(effects[0], Reply), effects
        return effects[0].message


def origin(request: int = 1, tenant: bytes = TENANT) -> Origin:
    return Origin(ConnectionId(5), request, tenant, 9)


def put(value: bytes | None = b"v", key: bytes = b"k", epoch: int = 1, context: dict[str, int] | None = None):
    return RecordPut(epoch, [RecordWrite(key, value, context or {})])


def owned_key(bench: Bench, place: int) -> bytes:
    """A record of which this shard is the first (0), second (1), ... owner."""
    keys = (b"%d" % number for number in range(999))
    return next(key for key in keys if bench.shard.ring.replicas(key)[place] == ME)


def ticket_of(effect: Effect) -> Ticket:
    assert isinstance(effect, Load | Persist | Scan | AskPeer)
    return effect.ticket


def asks_of(effects: list[Effect], *nodes: str) -> list[Ticket]:
    """Tickets of the questions to each of ``nodes``, in their order."""
    asks = [effect for effect in effects if isinstance(effect, AskPeer)]
    return [ask.ticket for node in nodes for ask in asks if ask.node == node]


def test_a_put_is_loaded_persisted_replicated_and_answered_at_the_quorum():
    bench = Bench()
    (load,) = bench.ask(put())
    assert load == Load(ticket_of(load), (K,))
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert persist == Persist(ticket_of(persist), ((K, ONE),), f"{DRAWN}.1")
    to_b, to_c = bench.on(Persisted(ticket_of(persist)), now=0.5)
    replicate = RecordReplicate(1, [K], [ONE])
    asked = {effect.node: effect for effect in (to_b, to_c) if isinstance(effect, AskPeer)}
    assert asked == {
        "b": AskPeer(asked["b"].ticket, "b", replicate, 2.0),
        "c": AskPeer(asked["c"].ticket, "c", replicate, 2.0),
    }
    done = bench.on(Answered(asked["c"].ticket, Done()))
    version = RecordVersion(f"{DRAWN}.1", 1, {f"{DRAWN}.1": 1}, 2)
    assert done == [Reply(origin(), RecordVersions([version]))]
    assert bench.on(Answered(asked["b"].ticket, Done())) == []
    assert bench.shard.deadline() is None


def test_a_record_that_a_replica_cannot_merge_does_not_take_its_neighbours_with_it():
    bench = Bench()
    (load,) = bench.ask(RecordPut(1, [RecordWrite(b"k", b"v", {}), RecordWrite(b"l", b"v", {})]))
    (persist,) = bench.on(Loaded(ticket_of(load), (None, None)))
    effects = bench.on(Persisted(ticket_of(persist)))
    (to_b, to_c) = asks_of(effects, "b", "c")
    bench.on(Answered(to_c, Failure("unavailable", "away")))
    apart = bench.on(Answered(to_b, Failure("too_large", "too many replicas")))
    messages = [effect.message for effect in apart if isinstance(effect, AskPeer)]
    assert [each.keys for each in messages if isinstance(each, RecordReplicate)] == [[K], [TENANT + b"l"]]
    with_k, with_l = asks_of(apart, "b")
    assert bench.on(Answered(with_l, Done())) == []
    (reply,) = bench.on(Answered(with_k, Failure("too_large", "too many replicas")))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordFates)
    assert [fate.code for fate in reply.message.fates] == ["outcome_unknown", ""]


def test_nothing_leaves_before_it_is_durable():
    bench = Bench()
    (load,) = bench.ask(put())
    effects = bench.on(Loaded(ticket_of(load), (None,)))
    assert [type(effect) for effect in effects] == [Persist]


def test_a_write_quorum_of_one_answers_when_durable_here():
    bench = Bench(write=1)
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    reply, *asks = bench.on(Persisted(ticket_of(persist)))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)
    assert reply.message.versions[0].acks == 1 and len(asks) == 2


def durable(bench: Bench, message: Message = put()) -> list[AskPeer]:  # noqa: B008 - frozen
    """A put that has got as far as its peers."""
    (load,) = bench.ask(message)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    return [effect for effect in bench.on(Persisted(ticket_of(persist))) if isinstance(effect, AskPeer)]


def test_too_few_replicas_is_an_unknown_outcome_at_once():
    bench = Bench()
    first, second = durable(bench)
    gone = Failure("unavailable", "no route")
    assert bench.on(Answered(first.ticket, gone)) == []
    (reply,) = bench.on(Answered(second.ticket, gone))
    text = f"only 1 of 2 replicas confirmed the write; {second.node}: no route"
    assert reply == Reply(origin(), Failure("outcome_unknown", text))
    assert bench.shard.counts().missed_count == 2 and bench.shard.counts().outcome_unknown_count == 1


def test_silent_replicas_are_an_unknown_outcome_at_the_deadline():
    bench = Bench()
    asks = durable(bench)
    assert bench.shard.deadline() == 1.5
    (reply,) = bench.on(Tick(), now=1.5)
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "outcome_unknown"
    assert bench.on(Answered(asks[0].ticket, Done()), now=1.6) == []


def test_a_put_that_never_got_to_the_disk_is_unavailable_and_does_not_happen_later():
    bench = Bench()
    (load,) = bench.ask(put())
    (reply,) = bench.on(Tick(), now=1.5)
    assert reply == Reply(origin(), Failure("unavailable", "the shard was too slow; nothing was written"))
    assert bench.on(Loaded(ticket_of(load), (None,)), now=1.6) == []


def test_a_put_whose_write_is_under_way_at_the_deadline_is_unknown_and_spreads_all_the_same():
    bench = Bench()
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    (reply,) = bench.on(Tick(), now=1.5)
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "outcome_unknown"
    assert len(bench.on(Persisted(ticket_of(persist)), now=1.6)) == 2


def test_changes_that_come_during_a_write_share_the_next_one():
    bench = Bench(write=1)
    (load,) = bench.ask(put(b"1"), request=1)
    (first,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert bench.ask(put(b"2"), request=2) == []
    assert bench.ask(put(b"3"), request=3) == []
    effects = bench.on(Persisted(ticket_of(first)))
    (second,) = [effect for effect in effects if isinstance(effect, Persist)]
    assert [sibling.value for sibling in second.writes[0][1].siblings] == [b"1", b"2", b"3"]
    replies = [effect for effect in bench.on(Persisted(ticket_of(second))) if isinstance(effect, Reply)]
    assert [reply.origin.request for reply in replies] == [2, 3]


def test_writes_that_become_durable_together_go_out_in_one_message_a_peer():
    bench = Bench()
    (load,) = bench.ask(RecordPut(1, [RecordWrite(b"k", b"v", {}), RecordWrite(b"l", b"v", {})]))
    (persist,) = bench.on(Loaded(ticket_of(load), (None, None)))
    asks = bench.on(Persisted(ticket_of(persist)))
    assert [len(keys) for keys in replicated_keys(asks)] == [2, 2]


def replicated_keys(effects: list[Effect]) -> list[list[bytes]]:
    messages = [effect.message for effect in effects if isinstance(effect, AskPeer)]
    return [message.keys for message in messages if isinstance(message, RecordReplicate)]


def test_big_batches_are_cut_into_messages_of_bounded_size():
    bench = Bench("ab", replicas=2, limits=ShardLimits(message_bytes=100))
    writes = [RecordWrite(b"%d" % index, bytes(60), {}) for index in range(3)]
    (load,) = bench.ask(RecordPut(1, writes))
    (persist,) = bench.on(Loaded(ticket_of(load), (None,) * 3))
    asks = bench.on(Persisted(ticket_of(persist)))
    assert [len(keys) for keys in replicated_keys(asks)] == [1, 1, 1]


def test_a_full_disk_changes_nothing_and_the_shard_goes_on():
    bench = Bench()
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    (reply,) = bench.on(Persisted(ticket_of(persist), "full", "no space"))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "unavailable" and "full" in reply.message.text
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert isinstance(persist, Persist)
    assert persist.writes[0][1].context == ONE.context, "the dot was never given out"


def test_a_failed_disk_ends_the_shard_and_acknowledges_nothing_more():
    bench = Bench(write=1)
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    (stop,) = bench.on(Persisted(ticket_of(persist), "failed", "EIO"))
    assert isinstance(stop, Stop) and "EIO" in stop.reason
    assert bench.shard.handle(Tick(), 9.0) == [] and bench.shard.deadline() is None
    assert bench.shard.handle(Received(origin(), put()), 9.0) == []


UNSEEN = RecordWrite(b"k", b"new", {}, ("other000.1", 3))
"""By somebody whose last write was ``OTHER``'s."""


def looking(bench: Bench, write: RecordWrite = UNSEEN, now: float = 0.0) -> list[AskPeer]:
    """A put of what replaces a write that is not here."""
    (load,) = bench.ask(RecordPut(1, [write]), now=now)
    effects = bench.on(Loaded(ticket_of(load), (None,)), now)
    asks = [effect for effect in effects if isinstance(effect, AskPeer)]
    assert len(asks) == len(effects) and {type(ask.message) for ask in asks} <= {RecordFetch}
    return asks


def goes_on(bench: Bench, effects: list[Effect]) -> Persist:
    """The put, after the look."""
    (load,) = effects
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert isinstance(persist, Persist)
    return persist


def test_a_write_that_is_to_be_replaced_and_is_not_here_is_looked_for():
    bench = Bench()
    to_b, to_c = looking(bench)
    assert to_b.message == RecordFetch(1, [K])
    persist = goes_on(bench, bench.on(Answered(to_b.ticket, RecordStates([OTHER]))))
    ((_, state),) = persist.writes
    assert [sibling.value for sibling in state.siblings] == [b"new"]
    assert state.context == {f"{DRAWN}.1": 1, "other000.1": 3}
    assert bench.on(Answered(to_c.ticket, RecordStates([OTHER]))) == []
    bench.on(Persisted(persist.ticket))


def test_a_write_that_no_write_quorum_has_seen_is_not_waited_for():
    """One more disk than may be lost was lost, or the record was removed."""
    bench = Bench()
    to_b, _ = looking(bench)
    persist = goes_on(bench, bench.on(Answered(to_b.ticket, RecordStates([None]))))
    assert persist.writes[0][1] == RecordState({f"{DRAWN}.1": 1}, [Sibling(f"{DRAWN}.1", 1, STAMP, b"new")])


@pytest.mark.parametrize(
    "poor",
    [
        Failure("unavailable", "away"),
        RecordStates([None], degraded=True),
        RecordStates([]),
        RecordStates([RecordState({}, [V1])]),
    ],
)
def test_a_write_replaces_nothing_while_nobody_can_say_what(poor):
    bench = Bench()
    to_b, to_c = looking(bench)
    assert bench.on(Answered(to_b.ticket, poor)) == []
    (reply,) = bench.on(Answered(to_c.ticket, Failure("unavailable", "away")))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "unavailable" and "nothing was written" in reply.message.text
    assert bench.shard.deadline() is None


def test_a_look_for_what_is_replaced_ends_before_its_request():
    bench = Bench()
    to_b, to_c = looking(bench, now=1.0)
    assert to_b.deadline == to_c.deadline == 1.75
    (reply,) = bench.on(Tick(), now=2.5)
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "unavailable" and "nothing was written" in reply.message.text
    assert bench.on(Answered(to_b.ticket, RecordStates([OTHER])), now=2.6) == []


def test_with_a_write_quorum_of_one_a_write_goes_on_without_what_it_replaces():
    bench = Bench(write=1)
    to_b, to_c = looking(bench)
    assert bench.on(Answered(to_b.ticket, RecordStates([None]))) == []
    goes_on(bench, bench.on(Answered(to_c.ticket, Failure("unavailable", "away"))))


def test_the_only_replica_looks_nowhere():
    bench = Bench("a", replicas=1, write=1)
    (load,) = bench.ask(RecordPut(1, [UNSEEN]))
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert isinstance(persist, Persist)


# -- refusals


def test_an_old_epoch_is_refused_with_the_new_map():
    bench = Bench(epoch=7)
    for message in (put(epoch=6), RecordGet(6, [b"k"])):
        failure = bench.answer(message)
        assert isinstance(failure, Failure) and failure.code == "stale_epoch"
        assert decode_map(failure.detail) == bench.map
    for message in (RecordReplicate(6, [K], [ONE]), RecordFetch(6, [K])):
        failure = bench.answer(message, tenant=NODE_TENANT)
        assert isinstance(failure, Failure) and failure.code == "stale_epoch"
    assert bench.shard.counts().stale_request_count == 4


def test_an_epoch_not_heard_of_yet_is_unavailable():
    failure = Bench().answer(put(epoch=2))
    assert isinstance(failure, Failure) and failure.code == "unavailable"


def test_a_record_of_other_shards_is_refused():
    bench = Bench("bcd")
    failure = bench.answer(put())
    assert isinstance(failure, Failure) and failure.code == "refused" and "owners" in failure.text


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (put(bytes(VALUE_BYTES_MAX + 1)), "too_large"),
        (put(key=b""), "too_large"),
        (put(key=bytes(RECORD_KEY_BYTES_MAX + 1)), "too_large"),
        (put(context={"x": 0}), "refused"),
        (put(context={f"r{index}": 1 for index in range(ENTRIES_MAX + 1)}), "too_large"),
        (RecordPut(1, []), "refused"),
        (RecordGet(1, [b"k"] * (KEYS_MAX + 1)), "too_large"),
        (RecordScan(b"", b"", 0), "refused"),
        (RecordScan(bytes(RECORD_KEY_BYTES_MAX + 1), b"", 1), "too_large"),
        (RecordReplicate(1, [K], [ONE]), "refused"),
        (RecordFetch(1, [K]), "refused"),
        (BlockGet(1, []), "refused"),
    ],
)
def test_bad_requests_are_refused_at_once(message, code):
    failure = Bench().answer(message)
    assert isinstance(failure, Failure) and failure.code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (RecordReplicate(1, [K], []), "refused"),
        (RecordReplicate(1, [], []), "refused"),
        (RecordReplicate(1, [b"short"], [ONE]), "too_large"),
        (RecordReplicate(1, [K], [RecordState({}, [V1])]), "corrupt"),
        (RecordFetch(1, []), "refused"),
    ],
)
def test_bad_requests_of_peers_are_refused_too(message, code):
    failure = Bench().answer(message, tenant=NODE_TENANT)
    assert isinstance(failure, Failure) and failure.code == code


def test_the_context_of_another_record_is_a_conflict():
    bench = Bench()
    (load,) = bench.ask(put(context={f"{DRAWN}.1": 4}))
    (reply,) = bench.on(Loaded(ticket_of(load), (ONE,)))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "conflict" and bench.shard.counts().conflict_count == 1


def test_a_batch_with_one_refused_write_says_what_became_of_each():
    bench = Bench(write=1)
    writes = [RecordWrite(b"k", b"v", {f"{DRAWN}.1": 4}), RecordWrite(b"l", b"v", {})]
    (load,) = bench.ask(RecordPut(1, writes))
    (persist,) = bench.on(Loaded(ticket_of(load), (None, None)))
    reply = bench.on(Persisted(ticket_of(persist)))[0]
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordFates)
    refused, done = reply.message.fates
    assert (refused.version, refused.code) == (None, "conflict") and refused.text
    assert done.version is not None and (done.version.counter, done.version.acks) == (1, 1)


def test_a_batch_whose_time_is_up_tells_the_unknown_from_the_done():
    bench = Bench()
    (load,) = bench.ask(RecordPut(1, [RecordWrite(b"k", b"v", {}), RecordWrite(b"l", b"v", {})]))
    (persist,) = bench.on(Loaded(ticket_of(load), (None, None)))
    to_b, to_c = (ask for ask in bench.on(Persisted(ticket_of(persist))) if isinstance(ask, AskPeer))
    away = Failure("unavailable", "no route")
    assert not [each for each in bench.on(Answered(to_b.ticket, away)) if isinstance(each, Reply)]
    (reply,) = (each for each in bench.on(Answered(to_c.ticket, away)) if isinstance(each, Reply))
    assert isinstance(reply.message, RecordFates)
    assert [fate.code for fate in reply.message.fates] == ["outcome_unknown"] * 2
    assert bench.shard.counts().outcome_unknown_count == 1


# -- bounds


def test_too_many_requests_are_refused():
    bench = Bench(limits=ShardLimits(requests_max=1))
    bench.ask(RecordGet(1, [b"k"]))
    failure = bench.answer(RecordGet(1, [b"l"]), request=2)
    assert isinstance(failure, Failure) and failure.code == "refused" and "busy" in failure.text
    assert bench.shard.counts().busy_count == 1


def test_too_many_bytes_are_refused_and_come_free_again():
    bench = Bench(write=1, limits=ShardLimits(held_bytes_max=1_000, recent_bytes_max=0))
    asks = durable(bench, put(bytes(200)))
    failure = bench.answer(put(bytes(400)), request=2)
    assert isinstance(failure, Failure) and "busy" in failure.text
    for ask in asks:
        bench.on(Answered(ask.ticket, Done()))
    assert [type(effect) for effect in bench.ask(put(bytes(400)), request=3)] == [Load]


def test_too_many_changes_of_one_record_are_refused():
    bench = Bench(limits=ShardLimits(changes_max=1))
    bench.ask(put(), request=1)
    failure = bench.answer(put(), request=2)
    assert isinstance(failure, Failure) and failure.code == "refused" and "busy" in failure.text


# -- tenants


def test_tenants_never_meet():
    bench = Bench(write=1)
    (load,) = bench.ask(RecordGet(1, [b"k"]), tenant=b"U" * 16)
    assert load == Load(ticket_of(load), (b"U" * 16 + b"k",))
    (scan,) = bench.ask(RecordScan(b"p", b"a", 3), request=2, tenant=b"U" * 16)
    assert scan == Scan(ticket_of(scan), b"U" * 16 + b"p", b"U" * 16 + b"a", 3)


def test_placement_does_not_depend_on_the_tenant():
    bench = Bench("abcdef")
    mine = next(b"%d" % number for number in range(99) if ME in bench.shard.ring.replicas(b"%d" % number))
    for tenant in (TENANT, b"U" * 16):
        assert any(isinstance(effect, Load) for effect in bench.ask(RecordGet(1, [mine]), tenant=tenant))


# -- reads


def test_a_get_with_a_quorum_of_one_asks_nobody():
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [owned_key(bench, place=0), b"k"]))
    replies = bench.on(Loaded(ticket_of(load), (ONE, OTHER)))
    assert replies == [Reply(origin(), RecordStates([ONE, OTHER]))]


def test_what_a_shard_lacks_is_looked_for_where_a_write_quorum_left_it():
    """Its disk may be new: with W = 2 of 3 an acknowledged record is on one of any two replicas."""
    bench = Bench()
    key = owned_key(bench, place=0)
    (load,) = bench.ask(RecordGet(1, [key]))
    (to_c,) = asks_of(bench.on(Loaded(ticket_of(load), (None,))), "c")
    reply, reload = sorted(bench.on(Answered(to_c, RecordStates([ONE]))), key=repr, reverse=True)
    assert reply == Reply(origin(), RecordStates([ONE]))
    (persist,) = bench.on(Loaded(ticket_of(reload), (None,)))
    assert isinstance(persist, Persist) and persist.writes == ((TENANT + key, ONE),)


def test_what_nobody_has_is_absent_and_what_nobody_else_could_say_is_degraded():
    for answer, degraded in ((RecordStates([None]), False), (Failure("unavailable", ""), True)):
        bench = Bench()
        (load,) = bench.ask(RecordGet(1, [b"k"]))
        to_b, to_c = bench.on(Loaded(ticket_of(load), (None,)))
        assert bench.on(Answered(ticket_of(to_b), Failure("unavailable", ""))) == []
        replies = bench.on(Answered(ticket_of(to_c), answer))
        assert replies == [Reply(origin(), RecordStates([None], degraded))]
    (load,) = (alone := Bench("a", replicas=1, write=1)).ask(RecordGet(1, [b"k"]))
    assert alone.on(Loaded(ticket_of(load), (None,))) == [Reply(origin(), RecordStates([None]))]


def test_who_stands_in_for_the_first_owner_reads_what_every_write_quorum_has_seen():
    bench = Bench()  # three replicas, W = 2, R = 1
    first, second = owned_key(bench, place=0), owned_key(bench, place=1)
    assert [type(effect) for effect in bench.ask(RecordGet(1, [first]))] == [Load]
    to_b, _, load = sorted(bench.ask(RecordGet(1, [second]), request=2), key=ticket_of)
    assert bench.on(Loaded(ticket_of(load), (None,))) == [], "its own word is not enough"
    effects = bench.on(Answered(ticket_of(to_b), RecordStates([OTHER])))
    assert Reply(origin(2), RecordStates([OTHER])) in effects


def test_a_deleted_record_has_a_context_and_no_values():
    deleted = RecordState({f"{DRAWN}.1": 2}, [Sibling(f"{DRAWN}.1", 2, STAMP, None)])
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    replies = bench.on(Loaded(ticket_of(load), (deleted,)))
    assert replies == [Reply(origin(), RecordStates([RecordState({f"{DRAWN}.1": 2}, [])]))]


def test_a_quorum_get_merges_and_repairs_its_own_copy():
    bench = Bench(read=2)
    to_b, to_c, load = sorted(bench.ask(RecordGet(1, [b"k"])), key=ticket_of)
    assert isinstance(to_b, AskPeer) and to_b.message == RecordFetch(1, [K])
    assert bench.on(Loaded(ticket_of(load), (ONE,))) == []
    reply, reload = sorted(bench.on(Answered(ticket_of(to_c), RecordStates([OTHER]))), key=repr, reverse=True)
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordStates) and not reply.message.degraded
    (state,) = reply.message.states
    assert state is not None and [sibling.value for sibling in state.siblings] == [b"w", b"v"]
    (persist,) = bench.on(Loaded(ticket_of(reload), (ONE,)))
    assert isinstance(persist, Persist) and persist.writes == ((K, state),)


def test_a_get_without_its_quorum_is_degraded():
    bench = Bench(read=2)
    to_b, to_c, load = sorted(bench.ask(RecordGet(1, [b"k"])), key=ticket_of)
    bench.on(Loaded(ticket_of(load), (ONE,)))
    bench.on(Answered(ticket_of(to_b), Failure("unavailable", "")))
    (reply,) = bench.on(Answered(ticket_of(to_c), RecordStates([None], degraded=True)))
    assert reply == Reply(origin(), RecordStates([ONE], degraded=True))
    assert bench.shard.counts().degraded_count == 1


def test_a_get_without_its_quorum_is_degraded_at_the_deadline():
    bench = Bench(read=3)
    *_, load = sorted(bench.ask(RecordGet(1, [b"k"])), key=ticket_of)
    bench.on(Loaded(ticket_of(load), (ONE,)))
    assert bench.on(Tick(), now=1.5) == [Reply(origin(), RecordStates([ONE], degraded=True))]


def test_a_get_that_nobody_could_answer_is_unavailable_not_absent():
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    (reply,) = bench.on(Tick(), now=1.5)
    assert (
        isinstance(reply, Reply)
        and isinstance(reply.message, Failure)
        and reply.message.code == "unavailable"
    )
    assert bench.on(Loaded(ticket_of(load), (ONE,)), now=1.6) == []


def test_a_state_that_contradicts_another_is_counted_and_no_answer():
    twin = RecordState(ONE.context, [Sibling(V1.replica, 1, STAMP, b"another")])
    bench = Bench(read=2)
    to_b, to_c, load = sorted(bench.ask(RecordGet(1, [b"k"])), key=ticket_of)
    bench.on(Answered(ticket_of(to_b), RecordStates([twin])))
    assert bench.on(Loaded(ticket_of(load), (ONE,))) == []
    effects = bench.on(Answered(ticket_of(to_c), RecordStates([RecordState({}, [V1])])))
    (reply,) = [effect for effect in effects if isinstance(effect, Reply)]
    assert reply.message == RecordStates([twin], degraded=True)
    assert bench.shard.counts().contradiction_count == 1


def test_an_unreadable_disk_asks_the_peers():
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    to_b, to_c = bench.on(Loaded(ticket_of(load), (), failure="EIO"))
    assert bench.on(Answered(ticket_of(to_b), RecordStates([None]))) == [], "the other may have more"
    (reply,) = bench.on(Answered(ticket_of(to_c), RecordStates([ONE])))
    assert reply == Reply(origin(), RecordStates([ONE]))


def test_one_witness_is_not_enough_where_our_own_copy_is_lost():
    """Acknowledged by us and c, missed by b: b's word alone would hide the write and not even say so."""
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    to_b, to_c = asks_of(bench.on(Loaded(ticket_of(load), (), failure="EIO")), "b", "c")
    bench.on(Answered(to_b, RecordStates([None])))
    (reply,) = bench.on(Answered(to_c, Failure("unavailable", "")))
    assert reply == Reply(origin(), RecordStates([None], degraded=True))


def test_a_damaged_record_is_read_from_peers_repaired_and_costs_the_replica_its_id():
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    effects = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    assert bench.shard.replica == f"{DRAWN}.2" and bench.shard.counts().damaged_count == 1
    for node in "bc":
        for ask in asks_of(effects, node):
            effects += bench.on(Answered(ask, RecordStates([ONE])))
    assert Reply(origin(), RecordStates([ONE])) in effects
    (reload,) = [effect for effect in effects if isinstance(effect, Load)]
    (persist,) = bench.on(Loaded(ticket_of(reload), (None,), damaged=(K,)))
    assert persist == Persist(ticket_of(persist), ((K, ONE),), f"{DRAWN}.2")


def test_a_damaged_record_that_nobody_can_repair_costs_one_id():
    """Every id that writes is an entry in the vectors of what it writes, and those are bounded."""
    bench = Bench("a", replicas=1, write=1)
    for request in range(300):
        (load,) = bench.ask(RecordGet(1, [b"k"]), request)
        (reply,) = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
        assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert bench.shard.replica == f"{DRAWN}.2" and bench.shard.counts().damaged_count == 1


def test_damage_in_place_of_a_record_that_nobody_has_is_overwritten():
    bench = Bench()
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    effects = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    for node in "bc":
        for ask in asks_of(effects, node):
            effects += bench.on(Answered(ask, RecordStates([None])))
    assert Reply(origin(), RecordStates([None])) in effects
    (reload,) = [effect for effect in effects if isinstance(effect, Load)]
    (persist,) = bench.on(Loaded(ticket_of(reload), (None,), damaged=(K,)))
    assert isinstance(persist, Persist) and persist.writes == ((K, RecordState({}, [])),)
    bench.on(Persisted(ticket_of(persist)))
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    assert bench.shard.replica == f"{DRAWN}.3", "damaged again after it was written under .2"


def test_a_write_over_a_damaged_record_brings_back_what_the_others_have():
    bench = Bench()
    (load,) = bench.ask(put())
    effects = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    (persist,) = [effect for effect in effects if isinstance(effect, Persist)]
    (ask,) = asks_of(effects, "b")
    assert bench.on(Answered(ask, RecordStates([OTHER]))) == []
    effects = bench.on(Persisted(ticket_of(persist)))
    (again,) = [effect for effect in effects if isinstance(effect, Persist)]
    assert again.writes[0][1] == dvv.merge(persist.writes[0][1], OTHER)


def test_a_damaged_record_that_was_written_over_is_no_witness_until_the_others_have_told():
    bench = Bench()
    (load,) = bench.ask(put())
    effects = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    (persist,) = [effect for effect in effects if isinstance(effect, Persist)]
    told_b, told_c = asks_of(effects, "b", "c")
    bench.on(Persisted(ticket_of(persist)))
    after, _ = persist.writes[0][1], bench.on(Answered(told_b, RecordStates([None])))

    def fetched(request: int) -> Message:
        (load,) = bench.ask(RecordFetch(1, [K]), request, tenant=NODE_TENANT)
        (reply,) = bench.on(Loaded(ticket_of(load), (after,)))
        assert isinstance(reply, Reply)
        return reply.message

    assert fetched(2) == RecordStates([after], degraded=True)
    (load,) = bench.on(Answered(told_c, RecordStates([OTHER])))
    (persist,) = bench.on(Loaded(ticket_of(load), (after,)))  # type: ignore[assignment]
    bench.on(Persisted(ticket_of(persist)))
    after = persist.writes[0][1]
    assert fetched(3) == RecordStates([after])
    assert [sibling.value for sibling in after.siblings] == [b"w", b"v"]


def test_a_damaged_record_is_whole_only_with_what_every_answer_told():
    """The first answer finds the record busy and is not merged; the last one must not make it whole without
    it."""
    bench = Bench(limits=ShardLimits(recent_bytes_max=0, changes_max=1))
    (load,) = bench.ask(put())
    effects = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    (persist,) = [effect for effect in effects if isinstance(effect, Persist)]
    told_b, told_c = asks_of(effects, "b", "c")
    assert bench.ask(put(b"next"), 2) == [], "it waits, and the line is full"
    bench.on(Answered(told_b, RecordStates([OTHER])))
    effects = bench.on(Persisted(ticket_of(persist)))
    (persist,) = [effect for effect in effects if isinstance(effect, Persist)]
    bench.on(Answered(told_c, RecordStates([None])))
    effects = bench.on(Persisted(ticket_of(persist)))
    (persist,) = [effect for effect in effects if isinstance(effect, Persist)]
    after = persist.writes[0][1]
    bench.on(Persisted(ticket_of(persist)))
    (load,) = bench.ask(RecordFetch(1, [K]), 3, tenant=NODE_TENANT)
    (reply,) = bench.on(Loaded(ticket_of(load), (after,)))
    assert reply == Reply(origin(3, NODE_TENANT), RecordStates([after]))
    assert OTHER.siblings[0] in after.siblings


def test_a_refused_write_of_a_damaged_record_writes_nothing():
    bench = Bench("a", replicas=1, write=1)
    (load,) = bench.ask(put(context={f"{DRAWN}.2": 7}))
    (reply,) = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "conflict"


def test_what_came_to_a_damaged_record_since_is_shown_and_called_degraded():
    bench = Bench("a", replicas=1, write=1)
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (None,), damaged=(K,)))
    assert isinstance(persist, Persist)
    bench.on(Persisted(ticket_of(persist)))
    (load,) = bench.ask(RecordGet(1, [b"k"]))
    (reply,) = bench.on(Loaded(ticket_of(load), (persist.writes[0][1],)))
    assert reply == Reply(origin(), RecordStates([persist.writes[0][1]], degraded=True))


def test_a_counter_that_cannot_grow_is_refused_and_does_not_end_the_shard():
    """A caller can write any context; at another replica this one counter looks as good as any."""
    bench = Bench()
    (load,) = bench.ask(put())
    full = RecordState({f"{DRAWN}.1": COUNTER_MAX}, [])
    (reply,) = bench.on(Loaded(ticket_of(load), (full,)))
    assert (
        isinstance(reply, Reply) and isinstance(reply.message, Failure) and reply.message.code == "conflict"
    )


def test_an_answer_too_big_for_one_message_is_refused_with_advice():
    bench = Bench(limits=ShardLimits(message_bytes=1))
    (load,) = bench.ask(RecordGet(1, [owned_key(bench, place=0), b"k"]))
    (reply,) = bench.on(Loaded(ticket_of(load), (ONE, OTHER)))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "too_large" and "split" in reply.message.text


# -- the replica's side


def test_replication_merges_persists_and_says_done():
    bench = Bench()
    (load,) = bench.ask(RecordReplicate(1, [K], [OTHER]), tenant=NODE_TENANT)
    (persist,) = bench.on(Loaded(ticket_of(load), (ONE,)))
    assert isinstance(persist, Persist) and persist.writes[0][1].siblings == [OTHER.siblings[0], V1]
    assert bench.on(Persisted(ticket_of(persist))) == [Reply(origin(tenant=NODE_TENANT), Done())]


def test_replication_of_what_is_known_writes_nothing():
    bench = Bench()
    (load,) = bench.ask(RecordReplicate(1, [K], [ONE]), tenant=NODE_TENANT)
    assert bench.on(Loaded(ticket_of(load), (ONE,))) == [Reply(origin(tenant=NODE_TENANT), Done())]


def test_replication_that_meets_a_full_disk_is_not_acknowledged():
    bench = Bench()
    (load,) = bench.ask(RecordReplicate(1, [K], [OTHER]), tenant=NODE_TENANT)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    (reply,) = bench.on(Persisted(ticket_of(persist), "full"))
    assert (
        isinstance(reply, Reply)
        and isinstance(reply.message, Failure)
        and reply.message.code == "unavailable"
    )


def test_one_dot_with_two_values_is_reported_not_merged():
    bench = Bench()
    twin = RecordState(ONE.context, [Sibling(V1.replica, 1, STAMP, b"another")])
    (load,) = bench.ask(RecordReplicate(1, [K], [twin]), tenant=NODE_TENANT)
    (reply,) = bench.on(Loaded(ticket_of(load), (ONE,)))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure) and reply.message.code == "corrupt"


def test_a_fetch_shows_tombstones_and_says_when_something_is_damaged():
    deleted = RecordState({f"{DRAWN}.1": 2}, [Sibling(f"{DRAWN}.1", 2, STAMP, None)])
    bench = Bench()
    (load,) = bench.ask(RecordFetch(1, [K, TENANT + b"l"]), tenant=NODE_TENANT)
    reply, *_ = bench.on(Loaded(ticket_of(load), (deleted, None), damaged=(TENANT + b"l",)))
    assert reply == Reply(origin(tenant=NODE_TENANT), RecordStates([deleted, None], degraded=True))


# -- rings, clocks, scans


def test_only_newer_rings_are_taken_up():
    bench = Bench(epoch=5)
    for epoch in (4, 5):
        bench.on(RingChanged(ring_map("xyz", epoch=epoch)))
        assert bench.shard.ring.to_map() == bench.map
    assert bench.shard.counts().stale_map_count == 2
    bench.on(RingChanged(ring_map("abcd", epoch=6)))
    assert bench.shard.ring.epoch == 6
    assert bench.answer(RingGet()) == ring_map("abcd", epoch=6)


def test_a_shard_without_a_ring_sends_askers_elsewhere_and_asks_replicators_for_their_map():
    bench = Bench()
    bench.shard = Shard(ME, f"{DRAWN}.1", NO_RING, node_tenant=NODE_TENANT, origin_ms=0)
    for message in (RingGet(), put(), RecordGet(1, [b"k"])):
        failure = bench.answer(message)
        assert isinstance(failure, Failure) and failure.code == "unavailable"
    replicate = RecordReplicate(1, [K], [ONE])
    refusal = bench.answer(replicate, tenant=NODE_TENANT)
    assert isinstance(refusal, Failure) and refusal.code == "stale_epoch"
    assert decode_map(refusal.detail) == NO_RING
    assert bench.answer(RingOffer(bench.map), tenant=NODE_TENANT) == RingTaken(1)
    assert [type(effect) for effect in bench.ask(replicate, tenant=NODE_TENANT)] == [Load]


def test_a_replica_that_is_behind_is_given_the_map_and_asked_again():
    bench = Bench(epoch=2)
    first, _ = durable(bench, put(epoch=2))
    behind = Failure("stale_epoch", "", encode_map(ring_map("xyz", epoch=1)))
    (offer,) = bench.on(Answered(first.ticket, behind))
    assert isinstance(offer, AskPeer) and (offer.node, offer.message) == (first.node, RingOffer(bench.map))
    (again,) = bench.on(Answered(offer.ticket, RingTaken(2)))
    assert isinstance(again, AskPeer) and again.message == first.message
    (reply,) = bench.on(Answered(again.ticket, Done()))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)


def test_a_replica_that_does_not_take_the_map_does_not_acknowledge():
    bench = Bench(epoch=2)
    first, second = durable(bench, put(epoch=2))
    behind = Failure("stale_epoch", "", encode_map(ring_map("xyz", epoch=1)))
    (to_first,) = bench.on(Answered(first.ticket, behind))
    (to_second,) = bench.on(Answered(second.ticket, behind))
    assert bench.on(Answered(ticket_of(to_first), RingTaken(1))) == []
    (reply,) = bench.on(Answered(ticket_of(to_second), RingTaken(1)))
    assert isinstance(reply, Reply) and isinstance(reply.message, Failure)
    assert reply.message.code == "outcome_unknown"


def test_only_nodes_hand_out_maps():
    refusal = Bench().answer(RingOffer(ring_map("abcd", epoch=2)))
    assert isinstance(refusal, Failure) and refusal.code == "refused"


def test_a_peer_that_is_ahead_teaches_its_map():
    bench = Bench()
    first, _ = durable(bench)
    newer = ring_map("abcd", epoch=2)
    bench.on(Answered(first.ticket, Failure("stale_epoch", "", encode_map(newer))))
    assert bench.shard.ring.to_map() == newer
    second = durable(bench, put(epoch=2, key=next(owned(bench))))[0]
    bench.on(Answered(second.ticket, Failure("stale_epoch", "", b"garbage")))
    assert bench.shard.counts().stale_map_count == 1


def test_a_write_goes_out_again_under_the_newer_map_when_the_owners_are_the_same():
    bench = Bench()
    first, second = durable(bench)
    moved = ring_map("abc", epoch=2)
    refusal = Failure("stale_epoch", "", encode_map(moved))
    again: list[AskPeer] = []
    for each in (second, first):
        (ask,) = bench.on(Answered(each.ticket, refusal))
        assert ask == AskPeer(ticket_of(ask), each.node, RecordReplicate(2, [K], [ONE]), 1.5)
        again.append(ask)
    (reply,) = bench.on(Answered(again[0].ticket, Done()))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)


def test_a_write_whose_owners_changed_meanwhile_is_made_durable_again_and_sent_to_the_new_ones():
    """Our own copy may have been dropped since, and what the old owners said is worth nothing."""
    bench = Bench()
    first, second = durable(bench)
    moved = Failure("stale_epoch", "", encode_map(ring_map("ade", epoch=2)))
    (load,) = bench.on(Answered(first.ticket, moved))
    assert bench.on(Answered(second.ticket, Done())) == []
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    assert isinstance(persist, Persist) and persist.writes == ((K, ONE),)
    to_d, _ = asks_of(bench.on(Persisted(persist.ticket)), "d", "e")
    (reply,) = bench.on(Answered(to_d, Done()))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)


def test_a_write_is_made_durable_again_where_maps_in_between_may_have_dropped_it():
    """By epoch 2 a move was taken back, and it has begun anew: who had the record by epoch 1 need not have
    it, though epoch 3 places it alike."""
    bench = Bench(write=3)
    first, second = durable(bench)
    assert bench.on(Answered(first.ticket, Done())) == []
    newer = Failure("stale_epoch", "", encode_map(ring_map("abc", epoch=3, write=3)))
    (load,) = bench.on(Answered(second.ticket, newer))
    (persist,) = [each for each in bench.on(Loaded(ticket_of(load), (None,))) if isinstance(each, Persist)]
    to_b, to_c = asks_of(bench.on(Persisted(persist.ticket)), "b", "c")
    assert bench.on(Answered(to_c, Done())) == []
    (reply,) = bench.on(Answered(to_b, Done()))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)


@pytest.mark.parametrize(("epoch", "acknowledged"), [(2, True), (3, False)])
def test_an_acknowledgement_overtaken_by_more_than_one_map_is_none(epoch: int, acknowledged: bool):
    bench = Bench()
    (load,) = bench.ask(RecordReplicate(1, [K], [ONE]), tenant=NODE_TENANT)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)))
    bench.on(RingChanged(ring_map("abc", epoch=epoch)))
    assert isinstance(persist, Persist)
    (reply,) = bench.on(Persisted(persist.ticket))
    assert isinstance(reply, Reply)
    assert isinstance(reply.message, Done) if acknowledged else isinstance(reply.message, Failure)


def test_a_write_that_is_not_ours_any_more_goes_to_its_new_owners():
    bench = Bench()
    first, _ = durable(bench)
    moved = Failure("stale_epoch", "", encode_map(ring_map("xyz", epoch=2)))
    to_x, to_y, _ = asks_of(bench.on(Answered(first.ticket, moved)), "x", "y", "z")
    assert bench.on(Answered(to_x, Done())) == []
    (reply,) = bench.on(Answered(to_y, Done()))
    assert isinstance(reply, Reply) and isinstance(reply.message, RecordVersions)
    assert reply.message.versions[0].replica == f"{DRAWN}.1"


def test_replication_under_a_newer_map_is_accepted_where_both_maps_agree():
    (load,) = Bench().ask(RecordReplicate(9, [K], [ONE]), tenant=NODE_TENANT)
    assert isinstance(load, Load)
    refusal = Bench("xyz").answer(RecordReplicate(9, [K], [ONE]), tenant=NODE_TENANT)
    assert isinstance(refusal, Failure) and decode_map(refusal.detail).epoch == 1
    (load,) = Bench("xyz").ask(RecordFetch(9, [K]), tenant=NODE_TENANT)
    assert isinstance(load, Load)


def owned(bench: Bench):
    return (b"%d" % number for number in range(999) if ME in bench.shard.ring.replicas(b"%d" % number))


def test_stamps_follow_the_wall_clock_and_what_they_replace():
    ahead = RecordState({"other000.1": 1}, [Sibling("other000.1", 1, pack(1_030_000), b"w")])
    bench = Bench(write=1)
    bench.on(WallAdjusted(2_000))
    (load,) = bench.ask(put(), now=3.0)
    (persist,) = bench.on(Loaded(ticket_of(load), (None,)), now=3.0)
    assert isinstance(persist, Persist) and persist.writes[0][1].siblings[0].hlc == pack(5_000)
    bench.on(Persisted(ticket_of(persist)), now=3.0)
    bench.on(WallAdjusted(1_000_000))
    (load,) = bench.ask(put(), now=3.0, request=2)
    (persist,) = bench.on(Loaded(ticket_of(load), (ahead,)), now=3.0)
    assert isinstance(persist, Persist) and persist.writes[0][1].siblings[1].hlc == pack(1_030_000, 1)


def test_a_wild_stamp_is_counted_and_not_followed():
    wild = RecordState({"other000.1": 1}, [Sibling("other000.1", 1, pack(9_000_000), b"w")])
    bench = Bench(write=1)
    (load,) = bench.ask(put())
    (persist,) = bench.on(Loaded(ticket_of(load), (wild,)))
    assert isinstance(persist, Persist) and persist.writes[0][1].siblings[1].hlc == pack(1_000_000)
    assert bench.shard.counts().drift_count == 1


def test_a_scan_goes_on_where_it_stopped_and_names_only_what_is_owned():
    bench = Bench("abcdef")
    mine = owned(bench)
    names = sorted([next(mine), next(mine)])
    foreign = next(
        b"%d" % number for number in range(99) if ME not in bench.shard.ring.replicas(b"%d" % number)
    )
    (scan,) = bench.ask(RecordScan(b"", b"", 5))
    (again,) = bench.on(Scanned(ticket_of(scan), (TENANT + names[0], TENANT + foreign), TENANT + b"x"))
    assert again == Scan(ticket_of(again), TENANT, TENANT + b"x", 4)
    replies = bench.on(Scanned(ticket_of(again), (TENANT + names[1],), None))
    assert replies == [Reply(origin(), RecordKeys(names))]


def test_a_scan_of_an_older_ring_is_answered_with_the_new_one():
    bench = Bench()
    bench.on(RingChanged(ring_map("abc", epoch=2)))
    failure = bench.answer(RecordScan(b"", b"", 9, epoch=1))
    assert isinstance(failure, Failure) and failure.code == "stale_epoch"
    assert [type(effect) for effect in bench.ask(RecordScan(b"", b"", 9, epoch=2), request=2)] == [Scan]


def test_a_scan_that_cannot_read_or_takes_too_long_is_unavailable():
    bench = Bench()
    (scan,) = bench.ask(RecordScan(b"", b"", 5))
    (reply,) = bench.on(Scanned(ticket_of(scan), (), None, failure="EIO"))
    assert (
        isinstance(reply, Reply)
        and isinstance(reply.message, Failure)
        and reply.message.code == "unavailable"
    )
    (scan,) = bench.ask(RecordScan(b"", b"", 5), now=1.0)
    assert len(bench.on(Tick(), now=2.5)) == 1
    assert bench.on(Scanned(ticket_of(scan), (K,), None), now=2.6) == []


def test_the_story_of_a_record():
    bench = Bench()
    assert bench.shard.story(K).endswith("not in use") and "epoch 1" in bench.shard.story(K)
    (load,) = bench.ask(put())
    assert "1 changes wait" in bench.shard.story(K)
    bench.on(Loaded(ticket_of(load), (None,)))
    assert "1 changes being written" in bench.shard.story(K)


def test_closed_connections_change_nothing():
    assert Bench().on(Closed(ConnectionId(5))) == []
