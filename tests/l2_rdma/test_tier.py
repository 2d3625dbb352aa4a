import asyncio
import gc
import itertools
import os
import socket
import threading
import time
import weakref
from typing import Any, cast

import pytest

from kvcomm.block import Incarnation
from kvcomm.blockservice import BlockService
from kvcomm.errors import PayloadError
from kvcomm.rpc import AsyncPeers, Identity, Peers, iterate_blocking, run_async, run_blocking
from kvcomm.steps import Answer, Park, Submit, Wait
from kvcomm.tier import Block, BlockCopy, Tier
from kvcomm.wire.messages import (
    BlockAbort,
    BlockPublish,
    BlockPublished,
    BlockPut,
    BlockReserve,
    BlockReserved,
    BlockStored,
    Done,
    Failure,
    Grant,
    Message,
    Want,
)
from l2_rdma.attachment import AttachOptions
from l2_rdma.member import _prefault
from l2_rdma.rack import BACKOFF_MAX_S, Pool
from l2_rdma.tier import L2Tier
from l2_rdma.wires import Wires
from tests.l2_rdma.pools import OPTIONS, TENANT_NAME, pool_thread
from tests.l2_rdma.regions import header_of, key_of, layout_of, payload_of, region_header
from tests.peers import CREDENTIALS, IDENTITY, served, soon, until

DIGEST = CREDENTIALS.tenant_digest(TENANT_NAME)
LARGE, SMALL = 8 << 10, 1 << 10


def copy_of(number, payload_bytes=LARGE, **changes):
    payload = payload_of(number, payload_bytes)
    return BlockCopy(header_of(number, payload, tenant=DIGEST, **changes), memoryview(payload))


class Agent:
    """A client process's tier and peers."""

    def __init__(self, address, identity=IDENTITY, **options):
        self.pools = [Pool("pool-0", address)]
        wires = Wires(options.pop("transports", ("shm",)))
        settings = AttachOptions(**({"prefault": False} | options))
        self.tier = L2Tier(lambda: self.pools, identity, wires=wires, options=settings)
        self.peers = Peers(identity)

    def put(self, *copies):
        return run_blocking(self.tier.put(copies), self.peers, soon())

    def get(self, *numbers):
        found = {}
        keys = [key_of(number) for number in numbers]
        run_blocking(
            self.tier.get(keys, lambda index, block: found.update({numbers[index]: block})),
            self.peers,
            soon(),
        )
        return found

    def lookup(self, *numbers):
        return run_blocking(self.tier.lookup([key_of(number) for number in numbers]), self.peers, soon())

    def close(self):
        self.tier.close()
        self.peers.close()


def attachment_of(tier: L2Tier, node: str = "pool-0") -> Any:
    attachment, _ = tier._members[node].current()
    assert attachment is not None
    return attachment


@pytest.fixture
def make_agent():
    agents = []

    def make(address, **options):
        agents.append(Agent(address, **options))
        return agents[-1]

    yield make
    for agent in agents:
        agent.close()


@pytest.fixture
def pool(tmp_path):
    with pool_thread(tmp_path) as running:
        yield running


def test_it_is_a_tier(pool, make_agent):
    tier: Tier = make_agent(pool.address).tier

    assert tier.name == "l2"


def test_what_one_agent_puts_another_reads_without_a_copy(pool, make_agent):
    writer, reader = make_agent(pool.address), make_agent(pool.address)

    assert writer.put(copy_of(1), copy_of(2)) == ["stored", "stored"]

    found = reader.get(1, 2, 3)
    assert sorted(found) == [1, 2]
    for number, block in found.items():
        assert block.pinned
        assert block.tier == "l2"
        assert bytes(block.payload) == payload_of(number, LARGE)
    assert reader.lookup(1, 2, 3) == [True, True, False]
    assert reader.tier.stats().pinned_count == 2
    assert reader.tier.stats().reads.hits == 2


