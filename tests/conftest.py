"""Fixtures for every test: no leaks, no running cluster touched, no unrepeatable hypothesis."""

import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import leaks
from tests.rdma.devices import devices

LEAK_GRACE_S = 5.0

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """Thousands of collected tests and what they import live to the end: a collection that looked at them all
    would stop every thread of this process for a good part of a second, again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # In the guest it would be a failure to have none, not a reason to skip.
    if item.get_closest_marker("rdma") and not devices() and "KVCOMM_SOFTROCE" not in os.environ:
        pytest.skip("needs an RDMA device; make test-rdma runs it in a guest")


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails the run, with their names, if processes or shared memory of it outlive the last test."""
    run_id = uuid.uuid4().hex
    outer = os.environ.get(leaks.MARK)
    os.environ[leaks.MARK] = run_id
    before = leaks.shared_memory()
    yield
    left = leaks.until_empty(lambda: leaks.left_behind(run_id, before), LEAK_GRACE_S)
    if outer is None:
        del os.environ[leaks.MARK]
    else:
        os.environ[leaks.MARK] = outer
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def _away_from_running_clusters(_nothing_left_behind: None) -> Iterator[None]:
    """No test finds the instance directory of a cluster that runs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        directory = _short_directory()
        patch.setenv("KVCOMM_RUNTIME_DIR", str(directory))
        yield
        shutil.rmtree(directory)


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fresh, empty instance directory (mode 0700), named by `KVCOMM_RUNTIME_DIR` during this test."""
    directory = _short_directory()
    monkeypatch.setenv("KVCOMM_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory)


def _short_directory() -> Path:
    # Not tmp_path: a unix socket's path has 107 bytes, and that one spells the test's whole name.
    return Path(tempfile.mkdtemp(prefix="kvc-"))
