"""initramfs.py OUT MODULES_FOLDER MODULE... [--file NAME=PATH]...: a first root for a kernel with modules.

Holds the files (executable), /modules/NAME.ko for each module and all that it depends on, and /modules/order,
in which each comes after what it needs. No cpio, kmod or depmod: archives in the "newc" format and the field
`depends` of a module are simple, and this way the recipe needs no package more.
"""

import argparse
import gzip
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path


def in_order(wanted: Iterable[str], depends: Mapping[str, list[str]]) -> list[str]:
    """`wanted` and what they depend on, each after its own needs; what `depends` lacks is built in."""
    order: list[str] = []

    def add(module: str) -> None:
        if module in order or module not in depends:
            return
        for needed in depends[module]:
            add(needed)
        order.append(module)

    for module in wanted:
        add(module)
    return order


def depends_of(module: bytes) -> list[str]:
    """What a module (ELF) says of itself in its section .modinfo: `depends=a,b`, ended by a zero."""
    found = re.search(rb"\x00depends=([^\x00]*)\x00", module)
    return [name.replace("-", "_") for name in found.group(1).decode().split(",") if name] if found else []


def archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive (newc) of (name, mode with type, content), in their order; all are root's."""
    parts = []
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        ended = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(ended), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + ended
        parts += [_padded(header), _padded(content)]
    return b"".join(parts)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("modules", nargs="+")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH")
    arguments = parser.parse_args()

    paths = {path.stem.replace("-", "_"): path for path in arguments.folder.rglob("*.ko")}
    order = in_order(arguments.modules, {name: depends_of(path.read_bytes()) for name, path in paths.items()})
    folders = ("bin", "dev", "layer", "machine", "memory", "modules", "new", "proc", "sys")
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in folders]
    for pair in arguments.file:
        name, _, path = pair.partition("=")
        entries.append((name, stat.S_IFREG | 0o755, Path(path).read_bytes()))
    entries += [(f"modules/{name}.ko", stat.S_IFREG | 0o644, paths[name].read_bytes()) for name in order]
    entries.append(("modules/order", stat.S_IFREG | 0o644, "".join(f"{name}\n" for name in order).encode()))
    # Quickly: a megabyte more costs nothing, and this runs once.
    arguments.out.write_bytes(gzip.compress(archive(entries), compresslevel=1, mtime=0))


if __name__ == "__main__":
    main()
