"""A GPU pool, its writers and readers, each a process of its own: not one wrong byte, and no hang when one
dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcomm.errors import PayloadError
from l2_rdma.transports.cuda.attached import AttachedPool
from l2_rdma.transports.cuda.transport import CudaTransport
from tests.l2_rdma.pools import pool_thread
from tests.l2_rdma.regions import key_of
from tests.l2_rdma.transports.cuda.host_gpu import HostGpu
from tests.l2_rdma.transports.cuda.workers import PAYLOAD_BYTES, POOL, Mirror, expected, header
from tests.peers import IDENTITY, soon

ROOT = Path(__file__).parents[4]
LIMIT_S = 90

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def directory():
    """Short: a socket's path and a handle have limits."""
    made = Path(tempfile.mkdtemp(prefix="kvc-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(
    params=[
        "host",
        pytest.param("cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda:1", marks=pytest.mark.gpu, id="another cuda"),
    ]
)
def pool_gpu(request):
    """Where the pool's memory is."""
    if request.param == "cuda:0":
        request.getfixturevalue("cuda_gpu")
    if request.param == "cuda:1":
        request.getfixturevalue("second_gpu")
    return request.param


@pytest.fixture
def name(pool_gpu):
    """The GPU of its clients."""
    return "host" if pool_gpu == "host" else "cuda:0"


@pytest.fixture
def process(directory):
    """Starts workers, and ends them whatever happens."""
    with ExitStack() as stack:

        def start(*arguments):
            started = subprocess.Popen(
                [sys.executable, "-m", "tests.l2_rdma.transports.cuda.workers", *map(str, arguments)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(started.communicate)
            stack.callback(started.kill)
            return started

        yield start


def said(process):
    return json.loads(process.stdout.readline())


def ended(process, text=None):
    return json.loads(process.communicate(text, timeout=LIMIT_S)[0].splitlines()[-1])


def test_blocks_travel_from_one_process_to_another(process, directory, name, pool_gpu):
    pool = process("pool", directory, pool_gpu, "usual")
    ready = said(pool)
    writer = process("write", ready["address"], name, directory)
    reader = process("read", ready["address"], name, directory, 3000, 60, "pin")
    assert said(reader) == {"ready": True}
    counts = ended(reader)
    stored = ended(writer, "stop")["stored"]

    assert "GPU's memory" in ready["refused"]["shm"]
    assert stored == 24, "all blocks fit, so each is stored once"
    assert counts["wrong"] == counts["corrupt"] == 0
    assert counts["hits"] == 3000
    once = counts["verified"] - counts["unpinned"]
    assert 0 < once <= 24, "once a process and generation; a copy that found no pin each time"


def test_no_wrong_byte_while_slots_are_reused(process, directory, name, pool_gpu):
    pool = process("pool", directory, pool_gpu, "small")
    address = said(pool)["address"]
    writers = [process("write", address, name, directory)]
    modes = ["pin", "copy", "remote"]
    wanted, seconds = (2000, 20) if name == "host" else (20_000, 30)
    readers = [process("read", address, name, directory, wanted, seconds, mode) for mode in modes]
    counts = [ended(reader) for reader in readers]
    stored = sum(ended(writer, "stop")["stored"] for writer in writers)

    assert [each["wrong"] for each in counts] == [0, 0, 0]
    assert [each["corrupt"] for each in counts] == [0, 0, 0]
    assert all(each["hits"] > 50 for each in counts), counts
    assert stored > 100, "slots were reused under the readers"


def test_the_test_sees_wrong_bytes_when_nothing_is_verified(process, directory):
    pool = process("pool", directory, "host", "small")
    address = said(pool)["address"]
    writer = process("write", address, "host", directory)
    counts = ended(process("read", address, "host", directory, 1_000_000, 60, "trust"))
    ended(writer, "stop")

    assert counts["wrong"] > 0


def test_readers_notice_a_killed_pool_and_their_views_stay_what_they_were(process, directory, name, pool_gpu):
    pool = process("pool", directory, pool_gpu, "usual")
    address = said(pool)["address"]
    writer = process("write", address, name, directory)
    reader = process("read", address, name, directory, 10_000_000, 60, "pin")
    assert said(reader) == {"ready": True}
    assert said(writer) == {"begun": True}
    assert said(reader) == {"held": True}
    pool.send_signal(signal.SIGKILL)
    pool.wait(LIMIT_S)
    counts = ended(reader)

    assert "unavailable" in ended(writer)["failed"]
    assert counts["alive"] is False
    assert counts["kept"] > 0, "views were held over the death of the pool"
    assert counts["wrong"] == counts["corrupt"] == 0


def test_a_killed_writer_leaves_its_key_writable(process, directory, name, pool_gpu):
    pool = process("pool", directory, pool_gpu, "usual")
    address = said(pool)["address"]
    writer = process("write", address, name, directory)
    reader = process("read", address, name, directory, 200, 20, "pin")
    assert said(reader) == {"ready": True}
    writer.send_signal(signal.SIGKILL)
    writer.wait(LIMIT_S)
    second = process("write", address, name, directory)
    counts = ended(reader)

    assert ended(second, "stop")["stored"] >= 0
    assert counts["wrong"] == 0
    assert counts["alive"] is True


def test_put_and_fetch_in_one_process(directory, monkeypatch):
    gpu = HostGpu(directory)
    with pool_thread(directory, transports=("cuda",), gpu=gpu, **POOL) as pool:
        transport = CudaTransport(HostGpu(directory))
        attached = AttachedPool.attach(pool.address, IDENTITY, transport, soon())
        mirror = Mirror(transport.gpu)
        blocks = [(header(number), mirror.up(expected(number))) for number in (1,)]
        too_long = Mirror(transport.gpu, 2 * PAYLOAD_BYTES).device

        with pytest.raises(PayloadError):
            attached.put([*blocks, (header(2), too_long)], soon())
        assert attached.put(blocks, soon()) == ["stored"]
        assert attached.put(blocks, soon()) == ["present"]
        assert attached.reader.lookup([key_of(1), key_of(2)]) == [True, False]
        [found] = attached.fetch([key_of(1)], [mirror.up(bytes(len(expected(1))))], soon())
        assert found is not None
        assert found.key == key_of(1)
        assert bytes(mirror.down()) == expected(1)

        alive, call = [], attached._connection.call

        def read_beside(message, deadline):
            attached._alive_until = 0.0
            alive.append(attached.alive())
            return call(message, deadline=deadline)

        with monkeypatch.context() as patched:
            patched.setattr(attached._connection, "alive", lambda: False)  # there is something to be read
            patched.setattr(attached._connection, "call", read_beside)
            assert attached.put(blocks, soon()) == ["present"]
        assert alive == [True], "the answer to a put is not the end of the pool"
        attached.close()
        assert attached.view([key_of(1)]) == [None]
