"""The trace loader."""

from __future__ import annotations

import pytest

from tests.traces import VARIABLE, block_references, trace_path


def test_it_reads_block_ids_in_order(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [0, 1]}\n{"hash_ids": [0, 2, 3]}\n')
    assert list(block_references(path)) == [[0, 1], [0, 2, 3]]


@pytest.mark.parametrize("line", ['{"ids": [1]}', '{"hash_ids": ["a"]}', "[1]"])
def test_another_format_is_refused_with_its_line(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"hash_ids": []}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: no list of integers"):
        list(block_references(path))


def test_an_absent_trace_skips_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=f"no trace none.jsonl in .* set {VARIABLE}"):
        trace_path("none.jsonl")
