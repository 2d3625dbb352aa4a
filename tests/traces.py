"""Public request traces, as references to prefix-chained block ids.

They are not in the repository: they are read from ``$KVCOMM_TRACES``, or from ``shared/traces`` beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

VARIABLE = "KVCOMM_TRACES"
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "traces"


def trace_path(name: str) -> Path:
    """The file ``name`` (``mooncake/conversation_trace.jsonl``); skips the test where it is absent."""
    directory = Path(os.environ.get(VARIABLE) or BESIDE)
    path = directory / name
    if not path.is_file():
        pytest.skip(f"no trace {name} in {directory}; set {VARIABLE} to the directory of the traces")
    return path


def block_references(path: Path) -> Iterator[list[int]]:
    """The block ids of each request in order, head first, from JSON lines that have a ``hash_ids`` list.

    Raises:
        ValueError: a line is not of that format; the message names it.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            request = json.loads(line)
            ids = request.get("hash_ids") if isinstance(request, dict) else None
            if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
                raise ValueError(f"{path}:{number}: no list of integers under 'hash_ids'")
            yield ids
