"""Canonical bytes lose nothing, so no two values share them; and one value has one encoding."""

from __future__ import annotations

import math
import random
import struct
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.canonical import DEPTH_MAX, canonical_bytes

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab\x00", max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
# Few distinct leaves, so that equal values and near misses ([1], [[1]], ["", ""], ...) really come up.
small = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, "", "a", b"", b"a"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def typed(value: Any) -> str:
    """The dumb oracle: two values are the same exactly if this text is."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{typed(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(typed, value)) + "]"
    return f"{type(value).__name__} {value + 0.0 if isinstance(value, float) else value!r}"


def decoded(data: bytes) -> tuple[Any, bytes]:
    """A reader written from the docstring alone: if it gets the value back, nothing was lost or collides."""
    tag, length, rest = data[:1], int.from_bytes(data[1:9], "little"), data[9:]
    assert len(rest) >= length
    body, rest = rest[:length], rest[length:]
    if tag == b"L":
        items = []
        while body:
            item, body = decoded(body)
            items.append(item)
        return items, rest
    if tag == b"M":
        pairs = []
        while body:
            key, body = decoded(body)
            item, body = decoded(body)
            pairs.append((key, item))
        assert [key for key, _ in pairs] == sorted({key for key, _ in pairs})
        return dict(pairs), rest
    leaf = {
        b"N": lambda: None,
        b"B": lambda: body == b"\x01",
        b"I": lambda: int.from_bytes(body, "little", signed=True),
        b"F": lambda: struct.unpack("<d", body)[0],
        b"S": body.decode,
        b"Y": lambda: body,
    }[tag]
    return leaf(), rest


@given(values)
def test_a_value_can_be_read_back_so_no_two_values_share_bytes(value: Any):
    back, rest = decoded(canonical_bytes(value))
    assert rest == b""
    assert typed(back) == typed(value)


@given(small, small)
def test_bytes_are_equal_exactly_if_values_are(left: Any, right: Any):
    assert (canonical_bytes(left) == canonical_bytes(right)) == (typed(left) == typed(right))


@given(values, values)
def test_no_encoding_is_the_beginning_of_another(left: Any, right: Any):
    one, other = canonical_bytes(left), canonical_bytes(right)
    assert one == other or not (one.startswith(other) or other.startswith(one))


@given(st.dictionaries(st.text(max_size=4), scalars, max_size=6), st.randoms(use_true_random=False))
def test_order_of_a_mapping_does_not_matter(value: dict[str, Any], shuffler: random.Random):
    items = list(value.items())
    shuffler.shuffle(items)
    assert canonical_bytes(dict(items)) == canonical_bytes(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
        (0, False),
        (0, None),
        ("a", b"a"),
        ("", None),
        ([], {}),
        ([1, 2], [[1], 2]),
        (-1, 255),
    ],
)
def test_values_that_look_alike_differ(one: Any, other: Any):
    assert canonical_bytes(one) != canonical_bytes(other)


@pytest.mark.parametrize(
    ("one", "other"), [([1, (2,)], (1, [2])), ({"a": 1}, MappingProxyType({"a": 1})), (0.0, -0.0)]
)
def test_values_that_are_one_value_agree(one: Any, other: Any):
    assert canonical_bytes(one) == canonical_bytes(other)


@pytest.mark.parametrize(
    "value",
    [bytearray(b"a"), memoryview(b"a"), range(3), {1, 2}, 1j, object(), {1: "a"}, {"a": [object()]}, print],
)
def test_what_has_no_canonical_bytes_is_refused(value: Any):
    with pytest.raises(TypeError):
        canonical_bytes(value)


@pytest.mark.parametrize("value", [math.nan, [math.nan], "\ud800", {"\ud800": 1}])
def test_values_that_cannot_be_told_apart_are_refused(value: Any):
    with pytest.raises(ValueError, match=r"NaN|surrogates"):
        canonical_bytes(value)


def test_a_value_that_contains_itself_is_refused():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper"):
        canonical_bytes(value)


def test_depth_max_is_the_deepest_that_goes():
    value: Any = 1
    for _ in range(DEPTH_MAX):
        value = [value]
    assert canonical_bytes(value)
    with pytest.raises(ValueError, match="nested deeper"):
        canonical_bytes([value])
