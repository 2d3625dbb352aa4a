"""The messages of the tcp wire, by their bytes."""

from __future__ import annotations

import pytest

from kvcomm.errors import Corrupt, Refused
from l2_rdma.transports.tcp.protocol import (
    ALIGNMENT,
    FETCH_ADD,
    GARBAGE,
    HEAD_BYTES_MAX,
    HELLO,
    MAGIC,
    OUTSIDE,
    REQUEST,
    TICKET,
    WELCOME,
    goodbye_error,
    head_bytes,
    reply_head,
)


@pytest.mark.parametrize("length", [0, 1, 8, 15, 16, 47, 48, 49, 64, 511, 512, 4096, (2 << 20) + 256, 12_345])
def test_every_reply_ends_where_a_line_ends(length: int) -> None:
    head = reply_head(length)
    assert head.size == head_bytes(length)
    assert (head.size + length) % ALIGNMENT == 0
    assert 16 <= head.size <= HEAD_BYTES_MAX
    assert head.unpack(head.pack(3, 1, length)) == (3, 1, length)


def test_all_that_is_not_a_reply_is_a_line_long() -> None:
    assert [each.size for each in (HELLO, WELCOME, REQUEST, reply_head(0))] == [ALIGNMENT] * 4


def test_the_bytes_stay_what_they_are() -> None:
    """Two versions meet on this wire."""
    request = REQUEST.pack(FETCH_ADD, 0x01020304, 0x1122, 5, 6)
    assert request[:32].hex() == "0300000004030201221100000000000005000000000000000600000000000000"
    assert not any(request[32:])
    hello = HELLO.pack(MAGIC, 9, bytes(range(16)))
    assert hello[:32] == b"KVCTCP\x00\x01" + (9).to_bytes(8, "little") + bytes(range(16))
    assert reply_head(0).pack(1, 2, 3)[:16].hex() == "01000000020000000300000000000000"


def test_a_goodbye_says_whose_fault_it_is() -> None:
    assert isinstance(goodbye_error(OUTSIDE), Refused)
    assert isinstance(goodbye_error(TICKET), Refused)
    assert isinstance(goodbye_error(GARBAGE), Corrupt)
    assert isinstance(goodbye_error(1 << 63), Corrupt)
