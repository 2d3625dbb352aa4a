"""Hints beside a dumb dictionary, their bounds, and what a restart finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from l3_shard.hints import OVERHEAD_BYTES, Hints

AGE_S = 100.0


class Disk(dict[bytes, bytes]):
    def save(self, note: bytes, value: bytes | None) -> None:
        if value is None:
            del self[note]
        else:
            self[note] = value


def hints_on(disk: Disk, bytes_max: int = 1 << 20) -> Hints:
    return Hints(bytes_max, AGE_S, disk.save, disk)


def listed(hints: Hints) -> dict[str, list[tuple[bytes, int]]]:
    return {node: [(hint.key, hint.since_ms) for hint in hints.oldest(node, 999)] for node in hints.nodes}


def test_a_hint_is_kept_handed_on_and_gone():
    disk = Disk()
    hints = hints_on(disk)
    assert hints.add("b", b"k", 1_000) and hints.add("c", b"k", 1_001) and hints.add("b", b"l", 1_002)
    assert listed(hints) == {"b": [(b"k", 1_000), (b"l", 1_002)], "c": [(b"k", 1_001)]}
    hints.delivered("b", hints.oldest("b", 1))
    assert listed(hints) == {"b": [(b"l", 1_002)], "c": [(b"k", 1_001)]}
    hints.void("b", hints.oldest("b", 9))
    assert hints.nodes == ["c"] and len(hints) == len(disk) == 1
    assert (hints.counts.kept, hints.counts.delivered, hints.counts.void) == (3, 1, 1)
    hints.check()


def test_many_misses_of_one_record_are_one_hint_as_old_as_the_first():
    disk = Disk()
    hints = hints_on(disk)
    for at in range(5):
        assert hints.add("b", b"k", 1_000 + at)
    assert listed(hints) == {"b": [(b"k", 1_000)]}
    assert hints.held_bytes == 1 + OVERHEAD_BYTES and hints.counts.kept == 1 and len(disk) == 1


def test_a_miss_while_an_earlier_one_is_handed_on_stays():
    hints = hints_on(Disk())
    hints.add("b", b"k", 1)
    under_way = hints.oldest("b", 1)
    hints.add("b", b"k", 2)
    hints.delivered("b", under_way)
    assert listed(hints) == {"b": [(b"k", 1)]} and hints.counts.delivered == 0


def test_at_the_bound_a_new_hint_is_refused_and_the_kept_stay():
    hints = hints_on(Disk(), bytes_max=2 * (1 + OVERHEAD_BYTES))
    assert hints.add("b", b"k", 1) and hints.add("b", b"l", 1)
    assert not hints.add("b", b"m", 1) and not hints.add("c", b"k", 1)
    assert hints.add("b", b"k", 2), "one that stands needs no room"
    assert hints.counts.refused == 2 and listed(hints) == {"b": [(b"k", 1), (b"l", 1)]}


def test_old_hints_are_given_up():
    disk = Disk()
    hints = hints_on(disk)
    hints.add("b", b"k", 0)
    hints.add("b", b"l", 1)
    hints.expire(int(AGE_S * 1_000))
    assert len(hints) == 2
    hints.expire(int(AGE_S * 1_000) + 1)
    assert listed(hints) == {"b": [(b"l", 1)]} and hints.counts.expired == 1 and len(disk) == 1


def test_a_hint_that_rotted_on_the_disk_is_forgotten():
    disk = Disk()
    for node in "bcd":
        hints_on(disk).add(node, b"k", 1)
    broken, undecodable, _ = disk
    disk[broken] = disk[broken][:-1]
    disk[undecodable] = disk[undecodable].replace(b"c", b"\xff")
    hints = hints_on(disk)
    assert listed(hints) == {"d": [(b"k", 1)]} and len(disk) == 1
    hints.check()


def test_a_long_node_name_and_the_longest_key_make_a_short_note():
    disk = Disk()
    hints = hints_on(disk)
    hints.add("node" * 50, b"k" * 496, 1)
    assert max(map(len, disk)) < 64
    assert listed(hints_on(disk)) == listed(hints)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("add", "delivered", "void", "expire", "restart")),
        st.sampled_from("bc"),
        st.sampled_from((b"k", b"l", b"m", b"n")),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(ACTIONS, st.integers(0, 6))
def test_hints_are_a_bounded_dictionary_that_survives(actions: list[tuple[str, str, bytes]], room: int):
    disk = Disk()
    bytes_max = room * (1 + OVERHEAD_BYTES)
    hints = hints_on(disk, bytes_max)
    oracle: dict[tuple[str, bytes], int] = {}
    for now, (action, node, key) in enumerate(actions):
        now_ms = now * 30_000
        match action:
            case "add":
                fits = (node, key) in oracle or len(oracle) < room
                assert hints.add(node, key, now_ms) == fits
                if fits:
                    oracle.setdefault((node, key), now_ms)
            case "delivered" | "void":
                some = hints.oldest(node, 2)
                getattr(hints, action)(node, some)
                for hint in some:
                    del oracle[node, hint.key]
            case "expire":
                hints.expire(now_ms)
                oracle = {which: since for which, since in oracle.items() if now_ms - since <= AGE_S * 1_000}
            case "restart":
                hints = hints_on(disk, bytes_max)
        hints.check()
        found = {(node, hint.key): hint.since_ms for node in hints.nodes for hint in hints.oldest(node, 99)}
        assert found == oracle and hints.held_bytes <= bytes_max and len(disk) == len(oracle)
