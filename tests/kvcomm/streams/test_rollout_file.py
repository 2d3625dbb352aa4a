"""Files of many rollouts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvcomm.errors import Corrupt, Refused
from kvcomm.streams import rollout_codec
from kvcomm.streams.rollout_codec import encode, to_json
from kvcomm.streams.rollout_file import read_rollouts, write_rollouts
from tests.kvcomm.streams.stories import story

ROLLOUTS = [story(seed, 8) for seed in range(4)]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_file_holds_many_and_can_be_appended_to(tmp_path: Path, as_json: bool):
    path = tmp_path / "rollouts"
    for some in (ROLLOUTS[:3], ROLLOUTS[3:]):
        with path.open("ab") as file:
            write_rollouts(file, some, as_json=as_json)
    with path.open("rb") as file:
        assert list(read_rollouts(file)) == ROLLOUTS


def test_files_in_both_forms_can_be_joined_and_empty_lines_are_nothing():
    joined = to_json(ROLLOUTS[0]) + b"\n\n" + encode(ROLLOUTS[1]) + b" \r\n" + to_json(ROLLOUTS[2])
    assert list(read_rollouts(io.BytesIO(joined))) == ROLLOUTS[:3]
    assert list(read_rollouts(io.BytesIO(b""))) == []


def test_reading_holds_one_rollout_at_a_time():
    file = io.BytesIO(encode(ROLLOUTS[0]) + encode(ROLLOUTS[1]))
    reading = read_rollouts(file)
    assert next(reading) == ROLLOUTS[0]
    assert file.tell() == len(encode(ROLLOUTS[0]))


@pytest.mark.parametrize("as_json", [False, True])
def test_of_a_file_that_was_cut_off_what_is_whole_is_read(as_json: bool):
    file = io.BytesIO()
    write_rollouts(file, ROLLOUTS, as_json=as_json)
    reading = read_rollouts(io.BytesIO(file.getvalue()[:-10]))
    assert [next(reading) for _ in range(3)] == ROLLOUTS[:3]
    with pytest.raises(Corrupt, match=r"the file ends 10 bytes|not the JSON"):
        next(reading)


def test_a_file_of_something_else_is_refused():
    for data in (b"PK\x03\x04" + bytes(100), b"\x00", b"KVCROLLS"):
        with pytest.raises(Corrupt):
            list(read_rollouts(io.BytesIO(data)))
    with pytest.raises(Refused, match="version 9"):
        list(read_rollouts(io.BytesIO(b"KVCROLLS\x09" + bytes(100))))


def test_a_line_without_an_end_is_not_read_beyond_its_bound(monkeypatch: pytest.MonkeyPatch):
    for module in (rollout_codec, __import__("kvcomm.streams.rollout_file", fromlist=[""])):
        monkeypatch.setattr(module, "JSON_BYTES_MAX", 1_000)
    file = io.BytesIO(b"{" * 50_000)
    with pytest.raises(Corrupt, match="cannot have 1001 bytes"):
        list(read_rollouts(file))
    assert file.tell() == 1_001
