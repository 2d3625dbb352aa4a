"""The controller: one leader at a time, off the data path. **Empty today: no code is here yet.**

Will own: liveness and leases, hot keys, placement and load policies, migration of shards, recovery after a
network partition, affinity of agents to racks, scaling and the launchers. Until then membership is static and
comes from the configuration; reads and writes never depend on this package.

May import: `l1`, `l2_rdma`, `l3_shard`, `kvcomm`. Nothing imports it but the composition roots.
"""