def test_the_first_copy_wins(pool, make_agent):
    first, second = make_agent(pool.address), make_agent(pool.address)

    assert first.put(copy_of(1), copy_of(1)) == ["stored", "pending"]
    assert second.put(copy_of(1), copy_of(2)) == ["present", "stored"]
    assert pool.usage().block_count == 2


def test_small_blocks_go_in_one_message_and_come_as_copies(pool, make_agent):
    agent = make_agent(pool.address)

    assert agent.put(copy_of(1, SMALL), copy_of(2, LARGE)) == ["stored", "stored"]

    found = agent.get(1, 2)
    assert not found[1].pinned
    assert found[2].pinned
    assert bytes(found[1].payload) == payload_of(1, SMALL)


def test_a_block_larger_than_the_pool_takes_is_told(pool, make_agent):
    assert make_agent(pool.address).put(copy_of(1, OPTIONS["slab_bytes"])) == ["too_large"]


def test_blocks_are_emitted_one_by_one_and_not_kept(pool, make_agent):
    agent = make_agent(pool.address)
    agent.put(copy_of(1), copy_of(2))
    seen = []
    steps = agent.tier.get(
        [key_of(9), key_of(1), key_of(2)], lambda index, block: seen.append((index, bytes(block.payload[:8])))
    )

    items = iterate_blocking(steps, agent.peers, soon())

    assert next(items) == 1
    assert len(seen) == 1, "the second was not read yet"
    assert agent.tier.stats().pinned_count == 0, "who gave the block up has given up the pin"
    assert next(items) == 2
    assert list(items) == []


def test_without_pins_everything_still_works(pool, make_agent):
    agent = make_agent(pool.address, pin_slots=0)

    assert agent.put(copy_of(1)) == ["stored"], "written inline"
    assert not agent.get(1)[1].pinned
    assert bytes(agent.get(1)[1].payload) == payload_of(1, LARGE)


def test_a_full_pool_says_so_and_views_stay(tmp_path, make_agent):
    with pool_thread(
        tmp_path, region_bytes=160 << 10, hazard_count=128, index_entries=64, pin_budget_bytes=1 << 30
    ) as pool:
        agent = make_agent(pool.address)
        capacity = pool.usage().capacity_bytes // (9 << 10)
        assert capacity > 3
        assert agent.put(*(copy_of(number) for number in range(capacity))) == ["stored"] * capacity
        views = agent.get(*range(capacity))

        assert agent.put(copy_of(50)) == ["full"]
        del views[0]
        gc.collect()
        assert agent.put(copy_of(50)) == ["stored"]
        assert all(bytes(view.payload) == payload_of(number, LARGE) for number, view in views.items())


def test_a_payload_that_is_not_what_the_header_says_is_the_callers_mistake(pool, make_agent):
    wrong = BlockCopy(copy_of(1).header, memoryview(payload_of(1, SMALL)))

    with pytest.raises(PayloadError):
        make_agent(pool.address).put(wrong)


def test_another_tenant_gets_nothing_and_stores_nothing(pool, make_agent):
    make_agent(pool.address).put(copy_of(1))
    stranger = make_agent(pool.address, identity=Identity(CREDENTIALS.token("other"), Incarnation(8)))

    assert stranger.lookup(1) == [None]
    assert stranger.get(1) == {}
    assert stranger.put(copy_of(2)) == ["unavailable"]
    assert not stranger.tier.stats().attached


def test_without_a_pool_everything_is_a_miss_at_once(tmp_path, make_agent):
    agent = make_agent(f"unix://{tmp_path}/nobody.sock")

    begun = time.monotonic()
    assert agent.lookup(1) == [None]
    assert agent.get(1) == {}
    assert agent.put(copy_of(1)) == ["unavailable"]
    assert time.monotonic() - begun < 5

    with pool_thread(tmp_path) as pool:
        agent.pools = [Pool("pool-0", pool.address)]
        until(lambda: agent.put(copy_of(1)) == ["stored"])


