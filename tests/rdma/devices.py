"""The RDMA devices of this machine as its kernel tells them: no library, no driver, no rights needed."""

from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")


def devices() -> list[str]:
    """Names of all RDMA devices, in order; none where the kernel knows no RDMA."""
    return sorted(path.name for path in _DEVICES.iterdir()) if _DEVICES.is_dir() else []


def counters(device: str) -> dict[str, int]:
    """The hardware counters of the device's first port, e.g. `sent_pkts`; soft-RoCE has them too."""
    folder = _DEVICES / device / "ports/1/hw_counters"
    return {path.name: _number(path) for path in sorted(folder.iterdir())}


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except ValueError:  # `lifespan` and its like are settings
        return 0
