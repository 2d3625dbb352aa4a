"""Records decay on a shard's disk, and nobody reads them: they are whole again all the same."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvcomm.client import Client
from kvcomm.embedded import Embedded
from kvcomm.errors import OutcomeUnknown, Unavailable
from kvcomm.instance import Instance
from tests.system.conftest import CONFIG, Cluster, eventually, metric
from tests.system.test_repair import has, some_shard

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DAMAGED, STRONG_DAMAGED = (
    f'kvcomm_scrub_problems_total{{database="{database}",problem="damaged"}}'
    for database in ("records", "strong")
)
PASSES, STRONG_PASSES = (
    f'kvcomm_scrub_passes_total{{database="{database}"}}' for database in ("records", "strong")
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = tmp_path_factory.mktemp("config") / "kvcomm.yaml"
    config.write_text(CONFIG + "  scrub_interval: 500ms\n")
    name = f"t{os.getpid()}-{time.monotonic_ns() % 1_000_000}"
    embedded = Embedded.start(name, config, time.monotonic() + 60)
    try:
        yield Cluster(Instance.open(name), config)
    finally:
        embedded.stop()


def flip_bits(database: Path, values: dict[str, bytes]) -> None:
    """In every copy of the values that the file has, also in pages that are not in use any more."""
    with database.open("r+b") as file:
        content = file.read()
        for value in values.values():
            at = content.find(value)
            assert at >= 0, "it is not on the disk"
            while at >= 0:
                file.seek(at)
                file.write(bytes([value[0] ^ 1]))
                at = content.find(value, at + 1)


def committed(directory: Path) -> bytes:
    """All values that the database keeps; the file has those of a transaction that is under way, too."""
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=8) as environment:
        records = environment.open_db(b"records", create=False)
        with environment.begin(db=records) as transaction:
            return b"".join(value for _, value in transaction.cursor())


def test_what_decays_on_a_disk_is_mended_without_anybody_reading_it(cluster: Cluster, kv: Client) -> None:
    values = {f"key-{number}": os.urandom(48) for number in range(20)}
    kv.state("repair").put_many(values)
    name = some_shard(cluster)
    eventually(lambda: has(cluster, cluster.node(name), values))
    eventually(lambda: metric(cluster.node(name), PASSES) >= 1)

    before = cluster.kill(name, signal.SIGSTOP)
    flip_bits(cluster.instance.directory / "data" / name / "data.mdb", values)
    os.kill(before.pid, signal.SIGKILL)
    after = cluster.restarted(before)

    eventually(lambda: metric(after, DAMAGED) >= len(values))
    eventually(lambda: metric(after, "kvcomm_damaged_records") == 0)
    assert has(cluster, after, values), "from its own store, without asking others"
    found, passes = metric(after, DAMAGED), metric(after, PASSES)
    eventually(lambda: metric(after, PASSES) >= passes + 2)
    assert metric(after, DAMAGED) == found, "later passes find nothing"


def test_strong_records_that_decay_are_healed_without_anybody_reading_them(
    cluster: Cluster, kv: Client
) -> None:
    values = {f"key-{number}": os.urandom(48) for number in range(5)}
    strong = kv.strong("scrub")

    def put(key: str) -> bool:
        try:
            strong.put(key, values[key])
        except (Unavailable, OutcomeUnknown):  # the shards have just started
            return False
        return True

    for key in values:
        eventually(lambda key=key: put(key))  # type: ignore[misc]
    name = some_shard(cluster)
    database = cluster.instance.directory / "data" / name / "strong" / "data.mdb"
    eventually(lambda: all(value in committed(database.parent) for value in values.values()))
    before = cluster.kill(name, signal.SIGSTOP)
    flip_bits(database, values)
    os.kill(before.pid, signal.SIGKILL)
    after = cluster.restarted(before)

    eventually(lambda: metric(after, STRONG_DAMAGED) >= len(values))

    def whole() -> bool:
        """Passes find nothing any more."""
        found, passes = metric(after, STRONG_DAMAGED), metric(after, STRONG_PASSES)
        eventually(lambda: metric(after, STRONG_PASSES) >= passes + 2)
        return metric(after, STRONG_DAMAGED) == found

    eventually(whole)
    assert all(value in database.read_bytes() for value in values.values())
    assert {key: strong.read(key).value for key in values} == values
