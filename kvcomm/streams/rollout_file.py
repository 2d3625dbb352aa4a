"""Files of rollouts: binary records, or lines of JSON, one behind the other; read one by one.

A file can be appended to, and files can be joined.  Which form it is in, its first byte says.  Nothing is
read that its bounds do not allow, so a damaged size costs no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kvcomm.errors import Corrupt
from kvcomm.streams.rollout import Rollout
from kvcomm.streams.rollout_codec import (
    FRAME_BYTES,
    JSON_BYTES_MAX,
    RolloutRecord,
    encode,
    frame_bytes,
    parsed,
    to_json,
    unpacked,
)


def write_rollouts(file: BinaryIO, rollouts: Iterable[Rollout], *, as_json: bool = False) -> None:
    """Append ``rollouts``.

    Raises:
        TooLarge: see ``rollout_codec.encode``; those before it are written.
    """
    for rollout in rollouts:
        file.write(to_json(rollout) + b"\n" if as_json else encode(rollout))


def read_rollouts(file: BinaryIO) -> Iterator[Rollout]:
    """The rollouts from here to the end of ``file``.

    Raises:
        Refused, Corrupt: see ``rollout_codec.decode``; where a file was cut off, those before it are given.
    """
    return (record.rollout() for record in read_records(file))


def read_records(file: BinaryIO) -> Iterator[RolloutRecord]:
    """As :func:`read_rollouts`, sound or not, as far as it can be told where one ends."""
    while first := file.read(1):
        if first == b"{":
            yield parsed(first + file.readline(JSON_BYTES_MAX))
        elif first not in b" \t\r\n":
            yield _record(first, file)


def _record(first: bytes, file: BinaryIO) -> RolloutRecord:
    head = first + file.read(FRAME_BYTES - 1)
    size = frame_bytes(head)
    data = head + file.read(size - FRAME_BYTES)
    if len(data) < size:
        raise Corrupt(f"the file ends {size - len(data)} bytes before its last rollout does")
    return unpacked(data)
