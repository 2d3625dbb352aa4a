import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcomm.block import Incarnation
from kvcomm.errors import ConfigError, Corrupt, Refused, Unavailable
from l2_rdma.layout import STATE_CLOSING, STATE_WORD, plan_layout
from l2_rdma.region import Region, reclaim_stale, stale_regions
from tests.l2_rdma.regions import OTHER_TENANT, TENANT, layout_of

ROOT = Path(__file__).parents[2]

OWNER_SCRIPT = """
import sys
from pathlib import Path
from typing import Any
from kvcomm.block import Incarnation
from l2_rdma.region import Region
from tests.l2_rdma.regions import TENANT, layout_of
region = Region.create(
    Path(sys.argv[1]), instance="tests", node="pool-0", tenant=TENANT, incarnation=Incarnation(1),
    layout=layout_of()
)
print(region.path, flush=True)
sys.stdin.read()
"""


def make_region(directory, **changes):
    facts: dict[str, Any] = {"instance": "tests", "node": "pool-0", "tenant": TENANT}
    return Region.create(directory, incarnation=Incarnation(5), layout=layout_of(), **(facts | changes))


@pytest.fixture
def region(tmp_path):
    made = make_region(tmp_path)
    yield made
    made.close()


def test_a_region_is_a_private_file_named_after_its_owner(region, tmp_path):
    status = region.path.stat()

    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == region.header.layout.region_bytes
    assert region.path.parent == tmp_path
    assert region.path.name.startswith("kvcomm-tests-pool_0-")


def test_a_process_without_room_to_map_a_region_goes_without(region, monkeypatch):
    before = os.listdir("/proc/self/fd")

    def refuse(*args):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patched:
        patched.setattr("mmap.mmap", refuse)
        with pytest.raises(Unavailable, match="cannot be mapped"):
            Region.attach(region.path, TENANT)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_names_cannot_leave_the_directory(tmp_path):
    region = make_region(tmp_path, instance="../../x", node="a/b")

    assert region.path.parent == tmp_path
    region.close()


def test_a_client_sees_what_the_owner_writes_and_the_other_way_round(region):
    client = Region.attach(region.path, TENANT)
    assert client.header == region.header

    region.memory[-1] = 7
    client.memory[-2] = 8

    assert client.memory[-1] == 7
    assert region.memory[-2] == 8
    assert client.open


def test_memory_arrives_in_slices_before_it_is_used(region):
    layout = region.header.layout
    assert region.backed_bytes == layout.slots_offset

    reached = [region.back(4096) for _ in range(3)]

    assert reached == [layout.slots_offset + 4096, layout.slots_end, layout.slots_end]
    assert region.path.stat().st_blocks * 512 >= layout.slots_end


def test_populating_page_tables_changes_nothing(region):
    region.back(1 << 20)
    client = Region.attach(region.path, TENANT)
    region.memory[region.header.layout.slots_offset] = 9
    client.populate(0, region.header.layout.slots_end)  # False on an old kernel: nothing to check then

    assert client.memory[region.header.layout.slots_offset] == 9


def test_closing_tells_clients_and_leaves_their_mapping_alone(region):
    client = Region.attach(region.path, TENANT)
    region.memory[-1] = 7
    region.close()
    region.close()

    assert not region.path.exists()
    assert client.words[STATE_WORD] == STATE_CLOSING
    assert not client.open
    assert client.memory[-1] == 7
    with pytest.raises(Unavailable):
        Region.attach(region.path, TENANT)


def test_a_forgotten_region_is_removed_with_its_object(tmp_path):
    region = make_region(tmp_path)
    path = region.path
    del region

    assert not path.exists()


def test_another_tenants_region_is_refused(region):
    with pytest.raises(Refused, match="another tenant"):
        Region.attach(region.path, OTHER_TENANT)


