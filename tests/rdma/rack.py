"""A rack in one kernel: soft-RoCE devices on ports of one bridge, as `deploy/softroce/rack` makes them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """One device, and the port of the bridge that its cable is in."""

    number: int

    @property
    def device(self) -> str:
        return f"rx{self.number}"

    @property
    def address(self) -> str:
        """Where RoCE packets go. Control connections are made on 127.0.0.1, not here."""
        return f"198.51.100.{self.number}"

    @property
    def _port(self) -> str:
        return f"w{self.number}p"

    @contextmanager
    def losing(self, percent: float) -> Iterator[None]:
        """The bridge loses this share of the packets to this host, chosen at random."""
        _order(
            "tc", "qdisc", "add", "dev", self._port, "root", "netem", "limit", "10000", "loss", f"{percent}%"
        )
        try:
            yield
        finally:
            _order("tc", "qdisc", "delete", "dev", self._port, "root")

    def pull(self) -> None:
        """Takes the cable out. What is under way is lost, in both directions."""
        _order("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Puts the cable in again; a bridge without a spanning tree forwards at once."""
        _order("ip", "link", "set", self._port, "up")


def _order(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
