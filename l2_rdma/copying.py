"""``copy_bytes``: a memory copy that lets other threads run."""

from __future__ import annotations

import ctypes

RELEASE_GIL_BYTES = 256 << 10
"""From here on the GIL is released: a slice assignment holds it, 0.7 ms for 16 MiB."""


def copy_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy all of ``source``, C-contiguous, any format, to the equally long, writable ``destination``.

    Raises:
        ValueError: the lengths differ.
    """
    if destination.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes to {destination.nbytes}")
    if source.nbytes < RELEASE_GIL_BYTES:
        destination.cast("B")[:] = source.cast("B")
        return
    ctypes.memmove(address_of(destination, writable=True), address_of(source), source.nbytes)


def address_of(view: memoryview, *, writable: bool = False) -> int:
    """Of the first byte; valid while ``view`` lives.  Read-only memory too, unless it must be ``writable``
    (``ctypes``' own ``from_buffer``, five times as fast, refuses that)."""
    if view.nbytes and not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _PyBuffer()
    _get_buffer(view, ctypes.byref(buffer), _WRITABLE if writable else _SIMPLE)
    address = buffer.buf
    _release(ctypes.byref(buffer))
    assert address is not None
    return int(address)


class _PyBuffer(ctypes.Structure):
    """CPython's ``Py_buffer`` (part of the stable ABI since 3.11); only ``buf`` is looked at."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE, _WRITABLE = 0, 1  # PyBUF_SIMPLE, PyBUF_WRITABLE
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_PyBuffer),)
_release.restype = None
