"""Errors that say what the caller can do.

Two families, never mixed:

* **The caller's mistake** is a :class:`ValueError` (``NamespaceError``, ``PayloadError``, ``ConfigError``,
  ...): retrying the same call cannot help.
* **An operating failure** is a :class:`KVCommError`; its class is the advice.

A miss is neither: it is a value.  A broken invariant of ours is an ``assert``.

Operating failures cross the wire as data (``kvcomm.wire.messages.Failure``) and become exceptions again in
exactly one place, :func:`failure_to_error`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal


class KVCommError(Exception):
    """An operating failure.  ``code`` names the class on the wire."""

    code: ClassVar[str] = "error"
    outcomes: Sequence[WriteOutcome] = ()
    """Of a batch of writes: what became of each, in the order of the batch."""

    def __init__(self, message: str, detail: bytes = b"") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


class Unavailable(KVCommError):
    """Nobody who could serve this answered in time; nothing was changed.  Retry later, or go without."""

    code = "unavailable"


class StaleEpoch(KVCommError):
    """The request carried an old ring epoch.  ``detail`` holds the new map, encoded: adopt it, retry once."""

    code = "stale_epoch"


class Conflict(KVCommError):
    """The stored version is not the one the caller named.  Read again, decide again."""

    code = "conflict"


class OutcomeUnknown(KVCommError):
    """The request may or may not have taken effect.  Read before you write again."""

    code = "outcome_unknown"


class PartlyDone(OutcomeUnknown):
    """Of a batch of writes some were done, or may have been, and some were not: ``outcomes`` says which.
    Write those again that were not done; read those that are unknown before you do.

    A batch of which nothing was done raises the error of its first write, with ``outcomes`` too.
    """

    code = "partly_done"


class Corrupt(KVCommError):
    """Bytes failed verification and were not served.  Compute them again."""

    code = "corrupt"


class Refused(KVCommError):
    """The request is understood and will not be done; the message says why and what to change."""

    code = "refused"


class Fenced(Refused):
    """A later epoch of a lease has changed the record, so this one is over; nothing was changed.  Stop what
    the lease was for, and acquire it anew."""

    code = "fenced"


class PoolFull(Refused):
    """No room could be freed: all that could go is pinned or reserved.  Drop views or enlarge the pool."""

    code = "pool_full"


class TooLarge(Refused):
    """A value is over its limit.  The message names the limit and its configuration key."""

    code = "too_large"


class Rejected(Refused):
    """The value breaks a rule of ``records.validators``; nothing was written, the old value stays.  The
    message names the rule."""

    code = "rejected"


class Unauthenticated(Refused):
    """The credential is missing or wrong."""

    code = "unauthenticated"


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """What became of one write of a batch that was not done as a whole."""

    key: bytes | str
    """As the caller named it."""
    status: Literal["done", "not_done", "unknown"]
    dot: tuple[str, int] | None = None
    """Of a write that was done: its version, unique for this record."""
    context: dict[str, int] | None = None
    """Of a write that was done: hand it to the next put."""
    own: bool = False
    """Whether the next put must name this write by its dot beside the context; see ``RecordVersion``."""
    error: KVCommError | None = None
    """Why it was not done, or is not known to be."""


def batch_error(outcomes: Sequence[WriteOutcome]) -> KVCommError:
    """The error of a batch of writes that was not done as a whole.

    Its class tells no lie about any of them: ``Conflict``, ``Unavailable`` and the like say that nothing was
    changed, and are raised when that is true of all; a batch of one has the error of its write.
    """
    problems = [outcome.error for outcome in outcomes if outcome.error is not None]
    first = problems[0]
    if len(outcomes) == 1:
        error = first
    elif all(outcome.status == "not_done" for outcome in outcomes):
        error = type(first)(f"none of {len(outcomes)} writes was done: {_listed(problems)}", first.detail)
    else:
        done, unknown = (sum(each.status == status for each in outcomes) for status in ("done", "unknown"))
        counts = f"{done} of {len(outcomes)} writes were done, {len(outcomes) - done - unknown} were not, "
        error = PartlyDone(f"{counts}{unknown} are unknown: {_listed(problems)}")
    error.outcomes = tuple(outcomes)
    return error


def name_outcomes(error: KVCommError, keys: Sequence[str]) -> None:
    """Name the writes of the batch that ``error`` is about by the ``keys`` that its caller used, in its
    order."""
    if error.outcomes:
        named = zip(error.outcomes, keys, strict=True)
        error.outcomes = tuple(replace(outcome, key=key) for outcome, key in named)


def _listed(problems: Sequence[KVCommError], shown: int = 3) -> str:
    """The different ones, with how often each."""
    texts: dict[str, int] = {}
    for problem in problems:
        text = f"{problem.code}: {problem.message}"
        texts[text] = texts.get(text, 0) + 1
    parts = [text if count == 1 else f"{text} ({count} times)" for text, count in texts.items()]
    return "; ".join(parts[:shown] + ["..."] * (len(parts) > shown))


class NamespaceError(ValueError):
    """A namespace is incomplete or contradicts itself."""


class TokenError(ValueError):
    """Token ids or positions are out of range."""


class PayloadError(ValueError):
    """A block's bytes do not fit the namespace (size, dtype, shape, contiguity)."""


class ManifestError(ValueError):
    """The parts of a manifest contradict each other."""


class ConfigError(ValueError):
    """The configuration has an unknown key or a value that cannot be used."""


_BY_CODE: dict[str, type[KVCommError]] = {
    cls.code: cls
    for cls in (
        KVCommError,
        Unavailable,
        StaleEpoch,
        Conflict,
        OutcomeUnknown,
        PartlyDone,
        Corrupt,
        Refused,
        Fenced,
        PoolFull,
        TooLarge,
        Rejected,
        Unauthenticated,
    )
}


def failure_to_error(code: str, message: str, detail: bytes = b"") -> KVCommError:
    """The exception for a failure that came over the wire.

    A code that this version does not know (a newer peer's) becomes a plain ``KVCommError`` whose message
    keeps the code.
    """
    known = _BY_CODE.get(code)
    return known(message, detail) if known else KVCommError(f"{code}: {message}", detail)
