"""The controllers of a cluster and what keeps its processes running; off the data path.

Each controller process is a member of the metadata group (`metadata`), wants its lease (`leadership`), and
drives one `controller.Controller`, the pure machine that decides: who is alive, which map is the newest, what
is moved where. `process` is its shell. `kvcomm up` runs the `supervisor` (pure; `server` performs, `launcher`
starts processes), which keeps running what the leader plans.

Reads and writes never depend on this package: with all of it gone they go on under the last map, and
everything that it knew is found again in the shards.

May import: `l1`, `l2_rdma`, `l3_shard`, `kvcomm`. Nothing imports it but the composition roots.
"""
