"""The two forms of a rollout: one content, exact inverses, and any change on the way is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvcomm.errors import Corrupt, Refused, TooLarge
from kvcomm.streams import rollout_codec as codec
from kvcomm.streams.rollout import Rollout, Sample, Sampling
from tests.kvcomm.streams.stories import Story, story

seeds = st.integers(0, 10_000)
REFUSALS = (Corrupt, Refused)


def sealed(body: bytes) -> bytes:
    """With the size and the checksum that go with it: damage that no checksum shows."""
    body = body[:12] + struct.pack("<I", len(body) + 8) + body[16:]
    return body + struct.pack("<Q", xxh3_64_intdigest(body))


def tree(rollout: Rollout) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(codec.to_json(rollout))
    return found


def text(found: dict[str, Any]) -> bytes:
    return json.dumps(found).encode()


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in a JSON tree that is no list or object."""
    if isinstance(node, dict | list):
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        return [leaf for key, child in pairs for leaf in leaves(child, (*path, key))]
    return [path]


def parent_of(found: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        found = found[key]
    return found


# -- inverses


@pytest.mark.slow
@given(seeds)
def test_both_forms_give_back_what_was_written(seed: int):
    rollout = story(seed)
    data, line = codec.encode(rollout), codec.to_json(rollout)
    assert codec.decode(data) == rollout == codec.from_json(line)
    assert codec.encode(codec.from_json(line)) == data
    assert codec.to_json(codec.decode(data)) == line
    assert b"\n" not in line


@pytest.mark.slow
@given(seeds)
def test_fault_b01_every_stage_keeps_the_events_their_count_and_digest(seed: int):
    rollout = story(seed)
    here, there = Pipe()
    found = rollout
    for _ in range(4):  # memory to file to JSON to another process, and once more
        found = codec.decode(codec.encode(found))
        found = codec.from_json(text(json.loads(codec.to_json(found))))
        here.send_bytes(codec.encode(found))
        found = codec.decode(there.recv_bytes())
    here.close()
    there.close()
    assert (found.events, found.event_count, found.view_digest) == (
        rollout.events, rollout.event_count, rollout.view_digest,
    )  # fmt: skip
    assert found.visibility() == rollout.visibility()
    assert found == rollout


def test_edge_20_every_sample_carries_how_it_was_drawn():
    telling = Story(1)
    ways = [Sampling(), Sampling(0.0), Sampling(0.7, 20, 0.9), Sampling(0.1 + 0.2, 1, 1 / 3)]
    for way in ways:
        telling.sample(2, way)
    rollout = telling.recorder.rollout()
    for found in (codec.decode(codec.encode(rollout)), codec.from_json(codec.to_json(rollout))):
        assert [each.sampling for each in found.samples] == [way for way in ways for _ in range(2)]
        assert [each.logprob for each in found.samples] == [each.logprob for each in rollout.samples]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_edge_19_a_rollout_without_samples(rows: int):
    rollout = Rollout.sealed("", bytes(32), 16, range(rows), (), ())
    assert codec.decode(codec.encode(rollout)) == rollout == codec.from_json(codec.to_json(rollout))


def test_minus_zero_is_zero_as_some_json_writers_make_it():
    rollout = Rollout.sealed("x", bytes(32), 4, [1], (), [Sample(0, 2, -0.0, Sampling())])
    assert codec.encode(rollout) == codec.encode(replace(rollout, samples=(Sample(0, 2, 0.0, Sampling()),)))
    found = tree(rollout)
    found["rollout"]["samples"][0]["logprobs"] = [0]
    assert codec.from_json(text(found)) == rollout


def test_runs_of_rows_and_of_samples_are_compact():
    rows, samples = 20_000, [Sample(row, 7, -0.5, Sampling()) for row in range(19_999)]
    rollout = Rollout.sealed("x", bytes(32), 16, [7] * rows, (), samples)
    assert len(codec.encode(rollout)) < rows * (4 + 8) + 300
    filled = Rollout.sealed("x", bytes(32), 16, [7] * rows, (), (), range(rows))
    assert len(codec.encode(filled)) < rows * 4 + 200


# -- damage


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_no_byte_of_the_binary_form_can_change(seed: int, data: st.DataObject):
    good = codec.encode(story(seed))
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    for other in (bytes(bad), good[:at], good + good[:1], good[:at] + good[at + 1 :]):
        with pytest.raises(REFUSALS):
            codec.decode(other)


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_what_a_new_checksum_covers_up_the_log_shows(seed: int, data: st.DataObject):
    """Whoever can make checksums can write another rollout; not one whose events do not follow."""
    rollout = story(seed)
    good = codec.encode(rollout)
    at = data.draw(st.integers(92, len(good) - 9))
    bad = bytearray(good[:-8])
    bad[at] ^= data.draw(st.integers(1, 255))
    try:
        found = codec.decode(sealed(bytes(bad)))
        assert found.visibility() == rollout.visibility()  # it was the name, a token, a probability, a reason
    except REFUSALS:
        pass


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_no_value_of_the_json_form_can_change(seed: int, data: st.DataObject):
    found = tree(story(seed))
    path = data.draw(st.sampled_from(leaves(found)))
    parent, key = parent_of(found, path), path[-1]
    value = parent[key]
    if isinstance(value, bool):
        others: list[Any] = [not value]
    elif isinstance(value, str):
        others = ["", "x", "0" * 64]
    else:
        others = [value + 1, value - 1, value + 1e-9]
    for other in [*others, None, [], {}]:
        parent[key] = other
        with pytest.raises(REFUSALS):
            codec.from_json(text(found))
    del parent[key]
    with pytest.raises(REFUSALS):
        codec.from_json(text(found))


@pytest.mark.slow
@given(seeds, st.data())
def test_gate_g08_no_list_of_the_json_form_can_lose_double_or_swap_an_entry(seed: int, data: st.DataObject):
    found = tree(story(seed))
    inside = found["rollout"]
    lists = [key for key, value in inside.items() if isinstance(value, list) and value]
    entries = inside[data.draw(st.sampled_from(lists))]
    before = list(entries)
    at = data.draw(st.integers(0, len(entries) - 1))
    for other in (
        before[:at] + before[at + 1 :],
        before[: at + 1] + before[at:],
        before[:at],
        [before[at], *before[:at], *before[at + 1 :]],
        [],
    ):
        entries[:] = other
        if other != before:
            with pytest.raises(REFUSALS):
                codec.from_json(text(found))


def test_json_may_be_laid_out_in_another_way():
    rollout = story(4)
    found = tree(rollout)
    backwards = {key: found["rollout"][key] for key in reversed(found["rollout"])}
    spaced = json.dumps({"rollout": backwards, "version": 1, "format": "kvcomm.rollout"}, indent=2)
    assert codec.from_json(spaced.encode()) == rollout


@pytest.mark.parametrize("key", ["rollout", "events", "samples", "samplings"])
def test_a_key_that_is_not_known_is_refused(key: str):
    found = tree(story(4))
    inside = found["rollout"] if key == "rollout" else found["rollout"][key][0]
    inside["colour"] = "blue"
    with pytest.raises(Corrupt, match="colour"):
        codec.from_json(text(found))


def test_another_version_is_refused_before_anything_else_is_read():
    rollout = story(4)
    found = tree(rollout)
    found |= {"version": 2, "rollout": {"shape": "that nobody knows yet"}}
    with pytest.raises(Refused, match="version 2") as raised:
        codec.from_json(text(found))
    assert not isinstance(raised.value, Corrupt)
    with pytest.raises(Refused, match="version 2"):
        codec.decode(b"KVCROLLS\x02\x00" + bytes(6) + b"whatever")
    with pytest.raises(Corrupt, match="not a rollout"):
        codec.from_json(text(found | {"format": "kvcomm.manifest"}))
    with pytest.raises(Corrupt, match="not a rollout"):
        codec.decode(b"KVCMANIF" + codec.encode(rollout)[8:])


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"null", b"{}", b"\xff{}", b'{"format":1}', b"{" * 10_000]
)
def test_what_is_no_json_of_a_rollout_is_refused(line: bytes):
    with pytest.raises(Corrupt):
        codec.from_json(line)


