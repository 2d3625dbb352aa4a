"""The format as fixed bytes.  A change of a key or header format shows here before it shows as a cold cache.

``python -m tests.golden.vectors`` writes the files anew; the diff is then the change of format to be
reviewed, and the domain strings and versions have to change with it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from kvcomm.block import BlockHeader, BlockKey, Incarnation, block_keys, header_for
from kvcomm.canonical import canonical_bytes
from kvcomm.manifest import Manifest
from kvcomm.namespace import TenantDigest
from kvcomm.streams import rollout_codec
from kvcomm.streams.chain import chain_of
from kvcomm.streams.context import StreamContext
from kvcomm.streams.events import Event, SlotRange, SpanId, ViewDigest
from kvcomm.streams.pool import BlockPool
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from kvcomm.streams.session import Session
from tests.namespaces import namespace

DIRECTORY = Path(__file__).parent
TENANT = TenantDigest(bytes(range(16)))
LINEAGE = bytes(range(32))
TOKENS = [(7 * index * index + 3) % 1_000 for index in range(70)]

VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "128, which needs a second byte for its sign": 128,
    "a big integer": -(2**70),
    "one as a float": 1.0,
    "minus zero": -0.0,
    "infinity": math.inf,
    "text": "KV-Zwischenspeicher für Agenten 🧠",
    "bytes": b"\x00\xff",
    "empty list": [],
    "nested": {"b": [1, 2.5, None], "a": {"": b""}, "ab": "x"},
}

NAMESPACES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tenant": {"tenant": TENANT},
    "everything": {
        "adapter": "lora/coder",
        "adapter_revision": "7",
        "tp_rank": 1,
        "tp_size": 2,
        "pp_rank": 2,
        "pp_size": 3,
        "dtype": "bfloat16",
        "block_tokens": 32,
        "rope": "yarn",
        "rope_parameters": {"theta": 1_000_000.0, "factor": 4.0, "original": 4096},
        "approximate": True,
        "attention": {"windows": [None, 512], "qk_norm": "rms"},
        "tenant": TENANT,
    },
}

KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "tenant": ("tenant", {}),
    "another start": ("plain", {"logical_start": 5}),
    "after a cut": ("plain", {"positions": [*range(20), *range(50, 100)], "lineage": LINEAGE}),
    "under a parent": ("plain", {"parent": BlockKey(bytes(reversed(range(32))))}),
    "with an extra": ("plain", {"extra": b"image"}),
    "everything": ("everything", {}),
}


def header(approximate: bool) -> BlockHeader:
    ns = namespace(**NAMESPACES["everything" if approximate else "plain"])
    payload = bytes(index * 31 % 256 for index in range(ns.block_bytes))
    parent, key = block_keys(ns, TOKENS[: 2 * ns.block_tokens])
    made = header_for(
        ns, key, parent, memoryview(payload), logical_start=ns.block_tokens, producer=Incarnation(2**64 - 3)
    )
    return made if approximate else BlockHeader.unpack(made.pack()[:248] + (77).to_bytes(8, "little"))


def manifest() -> Manifest:
    ns = namespace(tenant=TENANT)
    start = Manifest.empty(ns, logical_start=3, lineage=LINEAGE)
    return start.append(TOKENS[:40], ns).append(TOKENS[40:], ns, position=90)


def rollout() -> Rollout:
    """Of every kind of part one; the digests are not those that such events have."""
    span, digest = SpanId(LINEAGE), ViewDigest(bytes(reversed(range(32))))
    cut = (SlotRange(16, 32), SlotRange(48, 64))
    events = (
        Event("evict", 65, cut, span, reason="fenêtre", view_digest=digest),
        Event("weights", 65, weights_version=2, view_digest=digest),
        Event("restore", 66, span=span, insert_at=16, weights_version=2, view_digest=digest),
        Event("fork", 70, span=span, weights_version=2, view_digest=digest),
    )
    samples = (
        Sample(60, TOKENS[61], -0.5, Sampling()),
        Sample(61, TOKENS[62], -1e-9, Sampling()),
        Sample(69, 5, -2.5, Sampling(0.7, 20, 0.9)),
    )
    return Rollout.sealed("r-1 🧠", LINEAGE, 16, TOKENS, events, samples, range(64, 67), [67])


def stream() -> StreamContext:
    """Cut, archived, restored, forked, of two versions of weights, with a tail."""
    ns = namespace(tenant=TENANT)
    session = Session(BlockPool(16), ns, rows_max=1_000)
    session.commit(session.plan(TOKENS))
    session.protect(16)
    session.end_turn(16, 32)
    session.evict([(32, 48)], reason="fenêtre")
    kept = session.evict([(16, 32)], archive=True).span
    session.commit(session.plan(TOKENS[:21]))
    session.set_weights(2)
    session.evict([(16, 32)], archive=True)
    session.restore(kept)
    session = session.fork(LINEAGE)
    session.sampled(5)
    chain = chain_of(ns, session.tokens, session.events)
    return StreamContext.of(
        session,
        chain,
        producer=Incarnation(2**64 - 3),
        policy="tours 🧠",
        filler_rows=[66, 67],
        repeated_rows=[80],
    )


def computed() -> dict[str, dict[str, Any]]:
    """File name -> what it should hold."""
    return {
        "canonical": {name: canonical_bytes(value).hex() for name, value in VALUES.items()},
        "namespaces": {name: namespace(**changes).id.hex() for name, changes in NAMESPACES.items()},
        "keys": {
            name: [key.hex() for key in block_keys(namespace(**NAMESPACES[where]), TOKENS, **how)]
            for name, (where, how) in KEYS.items()
        },
        "headers": {name: header(name == "approximate").pack().hex() for name in ("exact", "approximate")},
        "manifests": {"jump": manifest().encode().hex()},
        "streams": {"binary": stream().encode().hex()},
        "rollouts": {
            "binary": rollout_codec.encode(rollout()).hex(),
            "json": rollout_codec.to_json(rollout()).decode(),
        },
    }


def recorded(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def record() -> None:
    for name, values in computed().items():
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        (DIRECTORY / f"{name}.json").write_text(text)


if __name__ == "__main__":
    record()
