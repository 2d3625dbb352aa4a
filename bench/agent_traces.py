"""Calls of several agents, from public traces: who read which blocks, in order.

The traces are not in the repository: they are read from ``$KVCOMM_TRACES``, or from ``shared/traces`` beside
it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "KVCOMM_TRACES"
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "traces"
ROLE_CHARACTERS = 40
"""Agents of one team have different prompts; those of one role begin alike."""


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: the prefix that it reads, as ids of blocks that are equal where the text is."""

    agent: str
    blocks: tuple[str, ...]


def absence() -> str | None:
    """Why the traces cannot be read, if so."""
    needed = ("agents/magagent.jsonl.gz", "agents/magagent_blocks.jsonl", "claude_code")
    missing = [name for name in needed if not (_directory() / name).exists()]
    return f"no {', '.join(missing)} in {_directory()}; set {VARIABLE}" if missing else None


def teams() -> list[Call]:
    """Orchestrators and workers of 25 runs (``agents/magagent``), all at once, 256 bytes of text a block.

    An agent is one role of one run; roles are told apart by how their prompts begin.
    """
    folder = _directory() / "agents"
    with gzip.open(folder / "magagent.jsonl.gz", "rt", encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    with (folder / "magagent_blocks.jsonl").open(encoding="utf-8") as lines:
        references = [json.loads(line) for line in lines]
    runs: dict[str, list[tuple[int, str, list[int]]]] = {}
    roles: dict[tuple[str, int], str] = {
        (text["session_id"], text["timestamp"]): text["input"][:ROLE_CHARACTERS] for text in texts
    }
    for each in references:
        run, at = each["session"], each["timestamp_us"]
        runs.setdefault(run, []).append((at, roles[run, at], each["hash_ids"]))
    first = {run: min(at for at, _, _ in calls) for run, calls in runs.items()}
    timed = [
        (at - first[run], Call(f"{run[:8]} {role}", tuple(map(str, ids))))
        for run, calls in runs.items()
        for at, role, ids in calls
    ]
    return [call for _, call in sorted(timed, key=lambda each: (each[0], each[1].agent))]


def coders() -> list[Call]:
    """Coding agents and their sub-agents (``claude_code``), all sessions at once, 64 tokens a block.

    Ids of two sessions are never equal, so sessions share nothing here.
    """
    timed = [
        (at, call)
        for path in sorted((_directory() / "claude_code").glob("trace_*.json"))
        for at, call in _session(json.loads(path.read_text()))
    ]
    return [call for _, call in sorted(timed, key=lambda each: (each[0], each[1].agent))]


def _session(session: dict) -> Iterator[tuple[float, Call]]:
    name = session["id"]
    for request in session["requests"]:
        nested = request.get("requests")
        if nested is None:
            yield request["t"], _call(name, "main", request["hash_ids"])
        else:
            for each in nested:
                yield request["t"] + each["t"], _call(name, request["agent_id"], each["hash_ids"])


def _call(session: str, agent: str, ids: list[int]) -> Call:
    return Call(f"{session} {agent}", tuple(f"{session}.{each}" for each in ids))


def _directory() -> Path:
    return Path(os.environ.get(VARIABLE) or BESIDE)
