"""``Timeline``: a rollout told in order, as far as it can be believed, and the first damage found in it.

Made of a record as it arrived, sound or not: who looks for what broke it wants to see what came before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcomm.errors import KVCommError
from kvcomm.streams.events import Event, EventKind, row_runs
from kvcomm.streams.rollout_codec import RolloutRecord, RowRun
from kvcomm.streams.view import CUT_ROWS_MAX, View

TEXT, SAMPLED, FILLER, REPEATED = range(4)
"""What a row is.  Text: a prompt, a message, a tool's output."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that were fed between two events."""

    first_row: int
    row_count: int
    text_count: int
    sampled_count: int
    filler_count: int
    repeated_count: int
    completion_count: int
    """Runs of sampled rows that begin here: turns of the model."""
    live_before: int
    """Slots in view."""
    live_after: int


@dataclass(frozen=True, slots=True)
class Happening:
    """One event."""

    index: int
    kind: EventKind
    at_row: int
    rows: tuple[tuple[int, int], ...]
    """That went or came back, as ``(first, count)``."""
    ranges: tuple[tuple[int, int], ...]
    """Slots that were cut, ``[start, end)`` in the view before."""
    insert_at: int
    span: str
    """Hexadecimal; empty = none."""
    reason: str
    weights_version: int
    live_after: int

    @property
    def row_count(self) -> int:
        return sum(count for _, count in self.rows)


@dataclass(frozen=True, slots=True)
class Timeline:
    """See the module."""

    name: str
    namespace: str
    block_tokens: int
    row_count: int
    event_count: int
    entries: tuple[Stretch | Happening, ...]
    """Up to the damage, if there is any."""
    sample_count: int
    loss_count: int
    """Of these, how many a trainer learns from."""
    mean_logprob: float | None
    """Natural logarithm; None without samples."""
    samplings: tuple[tuple[float, int, float], ...]
    """(temperature, top_k, top_p) of each way that tokens were drawn."""
    damage: str
    """Empty = sound."""

    @property
    def live_max(self) -> int:
        """Most slots that were ever in view."""
        fed = (entry.live_after for entry in self.entries)
        return max(fed, default=0)

    @property
    def live_after(self) -> int:
        return self.entries[-1].live_after if self.entries else 0

    @property
    def weights(self) -> tuple[tuple[int, int], ...]:
        """``(from row, version)``, ascending."""
        changes = (each for each in self.entries if isinstance(each, Happening) and each.kind == "weights")
        return tuple(({0: 0} | {each.at_row: each.weights_version for each in changes}).items())

    def row_counts(self) -> dict[str, int]:
        """By what they are."""
        names = ("text", "sampled", "filler", "repeated")
        stretches = [each for each in self.entries if isinstance(each, Stretch)]
        return {name: sum(getattr(each, f"{name}_count") for each in stretches) for name in names}


def timeline(record: RolloutRecord) -> Timeline:
    """Never raises for what a record says."""
    logprobs = [each for run in record.samples for each in run.logprobs]
    entries: list[Stretch | Happening] = []
    damage = _follow(record, entries)
    if not damage:
        try:
            record.rollout().visibility()
        except KVCommError as error:
            damage = error.message
    return Timeline(
        record.name, record.namespace, record.block_tokens, record.row_count, record.event_count,
        tuple(entries), len(logprobs), sum(len(run.logprobs) for run in record.samples if run.loss),
        sum(logprobs) / len(logprobs) if logprobs else None,
        tuple((each.temperature, each.top_k, each.top_p) for each in record.samplings), damage,
    )  # fmt: skip


def _follow(record: RolloutRecord, entries: list[Stretch | Happening]) -> str:
    """Tell the record into ``entries``; why it could not be told to its end."""
    view, kinds, cut_count = View(), _kinds(record), 0
    for index, each in enumerate(record.events):
        try:
            event = each.event()
            view.count_before(event, len(kinds))
            entries += _fed(view, kinds, event.at_row)
            entries.append(_happened(view, event, index))
            cut_count += sum(cut.slot_count for cut in event.ranges)
            if cut_count > CUT_ROWS_MAX:
                return f"event {index}: {cut_count} rows are cut up to here, over CUT_ROWS_MAX={CUT_ROWS_MAX}"
        except KVCommError as error:
            return f"event {index}: {error.message}"
    entries += _fed(view, kinds, len(kinds))
    return ""


def _fed(view: View, kinds: Sequence[int], end: int) -> Iterator[Stretch]:
    start, before = view.next_row, view.slot_count
    if start == end:
        return
    view.feed(end - start)
    part = kinds[start:end]
    begun = [kind for kind, _ in groupby(part)].count(SAMPLED)
    continued = bool(start) and kinds[start - 1] == part[0] == SAMPLED
    text, sampled, filler, repeated = map(part.count, (TEXT, SAMPLED, FILLER, REPEATED))
    yield Stretch(
        start, end - start, text, sampled, filler, repeated, begun - continued, before, view.slot_count
    )


def _happened(view: View, event: Event, index: int) -> Happening:
    rows = view.apply(event)
    return Happening(
        index, event.kind, event.at_row, tuple(row_runs(rows)),
        tuple((each.start, each.end) for each in event.ranges), event.insert_at, event.span.hex(),
        event.reason, event.weights_version, view.slot_count,
    )  # fmt: skip


def _kinds(record: RolloutRecord) -> bytearray:
    """By row; what a damaged record says of rows that are not there, or says again, is left out: so it costs
    each row once."""
    kinds = bytearray(len(record.tokens))
    sampled = [RowRun(run.first_row + 1, len(run.logprobs)) for run in record.samples]
    for runs, kind in ((sampled, SAMPLED), (record.filler_rows, FILLER), (record.repeated_rows, REPEATED)):
        done = 0
        for first, count in runs:
            start, end = max(first, done), min(first + count, len(kinds))
            if start < end:
                kinds[start:end] = bytes([kind]) * (end - start)
                done = end
    return kinds
