"""``kvcomm up``: a whole cluster on this host, in the foreground."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcomm.cli.options import ConfigOption

if TYPE_CHECKING:
    from controller.launcher import LocalLauncher
    from controller.supervisor import Supervisor
    from kvcomm.config import ClusterConfig, Config
    from kvcomm.instance import Instance
    from kvcomm.machine import Event
    from kvcomm.wire.messages import NodePlan, RingMap


STORAGE_FILE = "storage"
"""In the instance's directory: where its records were kept when it ran last."""
EMBEDDED_CONFIG = "cache: {l2_size: 5%, l3_size: 2%}\n"
"""Where nobody configured anything: a guest in somebody's process takes less than a server would."""


def up(
    instance: Annotated[
        str, typer.Option("--instance", help="Name of the cluster; agents on this host find it by it.")
    ] = "default",
    config: ConfigOption = None,
    lifeline: Annotated[
        bool, typer.Option("--lifeline", hidden=True, help="Stop when standard input closes; leave no trace.")
    ] = False,
) -> None:
    """Run controllers, pools and shards until Ctrl-C; restart those that die.

    A named cluster keeps its directory, and with it its records, for the next time.
    """
    from kvcomm.cli.node import storage_root
    from kvcomm.instance import Instance, InstanceExists
    from kvcomm.serve import run
    from kvcomm.settings import load_config

    load_config(config)  # a mistake in it is told before anything is made
    try:
        cluster = Instance.create(instance)
    except InstanceExists:
        cluster = Instance.open(instance)
    with _alone(cluster):
        settings = load_config(config)
        storage = storage_root(cluster, settings).resolve()
        check_storage(cluster, storage)  # first: with a wrong file the rest is a mistake too
        check_placement(cluster.ring(), settings.cluster)
        if settings.storage.directory:
            cluster.keep_secret_in(Path(settings.storage.directory))
        _reclaim()
        written = _write_config(cluster, config, lifeline)
        note_storage(cluster, storage)
        try:
            run(_run(cluster, load_config(written), written, lifeline))
        finally:
            if lifeline:
                cluster.remove()


def check_placement(before: RingMap | None, cluster: ClusterConfig) -> None:
    """How many copies there are of what, and how many are asked, is not changed by a controller: it would go
    on with what its first map says, whatever the configuration says.

    Raises:
        ConfigError: the instance runs with another number.
    """
    from kvcomm.errors import ConfigError

    for key in ("replicas", "write_quorum", "read_quorum", "block_copies") if before is not None else ():
        was, wanted = getattr(before, key), getattr(cluster, key)
        if was != wanted:
            raise ConfigError(
                f"cluster.{key} is {wanted}, but this instance was made with {was}, and changing that is not "
                f"in this version: set cluster.{key}: {was}, or choose another --instance"
            )


def check_storage(cluster: Instance, storage: Path) -> None:
    """A cluster that finds its records nowhere looks like one that has none.

    Raises:
        ConfigError: the instance ran with another directory, which is still there.
    """
    from kvcomm.errors import ConfigError

    try:
        before = Path((cluster.directory / STORAGE_FILE).read_text().removesuffix("\n"))
    except (FileNotFoundError, UnicodeDecodeError):
        return
    if before != storage and before.is_absolute() and before.is_dir() and cluster.ring() is not None:
        move = "" if storage.exists() else f", or move {before} to {storage} first"
        raise ConfigError(
            f"instance {cluster.name!r} ran last with its records in {before}, but this configuration "
            f"(storage.directory) puts them in {storage}, and the cluster would start without them: give the "
            f"--config that it ran with{move}; to start over, choose another --instance, or remove "
            f"{cluster.directory}"
        )


def note_storage(cluster: Instance, storage: Path) -> None:
    """For :func:`check_storage` of the next run."""
    path = cluster.directory / STORAGE_FILE
    draft = path.with_suffix(".draft")
    draft.write_text(f"{storage}\n")
    draft.replace(path)


