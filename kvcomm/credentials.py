"""``Credentials``: tokens that a cluster's servers can check without a table, and the tenant digest they
stand for.

A cluster has one secret of 32 bytes.  The token of tenant ``T`` is ``T:HMAC(secret, "token", T)``; the tenant
digest that goes into namespaces and record names is ``HMAC(secret, "tenant", T)``.  So a caller proves its
tenant, never claims it.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from kvcomm.errors import Unauthenticated
from kvcomm.namespace import TenantDigest

SECRET_BYTES = 32
TENANT_CHARACTERS_MAX = 256
NODE_TENANT = "kvcomm-node"
"""The cluster's own processes: the only caller whose replication messages are accepted."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a server (or the launcher of a cluster) needs to make and check tokens.

    Raises ``ValueError`` if the secret is not 32 bytes.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not _is_secret(self.secret):
            raise ValueError(f"the cluster secret must be {SECRET_BYTES} bytes")

    def token(self, tenant: str) -> str:
        """The token to give to ``tenant``.

        Raises:
            ValueError: the name is empty, holds a ``:`` or a character that cannot be printed, or is over
                :data:`TENANT_CHARACTERS_MAX`.
        """
        if not _is_tenant(tenant):
            limit = TENANT_CHARACTERS_MAX
            raise ValueError(f"a tenant's name is 1 to {limit} printable characters without ':'")
        return f"{tenant}:{self._digest(b'token', tenant).hex()}"

    def tenant_of(self, token: str) -> str:
        """The tenant that ``token`` proves.

        Raises:
            Unauthenticated: the token is malformed or not one of this cluster's.
        """
        tenant, _, proof = token.partition(":")
        if not _is_tenant(tenant) or not self._proves(proof, tenant):
            raise Unauthenticated(
                "the token is not one of this cluster's; use the token that the cluster was started with"
            )
        return tenant

    def tenant_digest(self, tenant: str) -> TenantDigest:
        """16 bytes that stand for ``tenant`` in identities; unguessable without the secret."""
        return TenantDigest(self._digest(b"tenant", tenant)[:16])

    def _proves(self, proof: str, tenant: str) -> bool:
        expected = self._digest(b"token", tenant).hex().encode()
        return hmac.compare_digest(proof.encode(errors="replace"), expected)

    def _digest(self, purpose: bytes, tenant: str) -> bytes:
        return hmac.new(self.secret, purpose + b"\x00" + tenant.encode(), hashlib.sha256).digest()


def _is_secret(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == SECRET_BYTES


def _is_tenant(name: str) -> bool:
    """Printable also means encodable: lone surrogates are not, so no digest of a name can fail."""
    return 0 < len(name) <= TENANT_CHARACTERS_MAX and name.isprintable() and ":" not in name
