"""The arms of a race: what each reads again, on an engine that keeps books and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.arms import WAYS, Arm, Runner, Script, Text, Watch, race
from bench.streams import SCHEDULES, blocks_for
from kvcomm.block import Buffer
from kvcomm.streams.pool import BlockId, BlockPool
from kvcomm.streams.session import Session
from tests.namespaces import namespace

VOCAB = 100
TEXT = Text(turns=7, read=48, written=16, system=32)


class Books:
    """The engine's port without a model: a stream's logits are its last token."""

    def __init__(self, block_count: int, rows_max: int) -> None:
        self.namespace, self.pool = namespace(block_tokens=16, vocab_size=VOCAB), BlockPool(block_count)
        self.rows_max = rows_max
        self.feeds: list[list[int]] = []

    def session(self, **ignored: Any) -> Session:
        return Session(self.pool, self.namespace, rows_max=self.rows_max)

    def recovered(self, *ignored: Any, **also: Any) -> Session:
        raise AssertionError("no arm takes a stream over")

    def feed(self, feeds: Sequence[tuple[Session, Sequence[int]]]) -> list[int]:
        for session, tokens in feeds:
            session.commit(session.plan(tokens))
        self.feeds.append([len(tokens) for _, tokens in feeds])
        return [tokens[-1] for _, tokens in feeds]

    def fork(self, session: Session, name: bytes, **ignored: Any) -> Session:
        return session.fork(name)

    def payload(self, block: BlockId) -> memoryview:
        raise AssertionError("no arm moves bytes")

    def load(self, block: BlockId, payload: Buffer) -> None:
        raise AssertionError("no arm moves bytes")


def runners(arms: Sequence[Arm], text: Text, *, streams: int = 1, forced: bool = True) -> list[Runner]:
    script = Script(text, streams, VOCAB, forced=forced)
    made = []
    for number, arm in enumerate(arms):
        books = Books(blocks_for(arm, text, streams), text.rows)
        made.append(Runner(arm, text, script, books, drawing(number), chunk_tokens=100))
    return made


def drawing(number: int) -> Any:
    """Another token in every arm."""
    return lambda logits: [(token + number + 1) % VOCAB for token in logits]


def watching(order: list[str], name: str) -> Watch:
    return lambda turn, step, logits, tokens: order.append(name)


@pytest.mark.parametrize(
    ("at", "cuts", "spliced", "kept_prompt", "again"),
    [
        (0, 5, 3_136, 6_336, 6_656),
        (1, 22, 3_136, 28_480, 29_888),
        (2, 2, 3_136, 5_696, 5_824),
        (3, 3, 5_824, 9_664, 9_856),
        (4, 1, 512, 1_152, 1_216),
    ],
)
def test_an_arm_prefills_what_its_way_must(at: int, cuts: int, spliced: int, kept_prompt: int, again: int):
    schedule = SCHEDULES[at]
    *_, found = race(runners(schedule.arms(), schedule.text))
    counted = {run.arm.way: run.prefilled_tokens for run in found.runs}
    assert counted == {
        "splice": spliced, "again": again, "again, prompt kept": kept_prompt, "never": spliced,
    }  # fmt: skip
    assert [len(run.cuts) for run in found.runs] == [cuts, cuts, cuts, 0]


def test_every_arm_has_the_same_text_in_view():
    several = runners([Arm(way, 3, 2) for way in WAYS], TEXT, streams=2, forced=False)
    for runner in several:
        runner.begin()
    for turn in range(TEXT.turns):
        for runner in several:
            runner.take(turn)
        views = [
            [[session.tokens[row] for row in session.view.rows] for session in runner.sessions]
            for runner in several
        ]
        assert views[0] == views[1] == views[2], "however they got there"
        whole = views[3]
        assert all(len(tokens) == TEXT.system + (turn + 1) * TEXT.turn_tokens for tokens in whole)
        for short, full in zip(views[0], whole, strict=True):
            kept = len(short) - TEXT.system
            assert short == full[: TEXT.system] + full[len(full) - kept :]
    for runner in several:
        pool = runner.engine.pool
        runner.close()
        assert pool.free_count == pool.block_count


def test_what_the_first_arm_draws_is_forced_on_all():
    first, second = runners([Arm("splice", 3, 1), Arm("never")], TEXT, forced=False)
    for _ in race([first, second], leaders=1):
        pass
    assert first.sessions[0].tokens == second.sessions[0].tokens
    turn = first.sessions[0].tokens[TEXT.system :][: TEXT.turn_tokens]
    assert turn[TEXT.read :] == [(turn[TEXT.read - 1] + step) % VOCAB for step in range(1, TEXT.written + 1)]


def test_who_goes_first_rotates_and_all_stop_after_the_same_turn():
    order: list[str] = []
    several = runners([Arm("splice", 3, 1), Arm("again", 3, 1), Arm("never")], TEXT)
    for runner in several:
        runner.watch = watching(order, runner.arm.way)
    *_, found = race(several, go_on=lambda turn: turn < 2)
    assert found.turns_run == 2 and {len(run.turns) for run in found.runs} == {3}
    assert order[:: TEXT.written] == ["splice", "again", "never", "again", "never", "splice"]


def test_a_cut_pays_for_what_the_engine_would_do_at_the_next_feed():
    (splice,) = runners([Arm("splice", 3, 1)], TEXT)
    now = [0.0]

    def refresh(sessions: Sequence[Session]) -> None:
        now[0] += 5.0

    splice.refresh, splice.clock = refresh, lambda: now[0]
    *_, found = race([splice])
    assert [*found.runs[0].cuts.values()] == [5.0] * 4


def test_no_chunk_is_longer_than_it_may_be():
    (again,) = runners([Arm("again", 3, 1)], TEXT, streams=2)
    for _ in race([again]):
        pass
    books = again.engine
    assert isinstance(books, Books)
    assert max(max(counts) for counts in books.feeds) == 100 and {len(counts) for counts in books.feeds} == {
        2
    }


def test_memory_is_what_an_arm_needs():
    for runner in runners([Arm(way, 3, 2) for way in WAYS], TEXT, streams=2):
        *_, found = race([runner])
        turns = TEXT.turns if runner.arm.way == "never" else 3
        held = 2 * (TEXT.system + turns * TEXT.turn_tokens)
        assert found.runs[0].held_tokens_max == held