def test_views_outlive_the_pool_and_a_new_pool_is_found(tmp_path, make_agent):
    with pool_thread(tmp_path, incarnation=21) as pool:
        agent = make_agent(pool.address)
        agent.put(copy_of(1))
        view = agent.get(1)[1]
    assert list(tmp_path.glob("kvcomm-*")) == []

    until(lambda: agent.lookup(1) == [None])
    assert agent.get(1) == {}
    assert agent.put(copy_of(1)) == ["unavailable"]
    assert bytes(view.payload) == payload_of(1, LARGE)

    with pool_thread(tmp_path, incarnation=22):
        until(lambda: agent.lookup(1) == [False])
        assert agent.put(copy_of(1)) == ["stored"]
        assert bytes(agent.get(1)[1].payload) == payload_of(1, LARGE)
        stats = agent.tier.stats()
        assert (stats.attach_count, stats.lost_count) == (2, 1)
    assert bytes(view.payload) == payload_of(1, LARGE)


def test_a_region_of_another_life_is_not_attached(make_pool, make_agent):
    """The greeting and the region must be of one incarnation, or bytes would be written where nobody owns
    them."""
    shared = make_pool()
    assert shared.region.header.incarnation != 11

    with served(
        BlockService(shared.owner, time.monotonic, region=lambda tenant: str(shared.region.path))
    ) as server:
        agent = make_agent(server.address)
        assert agent.lookup(1) == [None]
        assert not agent.tier.stats().attached


def test_closing_keeps_views_and_their_pins(tmp_path, make_agent):
    with pool_thread(tmp_path, region_bytes=160 << 10, hazard_count=32, index_entries=64) as pool:
        agent, other = make_agent(pool.address, pin_slots=4), make_agent(pool.address, pin_slots=4)
        agent.put(copy_of(1))
        view = agent.get(1)[1]
        agent.close()
        assert agent.lookup(1) == [None]
        for number in range(10, 60):
            assert other.put(copy_of(number)) == ["stored"]

        assert bytes(view.payload) == payload_of(1, LARGE)
        assert pool.usage().pinned_bytes > 0
        del view
        gc.collect()
        until(lambda: pool.usage().pinned_bytes == 0)


def test_a_slow_pool_costs_a_put_its_timeout_and_a_read_nothing(pool, make_agent):
    agent = make_agent(pool.address, request_timeout_s=0.05)
    agent.put(copy_of(1))
    go_on = threading.Event()
    pool._loop.call_soon_threadsafe(go_on.wait, 10)
    try:
        assert agent.put(copy_of(2)) == ["unavailable"]
        assert bytes(agent.get(1)[1].payload) == payload_of(1, LARGE)
        assert agent.lookup(1, 2) == [True, False]
    finally:
        go_on.set()


def test_it_works_on_an_event_loop(pool):
    async def main():
        pools = [Pool("pool-0", pool.address)]
        tier, peers = L2Tier(lambda: pools, IDENTITY), AsyncPeers(IDENTITY)
        try:
            assert await run_async(tier.put([copy_of(1), copy_of(2, SMALL)]), peers, soon()) == ["stored"] * 2
            found: dict[int, Block] = {}
            await run_async(tier.get([key_of(1)], found.__setitem__), peers, soon())
            assert bytes(found[0].payload) == payload_of(1, LARGE)
        finally:
            tier.close()
            await peers.close()

    asyncio.run(main())


