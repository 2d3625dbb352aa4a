"""GPU pools: fetches, layout kernels, host copies and digests on real GPUs, each beside a plain copy.

    python -m bench.gpu_transport --json out.json [--pool-gpu 1] [--markdown out.md]

A pool process keeps its blocks on GPU ``--pool-gpu``; this process reads from GPU 0.  With 1 instead of 0 the
bytes cross NVLink (or PCIe).  Every figure is the median of interleaved rounds, wall-clock with the work
over, and stands beside the plain copy of the same bytes over the same way, called from Python the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcomm.block import NO_PARENT, ROOT_LINEAGE, BlockHeader, BlockKey, Incarnation
from kvcomm.credentials import Credentials
from kvcomm.namespace import NamespaceId
from kvcomm.rpc.session import Identity
from l2_rdma.pool import PoolOptions, RunningPool, run_pool
from l2_rdma.transports.cuda.attached import AttachedPool
from l2_rdma.transports.cuda.gpu import DeviceBuffer
from l2_rdma.transports.cuda.runtime import CudaGpu, dma_buf_support, open_gpu
from l2_rdma.transports.cuda.transport import CudaTransport
from l2_rdma.transports.port import Extent, Operation

MIB = 1 << 20
SIZES_MIB = (1, 2, 8, 64, 256)
SET_BYTES = 1 << 30
"""Blocks of each size there are, so that no cache holds them (the L2 of an H200 is 60 MB)."""
ROUNDS = 15
REPEATS = 4
"""Launches between two events: the GPU works on one while Python prepares the next."""
CREDENTIALS = Credentials(bytes(range(32)))
TENANT = "bench"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", type=Path)
    options.add_argument("--markdown", type=Path)
    options.add_argument("--pool-gpu", type=int, default=0)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--serve", nargs=2, metavar=("DIRECTORY", "GPU"), help="be the pool")
    chosen = options.parse_args()
    if chosen.serve:
        asyncio.run(serve(Path(chosen.serve[0]), int(chosen.serve[1])))
        return
    results = measure(chosen.pool_gpu, chosen.rounds)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    if chosen.markdown:
        chosen.markdown.write_text(text)
    print(text)
    if not all_correct(results):
        raise SystemExit("somewhere the bytes were wrong: see `correct` in the JSON")


def all_correct(results: Any) -> bool:
    """Whether no part of them says that its bytes were wrong."""
    if isinstance(results, dict):
        return bool(results.get("correct", True)) and all(map(all_correct, results.values()))
    return not isinstance(results, list) or all(map(all_correct, results))


async def serve(directory: Path, ordinal: int) -> None:
    """Until standard input ends."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stop.set)

    def ready(running: RunningPool) -> None:
        print(running.addresses[0], flush=True)

    await run_pool(
        node="pool-0",
        instance="bench",
        incarnation=Incarnation(3),
        credentials=CREDENTIALS,
        tenant=TENANT,
        addresses=[f"unix://{directory}/pool.sock"],
        options=PoolOptions(
            20 << 30,
            slab_bytes=257 * MIB,
            transports=("cuda",),
            gpu=open_gpu(ordinal),
            reservation_ttl_s=60.0,
        ),
        stop=stop,
        ready=ready,
    )


