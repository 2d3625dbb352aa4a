"""From what was tried to what is said: to a person and to a program."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvcomm.cli.transports import PoolTrials, show_trials, try_all
from kvcomm.cli.trials import Trial

NAMES = ("shm", "cuda", "verbs", "tcp")
FACTS = {"device": "mlx5_0", "mtu": "4096", "gid": "3 RoCE v2", "gdr": "no"}
TRIALS = {
    "shm": Trial("shm", "refused", "the pool is on another host"),
    "cuda": Trial("cuda", "failed", "the probe process of the client died with SIGSEGV"),
    "verbs": Trial("verbs", "works", "", 3.2e-6, 12.5e9, FACTS | {"atomics": "HCA"}),
    "tcp": Trial("tcp", "works", "", 2.5e-3, 1.1e8),
}


def tried(trials: dict[str, Trial] = TRIALS, preferred: tuple[str, ...] = NAMES) -> PoolTrials:
    return try_all("pool-0", NAMES, preferred, trials.__getitem__)


def printed(what: PoolTrials, width: int = 100) -> list[str]:
    text = io.StringIO()
    show_trials(Console(file=text, width=width), what)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_the_table_says_what_was_measured_and_the_lines_why_not() -> None:
    assert printed(tried(), 80) == [
        "transports to pool-0",
        "transport  verdict   4 KiB      1 MiB  device   MTU  GID        GPUDirect",
        "shm        refused       -          -  -          -  -          -",
        "cuda       failed        -          -  -          -  -          -",
        "verbs      used     3.2 us  12.5 GB/s  mlx5_0  4096  3 RoCE v2  no",
        "tcp        works    2.5 ms   110 MB/s  -          -  -          -",
        "  shm: refused: the pool is on another host",
        "  cuda: the probe process of the client died with SIGSEGV",
        "  verbs atomics: HCA",
        "  tcp: slower: 21.6 ms against 171 us for a 2 MiB block",
    ]


def test_what_agents_of_other_hosts_would_use_is_told_where_this_host_needs_no_wire() -> None:
    near = Trial("shm", "works", "", 4e-6, 9e9)
    assert printed(tried(TRIALS | {"shm": near}))[-1] == (
        "  agents of other hosts: verbs, if the network is like this host's own (--peer)"
    )
    alone = {name: Trial(name, "refused", "no") for name in NAMES} | {"shm": near}
    assert "other hosts" not in "".join(printed(tried(alone)))


def test_columns_that_nobody_fills_are_left_out() -> None:
    only = {name: Trial(name, "works", "", 1e-5, 1e9) for name in NAMES}
    assert printed(tried(only))[1].split() == ["transport", "verdict", "4", "KiB", "1", "MiB"]


def test_a_crash_is_a_problem_and_a_refusal_a_note() -> None:
    findings = {each.subject: each for each in tried().findings()}
    verdicts = {name: findings[f"transport {name}"].verdict for name in NAMES}
    assert verdicts == {"shm": "note", "cuda": "problem", "verbs": "ok", "tcp": "ok"}
    assert findings["transport verbs"].text == "used: 4 KiB in 3.2 us, 1 MiB at 12.5 GB/s"
    assert findings["transport verbs"].detail["facts"]["gid"].startswith("3 ")
    assert findings["transport tcp"].detail["reason"].startswith("slower: ")
    assert findings["transport tcp"].detail["used"] is False
    assert "transports" not in findings


@pytest.mark.parametrize("preferred", [("shm",), ("shm", "cuda")])
def test_that_nothing_reaches_the_pool_is_a_problem(preferred: tuple[str, ...]) -> None:
    findings = list(tried(preferred=preferred).findings())
    assert findings[-1].verdict == "problem"
    assert "no configured transport reaches pool-0" in findings[-1].text
    assert printed(tried(preferred=preferred))[-1] == f"  problem: {findings[-1].text}"
