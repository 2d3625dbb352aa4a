"""L2: the rack's shared-memory pools, read without asking anybody.

Owns: the region's layout and life (``layout``, ``region``), its only allocator and index writer (``owner``
over ``allocator``, ``index``, ``hazards``), the one-sided reader in the client's process
(``reader``, ``pins``), the client's ``Tier`` (``tier``), copies of hot blocks (``warming``) and the role
shell (``pool``).

Imports ``kvcomm`` (the floor) only; never ``l1``, ``l3_shard`` or ``controller``.
"""
