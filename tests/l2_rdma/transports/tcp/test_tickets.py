"""Who gets in, and how often."""

from __future__ import annotations

from itertools import count

import pytest

from kvcomm.errors import Refused
from l2_rdma.transports.tcp.tickets import TICKET_TTL_S, TICKETS_PER_HOLDER_MAX, Tickets

_DRAWS = count(1)


def drawn(size: int) -> bytes:

    return next(_DRAWS).to_bytes(size, "big")


def test_a_ticket_is_good_for_so_many_streams() -> None:
    tickets = Tickets(drawn)
    number, secret = tickets.issue(7, 2, now=0.0)
    assert [tickets.redeem(number, secret, now=1.0) for _ in range(3)] == [7, 7, None]


def test_a_wrong_secret_is_no_ticket_and_costs_none() -> None:
    tickets = Tickets(drawn)
    number, secret = tickets.issue(7, 1, now=0.0)
    _, other = tickets.issue(8, 1, now=0.0)
    assert tickets.redeem(number, other, now=0.0) is None
    assert tickets.redeem(number, secret[:-1], now=0.0) is None
    assert tickets.redeem(number + 9, secret, now=0.0) is None
    assert tickets.redeem(number, secret, now=0.0) == 7


def test_a_ticket_does_not_last() -> None:
    tickets = Tickets(drawn)
    old = tickets.issue(7, 1, now=0.0)
    new = tickets.issue(7, 1, now=1.0)
    assert tickets.redeem(*old, now=TICKET_TTL_S) is None
    assert tickets.redeem(*new, now=TICKET_TTL_S) == 7


def test_a_ticket_dies_with_its_holder() -> None:
    tickets = Tickets(drawn)
    dead, alive = tickets.issue(7, 1, now=0.0), tickets.issue(8, 1, now=0.0)
    tickets.revoke(7)
    assert tickets.redeem(*dead, now=0.0) is None
    assert tickets.redeem(*alive, now=0.0) == 8


def test_a_holder_has_few_unused_tickets() -> None:
    tickets = Tickets(drawn)
    for _ in range(TICKETS_PER_HOLDER_MAX):
        tickets.issue(7, 1, now=0.0)
    with pytest.raises(Refused, match="being opened"):
        tickets.issue(7, 1, now=0.0)
    tickets.issue(8, 1, now=0.0)
    tickets.issue(7, 1, now=TICKET_TTL_S)
