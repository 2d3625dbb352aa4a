"""What agents of one host see: each other's blocks, contexts and state; and what they see when processes
die."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from kvcomm import Namespace, connect, connect_async
from kvcomm.block import BlockKey, Buffer
from kvcomm.client import Client
from kvcomm.control import ControlClient
from kvcomm.deadline import DEADLINE_S
from kvcomm.embedded import Embedded
from kvcomm.errors import (
    Conflict,
    KVCommError,
    OutcomeUnknown,
    PartlyDone,
    PayloadError,
    Refused,
    TooLarge,
    Unavailable,
)
from kvcomm.namespace import TenantDigest
from kvcomm.steps import Steps
from kvcomm.tier import Block
from kvcomm.wire.messages import VALUE_BYTES_MAX
from tests.system.conftest import CONFIG, Cluster, eventually, make_namespace, payloads

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TOKENS = list(range(8 * 16 + 5))


def _publish_in_another_process(config: str, instance: str, revision: str) -> None:
    with connect(config, instance=instance) as kv:
        namespace = make_namespace(revision)
        assert kv.publish(namespace, TOKENS, payloads(namespace, 8)).stored == 8


def test_one_agent_fetches_what_another_process_published(cluster: Cluster, kv: Client) -> None:
    spawn = multiprocessing.get_context("spawn")
    arguments = (str(cluster.config), cluster.instance.name, "between processes")
    agent = spawn.Process(target=_publish_in_another_process, args=arguments)
    agent.start()
    agent.join(60)
    assert agent.exitcode == 0
    namespace = make_namespace("between processes")
    hit = kv.fetch(namespace, TOKENS)
    assert hit.token_count == 128
    assert hit.tiers == {"l1": 0, "l2": 128, "l3": 0}
    assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8)
    assert kv.fetch(namespace, TOKENS).tiers["l1"] == 128


def test_only_what_nobody_has_is_written(kv: Client, namespace: Namespace) -> None:
    assert kv.publish(namespace, TOKENS[:64], payloads(namespace, 4)).stored == 4
    again = kv.publish(namespace, TOKENS, payloads(namespace, 8, salt=100))
    assert (again.stored, again.present, again.failed) == (4, 4, 0)
    hit = kv.fetch(namespace, TOKENS)
    first, second = payloads(namespace, 4), payloads(namespace, 8, salt=100)[4:]
    assert [bytes(block.payload) for block in hit.blocks] == first + second, "the first copy stays"


def test_a_stream_gives_blocks_in_order(kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS, payloads(namespace, 8))
    got = [bytes(block.payload[:1]) for block in kv.stream(namespace, TOKENS)]
    assert got == [bytes([index]) for index in range(8)]


def test_blocks_that_do_not_fit_are_refused_and_nothing_is_written(kv: Client, namespace: Namespace) -> None:
    good = payloads(namespace, 2)
    with_gaps = memoryview(good[1] * 2)[::2]
    wrong: list[Buffer] = [good[1][:-1], good[1] + b"x", with_gaps]
    for bad in wrong:
        with pytest.raises(PayloadError, match="contiguous bytes"):
            kv.publish(namespace, TOKENS, [good[0], bad])
    with pytest.raises(PayloadError, match="full blocks"):
        kv.publish(namespace, TOKENS[:20], good)
    with pytest.raises(ValueError, match="token"):
        kv.fetch(namespace, [*TOKENS, 1000])
    assert kv.fetch(namespace, TOKENS).token_count == 0


def test_another_tenant_never_hits(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS, payloads(namespace, 8))
    kv.state("shared").put("k", b"ours")
    with cluster.client(cluster.instance.credentials().token("intruder")) as other:
        assert other.fetch(namespace, TOKENS).token_count == 0
        assert other.state("shared").get("k").values == ()
        assert other.publish(namespace, TOKENS, payloads(namespace, 8, salt=9)).failed == 0
        theirs = other.fetch(namespace, TOKENS)
        assert [bytes(block.payload[:1]) for block in theirs.blocks] == [bytes([9 + i]) for i in range(8)]
        with pytest.raises(Refused, match="tenant"):
            other.fetch(namespace.for_tenant(TenantDigest(bytes(16))), TOKENS)
    assert [bytes(block.payload[:1]) for block in kv.fetch(namespace, TOKENS).blocks] == [
        bytes([i]) for i in range(8)
    ]


def test_a_wrong_token_is_said_to_be_wrong(cluster: Cluster) -> None:
    with pytest.raises(Refused, match="token"):
        cluster.client("default:" + "0" * 64)


def test_contexts_are_followed(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    planner = kv.agent("planner", namespace).context("followed")
    planner.append(TOKENS[:40], payloads(namespace, 2))
    planner.append(TOKENS[40:70], payloads(namespace, 4)[2:])
    with cluster.client() as other:
        context = other.agent("critic").context_of("planner", "followed")
        assert list(context.manifest().tokens) == TOKENS[:70]
        hit = context.fetch()
        assert hit.token_count == 64
        assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 4)
    with pytest.raises(PayloadError, match="complete 1 blocks"):
        planner.append(TOKENS[70:85], payloads(namespace, 2))
    with pytest.raises(Unavailable, match="no context"):
        kv.agent("critic").context_of("planner", "nothing").manifest()


def test_writers_that_fork_a_context_are_told(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    with cluster.client() as other:
        mine = kv.agent("planner", namespace).context("forked")
        theirs = other.agent("planner", namespace).context("forked")
        mine.append(TOKENS[:8])
        state = kv.run(kv._operations.state().get([b"context/planner/forked"]), 5.0)
        theirs.append(TOKENS[8:10])
        longer = mine.manifest()
        assert list(longer.tokens) == TOKENS[:10]
        assert state[0].values
        left, right = (
            longer.append([1], namespace_of(kv, namespace)),
            longer.append([2], namespace_of(kv, namespace)),
        )
        seen = kv.run(kv._operations.state().get([b"context/planner/forked"]), 5.0)[0].context
        for head in (left, right):
            kv.run(kv._operations.state().put([(b"context/planner/forked", head.encode(), seen)]), 5.0)
        with pytest.raises(Conflict, match="different ways"):
            mine.manifest()


def namespace_of(kv: Client, namespace: Namespace) -> Namespace:
    return kv._operations.bind(namespace)


def test_state_is_versioned(cluster: Cluster, kv: Client) -> None:
    robot = kv.state("robot-7")
    assert robot.get("pose").values == ()
    robot.put("pose", b"1")
    robot.put("pose", b"2")
    assert robot.get("pose").value == b"2"
    with cluster.client() as other:
        blind = other.state("robot-7")
        blind.put("pose", b"3")  # without having read: concurrent, so it must not replace
        both = blind.get("pose")
        assert set(both.values) == {b"2", b"3"}
        with pytest.raises(Conflict, match="merge"):
            assert both.value
        blind.put("pose", b"merged")
    assert robot.get("pose").value == b"merged"
    robot.delete("pose")
    assert robot.get("pose").values == ()
    with pytest.raises(TooLarge):
        robot.put("pose", bytes(VALUE_BYTES_MAX + 1))


def test_many_keys_in_one_call(kv: Client) -> None:
    many = kv.state("many")
    items = {f"key {index}/ä": str(index).encode() for index in range(100)}
    many.put_many(items)
    assert {key: value.value for key, value in many.get_many(list(items)).items()} == items
    assert sorted(many.keys()) == sorted(items)


FULL = 16
"""Siblings that a record may have."""


def fill(kv: Client, name: str) -> None:
    """Give the record ``full`` as many siblings as it may have."""
    for number in range(FULL):
        kv.state(name).put("full", b"%d" % number, context={})


def check_in_part(error: PartlyDone) -> None:
    outcomes = {outcome.key: outcome for outcome in error.outcomes}
    assert list(outcomes) == ["one", "full", "two"], "by the caller's keys, in its order"
    assert {key: outcome.status for key, outcome in outcomes.items()} == {
        "one": "done", "full": "not_done", "two": "done"
    }  # fmt: skip
    assert isinstance(outcomes["full"].error, Conflict)
    assert "2 of 3 writes were done, 1 were not" in error.message


def test_a_batch_that_is_done_in_part_says_what_became_of_each_key(kv: Client) -> None:
    fill(kv, "in part")
    state, items = kv.state("in part"), {"one": b"1", "full": b"over", "two": b"2"}
    with pytest.raises(PartlyDone) as caught:
        state.put_many(items, context={})
    check_in_part(caught.value)
    one = caught.value.outcomes[0]
    state.put("one", b"next", context=one.context)
    assert state.get("one").values == (b"next",), "its context replaces what was done"
    assert set(state.get("full").values) == {b"%d" % number for number in range(FULL)}
    with pytest.raises(Conflict) as refused:
        state.put("full", b"over", context={})
    assert [outcome.status for outcome in refused.value.outcomes] == ["not_done"]


def test_the_asyncio_face_says_it_too(cluster: Cluster, kv: Client) -> None:
    fill(kv, "in part too")

    async def put() -> None:
        async with await connect_async(cluster.config, instance=cluster.instance.name) as client:
            with pytest.raises(PartlyDone) as caught:
                await client.state("in part too").put_many(
                    {"one": b"1", "full": b"over", "two": b"2"}, context={}
                )
            check_in_part(caught.value)

    asyncio.run(put())


def test_the_asyncio_face_gives_the_same(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS, payloads(namespace, 8))

    async def agent() -> None:
        async with await connect_async(cluster.config, instance=cluster.instance.name) as other:
            hit = await other.fetch(namespace, TOKENS)
            assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8)
            await other.state("async").put("k", b"v")
            assert (await other.state("async").get("k")).value == b"v"
            streamed = [block async for block in other.stream(namespace, TOKENS)]
            assert len(streamed) == 8
            results = await asyncio.gather(*(other.state("async").get("k") for _ in range(20)))
            assert {each.value for each in results} == {b"v"}

    asyncio.run(agent())


def test_fifty_readers_cause_one_load(
    cluster: Cluster, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.client() as publisher:
        publisher.publish(namespace, TOKENS, payloads(namespace, 8))
    before = cluster.kill("pool-0", signal.SIGKILL)  # so that the only copies are in L3
    cluster.restarted(before)
    with cluster.client() as kv:
        loads: list[int] = []
        l3 = kv._operations._blocks._l3
        assert l3 is not None
        get = l3.get

        def counted(keys: Sequence[BlockKey], found: Callable[[int, Block], None]) -> Steps[None]:
            loads.append(len(keys))
            return get(keys, found)

        monkeypatch.setattr(l3, "get", counted)
        barrier = threading.Barrier(50)
        hits: list[int] = []

        def read() -> None:
            barrier.wait()
            hits.append(kv.fetch(namespace, TOKENS).token_count)

        readers = [threading.Thread(target=read) for _ in range(50)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert hits == [128] * 50
    assert sum(loads) == 8, "each of the 8 blocks was loaded once"


def test_a_killed_pool_loses_nothing_that_l3_has(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.client() as kv:
        kv.publish(namespace, TOKENS, payloads(namespace, 8))
        views = kv.fetch(namespace, TOKENS).blocks
        assert {block.tier for block in views} == {"l2"}
        before = cluster.kill("pool-0", signal.SIGKILL)
        cluster.restarted(before)
        assert [bytes(block.payload) for block in views] == payloads(namespace, 8), "views outlive their pool"
        assert not Path(before.region).exists(), "the dead pool's region was reclaimed"
    with cluster.client() as kv:
        hit = kv.fetch(namespace, TOKENS)
        assert hit.tiers == {"l1": 0, "l2": 0, "l3": 128}
        assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8)
    with cluster.client() as kv:
        assert kv.fetch(namespace, TOKENS).tiers["l2"] == 128, "promoted for the next agent"


def test_a_client_goes_on_with_a_restarted_pool(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS[:64], payloads(namespace, 4))
    cluster.restarted(cluster.kill("pool-0", signal.SIGKILL))
    other = make_namespace("after the restart")

    def published() -> bool:
        return all(
            each.l2 in ("stored", "present")
            for each in kv.publish(other, TOKENS, payloads(other, 8)).statuses
        )

    eventually(published)
    with cluster.client() as reader:
        assert reader.fetch(other, TOKENS).tiers["l2"] == 128


def test_a_paused_pool_costs_no_read_and_no_hang(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS[:64], payloads(namespace, 4))
    record = cluster.kill("pool-0", signal.SIGSTOP)
    try:
        assert kv.fetch(namespace, TOKENS[:64]).token_count == 64, "reading needs no pool process"
        begin = time.monotonic()
        published = kv.publish(namespace, TOKENS, payloads(namespace, 8), deadline_s=2.0)
        assert time.monotonic() - begin < 10
        assert published.statuses[7].l2 == "unavailable"
        assert [status.readable for status in published.statuses[:4]] == [True] * 4
    finally:
        os.kill(record.pid, signal.SIGCONT)
    assert kv.publish(namespace, TOKENS, payloads(namespace, 8)).failed == 0


def test_a_killed_shard_loses_no_acknowledged_record(cluster: Cluster, kv: Client) -> None:
    items = {f"k{index}": str(index).encode() for index in range(60)}
    kv.state("durable").put_many(items)
    before = cluster.kill("shard-1", signal.SIGKILL)
    values = kv.state("durable").get_many(list(items), deadline_s=10.0)
    assert {key: value.value for key, value in values.items()} == items
    cluster.restarted(before)
    values = kv.state("durable").get_many(list(items), deadline_s=10.0)
    assert {key: value.value for key, value in values.items()} == items


def test_a_paused_shard_is_passed_over_within_the_deadline(cluster: Cluster, kv: Client) -> None:
    items = {f"p{index}": b"v" for index in range(30)}
    kv.state("paused").put_many(items)
    record = cluster.kill("shard-2", signal.SIGSTOP)
    try:
        begin = time.monotonic()
        values = kv.state("paused").get_many(list(items), deadline_s=8.0)
        assert {value.value for value in values.values()} == {b"v"}
        assert kv.fetch(make_namespace("nobody has this"), TOKENS, deadline_s=5.0).token_count == 0
        assert time.monotonic() - begin < 14
    finally:
        os.kill(record.pid, signal.SIGCONT)


def test_processes_killed_in_the_middle_of_puts_and_gets(cluster: Cluster) -> None:
    """Publishers and readers go on while the pool and a shard are killed; whatever is read is right."""
    stop = threading.Event()
    wrong: list[str] = []
    fetched = [0]

    def work(number: int) -> None:
        with cluster.client() as kv:
            turn = 0
            while not stop.is_set():
                namespace = make_namespace(f"kill {turn // 2}")
                try:
                    if number % 2:
                        kv.publish(namespace, TOKENS, payloads(namespace, 8), deadline_s=5.0)
                    hit = kv.fetch(namespace, TOKENS, deadline_s=5.0)
                except KVCommError as error:
                    wrong.append(repr(error))
                    return
                want = payloads(namespace, 8)[: len(hit.blocks)]
                if [bytes(block.payload) for block in hit.blocks] != want:
                    wrong.append(f"turn {turn}: wrong bytes")
                fetched[0] += hit.token_count
                turn += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for name in ("pool-0", "shard-0", "pool-0"):
        before = fetched[0]
        eventually(partial(_more_than, fetched, before + 1000))
        cluster.restarted(cluster.kill(name, signal.SIGKILL))
    stop.set()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive(), "a call hangs"
    assert wrong == []


def _more_than(counter: list[int], bound: int) -> bool:
    return counter[0] > bound


def test_flipped_bytes_in_the_pool_are_refused_and_l3_answers(cluster: Cluster, namespace: Namespace) -> None:
    with cluster.client() as kv:
        kv.publish(namespace, TOKENS, payloads(namespace, 8, salt=0x51))
        damaged = _flip(Path(cluster.node("pool-0").region), bytes([0x53]) * 4096)
        assert damaged == 1
    with cluster.client() as kv:
        hit = kv.fetch(namespace, TOKENS)
        assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8, salt=0x51)
        assert [block.tier for block in hit.blocks] == ["l2", "l2", "l3", *["l2"] * 5]


def _flip(region: Path, pattern: bytes) -> int:
    """Change one byte after the first occurrence of ``pattern``; how many were changed."""
    with region.open("r+b") as file:
        at = file.read().find(pattern)
        if at < 0:
            return 0
        file.seek(at + len(pattern) // 2)
        file.write(bytes([pattern[0] ^ 0xFF]))
    return 1


def test_a_killed_client_leaves_no_pins(cluster: Cluster, kv: Client, namespace: Namespace) -> None:
    kv.publish(namespace, TOKENS, payloads(namespace, 8))
    program = (
        "import sys, time, kvcomm\n"
        "from tests.system.conftest import make_namespace\n"
        "kv = kvcomm.connect(sys.argv[1], instance=sys.argv[2])\n"
        "hit = kv.fetch(make_namespace(sys.argv[3]), list(range(133)))\n"
        "print(sum(block.pinned for block in hit.blocks), flush=True)\n"
        "time.sleep(600)\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-c", program, str(cluster.config), cluster.instance.name, namespace.revision],
        stdout=subprocess.PIPE,
    )
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"8\n"
        eventually(lambda: _pinned_bytes(cluster) >= 8 * namespace.block_bytes)
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close() if reader.stdout else None
    eventually(lambda: _pinned_bytes(cluster) == 0)


def _pinned_bytes(cluster: Cluster) -> int:
    token = cluster.instance.credentials().token("status")
    with ControlClient(cluster.node("pool-0").control, token) as control:
        usage = control.status(timeout_s=5.0).usage
    assert usage is not None
    return usage.pinned_bytes


def test_when_the_whole_cluster_ends_a_client_is_told_in_time(tmp_path: Path, namespace: Namespace) -> None:
    config = tmp_path / "kvcomm.yaml"
    config.write_text(CONFIG.replace("shards: 3", "shards: 1"))
    embedded = Embedded.start(f"ending-{os.getpid()}", config, time.monotonic() + 60)
    try:
        with connect(config, instance=embedded.instance) as kv:
            kv.publish(namespace, TOKENS, payloads(namespace, 8))
            kv.fetch(namespace, TOKENS[:64])
            kv.state("s").put("k", b"v")
            embedded.stop()
            begin = time.monotonic()
            assert kv.fetch(namespace, TOKENS).token_count == 64, "what this process holds"
            assert kv.publish(namespace, TOKENS, payloads(namespace, 8)).failed >= 4
            with pytest.raises(Unavailable):
                kv.state("s").get("k")
            with pytest.raises((Unavailable, OutcomeUnknown)):
                kv.state("s").put("k", b"w")
            assert kv.metrics()
            assert time.monotonic() - begin < 4 * DEADLINE_S + 5
        with pytest.raises(Refused, match="no instance"):
            connect(config, instance=embedded.instance)
    finally:
        embedded.stop()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_again_under_pins_of_its_own(
    cluster: Cluster, kv: Client, namespace: Namespace
) -> None:
    kv.publish(namespace, TOKENS, payloads(namespace, 8))
    assert kv.fetch(namespace, TOKENS).tiers["l2"] == 128
    child = os.fork()
    if child == 0:
        code = 1
        try:
            hit = kv.fetch(namespace, TOKENS)
            right = [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8)
            kv.state("forked").put("k", b"from the child")
            code = 0 if right and hit.tiers == {"l1": 0, "l2": 128, "l3": 0} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hit = kv.fetch(namespace, TOKENS)
    assert hit.tiers["l1"] == 128, "the parent's pins stand"
    assert [bytes(block.payload) for block in hit.blocks] == payloads(namespace, 8)
    assert kv.state("forked").get("k").value == b"from the child"


def test_an_embedded_cluster_ends_with_its_killed_owner(cluster: Cluster) -> None:
    program = (
        "import sys, time, kvcomm\n"
        "kv = kvcomm.connect(sys.argv[1])\n"
        "kv.state('s').put('k', b'v')\n"
        "from kvcomm.instance import Instance\n"
        "name = next(i.name for i in Instance.list() if i.name.startswith('embedded-') and i.nodes())\n"
        "print(name, *[n.pid for n in Instance.open(name).nodes()], flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("KVCOMM_INSTANCE", "KVCOMM_ADDRESS")}
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(cluster.config)], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert owner.stdout is not None
        name, *pids = owner.stdout.readline().split()
        assert len(pids) == 5
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close() if owner.stdout else None
    eventually(lambda: not any(Path(f"/proc/{int(pid)}").exists() for pid in pids))
    eventually(lambda: not list(Path("/dev/shm").glob(f"kvcomm-{name.decode()}-*")))
