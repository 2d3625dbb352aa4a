"""The controller: starts and restarts a cluster's nodes and issues ring epochs; off the data path.

`supervisor` decides (pure), `server` performs, `launcher` starts processes. One supervisor an instance, held
by `kvcomm up`; membership is static and comes from the configuration. Reads and writes never depend on this
package: with the supervisor gone they go on under the last map.

Not here yet: leases between several controllers, load policies, migration of shards, recovery after
a network partition, affinity of agents to racks, launchers on other hosts.

May import: `l1`, `l2_rdma`, `l3_shard`, `kvcomm`. Nothing imports it but the composition roots.
"""
