"""``kvcomm doctor``: what works on this host, what does not, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import socket
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
from kvcomm.cli.tables import open_console
from kvcomm.errors import ConfigError
from kvcomm.wire.address import parse_address

if TYPE_CHECKING:
    from kvcomm.cli.transports import PoolTrials
    from kvcomm.cli.trials import Trial, Trials
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
    from rich.markup import escape
    from rich.table import Table

    from kvcomm.cli.transports import show_trials

    styles = {"ok": "green", "note": "yellow", "problem": "red"}
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in findings:
        verdict = f"[{styles[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.subject, verdict, escape(finding.text))
    console = open_console()
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
    try:
        settings = _read_settings(visit)
    except ConfigError as error:
        yield Finding("configuration", "problem", str(error))
        return
    yield Finding("configuration", "ok", f"{settings.cluster.shards} shards, {settings.cluster.pools} pools")
    yield from _listening(settings.network.listen_host)
    yield from _memory(settings)


def _listening(host: str) -> Iterator[Finding]:
    """Whether nodes can listen there; a name is left to the transport ``tcp``, whose trial has a deadline."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as port:
            port.bind((host, 0))
    except OSError as error:
        yield Finding(
            "listening",
            "problem",
            f"network.listen_host is {host}: {error.strerror}; nodes start only at addresses of this host",
        )


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
    """Nothing where the configuration is wrong or the instance missing: the findings say so."""
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
    for pool in _pools(visit, settings):
        attempt: Callable[[str], Trial] = partial(trials.to_pool, address=pool.address, token=pool.token)
        yield try_all(pool.name, TRANSPORTS, network.transports, _with_gpu_direct(attempt), pool.listens_at)
    if not visit.peer and not visit.instance:
        attempt = _with_gpu_direct(_tried_here(trials, on_gpu=settings.cache.l2_device is not None))
        at = network.listen_host
        yield try_all("a pool of this host", TRANSPORTS, network.transports, attempt, at)


def _tried_here(trials: Trials, *, on_gpu: bool) -> Callable[[str], Trial]:
    """Pools are in a GPU's memory, which ``cuda`` alone reaches, or in the host's, which it does not."""
    from kvcomm.cli.trials import Trial

    def told(transport: str) -> Trial:
        if on_gpu and transport != "cuda":
            return Trial(transport, "refused", "cache.l2_device: a GPU's memory is reached by cuda alone")
        trial = trials.between_processes(transport)
        if transport == "cuda" and not on_gpu and trial.verdict == "works":
            return replace(trial, reason="not for pools in host memory (cache.l2_device)")
        return trial

    return told


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


@dataclass(frozen=True, slots=True)
class _Pool:
    """One that was asked for."""

    name: str
    address: str
    token: str
    listens_at: str
    """The host of its port; empty if there is none."""


def _pools(visit: Visit, settings: Config) -> Iterator[_Pool]:
    from kvcomm.connect import find_token

    token = find_token(settings)
    instance = _named(visit)
    if instance is not None:
        token = token or instance.credentials().token(settings.security.tenant)
        for record in instance.nodes() if visit.peer is None else ():
            if record.role == "pool":
                ports = [parse_address(each).host for each in record.addresses]
                name = f"{instance.name}/{record.node}"
                yield _Pool(name, record.addresses[0], token, next(filter(None, ports), ""))
    if visit.peer is not None:
        peer = parse_address(visit.peer)
        if token is None:
            raise ConfigError(
                f"{visit.peer} needs a token: name its cluster with --instance, set KVCOMM_TOKEN, "
                "or configure security.token_file"
            )
        yield _Pool(visit.peer, visit.peer, token, peer.host)


def _named(visit: Visit) -> Instance | None:
    """``None`` if it is missing: :func:`_instances` says so."""
    from kvcomm.instance import Instance, InstanceMissing

    with contextlib.suppress(InstanceMissing):
        return Instance.open(visit.instance) if visit.instance else None
    return None


def _settings(visit: Visit) -> Config | None:
    """``None`` if they are wrong: :func:`_configuration` says so."""
    with contextlib.suppress(ConfigError):
        return _read_settings(visit)
    return None


def _read_settings(visit: Visit) -> Config:
    """With a token file that can be read, if there is one; else ``ConfigError``."""
    from kvcomm.connect import find_token
    from kvcomm.settings import load_config

    settings = load_config(visit.config)
    find_token(settings)
    return settings


_CHECKS = (_software, _configuration, _hardware, _regions, _instances)
