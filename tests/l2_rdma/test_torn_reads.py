"""Several processes, one tiny region whose slots are reused all the time: not one wrong byte.

And the proof that the test can see them: with pins ignored, or with verification switched off, it does.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.l2_rdma.workers", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(directory, *, readers, reads, seconds, pins="respect-pins", mode="verify"):
    """(what the owner counted, what each reader counted)"""
    with ExitStack() as stack:

        def process(*arguments):
            started = start(*arguments)
            stack.callback(started.communicate)
            stack.callback(started.kill)
            return started

        owner = process("owner", directory, readers, pins)
        ready = json.loads(owner.stdout.readline())
        reading = [
            process("reader", ready["path"], *words, reads, seconds, mode) for words in ready["ranges"]
        ]
        counts = [json.loads(each.communicate(timeout=LIMIT_S)[0]) for each in reading]
        owned = json.loads(owner.communicate("stop", timeout=LIMIT_S)[0])
        assert owner.returncode == 0
        assert [each.returncode for each in reading] == [0] * readers
        return owned, counts


def test_no_wrong_byte_in_100_000_reads(tmp_path):
    owned, counts = run(tmp_path, readers=3, reads=34_000, seconds=50)

    assert sum(each["reads"] for each in counts) >= 100_000
    assert sum(each["wrong"] for each in counts) == 0
    assert sum(each["corrupt"] for each in counts) == 0, "no stable slot was ever found damaged"
    assert sum(each["hits"] for each in counts) > 10_000, "the readers found blocks"
    assert sum(each["retries"] for each in counts) > 0, "slots moved between index and slot"
    assert owned["evicted"] > 1_000, "slots were reused under the readers"


def test_the_test_sees_wrong_bytes_when_the_owner_ignores_pins(tmp_path):
    _, counts = run(tmp_path, readers=2, reads=1_000_000, seconds=4, pins="ignore-pins")

    assert sum(each["wrong"] for each in counts) > 0


def test_the_test_sees_wrong_bytes_when_nothing_is_verified(tmp_path):
    _, counts = run(tmp_path, readers=2, reads=1_000_000, seconds=10, mode="trust")

    assert sum(each["wrong"] for each in counts) > 0
