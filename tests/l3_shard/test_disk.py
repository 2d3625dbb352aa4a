"""The disk tier's shell: real files where the disk is sound, a scripted disk where it is not."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvcomm.block import BlockKey
from kvcomm.blockstore import Depot
from kvcomm.errors import Corrupt, Unavailable
from kvcomm.wire.messages import Want
from l3_shard import disk
from l3_shard.disk import BlockDisk, block_disk
from l3_shard.diskfiles import Found
from l3_shard.diskhealth import ERRORS_MAX
from l3_shard.diskindex import DiskEntry, room_bytes
from tests.blockstores import DictStore
from tests.l3_shard.blocks import TENANT, chain

COPIES = chain(8)
KEYS = list(COPIES)
SIZE = len(COPIES[KEYS[0]])
DEADLINE_S = 10.0


@dataclass
class ScriptedFiles:
    """A disk in a dictionary that fails and stalls as it is told."""

    held: dict[BlockKey, bytes] = field(default_factory=dict)
    failing: int = 0
    """The ``errno`` of reads and writes; 0 = none."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Reads and writes wait for it."""

    def __post_init__(self) -> None:
        self.gate.set()

    def _wait(self) -> None:
        assert self.gate.wait(DEADLINE_S)
        if self.failing:
            raise OSError(self.failing, "scripted")

    def write(self, key: BlockKey, copy: memoryview) -> None:
        self._wait()
        self.held[key] = bytes(copy)

    def read(self, key: BlockKey, copy_bytes: int) -> memoryview:
        self._wait()
        held = self.held.get(key)
        if held is None:
            raise FileNotFoundError("scripted")
        if held != COPIES[key]:
            raise Corrupt("scripted")
        return memoryview(bytearray(held))

    def remove(self, key: BlockKey) -> None:
        self.held.pop(key, None)

    def scan(self) -> Found:
        return Found([DiskEntry(key, BlockKey(bytes(32)), TENANT, SIZE) for key in self.held], 0, 0)

    def close(self) -> None:
        self.gate.set()


def put(store: DictStore, *keys: BlockKey) -> None:
    for key in keys:
        (grant,) = store.reserve([Want(key, SIZE)], 1, TENANT, 0.0)
        store.extent(grant.token)[:] = COPIES[key]
        assert store.publish([grant.token], 1, 0.0, verify=True) == ["published"]


