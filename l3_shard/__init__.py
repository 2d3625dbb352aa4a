"""L3: consistent-hash shards over all racks, replicated and durable.

Owns: the ring and its epochs, the copies of blocks, records with dotted version vectors (eventual) and
CASPaxos (strong), hints, anti-entropy, the durable store, and the shard's server on both wires.

May import: `kvcomm` (the floor). Never: `l1`, `l2_rdma`, `controller`.
"""
