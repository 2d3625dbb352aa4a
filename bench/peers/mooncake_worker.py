"""A client or provider process of Mooncake's store; runs under the interpreter of its own environment.

usage: mooncake_worker.py MASTER_ADDRESS SEGMENT_BYTES.  Reads JSON commands from standard input, one a line,
and answers each with a line ``={...}``; ends when standard input closes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

CONNECT_DEADLINE_S = 20.0
LOCAL_BUFFER_BYTES = 256 << 20


def main() -> None:
    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = connected(master, segment_bytes)
    verbs: dict[str, Callable[..., Any]] = {
        "wait": lambda: None,
        "fill": lambda size_bytes, count: fill(store, size_bytes, count),
        "get": lambda size_bytes, count: timed(store.get, count),
        "get_into": lambda size_bytes, count: timed(into(store, size_bytes), count),
    }
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": verbs[command.pop("verb")](**command)}
        except RuntimeError as error:
            answer = {"error": str(error)}
        print("=" + json.dumps(answer), flush=True)
    store.close()


def connected(master: str, segment_bytes: int) -> Any:
    """The master needs a moment to listen; setup fails until then."""
    from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

    deadline = time.monotonic() + CONNECT_DEADLINE_S
    while True:
        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
        if code == 0:
            return store
        if time.monotonic() > deadline:
            raise SystemExit(f"mooncake setup failed with code {code}")
        time.sleep(0.1)


KEYS: list[str] = []
BUFFERS: dict[int, Any] = {}


def fill(store: Any, size_bytes: int, count: int) -> None:
    import numpy

    draw = numpy.random.default_rng(4)
    for index in range(count):
        value = draw.integers(0, 256, size_bytes, dtype=numpy.uint8).tobytes()
        key = f"block-{index}"
        code = store.put(key, value)
        if code != 0 or store.get(key) != value:
            raise RuntimeError(f"put of {size_bytes} bytes failed with code {code}")
        KEYS.append(key)


def into(store: Any, size_bytes: int) -> Callable[[str], Any]:
    """A get into registered memory, the store's fastest way."""
    import numpy

    if size_bytes not in BUFFERS:
        BUFFERS[size_bytes] = numpy.zeros(size_bytes, numpy.uint8)
        if store.register_buffer(BUFFERS[size_bytes].ctypes.data, size_bytes) != 0:
            raise RuntimeError("register_buffer failed")
    address = BUFFERS[size_bytes].ctypes.data

    def get(key: str) -> None:
        if store.get_into(key, address, size_bytes) != size_bytes:
            raise RuntimeError("get_into came back short")

    return get


def timed(operation: Callable[[str], object], count: int) -> list[float]:
    turn, taken = cycle(KEYS), []
    for _ in range(count):
        key = next(turn)
        begin = time.perf_counter()
        operation(key)
        taken.append(time.perf_counter() - begin)
    return taken


if __name__ == "__main__":
    main()
