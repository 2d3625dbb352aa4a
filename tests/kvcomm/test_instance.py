"""Instances on one host: who may see them, who is alive, and what a damaged file does."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcomm import instance as module
from kvcomm.errors import ConfigError, Conflict, KVCommError, Refused, Unavailable
from kvcomm.instance import (
    Instance,
    InstanceExists,
    InstanceMissing,
    NodeRecord,
    process_start_time,
    runtime_dir,
)
from kvcomm.wire.messages import RingMap, RingNode


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run"
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which waits until it is ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def record(node: str = "shard-0", pid: int | None = None, **changes: object) -> NodeRecord:
    pid = os.getpid() if pid is None else pid
    start_time = process_start_time(pid)
    assert start_time is not None
    plain = NodeRecord(
        node=node,
        role="shard",
        pid=pid,
        pid_start_time=start_time,
        addresses=["unix:///run/x.sock", "tcp://127.0.0.1:4711"],
        control="127.0.0.1:4712",
        metrics="127.0.0.1:4713",
        incarnation=2**64 - 1,
        region="/dev/shm/kvcomm-x",
    )
    return msgspec.structs.replace(plain, **changes)


def ring(epoch: int, shards: int = 1) -> RingMap:
    nodes = [
        RingNode(f"shard-{index}", f"tcp://127.0.0.1:{index + 1}", "", "127.0.0.1:1", "rack-0", 1)
        for index in range(shards)
    ]
    return RingMap(epoch, 1, 1, 1, 1, nodes, [])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# -- where instances are -------------------------------------------------------------------------------------


def test_the_runtime_directory(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_dir() == root
    assert mode(root) == 0o700
    monkeypatch.delenv("KVCOMM_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    assert runtime_dir() == tmp_path / "session" / "kvcomm"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert runtime_dir() == Path(f"/tmp/kvcomm-{os.getuid()}")


def test_a_runtime_directory_that_others_could_enter_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(mode=0o755)
    with pytest.raises(Refused, match="this user alone"):
        runtime_dir()
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(Refused, match="this user alone"):
        runtime_dir()
    (tmp_path / "file").touch(mode=0o600)
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(Refused, match="cannot be made"):
        runtime_dir()


# -- creating, opening, removing -----------------------------------------------------------------------------


def test_a_created_instance_is_private_and_has_a_secret(root: Path) -> None:
    one = Instance.create("one")
    assert one.directory == root / "one"
    assert mode(one.directory) == mode(one.directory / "nodes") == 0o700
    assert mode(one.directory / "secret") == 0o600
    assert len(one.secret()) == 32
    token = one.credentials().token("team")
    assert Instance.open("one").credentials().tenant_of(token) == "team"


def test_several_instances_live_side_by_side() -> None:
    created = {Instance.create().name, Instance.create("two").name, Instance.create().name}
    assert len(created) == 3
    assert [each.name for each in Instance.list()] == sorted(created)
    assert len({each.secret() for each in Instance.list()}) == 3


def test_a_name_belongs_to_one_creator(root: Path) -> None:
    first = Instance.create("one")
    secret = first.secret()
    with pytest.raises(InstanceExists, match="choose another name"):
        Instance.create("one")
    assert first.secret() == secret
    assert [entry.name for entry in root.iterdir()] == ["one"], "the loser leaves nothing behind"


def test_of_many_creators_at_once_one_wins() -> None:
    outcomes: list[str] = []

    def create() -> None:
        try:
            Instance.create("race")
            outcomes.append("won")
        except InstanceExists:
            outcomes.append("lost")

    threads = [threading.Thread(target=create) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["lost"] * 15 + ["won"]


@pytest.mark.parametrize("name", ["", "A", "a_b", "a/b", "..", "a.b", "x" * 41, "é", "a\n"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="1 to 40 of"):
        Instance.create(name)
    with pytest.raises(ConfigError, match="1 to 40 of"):
        Instance.open(name)


def test_opening_what_is_not_there_names_what_is() -> None:
    with pytest.raises(InstanceMissing, match="there are: none"):
        Instance.open("absent")
    Instance.create("here")
    with pytest.raises(InstanceMissing, match="there are: here"):
        Instance.open("absent")


def test_a_running_instance_is_not_removed(root: Path) -> None:
    one = Instance.create("one")
    one.register(record())
    with pytest.raises(Refused, match=r"still running: shard-0 \(process \d+\)"):
        one.remove()
    one.unregister(record())
    one.remove()
    assert list(root.iterdir()) == []
    one.remove()
    assert one.nodes() == []
    assert one.ring() is None
    with pytest.raises(InstanceMissing):
        one.register(record())
    with pytest.raises(InstanceMissing):
        one.secret()


def test_a_secret_that_others_can_read_is_refused() -> None:
    one = Instance.create("one")
    (one.directory / "secret").chmod(0o640)
    with pytest.raises(Refused, match="can be read by others"):
        one.secret()
    (one.directory / "secret").chmod(0o600)
    (one.directory / "secret").write_bytes(b"short")
    with pytest.raises(Refused, match="not 32 bytes"):
        one.secret()


def test_socket_paths_fit_a_unix_socket(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Instance.create("one")
    assert one.socket_path("shard-0") == root / "one" / "shard-0.sock"
    deep = tmp_path / ("x" * 100)
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(deep))
    with pytest.raises(ConfigError, match="too long for a unix socket"):
        Instance.create("one").socket_path("shard-0")


# -- nodes ---------------------------------------------------------------------------------------------------


def test_registered_nodes_are_found() -> None:
    one = Instance.create("one")
    second, first = record("shard-1"), record("shard-0")
    one.register(second)
    one.register(first)
    assert Instance.open("one").nodes() == [first, second]
    one.register(record("shard-0", incarnation=7))
    assert one.nodes()[0].incarnation == 7
    one.unregister(first)  # replaced meanwhile: not ours any more
    assert len(one.nodes()) == 2


@pytest.mark.processes
def test_a_dead_node_is_forgotten(child: subprocess.Popen[bytes]) -> None:
    one = Instance.create("one")
    one.register(record("shard-0", child.pid))
    assert [node.pid for node in one.nodes()] == [child.pid]
    child.send_signal(signal.SIGSTOP)  # paused is not dead
    assert [node.pid for node in one.nodes()] == [child.pid]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not reaped: a zombie
    assert one.nodes() == []
    assert list((one.directory / "nodes").iterdir()) == []
    one.remove()


def test_a_reused_pid_revives_nobody() -> None:
    one = Instance.create("one")
    path = one.directory / "nodes" / "shard-0"
    earlier = record(pid_start_time=record().pid_start_time - 1)
    module._write_checked(path, msgspec.json.encode(earlier))
    assert one.nodes() == []
    assert not path.exists()


@pytest.mark.processes
def test_the_name_of_a_living_node_is_not_given_away(child: subprocess.Popen[bytes]) -> None:
    one = Instance.create("one")
    one.register(record("shard-0", child.pid))
    with pytest.raises(Conflict, match=f"runs already: process {child.pid}"):
        one.register(record("shard-0"))
    child.kill()
    child.wait(10)
    one.register(record("shard-0"))
    assert [node.pid for node in one.nodes()] == [os.getpid()]


def test_process_start_time() -> None:
    mine = process_start_time(os.getpid())
    assert mine is not None
    assert mine == process_start_time(os.getpid())
    assert process_start_time(2**22 + 1) is None


@pytest.mark.processes
def test_a_process_whose_name_looks_like_the_format(tmp_path: Path) -> None:
    program = tmp_path / "a) Z (b"
    program.symlink_to(sys.executable)
    with subprocess.Popen([str(program), "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            start_time = process_start_time(process.pid)
            assert start_time is not None
            assert start_time >= (process_start_time(os.getpid()) or 0)
        finally:
            process.kill()


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["", "garbage", "flipped", "cut", "renamed", "huge"])
def test_a_damaged_record_is_ignored_and_told(damage: str) -> None:
    one = Instance.create("one")
    one.register(record("shard-0"))
    one.register(record("shard-1"))
    path = one.directory / "nodes" / "shard-1"
    content = path.read_bytes()
    path.write_bytes(
        {
            "": b"",
            "garbage": b"\x00\xff" * 50,
            "flipped": content.replace(b"4711", b"4710"),
            "cut": content[:-9],
            "renamed": (one.directory / "nodes" / "shard-0").read_bytes(),
            "huge": content * 1000,
        }[damage]
    )
    survey = one.survey()
    assert [node.node for node in survey.nodes] == ["shard-0"]
    (warning,) = survey.damaged
    assert warning.startswith(f"{path} is ignored: ")
    one.register(record("shard-1"))  # the node itself mends it
    assert one.survey().damaged == []


def test_a_record_of_another_shape_is_ignored() -> None:
    one = Instance.create("one")
    module._write_checked(one.directory / "nodes" / "shard-0", b'{"node": "shard-0"}')
    (warning,) = one.survey().damaged
    assert "missing required field" in warning


def test_a_damaged_ring_is_ignored_and_may_be_replaced() -> None:
    one = Instance.create("one")
    one.write_ring(ring(5))
    path = one.directory / "ring"
    path.write_bytes(path.read_bytes().replace(b"rack-0", b"rack-1"))
    assert one.ring() is None
    assert one.survey().damaged == [f"{path} is ignored: its checksum does not match"]
    one.write_ring(ring(4))
    assert one.ring() == ring(4)


def test_drafts_of_a_writer_that_died_are_not_read() -> None:
    one = Instance.create("one")
    (one.directory / "nodes" / ".shard-0.1234abcd").write_bytes(b"half a rec")
    assert one.survey() == module.Survey([], None, [])


# -- ring ----------------------------------------------------------------------------------------------------


def test_the_ring_only_goes_forward() -> None:
    one = Instance.create("one")
    assert one.ring() is None
    one.write_ring(ring(1))
    one.write_ring(ring(1))
    one.write_ring(ring(3, shards=2))
    assert one.ring() == ring(3, shards=2)
    for late in (ring(2), ring(3)):
        with pytest.raises(Conflict, match="ring epoch 3 stands"):
            one.write_ring(late)
    assert one.ring() == ring(3, shards=2)


def test_readers_never_see_half_a_ring() -> None:
    one = Instance.create("one")
    one.write_ring(ring(1, shards=1))
    seen: list[RingMap | None] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(one.ring())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for epoch in range(2, 60):
            one.write_ring(ring(epoch, shards=epoch))
    finally:
        done.set()
        reader.join(20)
    assert seen
    epochs = [each.epoch for each in seen if each is not None]
    assert len(epochs) == len(seen)
    assert epochs == sorted(epochs)
    assert all(len(each.shards) == each.epoch for each in seen if each is not None)


def test_a_lock_that_is_never_released_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Instance.create("one")
    one.register(record())
    monkeypatch.setattr(module, "_LOCK_TIMEOUT_S", 0.02)
    with one._locked():
        with pytest.raises(Unavailable, match="is its holder paused"):
            one.write_ring(ring(1))
        assert one.nodes(), "reading needs no lock"
    one.write_ring(ring(1))


def test_the_errors_are_operating_failures() -> None:
    assert issubclass(InstanceExists, KVCommError)
    assert issubclass(InstanceMissing, KVCommError)


def test_the_secret_lasts_as_long_as_the_records(runtime_dir: Path, tmp_path: Path) -> None:
    storage = tmp_path / "records"
    first = Instance.create("first")
    first.keep_secret_in(storage)
    secret = first.secret()
    assert stat.S_IMODE((storage / "secret").stat().st_mode) == 0o600
    first.keep_secret_in(storage)
    first.remove()  # or the host was started again: runtime directories do not survive that
    second = Instance.create("second")
    assert second.secret() != secret
    second.keep_secret_in(storage)
    assert second.secret() == secret


def test_a_storage_directory_that_cannot_be_ours_is_refused(runtime_dir: Path, tmp_path: Path) -> None:
    storage = tmp_path / "records"
    Instance.create("first").keep_secret_in(storage)
    other = Instance.create("other")
    other.write_ring(RingMap(1, 1, 1, 1, 1, [], []))
    with pytest.raises(ConfigError, match="another instance"):
        other.keep_secret_in(storage)
    kept = storage / "secret"
    kept.write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        other.keep_secret_in(storage)
    kept.chmod(0o644)
    with pytest.raises(Refused, match="others"):
        other.keep_secret_in(storage)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"storage\.directory"):
        other.keep_secret_in(tmp_path / "file")
