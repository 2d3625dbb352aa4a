"""deploy/softroce as far as it can be looked at without a guest; tests/rdma looks at the inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import ROOT

SOFTROCE = ROOT / "deploy/softroce"
SCRIPTS = (
    "setup",
    "run",
    "rack",
    "uml/setup",
    "uml/boot",
    "uml/init",
    "qemu/setup",
    "qemu/boot",
    "qemu/init",
)


def _call(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SOFTROCE / script), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_executable_and_parses(script: str) -> None:
    path = SOFTROCE / script
    assert path.stat().st_mode & 0o111
    shell = "sh" if path.read_text().startswith("#!/bin/busybox") else "bash"
    subprocess.run([shell, "-n", str(path)], check=True, timeout=10)


@pytest.mark.parametrize(
    "script", ["setup", "run", "rack", "uml/setup", "uml/boot", "qemu/setup", "qemu/boot"]
)
def test_no_script_goes_on_after_an_error(script: str) -> None:
    assert "\nset -euo pipefail\n" in (SOFTROCE / script).read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "which command?"),
        (["--"], "which command?"),
        (["--rack"], "--rack takes a value"),
        (["--rack", "two", "true"], "--rack takes a whole number, not 'two'"),
        (["--rack", "100", "true"], "--rack goes up to 99"),
        (["--time", "1m", "true"], "--time takes a whole number, not '1m'"),
        (["--fast", "true"], "there is no option --fast"),
    ],
)
def test_run_refuses_what_it_does_not_understand(arguments: list[str], complaint: str) -> None:
    done = _call("run", *arguments)
    assert done.returncode == 125
    assert complaint in done.stderr


def test_run_says_how_to_make_a_guest_that_is_missing(tmp_path: Path) -> None:
    done = _call("run", "true", KVCOMM_SOFTROCE_CACHE=str(tmp_path))
    assert done.returncode == 125
    assert f"there is no guest in {tmp_path} yet; run {SOFTROCE}/setup" in done.stderr


def test_run_refuses_paths_that_a_kernel_command_line_would_split(tmp_path: Path) -> None:
    cache = tmp_path / "my cache"
    cache.mkdir()
    (cache / "guest").write_text("uml\n")
    done = _call("run", "true", KVCOMM_SOFTROCE_CACHE=str(cache))
    assert done.returncode == 125
    assert f"do not work in this path: {cache}" in done.stderr


def test_setup_refuses_another_kind_of_guest(tmp_path: Path) -> None:
    done = _call("setup", KVCOMM_SOFTROCE_CACHE=str(tmp_path), KVCOMM_SOFTROCE_GUEST="xen")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "setup: KVCOMM_SOFTROCE_GUEST is 'xen', and must be uml or qemu"
    assert list(tmp_path.iterdir()) == []


def test_a_ready_kernel_that_is_missing_is_not_replaced_by_a_compilation(tmp_path: Path) -> None:
    done = _call(
        "uml/setup", KVCOMM_SOFTROCE_CACHE=str(tmp_path), KVCOMM_SOFTROCE_KERNEL=str(tmp_path / "linux.xz")
    )
    assert done.returncode == 1
    assert done.stderr == f"uml/setup: there is no kernel {tmp_path}/linux.xz\n"


def test_a_ready_kernel_is_unpacked_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (tmp_path / "linux").write_bytes(b"\x7fELF")
    environment = {"KVCOMM_SOFTROCE_CACHE": str(cache), "KVCOMM_SOFTROCE_KERNEL": str(tmp_path / "linux")}
    assert _call("uml/setup", **environment).returncode == 0
    first = (cache / "linux").stat()
    assert first.st_mode & 0o111
    assert _call("uml/setup", **environment).returncode == 0
    assert (cache / "linux").stat() == first
    (tmp_path / "linux").write_bytes(b"\x7fELF of another release")
    assert _call("uml/setup", **environment).returncode == 0
    assert (cache / "linux").read_bytes() == b"\x7fELF of another release"
    assert not (cache / "kernel.work").exists()


def test_the_rack_is_not_built_outside_of_a_guest() -> None:
    """It would rewrite the rules by which this machine finds its own addresses."""
    done = _call("rack", "2")
    assert done.returncode == 2
    assert "inside of the guest" in done.stderr


def test_the_kernel_has_what_the_scripts_and_tests_ask_of_it() -> None:
    config = (SOFTROCE / "uml/kernel.config").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in config if line and not line.startswith("#"))
    needed = {"RDMA_RXE", "INFINIBAND_USER_ACCESS", "UML_PCI_OVER_VIRTIO"}  # verbs
    needed |= {"HOSTFS", "OVERLAY_FS", "TMPFS", "DEVTMPFS", "PROC_FS", "SYSFS"}  # mounts of init
    needed |= {"VETH", "BRIDGE", "NET_SCH_NETEM", "IP_MULTIPLE_TABLES"}  # rack, loss
    assert {name for name in needed if settings.get(f"CONFIG_{name}") != "y"} == set()


def test_the_tests_of_the_guest_have_a_limit() -> None:
    script = (ROOT / "scripts/test-rdma").read_text()
    limit = next(line for line in script.splitlines() if line.startswith("limit_s="))
    assert int(limit.partition("#")[0].removeprefix("limit_s=")) <= 600
    assert '--time "$limit_s"' in script


def _test_rdma(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`scripts/test-rdma` where no guest can be made, because the wish is an impossible one."""
    return subprocess.run(
        [str(ROOT / "scripts/test-rdma")],
        env={
            **os.environ,
            "VENV": sys.prefix,
            "KVCOMM_SOFTROCE_CACHE": str(tmp_path / "cache"),
            "KVCOMM_SOFTROCE_GUEST": "none",
            "KVCOMM_RDMA_RESULTS": str(tmp_path / "results"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_tests_without_a_guest_are_one_skip_with_its_reason(tmp_path: Path) -> None:
    done = _test_rdma(tmp_path)
    assert done.returncode == 0
    assert done.stdout == (
        "SKIPPED [1] tests/rdma: setup: KVCOMM_SOFTROCE_GUEST is 'none', and must be uml or qemu\n"
    )


def test_tests_without_a_guest_fail_where_they_are_required(tmp_path: Path) -> None:
    done = _test_rdma(tmp_path, KVCOMM_REQUIRE_RDMA="1")
    assert done.returncode == 1
    assert "KVCOMM_REQUIRE_RDMA forbids to skip them" in done.stderr