@pytest.mark.parametrize("where", ["x", "rollout"])
def test_what_is_nested_without_end_is_refused(where: str):
    deep = f'{{"format":"kvcomm.rollout","version":1,"{where}":{"[" * 5_000}1{"]" * 5_000}}}'
    with pytest.raises(Corrupt, match="recursion"):
        codec.from_json(deep.encode())


# -- bounds


def test_counts_are_believed_only_if_so_much_is_there():
    head = codec.encode(Rollout.sealed("", bytes(32), 4, (), (), ()))[:92]
    for section in range(9):
        claimed = sealed(head + bytes(4 * section) + b"\xff\xff\xff\xff" + bytes(4 * (8 - section)))
        with pytest.raises(Corrupt, match="inside a section"):
            codec.decode(claimed)


def test_rows_that_a_run_claims_are_not_made_before_they_are_known_to_be_there():
    found = tree(Rollout.sealed("x", bytes(32), 4, [1, 2], (), ()))
    found["rollout"]["filler_rows"] = [[0, 4_000_000_000]]
    record = codec.parsed(text(found))
    found["rollout"]["checksum"] = codec._checksum(record)
    with pytest.raises(Corrupt, match="marks rows that it does not have"):
        codec.from_json(text(found))


@pytest.mark.parametrize("runs", [[[0, 4]] * 3, [[2, 2], [0, 1]], [[0, 2], [1, 2]]], ids=str)
@pytest.mark.parametrize("which", ["filler_rows", "repeated_rows"])
def test_rows_that_runs_claim_twice_are_not_made(which: str, runs: list[list[int]]):
    """Each is within the rollout, and eight bytes of it again are four million rows more."""
    found = tree(Rollout.sealed("x", bytes(32), 4, [1, 2, 3, 4], (), ()))
    found["rollout"][which] = runs
    record = codec.parsed(text(found))
    with pytest.raises(Corrupt, match="do not ascend"):
        record._rows(getattr(record, which))
    found["rollout"]["checksum"] = codec._checksum(record)
    with pytest.raises(Corrupt, match="do not ascend"):
        codec.from_json(text(found))


