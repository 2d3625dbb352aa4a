"""``Ballot``: the number of one round of Paxos.

A ballot is ``(counter, node, incarnation)``, ordered in that order.  No two rounds of one record share one: a
proposer counts up within its process life, other nodes have other names, and a proposer that restarts, which
has forgotten where its counter was, has another incarnation (Rystsov 2018, section 2.2, wants ballots unique
and leaves the how open).

On the wire and on the disk a ballot is its *code*, bytes that order as ballots do::

    counter u64 big-endian | node, UTF-8 | 0 | incarnation u64 big-endian

so acceptors compare codes and need not take them apart.  The empty code stands for "none yet" and is below
all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcomm.errors import Corrupt

NO_BALLOT = b""
"""The code of "none yet"."""
COUNTER_MAX = 2**63 - 1
NODE_BYTES_MAX = 255
_U64_BYTES = 8


class BallotError(ValueError):
    """A ballot that no proposer can have."""


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """See the module.

    Raises:
        BallotError: the counter is not in ``[1, COUNTER_MAX]``, the incarnation has more than 64 bits, or the
            node's name is empty, too long or has a zero byte.
    """

    counter: int
    node: str
    incarnation: int

    def __post_init__(self) -> None:
        name = self.node.encode()
        if not 1 <= self.counter <= COUNTER_MAX or not 0 <= self.incarnation < 2**64:
            raise BallotError(f"a ballot's numbers are out of range: {self.counter}, {self.incarnation}")
        if not 0 < len(name) <= NODE_BYTES_MAX or b"\0" in name:
            raise BallotError(f"a ballot's node has 1 to {NODE_BYTES_MAX} bytes without zeros: {self.node!r}")

    @property
    def code(self) -> bytes:
        """The bytes that stand for it; see the module."""
        counter = self.counter.to_bytes(_U64_BYTES, "big")
        return b"%b%b\0%b" % (counter, self.node.encode(), self.incarnation.to_bytes(_U64_BYTES, "big"))

    @classmethod
    def from_code(cls, code: bytes) -> Ballot:
        """The inverse of :attr:`code`.

        Raises:
            Corrupt: no ballot has this code.
        """
        name, zero, incarnation = code[_U64_BYTES:].partition(b"\0")
        try:
            if not zero or len(incarnation) != _U64_BYTES:
                raise BallotError("its parts are missing")
            counter = int.from_bytes(code[:_U64_BYTES], "big")
            return cls(counter, name.decode(), int.from_bytes(incarnation, "big"))
        except ValueError as error:
            raise Corrupt(f"not a ballot: {code!r}: {error}") from error


class Ballots:
    """Gives out the ballots of one proposer, each once, each above everything :meth:`seen`."""

    def __init__(self, node: str, incarnation: int) -> None:
        self._node, self._incarnation = node, incarnation
        self._counter = 0

    def draw(self) -> bytes:
        """The code of a ballot that was never given out."""
        self._counter += 1
        return Ballot(self._counter, self._node, self._incarnation).code

    def seen(self, code: bytes) -> None:
        """Somebody is at this ballot.  Raises ``Corrupt`` when it is none."""
        if code != NO_BALLOT:
            self._counter = max(self._counter, Ballot.from_code(code).counter)
