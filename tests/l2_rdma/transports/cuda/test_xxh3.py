"""The digest kernels' device functions, built for the host, against xxhash; and the kernels, on a GPU."""

import ctypes
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from l2_rdma.transports.cuda import xxh3
from tests.l2_rdma.transports.cuda.conftest import upload

_HOST = """
#define __device__
#define __forceinline__ inline
#define HIGH_PRODUCT(a, b) ((unsigned long long)(((unsigned __int128)(a) * (b)) >> 64))
"""
_DIGEST = """
extern "C" u64 digest(const u8 *payload, u64 length, u64 *sums) {
    const u64 secret[24] = {SECRET_WORDS};
    const u64 scramble[8] = {SCRAMBLE_WORDS};
    const u64 blocks = whole_blocks(length);
    for (u64 block = 0; block < blocks; ++block)
        for (int quarter = 0; quarter < 4; ++quarter)
            ((Pair *)sums)[block * 4 + quarter] =
                block_sum(payload + block * 1024, quarter, secret + 2 * quarter);
    u64 acc[8];
    for (int lane = 0; lane < 8; ++lane)
        acc[lane] = tail(walk(initial(lane), sums + lane, blocks, scramble[lane]), payload, length, lane);
    return merged(acc, length);
}
"""
# Around every boundary: shortest, stripe, block, the unrolled walk's 32 and 64 blocks, and odd lengths.
LENGTHS = [241, 255, 256, 257, 320, 1023, 1024, 1025, 1087, 1088, 1089, 2048, 2049, 16 << 10, (16 << 10) + 1]
LENGTHS += [
    (17 << 10) + 63,
    32 << 10,
    (32 << 10) + 1,
    (33 << 10) + 8,
    64 << 10,
    (64 << 10) + 1,
    (65 << 10) + 9,
]
LENGTHS += [100_003, 1 << 20]


@pytest.fixture(scope="module")
def digest(tmp_path_factory):
    """The source's digest, compiled by the host's C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    directory = tmp_path_factory.mktemp("xxh3")
    (directory / "digest.cpp").write_text(_HOST + xxh3.SOURCE + _DIGEST)
    command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "digest.so", "digest.cpp"]
    subprocess.run(command, cwd=directory, check=True, timeout=60)
    function = ctypes.CDLL(str(directory / "digest.so")).digest
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]

    def of(data: bytes) -> int:
        space = (ctypes.c_ubyte * (len(data) + 32))()
        address = -(-ctypes.addressof(space) // 16) * 16
        ctypes.memmove(address, data, len(data))
        sums = (ctypes.c_uint64 * (8 * (len(data) // 1024 + 1) + 2))()
        return function(address, len(data), -(-ctypes.addressof(sums) // 16) * 16)

    return of


def bytes_of(length: int) -> bytes:
    """Every byte depends on its place."""
    return b"".join(xxh3_64_intdigest(b"%d" % at).to_bytes(8, "little") for at in range(length // 8 + 1))[
        :length
    ]


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_the_source_computes_xxh3_64(digest, length):
    data = bytes_of(length)

    assert digest(data) == xxh3_64_intdigest(data)


@pytest.mark.slow
def test_one_flipped_bit_anywhere_changes_it(digest):
    data = bytearray(bytes_of(2500))
    whole = digest(bytes(data))
    for at in range(0, 2500, 7):
        data[at] ^= 1 << at % 8
        assert digest(bytes(data)) != whole
        data[at] ^= 1 << at % 8


@pytest.mark.slow
@given(st.binary(min_size=241, max_size=5000))
def test_any_bytes(digest, data):
    assert digest(data) == xxh3_64_intdigest(data)


@pytest.mark.gpu
def test_the_kernels_compute_xxh3_64_of_many_payloads_at_once(cuda_gpu):
    payloads = [bytes_of(length) for length in LENGTHS]
    buffers = [upload(cuda_gpu, payload) for payload in payloads]

    assert cuda_gpu.digests([(each.pointer, each.nbytes) for each in buffers]) == [
        xxh3_64_intdigest(payload) for payload in payloads
    ]
    for buffer in buffers:
        cuda_gpu.free(buffer.pointer)


@pytest.mark.gpu
def test_more_payloads_than_a_launch_takes(cuda_gpu):
    data = bytes_of(64 << 10)
    buffer = upload(cuda_gpu, data)
    extents = [(buffer.pointer + 16 * number, 1024 + number) for number in range(3000)] * 2

    found = cuda_gpu.digests(extents)

    at = buffer.pointer
    assert found == [xxh3_64_intdigest(data[begin - at : begin - at + length]) for begin, length in extents]
    cuda_gpu.free(buffer.pointer)


@pytest.mark.gpu
@pytest.mark.parametrize(("shift", "length"), [(8, 1024), (0, 240)])
def test_what_the_kernels_cannot_do_is_refused(cuda_gpu, shift, length):
    buffer = upload(cuda_gpu, bytes(2048))

    with pytest.raises(ValueError, match="multiple of 16 and at least 241"):
        cuda_gpu.digests([(buffer.pointer + shift, length)])
    cuda_gpu.free(buffer.pointer)
