"""The judges of the fault tests condemn what they should."""

from __future__ import annotations

import pytest

from kvcomm.chaos.linearizable import Access
from tests.system.traffic import Eventual, Outcome, Strong, Written


def writes(*each: tuple[bytes | None, Outcome]) -> Eventual:
    eventual = Eventual("judged")
    eventual._writes["k"] = [Written(value, outcome) for value, outcome in each]
    return eventual


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (set(), "lost b'2'"),
        ({b"1"}, "replaced, deleted or refused"),
        ({b"2", b"3"}, "replaced, deleted or refused"),
    ],
)
def test_a_lost_a_replaced_and_a_refused_value_are_noticed(values: set[bytes], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        writes((b"1", "done"), (b"2", "done"), (b"3", "refused")).judge_key("k", values)


def test_a_deleted_value_must_not_return() -> None:
    deleted = writes((b"1", "done"), (None, "done"))
    deleted.judge_key("k", set())
    with pytest.raises(AssertionError, match="deleted"):
        deleted.judge_key("k", {b"1"})


def test_unknown_writes_may_be_there_or_not() -> None:
    unknown = writes((b"1", "done"), (b"2", "unknown"))
    for values in ({b"1"}, {b"2"}, {b"1", b"2"}):
        unknown.judge_key("k", values)
    before = writes((b"1", "unknown"), (b"2", "done"))
    before.judge_key("k", {b"2"})
    before.judge_key("k", {b"1", b"2"})
    with pytest.raises(AssertionError, match="lost"):
        before.judge_key("k", {b"1"})


def test_a_stale_strong_read_is_noticed() -> None:
    strong = Strong("judged")
    strong._histories["k"] = [Access("write", 0, 1, "a"), Access("read", 2, 3, ended="ok", saw=None)]
    with pytest.raises(AssertionError, match="nothing explains"):
        strong.check()
