"""Which transports run in this process, and why the others do not.

Each is a module of its name with ``make_transport(options)`` for a client and ``make_provider(region,
options)`` for a pool, either of which raises ``Unavailable`` with a reason for the operator.  It is imported
when it is asked for: pyverbs and CUDA are nobody's business who has not configured them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from kvcomm.errors import KVCommError, Unavailable
from l2_rdma.region import Region
from l2_rdma.transports.port import Provider, Transport, TransportName, WireOptions

T = TypeVar("T")


@dataclass(slots=True)
class Found(Generic[T]):
    """``running`` in the order that was asked for; ``refused`` maps the rest to the reason."""

    running: dict[TransportName, T] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def find_transports(names: Sequence[str], options: WireOptions) -> Found[Transport]:
    """This process's side of each wire."""
    return _find(names, lambda module: cast("Transport", module.make_transport(options)))


def find_providers(names: Sequence[str], region: Region, options: WireOptions) -> Found[Provider]:
    """A pool's side of each wire."""
    # Of a region with its slots on a GPU the file holds the headers only: the other wires would serve holes.
    on_host = region.device is None
    served = [name for name in names if on_host or name == "cuda"]
    found = _find(served, lambda module: cast("Provider", module.make_provider(region, options)))
    there = "the pool keeps its blocks in a GPU's memory, which only cuda reaches"
    found.refused |= {name: there for name in names if name not in served}
    return found


def _find(names: Sequence[str], make: Callable[[Any], T]) -> Found[T]:
    found: Found[T] = Found()
    for name in names:
        known = cast("TransportName", name)
        try:
            module = importlib.import_module(f"l2_rdma.transports.{name}")
            found.running[known] = make(module)
        except KVCommError as error:
            found.refused[known] = error.message
        except ImportError as error:
            found.refused[known] = Unavailable(f"not installed here: {error}").message
    return found
