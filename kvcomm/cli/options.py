"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="Configuration file; else $KVCOMM_CONFIG, else ./kvcomm.yaml, else defaults."
    ),
]
InstanceOption = Annotated[
    str | None, typer.Option("--instance", help="Name of a cluster on this host; else $KVCOMM_INSTANCE.")
]
AddressOption = Annotated[
    str | None,
    typer.Option("--address", help="tcp://host:port of any shard of a cluster; else $KVCOMM_ADDRESS."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable: one JSON document on stdout.")]
DeadlineOption = Annotated[float, typer.Option("--deadline", help="Give up after so many seconds.", min=0.01)]

Kind = Literal["state", "counter", "set", "map", "max", "min", "register"]
KindOption = Annotated[
    Kind,
    typer.Option(
        "--as",
        help="Class of the record. counter: put adds a whole number; set: adds an element; map: puts "
        "field=value; max, min: offers a number; register: the last put is shown.",
    ),
]
