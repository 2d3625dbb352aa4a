"""deploy/softroce/qemu: the archive that the kernel unpacks, its modules, the kernel in a boot image."""

import gzip
import importlib.util
import lzma
import stat
import struct
from types import ModuleType

import pytest

from tests.house.source import ROOT


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"deploy/softroce/qemu/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


initramfs = _script("initramfs")
vmlinux = _script("vmlinux")


def _unpacked(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """name -> (mode, content), read as the kernel's init/initramfs.c reads it."""
    found: dict[str, tuple[int, bytes]] = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * k : at + 14 + 8 * k], 16) for k in range(13)]
        length, name_length = fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_length - 1].decode()
        assert archive[at + 110 + name_length - 1] == 0
        at = (at + 110 + name_length + 3) // 4 * 4
        content = archive[at : at + length]
        at = (at + length + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert at == len(archive)
            return found
        found[name] = (fields[1], content)


def test_an_archive_holds_what_was_put_in() -> None:
    entries = [("bin", stat.S_IFDIR | 0o755, b""), *((f"f{n}", stat.S_IFREG | n, b"x" * n) for n in range(9))]
    assert _unpacked(initramfs.archive(entries)) == {name: (mode, data) for name, mode, data in entries}


def test_modules_come_after_what_they_depend_on_and_once() -> None:
    depends = {"rxe": ["ib_core", "udp_tunnel"], "ib_uverbs": ["ib_core"], "ib_core": [], "udp_tunnel": []}
    order = initramfs.in_order(["rxe", "ib_uverbs", "rxe", "built_in"], depends)
    assert order == ["ib_core", "udp_tunnel", "rxe", "ib_uverbs"]


@pytest.mark.parametrize(
    ("info", "depends"),
    [
        (b"\0license=GPL\0depends=ib-core,udp_tunnel\0name=rdma_rxe\0", ["ib_core", "udp_tunnel"]),
        (b"\0depends=\0retpoline=Y\0", []),
        (b"\0license=GPL\0", []),
    ],
)
def test_a_module_says_what_it_depends_on(info: bytes, depends: list[str]) -> None:
    assert initramfs.depends_of(b"\x7fELF" + info) == depends


def _boot_image(payload: bytes, setup_sectors: int = 3) -> bytes:
    head = bytearray((setup_sectors + 1) * 512)
    head[0x1F1] = setup_sectors
    head[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", head, 0x248, 64, len(payload))
    return bytes(head) + bytes(64) + payload + b"behind the payload"


@pytest.mark.parametrize("compress", [lzma.compress, gzip.compress])
def test_the_kernel_comes_out_of_a_boot_image(compress) -> None:
    kernel = b"\x7fELF" + bytes(range(256)) * 64
    assert vmlinux.bare_kernel(_boot_image(compress(kernel) + struct.pack("<I", len(kernel)))) == kernel


@pytest.mark.parametrize(
    ("image", "complaint"),
    [
        (bytes(2048), "no x86 boot image"),
        (_boot_image(b"plainly" + bytes(4)), "706c6169 is compressed in an unknown way"),
        (_boot_image(lzma.compress(b"a text") + bytes(4)), "payload is no ELF file"),
    ],
)
def test_what_is_no_such_image_is_refused(image: bytes, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        vmlinux.bare_kernel(image)
