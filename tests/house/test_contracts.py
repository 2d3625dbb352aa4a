"""The import contracts of pyproject.toml fire: each is run on a small tree that breaks it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source import PACKAGES, ROOT

pytestmark = pytest.mark.slow


def _lint(tree: dict[str, str], pure: tuple[str, ...], tmp_path: Path) -> tuple[int, str]:
    """The verdict of our contracts on a tree of {path: text}, with `pure` as the list of pure modules."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for path, text in tree.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    settings, replaced = re.subn(
        r"^source_modules = \[[^\]]*\]",
        f"source_modules = {list(pure)!r}",
        (ROOT / "pyproject.toml").read_text(),
        flags=re.MULTILINE,
    )
    assert replaced == 1
    (tmp_path / "pyproject.toml").write_text(settings)
    code = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports_command as c; c()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "--no-cache", "--no-logo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tree", "broken"),
    [
        ({"kvcomm/client.py": "import l1"}, "The controller stands on the tiers, the tiers on the floor"),
        ({"l1/lru.py": "import controller"}, "The controller stands on the tiers, the tiers on the floor"),
        ({"l1/lru.py": "def f():\n    import l3_shard"}, "No tier knows another"),
        ({"kvcomm/block.py": "import time"}, "Pure modules reach no clock, no randomness and no I/O"),
        (
            {"kvcomm/block.py": "import kvcomm.id", "kvcomm/id.py": "import uuid"},
            "Pure modules reach no clock",
        ),
        (
            {"kvcomm/block.py": "from grpc import aio"},
            "Pure modules reach no clock, no randomness and no I/O",
        ),
    ],
)
def test_a_contract_reports(tree: dict[str, str], broken: str, tmp_path: Path) -> None:
    pure = tuple(name for name in ("kvcomm.block",) if "kvcomm/block.py" in tree)
    code, report = _lint(tree, pure, tmp_path)
    assert code == 1, report
    assert re.search(rf"{re.escape(broken)}.*BROKEN", report), report


def test_the_contracts_spare_the_composition_roots(tmp_path: Path) -> None:
    tree = {
        "kvcomm/connect.py": "def connect():\n    import l1.lru, l2_rdma, l3_shard",
        "kvcomm/cli/__init__.py": "def main():\n    import kvcomm.cli.shard",
        "kvcomm/cli/shard.py": "def run():\n    import controller.server, l3_shard",
        "kvcomm/block.py": "import hashlib, dataclasses, enum, collections.abc",
        "l1/lru.py": "import kvcomm.block, kvcomm.connect, time",
        "controller/server.py": "import l3_shard, kvcomm.block",
    }
    code, report = _lint(tree, ("kvcomm.block",), tmp_path)
    assert code == 0, report
