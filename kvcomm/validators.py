"""``Validators``: rules that a record's value must keep, checked by the shard that coordinates the write,
before anything is written.

Declarative on purpose: nothing that comes over the wire is ever run, and a check takes bounded time.  Sizes
are looked at before patterns, and a pattern has few choices, none of them inside a repetition: it is their
product that makes backtracking take for ever.

**What a check can promise.**  It sees what one coordinator has seen.  Two coordinators that have not heard of
each other may each let a write through that together break a rule: a budget that must never be overdrawn is a
record of ``kv.strong``.  Such a record can still be written as long as that does not make it worse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import unquote

from kvcomm.errors import Rejected
from kvcomm.resolvers import RESOLVERS, resolver_of
from kvcomm.resolvers.fields import FieldsDelta

PATTERN_VALUE_BYTES_MAX = 256
"""Longest value that is held against a pattern."""
REPEATS_MAX = 2
"""``*``, ``+`` and ``{}`` of one pattern: time grows with the length of the value to the power of them."""
CHOICES_MAX = 8
"""``?`` and ``|`` of one pattern: each may double the time."""

_NUMBERS = ("counter", "max", "min")
_MANY = ("set", "map")
_CLASSES = ("state", "context", *RESOLVERS)


@dataclass(frozen=True, slots=True)
class Rule:
    """What the records of some names keep to.

    Raises ``ValueError`` for a rule that says nothing, or something that its class of records does not have.
    """

    names: str
    """``class/name/key``, as the caller of ``kv.state(name).put(key, ...)`` spells them; ``*`` stands for any
    text within a part, once a part."""
    min: int | float | None = None
    """Smallest number of a ``counter``, ``max``, ``min``."""
    max: int | float | None = None
    count_max: int | None = None
    """Most elements of a ``set``, fields of a ``map``."""
    value_bytes_max: int | None = None
    """Longest value of a ``state``, ``register``, field of a ``map`` or element of a ``set``."""
    matches: str | None = None
    """Regular expression that such a value, as UTF-8 text, matches as a whole."""
    _parts: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = tuple(self.names.split("/"))
        if len(parts) != 3 or not all(parts) or any(part.count("*") > 1 for part in parts):
            raise ValueError(f"names is {self.names!r}, expected class/name/key with at most one * a part")
        kind = parts[0]
        if kind not in _CLASSES:
            raise ValueError(f"names is {self.names!r}, but the class is one of {', '.join(_CLASSES)}")
        given = [each.name for each in fields(self) if each.init and getattr(self, each.name) is not None]
        given.remove("names")
        if not given:
            raise ValueError(f"{self.names}: the rule says nothing")
        has: tuple[str, ...] = ("min", "max") if kind in _NUMBERS else ("value_bytes_max", "matches")
        has += ("count_max",) if kind in _MANY else ()
        for name in given:
            if name not in has:
                raise ValueError(
                    f"{self.names}: records of class {kind} have no {name}, only {', '.join(has)}"
                )
        if any(isinstance(bound, float) and math.isnan(bound) for bound in (self.min, self.max)):
            raise ValueError(f"{self.names}: nothing is above or below nan")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"{self.names}: min {self.min} is above max {self.max}")
        object.__setattr__(self, "_parts", parts)
        object.__setattr__(self, "_pattern", None if self.matches is None else _compiled(self.matches))

    def applies(self, record: bytes) -> bool:
        """Whether it is about this record."""
        parts = record.decode(errors="replace").split("/")
        return len(parts) == 3 and all(map(_fits, map(unquote, parts), self._parts))

    def check_value(self, value: bytes) -> None:
        """Raises ``Rejected`` for a value that breaks the rule."""
        limit = self.value_bytes_max
        if self._pattern is not None:
            limit = PATTERN_VALUE_BYTES_MAX if limit is None else min(limit, PATTERN_VALUE_BYTES_MAX)
        if limit is not None and len(value) > limit:
            raise self._rejected(f"a value has {len(value)} bytes, the limit is {limit}")
        if self._pattern is None:
            return
        try:
            fits = self._pattern.fullmatch(value.decode()) is not None
        except UnicodeDecodeError as error:
            raise self._rejected("a value is not UTF-8 text") from error
        if not fits:
            raise self._rejected(f"a value does not match {self.matches!r}")

    def check_number(self, before: int | float | None, after: int | float) -> None:
        if self.min is not None and after < self.min and not (before is not None and after >= before):
            raise self._rejected(f"it would be {after}, the smallest is {self.min}")
        if self.max is not None and after > self.max and not (before is not None and after <= before):
            raise self._rejected(f"it would be {after}, the largest is {self.max}")

    def check_count(self, before: int, after: int) -> None:
        if self.count_max is not None and after > self.count_max and after > before:
            raise self._rejected(f"it would have {after} entries, the most are {self.count_max}")

    def _rejected(self, why: str) -> Rejected:
        return Rejected(f"rule {self.names}: {why}; nothing was written")


class Validators:
    """Rules, held against writes."""

    def __init__(self, rules: Sequence[Rule] = ()) -> None:
        self._rules = tuple(rules)

    def check_put(self, record: bytes, value: bytes) -> None:
        """A value is put as it is.  Raises ``Rejected``."""
        for rule in self._rules:
            if rule.applies(record):
                rule.check_value(value)

    def check_change(self, record: bytes, delta: bytes, held: Sequence[bytes], value: bytes) -> None:
        """``delta`` turned the siblings ``held`` of a resolved record into ``value``.  Raises
        ``Rejected``."""
        rules = [rule for rule in self._rules if rule.applies(record)]
        resolver = resolver_of(record)
        if not rules or resolver is None:
            return
        before, after, change = resolver.show(held), resolver.show([value]), resolver.delta(delta)
        for rule in rules:
            if resolver.name in _NUMBERS:
                rule.check_number(before, after)
            elif resolver.name in _MANY:
                rule.check_count(len(before), len(after))
                _check_fields(rule, resolver.name, change)
            else:
                rule.check_value(after)


def _fits(text: str, pattern: str) -> bool:
    before, star, after = pattern.partition("*")
    if not star:
        return text == pattern
    long_enough = len(text) >= len(before) + len(after)
    return long_enough and text.startswith(before) and text.endswith(after)


def _check_fields(rule: Rule, kind: str, change: FieldsDelta) -> None:
    """Of what is put only: what stands there already was let through once."""
    for name, value in change.put.items():
        rule.check_value(name if kind == "set" else value)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"matches is {pattern!r}, which is no regular expression: {error}") from error
    bare = re.sub(r"\[\^?\]?(?:\\.|[^\]\\])*\]", "x", re.sub(r"\\[^\d]", "x", pattern))
    if re.search(r"\)[*+?{]|\(\?|\\\d", bare):
        raise ValueError(
            f"matches is {pattern!r}: a group may not be repeated, referred to or special, "
            "that can take for ever"
        )
    if len(re.findall(r"[*+{]", bare)) > REPEATS_MAX:
        raise ValueError(f"matches is {pattern!r}: at most {REPEATS_MAX} of *, + and {{}}")
    if len(re.findall(r"[?|]", bare)) > CHOICES_MAX:
        raise ValueError(f"matches is {pattern!r}: at most {CHOICES_MAX} of ? and |")
    return compiled


def rule_of(written: Mapping[str, object]) -> Rule:
    """From a mapping of its fields, as in a configuration.  Raises ``ValueError``."""
    known = {each.name: _TYPES[each.name] for each in fields(Rule) if each.init}
    for key, value in written.items():
        if key not in known:
            raise ValueError(f"a rule has no {key!r}, only {', '.join(known)}")
        if not isinstance(value, known[key]) or isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}")
    if "names" not in written:
        raise ValueError("a rule without names")
    return Rule(**written)  # type: ignore[arg-type]  # checked above


_TYPES: dict[str, type | tuple[type, ...]] = {
    "names": str,
    "min": (int, float),
    "max": (int, float),
    "count_max": int,
    "value_bytes_max": int,
    "matches": str,
}