async def eventually(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not look():
            await asyncio.sleep(0.002)


async def recalled(
    tier: Depot, *keys: BlockKey, tenant: bytes = TENANT, use: bool = True
) -> dict[BlockKey, bytes]:
    answer: asyncio.Future[dict[BlockKey, bytes]] = asyncio.get_running_loop().create_future()
    tier.recall(
        keys,
        tenant,
        lambda copies: answer.set_result({key: bytes(copy) for key, copy in copies.items()}),
        use=use,
    )
    async with asyncio.timeout(DEADLINE_S):
        return await answer


def run(
    work: Callable[[BlockDisk, DictStore], Awaitable[None]], files: ScriptedFiles, **options: float
) -> None:
    async def main() -> None:
        store = DictStore()
        tier = BlockDisk(files, 64 << 20, store, time.monotonic, **options)
        try:
            await eventually(lambda: tier.usage().state != "opening")
            await work(tier, store)
            assert all(copy.leases == 0 for copy in store.copies.values())
        finally:
            files.gate.set()
            await tier.close()

    asyncio.run(main())


def on_real_files(
    directory: Path, capacity_bytes: int, work: Callable[[BlockDisk, DictStore], Awaitable[None]]
) -> None:
    async def main() -> None:
        store = DictStore()
        async with block_disk(directory, capacity_bytes, store, fsync=False, clock=time.monotonic) as tier:
            await eventually(lambda: tier.usage().state == "on")
            await work(tier, store)

    asyncio.run(main())


def test_what_was_published_is_had_after_a_restart(tmp_path: Path) -> None:
    async def before(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS)
        tier.stored(KEYS)
        await tier.settled()
        assert tier.usage().written_count == len(KEYS)
        assert tier.usage().used_bytes == len(KEYS) * room_bytes(SIZE)
        assert not any(store.used(KEYS)), "writing is no use of a block"

    async def after(tier: BlockDisk, store: DictStore) -> None:
        assert tier.present(KEYS, TENANT) == [True] * len(KEYS)
        assert tier.usage().used_bytes == len(KEYS) * room_bytes(SIZE)
        assert await recalled(tier, *KEYS) == COPIES
        assert await recalled(tier, *KEYS, tenant=b"x" * 16) == {}
        assert [item.key for item in tier.listing(b"", 99)] == sorted(KEYS)

    on_real_files(tmp_path, 64 << 20, before)
    on_real_files(tmp_path, 64 << 20, after)


def test_the_bytes_stay_below_the_bound_also_when_it_became_smaller(tmp_path: Path) -> None:
    async def fill(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS)
        tier.stored(KEYS)
        await tier.settled()
        usage = tier.usage()
        assert (usage.block_count, usage.evicted_count) == (6, 2)

    async def shrunk(tier: BlockDisk, store: DictStore) -> None:
        assert tier.usage().block_count == 3
        await eventually(lambda: on_disk(tmp_path) == 3)

    on_real_files(tmp_path, 6 * room_bytes(SIZE), fill)
    assert on_disk(tmp_path) == 6
    on_real_files(tmp_path, 3 * room_bytes(SIZE), shrunk)


def on_disk(directory: Path) -> int:
    return sum(len(path.name) == 64 for path in directory.rglob("*"))


def test_a_damaged_file_is_a_miss_and_gone(tmp_path: Path) -> None:
    async def work(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS)
        tier.stored(KEYS)
        await tier.settled()
        path = next(path for path in tmp_path.rglob(KEYS[2].hex()))
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        found = await recalled(tier, *KEYS)
        assert found == {key: copy for key, copy in COPIES.items() if key != KEYS[2]}
        assert tier.usage().damaged_count == 1 and tier.present([KEYS[2]], TENANT) == [False]
        await eventually(lambda: not path.exists())
        next(tmp_path.rglob(KEYS[3].hex())).unlink()
        assert KEYS[3] not in await recalled(tier, KEYS[3])
        assert tier.usage().error_count == 0 and tier.present([KEYS[3]], TENANT) == [False]

    on_real_files(tmp_path, 64 << 20, work)


def test_a_copy_that_memory_has_no_room_for_is_kept_if_nothing_has_to_go(tmp_path: Path) -> None:
    async def work(tier: BlockDisk, store: DictStore) -> None:
        outcomes: list[bool] = []
        heard: list[tuple[BlockKey, bool]] = []
        tier.watch(lambda key, tenant: heard.append((key, tier.present([key], tenant)[0])))
        for key in KEYS[:4]:
            tier.keep(key, memoryview(COPIES[key]), outcomes.append)
        await eventually(lambda: len(outcomes) == 4)
        assert heard == [(key, False) for key in KEYS[:3]], "before anybody could see them"
        assert outcomes == [True, True, True, False] and on_disk(tmp_path) == 3
        tier.keep(KEYS[0], memoryview(COPIES[KEYS[0]]), outcomes.append)
        assert outcomes[4:] == [True], "it is there"
        assert await recalled(tier, *KEYS) == {key: COPIES[key] for key in KEYS[:3]}
        assert not store.copies or tier.usage().evicted_count == 0

    on_real_files(tmp_path, 3 * room_bytes(SIZE), work)


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO])
def test_who_waits_for_a_copy_to_be_kept_is_told_that_it_is_not(problem: int) -> None:
    files = ScriptedFiles()

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.failing = problem
        outcomes: list[bool] = []
        for key in KEYS:
            tier.keep(key, memoryview(COPIES[key]), outcomes.append)
        await eventually(lambda: len(outcomes) == len(KEYS))
        assert not any(outcomes) and not any(tier.present(KEYS, TENANT))

    run(work, files)


