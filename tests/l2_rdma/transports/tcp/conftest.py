"""A region, its ``tcp`` provider and a client's transport, in one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.l2_rdma.transports.tcp.wired import Wired


@pytest.fixture
def make_wired(tmp_path: Path) -> Iterator[Callable[..., Wired]]:
    made: list[Wired] = []

    def make(**options: Any) -> Wired:
        made.append(Wired(tmp_path, **options))
        return made[-1]

    yield make
    for wired in made:
        wired.close()


@pytest.fixture
def wired(make_wired: Callable[..., Wired]) -> Wired:
    return make_wired()
