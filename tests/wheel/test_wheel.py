"""The wheel beside the real dependencies: each of our plain names has one owner, and nothing is forgotten.

The top-level names (`l1`, `controller`, ...) are plain words; another distribution that shipped one of them
would silently overwrite or shadow ours. These tests look at what is really installed.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT, pyproject

pytestmark = [pytest.mark.slow, pytest.mark.processes]

BUILD_TIMEOUT_S = 100
SOURCES = ("pyproject.toml", "LICENSE", *PACKAGES)


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _top_level(names: Iterable[str]) -> set[str]:
    """The importable top-level names among the paths of a distribution."""
    firsts = {name.split("/")[0] for name in names if not name.startswith(("..", "/"))}
    return {
        first.split(".")[0]
        for first in firsts
        if not first.endswith((".dist-info", ".data", ".pth", ".libs", "__pycache__"))
    }


def _rivals(name: str) -> list[str]:
    """Distributions other than ours that own the top-level `name`."""
    return sorted(
        each.metadata["Name"]
        for each in importlib.metadata.distributions()
        if each.metadata["Name"] != "kvcomm" and name in _top_level(str(path) for path in each.files or ())
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: setuptools leaves folders in the tree it builds."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SOURCES, *(["README.md"] if (ROOT / "README.md").exists() else [])):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, tree / name)
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
    )
    _run(*pip, "--target", target, wheel, cwd=target)
    return target


def test_the_wheel_ships_our_names_and_no_other(names: list[str]) -> None:
    assert _top_level(names) == set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_each_name_has_one_owner(name: str) -> None:
    assert _rivals(name) == [], f"another distribution ships {name!r}"


def test_a_rival_would_be_seen() -> None:
    """The look at the environment is not blind: it finds who ships a name that we know to be shipped."""
    assert _rivals("psutil") == ["psutil"]
    assert _rivals("_pytest") == ["pytest"]


def test_the_real_dependencies_are_installed() -> None:
    """Without them, having no rival would prove nothing."""
    requirements = pyproject()["project"]["dependencies"]
    installed_names = {
        each.metadata["Name"].lower().replace("_", "-") for each in importlib.metadata.distributions()
    }
    wanted = {line.split(">=")[0].split("==")[0].strip().lower() for line in requirements}
    assert wanted - installed_names == set()


def test_every_source_file_is_inside(names: list[str]) -> None:
    """No forgotten package and no forgotten data: python, protobuf and typing files alike."""
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for pattern in ("*.py", "*.proto", "*.pyi", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    assert wanted - set(names) == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


def test_the_packages_import_from_the_wheel(installed: Path) -> None:
    listed = [name for name in pyproject()["tool"]["setuptools"]["packages"] if name != "kvcomm.engines"]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(importlib.import_module(name).__file__)\n"
    )
    files = _run(sys.executable, "-c", code, *listed, cwd=installed, PYTHONPATH=str(installed)).splitlines()
    assert len(files) == len(listed)
    assert [each for each in files if not Path(each).is_relative_to(installed)] == []


def test_the_command_is_declared(installed: Path) -> None:
    (ours,) = importlib.metadata.distributions(path=[str(installed)])
    commands = {each.name: each.value for each in ours.entry_points if each.group == "console_scripts"}
    assert commands == {"kvcomm": "kvcomm.cli:main"}
    assert ours.version == pyproject()["project"]["version"]


def test_the_command_runs_from_the_wheel(installed: Path) -> None:
    if not (ROOT / "kvcomm/cli").is_dir():
        pytest.skip("there is no kvcomm/cli yet")
    usage = _run(installed / "bin/kvcomm", "--help", cwd=installed, PYTHONPATH=str(installed))
    assert "Usage" in usage