def _write_config(cluster: Instance, config: Path | None, lifeline: bool) -> Path:
    """One copy for all nodes of this run, also those that are started again later."""
    from kvcomm.settings import config_source

    source = config_source(config)
    text = source.read_text() if source else EMBEDDED_CONFIG if lifeline else ""
    path = cluster.directory / "kvcomm.yaml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def _alone(cluster: Instance) -> Iterator[None]:
    """One supervisor an instance; the lock goes with the process, however it ends."""
    from kvcomm.errors import Refused

    lock = os.open(cluster.directory / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(f"instance {cluster.name!r} is running already; choose another --instance") from error
    try:
        yield
    finally:
        os.close(lock)


def _reclaim() -> None:
    """Regions whose owners were killed would otherwise fill /dev/shm."""
    from l2_rdma.region import reclaim_stale

    for path in reclaim_stale():
        sys.stderr.write(f"kvcomm: removed {path}, left behind by a killed process\n")


async def _run(cluster: Instance, settings: Config, config: Path, lifeline: bool) -> None:
    from kvcomm.cli.launching import Launching
    from kvcomm.cli.signals import stop_event

    stop = stop_event(lifeline)
    logs = cluster.directory / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    launching = Launching(
        cluster,
        settings,
        lambda plan: _command(cluster, plan, config),
        logs,
        on_ready=lambda: _say_ready(cluster, settings, lifeline),
        on_event=_say_exit,
    )
    await launching.run(stop)


def _command(cluster: Instance, plan: NodePlan, config: Path) -> list[str]:
    command = [sys.executable, "-m", "kvcomm.cli", plan.role, "--instance", cluster.name, "--node", plan.node]
    return [*command, "--rack", plan.rack, "--config", str(config), "--lifeline"]


def _say_ready(cluster: Instance, settings: Config, lifeline: bool) -> None:
    from kvcomm.embedded import READY_LINE

    if lifeline:
        sys.stdout.buffer.write(READY_LINE)
        sys.stdout.buffer.flush()
        return
    records = cluster.nodes()
    sys.stdout.write(f"cluster {cluster.name!r} is up: {', '.join(record.node for record in records)}\n")
    for record in records:
        if record.role == "pool" and not record.transports:
            why = "; ".join(f"{name}: {reason}" for name, reason in record.refused_transports.items())
            sys.stdout.write(f"{record.node} serves no transport, nobody reads its memory: {why}\n")
    sys.stdout.write(f"logs: {cluster.directory / 'logs'}; stop with Ctrl-C\n")
    if not settings.storage.directory:
        sys.stdout.write(
            f"records are kept in {cluster.directory}; set storage.directory for a lasting place\n"
        )
    sys.stdout.flush()


def _say_exit(event: Event, launcher: LocalLauncher, supervisor: Supervisor) -> None:
    """What went wrong belongs on the operator's screen, not only in a file; an ordered end is no failure."""
    from controller.supervisor import NodeExited

    if not isinstance(event, NodeExited):
        return
    fate = supervisor.fate(event.node)
    why = event.reason or launcher.last_words(event.node)
    how = f"by {signal.Signals(-event.code).name}" if event.code < 0 else f"with code {event.code}"
    again = "it is started again" if fate == "starts again" else ""
    if fate == "stopped" and event.code in (0, -signal.SIGTERM):
        said = [f"{event.node} has stopped"]
    elif again and event.code == 0:
        said = [f"{event.node} ended {how}; {again}"]
    else:
        log = f"all that it said is in {launcher.log_path(event.node)}"
        told = "was told to stop and " if fate == "stopped" else ""
        said = [
            f"{event.node} {told}ended {how}: {why or 'it printed nothing'}",
            f"{again}; {log}" if again else log,
        ]
    sys.stderr.write("".join(f"kvcomm: {line}\n" for line in said))
    sys.stderr.flush()
