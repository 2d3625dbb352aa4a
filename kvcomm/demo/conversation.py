"""The text that the agents share: real multi-agent traffic if a trace is at hand, else one of our own."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACES_VARIABLE = "KVCOMM_TRACES"
TRACE = Path("agents") / "magagent.jsonl.gz"
"""JSON lines with ``input`` (the whole prompt of one call), ``output`` and ``session_id``."""

_TEXT_CHARACTERS_MIN = 8000
"""A prompt at least so long is some 1,800 tokens."""


@dataclass(frozen=True, slots=True)
class SharedText:
    text: str
    source: str
    """For the reader: where it is from."""


def shared_text() -> SharedText:
    """The first long prompt of the trace, else :data:`CONVERSATION`."""
    folder = Path(os.environ.get(TRACES_VARIABLE) or Path("..") / "shared" / "traces")
    if (folder / TRACE).is_file():
        prompt = _first_long_prompt(folder / TRACE)
        if prompt is not None:
            return SharedText(prompt, f"trace {TRACE}")
    return SharedText("\n\n".join(f"{role}: {said}" for role, said in CONVERSATION), "built-in conversation")


def _first_long_prompt(path: Path) -> str | None:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            call: dict[str, Any] = json.loads(line)
            prompt = call.get("input")
            if isinstance(prompt, str) and len(prompt) >= _TEXT_CHARACTERS_MIN:
                return prompt
    return None


CONVERSATION: tuple[tuple[str, str], ...] = (
    (
        "system",
        "Three agents work on one repository. The planner splits the work and keeps the list of open "
        "questions. The coder changes files and reports what was run. The critic reads diffs and results "
        "and says what is still unproven. Everybody reads the whole conversation before speaking. Nobody "
        "repeats what was said already. Claims about speed carry the number of runs and the spread.",
    ),
    (
        "user",
        "Our order service loses a reservation now and then. It happens about four times a day, always "
        "between two and six in the morning, when the batch import runs. A customer sees 'reserved', and "
        "the next page says the item is sold out. The reservation row is gone from the database, there is "
        "no delete in the audit log, and the stock counter is right. Find out why, fix it, and prove that "
        "it is fixed. You may read the whole repository and run tests, and you have a copy of last "
        "night's database and logs.",
    ),
    (
        "planner",
        "What we know: the row vanishes without a delete, and the counter agrees with the row being gone. "
        "So whatever removed the row also gave the stock back, which is what the expiry job does. Three "
        "hypotheses. First, the expiry job takes reservations that are not expired, for example because "
        "two clocks disagree. Second, the import replaces the table partition and loses rows that were "
        "written meanwhile. Third, the transaction that wrote the reservation was rolled back after the "
        "page had been shown. Coder: look at how expiry decides, at what the import does to the table, "
        "and at where the page is rendered relative to the commit. Report file and line for each, change "
        "nothing yet.",
    ),
    (
        "coder",
        "Expiry: jobs/expire.py line 41 selects rows with expires_at < now() and gives the stock back in "
        "the same transaction, line 58. The time is the database's, so there is one clock for the "
        "decision. But expires_at is computed in the application, orders/reserve.py line 112, as "
        "datetime.utcnow() plus fifteen minutes, from the clock of the web host. Import: "
        "tools/import_batch.py loads into a staging table and merges with INSERT ... ON CONFLICT DO "
        "UPDATE on products only; it never touches reservations. Rendering: the view returns after "
        "commit; there is a test for it, tests/test_reserve.py line 77. Expiry does not write to the "
        "audit log; it uses a bulk statement that goes around the hook. That explains the missing entry.",
    ),
    (
        "critic",
        "The third hypothesis is answered by a test that exists, fine. The second is answered by reading "
        "only; I would like to see the statement log of one import confirm it. For the first you found a "
        "second clock, but not that it is wrong. A host would have to be fifteen minutes behind for a "
        "fresh reservation to be expired at once. Is there any sign of that? And why only at night? If "
        "clocks were off all day, we would lose reservations all day.",
    ),
    (
        "planner",
        "Good questions. The night matters: what else is different between two and six? The import takes "
        "locks on products. A reservation that waits for such a lock computes expires_at before it waits. "
        "Coder: measure how long the reserving transaction waits during an import, and show where "
        "expires_at is computed relative to the lock. Also the offsets of the web hosts' clocks from last "
        "night's monitoring.",
    ),
    (
        "coder",
        "Clock offsets last night: all four web hosts within 9 ms of the database. So no host is behind. "
        "Lock waits: in orders/reserve.py, expires_at is computed on line 112, then line 118 takes SELECT "
        "... FOR UPDATE on the product row. From the statement log of last night, 3,114 reservations "
        "during the import: median wait 0.2 s, 99th percentile 48 s, the longest 17 minutes and 3 "
        "seconds. Seven waited longer than fifteen minutes. Of these seven, five are gone from the table; "
        "the other two were paid within the same minute that they were written. The import holds a "
        "product's lock for the whole file because the merge is one transaction, tools/import_batch.py "
        "line 203.",
    ),
    (
        "critic",
        "That fits in number and time: seven candidates, five losses, and the two survivors have a reason "
        "to survive. One gap: the request must still be alive after seventeen minutes. What does the web "
        "server's timeout say? And the customer saw 'reserved', so somebody waited that long or reloaded.",
    ),
    (
        "coder",
        "The gateway gives up after 60 s and shows a spinner page that asks again every 5 s with the same "
        "request id. The worker behind it has no timeout; it goes on, and its answer is stored under the "
        "request id, gateway/replay.py line 64. So the customer keeps the page open, or opens it later "
        "from the mail that we send after 2 minutes, and gets the stored answer. I checked two of the "
        "five sessions in the access log: both reloaded after more than 15 minutes and got 'reserved' "
        "from the replay store, 4 and 11 seconds before the expiry job ran.",
    ),
    (
        "planner",
        "So the cause is: the lifetime starts before the lock is held, the lock can be held longer than "
        "the lifetime, and the expiry job then does exactly what it should. Fixes, smallest first. A: "
        "compute expires_at in the database, in the INSERT, after the lock: now() is the start of the "
        "transaction there, so it has to be clock_timestamp(). B: merge the import in chunks so that no "
        "lock is held for minutes. C: give the worker a deadline shorter than the lifetime, so that "
        "nobody is told about a reservation that old. D: let expiry write to the audit log. A is the fix, "
        "B removes the trigger, C bounds what is left, D would have saved us a day. Coder: do A and D "
        "now, with a test that fails before. B as a separate change. Write down why now() would be wrong.",
    ),
    (
        "coder",
        "Done on branch fix/reservation-lifetime. A: orders/reserve.py lines 112 to 131, the INSERT now "
        "computes clock_timestamp() + interval '15 minutes' after the FOR UPDATE. The comment says that "
        "now() is the transaction's start and would bring the fault back. D: jobs/expire.py writes one "
        "audit row for each reservation in the same statement, through a common table expression. Test: "
        "tests/test_reserve_lock.py opens two connections; one holds the product's lock, the other "
        "reserves with a lifetime of 200 ms set by configuration, and the lock is released after the "
        "waiter shows up in pg_locks and 300 ms of database time have passed. Before the change the "
        "reservation is expired when it appears: fails 20 of 20 runs. After it: passes 20 of 20. The "
        "whole suite: 412 passed, 3 skipped, the same three as before.",
    ),
    (
        "critic",
        "I read the diff. The order is right: lock, then insert, and the time is taken in the insert. Two "
        "remarks. The payment page shows a countdown that is computed from the web host's clock and "
        "fifteen minutes; it should use the row's expires_at, else it promises more time than there is by "
        "the length of the wait. And the replay store still hands out answers of any age: with A the "
        "reservation lives fifteen minutes from the lock on, but the customer may load the page twenty "
        "minutes later and read 'reserved' again. C is needed for correctness, not only as a bound.",
    ),
    (
        "planner",
        "Agreed on both. Then C becomes: the replay store keeps an answer no longer than what it says is "
        "true, so its time to live is expires_at of the row; after that the page asks the database. "
        "Coder: the countdown and C on the same branch; B as its own change with a measurement of the "
        "longest lock during an import of last night's file, before and after. Critic: think about what "
        "could still make a row vanish, and what alarm would have told us.",
    ),
)
"""Who said what; about 1,800 tokens."""
