"""``load_config``: the configuration of this process, read once at its edge."""

from __future__ import annotations

import os
from pathlib import Path

from kvcomm.config import Config, parse_config
from kvcomm.errors import ConfigError

CONFIG_VARIABLE = "KVCOMM_CONFIG"
CONFIG_NAME = "kvcomm.yaml"
CONFIG_BYTES_MAX = 1 << 20

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # version 2; the text "max" where there is no limit
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1; a number near 2^63 where there is none
)


def load_config(path: str | Path | None = None) -> Config:
    """The file at ``path``, else ``$KVCOMM_CONFIG``, else ``./kvcomm.yaml`` if there is one, else the
    defaults.

    Raises:
        ConfigError: the file was named and cannot be read, or its content cannot be used; the message starts
        with its path.
    """
    source = config_source(path)
    if source is None:
        return parse_config("", ram_bytes=ram_bytes())
    try:
        with source.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise ConfigError(f"is over {CONFIG_BYTES_MAX} bytes; that is no configuration")
        return parse_config(content.decode(), ram_bytes=ram_bytes())
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 text") from error
    except ConfigError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from error


def ram_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit where that is less."""
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine_bytes, *_cgroup_limits()])


def config_source(path: str | Path | None) -> Path | None:
    if path is not None:
        return Path(path)
    if named := os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    here = Path(CONFIG_NAME)
    return here if here.exists() else None


def _cgroup_limits() -> list[int]:
    found: list[int] = []
    for limit in _CGROUP_LIMITS:
        try:
            text = limit.read_text().strip()
        except OSError:
            continue  # the other version, or not in a control group
        if text.isdigit() and int(text):
            found.append(int(text))
    return found