def measure(pool_gpu: int, rounds: int) -> dict[str, Any]:
    gpu = open_gpu(0)
    results: dict[str, Any] = {"machine": machine(gpu, pool_gpu), "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        server = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_transport", "--serve", name, str(pool_gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            identity = Identity(CREDENTIALS.token(TENANT), Incarnation(9))
            transport = CudaTransport(gpu)
            pool = AttachedPool.attach(address, identity, transport, _soon(), pin_slots=2000)
            results["fetch"] = [fetching(gpu, pool, transport, pool_gpu, size, rounds) for size in SIZES_MIB]
            results["host"] = [to_host(gpu, pool, transport, size, rounds) for size in (2, 8, 64, 256)]
            results["digest"] = digests(gpu, pool, rounds)
            results["paging"] = paging(gpu, pool, rounds)
            results["overlap"] = overlap(gpu, pool, rounds)
            results["dma_buf"] = dma_buf_support(gpu, gpu.allocate(2 * MIB), 2 * MIB)
            results["counters"] = {
                "corrupt": pool.reader.counters.corrupt, "hits": pool.reader.counters.hits,
                "misses": pool.reader.counters.misses, "verified": pool.reader.counters.payloads_verified,
            }  # fmt: skip
            pool.close()
        finally:
            try:
                server.communicate("", timeout=30)  # the end of its input is the end of it
            finally:
                server.kill()
    return results


def machine(gpu: CudaGpu, pool_gpu: int) -> dict[str, Any]:
    count = gpu.call("cudaGetDeviceCount")
    found = {
        "gpu": gpu.name,
        "gpus": count,
        "pool_gpu": pool_gpu,
        "driver": gpu.call("cudaDriverGetVersion"),
        "runtime": gpu.call("cudaRuntimeGetVersion"),
        "python": platform.python_version(),
    }
    if count > 1:
        found["peer_access"] = bool(gpu.call("cudaDeviceCanAccessPeer", 0, 1))
        try:
            topology = subprocess.run(
                ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False
            )
            found["topology"] = topology.stdout.splitlines()[:4]
        except OSError as error:
            found["topology"] = [str(error)]
    return found


def fetching(
    gpu: CudaGpu, pool: AttachedPool, transport: CudaTransport, pool_gpu: int, size_mib: int, rounds: int
) -> dict[str, Any]:
    """Blocks of one size from the pool's GPU to ours: all of a set pipelined, and one at a time."""
    size = size_mib * MIB
    count = max(4, min(64, SET_BYTES // size))
    keys, headers = stored(gpu, pool, size, count)
    targets = [DeviceBuffer(gpu.allocate(size), size) for _ in range(count)]
    source_gpu = gpu if pool_gpu == 0 else open_gpu(pool_gpu)
    sources = [source_gpu.allocate(size) for _ in range(count)]
    if pool_gpu:
        reach(gpu, pool_gpu)
    stream = gpu.stream()
    begun = time.perf_counter()
    assert all(pool.fetch(keys, targets, _soon())), "every block is there"
    first_s = time.perf_counter() - begun
    correct = download(gpu, targets[-1]) == payload_bytes(keys[-1], size)
    extents = [
        Extent(offset_of(pool, key) + 256, header.payload_bytes)
        for key, header in zip(keys, headers, strict=True)
    ]

    def plain(some: int) -> None:
        for target, source in zip(targets[:some], sources, strict=False):
            stream.copy(target.pointer, source, size)
        stream.wait()

    def channel(some: int) -> None:
        finish(transport, pool.channel.read(extents[:some], targets[:some], _soon()))

    def fetch(some: int) -> None:
        assert all(pool.fetch(keys[:some], targets[:some], _soon())), "every block is there"

    row: dict[str, Any] = {"size_mib": size_mib, "count": count, "correct": correct}
    row["first_fetch_verified_gbps"] = count * size / first_s / 1e9
    for label, some in (("pipelined", count), ("single", 1)):
        taken = interleaved(
            {each.__name__: partial(each, some) for each in (plain, channel, fetch)},
            rounds,
        )
        row[label] = {
            "us": {name: 1e6 * seconds for name, seconds in taken.items()},
            "gbps": {name: some * size / seconds / 1e9 for name, seconds in taken.items()},
            "channel_of_plain": taken["plain"] / taken["channel"],
            "fetch_of_plain": taken["plain"] / taken["fetch"],
        }
    stream.close()
    for source in sources:
        source_gpu.free(source)
    for target in targets:
        gpu.free(target.pointer)
    return row


def finish(transport: CudaTransport, operations: Sequence[Operation]) -> None:
    """What has failed took no time; it is no figure."""
    transport.wait(operations)
    for operation in operations:
        if operation.error is not None:
            raise operation.error


def reach(gpu: CudaGpu, other: int) -> None:
    """Let copies of ours go straight to another GPU; opening the pool's memory may have done it already."""
    from cuda.bindings import runtime

    gpu.use()
    (status,) = runtime.cudaDeviceEnablePeerAccess(other, 0)
    assert int(status) in (0, int(runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)), status
    runtime.cudaGetLastError()


def to_host(
    gpu: CudaGpu, pool: AttachedPool, transport: CudaTransport, size_mib: int, rounds: int
) -> dict[str, Any]:
    """Extents between the pool's slots and registered host memory, beside CUDA's own pinned memory: 256 MiB
    of
    them under way at once, and one at a time."""
    size = size_mib * MIB
    count = 256 // size_mib
    keys, _ = stored(gpu, pool, size, count)
    extents = [Extent(offset_of(pool, key) + 256, size) for key in keys]
    mine = memoryview(bytearray(count * size))
    parts = [mine[number * size : (number + 1) * size] for number in range(count)]
    registration = transport.register(mine)
    pinned = int(gpu.call("cudaHostAlloc", count * size, 1))
    stream = gpu.stream()
    region = pool.channel.region

    def plain(some: int, *, read: bool) -> None:
        for number, extent in enumerate(extents[:some]):
            here, there = pinned + number * size, region.address(extent.offset)
            stream.copy(here if read else there, there if read else here, size)
        stream.wait()

    def read(some: int) -> None:
        finish(transport, pool.channel.read(extents[:some], parts[:some], _soon()))

    def write(some: int) -> None:
        soon = _soon()
        finish(
            transport,
            [
                pool.channel.write(extent, part, soon)
                for extent, part in zip(extents[:some], parts, strict=False)
            ],
        )

    row: dict[str, Any] = {"size_mib": size_mib, "count": count, "pinned": registration.pinned}
    for label, some in (("pipelined", count), ("single", 1)):
        calls: dict[str, Callable[[], Any]] = {
            "plain_read": partial(plain, some, read=True),
            "read": partial(read, some),
            "plain_write": partial(plain, some, read=False),
            "write": partial(write, some),
        }
        taken = interleaved(calls, rounds)
        row[label] = {
            "gbps": {name: some * size / seconds / 1e9 for name, seconds in taken.items()},
            "read_of_plain": taken["plain_read"] / taken["read"],
            "write_of_plain": taken["plain_write"] / taken["write"],
        }
    registration.close()
    gpu.call("cudaFreeHost", pinned)
    unpinned = interleaved({"read": partial(read, count)}, 3)
    row["unregistered_read_gbps"] = count * size / unpinned["read"] / 1e9
    return row


def digests(gpu: CudaGpu, pool: AttachedPool, rounds: int) -> list[dict[str, Any]]:
    rows = []
    base = gpu.allocate(SET_BYTES)
    data = memoryview(payload_bytes(BlockKey(bytes(32)), 64 * MIB))
    stream = gpu.stream()
    for at in range(0, SET_BYTES, data.nbytes):
        upload(gpu, base + at, data)
    on_host = interleaved({"host": lambda: xxh3_64_intdigest(data)}, 3)["host"]
    for size_mib, count in ((1, 1), (2, 1), (2, 16), (2, 128), (2, 512), (64, 1), (64, 16)):
        size = size_mib * MIB
        extents = [(base + number * size, size) for number in range(count)]
        expected = xxh3_64_intdigest(data[:size])
        correct = gpu.digests(extents)[0] == expected
        seconds = interleaved({"gpu": lambda: gpu.digests(extents)}, rounds)["gpu"]  # noqa: B023
        rows.append(
            {
                "size_mib": size_mib, "count": count, "correct": correct, "us": 1e6 * seconds,
                "gbps": count * size / seconds / 1e9, "host_gbps": data.nbytes / on_host / 1e9,
            }
        )  # fmt: skip
    stream.close()
    gpu.free(base)
    return rows


def paging(gpu: CudaGpu, pool: AttachedPool, rounds: int) -> dict[str, Any]:
    """The layout kernels beside a device copy; blocks of a model with 32 layers, 8 KV heads of 128: 2 MiB."""
    import torch

    from kvcomm.engines.kernels import paging as kernels
    from kvcomm.engines.kernels.layouts import PagedLayout, sequence_layout, vllm_layout

    torch.cuda.set_device(0)
    layers, heads, tokens, dim, blocks = 32, 8, 16, 128, 512
    size = layers * 2 * heads * tokens * dim * 2
    torch.manual_seed(1)
    pages = torch.randperm(blocks, device="cuda").reshape(blocks, 1)
    payloads = torch.randint(0, 256, (blocks, size), dtype=torch.uint8, device="cuda")
    other = torch.empty_like(payloads)

    def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of a call among several that follow each other, by the GPU's clock."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for each in calls.values():
            each()
        for _ in range(rounds):
            for name, call in calls.items():
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                begin.record()
                for _ in range(REPEATS):
                    call()
                end.record()
                torch.cuda.synchronize()
                taken[name].append(begin.elapsed_time(end) / 1e3 / REPEATS)
        return {name: statistics.median(times) for name, times in taken.items()}

    def vllm(axes: str, dtype: torch.dtype = torch.bfloat16, width: int = dim) -> PagedLayout:
        sizes = {"K": 2, "P": blocks, "T": tokens, "H": heads, "D": width}
        shape = [sizes[axis] for axis in axes]
        return vllm_layout([torch.empty(shape, dtype=dtype, device="cuda") for _ in range(layers)], axes=axes)

    def sequence() -> PagedLayout:
        shape = (layers, 2, 1, heads, blocks * tokens, dim)
        slab = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        return sequence_layout([(slab[layer, 0], slab[layer, 1]) for layer in range(layers)], tokens)

    cases = {
        "vLLM [2, page, token, head, dim] bf16": lambda: vllm("KPTHD"),
        "vLLM [page, 2, token, head, dim] bf16": lambda: vllm("PKTHD"),
        "vLLM [page, 2, head, token, dim] bf16": lambda: vllm("PKHTD"),
        "vLLM [2, page, token, head, dim] fp8, dim 256": lambda: vllm("KPTHD", torch.float8_e4m3fn, 256),
        "transformers [1, head, token, dim] bf16": sequence,
    }
    rows = []
    for name, make in cases.items():
        layout = make()
        kernels.scatter(layout, pages, payloads)
        other.fill_(0xAA)
        kernels.gather(layout, pages, other)
        correct = bool(torch.equal(other, payloads))
        plain = torch.zeros_like(payloads)
        kernels.gather_plain(layout, pages, plain)
        correct = correct and bool(torch.equal(plain, payloads))
        del plain
        taken = timed(
            {
                "copy": lambda: other.copy_(payloads),
                "gather": lambda: kernels.gather(layout, pages, other),  # noqa: B023
                "scatter": lambda: kernels.scatter(layout, pages, payloads),  # noqa: B023
            }
        )
        moved = 2 * blocks * size
        rows.append(
            {
                "case": name, "correct": correct, "gib": blocks * size / 2**30,
                "gbps": {each: moved / seconds / 1e9 for each, seconds in taken.items()},
                "gather_of_copy": taken["copy"] / taken["gather"],
                "scatter_of_copy": taken["copy"] / taken["scatter"],
            }
        )  # fmt: skip
        del layout
    small = []
    layout = vllm("KPTHD")

    def finished(call: Callable[..., Any], *arguments: Any) -> None:
        call(*arguments)
        torch.cuda.synchronize()

    for count in (1, 8, 64):
        some, few = pages[:count], payloads[:count]
        taken = interleaved(
            {
                "copy": partial(finished, other[:count].copy_, few),
                "gather": partial(finished, kernels.gather, layout, some, other[:count]),
                "scatter": partial(finished, kernels.scatter, layout, some, few),
            },
            rounds,
        )
        small.append({"blocks": count, "us": {name: 1e6 * seconds for name, seconds in taken.items()}})
    return {"large": rows, "small": small, "fused": fused(gpu, pool, layout, pages, payloads, rounds)}


def fused(
    gpu: CudaGpu, pool: AttachedPool, layout: Any, pages: Any, payloads: Any, rounds: int
) -> dict[str, Any]:
    """From the pool's slots into an engine's pages: straight, and by way of a buffer."""
    import torch

    from kvcomm.engines.kernels import paging as kernels

    count, size = 64, payloads.shape[1]
    keys, _ = stored(gpu, pool, size, count)
    buffers = [DeviceBuffer(payloads[row].data_ptr(), size) for row in range(count)]
    stream = gpu.stream()

    def straight() -> None:
        blocks = pool.view(keys)
        kernels.scatter_from(layout, pages[:count], [block.payload.pointer for block in blocks if block])
        torch.cuda.synchronize()

    def by_buffer() -> None:
        assert all(pool.fetch(keys, buffers, _soon())), "every block is there"
        kernels.scatter(layout, pages[:count], payloads[:count])
        torch.cuda.synchronize()

    def plain() -> None:
        for buffer, block in zip(buffers, views, strict=True):
            assert block is not None
            stream.copy(buffer.pointer, block.payload.pointer, size)
        stream.wait()

    views = pool.view(keys)
    straight()
    again = torch.zeros_like(payloads[:count])
    kernels.gather(layout, pages[:count], again)
    correct = again[7].cpu().numpy().tobytes() == payload_bytes(keys[7], size)
    taken = interleaved({"plain_copy": plain, "straight": straight, "by_buffer": by_buffer}, rounds)
    stream.close()
    return {
        "blocks": count, "correct": correct, "us": {name: 1e6 * seconds for name, seconds in taken.items()},
        "gbps": {name: count * size / seconds / 1e9 for name, seconds in taken.items()},
    }  # fmt: skip


def overlap(gpu: CudaGpu, pool: AttachedPool, rounds: int) -> dict[str, float]:
    """A matrix product on torch's stream and a fetch on ours: each alone, and both at once (us)."""
    import torch

    size, count = 64 * MIB, 16
    keys, _ = stored(gpu, pool, size, count)
    targets = [DeviceBuffer(gpu.allocate(size), size) for _ in range(count)]
    left = torch.randn((8192, 8192), dtype=torch.bfloat16, device="cuda")

    def compute() -> None:
        torch.mm(left, left)
        torch.mm(left, left)

    def computed() -> None:
        compute()
        torch.cuda.synchronize()

    def fetched() -> None:
        assert all(pool.fetch(keys, targets, _soon())), "every block is there"

    def both() -> None:
        compute()
        fetched()
        torch.cuda.synchronize()

    taken = interleaved({"compute": computed, "fetch": fetched, "both": both}, rounds)
    for target in targets:
        gpu.free(target.pointer)
    return {name: 1e6 * seconds for name, seconds in taken.items()}


def stored(
    gpu: CudaGpu, pool: AttachedPool, size: int, count: int
) -> tuple[list[BlockKey], list[BlockHeader]]:
    """Blocks of ``size`` in the pool; the same ones every time."""
    tenant = CREDENTIALS.tenant_digest(TENANT)
    keys = [BlockKey(hashlib.sha256(b"%d of %d" % (number, size)).digest()) for number in range(count)]
    buffer = DeviceBuffer(gpu.allocate(size), size)
    headers = []
    for key in keys:
        data = payload_bytes(key, size)
        header = BlockHeader(
            key=key, parent=NO_PARENT, namespace=NamespaceId(bytes(32)), lineage=ROOT_LINEAGE, tenant=tenant,
            logical_start=0, token_count=16, dtype="bfloat16", codec="raw", payload_bytes=size,
            producer=Incarnation(9), payload_checksum=xxh3_64_intdigest(data),
        )  # fmt: skip
        headers.append(header)
        if not pool.reader.lookup([key])[0]:
            upload(gpu, buffer.pointer, memoryview(data))
            assert pool.put([(header, buffer)], _soon())[0] in ("stored", "present")
    gpu.free(buffer.pointer)
    return keys, headers


def offset_of(pool: AttachedPool, key: BlockKey) -> int:
    """Where a block's copy lies in the region."""
    [there] = pool.view([key])
    assert there is not None, "the block is in the pool"
    region = pool.channel.region
    return region.header.layout.slots_offset + there.payload.pointer - region.slots.pointer - 256


def payload_bytes(key: BlockKey, size: int) -> bytes:
    """Random, another for each key, and cheap to make: one random MiB, turned round by the key."""
    pattern = hashlib.shake_256(b"payload").digest(MIB)
    turn = int.from_bytes(key[:2], "little")
    turned = pattern[turn:] + pattern[:turn]
    return turned * (size // MIB)


def upload(gpu: CudaGpu, pointer: int, data: memoryview) -> None:
    from l2_rdma.copying import address_of

    stream = gpu.stream()
    stream.copy(pointer, address_of(data), data.nbytes)
    stream.close()


def download(gpu: CudaGpu, buffer: DeviceBuffer) -> bytes:
    from l2_rdma.copying import address_of

    data = memoryview(bytearray(buffer.nbytes))
    stream = gpu.stream()
    stream.copy(address_of(data), buffer.pointer, buffer.nbytes)
    stream.close()
    return bytes(data)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, called in turns, another one first each time; twice before, for what is made on
    first use."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    turns = list(calls.items())
    for index in range(rounds):
        first = index % len(turns)
        for name, call in turns[first:] + turns[:first]:
            begun = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in taken.items()}


def markdown(results: dict[str, Any]) -> str:
    where = "another GPU" if results["machine"]["pool_gpu"] else "the same GPU"
    lines = [f"Pool on {where} ({results['machine']['gpu']}); GB/s of payload.", ""]
    lines += ["| block | plain copy | channel read | fetch | fetch of plain | one at a time: plain, fetch |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for row in results["fetch"]:
        many, one = row["pipelined"], row["single"]
        lines.append(
            f"| {row['size_mib']} MiB x {row['count']} | {many['gbps']['plain']:.0f} | "
            f"{many['gbps']['channel']:.0f} | {many['gbps']['fetch']:.0f} | {many['fetch_of_plain']:.2f} | "
            f"{one['us']['plain']:.0f} us, {one['us']['fetch']:.0f} us ({one['fetch_of_plain']:.2f}) |"
        )
    lines += [
        "",
        "| host memory | pinned read | registered read | pinned write | registered write | one at a time |",
    ]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for row in results["host"]:
        many, one = row["pipelined"], row["single"]
        lines.append(
            f"| {row['size_mib']} MiB x {row['count']} | {many['gbps']['plain_read']:.1f} | "
            f"{many['gbps']['read']:.1f} ({many['read_of_plain']:.2f}) | {many['gbps']['plain_write']:.1f} | "
            f"{many['gbps']['write']:.1f} ({many['write_of_plain']:.2f}) | {one['read_of_plain']:.2f} |"
        )
    lines += ["", "| layout (read + written) | device copy | gather | scatter |", "| --- | --- | --- | --- |"]
    for row in results["paging"]["large"]:
        speed = row["gbps"]
        lines.append(
            f"| {row['case']} | {speed['copy']:.0f} | {speed['gather']:.0f} ({row['gather_of_copy']:.2f}) | "
            f"{speed['scatter']:.0f} ({row['scatter_of_copy']:.2f}) |"
        )
    lines += ["", "| digest | time | GB/s | one core of the host |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['count']} x {row['size_mib']} MiB | {row['us']:.0f} us | {row['gbps']:.0f} | "
        f"{row['host_gbps']:.0f} |"
        for row in results["digest"]
    ]
    return "\n".join(lines) + "\n"


def _soon() -> float:
    return time.monotonic() + 60


if __name__ == "__main__":
    main()
