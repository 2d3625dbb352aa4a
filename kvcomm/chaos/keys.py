"""Names of the records and blocks that the clients of a story use.

They carry the phase of the story: with each new phase clients take new ones, and those of the past are left
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcomm.stateplane import record_name

NAME = "chaos"


def shared_keys(phase: int, count: int) -> list[str]:
    """Eventual records that every client of every host writes."""
    return [f"{phase}.shared.{index}" for index in range(count)]


def own_keys(phase: int, client: str, count: int) -> list[str]:
    """Eventual records that one client alone writes."""
    return [f"{phase}.{client}.{index}" for index in range(max(1, count // 2))]


def registers(phase: int, generation: int, count: int) -> list[str]:
    """Strong records.  A generation lasts a few seconds: short histories are quick to judge."""
    return [f"{phase}.{generation}.{index}" for index in range(count)]


def clients_of(node: str, kind: str, count: int) -> list[str]:
    """Names of a host's clients."""
    return [f"{node}.{kind[0]}{index}" for index in range(count)]


def eventual_keys(nodes: Sequence[str], clients: int, count: int, phases: Sequence[int]) -> list[str]:
    """All that may have been written in these phases."""
    return list(_eventual_keys(nodes, clients, count, phases))


def _eventual_keys(nodes: Sequence[str], clients: int, count: int, phases: Sequence[int]) -> Iterator[str]:
    for phase in phases:
        yield from shared_keys(phase, count)
        for node in nodes:
            for client in clients_of(node, "eventual", clients):
                yield from own_keys(phase, client, count)


def state_name(key: str) -> bytes:
    """Of an eventual record, below its tenant."""
    return record_name("state", NAME, key)


def strong_name(key: str) -> bytes:
    """Of a strong record, below its tenant."""
    return record_name("strong", NAME, key)
