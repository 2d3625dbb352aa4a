"""Sessions with random pasts."""

from __future__ import annotations

import random

from kvcomm.streams.pool import BlockPool
from kvcomm.streams.session import Session
from tests.namespaces import namespace

NAMESPACE = namespace(block_tokens=4, vocab_size=100)


def told(seed: int, steps: int = 40) -> Session:
    """Feeds, cuts, archives, restores, weights, and forks that are followed instead of their parents."""
    draw = random.Random(seed)
    session = Session(BlockPool(400), NAMESPACE, rows_max=10_000)
    for step in range(steps):
        kind = draw.random()
        if kind < 0.6 or not session.full_slots:
            count = draw.randint(1, 9)
            session.commit(session.plan([draw.randrange(100) for _ in range(count)]))
        elif kind < 0.85:
            blocks = session.full_slots // 4
            first = draw.randrange(blocks)
            cut = [(4 * first, 4 * draw.randint(first + 1, blocks))]
            session.evict(cut, archive=draw.random() < 0.5, reason="story")
        elif kind < 0.95 and session.archive:
            session.restore(draw.choice(sorted(session.archive)))
        elif kind < 0.97:
            session.set_weights(step)
        else:
            session = session.fork(bytes([step]) * 32)
        session.check()
    return session