def test_what_is_dropped_is_gone_wherever_it_was_on_its_way() -> None:
    """On the disk, waiting to be written, being written, and being read into memory."""
    files = ScriptedFiles({KEYS[0]: COPIES[KEYS[0]]})

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.gate.clear()
        put(store, *KEYS[1:4])
        tier.stored(KEYS[1:4])
        reading = asyncio.create_task(recalled(tier, KEYS[0]))
        await asyncio.sleep(0.0)
        gone = asyncio.Event()
        store.drop(KEYS[:4])
        tier.drop(KEYS[:4], gone.set)
        assert not any(tier.present(KEYS, TENANT))
        files.gate.set()
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
            await reading
        await tier.settled()
        await eventually(lambda: not files.held)
        assert tier.listing(b"", 99) == [] and not any(store.present(KEYS, TENANT))
        put(store, KEYS[1])
        tier.stored([KEYS[1]])  # it may come back
        await tier.settled()
        assert tier.present(KEYS[:2], TENANT) == [False, True]

    run(work, files)


def test_a_suspect_is_verified() -> None:
    files = ScriptedFiles(dict(COPIES))
    files.held[KEYS[1]] = b"damaged"

    async def work(tier: BlockDisk, store: DictStore) -> None:
        tier.quarantine(KEYS[:2], TENANT)
        await eventually(lambda: KEYS[1] not in files.held)
        assert tier.present(KEYS[:2], TENANT) == [True, False]

    run(work, files)


def test_one_that_is_read_goes_into_free_memory_and_evicts_only_when_read_again() -> None:
    async def main() -> None:
        store = DictStore()
        tier = BlockDisk(ScriptedFiles(dict(COPIES)), 64 << 20, store, time.monotonic)
        try:
            await eventually(lambda: tier.usage().state == "on")
            await recalled(tier, KEYS[0])
            assert (
                bytes(store.copies[KEYS[0]].buffer) == COPIES[KEYS[0]]
                and store.copies[KEYS[0]].tenant == TENANT
            )
            assert store.evicting == {False}
            await recalled(tier, KEYS[0])
            assert store.evicting == {False, True} and tier.usage().promoted_count == 1
        finally:
            await tier.close()

    asyncio.run(main())


def test_what_the_cluster_copies_for_itself_is_no_use() -> None:
    files = ScriptedFiles(dict(COPIES))

    async def work(tier: BlockDisk, store: DictStore) -> None:
        for _ in range(2):
            assert await recalled(tier, KEYS[0], use=False) == {KEYS[0]: COPIES[KEYS[0]]}
        tier.quarantine(KEYS[:1], TENANT)
        await eventually(lambda: tier.usage().read_count == 3)
        assert not store.copies and not store.evicting
        await asyncio.gather(recalled(tier, KEYS[0], use=False), recalled(tier, KEYS[0]))
        assert KEYS[0] in store.copies and store.evicting == {False}, "it had not been used before"

    run(work, files)


def test_readers_of_one_block_share_one_read() -> None:
    files = ScriptedFiles(dict(COPIES))

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.gate.clear()
        both = asyncio.gather(recalled(tier, *KEYS[:2]), recalled(tier, KEYS[1], KEYS[1]))
        await asyncio.sleep(0)
        files.gate.set()
        assert list(await both) == [{key: COPIES[key] for key in KEYS[:2]}, {KEYS[1]: COPIES[KEYS[1]]}]
        assert tier.usage().read_count == 2

    run(work, files)


def test_a_full_disk_takes_nothing_serves_on_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l3_shard.diskhealth.RETRY_S", 0.02)
    files = ScriptedFiles({KEYS[0]: COPIES[KEYS[0]]})

    async def work(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS[1:])
        files.failing = errno.ENOSPC
        tier.stored(KEYS[1:])
        await eventually(lambda: tier.usage().state == "full")
        assert tier.present(KEYS[:1], TENANT) == [True]
        await eventually(lambda: tier.usage().error_count > 1)  # it looks again
        files.failing = 0
        await tier.settled()
        usage = tier.usage()
        assert usage.state == "on" and usage.written_count + usage.dropped_count == len(KEYS) - 1
        assert usage.dropped_count == usage.error_count
        assert await recalled(tier, KEYS[0]) == {KEYS[0]: COPIES[KEYS[0]]}

    run(work, files)


