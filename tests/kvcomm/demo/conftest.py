"""Skips these modules, saying why, where the `demo` extra is not installed."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers", "gguf") if find_spec(name) is None]


class SkippedModule(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs the `demo` extra: {', '.join(MISSING)} not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if not MISSING:
        return None
    module: pytest.Module = SkippedModule.from_parent(parent, path=module_path)
    return module
