"""``kvcomm affinity``: which agents should live in which rack."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.cli.cluster import fields
from kvcomm.cli.options import InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from kvcomm.wire.messages import AffinityView

RoomOption = Annotated[
    list[str] | None,
    typer.Option("--room", help="RACK=N: how many agents a rack takes; else an equal share. Repeat it."),
]


def affinity(
    room: RoomOption = None,
    horizon: Annotated[
        float,
        typer.Option("--horizon", help="Hours that agents will go on as now: what a move pays back in."),
    ] = 1.0,
    price: Annotated[
        float, typer.Option("--price", help="What moving one agent costs, in GiB of reads from another rack.")
    ] = 1.0,
    instance: InstanceOption = None,
    as_json: JsonOption = False,
) -> None:
    r"""Advise where agents should live, by whose blocks they read; nothing is moved.

    What it promises is measured on traffic that the advice was not made from. Agents say their rack with
    network.rack. It needs the optional extra kvcomm\[affinity] where the controllers run.
    """
    from kvcomm.cli.operators import operators
    from kvcomm.errors import Refused
    from kvcomm.wire.messages import AffinityGet, AffinityView

    question = AffinityGet(_rooms(room or []), 3600.0 * horizon, price * (1 << 30))
    with operators(instance) as asked:
        answer = asked.ask(question)
    if not isinstance(answer, AffinityView):
        raise Refused(f"the controller answers {type(answer).__name__}; use equal versions")
    if as_json:
        document = fields(answer) | {"agents": [fields(each) for each in answer.agents]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        _show(answer)


def _rooms(texts: list[str]) -> dict[str, int]:
    rooms = {}
    for text in texts:
        rack, equals, count = text.rpartition("=")
        if not equals or not rack or not count.isdecimal():
            raise ValueError(f"--room is {text!r}, but should be RACK=N, such as rack-0=8")
        rooms[rack] = int(count)
    return rooms


def _show(view: AffinityView) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = open_console()
    if view.agents:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("agent", "rack", "better", "traffic", "gain"):
            table.add_column(column, justify="right" if column in ("traffic", "gain") else "left")
        for each in view.agents:
            name = each.name or f"{each.agent:016x}"
            better = each.better_rack if each.better_rack != each.rack else "stay"
            table.add_row(
                *map(escape, (name, each.rack, better)),
                f"{size_text(each.bytes_s)}/s",
                f"{size_text(each.gain_bytes_s)}/s",
            )
        console.print(table)
    for line in lines(view):
        console.print(escape(f"  {line}"), highlight=False, soft_wrap=True)


def lines(view: AffinityView) -> list[str]:
    """What it comes to."""
    moves = sum(each.rack != each.better_rack for each in view.agents)
    found = [
        f"{size_text(view.bytes_s)}/s between agents, {100 * view.share_before:.0f} % of it inside racks",
        f"nobody should move: {view.reason}"
        if view.reason
        else f"{moves} agents should move: {100 * view.share_after:.0f} % inside racks is to be expected",
    ]
    if view.unplaced_bytes_s:
        found.append(
            f"{size_text(view.unplaced_bytes_s)}/s with agents that do not say where they are (network.rack)"
        )
    return found
