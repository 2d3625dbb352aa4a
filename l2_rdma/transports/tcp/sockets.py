"""How the sockets of both sides are set up."""

from __future__ import annotations

import socket
import struct

SEND_BUFFER_BYTES = 512 << 10
"""In the kernel, before the receiver takes them: enough for the delays of a network, and so few that they are
still in the processor's cache when a receiver on the same host copies them."""
SILENCE_MAX_S = 15
"""After so long without an acknowledgement, of data or of a keepalive, the other host counts as gone; so does
a process that takes nothing off its socket for so long."""
_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_INTERVAL_S = 3
_KEEPALIVE_COUNT = 3


def tune(stream: socket.socket) -> None:
    """Answer at once, notice a vanished host, take much at once."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MAX_S * 1000)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def bound_receive(stream: socket.socket, timeout_s: float) -> None:
    """A blocking receive returns after so long with what it has."""
    seconds, rest = divmod(timeout_s, 1)
    stream.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6))
    )
