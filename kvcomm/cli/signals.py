"""When a role process ends: on SIGINT and SIGTERM, and when the pipe from its parent closes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys


def stop_event(lifeline: bool) -> asyncio.Event:
    """An event that is set when this process should end.

    With ``lifeline`` standard input is a pipe that nobody writes to; its end is the parent's end.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if lifeline:
        loop.add_reader(sys.stdin.fileno(), _at_end, loop, stop)
    return stop


def _at_end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()
