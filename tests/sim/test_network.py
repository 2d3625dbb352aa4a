"""Hosts, links and disks by themselves."""

from __future__ import annotations

import pytest

from kvcomm.block import Incarnation
from kvcomm.chaos.cluster import shipped_disk
from kvcomm.chaos.commits import Commits
from kvcomm.chaos.disk import Disk, Part
from kvcomm.chaos.draw import Draw
from kvcomm.chaos.network import (
    Network,
    Peers,
    Reply,
    Weather,
    bridge,
    everybody_alone,
    halves,
    isolate,
    ring,
)
from kvcomm.chaos.plan import Plan
from kvcomm.chaos.world import Host, World
from kvcomm.credentials import Credentials
from kvcomm.machine import ConnectionId, Event, Origin, Ticket
from kvcomm.rpc.session import Identity
from kvcomm.steps import Answer, Ask
from kvcomm.wire.messages import Done, Failure, Message, RecordGet, RecordPut, RecordState, Sibling
from l3_shard.replica import first_replica
from l3_shard.storage import Load

CREDENTIALS = Credentials(bytes(32))
GET, PUT = RecordGet(1, []), RecordPut(1, [])


class Server:
    """Counts what arrives; answers if told to."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.messages: list[Message] = []
        self.closed_count = 0

    def received(self, origin: Origin, message: Message, reply: Reply) -> None:
        self.messages.append(message)
        if self.answers:
            reply(Done())

    def closed(self, connection: ConnectionId) -> None:
        self.closed_count += 1


class Shell:
    """A process without a machine."""

    def __init__(self, network: Network, host: Host) -> None:
        self._network, self._host = network, host

    def killed(self) -> None:
        self._network.host_ended(self._host)


class Pair:
    """A client and a server."""

    def __init__(self, weather: Weather | None = None, *, answers: bool = True) -> None:
        self.world = World(1)
        self.network = Network(self.world, weather or Weather(), CREDENTIALS)
        self.client, self.host = self.world.host("c", origin_s=77.0), self.world.host("s", origin_s=5_000.0)
        self.client.start(lambda host: Shell(self.network, host))
        self.host.start(lambda host: Shell(self.network, host))
        self.server = Server(answers)
        self.network.listen(self.host, self.server)
        identity = Identity(CREDENTIALS.token("tenant"), Incarnation(1))
        self.peers = Peers(self.network, self.client, identity)
        self.answers: list[Message] = []

    def ask(self, message: Message, timeout_s: float = 2.0) -> None:
        self.peers.start([Ask("tcp://s:1", message)], self.client.clock() + timeout_s, self._answered)

    def _answered(self, answer: Answer) -> None:
        self.answers.append(answer.message)

    def code(self) -> str:
        (answer,) = self.answers
        assert isinstance(answer, Failure), answer
        return answer.code


def test_a_request_and_its_reply() -> None:
    pair = Pair()
    pair.ask(PUT)
    pair.world.run(1.0)
    assert pair.answers == [Done()]
    assert pair.server.messages == [PUT]


def test_a_request_that_was_not_sent_is_unavailable_and_one_that_was_is_unknown() -> None:
    pair = Pair()
    pair.network.cuts = halves(["c"], ["s"])
    pair.ask(PUT)
    pair.world.run(5.0)
    assert pair.code() == "unavailable"

    pair = Pair(answers=False)
    pair.ask(PUT)
    pair.world.run(5.0)
    assert (pair.code(), pair.server.messages) == ("outcome_unknown", [PUT])


def test_a_process_that_is_down_refuses_and_one_that_is_paused_is_silent() -> None:
    pair = Pair()
    pair.host.kill()
    pair.ask(PUT)
    pair.world.run(0.1)
    assert pair.code() == "unavailable"

    pair = Pair()
    pair.host.pause()
    pair.ask(PUT)
    pair.world.run(0.5)
    assert pair.answers == []
    pair.host.resume()
    pair.world.run(0.6)
    assert pair.answers == [Done()], "the kernel kept what arrived"


def test_a_server_that_dies_resets_its_connections() -> None:
    pair = Pair(answers=False)
    pair.ask(PUT)
    pair.world.run(0.5)
    pair.host.kill()
    pair.world.run(0.6)
    assert pair.code() == "outcome_unknown"


def test_an_idempotent_request_on_an_old_connection_is_repeated_once() -> None:
    pair = Pair()
    pair.ask(GET)
    pair.world.run(0.5)
    pair.server.answers = False
    pair.ask(GET)
    pair.world.run(0.6)
    pair.server.answers = True
    pair.network.reset("c", "s")
    pair.world.run(1.0)
    assert pair.answers == [Done(), Done()]
    assert pair.server.closed_count == 1


def test_a_frame_that_meets_a_cut_is_lost_or_comes_after_the_heal() -> None:
    for late, arrives in ((0.0, False), (1.0, True)):
        pair = Pair(Weather(late=late), answers=False)
        pair.ask(GET)
        pair.world.run(0.5)
        pair.server.messages.clear()
        pair.network.cuts = {("c", "s")}
        pair.ask(PUT)
        pair.world.run(1.5)
        assert pair.server.messages == []
        pair.network.cuts = set()
        pair.world.run(4.0)
        assert (pair.server.messages == [PUT]) == arrives


def test_only_idempotent_requests_are_doubled() -> None:
    pair = Pair(Weather(double=1.0))
    pair.ask(GET)
    pair.ask(PUT)
    pair.world.run(2.0)
    assert sorted(type(message).__name__ for message in pair.server.messages) == [
        "RecordGet", "RecordGet", "RecordPut",
    ]  # fmt: skip


def test_nothing_of_a_killed_process_runs_any_more() -> None:
    world, ran = World(1), []
    host = world.host("h")
    host.start(lambda host: Shell(Network(world, Weather(), CREDENTIALS), host))
    host.after(1.0, lambda: ran.append("first life"))
    host.kill()
    host.start(lambda host: Shell(Network(world, Weather(), CREDENTIALS), host))
    world.run(2.0)
    assert ran == []


def test_the_shapes_of_partitions() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert len(halves(["a", "b"], ["c"])) == 4
    assert len(isolate("a", names)) == 8
    assert len(everybody_alone(names)) == 20
    cut = bridge(names)
    assert ("a", "c") not in cut
    assert ("c", "e") not in cut
    assert ("a", "e") in cut
    seen_by = {name: [other for other in names if (other, name) not in ring(names)] for name in names}
    assert all(len(seen) == 3 for seen in seen_by.values())


# -- disks


def disk(fsync="always", seed: int = 1) -> Disk:
    drawn = iter(range(100))
    return shipped_disk(Draw(seed), fsync, lambda: first_replica(f"replica{next(drawn):03}"))


def state(counter: int) -> RecordState:
    return RecordState({"r": counter}, [Sibling("r", counter, 1, b"v%d" % counter)])


def test_a_commit_under_way_happens_as_a_whole_or_not_at_all() -> None:
    seen = set()
    for seed in range(20):
        one = disk(seed=seed)
        one.begin([Part([(b"a", state(1))], one.replica), Part([(b"b", state(1))], one.replica)])
        one.crashed()
        seen.add(tuple(sorted(one.values)))
    assert seen == {(), (b"a", b"b")}


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_what_a_power_cut_costs(fsync) -> None:
    one = disk(fsync)
    replica = one.replica
    one.begin([Part([(b"a", state(1))], replica)])
    assert one.commit() == ["durable"]
    lost = one.power_cut()
    assert lost == (fsync != "always")
    assert (one.replica == replica, b"a" in one.values) == (not lost, not lost)
    assert one.held(b"a") == [state(1)], "it was durable once"


def test_a_commit_without_room_takes_what_fits() -> None:
    one = disk()
    one.room_bytes = 70
    one.begin([Part([(key, state(1))], one.replica) for key in (b"a", b"b", b"c")])
    outcomes = one.commit()
    assert set(outcomes) == {"durable", "full"}
    assert len(one.values) == outcomes.count("durable")


def test_a_flipped_bit_is_seen_and_the_record_before_is_remembered() -> None:
    for seed in range(50):
        one = disk(seed=seed)
        one.begin([Part([(b"a", state(1))], one.replica)])
        one.commit()
        assert one.flip_bit() == b"a"
        assert one.load([b"a"]) == ((None,), (b"a",))
        assert one.held(b"a") == [state(1)]


def test_a_scan_goes_on_where_it_stopped() -> None:
    one = disk()
    one.begin([Part([(b"k%d" % index, state(1)) for index in range(7)], one.replica)])
    one.commit()
    found: list[bytes] = []
    after = b""
    for _ in range(10):
        keys, resume = one.scan(b"k", after, 3)
        found += keys
        if resume is None:
            break
        after = resume
    assert found == [b"k%d" % index for index in range(7)]


def test_a_stalled_disk_answers_when_it_is_healed_before_its_time() -> None:
    world, one, heard = World(1), disk(), list[tuple[float, Event]]()
    host = world.host("a")
    host.start(lambda host: Shell(Network(world, Weather(), CREDENTIALS), host))
    commits = Commits(one, host, Draw(2), Plan(1), lambda event: heard.append((world.now, event)))
    one.stalled_until = 3.0
    commits.load(Load(Ticket(1), (b"a",)))
    world.run(2.9)
    assert not heard
    world.run(3.5)
    assert len(heard) == 1 and heard[0][0] >= 3.0
    one.stalled_until = 100.0
    commits.load(Load(Ticket(2), (b"a",)))
    world.run(5.0)
    one.stalled_until = 0.0
    world.run(5.5)
    assert len(heard) == 2
