"""Pieces never overlap, and come back."""

from hypothesis import given
from hypothesis import strategies as st

from l2_rdma.transports.verbs.bounce import PIECES, Arena, Piece

SMALL = ((8, 4), (64, 3), (256, 2))


def test_its_size():
    arena = Arena()
    assert arena.arena_bytes == sum(size * count for size, count in PIECES) < 8 << 20
    assert arena.piece_bytes_max == 256 << 10


@given(st.lists(st.one_of(st.integers(1, 256), st.none()), max_size=40))
def test_pieces_are_apart_and_large_enough(steps):
    arena = Arena(SMALL)
    out: list[Piece] = []
    for length in steps:
        if length is None:
            if out:
                arena.give_back(out.pop(0))
            continue
        piece = arena.take(length)
        size = next(size for size, _ in SMALL if length <= size)
        if piece is None:
            assert sum(each.size == size for each in out) == dict(SMALL)[size]
            continue
        assert piece.size == size
        assert piece.offset % size == 0
        assert piece.offset + size <= arena.arena_bytes
        for other in out:
            assert piece.offset + piece.size <= other.offset or other.offset + other.size <= piece.offset
        out.append(piece)
    assert arena.in_use == sum(each.size for each in out)
