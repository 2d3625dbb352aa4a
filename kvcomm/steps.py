"""``Steps``: sans-I/O client code that both the blocking and the asyncio face run.

A client operation is a generator.  It yields what it wants done and is resumed with the result, so it holds
the decisions (which peers, what to retry, what to verify) and no socket:

* ``Submit(asks)`` starts requests and is resumed at once with one :class:`Call` an ask; requests to one peer
  are pipelined in order.
* ``Wait(call)`` is resumed with an :class:`Answer` when that call is done, failed or out of time.
Step = Submit | Wait | Park | Emit
Steps = Generator[Step, Any, T]
"""An operation that returns ``T``.  Deadlines belong to the driver: every operation runs under one."""


def ask_all(asks: Sequence[Ask]) -> Steps[list[Answer]]:
    """Ask everybody at once, wait for all; answers in the order of ``asks``."""
    calls: list[Call] = yield Submit(asks)
    answers: list[Answer] = []
    for call in calls:
        answers.append((yield Wait(call)))
    return answers
