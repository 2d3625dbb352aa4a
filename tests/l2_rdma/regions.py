"""Small regions in plain memory, blocks whose bytes follow from a number, and an owner over them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from xxhash import xxh3_64_intdigest

from kvcomm.block import (
    GENERATION_OFFSET,
    HEADER_BYTES,
    NO_PARENT,
    ROOT_LINEAGE,
    BlockHeader,
    BlockKey,
    Generation,
    Incarnation,
)
from kvcomm.namespace import NamespaceId, TenantDigest
from kvcomm.wire.messages import Grant, Want
from l2_rdma.layout import REGION_HEADER_BYTES, RegionHeader, RegionLayout, plan_layout
from l2_rdma.owner import Owner, SlotLease

TENANT = TenantDigest(b"tenant-of-tests!")
OTHER_TENANT = TenantDigest(b"someone-else-s-t")
PAYLOAD_BYTES = 768
COPY_BYTES = HEADER_BYTES + PAYLOAD_BYTES
SLAB_BYTES = 4096
"""Four slots of ``COPY_BYTES``."""


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"key %d" % number).digest())


def payload_of(number: int, payload_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Bytes that name the block they belong to, every eight of them."""
    return number.to_bytes(8, "little") * (payload_bytes // 8)


def header_of(number: int, payload: bytes | None = None, **changes: Any) -> BlockHeader:
    payload = payload_of(number) if payload is None else payload
    header = BlockHeader(
        key=key_of(number), parent=NO_PARENT, namespace=NamespaceId(bytes(32)), lineage=ROOT_LINEAGE,
        tenant=TENANT, logical_start=0, token_count=16, dtype="float16", codec="raw",
        payload_bytes=len(payload), producer=Incarnation(7), payload_checksum=xxh3_64_intdigest(payload),
    )  # fmt: skip
    return replace(header, **changes)


def layout_of(slab_count: int = 2, **changes: Any) -> RegionLayout:
    """A region of ``slab_count`` slabs of 4 KiB."""
    options = {"slab_bytes": SLAB_BYTES, "index_entries": 64, "hazard_count": 64} | changes
    overhead = plan_layout(1 << 20, **options).slots_offset
    return plan_layout(overhead + slab_count * options["slab_bytes"], **options)


def region_header(layout: RegionLayout, **changes: Any) -> RegionHeader:
    header = RegionHeader("tests", "pool-0", TENANT, Incarnation(11), Generation(1_000), layout)
    return replace(header, **changes)


class OwnedMemory:
    """An owner over plain memory, and the writes that a client would do."""

    def __init__(self, slab_count: int = 2, *, layout: dict[str, Any] | None = None, **options: Any) -> None:
        self.layout = layout_of(slab_count, **(layout or {}))
        self.header = region_header(self.layout, tenant=options.pop("region_tenant", TENANT))
        self.memory = memoryview(bytearray(self.layout.region_bytes))
        self.memory[: len(self.header.pack())] = self.header.pack()
        self.words = self.memory.cast("Q")
        self.owner = Owner(self.memory, self.header, **options)
        assert self.layout.index_offset == REGION_HEADER_BYTES

    def reserve(
        self, number: int, *, holder: int = 1, now: float = 0.0, copy_bytes: int = COPY_BYTES
    ) -> Grant:
        return self.owner.reserve([Want(key_of(number), copy_bytes)], holder, TENANT, now)[0]

    def write(self, grant: Grant, number: int, payload: bytes | None = None, **changes: Any) -> None:
        payload = payload_of(number) if payload is None else payload
        self.memory[grant.offset : grant.offset + GENERATION_OFFSET] = header_of(
            number, payload, **changes
        ).pack()[:GENERATION_OFFSET]
        begin = grant.offset + HEADER_BYTES
        self.memory[begin : begin + len(payload)] = payload

    def put(self, number: int, *, holder: int = 1, now: float = 0.0, **changes: Any) -> str:
        """Reserve, write and publish; ``stored`` or the status that came instead."""
        grant = self.reserve(number, holder=holder, now=now)
        if grant.status != "granted":
            return grant.status
        self.write(grant, number, **changes)
        status = self.owner.publish([grant.token], holder, now, verify=True)[0]
        return "stored" if status == "published" else status

    def lease(self, number: int) -> SlotLease:
        lease = self.owner.lease(key_of(number), TENANT)
        assert lease is not None
        return lease

    def present(self, *numbers: int) -> list[bool]:
        return self.owner.present([key_of(number) for number in numbers], TENANT)

    def pin(self, word: int, offset: int) -> None:
        """What a reader stores in its hazard word."""
        self.words[self.layout.hazard_offset // 8 + word] = offset

    def offset_of(self, number: int) -> int:
        """Where a published block lies."""
        lease = self.lease(number)
        try:
            at = bytes(self.memory).find(bytes(lease.copy), self.layout.slots_offset)
        finally:
            lease.release()
        assert at >= 0
        return at
