"""``Witness``: what a put answered, which the plane in between keeps to itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvcomm.steps import Steps
from kvcomm.tier import RecordAnswer, Records
from kvcomm.wire.messages import Dots, RecordVersion, RecordWrite


class Witness:
    """``Records`` that remember what the last put answered: the plane keeps the dots to itself."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.versions: list[RecordVersion] = []

    def record_get(self, keys: Sequence[bytes], least: Sequence[Dots] = ()) -> Steps[list[RecordAnswer]]:
        return self._records.record_get(keys, least)

    def record_put(self, writes: Sequence[RecordWrite]) -> Steps[list[RecordVersion]]:
        self.versions = yield from self._records.record_put(writes)
        return self.versions

    def record_scan(self, prefix: bytes) -> Steps[list[bytes]]:
        return self._records.record_scan(prefix)
