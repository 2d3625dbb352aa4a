"""``Reprefill`` and ``Summary``: what a policy keeps is computed anew, in a new stream.

The ways to keep a context short that cut no K/V, to compare with: nothing of what went is left in what stays,
and every cut costs a prefill of all that is kept.  A ``Restarter`` drives them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcomm.errors import ConfigError
from kvcomm.streams.policies.port import Policy
from kvcomm.streams.session import Session

Write = Callable[[Session, Sequence[int]], Sequence[int]]
"""``write(session, dropped)`` -> the tokens that stand in place of the dropped ones.

The session still sees everything: feed an instruction into it and sample the answer, and the summary is part
of its rollout, rewarded and trained like the rest; a pending token goes first.  Rows fed meanwhile are not
carried over.  Or make it of the dropped tokens alone.  Either way they are whole messages, markers included.
"""


@dataclass(frozen=True, slots=True)
class Reprefill:
    """``inner`` says what goes; the rest begins a new stream, at new positions.

    Raises:
        ConfigError: ``inner`` goes by attention, which a new stream has none of yet.
    """

    inner: Policy

    def __post_init__(self) -> None:
        if self.inner.needs_scores:
            raise ConfigError(f"policy {self.inner.name!r} goes by attention, and a new stream has none yet")

    @property
    def name(self) -> str:
        return f"reprefill {self.inner.name}"


@dataclass(frozen=True, slots=True)
class Summary(Reprefill):
    """Likewise, with what ``write`` makes of what goes, behind the protected prefix.  The next summary takes
    the place of the last one, which is among what it is made of."""

    write: Write

    @property
    def name(self) -> str:
        return f"summary {self.inner.name}"
