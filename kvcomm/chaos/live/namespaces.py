"""``Namespaces``: hosts that are network namespaces, joined by a bridge in a hub namespace of its own.

The hosts have addresses of 198.51.100.0/24 (TEST-NET-2, routed nowhere) and no way out: nothing is attached
to the machine's own namespace, no interface, route or rule.  A cut is a set of (in, out) pairs that the
bridge drops, changed in one nftables transaction, so any partition can be made, one way as well.  Needs root,
iproute2 and nftables; ``missing`` says what is not there.

A lab's name holds the number of its process: what a killed one left behind is removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from kvcomm.chaos.scenario import Loss, Slow, Step
from kvcomm.chaos.shapes import Cut
from kvcomm.errors import Unavailable

NETWORK = "198.51.100"
PREFIX = "kvchaos"
COMMAND_TIMEOUT_S = 20.0
_TOOLS = (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux"))
_NAMED = Path("/run/netns")
_LEFT = re.compile(rf"{PREFIX}-(\d+)-[a-z0-9]+")

_RULES = """
table bridge chaos {
  set cuts { type ifname . ifname; }
  chain loss { }
  chain forwarded {
    type filter hook forward priority 0; policy accept;
    iifname . oifname @cuts drop
    jump loss
  }
}
"""


@cache
def missing() -> str:
    """Why there can be no namespaces here; empty = there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool, package in (
        ("ip", "iproute2"),
        ("tc", "iproute2"),
        ("nft", "nftables"),
        ("nsenter", "util-linux"),
    ):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: {package})"
    try:
        Namespaces(1, "try").close()
    except Unavailable as error:
        return f"network namespaces cannot be made here: {error.message}"
    return ""


class Namespaces:
    """``count`` hosts, ``n1`` ...; everything is there when the constructor returns."""

    kind = "namespaces"
    able: frozenset[type[Step]] = frozenset({Loss, Slow})

    def __init__(self, count: int, name: str = "") -> None:
        """Raises ``Unavailable``: it cannot be made; nothing is left."""
        _sweep()
        self.nodes = [f"n{index}" for index in range(1, count + 1)]
        self._lab = f"{PREFIX}-{os.getpid()}-{name}"
        self._hub = f"{self._lab}hub"
        self._made: list[str] = []
        self._limited: set[str] = set()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def address(self, node: str) -> str:
        return f"{NETWORK}.{self._number(node)}"

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on ``node``; the process that is started becomes it."""
        return [*_enter(self._namespace(node)), *command]

    def cut(self, cuts: Iterable[Cut]) -> None:
        pairs = ", ".join(f'"v{self._number(a)}" . "v{self._number(b)}"' for a, b in sorted(cuts))
        add = f"add element bridge chaos cuts {{ {pairs} }}\n" if pairs else ""
        self._nft(f"flush set bridge chaos cuts\n{add}")

    def lose(self, percent: float) -> None:
        drop = f"add rule bridge chaos loss numgen random mod 1000 < {round(percent * 10)} drop\n"
        self._nft(f"flush chain bridge chaos loss\n{drop if percent else ''}")

    def slow(self, node: str, kbit_s: int) -> None:
        """Both ways."""
        limit = ["root", "tbf", "rate", f"{kbit_s}kbit", "burst", "16k", "latency", "400ms"]
        for namespace, device in self._devices(node):
            _run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, *limit])
        self._limited.add(node)

    def heal(self) -> None:
        self._nft("flush set bridge chaos cuts\nflush chain bridge chaos loss\n")
        for node in sorted(self._limited):
            for namespace, device in self._devices(node):
                _run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])
        self._limited.clear()

    def close(self) -> None:
        """Idempotent.  The processes on the hosts must have ended."""
        made, self._made = self._made, []
        for namespace in made:
            with suppress(Unavailable):
                _run(["ip", "netns", "delete", namespace])

    def _make(self) -> None:
        for namespace in (self._hub, *map(self._namespace, self.nodes)):
            self._made.append(namespace)
            _run(["ip", "netns", "add", namespace])
        links = ["link add br0 type bridge forward_delay 0", "link set br0 up"]
        for node in self.nodes:
            port = f"v{self._number(node)}"
            links += [
                f"link add {port} type veth peer name eth0 netns {self._namespace(node)}",
                f"link set {port} master br0 up",
            ]
        _run(["ip", "-n", self._hub, "-batch", "-"], "\n".join(links))
        for node in self.nodes:
            mine = ["link set lo up", f"addr add {self.address(node)}/24 dev eth0", "link set eth0 up"]
            _run(["ip", "-n", self._namespace(node), "-batch", "-"], "\n".join(mine))
        self._nft(_RULES)

    def _devices(self, node: str) -> list[tuple[str, str]]:
        return [(self._hub, f"v{self._number(node)}"), (self._namespace(node), "eth0")]

    def _nft(self, script: str) -> None:
        _run([*_enter(self._hub), "nft", "-f", "-"], script)

    def _namespace(self, node: str) -> str:
        return f"{self._lab}{node}"

    def _number(self, node: str) -> int:
        return self.nodes.index(node) + 1


def _enter(namespace: str) -> list[str]:
    return ["nsenter", f"--net={_NAMED / namespace}"]


def _run(command: Sequence[str], script: str | None = None) -> None:
    done = subprocess.run(
        command, input=script, check=False, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise Unavailable(f"{' '.join(command[:6])}: {said or f'code {done.returncode}'}")


def _sweep() -> None:
    """Remove the namespaces of labs whose process is gone."""
    if not _NAMED.is_dir():
        return
    for path in sorted(_NAMED.iterdir()):
        found = _LEFT.fullmatch(path.name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            with suppress(Unavailable):
                _run(["ip", "netns", "delete", path.name])
