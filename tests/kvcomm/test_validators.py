"""Which rules can be, which writes they let through, and that a pattern cannot take for ever."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvcomm.clock import Stamp
from kvcomm.errors import Rejected
from kvcomm.resolvers import Moment, Resolver
from kvcomm.resolvers.fields import FieldsDelta
from kvcomm.resolvers.table import COUNTER, MAP, MAXIMUM, MINIMUM, REGISTER, SET
from kvcomm.stateplane import record_name
from kvcomm.validators import CHOICES_MAX, PATTERN_VALUE_BYTES_MAX, Rule, Validators, rule_of
from kvcomm.version import Dot, VersionVector

NOTHING = VersionVector()


def after(resolver: Resolver[Any, Any, Any], *deltas: Any) -> list[bytes]:
    """The siblings after these changes, one coordinator making them all."""
    values: list[bytes] = []
    for counter, delta in enumerate(deltas, start=1):
        seen = VersionVector.from_wire({"A": counter - 1} if counter > 1 else {})
        moment = Moment(Dot("A", counter), Stamp(counter), seen, NOTHING)
        values = [resolver.apply(values, resolver.encode_delta(delta), moment)]
    return values


def change(rule: Rule, resolver: Resolver[Any, Any, Any], *deltas: Any) -> None:
    """Hold the last of these changes against the rule."""
    held, [value] = after(resolver, *deltas[:-1]), after(resolver, *deltas)
    record = resolver.name.encode() + b"/n/k"
    Validators([rule]).check_change(record, resolver.encode_delta(deltas[-1]), held, value)


@pytest.mark.parametrize(
    ("names", "record", "applies"),
    [
        ("counter/budget/agent-7", b"counter/budget/agent-7", True),
        ("counter/budget/*", b"counter/budget/agent-7", True),
        ("counter/b*t/agent-*", b"counter/budget/agent-7", True),
        ("counter/budget/*", b"counter/budgets/agent-7", False),
        ("counter/budget/*", b"counter/budget/agent/7", False),
        ("counter/*/*", b"state/budget/agent-7", False),
        ("state/*/*", b"state/a%2Fb/\xff", True),
        ("state/*/*", b"state", False),
        ("state/home/robot:7 [a]", record_name("state", "home", "robot:7 [a]"), True),
        ("state/home/é*@x", record_name("state", "home", "é-1@x"), True),
        ("state/home/a*a", b"state/home/a", False),
        ("state/home/?", b"state/home/k", False),
    ],
)
def test_a_star_stays_within_its_part(names: str, record: bytes, applies: bool) -> None:
    kind = names.partition("/")[0]
    rule = Rule(names, min=0) if kind == "counter" else Rule(names, value_bytes_max=1)
    assert rule.applies(record) == applies


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"names": "counter/a/b"}, "says nothing"),
        ({"names": "counter/a", "min": 0}, "class/name/key"),
        ({"names": "counter//b", "min": 0}, "class/name/key"),
        ({"names": "counter/a/*b*", "min": 0}, "at most one"),
        ({"names": "*/a/b", "min": 0}, "the class is one of state, context, counter"),
        ({"names": "set/a/b", "min": 0}, "have no min, only value_bytes_max, matches, count_max"),
        ({"names": "counter/a/b", "matches": "x"}, "only min, max"),
        ({"names": "counter/a/b", "min": 2, "max": 1}, "above"),
        ({"names": "counter/a/b", "min": float("nan"), "max": 1}, "below nan"),
        ({"names": "counter/a/b", "min": "2"}, "min is '2'"),
        ({"names": "counter/a/b", "min": True}, "min is True"),
        ({"names": "counter/a/b", "least": 2}, "no 'least'"),
        ({"min": 2}, "without names"),
        ({"names": "state/a/b", "matches": "("}, "no regular expression"),
    ],
)
def test_a_rule_that_cannot_be_says_why(rule: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rule_of(rule)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a|b)*", "(a)?", r"(a)\1", "(?=a)b", "a*a*a*", "a{1,9}b+c*", "a?" * 9, "a|" * 9 + "b"],
)
def test_patterns_that_can_take_for_ever_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches is"):
        Rule("state/a/b", matches=pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z0-9_-]+@[a-z.]+", r"[(*)+?|{]*", r"\(\*\+\?\|\{\)*", r"[]x\]]*(yes|no)", r"\d+\.\d*", r"[^]]+",
    ],
)  # fmt: skip
def test_patterns_of_one_class_after_the_other_are_fine(pattern: str) -> None:
    Rule("state/a/b", matches=pattern)


def test_the_worst_allowed_patterns_end() -> None:
    """Against the longest value, with nothing but backtracking to do.  The bound is generous: what is refused
    would take years."""
    began = time.monotonic()
    for pattern in ("a*a*b", "a?" * CHOICES_MAX + "a*a*b", "(a|aa)(a|aa)(a|aa)(a|aa)a*a*b"):
        with pytest.raises(Rejected, match="does not match"):
            Rule("state/a/b", matches=pattern).check_value(b"a" * PATTERN_VALUE_BYTES_MAX)
    assert time.monotonic() - began < 30


def test_sizes_are_looked_at_before_patterns() -> None:
    rule = Rule("state/a/b", matches="[a-z]*")
    Validators([rule]).check_put(b"state/a/b", b"fine")
    with pytest.raises(Rejected, match="257 bytes, the limit is 256"):
        rule.check_value(b"a" * (PATTERN_VALUE_BYTES_MAX + 1))
    with pytest.raises(Rejected, match="not UTF-8"):
        rule.check_value(b"\xff")
    with pytest.raises(Rejected, match="does not match"):
        Validators([Rule("state/z/*", value_bytes_max=1), rule]).check_put(b"state/a/b", b"NOT")
    with pytest.raises(Rejected, match="limit is 3"):
        Rule("state/a/b", value_bytes_max=3, matches="[a-z]*").check_value(b"aaaa")


def test_a_number_stays_within_its_bounds() -> None:
    budget = Rule("counter/*/*", min=0, max=10)
    change(budget, COUNTER, 3, 7)
    with pytest.raises(Rejected, match="largest is 10"):
        change(budget, COUNTER, 3, 8)
    with pytest.raises(Rejected, match="smallest is 0"):
        change(budget, COUNTER, -1)
    with pytest.raises(Rejected, match="smallest"):
        change(Rule("min/*/*", min=0), MINIMUM, 5, -0.5)
    change(Rule("max/*/*", max=10), MAXIMUM, 20, 5)  # it stands at 20 already and does not get worse


def test_a_record_that_breaks_a_rule_already_can_be_mended() -> None:
    budget = Rule("counter/*/*", min=0)
    change(budget, COUNTER, -5, 2)
    with pytest.raises(Rejected):
        change(budget, COUNTER, -5, -1)
    tags = Rule("set/*/*", count_max=1)
    change(tags, SET, FieldsDelta({b"a": b"", b"b": b"", b"c": b""}), FieldsDelta({}, [b"a"]))
    with pytest.raises(Rejected, match="most are 1"):
        change(tags, SET, FieldsDelta({b"a": b""}), FieldsDelta({b"b": b""}))


def test_values_of_registers_fields_and_elements() -> None:
    with pytest.raises(Rejected, match="limit is 2"):
        change(Rule("register/*/*", value_bytes_max=2), REGISTER, b"abc")
    short = Rule("map/*/*", value_bytes_max=2)
    change(short, MAP, FieldsDelta({b"long name": b"ab"}))
    change(short, MAP, FieldsDelta({b"x": b"old and long"}), FieldsDelta({b"y": b"ab"}))
    with pytest.raises(Rejected, match="limit is 2"):
        change(short, MAP, FieldsDelta({b"x": b"abc"}))
    with pytest.raises(Rejected, match="does not match"):
        change(Rule("set/*/*", matches="[a-z]+"), SET, FieldsDelta({b"A": b""}))


def test_other_records_are_nobodys_business() -> None:
    other = Validators([Rule("counter/other/*", max=0)])
    value = after(COUNTER, 5)[0]
    other.check_change(b"counter/n/k", COUNTER.encode_delta(5), [], value)
    other.check_put(b"state/other/k", b"anything")
