"""A client or provider process of Mooncake's store; runs under the interpreter of its own environment.

usage: mooncake_worker.py MASTER_ADDRESS SEGMENT_BYTES.  Reads JSON commands from standard input, one a line,
and answers each with a line ``={...}``; ends when standard input closes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
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
        "get": lambda size_bytes, count: timed(store.get, KEYS[size_bytes], count),
        "get_into": lambda size_bytes, count: timed(into(store, size_bytes), KEYS[size_bytes], count),
        "batch_get_into": lambda size_bytes, count, items: timed(
            batch_into(store, size_bytes, items), runs(size_bytes, items), count, items
        ),
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


KEYS: dict[int, list[str]] = {}
BUFFERS: dict[int, Any] = {}


def fill(store: Any, size_bytes: int, count: int) -> None:
    import numpy

    draw = numpy.random.default_rng(4)
    KEYS[size_bytes] = [f"{size_bytes}-{index}" for index in range(count)]
    for key in KEYS[size_bytes]:
        value = draw.integers(0, 256, size_bytes, dtype=numpy.uint8).tobytes()
        code = store.put(key, value)
        if code != 0 or store.get(key) != value:
            raise RuntimeError(f"put of {size_bytes} bytes failed with code {code}")


def into(store: Any, size_bytes: int) -> Callable[[str], Any]:
    """A get into registered memory, the store's fastest way."""
    address = registered(store, size_bytes)

    def get(key: str) -> None:
        if store.get_into(key, address, size_bytes) != size_bytes:
            raise RuntimeError("get_into came back short")

    return get


def batch_into(store: Any, size_bytes: int, items: int) -> Callable[[list[str]], Any]:
    """Many at once, each into its own part of registered memory."""
    first = registered(store, size_bytes * items)
    addresses, sizes = [first + at * size_bytes for at in range(items)], [size_bytes] * items

    def get(keys: list[str]) -> None:
        if store.batch_get_into(keys, addresses, sizes) != sizes:
            raise RuntimeError("batch_get_into came back short")

    return get


def registered(store: Any, size_bytes: int) -> int:
    """Address of memory that the store may receive into; the same for the same size."""
    import numpy

    if size_bytes not in BUFFERS:
        BUFFERS[size_bytes] = numpy.zeros(size_bytes, numpy.uint8)
        if store.register_buffer(BUFFERS[size_bytes].ctypes.data, size_bytes) != 0:
            raise RuntimeError("register_buffer failed")
    address: int = BUFFERS[size_bytes].ctypes.data
    return address


def runs(size_bytes: int, items: int) -> list[list[str]]:
    """Runs of ``items`` keys that go round all of them."""
    turn = cycle(KEYS[size_bytes])
    return [[next(turn) for _ in range(items)] for _ in KEYS[size_bytes]]


def timed(operation: Callable[[Any], object], over: Sequence[Any], count: int, items: int = 1) -> list[float]:
    """Seconds an item of each of ``count`` calls, going round ``over``."""
    turn, taken = cycle(over), []
    for _ in range(count):
        what = next(turn)
        begin = time.perf_counter()
        operation(what)
        taken.append((time.perf_counter() - begin) / items)
    return taken


if __name__ == "__main__":
    main()