def test_text_that_has_no_bytes_is_refused_when_it_is_written():
    """A lone surrogate, as file names of other encodings have it."""
    rollout = Rollout.sealed("\ud800", bytes(32), 4, [1], (), ())
    for write in (codec.encode, codec.to_json):
        with pytest.raises(TooLarge, match="no room"):
            write(rollout)


def test_a_size_over_the_bound_is_refused_by_its_first_bytes(monkeypatch: pytest.MonkeyPatch):
    size = struct.pack("<I", codec.ROLLOUT_BYTES_MAX + 1)
    with pytest.raises(Corrupt, match="cannot have"):
        codec.frame_bytes(codec.MAGIC + b"\x01\x00\x00\x00" + size)
    monkeypatch.setattr(codec, "JSON_BYTES_MAX", 100)
    with pytest.raises(Corrupt, match="cannot have 101 bytes"):
        codec.from_json(b" " * 101)
    monkeypatch.setattr(codec, "ROLLOUT_BYTES_MAX", 1_000)
    with pytest.raises(TooLarge, match="1000 rows takes"):
        codec.encode(Rollout.sealed("x", bytes(32), 4, range(1_000), (), ()))


@pytest.mark.parametrize("parts", [{"tokens": (1 << 32,)}, {"block_tokens": 1 << 32}])
def test_a_number_without_room_is_refused_when_it_is_written(parts: dict[str, Any]):
    rollout = Rollout.sealed("x", bytes(32), 4, [1], (), ())
    for write in (codec.encode, codec.to_json):
        with pytest.raises(TooLarge, match="no room"):
            write(replace(rollout, **parts))


