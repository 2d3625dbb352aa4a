"""``Credentials``: tokens that a cluster's servers can check without a table, and the tenant digest they stand for.

A cluster has one secret of 32 bytes.  The token of tenant ``T`` is ``T:HMAC(secret, "token", T)``; the tenant digest that
goes into namespaces and record names is ``HMAC(secret, "tenant", T)``.  So a caller proves its tenant, never claims it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from kvcomm.errors import Unauthenticated
from kvcomm.namespace import TenantDigest

SECRET_BYTES = 32
NODE_TENANT = "kvcomm-node"
"""The cluster's own processes: the only caller whose replication messages are accepted."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a server (or the launcher of a cluster) needs to make and check tokens.

    Raises ``ValueError`` if the secret is not 32 bytes.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"the cluster secret must be {SECRET_BYTES} bytes, got {len(self.secret)}")

    def token(self, tenant: str) -> str:
        """The token to give to ``tenant``."""
        if not tenant or ":" in tenant:
            raise ValueError("a tenant's name is not empty and holds no ':'")
        return f"{tenant}:{self._digest(b'token', tenant).hex()}"

    def tenant_of(self, token: str) -> str:
        """The tenant that ``token`` proves.

        Raises:
            Unauthenticated: the token is malformed or not one of this cluster's.
        """
        tenant, colon, proof = token.partition(":")
        if not colon or not hmac.compare_digest(proof.encode(), self._digest(b"token", tenant).hex().encode()):
            raise Unauthenticated("the token is not one of this cluster's; use the token that the cluster was started with")
        return tenant

    def tenant_digest(self, tenant: str) -> TenantDigest:
        """16 bytes that stand for ``tenant`` in identities; unguessable without the secret."""
        return TenantDigest(self._digest(b"tenant", tenant)[:16])

    def _digest(self, purpose: bytes, tenant: str) -> bytes:
        return hmac.new(self.secret, purpose + b"\x00" + tenant.encode(), hashlib.sha256).digest()
