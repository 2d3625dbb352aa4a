"""What ``kvcomm hot`` makes of a controller's answer."""

from __future__ import annotations

from kvcomm.cli.hot import rows_of
from kvcomm.wire.messages import HotKey, HotView


def test_blocks_are_shown_by_key_and_records_by_name() -> None:
    view = HotView("c", [HotKey(b"\x0f" * 32, 4.0, 1.0)], [HotKey(b"T" * 16 + b"state/n/k", 90.0, 2.0)])
    assert list(rows_of(view)) == [
        {"plane": "block", "key": "0f" * 32, "rate_s": 4.0, "for_s": 1.0},
        {"plane": "record", "key": "state/n/k", "rate_s": 90.0, "for_s": 2.0},
    ]
