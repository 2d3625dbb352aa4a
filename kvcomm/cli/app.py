"""The command table."""

from __future__ import annotations

import typer

from kvcomm.cli import (
    affinity,
    bench,
    chaos,
    data,
    demo,
    doctor,
    hot,
    orders,
    roles,
    status,
    streams,
    top,
    up,
)

app = typer.Typer(
    name="kvcomm",
    help="A distributed, shared KV cache for LLM agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("up")(up.up)
app.command("status")(status.status)
app.command("hot")(hot.hot)
app.command("top")(top.top)
app.command("scale")(orders.scale)
app.command("drain")(orders.drain)
app.command("move")(orders.move)
app.command("rebalance")(orders.rebalance)
app.command("cancel")(orders.cancel)
app.command("affinity")(affinity.affinity)
app.command("get")(data.get)
app.command("put")(data.put)
app.command("ls")(data.ls)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")
app.add_typer(chaos.app, name="chaos")
app.add_typer(streams.app, name="streams")
app.command("pool")(roles.pool)
app.command("shard")(roles.shard)
app.command("controller")(roles.controller)
