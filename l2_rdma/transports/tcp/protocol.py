"""What stands on a stream of the ``tcp`` transport.

::

    client                                   pool
    hello    magic, ticket number, secret    welcome  magic, incarnation, region bytes
    request  kind, number, offset, 2 words   reply    number, status, value
             of a write: the bytes                    of a read: the bytes

A stream's replies come in the order of its requests, and each is as long as its request says: a head, and
the bytes of a read.  So a client knows the layout of all that is still to come, and one ``recvmsg`` puts many
replies, and their bytes, where they belong.  A request that cannot be honoured has no reply of its own but a
*goodbye* in its place, the last that is said: only a client that does not check its offsets gets one.

All messages are multiples of :data:`ALIGNMENT` long, replies by the padding of their heads.  The kernel puts
one behind the other into its pages, so what starts at a cache line in the region is copied to a cache line
there, and from there to one at the client: copies between unequal places within a line take up to a third
longer.

Integers are little-endian.  The number of a request is counted by its client, modulo 2**32, and says that
both sides still mean the same.
"""

from __future__ import annotations

import struct

import msgspec

from kvcomm.errors import Corrupt, KVCommError, Refused

MAGIC = b"KVCTCP\x00\x01"
SECRET_BYTES = 16
STREAM_COUNT_MAX = 8
NUMBER_MASK = (1 << 32) - 1

ALIGNMENT = 64

HELLO = struct.Struct("<8sQ16s32x")
WELCOME = struct.Struct("<8sQQ40x")
REQUEST = struct.Struct("<B3xIQQQ32x")
"""kind, number, offset and two words: the length and 0, the amount and 0, or what is expected and desired."""
REPLY_HEADS = [struct.Struct(f"<IIQ{padding}x") for padding in range(ALIGNMENT)]
"""By padding: number, status, and the length of a read or write, the old word of an atomic, or why
goodbye."""
_HEAD_BYTES_MIN = REPLY_HEADS[0].size
HEAD_BYTES_MAX = REPLY_HEADS[-1].size

READ, WRITE, FETCH_ADD, COMPARE_SWAP = range(1, 5)
"""Kinds of requests."""
ATOMICS = (FETCH_ADD, COMPARE_SWAP)

DONE, HELD, GOODBYE = range(3)
"""Statuses of replies; *held*: the word is held by somebody else, it was not changed."""

OUTSIDE, GARBAGE, TICKET = range(1, 4)
"""Reasons of a goodbye."""


class TcpOffer(msgspec.Struct, frozen=True, array_like=True):
    """Where the pool listens."""

    host: str
    port: int


class TcpProposal(msgspec.Struct, frozen=True, array_like=True):
    streams: int


class TcpAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A ticket: the right to so many streams as were proposed, soon."""

    number: int
    secret: bytes


def head_bytes(length: int) -> int:
    """How long the head is that goes before ``length`` bytes of a reply."""
    return _HEAD_BYTES_MIN + -(_HEAD_BYTES_MIN + length) % ALIGNMENT


def reply_head(length: int) -> struct.Struct:
    """What goes before ``length`` bytes of a reply."""
    return REPLY_HEADS[head_bytes(length) - _HEAD_BYTES_MIN]


def goodbye_error(reason: int) -> KVCommError:
    """What a goodbye means to the client that gets it."""
    if reason == OUTSIDE:
        return Refused("the pool says that the bytes asked for are not in its region")
    if reason == TICKET:
        return Refused("the pool does not know the ticket, or it is used up or too old")
    return Corrupt(f"the pool cannot read our requests (reason {reason})")