def test_bytes_that_no_writer_writes_are_refused_though_their_checksum_fits():
    """More behind the last section, a loss that is neither 0 nor 1, something reserved."""
    good = codec.encode(Rollout.sealed("x", bytes(32), 4, [1, 2], (), [Sample(0, 2, -1.0, Sampling())]))
    assert codec.decode(sealed(good[:-8])) == codec.decode(good)
    loss_at = good.index(struct.pack("<IIHB", 0, 1, 0, 1)) + 10
    for body in (
        good[:-8] + bytes(1),
        good[:loss_at] + bytes([2]) + good[loss_at + 1 : -8],
        good[:10] + bytes([1]) + good[11:-8],
    ):
        for data in (sealed(body), body[:12] + sealed(body)[12:16] + body[16:] + good[-8:]):
            with pytest.raises(Corrupt, match="checksum"):
                codec.decode(data)


def test_what_is_not_canonical_is_refused():
    """Two runs that are one, a sampling that nobody uses, a pending token of no sample."""
    rollout = Rollout.sealed("x", bytes(32), 4, [1, 2, 3, 4], (), [Sample(0, 2, -1.0, Sampling())], (2, 3))
    for key, value in (
        ("filler_rows", [[2, 1], [3, 1]]),
        ("samplings", [{"temperature": 1.0, "top_k": 0, "top_p": 1.0}] * 2),
        ("pending", 3),
    ):
        found = tree(rollout)
        found["rollout"][key] = value
        found["rollout"]["checksum"] = codec._checksum(codec.parsed(text(found)))
        with pytest.raises(Corrupt, match="canonical"):
            codec.from_json(text(found))


def test_bytes_beside_the_record_are_refused_though_its_checksum_is_right():
    """It is of the one form, which whoever adds something to it can still compute."""
    rollout = Rollout.sealed("x", bytes(32), 4, [1, 2], (), [Sample(0, 2, -1.0, Sampling())])
    good = codec.encode(rollout)
    body, checksum = good[:-8], good[-8:]
    longer = body[:12] + struct.pack("<I", len(good) + 3) + body[16:] + b"abc" + checksum
    reserved = body[:10] + b"\x01" + body[11:] + checksum
    (run,) = codec.unpacked(good).samples
    told = codec._SAMPLE_RUN.pack(run.first_row, 1, run.sampling, 1)
    assert body.count(told) == 1
    loss = body.replace(told, told[:-1] + b"\x02") + checksum
    two = struct.pack("<III", 2, 7, 7)
    pending = codec.encode(
        replace(rollout, tokens=(1,), row_count=1, samples=(Sample(0, 7, -1.0, Sampling()),))
    )
    one = pending[:-8].replace(struct.pack("<II", 1, 7), two)
    doubled = one[:12] + struct.pack("<I", len(one) + 8) + one[16:] + pending[-8:]
    assert len(doubled) == len(pending) + 4
    for other in (longer, reserved, loss, doubled):
        with pytest.raises(Corrupt):
            codec.decode(other)
    assert codec.decode(good) == rollout


def test_a_sampling_that_is_not_there_is_refused():
    found = tree(Rollout.sealed("x", bytes(32), 4, [1, 2], (), [Sample(0, 2, -1.0, Sampling())]))
    found["rollout"]["samples"][0]["sampling"] = 1
    found["rollout"]["checksum"] = codec._checksum(codec.parsed(text(found)))
    with pytest.raises(Corrupt, match="without a token or a sampling"):
        codec.from_json(text(found))


@pytest.mark.slow
@given(seeds)
def test_no_rollout_of_a_story_is_refused_after_truncation(seed: int):
    rollout = story(seed, 10)
    assume(rollout.row_count > 3)
    short = rollout.truncated(rollout.row_count - 3)
    assert codec.decode(codec.encode(short)) == short == codec.from_json(codec.to_json(short))
