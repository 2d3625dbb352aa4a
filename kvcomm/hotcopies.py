"""``HotCopies``: answers about hot eventual records that a client may give again, for a second at most.

A record that hundreds of agents read is one shard's load.  Its shard marks answers about it (the controllers
have said that it is hot), and a client keeps such an answer and gives it to its next readers itself.  What
may go wrong with copies, and why it does not:

* **Old**: a copy is used for ``age_s`` counted from before its request was *sent*, by this client's own
  clock.  Whatever was acknowledged before that, its shard had told or could have told; no clock is compared
  with another's.
* **Behind one's own session** (read your writes, monotonic reads): a copy that has not seen all that this
  session has is not given; a write drops it, before it is sent, whatever becomes of it.
* **Read, change, write**: who writes a record reads it from its shard for ``age_s`` after; and everybody may
  ask for a fresh answer.  A write based on a copy replaces exactly what the copy showed, as with any read.
* **Degraded** answers are never kept.  Strong records and leases never come here: they are read otherwise.

Bounded by ``entries_max``, the one that was kept longest goes first; an answer over ``answer_bytes_max`` is
not kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvcomm.tier import RecordAnswer
from kvcomm.wire.messages import Dots

ENTRIES_MAX = 128
"""Twice as many as the controllers call hot."""
ANSWER_BYTES_MAX = 256 << 10
WRITTEN_MAX = 4_096
"""Own writes remembered."""


class _Copy(NamedTuple):
    answer: RecordAnswer
    sent_at: float


class HotCopies:
    """The copies of one session.  Threads: each step is one operation of a dictionary, and what a race may
    keep is judged by the session's own view each time that it is used.

    Args:
        age_s: seconds; 0 = keep nothing.
    """

    def __init__(
        self,
        age_s: float = 1.0,
        *,
        entries_max: int = ENTRIES_MAX,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> None:
        if age_s < 0:
            raise ValueError(f"an age is 0 seconds or more, got {age_s}")
        self.age_s = age_s
        self._entries_max, self._answer_bytes_max = entries_max, answer_bytes_max
        self._copies: OrderedDict[bytes, _Copy] = OrderedDict()
        self._written: OrderedDict[bytes, float] = OrderedDict()  # own writes, and when
        self.answered_count = 0
        """Reads answered from a copy, since start; and so on."""
        self.kept_count = 0
        self.dropped_count = 0
        """For whatever reason: too old, written to, no room, replaced."""

    def __len__(self) -> int:
        return len(self._copies)

    def get(self, name: bytes, least: Dots, now: float) -> RecordAnswer | None:
        """A copy that may be shown to a session that has seen ``least``."""
        copy = self._copies.get(name)
        if copy is None:
            return None
        if now - copy.sent_at > self.age_s or self._wrote(name, now):
            self._drop(name)
            return None
        context = copy.answer.context
        if any(context.get(replica, 0) < counter for replica, counter in least.items()):
            self._drop(name)
            return None
        self.answered_count += 1
        return copy.answer

    def keep(self, name: bytes, answer: RecordAnswer, sent_at: float, now: float) -> None:
        """An answer has come, whose request was sent not before ``sent_at``."""
        if not answer.hot or answer.degraded or not self.age_s or self._wrote(name, now):
            return
        if now - sent_at > self.age_s or sum(map(len, answer.values)) > self._answer_bytes_max:
            return
        self._drop(name)
        self._copies[name] = _Copy(answer, sent_at)
        self.kept_count += 1
        if len(self._copies) > self._entries_max:
            self._copies.popitem(last=False)
            self.dropped_count += 1

    def wrote(self, name: bytes, now: float) -> None:
        """This session is about to write the record."""
        if not self.age_s:
            return
        self._drop(name)
        self._written.pop(name, None)
        self._written[name] = now
        if len(self._written) > WRITTEN_MAX:
            self._written.popitem(last=False)

    def _wrote(self, name: bytes, now: float) -> bool:
        at = self._written.get(name)
        return at is not None and now - at <= self.age_s

    def _drop(self, name: bytes) -> None:
        if self._copies.pop(name, None) is not None:
            self.dropped_count += 1
