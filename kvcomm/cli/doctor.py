"""``kvcomm doctor``: what works on this host, what does not, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm import __version__
from kvcomm.cli.finding import Finding
from kvcomm.cli.options import ConfigOption, InstanceOption, JsonOption
from kvcomm.cli.sizes import size_text
from kvcomm.errors import ConfigError
from kvcomm.wire.address import parse_address

if TYPE_CHECKING:
    from kvcomm.cli.transports import PoolTrials
    from kvcomm.cli.trials import Trial
    from kvcomm.config import Config
    from kvcomm.instance import Instance

SHM = Path("/dev/shm")


def doctor(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    reclaim: Annotated[
        bool, typer.Option("--reclaim", help="Remove regions that killed processes left in /dev/shm.")
    ] = False,
    instance: InstanceOption = None,
    peer: Annotated[
        str | None,
        typer.Option("--peer", help="tcp://host:port of a pool: try the transports to that one."),
    ] = None,
) -> None:
    """Look at this host, its configuration and its clusters, and try every transport.

    The transports are tried between processes of this host; with --instance to that cluster's pools, with
    --peer to one pool anywhere.  Exit code 1 if there is a problem.
    """
    from kvcomm.connect import INSTANCE_VARIABLE

    name = instance or os.environ.get(INSTANCE_VARIABLE)
    visit = Visit(config, reclaim, name, peer)
    findings = [finding for check in _CHECKS for finding in check(visit)]
    tried = list(_transports(visit))
    findings_of_all = [*findings, *(finding for each in tried for finding in each.findings())]
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings_of_all]) + "\n")
    else:
        _show(findings, tried)
    raise typer.Exit(int(any(finding.verdict == "problem" for finding in findings_of_all)))


@dataclass(frozen=True, slots=True)
class Visit:
    """What was asked for."""

    config: Path | None = None
    reclaim: bool = False
    instance: str | None = None
    peer: str | None = None


def _show(findings: list[Finding], tried: list[PoolTrials]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from kvcomm.cli.transports import show_trials

    styles = {"ok": "green", "note": "yellow", "problem": "red"}
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        verdict = f"[{styles[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, verdict, escape(finding.text))
    console = Console()
    console.print(table)
    for each in tried:
        console.print()
        show_trials(console, each)


def _software(visit: Visit) -> Iterator[Finding]:
    yield Finding(
        "software", "ok", f"kvcomm {__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    if platform.machine() not in ("x86_64", "AMD64"):
        yield Finding(
            "memory order",
            "note",
            "pins rely on x86-64's memory order and have not been tested on this machine",
        )
    for extra in ("torch", "transformers"):
        try:
            yield Finding(f"extra {extra}", "ok", f"{extra} {importlib.metadata.version(extra)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(f"extra {extra}", "note", f"not installed: pip install 'kvcomm[{extra}]'")


def _configuration(visit: Visit) -> Iterator[Finding]:
    from kvcomm.settings import load_config

    try:
        settings = load_config(visit.config)
    except ConfigError as error:
        yield Finding("configuration", "problem", str(error))
        return
    yield Finding("configuration", "ok", f"{settings.cluster.shards} shards, {settings.cluster.pools} pools")
    yield from _memory(settings)


def _memory(settings: Config) -> Iterator[Finding]:
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        yield Finding("shared memory", "problem", f"{SHM}: {error.strerror}")
        return
    # What clusters of this host hold now is theirs already: a cluster that runs well is no problem.
    free_bytes = room.f_bavail * room.f_frsize + _held_bytes()
    cluster, cache = settings.cluster, settings.cache
    pools = cluster.pools if cache.l2_device is None else 0  # else their memory is the GPU's
    want_bytes = pools * cache.l2_size_bytes + cluster.shards * cache.l3_size_bytes
    want, free = size_text(want_bytes), size_text(free_bytes)
    who = "cache.l2_size and cache.l3_size" if pools else "cache.l3_size"
    text = f"{want} wanted by {who}, {free} free in {SHM} or held by clusters"
    yield Finding("shared memory", "ok" if want_bytes <= free_bytes else "problem", text)


def _held_bytes() -> int:
    """Shared memory that regions of ours have taken (not their length: memory arrives in slices)."""
    held_bytes = 0
    for path in SHM.glob("kvcomm-*"):
        with contextlib.suppress(FileNotFoundError):  # its cluster is just ending
            held_bytes += path.stat().st_blocks * 512
    return held_bytes


def _regions(visit: Visit) -> Iterator[Finding]:
    from l2_rdma.region import reclaim_stale, stale_regions

    stale = reclaim_stale() if visit.reclaim else stale_regions()
    if not stale:
        yield Finding("regions", "ok", "none left behind by killed processes")
    for path in stale:
        done = "removed" if visit.reclaim else "left behind by a killed process; run: kvcomm doctor --reclaim"
        yield Finding("regions", "note", f"{path}: {done}")


def _instances(visit: Visit) -> Iterator[Finding]:
    from kvcomm.errors import KVCommError
    from kvcomm.instance import Instance

    try:
        instances = [Instance.open(visit.instance)] if visit.instance else Instance.list()
    except KVCommError as error:
        yield Finding("instances", "problem", error.message)
        return
    if not instances:
        yield Finding("instances", "note", "none on this host; start one with: kvcomm up")
    for instance in instances:
        yield from _instance(instance)


def _instance(instance: Instance) -> Iterator[Finding]:
    survey = instance.survey()
    subject = f"instance {instance.name}"
    for damage in survey.damaged:
        yield Finding(subject, "problem", damage)
    if not survey.nodes:
        yield Finding(subject, "note", "not running; its records are kept for the next 'kvcomm up'")
    for record in survey.nodes:
        yield _round_trips(f"{instance.name}/{record.node}", instance, record.addresses)


def _round_trips(subject: str, instance: Instance, addresses: list[str]) -> Finding:
    """Whether each way to a node works, and what a message costs here: the median of a few pings."""
    from kvcomm.errors import KVCommError

    works: list[str] = []
    for address in addresses:
        kind = address.partition(":")[0]
        try:
            works.append(f"{kind} {_round_trip_s(instance, address) * 1e6:.0f} us")
        except KVCommError as error:
            return Finding(subject, "problem", f"{address}: {error.message}")
    return Finding(subject, "ok", f"round trip: {', '.join(works)}")


def _round_trip_s(instance: Instance, address: str) -> float:
    from kvcomm.block import Incarnation
    from kvcomm.rpc import Connection, Identity
    from kvcomm.wire.messages import Ping

    identity = Identity(instance.credentials().token("doctor"), Incarnation(os.getpid()))
    connection = Connection.open(address, identity, time.monotonic() + 2.0)
    try:
        return median(
            _timed(lambda: connection.call(Ping(), deadline=time.monotonic() + 2.0)) for _ in range(50)
        )
    finally:
        connection.close()


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _hardware(visit: Visit) -> Iterator[Finding]:
    from kvcomm.cli.hardware import Host, hardware_findings

    settings = _settings(visit)
    yield from hardware_findings(Host.here(), settings.cache.l2_size_bytes if settings else 0)


def _transports(visit: Visit) -> Iterator[PoolTrials]:
    """Nothing where the configuration is wrong: what would be tried is what it says."""
    from kvcomm.cli.transports import try_all
    from kvcomm.cli.trials import Trials
    from kvcomm.config import TRANSPORTS
    from l2_rdma.transports.port import WireOptions

    settings = _settings(visit)
    if settings is None:
        return
    network = settings.network
    gpu = settings.cache.l2_device or 0
    trials = Trials(WireOptions(network.listen_host, network.rdma_device, cuda_device=gpu))
    for pool, address, token in _pools(visit, settings):
        attempt: Callable[[str], Trial] = partial(trials.to_pool, address=address, token=token)
        yield try_all(pool, TRANSPORTS, network.transports, _with_gpu_direct(attempt))
    if not visit.peer and not visit.instance:
        attempt = _with_gpu_direct(trials.between_processes)
        yield try_all("a pool of this host", TRANSPORTS, network.transports, attempt)


def _with_gpu_direct(attempt: Callable[[str], Trial]) -> Callable[[str], Trial]:
    """What is known of RDMA and GPU memory belongs to what RDMA tells of itself."""
    from kvcomm.cli.hardware import Host, gpu_direct

    def told(transport: str) -> Trial:
        trial = attempt(transport)
        if "device" not in trial.facts or transport != "verbs":
            return trial
        possible, why = gpu_direct(Host.here())
        return replace(trial, facts=trial.facts | {"gdr": "possible" if possible else "no", "GPUDirect": why})

    return told


def _pools(visit: Visit, settings: Config) -> Iterator[tuple[str, str, str]]:
    """Name, address and token of the pools that were asked for."""
    from kvcomm.connect import find_token
    from kvcomm.instance import Instance

    token = find_token(settings)
    if visit.instance is not None:
        instance = Instance.open(visit.instance)
        token = token or instance.credentials().token(settings.security.tenant)
        if visit.peer is None:
            for record in instance.nodes():
                if record.role == "pool":
                    yield f"{instance.name}/{record.node}", record.addresses[0], token
    if visit.peer is not None:
        parse_address(visit.peer)
        if token is None:
            raise ConfigError(
                f"{visit.peer} needs a token: name its cluster with --instance, set KVCOMM_TOKEN, "
                "or configure security.token_file"
            )
        yield visit.peer, visit.peer, token


def _settings(visit: Visit) -> Config | None:
    """``None`` if it is wrong: :func:`_configuration` says so."""
    from kvcomm.settings import load_config

    try:
        return load_config(visit.config)
    except ConfigError:
        return None


_CHECKS = (_software, _configuration, _hardware, _regions, _instances)
