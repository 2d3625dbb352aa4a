"""Three shards that repair in the background: after heal and quiet, without traffic, all replicas are
equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from msgspec import structs

from kvcomm.version import COUNTER_MAX
from kvcomm.wire.messages import (
    Failure,
    LeafGet,
    Message,
    RecordFetch,
    RecordGet,
    RecordKeys,
    RecordPut,
    RecordScan,
    RecordState,
    RecordStates,
    RecordVersions,
    RecordWrite,
    RingTransition,
    Sibling,
    TreeDigests,
    TreeGet,
)
from l3_shard import dvv
from l3_shard.desk import ShardLimits
from l3_shard.hints import OVERHEAD_BYTES
from l3_shard.merkle import DEPTH, FAN_OUT, MerkleTree, leaf_of
from l3_shard.repair import RepairCounts, RepairOptions
from l3_shard.tombstones import _Group
from tests.l3_shard.cluster import NODE_TENANT, TENANT, Cluster, Faults, ring_map
from tests.l3_shard.test_cluster import Client, History

K = TENANT + b"k"
OPTIONS = RepairOptions(interval_s=8.0, hint_age_s=40.0, tombstone_age_s=60.0)
QUIET_S = 25.0
"""Three intervals: enough for a comparison that is given up once."""


def cluster_of(seed: int = 1, repair: RepairOptions = OPTIONS, limits: ShardLimits | None = None) -> Cluster:
    cluster = Cluster(seed, repair=repair, limits=limits)
    cluster.run(until=2.0)
    assert all(counts(cluster, node).caught_up for node in cluster.names)
    return cluster


def counts(cluster: Cluster, node: str) -> RepairCounts:
    found = cluster.shards[node].repair_counts()
    assert found is not None
    return found


def put(
    cluster: Cluster, node: str, key: bytes, value: bytes | None, context: dict[str, int]
) -> RecordVersions:
    answers: list[Message] = []
    cluster.call(node, RecordPut(1, [RecordWrite(key, value, context)]), answers.append)
    cluster.run(until=cluster.now + 1.5)
    (answer,) = answers
    assert isinstance(answer, RecordVersions), answer
    return answer


def get(cluster: Cluster, node: str, key: bytes) -> Message:
    return ask(cluster, node, RecordGet(1, [key]))


def ask(cluster: Cluster, node: str, message: Message) -> Message:
    answers: list[Message] = []
    cluster.call(node, message, answers.append)
    cluster.run(until=cluster.now + 1.5)
    (answer,) = answers
    return answer


def values(state: RecordState | None) -> list[bytes | None]:
    return [] if state is None else [sibling.value for sibling in dvv.presented(state).siblings]


def held(cluster: Cluster, key: bytes = K) -> list[list[bytes | None] | None]:
    """What each node's disk has; ``None`` = no record at all."""
    records = [cluster.disks[node].records for node in cluster.names]
    return [values(each[key]) if key in each else None for each in records]


def quiet(cluster: Cluster, seconds: float = QUIET_S) -> None:
    cluster.run(until=cluster.now + seconds)


def equal(cluster: Cluster) -> bool:
    first, *rest = (cluster.disks[node].records for node in cluster.names)
    return all(other == first for other in rest)


def test_options_in_which_a_hint_outlives_a_tombstone_are_refused():
    with pytest.raises(ValueError, match="hints"):
        RepairOptions(hint_age_s=10.0, tombstone_age_s=10.0)


@pytest.mark.slow
def test_what_a_replica_missed_is_handed_on_when_it_is_back():
    cluster = cluster_of()
    cluster.away = {"c"}
    for number in range(20):
        put(cluster, "ab"[number % 2], b"k%d" % number, b"v", {})
    assert {len(cluster.disks[node].records) for node in "ab"} == {20} and not cluster.disks["c"].records
    hinted = [counts(cluster, node) for node in "ab"]
    assert [each.hint_count for each in hinted] == [10, 10]
    cluster.away = set()
    quiet(cluster, 6.0)
    assert equal(cluster) and len(cluster.disks["c"].records) == 20
    after = [counts(cluster, node) for node in "ab"]
    assert [each.hint_count for each in after] == [0, 0] == [each.hint_bytes for each in after]
    assert sum(each.hints["delivered"] for each in after) == 20
    assert not any(note.startswith(b"hint/") for disk in cluster.disks.values() for note in disk.notes)


