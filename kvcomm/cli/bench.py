"""``kvcomm bench``: what a fetch costs on this host, against a plain copy of the same bytes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcomm.cli.options import AddressOption, ConfigOption, InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from kvcomm.client import Client
    from kvcomm.namespace import Namespace

app = typer.Typer(help="Measure this host.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure this host."""


@app.command("fetch")
def fetch(
    blocks: Annotated[int, typer.Option(help="Blocks in the prefix.", min=1, max=4096)] = 64,
    block_kib: Annotated[int, typer.Option(help="Size of a block, KiB.", min=1, max=65536)] = 512,
    rounds: Annotated[int, typer.Option(help="Fetches; the median counts.", min=1, max=1000)] = 9,
    instance: InstanceOption = None,
    address: AddressOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a prefix, then fetch it: first and repeated views from the pool, and a copy from the shards."""
    from kvcomm.connect import connect

    namespace = _namespace(block_kib << 10)
    tokens = [time.time_ns() >> shift & 0xFFFF for shift in (0, 16, 32)]
    tokens = [*tokens, *range(len(tokens), blocks * namespace.block_tokens)]
    with connect(config, instance=instance, address=address) as kv:
        rows = _measure(kv, namespace, tokens, blocks, rounds)
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        _show(rows, f"{blocks} blocks of {size_text(block_kib << 10)}")


def _namespace(block_bytes: int) -> Namespace:
    from kvcomm.namespace import Namespace

    return Namespace(
        model="kvcomm/bench",
        revision="1",
        tokenizer="1",
        vocab_size=1 << 16,
        dtype="float8_e4m3fn",
        layout="LKHTD",
        layers=1,
        kv_heads=1,
        head_dim=block_bytes // 32,
        block_tokens=16,
        rope="none",
        rope_parameters={},
    )


def _measure(
    kv: Client, namespace: Namespace, tokens: list[int], blocks: int, rounds: int
) -> list[dict[str, Any]]:
    source = [bytes([index & 0xFF]) * namespace.block_bytes for index in range(blocks)]
    target = memoryview(bytearray(namespace.block_bytes))

    def copy() -> int:
        for block in source:
            target[:] = block
        return blocks

    size_bytes = blocks * namespace.block_bytes
    rows = [_row("memcpy", copy, rounds, size_bytes)]
    rows.append(
        _row(
            "publish", lambda: kv.publish(namespace, tokens, source).stored, 1, blocks * namespace.block_bytes
        )
    )

    def get() -> int:
        return len(kv.fetch(namespace, tokens).blocks)

    rows.append(_row("fetch, first", get, 1, size_bytes))
    rows.append(_row("fetch, repeated", get, rounds, size_bytes))
    for row in rows:
        row["x_memcpy"] = round(row["seconds"] / rows[0]["seconds"], 3)
    return rows


def _row(what: str, call: Callable[[], int], rounds: int, size_bytes: int) -> dict[str, Any]:
    took: list[float] = []
    counts: list[int] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        counts.append(call())
        took.append(time.perf_counter() - begin)
    return {"what": what, "blocks": min(counts), "seconds": median(took), "bytes": size_bytes}


def _show(rows: list[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for column in ("operation", "blocks", "time", "rate", "x memcpy"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for row in rows:
        rate = f"{size_text(row['bytes'] / row['seconds'])}/s"
        table.add_row(
            row["what"], str(row["blocks"]), f"{row['seconds'] * 1e3:.2f} ms", rate, f"{row['x_memcpy']:.2f}"
        )
    open_console().print(table)
