"""Resolvers: what becomes of concurrent writes, by the class of a record.

The class is the first part of a record's name, so it cannot differ between nodes or change in a record's
life:

=============  ===================================  ======================================================
first part     a write                              concurrent writes
=============  ===================================  ======================================================
``state``      replaces what its author had seen    siblings: the reader sees all (no resolver)
``register``   replaces what its author and its     the latest stamp is shown, **the others are lost**
               coordinator had seen
``counter``    adds a whole number                  all are in the sum
``set``        adds and removes elements            union; an add beats a remove that had not seen it
``map``        puts and removes fields              each field by itself; one field: as ``register``, and a
                                                    put beats a remove that had not seen it
``max``,       offers a number                      the largest, smallest
``min``
=============  ===================================  ======================================================

Theory of operation.  A record of a resolved class holds, in each sibling, one *state* of a join semilattice.
A write is a small *delta*.  Its coordinator applies it to the join of all siblings that it holds and writes
the result as one ordinary write that covers them all (``l3_shard.resolving``): it has seen them all, so
nothing is hidden, and a writer needs no read before.  What two coordinators wrote without knowing of each
other are two siblings, joined by whoever reads them, and in storage by the next write.  A replica by itself
joins nothing.

Everything here is pure, and the same bytes in give the same bytes out on every node.
"""

from kvcomm.resolvers.resolver import Moment, Resolver
from kvcomm.resolvers.table import RESOLVERS, resolver_of

__all__ = ["RESOLVERS", "Moment", "Resolver", "resolver_of"]
