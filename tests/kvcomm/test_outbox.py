from __future__ import annotations

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from kvcomm.wire.outbox import PIECES_MAX, Outbox

PARCEL = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4)


@given(parcels=st.lists(PARCEL, max_size=8), takes=st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_everything_leaves_in_order_and_each_parcel_says_so_once(
    parcels: list[list[bytes]], takes: list[int]
) -> None:
    outbox, wire, turn = Outbox(), b"", 0
    left: list[tuple[int, bool]] = []
    for number, parcel in enumerate(parcels):
        outbox.put(parcel, partial(_note, left, number))
    while outbox:
        whole = b"".join(outbox.gather())
        assert outbox.unsent_bytes == len(whole)
        take = min(takes[turn % len(takes)], len(whole))
        wire += whole[:take]
        outbox.taken(take)
        turn += 1
    assert wire == b"".join(map(b"".join, parcels))
    assert left == [(number, True) for number in range(len(parcels))]
    assert outbox.unsent_bytes == 0


def _note(left: list[tuple[int, bool]], number: int, whole: bool) -> None:
    left.append((number, whole))


def test_one_send_is_bounded() -> None:
    outbox = Outbox()
    outbox.put([b"x"] * (PIECES_MAX + 5))
    outbox.put([b"y"])
    assert len(outbox.gather()) == PIECES_MAX
    outbox.taken(PIECES_MAX)
    assert b"".join(outbox.gather()) == b"xxxxxy"


def test_only_what_was_not_begun_can_be_withdrawn() -> None:
    outbox = Outbox()
    left: list[bool] = []
    first = outbox.put([b"abc"], left.append)
    second = outbox.put([b"de", b"f"], left.append)
    outbox.taken(1)
    assert not outbox.withdraw(first)
    assert outbox.withdraw(second)
    assert not outbox.withdraw(second)
    assert b"".join(outbox.gather()) == b"bc"
    assert outbox.unsent_bytes == 2
    outbox.taken(2)
    assert not outbox.withdraw(first)
    assert left == [True]


def test_clear_lets_every_buffer_go() -> None:
    outbox = Outbox()
    left: list[bool] = []
    outbox.put([b"abc"], left.append)
    outbox.put([b"def"])
    outbox.taken(2)
    outbox.clear()
    assert left == [False]
    assert not outbox


def test_buffers_are_not_copied() -> None:
    payload = bytearray(16)
    outbox = Outbox()
    outbox.put([memoryview(payload).cast("Q")])
    outbox.taken(3)
    payload[3] = 9
    [rest] = outbox.gather()
    assert bytes(rest) == b"\x09" + bytes(12)