@pytest.mark.slow
def test_hints_survive_the_death_of_who_keeps_them():
    cluster = cluster_of(
        repair=RepairOptions(interval_s=1e6, tombstone_age_s=1e6, retry_max_s=1e5, retry_min_s=3.0)
    )
    cluster.away = {"c"}
    put(cluster, "a", b"k", b"v", {})
    quiet(cluster, 1.0)
    cluster.crash("a")
    cluster.run(until=cluster.now + 0.1)
    assert counts(cluster, "a").hint_count == 1
    cluster.away = set()
    quiet(cluster, 5.0)
    assert held(cluster) == [[b"v"]] * 3
    assert counts(cluster, "a").hints["delivered"] == 1


@pytest.mark.slow
def test_hints_have_a_bound_and_comparing_finds_what_they_do_not_tell():
    room = 3 * (len(K) + 1 + OVERHEAD_BYTES)
    options = RepairOptions(interval_s=8.0, hint_bytes_max=room, tombstone_age_s=1e6)
    cluster = cluster_of(repair=options)
    cluster.away = {"c"}
    for number in range(9):
        put(cluster, "a", b"k%d" % number, b"v", {})
    before = counts(cluster, "a")
    assert (before.hint_count, before.hints["refused"]) == (3, 6) and before.hint_bytes <= room
    cluster.away = set()
    quiet(cluster, 6.0)
    assert equal(cluster) and len(cluster.disks["c"].records) == 9
    assert sum(sum(counts(cluster, node).records.values()) for node in "abc") >= 6


