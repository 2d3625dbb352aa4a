"""Errors cross the wire as themselves, and each family stays its own."""

from __future__ import annotations

import pickle

import pytest

from kvcomm import errors
from kvcomm.errors import KVCommError, failure_to_error


def subclasses(cls: type[KVCommError]) -> list[type[KVCommError]]:
    return [cls, *(deeper for direct in cls.__subclasses__() for deeper in subclasses(direct))]


OPERATING = [cls for cls in subclasses(KVCommError) if cls.__module__ == errors.__name__]
MISTAKES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, ValueError) and value.__module__ == errors.__name__
]


@pytest.mark.parametrize("cls", OPERATING, ids=lambda cls: cls.__name__)
def test_every_operating_failure_crosses_the_wire_as_itself(cls: type[KVCommError]):
    error = failure_to_error(cls.code, "why", b"detail")
    assert type(error) is cls
    assert (error.message, error.detail, str(error)) == ("why", b"detail", "why")


def test_codes_are_unique():
    codes = [cls.code for cls in OPERATING]
    assert len(set(codes)) == len(codes) >= 10


def test_an_unknown_code_keeps_its_name():
    error = failure_to_error("out_of_cheese", "redo from start", b"x")
    assert type(error) is KVCommError
    assert str(error) == "out_of_cheese: redo from start"
    assert error.detail == b"x"


def test_the_two_families_never_mix():
    assert MISTAKES
    assert not any(issubclass(cls, KVCommError) for cls in MISTAKES)
    assert not any(issubclass(cls, ValueError) for cls in OPERATING)


def test_an_error_survives_a_process_border_with_its_detail():
    copy = pickle.loads(pickle.dumps(errors.StaleEpoch("old ring", b"map")))
    assert (type(copy), copy.message, copy.detail) == (errors.StaleEpoch, "old ring", b"map")


def test_every_class_says_what_the_caller_can_do():
    assert all(cls.__doc__ for cls in OPERATING + MISTAKES)
