"""``kvcomm scale``, ``drain``, ``move``, ``rebalance``, ``cancel``: orders to the leading controller."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvcomm.cli.circle import FORMS
from kvcomm.cli.cluster import fields
from kvcomm.cli.options import InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from kvcomm.wire.messages import Message, OperationView, PlannedMove

DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", help="Say what would be moved and how long it would take; change nothing."),
]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Return once the order is taken; kvcomm status shows how it goes.")
]
DeadlineOption = Annotated[
    float, typer.Option("--deadline", help="Look on for so many seconds; the move goes on after.", min=0.1)
]
WAIT_S = 3600.0
Policy = Literal["threshold", "greedy"]
"""As ``controller.policies.table`` names them: a wrong name is a mistake in the command, told at once."""


def scale(
    shards: Annotated[int, typer.Option("--shards", help="How many shards there are to be.", min=1)],
    dry_run: DryRunOption = False,
    no_wait: NoWaitOption = False,
    instance: InstanceOption = None,
    deadline: DeadlineOption = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Run so many shards; data moves while reads and writes go on.

    Exit codes of all orders: 0 done (or taken, with --no-wait), 1 refused, rolled back or not done by the
    deadline, 2 a mistake in the command.
    """
    from kvcomm.wire.messages import ScaleOrder

    _give(ScaleOrder(shards, dry_run), dry_run, no_wait, instance, deadline, as_json)


def drain(
    node: Annotated[str, typer.Argument(help="Name of a shard or a pool, as kvcomm status shows it.")],
    dry_run: DryRunOption = False,
    no_wait: NoWaitOption = False,
    instance: InstanceOption = None,
    deadline: DeadlineOption = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Move everything away from a node, then stop it."""
    from kvcomm.wire.messages import DrainOrder

    _give(DrainOrder(node, dry_run), dry_run, no_wait, instance, deadline, as_json)


def move(
    keys: Annotated[str, typer.Argument(metavar="RANGE", help=f"Which keys, by where they lie: {FORMS}.")],
    to: Annotated[str, typer.Option("--to", help="Name of the shard that is to be their first owner.")],
    dry_run: DryRunOption = False,
    no_wait: NoWaitOption = False,
    instance: InstanceOption = None,
    deadline: DeadlineOption = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Give a stretch of the circle, and with it the keys that lie there, to one shard.

    Keys are spread over the circle evenly, by hash: a tenth of it is about a tenth of them.
    """
    from kvcomm.cli.circle import parse_range
    from kvcomm.wire.messages import MoveOrder

    first, last = parse_range(keys)
    _give(MoveOrder(first, last, to, dry_run), dry_run, no_wait, instance, deadline, as_json)


def rebalance(
    policy: Annotated[
        Policy,
        typer.Option(
            "--policy", help="threshold: a shard has far more than its share; greedy: any move that pays."
        ),
    ] = "threshold",
    dry_run: DryRunOption = False,
    no_wait: NoWaitOption = False,
    instance: InstanceOption = None,
    deadline: DeadlineOption = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Let a load policy move keys from busy shards to others, once."""
    from kvcomm.wire.messages import RebalanceOrder

    _give(RebalanceOrder(policy, dry_run), dry_run, no_wait, instance, deadline, as_json)


def cancel(
    operation: Annotated[int | None, typer.Argument(help="Its number; else the one under way.")] = None,
    no_wait: NoWaitOption = False,
    instance: InstanceOption = None,
    deadline: DeadlineOption = WAIT_S,
    as_json: JsonOption = False,
) -> None:
    """Take back the operation under way; what was copied is dropped again."""
    from kvcomm.cli.following import ENDS, follow
    from kvcomm.cli.operators import operators
    from kvcomm.errors import Refused
    from kvcomm.wire.messages import CancelOrder

    with operators(instance) as asked:
        if operation is None:
            under_way = [each for each in asked.view().operations if each.step not in ENDS]
            if not under_way:
                raise Refused("no operation is under way")
            operation = under_way[0].operation
        asked.order(CancelOrder(operation))
        if no_wait:
            _say(
                as_json,
                {"operation": operation, "step": "cancelling"},
                f"operation {operation} is taken back",
            )
            return
        ended = follow(asked, operation, deadline, quiet=as_json)
    _tell(operation, ended, as_json, good=("cancelled",))


def _give(
    order: Message, dry_run: bool, no_wait: bool, instance: str | None, deadline_s: float, as_json: bool
) -> None:
    from kvcomm.cli.following import follow
    from kvcomm.cli.operators import operators

    with operators(instance) as asked:
        answer = asked.order(order)
        number, moves = answer.operation, answer.moves
        document = {"operation": number, "moves": _named(moves)}
        if not moves and not number:
            _say(as_json, document | {"step": "done"}, "nothing is to be done: it is so already")
            return
        if not as_json:
            _show(moves, "would be moved" if dry_run else "to be moved")
        if dry_run or no_wait:
            step = "dry run" if dry_run else "taken"
            text = "dry run: nothing was changed" if dry_run else f"operation {number} is taken"
            _say(as_json, document | {"step": step}, text)
            return
        try:
            ended = follow(asked, number, deadline_s, quiet=as_json)
        except KeyboardInterrupt:
            sys.stderr.write(
                f"operation {number} goes on: kvcomm status shows it, kvcomm cancel {number} takes it back\n"
            )
            raise typer.Exit(130) from None
    _tell(number, ended, as_json, good=("done",))


def _tell(number: int, ended: OperationView | None, as_json: bool, good: Sequence[str]) -> None:
    if ended is None:
        _say(as_json, {"operation": number, "step": "under way"}, f"operation {number} is still under way")
        raise typer.Exit(1)
    document = {
        "operation": number,
        "what": ended.what,
        "step": ended.step,
        "trouble": ended.trouble,
        "moves": _named(ended.moves),
    }
    text = f"operation {number} is {ended.step}: {ended.what}"
    _say(as_json, document, text + (f" ({ended.trouble})" if ended.trouble else ""))
    if ended.step not in good:
        raise typer.Exit(1)


def _named(moves: Sequence[PlannedMove]) -> list[dict[str, Any]]:
    return [fields(each) for each in moves]


def _say(as_json: bool, document: dict[str, Any], text: str) -> None:
    sys.stdout.write((json.dumps(document) if as_json else text) + "\n")


def _show(moves: Sequence[PlannedMove], what: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(what)
    for column in ("keys", "records", "blocks", "bytes", "about"):
        table.add_column(column, justify="right")
    for each in moves:
        table.add_row(
            escape(each.what),
            f"{100 * each.share:.1f} %",
            str(each.records),
            str(each.blocks),
            size_text(each.record_bytes + each.block_bytes),
            f"{each.seconds:.0f} s",
        )
    open_console().print(table)