@pytest.mark.slow
def test_old_hints_are_given_up_and_the_replicas_become_equal_all_the_same():
    cluster = cluster_of()
    cluster.away = {"c"}
    put(cluster, "a", b"k", b"v", {})
    quiet(cluster, OPTIONS.hint_age_s + 2 * OPTIONS.interval_s)
    assert counts(cluster, "a").hint_count == 0 and counts(cluster, "a").hints["expired"] == 1
    cluster.away = set()
    quiet(cluster, 6.0)
    assert held(cluster) == [[b"v"]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_lost_disk_is_filled_again_without_anybody_asking(seed: int):
    cluster = cluster_of(seed)
    for number in range(40):
        put(cluster, cluster.draw.choice("abc"), b"k%d" % number, b"v%d" % number, {})
    before = dict(cluster.disks["b"].records)
    cluster.lose("b")
    quiet(cluster, 10.0)
    assert cluster.disks["b"].records == before and equal(cluster)
    assert counts(cluster, "b").caught_up
    given = sum(counts(cluster, node).records["pushed"] for node in "ac")
    assert given + counts(cluster, "b").records["pulled"] >= 40, "whoever asked first"


@pytest.mark.slow
def test_large_values_travel_in_pieces():
    """What does not fit one message is asked for, and handed on, by halves."""
    cluster = cluster_of(limits=ShardLimits(request_timeout_s=1.0, message_bytes=300))
    cluster.away = {"c"}
    for number in range(12):
        put(cluster, "a", b"k%d" % number, b"v" * 100, {})
    cluster.away = set()
    cluster.lose("b")
    quiet(cluster, 12.0)
    assert equal(cluster) and len(cluster.disks["b"].records) == 12


def test_a_lone_shard_with_a_new_store_answers():
    """Nobody is there that it could learn from."""
    cluster = Cluster(1, "a", repair=OPTIONS, write=1)
    cluster.map = structs.replace(cluster.map, epoch=5)
    cluster.lose("a")
    cluster.run(until=cluster.now + 0.2)
    assert counts(cluster, "a").caught_up
    assert ask(cluster, "a", RecordScan(b"", b"", 9)) == RecordKeys([])


@pytest.mark.slow
def test_a_new_store_is_no_witness_until_it_has_caught_up():
    """The write was acknowledged by b and c; then b loses its disk.  c and the empty b must not agree on
    "absent" while a, which missed the write, answers faster than c."""
    cluster = cluster_of(3)
    cluster.away = {"a"}
    put(cluster, "b", b"k", b"v", {})
    cluster.away = {"c"}
    cluster.lose("b")
    cluster.run(until=cluster.now + 0.2)
    answer = get(cluster, "b", b"k")
    assert isinstance(answer, RecordStates) and answer.degraded, "only a could be asked, and a may not know"
    assert not counts(cluster, "b").caught_up
    names = ask(cluster, "b", RecordScan(b"", b"", 9))
    assert isinstance(names, Failure) and names.code == "unavailable", "it does not name what it lost"
    cluster.away = set()
    quiet(cluster)
    assert ask(cluster, "b", RecordScan(b"", b"", 9)) == RecordKeys([b"k"])
    answer = get(cluster, "b", b"k")
    assert isinstance(answer, RecordStates) and not answer.degraded and values(answer.states[0]) == [b"v"]
    assert held(cluster) == [[b"v"]] * 3


def test_a_record_that_cannot_be_merged_does_not_keep_a_new_store_from_catching_up():
    """Two vectors that a client made up; together they name more replicas than a record may have."""
    cluster = cluster_of()
    put(cluster, "b", b"fine", b"v", {})

    def made_up(node: str) -> None:
        context = {f"{node}{number}": 1 for number in range(200)}
        cluster.disks[node].records[K] = RecordState(context, [Sibling(f"{node}0", 1, 1, node.encode())])
        cluster.crash(node)

    made_up("a")
    quiet(cluster, 2 * OPTIONS.interval_s)
    cluster.lose("c")
    made_up("c")
    quiet(cluster, 2 * OPTIONS.interval_s)
    assert counts(cluster, "c").contradictions and counts(cluster, "c").caught_up
    assert held(cluster, TENANT + b"fine") == [[b"v"]] * 3


@pytest.mark.slow
def test_a_damaged_record_is_replaced_when_a_read_finds_it():
    cluster = cluster_of()
    put(cluster, "a", b"k", b"v", {})
    quiet(cluster, 3.0)
    cluster.disks["b"].damaged = {K}
    cluster.crash("b")  # what it remembers would hide it
    quiet(cluster, 1.0)
    answer = get(cluster, "b", b"k")
    assert isinstance(answer, RecordStates) and values(answer.states[0]) == [b"v"]
    quiet(cluster, 3.0)
    assert not cluster.disks["b"].damaged


# -- deletes


def written_then_deleted(cluster: Cluster, away: str = "") -> None:
    """``away`` has the value and misses the delete."""
    version = put(cluster, "a", b"k", b"v", {}).versions[0]
    quiet(cluster, 3.0)
    assert held(cluster) == [[b"v"]] * 3
    cluster.away = set(away)
    put(cluster, "b", b"k", None, version.context)


@pytest.mark.slow
def test_a_tombstone_goes_when_it_is_old_and_all_have_it():
    cluster = cluster_of()
    written_then_deleted(cluster)
    quiet(cluster, OPTIONS.tombstone_age_s - 10.0)
    assert held(cluster) == [[]] * 3, "not before its age"
    quiet(cluster, 10.0 + 4 * OPTIONS.interval_s)
    assert held(cluster) == [None] * 3
    assert sum(counts(cluster, node).tombstones_removed for node in "abc") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "away_s", [20.0, 50.0, 75.0, 400.0], ids=["short", "past hints", "past tombstones", "long"]
)
def test_no_deleted_record_returns_however_long_a_replica_was_away(away_s: float):
    cluster = cluster_of(int(away_s))
    written_then_deleted(cluster, away="c")
    quiet(cluster, away_s)
    assert held(cluster) == [[], [], [b"v"]], "while one is away, the tombstone stays"
    cluster.away = set()
    for _ in range(40):
        quiet(cluster, 1.0)
        assert held(cluster)[:2] in ([[], []], [None, None], [None, []], [[], None]), "the value came back"
    quiet(cluster, OPTIONS.tombstone_age_s + 4 * OPTIONS.interval_s)
    assert held(cluster) == [None] * 3


