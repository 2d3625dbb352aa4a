"""The repository as the house rules see it: parsed files, and the lists kept in pyproject.toml."""

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvcomm", "l1", "l2_rdma", "l3_shard", "controller")
TIERS = ("l1", "l2_rdma", "l3_shard")

# Written by the protobuf compiler: its style is not ours to judge.
_GENERATED = ("_pb2.py", "_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file. `path` is relative to the repository's root, `module` is its dotted name."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def is_pure(self) -> bool:
        return self.module in pure_modules()


def source(path: str, text: str) -> Source:
    """A source that need not exist on disk: the self-tests of the rules are such."""
    return Source(Path(path), text, ast.parse(text, filename=path))


@cache
def shipped_sources() -> tuple[Source, ...]:
    """Every hand-written module of the packages, in the order of paths."""
    return tuple(_sources(PACKAGES))


@cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pure_modules() -> list[str]:
    """The modules without I/O, clock or randomness: the sources of the import contract `pure`."""
    return list(contract("pure")["source_modules"])


def contract(contract_id: str) -> dict[str, Any]:
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    return next(each for each in contracts if each["id"] == contract_id)


def file_of(module: str) -> Path | None:
    """The file of a dotted module name of ours, or None if there is none."""
    stem = ROOT.joinpath(*module.split("."))
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def tracked_files() -> list[Path] | None:
    """Files that git tracks or would add (ignored ones are left out), or None outside of a checkout."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        return None
    paths = {ROOT / name for name in listing.stdout.decode().split("\0") if name}
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def _sources(folders: tuple[str, ...]) -> Iterator[Source]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.name.endswith(_GENERATED):
                yield source(str(path.relative_to(ROOT)), path.read_text())
