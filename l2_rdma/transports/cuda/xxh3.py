"""xxh3-64 as CUDA source: the payload checksum of every block header, computed where the payload is.

Theory of operation.  xxh3-64 (Collet, xxHash specification, "XXH3 algorithm overview", inputs over 240 bytes)
keeps eight 64-bit accumulators.  It walks blocks of 1024 bytes, 16 stripes of 64 bytes each; a stripe *adds*
to the accumulators, and after each block they are *scrambled*.  Additions commute, so the sum that a block
adds does not depend on what came before it:

1. ``stripe_sums``: eight sums for each whole block of every payload, all in parallel, four threads a block.
   This is the part that reads the payload, at memory speed.
2. ``digests``: one warp a payload walks the sums, ``acc = scramble(acc + sum)``, a step for 1024 bytes; adds
   the stripes of the last, partial block; merges.  The steps depend on each other, the payloads do not.

Why the real digest and not another one that is easier in parallel: a copy's header is checked on every path,
on hosts and on GPUs, against one number.  A second digest would have to be made by every writer and carried
by every copy, and a block that came from the network could not be verified on the GPU without trusting the
host that it passed through.

The source is plain enough for a C++ compiler: tests build it for the host and compare it with ``xxhash``.
"""

from __future__ import annotations

import struct

LONG_BYTES_MIN = 241
"""Shorter inputs are hashed by another algorithm, which is not here: payloads are never so short on a GPU."""
BLOCK_BYTES = 1024
LANES = 8
POINTER_ALIGNMENT = 16
"""Of a payload: it is loaded 16 bytes at a time."""
SUMS_THREADS = 256
SUMS_BLOCKS_PER_GROUP = SUMS_THREADS // 4

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_SCRAMBLE_AT = 192 - 64
_LAST_STRIPE_AT = 192 - 64 - 7
_MERGE_AT = 11


def _words(begin: int, count: int) -> str:
    """64-bit words of the secret, as C initialisers."""
    return ", ".join(f"{word:#x}ull" for word in struct.unpack_from(f"<{count}Q", _SECRET, begin))


