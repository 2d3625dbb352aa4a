"""L2: the pools of a rack, read one-sided without asking the process that owns them.

Owns: the layout of a region (header, bucketed index, slots in size classes), its allocator and its owner
process, the reader that verifies every copy, pins, the rack's rendezvous directory, and the transports
(shared memory, RDMA verbs, CUDA IPC, TCP) behind one port.

May import: `kvcomm` (the floor). Never: `l1`, `l3_shard`, `controller`.
"""
