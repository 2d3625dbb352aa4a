"""A token proves one tenant of one cluster, and nothing else proves anything."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcomm.credentials import NODE_TENANT, SECRET_BYTES, Credentials
from kvcomm.errors import Refused, Unauthenticated

OURS = Credentials(bytes(range(SECRET_BYTES)))
THEIRS = Credentials(bytes(SECRET_BYTES))
tenants = st.text(min_size=1, max_size=256).filter(lambda name: name.isprintable() and ":" not in name)


@given(tenants)
def test_a_token_proves_its_tenant(tenant: str):
    assert OURS.tenant_of(OURS.token(tenant)) == tenant


def test_a_token_is_what_the_docstring_says():
    proof = hmac.new(OURS.secret, b"token\x00acme", hashlib.sha256).hexdigest()
    assert OURS.token("acme") == f"acme:{proof}"
    assert (
        OURS.tenant_digest("acme") == hmac.new(OURS.secret, b"tenant\x00acme", hashlib.sha256).digest()[:16]
    )


@given(st.text())
def test_whatever_else_comes_is_refused_and_never_crashes(token: str):
    with pytest.raises(Unauthenticated):
        OURS.tenant_of(token)


PROOF = OURS.token("acme").partition(":")[2]


@pytest.mark.parametrize(
    "token",
    [
        "",
        ":",
        "acme",
        "acme:",
        PROOF,
        f":{PROOF}",
        f"other:{PROOF}",
        f"acme:{PROOF}0",
        f"acme:{PROOF[:-1]}",
        f"acme:{PROOF.upper()}",
        f"acme: {PROOF}",
        f" acme:{PROOF}",
        f"acme::{PROOF}",
        f"acme\x00:{PROOF}",
        f"\ud800:{PROOF}",
        "acme:\ud800",
        f"{NODE_TENANT}:{PROOF}",
        THEIRS.token("acme"),
        # An empty name would be a tenant that nobody can be given; its HMAC must not open anything either.
        ":" + hmac.new(OURS.secret, b"token\x00", hashlib.sha256).hexdigest(),
        # The digest that servers put into identities is no proof.
        "acme:" + OURS.tenant_digest("acme").hex(),
    ],
)
def test_near_misses_are_refused(token: str):
    with pytest.raises(Unauthenticated, match="token that the cluster was started with"):
        OURS.tenant_of(token)


def test_every_changed_digit_is_refused():
    for at, digit in enumerate(PROOF):
        changed = PROOF[:at] + ("0" if digit != "0" else "1") + PROOF[at + 1 :]
        with pytest.raises(Unauthenticated):
            OURS.tenant_of(f"acme:{changed}")


def test_digests_differ_by_tenant_and_by_cluster():
    digests = {c.tenant_digest(name) for c in (OURS, THEIRS) for name in ("a", "b", "ab", NODE_TENANT)}
    assert len(digests) == 8
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize("tenant", ["", "a:b", "a\nb", "a\x00", "\ud800", "x" * 257])
def test_a_name_that_could_not_be_a_token_is_the_callers_mistake(tenant: str):
    with pytest.raises(ValueError, match="tenant's name"):
        OURS.token(tenant)


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "x" * 32, None])
def test_only_32_bytes_are_a_secret(secret: Any):
    with pytest.raises(ValueError, match="32 bytes"):
        Credentials(secret)


def test_the_secret_is_never_printed():
    secret = b"do not print me, not even by err"
    shown = repr(Credentials(secret)) + str(Credentials(secret))
    assert secret.decode() not in shown and secret.hex() not in shown


def test_unauthenticated_is_a_refusal():
    assert issubclass(Unauthenticated, Refused)
