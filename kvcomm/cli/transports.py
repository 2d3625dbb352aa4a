"""What ``kvcomm doctor`` finds of the transports: which one would be used to a pool, and why no other."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, cast

from kvcomm.cli.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console

    from kvcomm.cli.trials import Trial
    from l2_rdma.choice import Choice
    from l2_rdma.transports.port import TransportName


_GRAVITY: dict[str, Literal["ok", "note", "problem"]] = {
    "works": "ok",
    "refused": "note",  # few hosts have every wire
    "failed": "problem",
}
_OF_ONE_HOST = ("shm", "cuda")
_FACTS = {"device": "device", "mtu": "MTU", "gid": "GID", "gdr": "GPUDirect"}
"""Those that have a column, where a transport tells them; the others get a line."""


@dataclass(frozen=True, slots=True)
class PoolTrials:
    """What came of every transport to one pool."""

    pool: str
    """For a person."""
    preferred: Sequence[str]
    """``network.transports``."""
    trials: Sequence[Trial]
    choice: Choice
    elsewhere: str | None
    """What would be used if the pool were on another host, as far as this one's measurements go."""
    listens_at: str = ""
    """Host that the pool's port is bound to, where that is known."""

    @property
    def problem(self) -> str:
        """Empty if there is none."""
        lost = self.choice.used is None
        return f"no configured transport reaches {self.pool}: its blocks are misses" if lost else ""

    def reason(self, trial: Trial) -> str:
        """Why it is not used; empty for the one that is."""
        if trial.reason and trial.verdict != "refused":
            return trial.reason
        return self.choice.reasons.get(trial.transport, "")

    def findings(self) -> Iterator[Finding]:
        for trial in self.trials:
            used = trial.transport == self.choice.used
            reason = self.reason(trial)
            detail = {"pool": self.pool, "used": used} | asdict(trial) | {"reason": reason}
            text = reason or f"used: 4 KiB in {_latency(trial)}, 1 MiB at {_bandwidth(trial)}"
            yield Finding(f"transport {trial.transport}", _GRAVITY[trial.verdict], text, detail)
        if self.problem:
            yield Finding("transports", "problem", self.problem)


def try_all(
    pool: str,
    names: Sequence[str],
    preferred: Sequence[str],
    attempt: Callable[[str], Trial],
    listens_at: str = "",
) -> PoolTrials:
    """Try each of ``names``, one after the other so that none is measured beside another."""
    from l2_rdma.choice import Measured, choose

    trials = [attempt(name) for name in names]
    measured = [
        Measured(cast("TransportName", name), trial.latency_s, trial.bytes_per_s)
        for name, trial in zip(names, trials, strict=True)
        if trial.verdict == "works" and not trial.reason
    ]
    refused = {trial.transport: trial.reason for trial in trials if trial.verdict != "works"}
    elsewhere = choose([each for each in measured if each.transport not in _OF_ONE_HOST], {}, preferred)
    choice = choose(measured, refused, preferred)
    return PoolTrials(pool, preferred, trials, choice, elsewhere.used, listens_at)


def show_trials(console: Console, tried: PoolTrials) -> None:
    """A table of what was measured, then a line for each that is not used, narrow enough for 80 columns."""
    from rich.markup import escape
    from rich.table import Table

    title = f"transports to {tried.pool}"
    table = Table(box=None, padding=(0, 2, 0, 0), title=escape(title), title_justify="left")
    columns = [name for name in _FACTS if any(trial.facts.get(name) for trial in tried.trials)]
    for heading in ("transport", "verdict", "4 KiB", "1 MiB", *(_FACTS[name] for name in columns)):
        table.add_column(heading, justify="right" if heading in ("4 KiB", "1 MiB", "MTU") else "left")
    styles = {"used": "green", "works": "green", "refused": "yellow", "failed": "red"}
    for trial in tried.trials:
        verdict = "used" if trial.transport == tried.choice.used else trial.verdict
        cells = [_latency(trial), _bandwidth(trial), *(trial.facts.get(name) or "-" for name in columns)]
        table.add_row(trial.transport, f"[{styles[verdict]}]{verdict}[/]", *map(escape, cells))
    console.print(table)
    for trial in tried.trials:
        for line in _lines(trial, tried.reason(trial)):
            console.print(escape(f"  {line}"), highlight=False, soft_wrap=True)
    if tried.choice.used in _OF_ONE_HOST and tried.elsewhere:
        console.print(escape(f"  {_for_others(tried)}"), highlight=False, soft_wrap=True)
    if tried.problem:
        console.print(f"  [red]problem[/]: {escape(tried.problem)}", highlight=False, soft_wrap=True)


def _for_others(tried: PoolTrials) -> str:
    """Whatever the wire, agents of other hosts have to call the pool's port first."""
    wire = f"{tried.elsewhere}, if the network is like this host's own (--peer)"
    if _is_loopback(tried.listens_at):
        wire = f"none, it listens on {tried.listens_at} (network.listen_host); else {wire}"
    return f"agents of other hosts: {wire}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _lines(trial: Trial, reason: str) -> Iterator[str]:
    if reason:
        yield f"{trial.transport}: {reason}"
    for name, fact in trial.facts.items():
        if fact and name not in _FACTS:
            yield f"{trial.transport} {name}: {fact}"


def _latency(trial: Trial) -> str:
    if trial.verdict != "works":
        return "-"
    if trial.latency_s >= 1e-3:
        return f"{trial.latency_s * 1e3:.1f} ms"
    return f"{trial.latency_s * 1e6:.0f} us" if trial.latency_s >= 1e-5 else f"{trial.latency_s * 1e6:.1f} us"


def _bandwidth(trial: Trial) -> str:
    if trial.verdict != "works":
        return "-"
    if trial.bytes_per_s >= 1e9:
        return f"{trial.bytes_per_s / 1e9:.1f} GB/s"
    return f"{trial.bytes_per_s / 1e6:.0f} MB/s"