@pytest.mark.slow
def test_a_write_after_the_burial_is_not_taken_for_one_that_was_seen():
    """The counters went with the record; contexts that clients still hold, and a tombstone that one replica
    still has, must not cover new dots."""
    cluster = cluster_of()
    old = put(cluster, "a", b"k", b"v", {}).versions[0]
    grave = put(cluster, "a", b"k", None, old.context).versions[0]
    kept = dict(cluster.disks["c"].records)
    quiet(cluster, OPTIONS.tombstone_age_s + 5 * OPTIONS.interval_s)
    assert held(cluster) == [None] * 3
    cluster.disks["c"].records |= kept  # c did not hear that the tombstone may go
    cluster.crash("c")
    cluster.crash("a")
    new = put(cluster, "a", b"k", b"new", {}).versions[0]
    assert (new.replica, new.counter > grave.counter) == (grave.replica, True)
    put(cluster, "b", b"k", b"other", grave.context)
    quiet(cluster)
    assert held(cluster) == [[b"new", b"other"]] * 3


@pytest.mark.slow
def test_a_counter_that_cannot_be_never_becomes_the_floor():
    """A context is what a client says.  Were this tombstone removed, every new record of every tenant would
    have to begin above its counter, and could not."""
    cluster = cluster_of()
    mine = cluster.shards["a"].replica
    put(cluster, "b", b"k", None, {mine: COUNTER_MAX - 1})
    quiet(cluster, OPTIONS.tombstone_age_s + 5 * OPTIONS.interval_s)
    assert held(cluster) == [[], [], []], "the tombstone stays"
    for number in range(3):
        put(cluster, "a", b"new", b"v%d" % number, {})


def test_nothing_is_buried_while_records_move():
    cluster = cluster_of()
    written_then_deleted(cluster)
    shards = cluster.map.shards
    moves = RingTransition("copy", [*shards[:2], structs.replace(shards[2], weight=2)], [])
    cluster.offer(structs.replace(cluster.map, epoch=2, transition=moves))
    quiet(cluster, OPTIONS.tombstone_age_s + 5 * OPTIONS.interval_s)
    assert held(cluster) == [[]] * 3
    cluster.offer(structs.replace(cluster.map, epoch=3))
    quiet(cluster, 3 * OPTIONS.interval_s)
    assert held(cluster) == [None] * 3


# -- the whole, under faults


def storm(seed: int) -> tuple[Cluster, History]:
    draw = random.Random(seed)
    faults = Faults(
        loss=draw.choice((0, 0.1, 0.3)),
        delay_s=draw.choice((0.01, 0.2)),
        disk_s=draw.choice((0.001, 0.1)),
        double=draw.choice((0, 0.2)),
        full=draw.choice((0, 0.1)),
    )
    options = RepairOptions(
        interval_s=draw.choice((2.0, 8.0, 30.0)),
        hint_bytes_max=draw.choice((0, 600, 1 << 20)),
        hint_age_s=30.0,
        tombstone_age_s=1e6,
        batch_keys=draw.choice((1, 3, 256)),
    )
    cluster = Cluster(seed, faults=faults, repair=options, read=draw.choice((1, 2)))
    history = History()
    keys = [b"key/%d" % index for index in range(draw.choice((1, 5, 20)))]
    for client in range(3):
        Client(cluster, history, seed * 7 + client).act(keys, pace_s=0.15, count=25)
    troubles: list[Callable[[str], None]] = [cluster.crash, cluster.away.add, cluster.away.discard]
    for _ in range(draw.randint(0, 8)):
        cluster.after(draw.uniform(0, 4), partial(draw.choice(troubles), draw.choice(cluster.names)))
    cluster.run(until=8.0)
    cluster.away.clear()
    cluster.faults = Faults()
    quiet(cluster, 6.0 + 2.5 * options.interval_s)
    return cluster, history


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(15))
def test_after_any_trouble_and_quiet_the_replicas_are_equal_and_nothing_acknowledged_is_lost(seed: int):
    cluster, history = storm(seed)
    history.check(cluster)
    for node in cluster.names:
        assert counts(cluster, node).hint_count == 0 and counts(cluster, node).caught_up


