"""``kvcomm top``: what the nodes of a cluster do, as it changes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.cli.cluster import document, lines, was_drained
from kvcomm.cli.options import InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kvcomm.cli.operators import Operators
    from kvcomm.errors import Unavailable
    from kvcomm.wire.messages import ClusterView, NodeView

STATES = {"alive": "green", "suspect": "yellow", "dead": "red", "unknown": "yellow"}


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once and return.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks.", min=0.1, max=60.0)
    ] = 2.0,
    instance: InstanceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show load, silence and moves of every node until Ctrl-C.  With --json one document a look; where stdout
    is no terminal one table a look.

    Rates are of the time since a node's last heartbeat.
    """
    from rich.live import Live

    from kvcomm.cli.operators import operators

    is_screen = sys.stdout.isatty()
    console = open_console()
    with operators(instance) as asked:
        looks = _looks(asked, interval, once)
        first = next(looks)
        try:
            if as_json or once or not is_screen:
                for look in chain([first], looks):
                    _print(console, look, as_json)
                return
            with Live(_shown(first), console=console, auto_refresh=False, screen=True) as live:
                for look in looks:
                    live.update(_shown(look), refresh=True)
        except KeyboardInterrupt:
            return


def _looks(asked: Operators, interval_s: float, once: bool) -> Iterator[ClusterView | Unavailable]:
    """That nobody answers is raised at the first look only: at a later one it may pass."""
    from kvcomm.errors import Unavailable

    yield asked.view()
    while not once:
        time.sleep(interval_s)
        try:
            look: ClusterView | Unavailable = asked.view()
        except Unavailable as error:
            look = error
        yield look


def _print(console: Console, look: ClusterView | Unavailable, as_json: bool) -> None:
    if as_json:
        if isinstance(look, Exception):
            raise look
        sys.stdout.write(json.dumps(document(look)) + "\n")
        sys.stdout.flush()
    else:
        console.print(_shown(look))


def _shown(look: ClusterView | Unavailable) -> RenderableType:
    from rich.text import Text

    return Text(look.message) if isinstance(look, Exception) else render(look)


def render(view: ClusterView) -> RenderableType:
    """One look: a line a node, and what the controllers say beneath."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("node", no_wrap=True)
    for column in ("state", "epoch", "ops/s", "hits", "p99", "records", "blocks", "bytes", "moving"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in view.nodes:
        if was_drained(node):
            continue
        table.add_row(escape(node.node), _state(node), str(node.epoch or "-"), *_load(node), _left(node))
    return Group(table, *(Text(f"  {line}") for line in lines(view)))


def _state(node: NodeView) -> str:
    colour = STATES.get(node.state, "red")
    silent = "" if node.state == "alive" or node.silent_s < 0 else f" {node.silent_s:.0f} s"
    return f"[{colour}]{node.state}{silent}[/{colour}]"


def _load(node: NodeView) -> list[str]:
    load = node.load
    if load is None:
        return ["-"] * 6
    held = load.record_bytes + load.block_bytes + load.disk_bytes
    return [
        f"{load.ops_s:.1f}",
        f"{100 * load.hit_share:.0f} %",
        f"{1e3 * load.p99_s:.1f} ms",
        str(load.record_count),
        str(load.block_count),
        size_text(held),
    ]


def _left(node: NodeView) -> str:
    move = node.move
    if move is None or not (move.records_left or move.blocks_left or move.bytes_left):
        return "-"
    return f"{move.records_left + move.blocks_left} items, {size_text(move.bytes_left)}"