def test_a_block_that_cannot_be_read_is_a_miss_and_a_broken_disk_is_switched_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies = chain(ERRORS_MAX, first_token=5)
    files = ScriptedFiles({**COPIES, **copies}, failing=errno.EIO)

    async def work(tier: BlockDisk, store: DictStore) -> None:
        assert await recalled(tier, KEYS[0]) == {}
        assert tier.present(KEYS[:2], TENANT) == [False, True] and tier.usage().state == "on"
        for key in copies:
            await recalled(tier, key)
        assert tier.usage().state == "off" and tier.present(KEYS, TENANT) == [False] * len(KEYS)
        assert await recalled(tier, KEYS[1]) == {}
        put(store, KEYS[2])
        tier.stored([KEYS[2]])
        assert tier.usage().dropped_count == 1

    with caplog.at_level(logging.ERROR):
        run(work, files)
    assert sum("off, after too many errors" in message for message in caplog.messages) == 1


def test_a_stalled_disk_costs_a_miss_and_is_not_asked_until_it_answers() -> None:
    files = ScriptedFiles(dict(COPIES))

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.gate.clear()
        assert await recalled(tier, KEYS[0]) == {}
        assert tier.usage().state == "stalled" and tier.usage().busy_count == 1
        assert tier.present(KEYS, TENANT) == [False] * len(KEYS) and await recalled(tier, KEYS[1]) == {}
        files.gate.set()
        await eventually(lambda: tier.usage().state == "on")
        assert await recalled(tier, KEYS[0]) == {KEYS[0]: COPIES[KEYS[0]]}

    run(work, files, read_timeout_s=0.05)


def test_a_write_that_stalls_stops_the_reads_too() -> None:
    files = ScriptedFiles()

    async def work(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS)
        files.gate.clear()
        tier.stored(KEYS)
        await eventually(lambda: tier.usage().state == "stalled")
        files.gate.set()
        await tier.settled()
        assert tier.usage().state == "on" and tier.usage().written_count == len(KEYS)

    run(work, files, write_timeout_s=0.05)


def test_a_read_for_which_there_is_no_memory_is_a_miss_and_the_file_stays() -> None:
    class Greedy(ScriptedFiles):
        def read(self, key: BlockKey, copy_bytes: int) -> memoryview:
            raise MemoryError

    async def work(tier: BlockDisk, store: DictStore) -> None:
        assert await recalled(tier, KEYS[0]) == {}
        assert tier.present(KEYS[:1], TENANT) == [True] and tier.usage().busy_count == 1

    run(work, Greedy(dict(COPIES)))


def test_a_header_that_memory_has_damaged_is_not_written_and_keeps_nothing() -> None:
    files = ScriptedFiles()

    async def work(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS[:2])
        store.copies[KEYS[0]].buffer[0] ^= 1
        tier.stored(KEYS[:2])
        await tier.settled()
        assert tier.usage().dropped_count == 1 and list(files.held) == [KEYS[1]]

    run(work, files)


def test_a_file_that_was_written_again_while_the_old_one_was_read_stays() -> None:
    files = ScriptedFiles({KEYS[0]: COPIES[KEYS[0]]})

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.gate.clear()
        reading = asyncio.ensure_future(recalled(tier, KEYS[0]))
        await asyncio.sleep(0)
        tier._index.add(DiskEntry(KEYS[0], BlockKey(bytes(32)), TENANT, SIZE))  # as after an eviction
        files.held[KEYS[0]] = b"seen by the old read only"
        files.gate.set()
        assert await reading == {}
        files.held[KEYS[0]] = COPIES[KEYS[0]]
        assert await recalled(tier, KEYS[0]) == {KEYS[0]: COPIES[KEYS[0]]}

    run(work, files)