def deleting(seed: int) -> tuple[Cluster, History]:
    """A minute of writes and deletes while nodes are away, die, and one loses its disk; tombstones go after 5
    seconds, so records are buried and written again all the time."""
    draw = random.Random(seed)
    faults = Faults(loss=draw.choice((0, 0.1)), delay_s=draw.choice((0.01, 0.2)), disk_s=0.05)
    options = RepairOptions(interval_s=2.0, hint_age_s=draw.choice((1.0, 4.0)), tombstone_age_s=5.0)
    cluster, history = Cluster(seed, faults=faults, repair=options, read=draw.choice((1, 2))), History()
    keys = [b"key/%d" % index for index in range(draw.choice((4, 8)))]
    for client in range(3):
        Client(cluster, history, seed * 7 + client, delete_share=0.4).act(keys, pace_s=1.5, count=80)
    at = 5.0
    while at < 60.0:
        node = draw.choice(cluster.names)
        cluster.after(at, partial(draw.choice((cluster.away.add, cluster.crash)), node))
        at += draw.choice((1.0, 12.0))
        cluster.after(at, cluster.away.clear)
        at += 4.0
    if draw.random() < 0.3:
        cluster.after(80.0, partial(cluster.lose, draw.choice(cluster.names)))
    cluster.run(until=90.0)
    cluster.away.clear()
    cluster.faults = Faults()
    quiet(cluster, 8.0)
    delete_read(cluster, history, keys[0])
    quiet(cluster, 32.0)
    return cluster, history


def delete_read(cluster: Cluster, history: History, key: bytes) -> None:
    answer = get(cluster, "a", key)
    assert isinstance(answer, RecordStates)
    seen = [value for value in values(answer.states[0]) if value is not None]
    name = history.attempt(key, history.closure(seen), delete=True)
    put(cluster, "a", key, None, answer.states[0].context if answer.states[0] else {})
    history.acknowledged.add(name)


