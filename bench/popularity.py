"""Streams of keys whose heaviest are to be found: drawn ones, and those of public traces.

The traces are not in the repository: they are read from ``$KVCOMM_TRACES``, or from ``shared/traces`` beside
it (``tests/traces`` looks in the same places).
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

VARIABLE = "KVCOMM_TRACES"
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "traces"
KEY_BYTES = 32

Reference = tuple[float, bytes, int]
"""(seconds, key, reader), in the order of time."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Keys by Zipf's law; half way other keys become the hot ones, all at once."""

    exponent: float
    key_count: int
    events: int
    seconds: float

    def references(self, seed: int) -> Iterator[Reference]:
        draw = random.Random(seed)
        weights = list(accumulate(1 / rank**self.exponent for rank in range(1, self.key_count + 1)))
        names = [number.to_bytes(KEY_BYTES, "big") for number in range(self.key_count)]
        step_s = self.seconds / self.events
        for half in range(2):
            draw.shuffle(names)
            ranks = draw.choices(range(self.key_count), cum_weights=weights, k=self.events // 2)
            begin = half * (self.events // 2)
            for index, rank in enumerate(ranks, start=begin):
                yield index * step_s, names[rank], draw.randrange(1 << 30)


@dataclass(frozen=True, slots=True)
class Trace:
    """The blocks that the requests of a trace name, each once a request; a session has one reader, where
    there are sessions.

    Raises:
        FileNotFoundError: the trace is not there; the message says where it was looked for.
    """

    name: str
    references_max: int
    sessions_max: int = 8
    """Of a trace that is made of sessions."""

    def references(self) -> Iterator[Reference]:
        path = trace_path(self.name)
        found = _runs(path, self.sessions_max) if path.suffix == ".gz" else _listed(path)
        return islice(found, self.references_max)


def trace_path(name: str) -> Path:
    """Raises ``FileNotFoundError`` with the variable to set."""
    directory = Path(os.environ.get(VARIABLE) or BESIDE)
    path = directory / name
    if not path.is_file():
        raise FileNotFoundError(f"no trace {name} in {directory}; set {VARIABLE} to where the traces are")
    return path


def _listed(path: Path) -> Iterator[Reference]:
    """``{"timestamp": ms, "hash_ids": [...]}`` a line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            request = json.loads(line)
            for block in request["hash_ids"]:
                yield request["timestamp"] / 1_000, block.to_bytes(KEY_BYTES, "big"), number


def _runs(path: Path, sessions_max: int) -> Iterator[Reference]:
    """Sessions of requests with ``hash_runs: [[first, length], ...]``, ids of their own; all sessions begin
    at once, as they would on a busy cluster, and what happens at the same time comes in their order."""
    requests: list[tuple[float, int, Sequence[Sequence[int]]]] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for session, line in enumerate(islice(lines, sessions_max)):
            told = json.loads(line)
            if "duplicate_of" not in told:
                requests += [(each["t"], session, each.get("hash_runs", ())) for each in told["requests"]]
    requests.sort(key=lambda request: request[:2])
    for at, session, runs in requests:
        for first, length in runs:
            for block in range(first, first + length):
                yield at, (session << 40 | block).to_bytes(KEY_BYTES, "big"), session


class Exact:
    """What a sketch is held against: every key's decayed count."""

    def __init__(self, half_life_s: float) -> None:
        self._rate = 1.0 / half_life_s
        self._counts: dict[bytes, float] = {}
        self._landmark: float | None = None

    def add(self, key: bytes, now: float) -> None:
        if self._landmark is None:
            self._landmark = now
        weight = 2.0 ** ((now - self._landmark) * self._rate)
        self._counts[key] = self._counts.get(key, 0.0) + weight

    def score(self, found: Sequence[bytes], count: int) -> tuple[float, float]:
        """(recall, precision) of ``found`` as the ``count`` heaviest, in percent.

        Equal counts at the border are nobody's fault: recall is of the keys heavier than the last of them,
        precision counts every key that is as heavy.
        """
        ordered = sorted(self._counts.values(), reverse=True)
        last = ordered[min(count, len(ordered)) - 1]
        above = {key for key, counted in self._counts.items() if counted > last * (1 + 1e-9)}
        at_least = sum(self._counts.get(key, 0.0) >= last * (1 - 1e-9) for key in found)
        recall = len(above.intersection(found)) / len(above) if above else 1.0
        return 100.0 * recall, 100.0 * at_least / max(1, len(found))
