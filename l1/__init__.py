"""L1: the cache inside an agent's process. A hit here does no I/O at all.

Owns: the byte-bounded LRU of blocks and records, the negative cache, the single flight that turns many
readers of one missing key into one load, and the staleness bound of records.

May import: `kvcomm` (the floor). Never: `l2_rdma`, `l3_shard`, `controller`.
"""