SOURCE = (
    """
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

struct Payload { u64 address; u64 length; u64 first_sum; };  // first_sum: index of its first block's sums
struct alignas(16) Pair { u64 low, high; };

#define SECRET_WORDS """
    + _words(0, 24)
    + """
#define SCRAMBLE_WORDS """
    + _words(_SCRAMBLE_AT, 8)
    + """
#define LAST_WORDS """
    + _words(_LAST_STRIPE_AT, 8)
    + """
#define MERGE_WORDS """
    + _words(_MERGE_AT, 8)
    + """

static __device__ __forceinline__ u64 product(u64 keyed) { return (keyed & 0xffffffffull) * (keyed >> 32); }

static __device__ __forceinline__ u64 scrambled(u64 acc, u64 secret) {
    return (acc ^ (acc >> 47) ^ secret) * 0x9E3779B1ull;
}

// What one stripe adds to the lanes 2q and 2q+1.
static __device__ __forceinline__ void add_stripe(Pair &acc, Pair data, u64 low_secret, u64 high_secret) {
    acc.low += data.high + product(data.low ^ low_secret);
    acc.high += data.low + product(data.high ^ high_secret);
}

static __device__ __forceinline__ u64 whole_blocks(u64 length) { return (length - 1) / 1024; }

static __device__ __forceinline__ u64 load_unaligned(const u8 *from) {
    u64 word = 0;
    for (int byte = 0; byte < 8; ++byte) word |= (u64)from[byte] << (8 * byte);
    return word;
}

// The sums of block `block` that quarter q (lanes 2q, 2q+1) is responsible for.
static __device__ __forceinline__ Pair block_sum(const u8 *block, int quarter, const u64 *secret) {
    const Pair *stripes = (const Pair *)block + quarter;
    Pair data[16];
#pragma unroll
    for (int n = 0; n < 16; ++n) data[n] = stripes[4 * n];
    Pair sum = {0, 0};
#pragma unroll
    for (int n = 0; n < 16; ++n) add_stripe(sum, data[n], secret[n], secret[n + 1]);
    return sum;
}

static __device__ __forceinline__ u64 initial(int lane) {
    const u64 words[8] = {0xC2B2AE3Dull, 0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
                          0x85EBCA77C2B2AE63ull, 0x85EBCA77ull, 0x27D4EB2F165667C5ull, 0x9E3779B1ull};
    return words[lane];
}

// One lane's way through the sums of all whole blocks: the serial part.  A step takes some 30 cycles, memory
// more than ten times as long to answer: so the next 32 sums are on their way while these are taken.
static __device__ __forceinline__ u64 walk(u64 acc, const u64 *sums, u64 blocks, u64 secret) {
    u64 at = 0;
    u64 ahead[32];
    if (blocks >= 32) {
#pragma unroll
        for (int n = 0; n < 32; ++n) ahead[n] = sums[8 * n];
        for (; at + 64 <= blocks; at += 32) {
            u64 next[32];
#pragma unroll
            for (int n = 0; n < 32; ++n) next[n] = sums[8 * (at + 32 + n)];
#pragma unroll
            for (int n = 0; n < 32; ++n) acc = scrambled(acc + ahead[n], secret);
#pragma unroll
            for (int n = 0; n < 32; ++n) ahead[n] = next[n];
        }
#pragma unroll
        for (int n = 0; n < 32; ++n) acc = scrambled(acc + ahead[n], secret);
        at += 32;
    }
    for (; at < blocks; ++at) acc = scrambled(acc + sums[8 * at], secret);
    return acc;
}

// What the last, partial block and the last stripe (which may overlap it) add to one lane.
static __device__ __forceinline__ u64 tail(u64 acc, const u8 *payload, u64 length, int lane) {
    const u64 secret[24] = {SECRET_WORDS};
    const u64 last[8] = {LAST_WORDS};
    const u64 done = whole_blocks(length) * 1024;
    const int stripes = (int)((length - 1 - done) / 64);
    for (int n = 0; n < stripes; ++n) {
        const u8 *stripe = payload + done + 64 * n;
        acc += load_unaligned(stripe + 8 * (lane ^ 1));
        acc += product(load_unaligned(stripe + 8 * lane) ^ secret[n + lane]);
    }
    const u8 *stripe = payload + length - 64;
    acc += load_unaligned(stripe + 8 * (lane ^ 1));
    return acc + product(load_unaligned(stripe + 8 * lane) ^ last[lane]);
}

static __device__ __forceinline__ u64 folded(u64 left, u64 right) {
    return (left * right) ^ HIGH_PRODUCT(left, right);
}

static __device__ __forceinline__ u64 merged(const u64 *acc, u64 length) {
    const u64 secret[8] = {MERGE_WORDS};
    u64 hash = length * 0x9E3779B185EBCA87ull;
    for (int n = 0; n < 8; n += 2) hash += folded(acc[n] ^ secret[n], acc[n + 1] ^ secret[n + 1]);
    hash = (hash ^ (hash >> 37)) * 0x165667919E3779F9ull;
    return hash ^ (hash >> 32);
}
"""
)
"""Device functions.  ``HIGH_PRODUCT(a, b)`` = high half of the 128-bit product, to be defined before."""

KERNELS = """
extern "C" __global__ void __launch_bounds__(256, 2) stripe_sums(const Payload *payloads, Pair *sums) {
    const Payload payload = payloads[blockIdx.y];
    const u64 blocks = whole_blocks(payload.length);
    const int quarter = threadIdx.x & 3;
    const u64 words[24] = {SECRET_WORDS};
    __shared__ u64 shared_words[24];
    if (threadIdx.x < 24) shared_words[threadIdx.x] = words[threadIdx.x];
    __syncthreads();
    u64 secret[17];
#pragma unroll
    for (int n = 0; n < 17; ++n) secret[n] = shared_words[2 * quarter + n];
    const u64 step = (u64)gridDim.x * 64;
    for (u64 block = (u64)blockIdx.x * 64 + (threadIdx.x >> 2); block < blocks; block += step)
        sums[(payload.first_sum + block) * 4 + quarter] =
            block_sum((const u8 *)payload.address + block * 1024, quarter, secret);
}

extern "C" __global__ void __launch_bounds__(32)
digests(const Payload *payloads, const u64 *sums, u64 *results) {
    const Payload payload = payloads[blockIdx.x];
    const int lane = threadIdx.x;
    __shared__ u64 acc[8];
    if (lane < 8) {
        const u64 scramble[8] = {SCRAMBLE_WORDS};
        u64 mine = walk(initial(lane), sums + payload.first_sum * 8 + lane, whole_blocks(payload.length),
                        scramble[lane]);
        acc[lane] = tail(mine, (const u8 *)payload.address, payload.length, lane);
    }
    __syncwarp();
    if (lane == 0) results[blockIdx.x] = merged(acc, payload.length);
}
"""

CUDA_SOURCE = "#define HIGH_PRODUCT(a, b) __umul64hi(a, b)\n" + SOURCE + KERNELS