def check_deletes(cluster: Cluster, history: History) -> int:
    """Equal replicas; no value that an acknowledged delete or write had seen; no acknowledged value missing
    that nobody had seen; how many records were buried."""
    assert equal(cluster)
    records = cluster.disks["a"].records
    keys = sorted({*history.key.values()})
    for key in keys:
        state = records.get(TENANT + key)
        there = set(values(state))
        assert state is None or dvv.alive(state), "an old tombstone is still there"
        writes = [value for value, where in history.key.items() if where == key]
        for value in writes:
            if value in history.acknowledged:
                assert not there & history.seen[value], f"what {value!r} had replaced came back"
        for value in set(writes) & history.acknowledged - history.deletes - there:
            assert any(value in history.seen[later] for later in writes), f"acknowledged {value!r} is lost"
    return sum(disk.removed_count for disk in cluster.disks.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_deletes_stay_deleted_and_writes_after_a_burial_stay_written(seed: int):
    cluster, history = deleting(seed)
    assert history.deletes & history.acknowledged
    assert check_deletes(cluster, history), "nothing was buried: the test tests nothing"


@pytest.mark.slow
def test_without_a_floor_writes_after_a_burial_get_lost(monkeypatch: pytest.MonkeyPatch):
    """Proof that the check above can fail, and the reason for the floor."""
    monkeypatch.setattr(
        "l3_shard.repair.Repair.floor", property(lambda self: 0, lambda self, floor: None), raising=False
    )
    assert any(breaks(seed) for seed in (35, *range(60)))


@pytest.mark.slow
def test_tombstones_that_go_before_all_have_them_let_deletes_return(monkeypatch: pytest.MonkeyPatch):
    """The reason to ask every replica, and proof that the tests above notice a value that returns."""
    monkeypatch.setattr("l3_shard.tombstones._Group._theirs", _does_not_look)
    cluster = cluster_of()
    written_then_deleted(cluster, away="c")
    quiet(cluster, OPTIONS.tombstone_age_s + 4 * OPTIONS.interval_s)
    cluster.away = set()
    quiet(cluster)
    assert held(cluster) == [[b"v"]] * 3


def breaks(seed: int) -> bool:
    cluster, history = deleting(seed)
    try:
        check_deletes(cluster, history)
    except AssertionError:
        return True
    return False


def _does_not_look(group: _Group, answer: Message) -> None:
    group._open_count -= 1
    if not group._open_count:
        group._burial.agreed(group._others, group._states)


@pytest.mark.slow
def test_without_repair_the_same_troubles_leave_replicas_that_differ():
    """Proof that the check above can fail."""
    differing = 0
    for seed in range(25):
        cluster = Cluster(seed, faults=Faults(loss=0.3))
        history = History()
        Client(cluster, history, seed).act([b"key"], pace_s=0.15, count=10)
        cluster.run(until=30.0)
        differing += not equal(cluster)
    assert differing >= 10


def test_a_peer_of_another_tenant_is_refused():
    cluster = Cluster(1, repair=OPTIONS)
    answers: list[Message] = []
    for message in (TreeGet(1, "b", 0, [0]), LeafGet(1, "b", [0])):
        cluster.call("a", message, answers.append)
    cluster.run(until=4.0)
    assert [isinstance(answer, Failure) and answer.code for answer in answers] == ["refused"] * 2


def test_a_shard_that_was_restarted_below_the_root_tells_no_empty_tree():
    """Another one that has nothing yet would take itself for equal, and ready (``l3_shard.readiness``)."""
    cluster = cluster_of()
    put(cluster, "a", b"k", b"v", {})
    question = TreeGet(1, "b", 1, [leaf_of(K) // FAN_OUT ** (DEPTH - 1)])
    answers: list[Message] = []
    cluster.faults.disk_s = 0.3
    cluster.crash("a")
    cluster.call("a", question, answers.append, tenant=NODE_TENANT)
    cluster.run(until=cluster.now + 2.0)
    (answer,) = answers
    assert isinstance(answer, TreeDigests) and answer.digests != MerkleTree().children((1, 0))


def test_who_is_no_neighbour_any_more_is_not_compared_with_after_a_split():
    cluster = cluster_of()
    shard = cluster.shards["a"]
    shard._returned("c", 0.0)
    assert shard._recovery._waiting
    cluster.offer(ring_map("abd", epoch=2), ["a"])
    assert not shard._recovery._waiting, "its merges would be counted for ever"


@pytest.mark.parametrize(("node", "vouches"), [("a", True), ("d", False)])
def test_who_keeps_a_record_by_a_newer_map_only_is_no_witness_of_it(node: str, vouches: bool):
    cluster = Cluster(1, "abcd", repair=OPTIONS, members="abc")
    cluster.disks[node].notes[b"caught_up"] = b"1"
    cluster.crash(node)
    cluster.run(until=2.0)
    answers: list[Message] = []
    cluster.call(node, RecordFetch(2, [K]), answers.append, tenant=NODE_TENANT)
    cluster.run(until=3.0)
    assert answers == [RecordStates([None], degraded=not vouches)]


# -- traffic (P6)


class Metered(Cluster):
    """Counts what shards say to each other."""

    said_bytes = 0
    swept_leaves = 512

    def _request(
        self,
        node: str,
        message: Message,
        tenant: bytes,
        then: Callable[[Message], None],
        timeout_s: float,
        reliable: bool,
        asker: str = "",
    ) -> None:
        self.said_bytes += len(msgspec.msgpack.encode(message))

        def answered(answer: Message) -> None:
            self.said_bytes += len(msgspec.msgpack.encode(answer))
            then(answer)

        super()._request(node, message, tenant, answered, timeout_s, reliable, asker)


def traffic(record_count: int, different_count: int) -> int:
    """Bytes until three shards with these records are equal, of which one lacks some."""
    cluster = Metered(1, repair=RepairOptions(interval_s=1e6))
    for number in range(record_count):
        state = RecordState({"written000.1": 1}, [Sibling("written000.1", 1, 1 << 56, b"v" * 64)])
        for node in cluster.names:
            if node != "b" or number >= different_count:
                cluster.disks[node].records[TENANT + b"record/%05d" % number] = state
    for node in cluster.names:
        cluster.disks[node].notes[b"caught_up"] = b"1"
        cluster.crash(node)
    cluster.run(until=30.0)
    assert equal(cluster) and len(cluster.disks["b"].records) == record_count
    return cluster.said_bytes


@pytest.mark.slow
def test_traffic_grows_with_the_differences_and_not_with_the_records():
    base = traffic(200, 0)
    few, many = traffic(200, 5) - base, traffic(200, 50) - base
    assert few > 0 and many < 1.5 * 10 * few, "ten times the differences"
    assert many / 50 < 4_000, "a path of the tree, a leaf and a record each, to two shards"
    assert traffic(1_600, 0) == base, "equal replicas find it out from one question each"
    assert traffic(1_600, 50) - base < 1.5 * many, "eight times the records"
