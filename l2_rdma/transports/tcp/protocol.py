"""What stands on a stream of the ``tcp`` transport.

::

    client                                   pool
    hello    magic, ticket number, secret    welcome  magic, incarnation, region bytes
    request  kind, number, offset, 2 words   reply    number, status, value
             of a write: the bytes                    of a read: the bytes

A stream's replies come in the order of its requests, and each is as long as its request says: 16 bytes, and
the bytes of a read.  So a client knows the layout of all that is still to come, and one ``recvmsg`` puts many
replies, and their bytes, where they belong.  A request that cannot be honoured has no reply of its own but a
*goodbye* in its place, the last that is said: only a client that does not check its offsets gets one.

Integers are little-endian.  The number of a request is counted by its client, modulo 2**32, and says that
both sides still mean the same.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from kvcomm.errors import Corrupt, KVCommError, Refused

MAGIC = b"KVCTCP\x00\x01"
SECRET_BYTES = 16
STREAM_COUNT_MAX = 8
NUMBER_MASK = (1 << 32) - 1

HELLO = struct.Struct("<8sQ16s")
WELCOME = struct.Struct("<8sQQ")
REQUEST = struct.Struct("<B3xIQQQ")
"""kind, number, offset and two words: the length and 0, the amount and 0, or what is expected and desired."""
REPLY = struct.Struct("<IIQ")
"""number, status, and the length of a read or write, the old word of an atomic, or why goodbye."""


class Kind(IntEnum):
    READ = 1
    WRITE = 2
    FETCH_ADD = 3
    COMPARE_SWAP = 4


class Status(IntEnum):
    DONE = 0
    HELD = 1
    """The word is held by somebody else; it was not changed."""
    GOODBYE = 2


class Goodbye(IntEnum):
    """Why a pool hangs up."""

    OUTSIDE = 1
    GARBAGE = 2
    TICKET = 3


class TcpOffer(msgspec.Struct, frozen=True, array_like=True):
    hosts: list[str]
    """Where the pool listens, to be tried in this order."""
    port: int


class TcpProposal(msgspec.Struct, frozen=True, array_like=True):
    streams: int


class TcpAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A ticket: the right to so many streams as were proposed, soon."""

    number: int
    secret: bytes


def goodbye_error(reason: int) -> KVCommError:
    """What a goodbye means to the client that gets it."""
    if reason == Goodbye.OUTSIDE:
        return Refused("the pool says that the bytes asked for are not in its region")
    if reason == Goodbye.TICKET:
        return Refused("the pool does not know the ticket, or it is used up or too old")
    return Corrupt(f"the pool cannot read our requests (reason {reason})")