def test_a_region_that_others_may_open_is_refused(region):
    region.path.chmod(0o644)
    with pytest.raises(Refused, match="private"):
        Region.attach(region.path, TENANT)


def test_links_are_not_followed(region, tmp_path):
    link = tmp_path / "kvcomm-link"
    link.symlink_to(region.path)

    with pytest.raises(Unavailable):
        Region.attach(link, TENANT)


def test_garbage_is_refused(region, tmp_path):
    for name, content in {
        "empty": b"",
        "zeros": bytes(1 << 16),
        "truncated": bytes(region.memory)[:-4096],
        "longer": bytes(region.memory) + bytes(4096),
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(Corrupt):
            Region.attach(path, TENANT)


def test_too_little_shared_memory_names_the_key_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"cache\.l2_size.*cache\.l3_size"):
        Region.create(
            tmp_path,
            instance="tests",
            node="pool-0",
            tenant=TENANT,
            incarnation=Incarnation(1),
            layout=plan_layout(1 << 55, slab_bytes=1 << 40, index_entries=64),
        )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="nowhere"):
        make_region(tmp_path / "nowhere")


def test_hazard_words_are_locked_by_one_client(region):
    client, other = Region.attach(region.path, TENANT), Region.attach(region.path, TENANT)
    assert not region.hazards_locked(0, 8)

    assert client.lock_hazards(0, 8)

    assert region.hazards_locked(0, 8)
    assert not region.hazards_locked(8, 8)
    assert not other.lock_hazards(4, 8)
    del client
    assert not region.hazards_locked(0, 8)


def test_only_abandoned_regions_are_reclaimed(region, tmp_path):
    stranger = tmp_path / "kvcomm-not-a-region"
    stranger.write_bytes(b"something else")
    stranger.chmod(0o600)
    (tmp_path / "kvcomm-directory").mkdir()

    assert stale_regions(tmp_path) == reclaim_stale(tmp_path) == []
    assert region.path.exists()
    assert stranger.exists()


@pytest.mark.slow
@pytest.mark.processes
def test_the_region_of_a_killed_owner_is_found_and_removed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER_SCRIPT, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        client = Region.attach(path, TENANT)
        assert reclaim_stale(tmp_path) == []

        owner.send_signal(signal.SIGKILL)
        owner.wait(10)

        assert stale_regions(tmp_path) == [str(path)]
        assert reclaim_stale(tmp_path) == [str(path)]
        assert not path.exists()
        assert client.memory[0] == ord("K"), "a mapping outlives the file"
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.slow
@pytest.mark.processes
def test_an_owner_that_ends_leaves_nothing(tmp_path):
    owner = subprocess.run(
        [sys.executable, "-c", OWNER_SCRIPT, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input="",
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert owner.stdout.strip()
    assert list(tmp_path.iterdir()) == []


_HUGE = """
from pathlib import Path
from kvcomm.block import Incarnation
from l2_rdma.layout import plan_layout
from l2_rdma.region import Region
from tests.l2_rdma.regions import TENANT

region = Region.create(
    Path("/mnt"), instance="i", node="n", tenant=TENANT, incarnation=Incarnation(1),
    layout=plan_layout(64 << 20),
)
region.back(1 << 30)
region.populate(0, region.header.layout.slots_end)
mapped, ours = 0, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    ours = str(region.path) in line or (ours and "-" not in line.split()[0])
    if ours and line.startswith("ShmemPmdMapped"):
        mapped += int(line.split()[1])
region.close()
print(mapped)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_region_takes_the_huge_pages_that_its_directory_gives():
    mount = "mount -t tmpfs -o huge=within_size,size=128m tmpfs /mnt"
    there = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if there.returncode:
        pytest.skip(f"no file system with huge pages can be mounted here: {there.stderr.strip()}")
    run = [sys.executable, "-c", _HUGE]
    said = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", *run],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert int(said.stdout) >= 2 << 10, "KiB; all of it unless memory is in pieces"