@pytest.mark.slow
def test_many_threads_attach_once(pool, make_agent):
    agent = make_agent(pool.address)
    answers = []
    threads = [threading.Thread(target=lambda n=n: answers.append(agent.put(copy_of(n)))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [["stored"]] * 16
    assert agent.tier.stats().attach_count == 1
    assert sorted(agent.get(*range(16))) == list(range(16))


def attendants():
    return [each for each in threading.enumerate() if each.name == "kvcomm-l2-attendant"]


@pytest.mark.parametrize("prefault", [False, True])
def test_the_attendant_ends_with_the_tier(pool, make_agent, prefault):
    agent = make_agent(pool.address, prefault=prefault)
    assert agent.put(copy_of(1)) == ["stored"]
    assert len(attendants()) == 1
    agent.close()

    until(lambda: not attendants())


def test_an_idle_agent_does_not_keep_the_memory_of_a_dead_pool(tmp_path, make_agent, monkeypatch):
    monkeypatch.setattr("l2_rdma.member._ATTEND_INTERVAL_S", 0.01)
    with pool_thread(tmp_path) as pool:
        agent = make_agent(pool.address)
        agent.put(copy_of(1))
        region = weakref.ref(attachment_of(agent.tier).region)

    until(lambda: region() is None)
    assert not agent.tier.stats().attached
    until(lambda: not attendants())


def test_a_tier_that_nobody_has_any_more_leaves_the_pool(pool, monkeypatch):
    monkeypatch.setattr("l2_rdma.member._ATTEND_INTERVAL_S", 0.01)
    agent = Agent(pool.address)
    agent.put(copy_of(1))
    region = weakref.ref(attachment_of(agent.tier).region)
    agent.peers.close()
    del agent
    gc.collect()

    until(lambda: region() is None)
    until(lambda: pool.running.server.connection_count == 0)


class SlowMemory:
    """A region of three slices of which two have memory; entering one takes 10 ms."""

    def __init__(self):
        self.header = region_header(layout_of(6 << 8))  # 6 MiB of slots
        self.backed_bytes = 4 << 20
        self.populated, self.now = [], 0.0

    def populate(self, begin, end):
        self.populated.append((begin, end))
        self.now += 0.01
        return True


def test_prefaulting_takes_a_tenth_of_a_core_and_waits_for_memory_to_arrive():
    memory = SlowMemory()

    rests = _prefault(cast("Any", memory), lambda: memory.now)

    assert list(itertools.islice(rests, 4)) == [pytest.approx(0.09), pytest.approx(0.09), 0.5, 0.5]
    assert memory.populated == [(0, 2 << 20), (2 << 20, 4 << 20)]
    memory.backed_bytes = memory.header.layout.region_bytes
    assert next(rests) == pytest.approx(0.09)
    assert memory.populated[2] == (4 << 20, 6 << 20)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_attaches_for_itself(pool, make_agent):
    agent = make_agent(pool.address)
    agent.put(copy_of(1))
    held = agent.get(1)[1]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            block = agent.get(1)[1]
            right = block.pinned and bytes(block.payload) == payload_of(1, LARGE)
            status = 0 if right and agent.put(copy_of(2)) == ["stored"] else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert agent.lookup(1, 2) == [True, True]
    assert bytes(held.payload) == payload_of(1, LARGE)


# -- what the tier decides, message by message


def drive(steps, replies):
    """Run ``steps`` on canned replies; (result, messages asked)."""
    asked: list[Message] = []
    answer: Any = None
    try:
        while True:
            step = steps.send(answer)
            match step:
                case Submit(asks):
                    asked += [ask.message for ask in asks]
                    answer = [None] * len(asks)
                case Wait():
                    answer = Answer(replies.pop(0), [], 0.0)
                case Park(waiter=waiter):
                    done = threading.Event()
                    waiter.add_callback(done.set)
                    answer = done.wait(10)
    except StopIteration as end:
        return end.value, asked


def kinds(asked):
    return [type(message) for message in asked]


def test_a_grant_of_another_pools_life_is_not_written_to(pool, make_agent):
    """The pool restarted between our attaching and our reserving: its offsets mean nothing in our mapping."""
    agent = make_agent(pool.address)
    agent.put(copy_of(5))
    taken = agent.get(5)[5]
    grant = Grant("granted", 1 << 61, 1 << 20, 1 << 61)

    result, asked = drive(
        agent.tier.put([copy_of(1)]), [BlockReserved([grant]), Done(), BlockStored(["stored"])]
    )

    assert result == ["stored"]
    assert kinds(asked) == [BlockReserve, BlockAbort, BlockPut]
    assert bytes(taken.payload) == payload_of(5, LARGE)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Failure("unavailable", ""), "unavailable"),
        (Failure("outcome_unknown", ""), "unavailable"),
        (Failure("refused", ""), "refused"),
        (Failure("too_large", ""), "too_large"),
        (BlockReserved([Grant("full")]), "full"),
        (BlockReserved([Grant("pending")]), "pending"),
        (BlockReserved([]), "refused"),
    ],
)
def test_what_the_pool_says_becomes_a_status(pool, make_agent, reply, status):
    result, asked = drive(make_agent(pool.address).tier.put([copy_of(1)]), [reply])

    assert result == [status]
    assert kinds(asked) == [BlockReserve]