def test_requests_go_in_between_while_many_files_are_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "ADOPTED_AT_ONCE", 1)

    async def main() -> None:
        files = ScriptedFiles(dict(COPIES))
        tier = BlockDisk(files, 5 * room_bytes(SIZE), DictStore(), time.monotonic)
        seen: set[tuple[str, int]] = set()
        async with asyncio.timeout(DEADLINE_S):
            while tier.usage().state == "opening":
                seen.add(("opening", tier.usage().block_count))
                await asyncio.sleep(0)
        assert {("opening", count) for count in range(len(KEYS) + 1)} <= seen
        await eventually(lambda: len(files.held) == 5)
        assert tier.usage().evicted_count == len(KEYS) - 5
        await tier.close()

    asyncio.run(main())


def test_too_many_reads_at_once_are_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "READS_MAX", 2)
    files = ScriptedFiles(dict(COPIES))

    async def work(tier: BlockDisk, store: DictStore) -> None:
        files.gate.clear()
        both = asyncio.ensure_future(recalled(tier, *KEYS[:5]))
        await asyncio.sleep(0)
        assert tier.usage().busy_count == 3
        files.gate.set()
        assert set(await both) == set(KEYS[:2])

    run(work, files)


def test_what_is_evicted_above_before_its_turn_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "WAITING_MAX", 4)
    files = ScriptedFiles()

    async def work(tier: BlockDisk, store: DictStore) -> None:
        put(store, *KEYS)
        files.gate.clear()
        tier.stored(KEYS[:1])
        tier.stored(KEYS[1:])
        assert tier.usage().waiting_count == 5 and tier.usage().dropped_count == 3
        del store.copies[KEYS[5]]
        files.gate.set()
        await tier.settled()
        assert sorted(files.held) == sorted([KEYS[0], KEYS[4], KEYS[6], KEYS[7]])
        assert tier.usage().dropped_count == 4
        tier.stored(KEYS[:1])  # is there already
        await tier.settled()
        assert tier.usage().written_count == 4

    run(work, files)


def ending(files: ScriptedFiles, gate_opens: bool) -> DictStore:
    """Publish everything to a disk that does not move, and end."""

    async def main() -> DictStore:
        store = DictStore()
        tier = BlockDisk(files, 64 << 20, store, time.monotonic)
        await eventually(lambda: tier.usage().state == "on")
        put(store, *KEYS)
        files.gate.clear()
        tier.stored(KEYS)
        closing = asyncio.ensure_future(tier.close())
        await asyncio.sleep(0)
        if gate_opens:
            files.gate.set()
        await closing
        assert all(copy.leases == 0 for copy in store.copies.values())
        return store

    return asyncio.run(main())


def test_an_orderly_end_writes_what_waits() -> None:
    files = ScriptedFiles()
    ending(files, gate_opens=True)
    assert files.held == COPIES


def test_the_end_does_not_wait_for_a_stuck_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FLUSH_S", 0.02)
    monkeypatch.setattr(disk, "CLOSE_TIMEOUT_S", 0.02)
    files = ScriptedFiles()
    ending(files, gate_opens=False)
    assert not set(files.held) - {KEYS[0]}


def test_a_directory_that_cannot_be_read_switches_it_off(caplog: pytest.LogCaptureFixture) -> None:
    class Unreadable(ScriptedFiles):
        def scan(self) -> Found:
            raise OSError(errno.EIO, "scripted")

    async def work(tier: BlockDisk, store: DictStore) -> None:
        assert tier.usage().state == "off"

    run(work, Unreadable())
    assert "cannot be read" in caplog.text


def test_a_disk_that_does_not_answer_when_it_is_opened_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(disk, "OPEN_TIMEOUT_S", 0.02)
    monkeypatch.setattr(disk, "BlockFiles", lambda directory, fsync: gate.wait(DEADLINE_S))

    async def open_it() -> None:
        async with block_disk(tmp_path, 1 << 20, DictStore(), fsync=False, clock=time.monotonic):
            pytest.fail("it was opened")

    try:
        with pytest.raises(Unavailable, match="did not answer"):
            asyncio.run(open_it())
    finally:
        gate.set()
