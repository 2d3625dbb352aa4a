"""The bookkeeping of one rollout."""

import random

from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from kvcomm.streams.view import visibility
from tests.namespaces import namespace


def fed(session: Session, tokens: list[int]) -> None:
    session.commit(session.plan(tokens))


def test_any_story_leads_to_the_intervals_that_its_events_tell():
    for seed in range(40):
        draw = random.Random(seed)
        pool = BlockPool(200)
        session = Session(pool, namespace(block_tokens=4, vocab_size=100), rows_max=10_000)
        seen: list[set[int]] = []
        for _ in range(60):
            kind = draw.random()
            if kind < 0.6:
                count = draw.randint(1, 9)
                before = set(session.view.rows)
                seen += [
                    before | set(range(session.next_row, session.next_row + i + 1)) for i in range(count)
                ]
                fed(session, [draw.randrange(100) for _ in range(count)])
            elif kind < 0.85 and session.full_slots:
                blocks = session.full_slots // 4
                first = draw.randrange(blocks)
                last = draw.randint(first + 1, blocks)
                session.evict([(4 * first, 4 * last)], archive=draw.random() < 0.5)
            elif session.archive:
                session.restore(draw.choice(sorted(session.archive)))
            session.check()
            pool.check()
        found = visibility(session.next_row, session.events)
        for query, keys in enumerate(seen):
            assert {key for key in range(session.next_row) if found.sees(query, key)} == keys
        session.close()
        assert pool.free_count == 200
