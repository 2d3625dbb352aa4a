"""deploy/softroce as far as it can be looked at without a guest; tests/rdma looks at the inside."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.house.source import ROOT
from tests.peers import until

SOFTROCE = ROOT / "deploy/softroce"
TOOLS = ("apt-get", "bash", "dpkg-deb", "flock", "perl", "setpriv", "taskset", "timeout")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}; the guest is made on Debian"
)
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


# ------------------------------------------------------------------------ run, with a kernel that is a script


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As `setup` leaves it, but for the kernel."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "guest").write_text("uml\n")
    return folder


def _kernel(cache: Path, *lines: str) -> None:
    """What runs instead of a guest; knows what boot and init are told."""
    head = [
        "#!/bin/bash",
        "for word; do case $word in JOB=*) job=${word#JOB=} ;; esac; done",
        "source $job/settings",
    ]
    (cache / "linux").write_text("\n".join([*head, *lines, ""]))
    (cache / "linux").chmod(0o755)


def _run(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    jobs = cache / "jobs"
    jobs.mkdir()
    done = _call("run", *arguments, KVCOMM_SOFTROCE_CACHE=str(cache), TMPDIR=str(jobs), **environment)
    assert list(jobs.iterdir()) == []
    return done


def test_the_commands_status_is_runs(cache: Path) -> None:
    _kernel(cache, "echo 7 >$job/status")
    assert _run(cache, "true").returncode == 7


def test_a_guest_that_dies_has_no_status(cache: Path) -> None:
    _kernel(cache, "kill -SEGV $$")
    done = _run(cache, "true")
    assert done.returncode == 125
    assert "run: the guest died, or did not start" in done.stderr


def test_the_guest_is_told_its_limits_and_processor(cache: Path) -> None:
    _kernel(cache, "cp $job/settings $results/; taskset -cp $$ >$results/cpu; echo 0 >$job/status")
    results = cache / "results"
    assert _run(cache, "--time", "17", "--memory", "999", "--results", str(results), "true").returncode == 0
    settings = (results / "settings").read_text().splitlines()
    assert {f"layer={cache}/layer", f"results={results}", "limit_s=17", "memory_mb=999"} <= set(settings)
    processor = (results / "cpu").read_text().rpartition(": ")[2].strip()
    assert processor.isdigit(), "one alone"


def test_the_command_and_what_was_named_of_the_environment_get_there(cache: Path) -> None:
    _kernel(cache, "cp $job/command $results/; echo 0 >$job/status")
    results = cache / "results"
    arguments = [
        "--rack",
        "0",
        "--results",
        str(results),
        "--env",
        "WANTED",
        "--",
        "printf",
        "%s|",
        "a b",
        "$HOME",
        "'",
    ]
    passed = {"WANTED": "two words", "KVCOMM_TEST_X": "x", "UNWANTED": "secret", "PYTHONPATH": "/here"}
    assert _run(cache, *arguments, **passed).returncode == 0

    command = (results / "command").read_text()
    assert "secret" not in command
    assert "KVCOMM_SOFTROCE_CACHE" not in command
    # What follows the rack and the folder is the command itself; here it runs where it is.
    without_rack = "\n".join(line for line in command.splitlines() if "/rack 0" not in line)
    environment = without_rack.replace("exec printf", "env; exec printf")
    told = subprocess.run(
        ["bash", "-c", environment], env={}, capture_output=True, text=True, timeout=10, check=True
    ).stdout.splitlines()
    assert told[-1] == "a b|$HOME|'|"
    assert {
        "WANTED=two words",
        "KVCOMM_TEST_X=x",
        "PYTHONPATH=/here:/opt/pyverbs",
        "KVCOMM_SOFTROCE=uml",
    } <= set(told)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_guest(cache: Path, number: signal.Signals) -> None:
    _kernel(cache, "echo $$ >$results/pid.new; mv $results/pid.new $results/pid; exec sleep 60")
    results = cache / "results"
    environment = {"PATH": os.environ["PATH"], "KVCOMM_SOFTROCE_CACHE": str(cache), "TMPDIR": str(cache)}
    # What this process was told to ignore (nohup, a job in the background) no shell can trap.
    command: list[str | Path] = ["env", "--default-signal", SOFTROCE / "run", "--results", results, "true"]
    with subprocess.Popen(command, env=environment) as running:
        try:
            until((results / "pid").exists)
            running.send_signal(number)
            assert running.wait(20) == 128 + number
        finally:
            running.terminate()
    assert not psutil.pid_exists(int((results / "pid").read_text()))
    assert list(cache.glob("softroce.*")) == []


@pytest.mark.slow
def test_a_guest_does_not_outlive_a_run_that_was_killed(cache: Path) -> None:
    _kernel(cache, "echo $$ >$results/pid.new; mv $results/pid.new $results/pid; exec sleep 60")
    results = cache / "results"
    environment = {"PATH": os.environ["PATH"], "KVCOMM_SOFTROCE_CACHE": str(cache), "TMPDIR": str(cache)}
    running = subprocess.Popen([SOFTROCE / "run", "--results", results, "true"], env=environment)
    until((results / "pid").exists)
    running.kill()
    running.wait(20)
    until(lambda: not psutil.pid_exists(int((results / "pid").read_text())))


# ----------------------------------------------------------------------------------------------------- setup


def test_a_kernel_that_does_not_boot_is_no_guest(cache: Path) -> None:
    """And the last line says so, for the report of skipped tests."""
    (cache / "layer").mkdir()
    listed = (SOFTROCE / "setup").read_text().partition("packages=(")[2].partition(")")[0].split()
    (cache / "layer" / "packages").write_text("".join(f"{name}\n" for name in listed))
    kernel = cache / "no-kernel"
    kernel.write_text("#!/bin/sh\necho I cannot boot\n")
    done = _call(
        "setup",
        KVCOMM_SOFTROCE_CACHE=str(cache),
        KVCOMM_SOFTROCE_KERNEL=str(kernel),
        KVCOMM_SOFTROCE_GUEST="uml",
    )
    assert done.returncode == 1
    assert "I cannot boot" in done.stderr
    assert done.stderr.splitlines()[-1] == "setup: no guest: the uml guest does not start"
    assert not (cache / "guest").exists(), "what does not start is not used"


def test_setup_refuses_another_kind_of_guest(tmp_path: Path) -> None:
    done = _call("setup", KVCOMM_SOFTROCE_CACHE=str(tmp_path), KVCOMM_SOFTROCE_GUEST="xen")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "setup: KVCOMM_SOFTROCE_GUEST is 'xen', and must be uml or qemu"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment whose `apt-get` reaches nothing."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "apt-get").write_text('#!/bin/sh\necho "E: no network" >&2\nexit 100\n')
    (tools / "apt-get").chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "KVCOMM_SOFTROCE_CACHE": str(tmp_path / "cache")}


def test_without_packages_there_is_no_guest(offline: dict[str, str]) -> None:
    """And the last line says so, for the report of skipped tests."""
    done = _call("setup", **offline)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        *["E: no network"] * 3,
        "setup: apt-get cannot download the verbs packages of Debian 12",
    ]


def test_without_sources_there_is_no_kernel(offline: dict[str, str], tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"  # beside which is no ready kernel
    shutil.copytree(SOFTROCE, checkout / "deploy/softroce")
    (tmp_path / "cache").mkdir()
    done = _call(str(checkout / "deploy/softroce/uml/setup"), **offline)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(("uml/setup: apt-get cannot ", "uml/setup: to compile "))
    assert list((tmp_path / "cache").iterdir()) == []


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