@pytest.mark.parametrize("statuses", [[], ["stored", "stored"]])
def test_an_answer_for_other_copies_than_were_put_is_none(pool, make_agent, statuses):
    result, _ = drive(make_agent(pool.address).tier.put([copy_of(1, SMALL)]), [BlockStored(statuses)])

    assert result == ["refused"]


def test_a_pool_that_does_not_answer_is_not_asked_for_every_batch(pool, make_agent, monkeypatch):
    """Each request would wait as long as the first one."""
    monkeypatch.setattr("l2_rdma.tier.BATCH_BLOCKS", 2)
    copies = [copy_of(1), copy_of(2, SMALL), copy_of(3), copy_of(4, SMALL)]

    result, asked = drive(make_agent(pool.address).tier.put(copies), [Failure("unavailable", "")])
    assert result == ["unavailable"] * 4
    assert kinds(asked) == [BlockReserve]

    result, asked = drive(
        make_agent(pool.address).tier.put(copies[1:]),
        [BlockReserved([Grant("full")]), Failure("unavailable", "")],
    )
    assert result == ["unavailable", "full", "unavailable"]
    assert kinds(asked) == [BlockReserve, BlockPut]


def test_operations_wait_for_the_first_attempt_to_attach_and_for_none_after_a_failure(tmp_path):
    """A pool that hangs would take ``attach_timeout_s`` of an operation's time again and again, and other
    tiers have what it asks for."""
    ahead_s = [0.0]
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{tmp_path}/pool.sock")
        mute.listen()
        pools = [Pool("pool-0", f"unix://{tmp_path}/pool.sock")]
        tier = L2Tier(
            lambda: pools,
            IDENTITY,
            options=AttachOptions(attach_timeout_s=0.05),
            clock=lambda: time.monotonic() + ahead_s[0],
        )
        first = tier.lookup([key_of(1)])
        assert isinstance(next(first), Park)
        assert drive(tier.lookup([key_of(1)]), []) == ([None], [])
        until(lambda: tier._members["pool-0"]._attempt is None)

        ahead_s[0] += BACKOFF_MAX_S
        later = tier.lookup([key_of(1)])
        with pytest.raises(StopIteration) as end:
            next(later)
        assert end.value.value == [None]
        assert tier._members["pool-0"]._attempt is not None, "it is tried again, in the background"
        tier.close()
        until(lambda: tier._members["pool-0"]._attempt is None)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (BlockPublished(["published"]), "stored"),
        (BlockPublished(["expired"]), "expired"),
        (BlockPublished(["corrupt"]), "corrupt"),
        (Failure("unavailable", ""), "unavailable"),
    ],
)
def test_what_became_of_a_written_block_becomes_a_status(pool, make_agent, reply, status):
    agent = make_agent(pool.address)
    agent.lookup(1)
    granted = pool.running.store.reserve([Want(key_of(1), copy_of(1).copy_bytes)], 9999, DIGEST, 0.0)

    result, asked = drive(agent.tier.put([copy_of(1)]), [BlockReserved(granted), reply])

    assert result == [status]
    assert kinds(asked) == [BlockReserve, BlockPublish]
