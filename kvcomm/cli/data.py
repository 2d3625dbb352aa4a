"""``kvcomm get``, ``put``, ``ls``: an agents' state from the shell."""

from __future__ import annotations

import base64
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvcomm.cli.options import (
    AddressOption,
    ConfigOption,
    DeadlineOption,
    InstanceOption,
    JsonOption,
    KindOption,
)

if TYPE_CHECKING:
    from kvcomm.mergeplane import Merged

NameArgument = Annotated[str, typer.Argument(help="Name of the state, for example robot-7.")]
KeyArgument = Annotated[str, typer.Argument(help="Key in it, for example pose.")]


def get(
    name: NameArgument,
    key: KeyArgument,
    instance: InstanceOption = None,
    address: AddressOption = None,
    config: ConfigOption = None,
    deadline: DeadlineOption = 5.0,
    as_json: JsonOption = False,
    kind: KindOption = "state",
) -> None:
    """Print a value; concurrent ones (siblings), elements and fields each on a line.  Exit code 1 if there is
    none."""
    from kvcomm.cli import resolved
    from kvcomm.connect import connect

    with connect(config, instance=instance, address=address, embed=False) as kv:
        if kind != "state":
            merged = resolved.face(kv, kind, name).get(key, deadline_s=deadline)
            _print_merged(merged, as_json)
        found = kv.state(name).get(key, deadline_s=deadline)
    if as_json:
        values = [base64.b64encode(value).decode() for value in found.values]
        document = {"values_base64": values, "context": found.context, "degraded": found.degraded}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        for value in found.values:
            sys.stdout.buffer.write(value + b"\n")
    raise typer.Exit(0 if found.values else 1)


def _print_merged(merged: Merged[Any], as_json: bool) -> NoReturn:
    from kvcomm.cli import resolved

    lines = resolved.lines(merged.value)
    if as_json:
        sys.stdout.write(json.dumps(resolved.document(merged)) + "\n")
    else:
        sys.stdout.buffer.write(b"".join(line + b"\n" for line in lines))
    raise typer.Exit(0 if lines and merged.context else 1)


def put(
    name: NameArgument,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(help="The value; - reads standard input.")],
    instance: InstanceOption = None,
    address: AddressOption = None,
    config: ConfigOption = None,
    deadline: DeadlineOption = 5.0,
    blind: Annotated[bool, typer.Option("--blind", help="Do not read first: may make a sibling.")] = False,
    kind: KindOption = "state",
) -> None:
    """Write a value, replacing what is there now; of other classes, add to it."""
    from kvcomm.cli import resolved
    from kvcomm.connect import connect

    content = sys.stdin.buffer.read() if value == "-" else value.encode()
    with connect(config, instance=instance, address=address, embed=False) as kv:
        if kind != "state":
            resolved.put(resolved.face(kv, kind, name), key, content, deadline)
            return
        state = kv.state(name)
        if not blind:
            state.get(key, deadline_s=deadline)  # the client remembers the context, so the put replaces it
        state.put(key, content, deadline_s=deadline)


def ls(
    prefix: Annotated[
        str, typer.Argument(help="Only names under this path, for example state/robot-7 or context.")
    ] = "",
    instance: InstanceOption = None,
    address: AddressOption = None,
    config: ConfigOption = None,
    deadline: DeadlineOption = 5.0,
) -> None:
    """List records: <class>/<name>/<key>, class state, counter, ..., and context/<agent>/<session>."""
    from kvcomm.connect import connect

    with connect(config, instance=instance, address=address, embed=False) as kv:
        path = prefix.rstrip("/")
        for found in kv.names(path.encode(), deadline_s=deadline):
            name = found.decode()
            if not path or name == path or name.startswith(f"{path}/"):  # not: state/robot-77
                sys.stdout.write(name + "\n")
