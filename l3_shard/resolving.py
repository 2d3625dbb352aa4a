"""``resolve``: a write of a record whose siblings are resolved (see ``kvcomm.resolvers``), as an ordinary
dotted write.

The coordinator joins the siblings that it holds, applies the delta under the dot that the write will have,
and puts the result with *everything it has seen* as the context: all of it is in the result.  What the caller
had seen elsewhere is not, so it must not be covered, except where the new state owes nothing to the old:
registers and deletes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvcomm.clock import Stamp
from kvcomm.errors import TooLarge
from kvcomm.resolvers import Moment, Resolver
from kvcomm.version import VersionVector
from kvcomm.wire.messages import VALUE_BYTES_MAX, RecordState
from l3_shard import dvv


def resolve(
    resolver: Resolver[Any, Any, Any],
    state: RecordState,
    replica: str,
    stamp: Stamp,
    delta: bytes | None,
    known: VersionVector,
    floor: int = 0,
    check: Callable[[bytes, Sequence[bytes], bytes], None] = lambda delta, held, value: None,
) -> dvv.Written:
    """Apply ``delta`` (``None`` deletes the record) at ``replica``, which holds ``state``.

    The context handed back is all that ``replica`` has seen: of a resolved record a client has seen what the
    shard that answered it had seen.

    Args:
        known: what the caller had seen.
        floor: see :func:`l3_shard.dvv.put`.
        check: hears (delta, values before, value after); raises ``Rejected`` if that must not be.

    Raises:
        Corrupt: a stored value is none of this class.  A delete helps.
        Refused: ``delta`` is none of this class.
        TooLarge: the value would grow over ``VALUE_BYTES_MAX``.
        Conflict: ``known`` cannot come from this record.
    """
    seen = VersionVector.from_wire(state.context)
    dot = dvv.next_dot(seen.counter(replica), replica, known.counter(replica), floor)
    value = None
    if delta is not None:
        held = dvv.living_values(state)
        value = resolver.apply(held, delta, Moment(dot, stamp, seen, known))
        _check_size(resolver, held, value)
        check(delta, held, value)
    covered = seen.merge(known) if delta is None or resolver.replaces_known else seen
    written = dvv.put(state, replica, stamp, value, covered, floor=floor)
    assert written.dot == dot, "the value was made under the dot of its write"
    return dvv.Written(written.state, dot, written.state.context, own=False)


def _check_size(resolver: Resolver[Any, Any, Any], held: list[bytes], value: bytes) -> None:
    """Concurrent growth may have passed the bound already: what shrinks it is let through."""
    if len(value) > VALUE_BYTES_MAX and not (held and len(value) < len(resolver.join(held))):
        raise TooLarge(
            f"the {resolver.name} record would have {len(value)} bytes, the limit is {VALUE_BYTES_MAX}; "
            "remove some of it or spread it over several records"
        )
