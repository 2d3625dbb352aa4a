"""vmlinux.py BZIMAGE VMLINUX: the bare kernel (ELF) that an x86 boot image carries.

The image's header is specified in the kernel's Documentation/arch/x86/boot.rst.
"""

import gzip
import lzma
import struct
import subprocess
import sys
from pathlib import Path

_SECTOR_BYTES = 512
_SETUP_SECTORS_AT = 0x1F1
_MAGIC_AT = 0x202
_PAYLOAD_AT = 0x248  # offset and length of the payload, u32 each, from the end of the set-up code
_SIZE_BYTES = 4  # the payload ends with its size before compression


def bare_kernel(image: bytes) -> bytes:
    """The ELF file in a boot image. ValueError if it is no such image, or compressed in another way."""
    if image[_MAGIC_AT : _MAGIC_AT + 4] != b"HdrS":
        raise ValueError("this is no x86 boot image")
    setup_sectors = image[_SETUP_SECTORS_AT] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD_AT)
    start = (setup_sectors + 1) * _SECTOR_BYTES + offset
    kernel = _decompressed(image[start : start + length - _SIZE_BYTES])
    if not kernel.startswith(b"\x7fELF"):
        raise ValueError("the boot image's payload is no ELF file")
    return kernel


def _decompressed(payload: bytes) -> bytes:
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.decompress(payload)
    if payload.startswith(b"\x1f\x8b"):
        return gzip.decompress(payload)
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        return subprocess.run(["zstd", "-dcq"], input=payload, stdout=subprocess.PIPE, check=True).stdout
    raise ValueError(f"a payload that begins with {payload[:4].hex()} is compressed in an unknown way")


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(bare_kernel(Path(sys.argv[1]).read_bytes()))
