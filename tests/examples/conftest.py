"""Fixtures of the examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def threads_one() -> Iterator[None]:
    """The examples set it, and the rest of the run is not to be slowed down."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
