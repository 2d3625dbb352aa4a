"""``Binding``: pyverbs, whichever version is installed; imported when it is first asked for.

pyverbs 44 (Debian 12) has flat constants in ``pyverbs.enums``; from 59 on they are members of the classes of
``pyverbs.libibverbs_enums``.  All else that we use is the same.  Nobody but this module imports pyverbs, and
tests put a binding of their own in its place.
"""

from __future__ import annotations

import enum
import importlib
import os
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kvcomm.errors import Unavailable

_PACKAGE_ADVICE = "install your distribution's python3-pyverbs, of the version of its rdma-core"


@dataclass(frozen=True, slots=True)
class Binding:
    """The classes of pyverbs that we use, by their own names, and its constants."""

    get_device_list: Any
    Context: Any
    PD: Any
    MR: Any
    DmaBufMR: Any
    CQ: Any
    CompChannel: Any
    QP: Any
    QPCap: Any
    QPInitAttr: Any
    QPAttr: Any
    AHAttr: Any
    GlobalRoute: Any
    GID: Any
    SGE: Any
    SendWR: Any
    Error: type[Exception]
    """``PyverbsError``, the mother of all that it raises."""
    constants: Any
    """``IBV_...``, integers, as attributes."""


def load() -> Binding:
    """Import pyverbs.

    Raises:
        Unavailable: it is not installed, or does not fit the system's libibverbs.
    """
    try:
        modules = SimpleNamespace(
            **{
                name: importlib.import_module(f"pyverbs.{name}")
                for name in ("device", "pd", "mr", "cq", "qp", "addr", "wr", "pyverbs_error")
            }
        )
        constants = _constants()
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "pyverbs":
            raise Unavailable(f"pyverbs is not installed: {_PACKAGE_ADVICE}") from error
        raise Unavailable(f"pyverbs cannot be loaded ({error}): {_PACKAGE_ADVICE}") from error
    return Binding(
        get_device_list=modules.device.get_device_list,
        Context=modules.device.Context,
        PD=modules.pd.PD,
        MR=modules.mr.MR,
        DmaBufMR=modules.mr.DmaBufMR,
        CQ=modules.cq.CQ,
        CompChannel=modules.cq.CompChannel,
        QP=modules.qp.QP,
        QPCap=modules.qp.QPCap,
        QPInitAttr=modules.qp.QPInitAttr,
        QPAttr=modules.qp.QPAttr,
        AHAttr=modules.addr.AHAttr,
        GlobalRoute=modules.addr.GlobalRoute,
        GID=modules.addr.GID,
        SGE=modules.wr.SGE,
        SendWR=modules.wr.SendWR,
        Error=modules.pyverbs_error.PyverbsError,
        constants=constants,
    )


def explain(error: Exception) -> str:
    """What pyverbs says, in one line.  ``PyverbsRDMAError`` knows the kernel's answer, the rest is words."""
    code = getattr(error, "error_code", None)
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(code, int) and code > 0 and os.strerror(code) not in text:
        return f"{text} ({os.strerror(code)})"
    return text


def event_channel(binding: Binding, context: Any) -> tuple[Any, int | None]:
    """A completion channel, and the descriptor that becomes readable with its events.

    pyverbs 44 does not tell the descriptor; it is the one that appears when the channel is made.  ``None`` =
    it could not be told apart from others: then one polls.
    """
    with _one_at_a_time:
        before = _event_descriptors()
        channel = binding.CompChannel(context)
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            appeared = _event_descriptors() - before
            descriptor = appeared.pop() if len(appeared) == 1 else None
    return channel, descriptor


_one_at_a_time = threading.Lock()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "infinibandevent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:
            continue  # closed meanwhile, by another thread or as the listing's own
    return found


def _constants() -> Any:
    try:
        return importlib.import_module("pyverbs.enums")
    except ModuleNotFoundError:
        return flattened(importlib.import_module("pyverbs.libibverbs_enums"))


def flattened(module: Any) -> SimpleNamespace:
    """The constants of a module, and the members of its enum classes, as integers under their own names."""
    flat = {name: value for name, value in vars(module).items() if name.startswith("IBV")}
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, enum.Enum):
            flat |= {name: int(member.value) for name, member in value.__members__.items()}
    return SimpleNamespace(**flat)
