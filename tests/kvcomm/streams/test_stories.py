"""Any story that several sessions of one pool can live through, held against oracles that cannot be wrong in
the same way: what each row saw, what each block holds, who holds each block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcomm.block import BlockKey
from kvcomm.errors import PoolFull
from kvcomm.streams.events import Event, SpanId
from kvcomm.streams.pool import BlockId
from kvcomm.streams.session import Archived, Session
from kvcomm.streams.view import visibility
from tests.kvcomm.streams.life import BLOCK_TOKENS, ROWS_MAX, Life, ToyEngine

BLOCK_COUNT, SESSIONS_MAX = 48, 5

PHRASES = ([0], [0, 1], [0, 0, 0, 0], [1, 1, 1, 1])
tokens_st = st.lists(st.sampled_from(PHRASES), min_size=1, max_size=3).map(
    lambda each: list(chain.from_iterable(each))
)
"""Sessions often say the same, and often in whole blocks."""
which_st = st.integers(0, 1_000)


@dataclass
class Told:
    session: Session
    life: Life
    journal: list[Event] = field(default_factory=list)


class Stories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = ToyEngine(BLOCK_COUNT)
        self.told: list[Told] = []
        self.tier: dict[BlockKey, tuple[bytes, ...]] = {}
        """Bytes that were moved away."""
        self.contents: dict[BlockKey, tuple[bytes, ...]] = {}
        """Of every key that there ever was."""
        self.pinned: list[BlockId] = []
        """By transfers under way."""
        self.forks = 0

    def some(self, which: int) -> Told:
        return self.told[which % len(self.told)]

    def drop(self, told: Told) -> None:
        found = visibility(told.session.next_row, told.journal)
        for query, keys in enumerate(told.life.saw):
            assert {key for key in range(told.session.next_row) if found.sees(query, key)} == keys
        told.session.close()
        told.session.close()
        self.told = [each for each in self.told if each is not told]

    def or_full(self, act: Callable[[], object]) -> bool:
        """Whether there was memory; if not, nothing is changed."""
        free = self.engine.pool.free_count
        try:
            act()
        except PoolFull:
            assert self.engine.pool.free_count == free
            return False
        return True

    @precondition(lambda self: len(self.told) < SESSIONS_MAX)
    @rule(tokens=tokens_st)
    def begin(self, tokens: list[int]) -> None:
        told = Told(Session(self.engine.pool, self.engine.namespace, rows_max=ROWS_MAX), Life())
        told.session.journal = told.journal.append
        self.told.append(told)
        self.admit(len(self.told) - 1, tokens)

    @precondition(lambda self: self.told)
    @rule(which=which_st, tokens=tokens_st)
    def admit(self, which: int, tokens: list[int]) -> None:
        told = self.some(which)
        if told.session.pending is not None:
            tokens = [told.session.pending, *tokens]
        before = told.session.next_row
        adopted = told.session.adopt_prefix(tokens)
        assert adopted < len(tokens) and told.session.next_row == before + adopted
        told.life.feed(tokens[:adopted])
        if self.or_full(lambda: self.engine.feed(told.session, tokens[adopted:])):
            told.life.feed(tokens[adopted:])

    @precondition(lambda self: self.told)
    @rule(which=which_st, tokens=tokens_st, kept=st.integers(0, 9))
    def guess(self, which: int, tokens: list[int], kept: int) -> None:
        told = self.some(which)
        if told.session.pending is not None:
            tokens = [told.session.pending, *tokens]
        kept = min(kept, len(tokens))
        if self.or_full(lambda: self.engine.feed(told.session, tokens, kept)):
            told.life.feed(tokens[:kept])

    @precondition(lambda self: self.told)
    @rule(which=which_st, tokens=tokens_st)
    def fail(self, which: int, tokens: list[int]) -> None:
        session = self.some(which).session
        if session.pending is None:

            def act() -> None:
                feed = session.plan(tokens)
                self.engine.compute(session, feed)
                session.abandon(feed)

            self.or_full(act)

    @precondition(lambda self: self.told)
    @rule(which=which_st, token=st.integers(0, 1))
    def sample(self, which: int, token: int) -> None:
        session = self.some(which).session
        if session.pending is None and session.next_row:
            session.sampled(token)

    @precondition(lambda self: self.told)
    @rule(which=which_st, data=st.data(), archive=st.booleans())
    def evict(self, which: int, data: st.DataObject, archive: bool) -> None:
        told = self.some(which)
        first = told.session.protected // BLOCK_TOKENS
        places = range(first, told.session.full_slots // BLOCK_TOKENS)
        if not places:
            return
        chosen = sorted(data.draw(st.sets(st.sampled_from(places), min_size=1)))
        ranges = [(BLOCK_TOKENS * place, BLOCK_TOKENS * (place + 1)) for place in chosen]
        event = told.session.evict(ranges, archive=archive)
        told.life.evict(ranges, event.span)
        assert sum(each.slot_count for each in event.ranges) == BLOCK_TOKENS * len(chosen)

    @precondition(lambda self: self.told)
    @rule(which=which_st, span=which_st, copied=st.booleans(), data=st.data())
    def restore(self, which: int, span: int, copied: bool, data: st.DataObject) -> None:
        told = self.some(which)
        session, archive = told.session, told.session.archive
        borders = range(session.protected, session.full_slots + 1, BLOCK_TOKENS)
        if not archive or not borders:
            return
        name = sorted(archive)[span % len(archive)]
        at = data.draw(st.sampled_from(borders))
        blocks: list[BlockId] | None = None
        if copied or not archive[name].blocks:
            keys = archive[name].keys
            self.store(archive[name])
            try:
                blocks = self.engine.pool.take(len(keys))
            except PoolFull:
                return
            for block, key in zip(blocks, keys, strict=True):
                self.engine.load(block, self.tier[key])
        session.restore(name, at, blocks)
        told.life.restore(name, at)

    @precondition(lambda self: self.told)
    @rule(which=which_st, span=which_st)
    def move_away(self, which: int, span: int) -> None:
        session = self.some(which).session
        if session.archive:
            self.stash(session, sorted(session.archive)[span % len(session.archive)])

    def stash(self, session: Session, name: SpanId) -> None:
        self.store(session.archive[name])
        session.drop_archived(name, moved=True)

    def store(self, archived: Archived) -> None:
        for block, key in zip(archived.blocks, archived.keys, strict=False):
            self.tier[key] = self.engine.payload(block)

    @precondition(lambda self: 0 < len(self.told) < SESSIONS_MAX)
    @rule(which=which_st, behind=st.integers(0, 6))
    def fork(self, which: int, behind: int) -> None:
        parent = self.some(which)
        last = parent.journal[-1].at_row if parent.journal else 0
        row = max(last, parent.session.next_row - behind)
        name = self.forks.to_bytes(32, "big")
        journal: list[Event] = []
        children: list[Session] = []
        if self.or_full(
            lambda: children.append(self.engine.fork(parent.session, name, journal.append, at_row=row))
        ):
            self.forks += 1
            self.told.append(Told(children[0], parent.life.before(row), journal))

    @precondition(lambda self: self.told)
    @rule(which=which_st)
    def new_weights(self, which: int) -> None:
        told = self.some(which)
        told.life.weights += 1
        told.session.set_weights(told.life.weights)

    @precondition(lambda self: self.told)
    @rule(which=which_st, slots=st.integers(0, 12))
    def protect(self, which: int, slots: int) -> None:
        session = self.some(which).session
        session.protect(min(slots, session.full_slots))

    @precondition(lambda self: self.told)
    @rule(which=which_st, back=st.integers(1, 9))
    def end_turn(self, which: int, back: int) -> None:
        session = self.some(which).session
        start = max(session.slot_count - back, session.turns[-1].end if session.turns else 0)
        if start < session.slot_count:
            session.end_turn(start)

    @precondition(lambda self: self.told)
    @rule(which=which_st, crash=st.booleans())
    def swap(self, which: int, crash: bool) -> None:
        """Everybody's memory is used by others for a while; or the process dies, and only the log is left."""
        told = self.some(which)
        old = told.session
        payloads = [self.engine.payload(block) for block in old.table]
        if crash:
            for name in old.archive:
                self.stash(old, name)
            told.session = Session.recovered(
                self.engine.pool,
                self.engine.namespace,
                old.tokens,
                told.journal,
                rows_max=ROWS_MAX,
                journal=told.journal.append,
            )
            assert told.session.swapped == tuple(
                filter(None, map(self.engine.pool.key_of, old.table[: old.full_slots // BLOCK_TOKENS]))
            )
            assert told.session.view == old.view and told.session.lineage == old.lineage
            for name in set(told.session.archive) - set(old.archive):
                told.session.drop_archived(name, moved=False)
            told.session.turns, told.session.protected = old.turns, old.protected
            told.session.pending = old.pending
            old.close()
        else:
            old.swap_out()
        told.session.check()
        told.session.swap_in(lambda place, block: self.engine.load(block, payloads[place]))

    @precondition(lambda self: self.told)
    @rule(which=which_st)
    def begin_transfer(self, which: int) -> None:
        session = self.some(which).session
        full = session.table[: session.full_slots // BLOCK_TOKENS]
        self.engine.pool.hold(full)
        self.pinned += full

    @rule()
    def end_transfers(self) -> None:
        self.engine.pool.release(self.pinned)
        self.pinned = []

    @precondition(lambda self: self.told)
    @rule(which=which_st)
    def end(self, which: int) -> None:
        self.drop(self.some(which))

    @invariant()
    def every_slot_holds_what_its_row_made(self) -> None:
        for told in self.told:
            assert list(told.session.view.rows) == told.life.slots
            assert told.session.tokens == told.life.tokens
            made = [told.life.kv[row] for row in told.life.slots]
            assert self.engine.in_view(told.session) == made

    @invariant()
    def one_name_has_one_content(self) -> None:
        for key, content in self.engine.named():
            assert self.contents.setdefault(key, content) == content

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.engine.pool.check()
        held: Counter[BlockId] = Counter(self.pinned)
        for told in self.told:
            told.session.check()
            assert told.session.events == told.journal
            held.update(told.session.table)
            for archived in told.session.archive.values():
                held.update(archived.blocks)
        pool = self.engine.pool
        counts = {BlockId(each): pool.holder_count(BlockId(each)) for each in range(pool.block_count)}
        assert {block: count for block, count in counts.items() if count} == held

    def teardown(self) -> None:
        for told in self.told[:]:
            self.drop(told)
        self.end_transfers()
        assert self.engine.pool.free_count == BLOCK_COUNT
        super().teardown()


@pytest.mark.slow
def test_gate_g04_any_story_of_several_sessions() -> None:
    stories = Stories.TestCase
    stories.settings = settings(max_examples=60, stateful_step_count=50)
    stories().runTest()
