"""``Ballot``: the number of one round of Paxos.

A ballot is ``(counter, node, incarnation)``, ordered in that order.  No two rounds of one record share one: a
proposer counts up within its process life, other nodes have other names, and a proposer that restarts, which
has forgotten where its counter was, has another incarnation (Rystsov 2018, section 2.2, wants ballots unique
and leaves the how open).

On the wire and on the disk a ballot is its *code*, bytes that order as ballots do::

    counter u64 big-endian | node, UTF-8 | 0 | incarnation u64 big-endian

so acceptors compare codes and need not take them apart.  The empty code stands for "none yet" and is below
all others.

**Versions.**  A round may make several changes, one after the other.  The version that the nth of them gives
the record is the ballot's code, and for n > 0 a byte n behind it: above the ballot, below every other one
that is above the ballot, and used once, like the ballot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvcomm.errors import Corrupt

NO_BALLOT = b""
"""The code of "none yet"."""
COUNTER_MAX = 2**63 - 1
NODE_BYTES_MAX = 255
STEPS_MAX = 64
"""Changes of one round."""
CODES_KEPT = 8_192
"""Codes that need not be taken apart again: each vote tells the last eight of its record."""
_U64_BYTES = 8
_REST_BYTES = 1 + _U64_BYTES
"""Of a code, behind the node's name."""


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
        counter = counter_of(code)
        node, incarnation = code[_U64_BYTES:-_REST_BYTES], code[-_U64_BYTES:]
        return cls(counter, node.decode(), int.from_bytes(incarnation, "big"))


@lru_cache(maxsize=CODES_KEPT)
def counter_of(code: bytes) -> int:
    """The counter of a ballot.

    Raises:
        Corrupt: no ballot has this code.
    """
    name, counter = code[_U64_BYTES:-_REST_BYTES], int.from_bytes(code[:_U64_BYTES], "big")
    shaped = 0 < len(name) <= NODE_BYTES_MAX and not code[-_REST_BYTES] and b"\0" not in name
    if not shaped or not 1 <= counter <= COUNTER_MAX or not _is_text(name):
        raise Corrupt(f"not a ballot: {code!r}")
    return counter


def version_of(code: bytes, step: int) -> bytes:
    """What the change number ``step`` of the round ``code`` makes of a record."""
    assert 0 <= step < STEPS_MAX
    return code + bytes((step,)) if step else code


@lru_cache(maxsize=CODES_KEPT)
def round_of(version: bytes) -> bytes:
    """The ballot of the round that made this version, ``NO_BALLOT`` of none.

    Raises:
        Corrupt: no round makes it.
    """
    if version == NO_BALLOT:
        return NO_BALLOT
    name, zero, incarnation = version[_U64_BYTES:].partition(b"\0")
    del name
    code, step = (version, 0) if len(incarnation) == _U64_BYTES else (version[:-1], version[-1])
    if not zero or len(incarnation) - (step > 0) != _U64_BYTES or step >= STEPS_MAX:
        raise Corrupt(f"not a version: {version!r}")
    counter_of(code)
    return code


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


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
            self._counter = max(self._counter, counter_of(code))
