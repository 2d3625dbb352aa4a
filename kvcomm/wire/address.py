"""``Address``: where a data wire listens, ``tcp://host:port`` or ``unix:///path``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvcomm.errors import ConfigError

UNIX_PATH_BYTES_MAX = 107
"""``sun_path`` of Linux without its end mark."""


@dataclass(frozen=True, slots=True)
class Address:
    """Either ``path`` is set (a unix socket) or ``host`` and ``port`` are."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


@lru_cache(maxsize=1024)
def parse_address(text: str) -> Address:
    """Inverse of ``str(address)``.

    Raises:
        ConfigError: neither form, no port, or a path too long for a unix socket.
    """
    scheme, _, rest = text.partition("://")
    if scheme == "unix" and rest.startswith("/"):
        if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
            raise ConfigError(
                f"the path of {text} is longer than a unix socket's {UNIX_PATH_BYTES_MAX} bytes; "
                "use a shorter directory (KVCOMM_RUNTIME_DIR)"
            )
        return Address(path=rest)
    host, colon, port = rest.rpartition(":")
    if scheme == "tcp" and host and colon and port.isdecimal() and int(port) < 65536:
        return Address(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    raise ConfigError(f"{text!r} is not an address; write tcp://host:port or unix:///path")
