"""``kvcomm status``: what runs on this host and how full it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from kvcomm.cli.options import InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.cli.tables import open_console

if TYPE_CHECKING:
    from kvcomm.instance import Instance, Survey
    from kvcomm.wire.messages import ClusterView, NodeView


def status(instance: InstanceOption = None, as_json: JsonOption = False) -> None:
    """Show every node of the clusters on this host (or of one).  Exit code 1 if one is missing or silent, if
    no controller answers or they find a cluster not whole, and if nothing runs at all."""
    from kvcomm.connect import INSTANCE_VARIABLE
    from kvcomm.instance import Instance

    name = instance or os.environ.get(INSTANCE_VARIABLE)
    instances = [Instance.open(name)] if name else Instance.list()
    rows = [row for each in instances for row in _rows(each)]
    if as_json:
        for row in rows:
            row.pop("cluster_lines", None)
        sys.stdout.write(json.dumps(rows) + "\n")
    elif rows:
        _show(rows)
    else:
        sys.stdout.write("no cluster runs on this host; start one with: kvcomm up\n")
    raise typer.Exit(int(not _well(rows)))


def _well(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether there are clusters, and each is whole by its controllers' word and without a missing node."""
    whole = {row["instance"] for row in rows if "cluster" in row and row["cluster"]["mode"] == "whole"}
    return bool(rows) and whole == {row["instance"] for row in rows} and not any(row["error"] for row in rows)


def _rows(instance: Instance) -> list[dict[str, Any]]:
    from kvcomm.control import ControlClient
    from kvcomm.errors import KVCommError

    rows: list[dict[str, Any]] = []
    token = instance.credentials().token("status")
    survey = instance.survey()
    for record in survey.nodes:
        row = _absent(instance.name, record.node, record.role, "") | {
            "pid": record.pid,
            "addresses": record.addresses,
            "metrics": record.metrics,
            "transports": record.transports,
            "refused_transports": record.refused_transports,
        }
        try:
            with ControlClient(record.control, token) as control:
                said = control.status(timeout_s=2.0)
            row |= {"epoch": said.epoch, "uptime_s": said.uptime_s}
            row["usage"] = asdict(said.usage) if said.usage else None
            row["disk"] = asdict(said.disk) if said.disk else None
        except KVCommError as error:
            row["error"] = error.message
        rows.append(row)
    from kvcomm.cli.cluster import document, lines

    view = _view(instance, survey)
    rows += [
        *_missing(instance.name, survey),
        *_unregistered(instance.name, view),
        *_other_controllers(instance.name, survey, view, lambda control: _answers(control, token)),
    ]
    if view is None and rows:
        rows[0]["cluster_lines"] = ["no controller answers: reads and writes go on, changes wait"]
    for row in rows:
        row["leads"] = view is not None and row["node"] == view.leader
        if view is not None and row["node"] == view.controller:
            row["cluster"] = document(view)
            row["cluster_lines"] = list(lines(view))
    return sorted(rows, key=lambda row: row["node"])


def _view(instance: Instance, survey: Survey) -> ClusterView | None:
    """``None`` = no controller answers."""
    from kvcomm.cli.operators import asking, controllers_among
    from kvcomm.errors import Unavailable

    with asking(instance, controllers_among(survey.nodes)) as asked:
        try:
            return asked.view()
        except Unavailable:
            return None


def _unregistered(instance: str, view: ClusterView | None) -> Iterator[dict[str, Any]]:
    """Launchers: they serve nothing, so only the controllers know of them."""
    for node in view.nodes if view is not None else ():
        if node.role == "launcher":
            yield _known(instance, node, "" if node.state == "alive" else "not heard")


