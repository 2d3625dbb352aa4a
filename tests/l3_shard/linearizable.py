"""A small linearizability checker for one register (Wing & Gong 1993, with the memory of Lowe 2017).

Every written value is used once, so a state is the value that the register holds (``None`` = none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FOREVER = float("inf")


@dataclass(frozen=True)
class Op:
    """One operation of a client.  Those that certainly did not happen are left out of a history."""

    kind: Literal["read", "put", "cas"]
    """A delete is a put of ``None``."""
    invoked: float
    returned: float = FOREVER
    """``FOREVER``: its outcome is unknown; it may take effect at any time, or never."""
    value: bytes | None = None
    """Written."""
    expected: bytes | None = None
    """Of a ``cas``."""
    succeeded: bool = True
    """Of a ``cas``."""
    seen: bytes | None = None
    """By a read, or by a ``cas`` that failed."""

    def apply(self, state: bytes | None) -> tuple[bool, bytes | None]:
        """Whether it can happen in ``state``, and the state afterwards."""
        unknown = self.returned == FOREVER
        match self.kind:
            case "read":
                return unknown or self.seen == state, state
            case "put":
                return True, self.value
        if unknown:
            return True, self.value if state == self.expected else state
        if self.succeeded:
            return state == self.expected, self.value
        return state != self.expected and self.seen == state, state


def linearizable(history: Sequence[Op]) -> bool:
    """Whether some order of the operations, each between its invocation and its return, explains what was
    seen."""
    ops = sorted(history, key=lambda op: op.invoked)
    certain = sum(1 << index for index, op in enumerate(ops) if op.returned < FOREVER)
    seen: set[tuple[int, bytes | None]] = set()
    stack: list[tuple[int, bytes | None]] = [(0, None)]
    while stack:
        done, state = stack.pop()
        if done & certain == certain:
            return True
        if (done, state) in seen:
            continue
        seen.add((done, state))
        left = [index for index in range(len(ops)) if not done >> index & 1]
        first_return = min(ops[index].returned for index in left)
        for index in left:
            if ops[index].invoked > first_return:
                break
            possible, after = ops[index].apply(state)
            if possible:
                stack.append((done | 1 << index, after))
    return False
