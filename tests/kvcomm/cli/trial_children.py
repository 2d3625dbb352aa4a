"""Children that do what a broken driver can do: ``python -m tests.kvcomm.cli.trial_children HOW ROLE``."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time

SERVING = {"address": "unix:///nowhere"}
WORKS = {"latency_s": 2e-6, "bytes_per_s": 5e9, "facts": {"device": "mlx5_0"}}
REFUSED = {"refused": "the peer is gone"}


def say(answer: object) -> None:
    sys.stdout.write((answer if isinstance(answer, str) else json.dumps(answer)) + "\n")
    sys.stdout.flush()


def end_with(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main(how: str, role: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    order = json.loads(sys.stdin.readline())
    assert (order["transport"], order["rdma_device"]) == ("verbs", "mlx5_0")
    if how == f"{role}-segfaults":
        sys.stderr.write("doorbell page unmapped\n\n")
        sys.stderr.flush()
        end_with(signal.SIGSEGV)
    if how == f"{role}-fails":
        raise RuntimeError("no driver for this device")
    if how == f"{role}-hangs":
        time.sleep(600)
    if how == f"{role}-babbles":
        say("libmlx5: warning")
    if how == "pool-dies-under-the-client" and role == "serve":
        say(SERVING)
        end_with(signal.SIGBUS)
    if how == "no-room" and role == "serve":
        say({"refused": "/dev/shm is full"})
        return
    say(SERVING if role == "serve" else REFUSED if "dies" in how or "refuses" in how else WORKS)
    if role == "serve":
        sys.stdin.read()
    if how == f"{role}-crashes-at-its-end":
        end_with(signal.SIGSEGV)
    if how == f"{role}-never-ends":
        sys.stdout.close()
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
