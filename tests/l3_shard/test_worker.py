"""One thread beside an event loop."""

import asyncio
import threading
from functools import partial

import pytest

from l3_shard.worker import Worker


def test_calls_are_made_in_order_in_one_other_thread_and_answered_in_the_loops():
    threads, answers = set(), []

    def call(number: int) -> int:
        threads.add(threading.get_ident())
        return number

    async def main() -> None:
        worker = Worker("test-worker")
        for number in range(50):
            worker.start(partial(call, number), lambda made, error: answers.append((made, error)))
        assert await worker.run(lambda: call(50)) == 50
        worker.close()
        worker.close()

    asyncio.run(main())
    assert answers == [(number, None) for number in range(50)]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_what_a_call_raises_is_handed_back_and_the_next_is_made():
    async def main() -> int:
        worker = Worker("test-worker")
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
        made = await worker.run(lambda: 7)
        worker.close()
        return made

    assert asyncio.run(main()) == 7
