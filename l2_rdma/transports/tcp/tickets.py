"""``Tickets``: who may open streams to a region, and on whose behalf."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from kvcomm.errors import Refused
from l2_rdma.transports.tcp.protocol import SECRET_BYTES

TICKET_TTL_S = 15.0
TICKETS_PER_HOLDER_MAX = 16


@dataclass(slots=True)
class _Ticket:
    holder: int
    secret: bytes
    expires_at: float
    uses_left: int


class Tickets:
    """Each is good for a few streams within :data:`TICKET_TTL_S`, and dies with its holder.

    A ticket is looked up by its number, which is no secret, and its secret compared in constant time.

    Args:
        draw: so many random bytes.
    """

    def __init__(self, draw: Callable[[int], bytes]) -> None:
        self._draw = draw
        self._tickets: dict[int, _Ticket] = {}
        self._next_number = 1

    def issue(self, holder: int, use_count: int, now: float) -> tuple[int, bytes]:
        """Number and secret.

        Raises:
            Refused: the holder has too many unused ones.
        """
        self._expire(now)
        if sum(ticket.holder == holder for ticket in self._tickets.values()) >= TICKETS_PER_HOLDER_MAX:
            raise Refused(
                f"{TICKETS_PER_HOLDER_MAX} channels are being opened already; connect with the tickets got, "
                f"or wait {TICKET_TTL_S:.0f} s"
            )
        number, secret = self._next_number, self._draw(SECRET_BYTES)
        self._next_number += 1
        self._tickets[number] = _Ticket(holder, secret, now + TICKET_TTL_S, use_count)
        return number, secret

    def redeem(self, number: int, secret: bytes, now: float) -> int | None:
        """The holder whose ticket this is; ``None`` if it is nobody's."""
        self._expire(now)
        ticket = self._tickets.get(number)
        if ticket is None or not hmac.compare_digest(ticket.secret, secret):
            return None
        ticket.uses_left -= 1
        if not ticket.uses_left:
            del self._tickets[number]
        return ticket.holder

    def revoke(self, holder: int) -> None:
        """The holder is gone."""
        for number in [number for number, ticket in self._tickets.items() if ticket.holder == holder]:
            del self._tickets[number]

    def _expire(self, now: float) -> None:
        while self._tickets:  # in the order of their numbers, which is that of their deadlines
            number = next(iter(self._tickets))
            if self._tickets[number].expires_at > now:
                return
            del self._tickets[number]
