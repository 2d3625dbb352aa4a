"""Resolved records for a person and for a script: how ``kvcomm get --as`` shows them, what ``put --as``
means."""

from __future__ import annotations

import base64
from typing import Any

from kvcomm.cli.options import Kind
from kvcomm.client import Client
from kvcomm.mergeplane import Merged
from kvcomm.merging import Counter, ElementSet, Extreme, FieldMap, Register

Face = Counter | ElementSet | Extreme | FieldMap | Register


def face(kv: Client, kind: Kind, name: str) -> Face:
    """What reads and writes records of this class, which is not ``state``."""
    match kind:
        case "counter":
            return kv.counter(name)
        case "set":
            return kv.set(name)
        case "map":
            return kv.map(name)
        case "max":
            return kv.maximum(name)
        case "min":
            return kv.minimum(name)
        case "register":
            return kv.register(name)
        case "state":
            raise ValueError("the siblings of a state are not resolved")


def put(records: Face, key: str, content: bytes, deadline_s: float) -> None:
    """One write of what was typed.  Raises ``ValueError`` for text that is none."""
    match records:
        case Counter():
            records.add(key, int(content), deadline_s=deadline_s)
        case Extreme():
            records.offer(key, _number(content), deadline_s=deadline_s)
        case ElementSet():
            records.add(key, content, deadline_s=deadline_s)
        case Register():
            records.put(key, content, deadline_s=deadline_s)
        case FieldMap():
            field, equals, value = content.partition(b"=")
            if not equals:
                raise ValueError("a field of a map is put as field=value")
            records.put(key, field.decode(), value, deadline_s=deadline_s)


def lines(value: Any) -> list[bytes]:
    """The value of a record, a line each for elements and fields."""
    match value:
        case None:
            return []
        case bytes():
            return [value]
        case frozenset():
            return sorted(value)
        case dict():
            return [field.encode() + b"=" + value[field] for field in value]
    return [str(value).encode()]


def document(found: Merged[Any]) -> dict[str, object]:
    """For ``--json``: numbers as they are, bytes as base64."""
    match found.value:
        case bytes():
            shown: dict[str, object] = {"value_base64": _base64(found.value)}
        case frozenset():
            shown = {"elements_base64": [_base64(element) for element in sorted(found.value)]}
        case dict():
            shown = {"fields_base64": {field: _base64(value) for field, value in found.value.items()}}
        case _:
            shown = {"value": found.value}
    return {**shown, "context": dict(found.context), "degraded": found.degraded}


def _number(content: bytes) -> int | float:
    try:
        return int(content)
    except ValueError:
        return float(content)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
