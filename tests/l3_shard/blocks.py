"""Copies of a chain of blocks with random payloads, for tests of what holds them."""

from __future__ import annotations

import os

from kvcomm.block import NO_PARENT, BlockKey, Incarnation, block_keys, header_for
from tests.namespaces import namespace
from tests.peers import CREDENTIALS

TENANT = CREDENTIALS.tenant_digest("acme")
NAMESPACE = namespace(head_dim=256).for_tenant(TENANT)


def chain(count: int, first_token: int = 0) -> dict[BlockKey, bytes]:
    """Whole copies, ``header | payload``, by key, the head first."""
    tokens = range(first_token, first_token + count * NAMESPACE.block_tokens)
    copies, parent = {}, NO_PARENT
    for index, key in enumerate(block_keys(NAMESPACE, list(tokens))):
        payload = os.urandom(NAMESPACE.block_bytes)
        header = header_for(
            NAMESPACE, key, parent, memoryview(payload), logical_start=16 * index, producer=Incarnation(5)
        )
        copies[key] = header.pack() + payload
        parent = key
    return copies
