"""The framing: whatever the network cuts the bytes into, the same frames come out, and nothing else is taken
for one."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvcomm.errors import Corrupt, TooLarge
from kvcomm.wire.frames import MAGIC, PREFIX_BYTES, STAGING_BYTES, Frame, FrameReader, discard, encode_frame
from kvcomm.wire.messages import BlockCopies, BlockGet, Done, Message, Ping


class Sent(NamedTuple):
    request: int
    message: Message
    payload: bytes


def wire_bytes(sent: Sent) -> bytes:
    return b"".join(bytes(piece) for piece in encode_frame(sent.request, sent.message, [sent.payload]))


def feed(reader: FrameReader, stream: bytes, cuts: list[int]) -> list[Frame]:
    """Receive ``stream`` in reads of at most ``cuts`` bytes, round and round."""
    frames: list[Frame] = []
    begin = turn = 0
    while begin < len(stream):
        buffer = reader.buffer()
        take = min(len(buffer), cuts[turn % len(cuts)], len(stream) - begin)
        buffer[:take] = stream[begin : begin + take]
        frames += reader.advance(take)
        begin, turn = begin + take, turn + 1
    return frames


MESSAGE = st.one_of(
    st.builds(Ping),
    st.builds(BlockGet, st.integers(0, 2**40), st.lists(st.binary(max_size=40), max_size=6)),
    st.builds(BlockCopies, st.lists(st.integers(0, 2**32), max_size=5)),
)
SENT = st.builds(Sent, st.integers(0, 2**64 - 1), MESSAGE, st.binary(max_size=3_000))


@given(sent=st.lists(SENT, max_size=8), cuts=st.lists(st.integers(1, 900), min_size=1, max_size=12))
def test_any_cutting_gives_the_same_frames(sent: list[Sent], cuts: list[int]) -> None:
    frames = feed(reader := FrameReader(), b"".join(map(wire_bytes, sent)), cuts)
    assert [Sent(f.request, f.message, b"".join(f.payload)) for f in frames] == sent
    assert reader.idle


@given(stamp=st.integers(0, 2**30 - 1), payload=st.binary(max_size=3_000), request=st.integers(0, 2**64 - 1))
def test_a_stamp_travels_beside_the_size(stamp: int, payload: bytes, request: int) -> None:
    pieces = encode_frame(request, Ping(), [payload], stamp)
    [frame] = feed(FrameReader(), b"".join(bytes(piece) for piece in pieces), [500])
    assert (frame.request, frame.stamp, b"".join(frame.payload)) == (request, stamp, payload)
    assert bytes(encode_frame(request, Ping(), [payload], 0)[0]) == bytes(
        encode_frame(request, Ping(), [payload])[0]
    )


@given(payload=st.binary(min_size=1, max_size=4_000), splits=st.lists(st.integers(0, 4_000), max_size=5))
def test_a_payload_lands_in_the_pieces_that_the_sink_names(payload: bytes, splits: list[int]) -> None:
    edges = [0, *sorted(min(split, len(payload)) for split in splits), len(payload)]
    pieces = [memoryview(bytearray(end - begin)) for begin, end in pairwise(edges)]
    reader = FrameReader(lambda request, message, payload_bytes: pieces)
    feed(reader, wire_bytes(Sent(1, Done(), payload)), [700])
    assert b"".join(pieces) == payload


def test_the_rest_of_a_payload_is_received_without_a_copy_in_between() -> None:
    destination = memoryview(bytearray(1 << 20))
    reader = FrameReader(lambda request, message, payload_bytes: [destination])
    stream = wire_bytes(Sent(1, Done(), bytes(1 << 20)))
    reader.buffer()[:100] = stream[:100]
    assert reader.advance(100) == []
    assert reader.receiving is not None
    assert len(reader.buffer()) == len(stream) - 100
    assert reader.buffer().obj is destination.obj


def test_a_message_larger_than_staging_is_received() -> None:
    message = BlockGet(0, [bytes(1_000)] * 200)
    frames = feed(
        FrameReader(), wire_bytes(Sent(1, message, b"")) + wire_bytes(Sent(2, Ping(), b"")), [50_000]
    )
    assert [frame.message for frame in frames] == [message, Ping()]
    assert len(wire_bytes(Sent(1, message, b""))) > 2 * STAGING_BYTES


def test_a_large_message_that_drips_in_costs_no_copy_a_drop() -> None:
    """Else a peer that sends 16 MiB byte by byte has the server copy them once a byte."""
    stream = wire_bytes(Sent(1, BlockGet(0, [bytes(1 << 20)] * 8), b""))
    reader = FrameReader()
    assert feed(reader, stream[:-10], [1 << 20]) == []
    tracemalloc.start()
    try:
        assert feed(reader, stream[-10:-1], [1]) == []
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100_000
    assert len(feed(reader, stream[-1:], [1])) == 1


@pytest.mark.parametrize("at", range(PREFIX_BYTES + 4))
def test_no_frame_comes_of_a_damaged_prefix_or_message(at: int) -> None:
    """A longer length that is within its bound is noticed when so many bytes are there: 4 MiB at most
    here."""
    stream = bytearray(wire_bytes(Sent(1, Ping(), b"")) + bytes(5 << 20))
    stream[at] ^= 0x40
    with pytest.raises((Corrupt, TooLarge)):
        feed(FrameReader(), bytes(stream), [len(stream)])


def test_garbage_is_refused_at_once() -> None:
    with pytest.raises(Corrupt, match="not a version 1 frame"):
        feed(FrameReader(), b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", [64])


def test_an_unknown_message_is_corrupt() -> None:
    stream = bytearray(wire_bytes(Sent(1, Ping(), b"")))
    assert b"Ping" in stream
    body = bytes(stream[PREFIX_BYTES:]).replace(b"Ping", b"Pinq")
    checksum = xxh3_64_digest(bytes(stream[:24]) + body)[::-1]
    with pytest.raises(Corrupt, match="cannot be decoded"):
        feed(FrameReader(), bytes(stream[:24]) + checksum + body, [999])


def test_a_message_that_nests_without_end_is_corrupt() -> None:
    """Behind its last part, where a later version might have one more."""
    stream = wire_bytes(Sent(1, Ping(), b""))
    plain = stream[PREFIX_BYTES:]
    body = bytes([plain[0] + 1]) + plain[1:] + b"\x91" * 100_000 + b"\xc0"
    head = stream[:4] + len(body).to_bytes(4, "little") + stream[8:24]
    checksum = xxh3_64_digest(head + body)[::-1]
    with pytest.raises(Corrupt, match="cannot be decoded"):
        feed(FrameReader(), head + checksum + body, [1 << 20])


def test_bounds_are_checked_before_anything_is_allocated() -> None:
    announced = wire_bytes(Sent(1, Done(), bytes(101)))
    with pytest.raises(TooLarge):
        feed(FrameReader(payload_bytes_max=100), announced, [999])
    with pytest.raises(TooLarge):
        feed(FrameReader(message_bytes_max=3), announced, [999])
    assert announced.startswith(MAGIC)


def test_a_payload_that_does_not_fit_its_destination_is_corrupt() -> None:
    reader = FrameReader(lambda request, message, payload_bytes: [memoryview(bytearray(5))])
    with pytest.raises(Corrupt, match="does not fit"):
        feed(reader, wire_bytes(Sent(1, Done(), b"123456")), [999])


def test_a_discarded_payload_no_longer_touches_its_destination() -> None:
    destination = memoryview(bytearray(300_000))
    reader = FrameReader(lambda request, message, payload_bytes: [destination])
    stream = wire_bytes(Sent(5, Done(), b"x" * 300_000)) + wire_bytes(Sent(6, Ping(), b""))
    assert feed(reader, stream[:1_000], [1_000]) == []
    reader.discard(4)
    reader.discard(5)
    before = bytes(destination)
    frames = feed(reader, stream[1_000:], [4_000])
    assert [frame.request for frame in frames] == [5, 6]
    assert bytes(destination) == before
    assert before.count(b"x") < 1_000


@given(payload_bytes=st.integers(0, 5 << 20))
def test_the_bin_is_as_large_as_needed_and_takes_little_memory(payload_bytes: int) -> None:
    pieces = discard(payload_bytes)
    assert sum(piece.nbytes for piece in pieces) == payload_bytes
    assert all(piece.nbytes for piece in pieces)
    assert len({id(piece.obj) for piece in pieces}) <= 1


def test_an_oversized_message_is_not_sent() -> None:
    with pytest.raises(TooLarge, match="split the batch"):
        encode_frame(1, BlockGet(0, [bytes(1 << 20)] * 17))


def test_payloads_of_any_format_count_in_bytes() -> None:
    view = memoryview(bytearray(64)).cast("Q")
    pieces = encode_frame(1, Done(), [view, b""])
    assert pieces[1] is view
    assert len(pieces) == 2