def _other_controllers(
    instance: str, survey: Survey, view: ClusterView | None, answers: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    """Controllers that are on another host, or have ended: their peers notice that later.

    Args:
        answers: whether somebody does at this address of the control wire.
    """
    there = {record.node for record in survey.nodes}
    for node in view.nodes if view is not None else ():
        if node.role == "controller" and node.node not in there:
            lives = node.state == "alive" and answers(node.control)
            yield _known(instance, node, "" if lives else "not running")


def _answers(control: str, token: str) -> bool:
    from kvcomm.control import ControlClient
    from kvcomm.errors import KVCommError

    if not control:
        return False
    try:
        with ControlClient(control, token) as client:
            client.status(timeout_s=1.0)
    except KVCommError:
        return False
    return True


def _known(instance: str, node: NodeView, error: str) -> dict[str, Any]:
    """A row of what the controllers tell alone."""
    told = {"epoch": node.epoch, "uptime_s": None, "usage": None, "disk": None}
    return _absent(instance, node.node, node.role, error) | told


def _absent(instance: str, node: str, role: str, error: str) -> dict[str, Any]:
    """The row of a node of which nothing runs here."""
    return {
        "instance": instance,
        "node": node,
        "role": role,
        "pid": None,
        "addresses": [],
        "metrics": "",
        "transports": [],
        "refused_transports": {},
        "error": error,
    }


def _missing(instance: str, survey: Survey) -> Iterator[dict[str, Any]]:
    """Nodes of a running cluster that are in its ring and not there: killed, or on their way up."""
    if survey.ring is None or not survey.nodes:
        return
    there = {record.node for record in survey.nodes}
    for role, nodes in (("pool", survey.ring.pools), ("shard", survey.ring.shards)):
        for node in nodes:
            if node.node not in there:
                yield _absent(instance, node.node, role, "not running")


def _show(rows: list[dict[str, Any]]) -> None:
    """One table an instance, narrow enough for 80 columns."""
    from rich.markup import escape
    from rich.table import Table

    console = open_console()
    for instance in dict.fromkeys(row["instance"] for row in rows):
        table = Table(box=None, padding=(0, 1, 0, 0), title=f"instance {instance}", title_justify="left")
        for column in (
            "node",
            "pid",
            "epoch",
            "up",
            "blocks",
            "used",
            "size",
            "pinned",
            "evicted",
            "refused",
        ):
            table.add_column(column, justify="left" if column == "node" else "right", no_wrap=True)
        for row in rows:
            if row["instance"] == instance:
                table.add_row(row["node"], str(row["pid"] or "-"), *map(escape, _cells(row)))
        console.print(table)
        for line in _lines(row for row in rows if row["instance"] == instance):
            console.print(escape(f"  {line}"), highlight=False, soft_wrap=True)


def _lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """What has no column: errors, disks, and how a pool's memory is reached."""
    for row in rows:
        node = row["node"]
        if row.get("leads"):
            yield f"{node} leads"
        yield from row.get("cluster_lines", ())
        if row["error"] and row["pid"] is not None:
            yield f"{node} does not answer: {row['error']}"
        if row.get("disk"):
            yield f"{node} disk {_disk(row['disk'])}"
        if row["transports"] or row["refused_transports"]:
            yield f"{node} serves {', '.join(row['transports']) or 'no transport: nobody reads its memory'}"
        for name, why in row["refused_transports"].items():
            yield f"{node} cannot serve {name}: {why}"


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return ["-", "down" if row["pid"] is None else "silent"]
    cells = [str(row["epoch"] or "-"), "-" if row["uptime_s"] is None else f"{row['uptime_s']:.0f} s"]
    if usage := row["usage"]:
        sizes = (usage["used_bytes"], usage["capacity_bytes"], usage["pinned_bytes"])
        used, size, pinned = map(size_text, sizes)
        counts = (usage["evicted_count"], usage["quarantined_count"])
        cells += [str(usage["block_count"]), used, size, pinned, *map(str, counts)]
    return cells


def _disk(usage: dict[str, Any]) -> str:
    """One line: what the disk tier holds, and what it did not do."""
    line = (
        f"{usage['state']}: {usage['block_count']} blocks, {size_text(usage['used_bytes'])} of "
        f"{size_text(usage['capacity_bytes'])}"
    )
    told = ("waiting", "evicted", "dropped", "damaged", "error", "busy")
    counts = [f"{usage[f'{name}_count']} {name}" for name in told if usage[f"{name}_count"]]
    return ", ".join([line, *counts])
