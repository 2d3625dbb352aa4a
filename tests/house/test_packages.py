"""The lists in pyproject.toml against the tree: what is shipped, what is pure, what `import` may load."""

import subprocess
import sys
from pathlib import Path

import pytest

import kvcomm
from tests.house.source import PACKAGES, ROOT, contract, file_of, pure_modules, pyproject

HEAVY = ("torch", "transformers", "vllm", "ray", "grpc", "pyverbs", "numpy", "triton", "cuda")


def _packages_in_tree(root: Path) -> set[str]:
    """Every folder below the top-level packages that holds Python or protobuf sources."""
    return {
        ".".join(path.parent.relative_to(root).parts)
        for package in PACKAGES
        for pattern in ("*.py", "*.proto")
        for path in (root / package).rglob(pattern)
    }


def test_every_package_is_listed_and_every_listed_package_exists() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    assert set(listed) == _packages_in_tree(ROOT), "correct [tool.setuptools] packages in pyproject.toml"


def test_every_package_is_a_regular_package() -> None:
    """A folder without __init__.py would be merged with any other distribution's folder of that name."""
    assert [name for name in _packages_in_tree(ROOT) if file_of(name) is None] == []


def test_a_forgotten_package_is_seen(tmp_path: Path) -> None:
    (tmp_path / "l1" / "policies").mkdir(parents=True)
    (tmp_path / "l1" / "policies" / "tiny_lfu.py").touch()
    assert _packages_in_tree(tmp_path) == {"l1.policies"}


def test_every_top_level_package_is_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_every_pure_module_exists() -> None:
    missing = [module for module in pure_modules() if file_of(module) is None]
    assert missing == [], "remove them from the contract `pure` in pyproject.toml"


def test_every_pure_module_is_listed_once_and_in_order() -> None:
    assert pure_modules() == sorted(set(pure_modules()))


def test_the_version_is_stated_once() -> None:
    assert kvcomm.__version__ == pyproject()["project"]["version"]


def test_the_pure_contract_bans_clock_randomness_and_io() -> None:
    banned = set(contract("pure")["forbidden_modules"])
    assert banned >= {"time", "random", "uuid", "secrets", "asyncio", "socket", "grpc", "os"}


def test_ruff_and_mypy_and_the_linter_judge_the_same_packages() -> None:
    assert tuple(pyproject()["tool"]["importlinter"]["root_packages"]) == PACKAGES
    typed = next(
        line for line in (ROOT / "scripts/check").read_text().splitlines() if line.startswith("typed=")
    )
    assert set(typed.removeprefix("typed=(").removesuffix(")").split()) == {*PACKAGES, "tests"}


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """An agent without torch, gRPC or RDMA must be able to import us, and fast."""
    code = f"import sys, {package}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
