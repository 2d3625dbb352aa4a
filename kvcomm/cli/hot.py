"""``kvcomm hot``: which keys everybody reads, as the leading controller has found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import typer

from kvcomm.cli.options import InstanceOption, JsonOption
from kvcomm.wire.messages import HotGet, HotKey, HotView

TENANT_BYTES = 16


def hot(instance: InstanceOption = None, as_json: JsonOption = False) -> None:
    """Show the hot blocks and records.  Exit code 1 if no controller leads."""
    from kvcomm.connect import DEFAULT_INSTANCE, INSTANCE_VARIABLE

    name = instance or os.environ.get(INSTANCE_VARIABLE) or DEFAULT_INSTANCE
    view = _view(name)
    if view is None:
        sys.stderr.write(f"no controller of {name} leads at present; try again, or see: kvcomm status\n")
        raise typer.Exit(1)
    rows = list(rows_of(view))
    if as_json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return
    for row in rows:
        what, key = row["plane"], row["key"]
        sys.stdout.write(f"{what:6} {row['rate_s']:8.1f}/s for {row['for_s']:6.0f} s  {key}\n")
    if not rows:
        sys.stdout.write("nothing is hot\n")


def rows_of(view: HotView) -> Iterator[dict[str, Any]]:
    """One a key, hottest first: blocks by their key in hexadecimal, records by their name."""
    for each in view.blocks:
        yield _row("block", each.key.hex(), each)
    for each in view.records:
        yield _row("record", each.key[TENANT_BYTES:].decode(errors="replace"), each)


def _row(plane: str, key: str, hot: HotKey) -> dict[str, Any]:
    return {"plane": plane, "key": key, "rate_s": hot.rate_s, "for_s": hot.for_s}


def _view(name: str) -> HotView | None:
    from kvcomm.cli.operators import asking, controllers_among
    from kvcomm.errors import KVCommError
    from kvcomm.instance import Instance

    cluster = Instance.open(name)
    with asking(cluster, controllers_among(cluster.survey().nodes)) as asked:
        try:
            seen = asked.view()
            if seen.leader != seen.controller:
                return None
            answer = asked.ask(HotGet())  # whoever leads is asked first
        except KVCommError:
            return None
    return answer if isinstance(answer, HotView) else None
