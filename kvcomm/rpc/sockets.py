"""Sockets of the data wire: tuned the same on both sides, connected and listened on by :class:`Address`."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import suppress

from kvcomm.errors import Refused
from kvcomm.wire.address import Address

_BACKLOG = 1024
_UNIX_BUFFER_BYTES = 1 << 20  # the kernel clips this to its own bound
_KEEPALIVE = (
    # A peer that vanished without a word (power, cable) frees what it held after about 25 s.
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 25_000),
)


def tune(connection: socket.socket) -> None:
    """Small messages leave at once, dead peers are noticed, and a block fits into the buffers of a unix
    socket.

    TCP buffers are left alone: fixing them switches the kernel's own tuning off.
    """
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def set_timeout_option(connection: socket.socket, option: int, timeout_s: float) -> None:
    """``SO_RCVTIMEO`` or ``SO_SNDTIMEO``; 0 would mean for ever, so there is a least wait of 1 us."""
    whole_s = int(timeout_s)
    micros = max(1, int((timeout_s - whole_s) * 1e6)) if whole_s == 0 else int((timeout_s - whole_s) * 1e6)
    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole_s, micros))


def start_connecting(address: Address, timeout_s: float) -> socket.socket:
    """A non-blocking socket on its way to ``address``; it is writable when it is there or failed
    (``SO_ERROR``).

    A unix socket connects at once, or within ``timeout_s`` when the server's backlog is full.  A host *name*
    is looked up by the system's resolver, which keeps its own time.

    Raises:
        OSError: it failed at once.
    """
    if address.path:
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: object = address.path
    else:
        family, _, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(connecting)
        if address.path:
            set_timeout_option(connecting, socket.SO_SNDTIMEO, timeout_s)
        else:
            connecting.setblocking(False)
        code = connecting.connect_ex(target)  # type: ignore[arg-type]
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        connecting.setblocking(False)
    except BaseException:
        connecting.close()
        raise
    return connecting


def connecting_result(connecting: socket.socket) -> None:
    """Raises ``OSError`` if the connection that was started has failed."""
    code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A non-blocking listening socket and where it is bound (port 0 is replaced by the one that was given
    out).

    A unix socket is for its owner alone (0600) from the moment it can be seen; the file that a dead server
    left is replaced.

    Raises:
        Refused: the address is in use or cannot be bound; the message names it.
    """
    try:
        return _listen_unix(address) if address.path else _listen_tcp(address)
    except OSError as error:
        advice = "stop that server or choose another" if error.errno == errno.EADDRINUSE else "choose another"
        raise Refused(f"cannot listen on {address}: {error.strerror or error}; {advice}") from error


def _listen_tcp(address: Address) -> tuple[socket.socket, Address]:
    family, _, _, _, target = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening, Address(host=address.host, port=listening.getsockname()[1])


def _listen_unix(address: Address) -> tuple[socket.socket, Address]:
    if _is_served(address.path):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # what bind makes has the mode of the socket: it is never wider
        with suppress(FileNotFoundError):
            os.unlink(address.path)
        listening.bind(address.path)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening, address


def _is_served(path: str) -> bool:
    """Whether a living server listens at ``path``; raises ``OSError`` if something else than a socket is
    there."""
    if not os.path.lexists(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code in (0, errno.EAGAIN):
        return True
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError(errno.EEXIST, "a file that is not a socket is in the way")
    return False
