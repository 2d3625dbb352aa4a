"""Following an operation until it ends: a bar with the time that is left, or a line a step where nobody
looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcomm.errors import Unavailable

if TYPE_CHECKING:
    from kvcomm.cli.operators import Operators
    from kvcomm.wire.messages import OperationView

POLL_S = 0.25
ENDS = ("done", "cancelled", "rolled back", "failed")


def follow(
    operators: Operators,
    number: int,
    deadline_s: float,
    *,
    quiet: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> OperationView | None:
    """The operation when it has ended; ``None`` = it has not, by the deadline.

    A change of the leader is waited for; the new one goes on with it.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.table import Column

    until, console = clock() + deadline_s, Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[trouble]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
    )
    shown = ""
    with Progress(
        *columns, console=console, transient=True, expand=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task(f"operation {number}", total=1.0, left="", trouble="")
        while True:
            found = _look(operators, number)
            text = described(found) if found is not None else "waiting for a leader"
            if not console.is_terminal and text.split(",")[0] != shown:
                shown = text.split(",")[0]
                console.print(f"operation {number}: {text}", highlight=False, soft_wrap=True)
            if found is not None:
                left = left_text(found.eta_s) if found.eta_s >= 0 else ""
                bar.update(
                    task, description=found.step, completed=found.done_share, left=left, trouble=found.trouble
                )
                if found.step in ENDS:
                    return found
            if clock() >= until:
                return None
            sleep(POLL_S)


def described(view: OperationView) -> str:
    """``copying: shard-3 joins``, and why it does not go on if it does not."""
    return f"{view.step}: {view.what}" + (f", {view.trouble}" if view.trouble else "")


def left_text(eta_s: float) -> str:
    """The time that is left, for a person."""
    if eta_s < 0:
        return "time left not known yet"
    minutes, seconds = divmod(round(eta_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h" if hours else "", f"{minutes} min" if minutes else "", f"{seconds} s"]
    return " ".join([part for part in parts if part][:2]) + " left"


def _look(operators: Operators, number: int) -> OperationView | None:
    try:
        view = operators.view()
    except Unavailable:
        return None
    return next((each for each in view.operations if each.operation == number), None)
