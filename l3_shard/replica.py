"""Replica ids: one for each incarnation of a replica's *state*.

A dot (replica id, counter) may be given out once.  A shard counts per record and finds the last counter in
the record itself; so as long as the records are intact the shard may keep its id over restarts.  When records
are lost, the counters are lost with them, and a shard that kept its id would give out the same dots again:
other replicas would take the new writes for ones that they have seen and drop them, acknowledged or not.
Therefore the id lives and dies with the data:

* it is stored in the same database, in the same transactions, as the records; an empty directory draws a new
one;
* a directory that was copied, restored from a backup, or may have lost its last writes (power cut without
fsync) draws a
  new one, though the records that are there are kept (see ``l3_shard.store``);
* one damaged record is one lost counter: the shard goes on under the *successor* of its id, stored with its
next write.

An id is ``<drawn>.<n>``: the drawn part is random, ``n`` counts successors.
"""

from __future__ import annotations


def first_replica(drawn: str) -> str:
    """The id of a fresh state.  Raises ``ValueError`` unless ``drawn`` is 8 to 48 letters and digits."""
    if not (8 <= len(drawn) <= 48 and drawn.isascii() and drawn.isalnum()):
        raise ValueError(f"a replica id is drawn from 8 to 48 letters and digits, got {drawn!r}")
    return f"{drawn}.1"


def successor(replica: str) -> str:
    """The id under which a replica goes on after it lost a part of its state."""
    drawn, _, count = replica.partition(".")
    return f"{drawn}.{int(count) + 1}"


def later(one: str, two: str) -> str:
    """Of an id and a successor of it, in whichever order, the successor."""
    return max(one, two, key=lambda replica: int(replica.partition(".")[2]))
