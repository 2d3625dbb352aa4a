"""``RESOLVERS``: which class of records is resolved by what."""

from __future__ import annotations

from typing import Any

from kvcomm.resolvers.counter import Counter
from kvcomm.resolvers.extreme import Extreme
from kvcomm.resolvers.fields import FieldMap, FieldSet
from kvcomm.resolvers.register import Register
from kvcomm.resolvers.resolver import Resolver

COUNTER = Counter("counter")
SET = FieldSet("set")
MAP = FieldMap("map")
MAXIMUM = Extreme("max", largest=True)
MINIMUM = Extreme("min", largest=False)
REGISTER = Register("register")

RESOLVERS: dict[str, Resolver[Any, Any, Any]] = {
    resolver.name: resolver for resolver in (COUNTER, SET, MAP, MAXIMUM, MINIMUM, REGISTER)
}

_BY_PREFIX = {name.encode(): resolver for name, resolver in RESOLVERS.items()}


def resolver_of(record: bytes) -> Resolver[Any, Any, Any] | None:
    """Of a record's name; ``None`` = its siblings are the caller's to merge."""
    return _BY_PREFIX.get(record.partition(b"/")[0])
