"""The demonstration: three agents share the KV of a real model across processes, a pool restart and corrupted
memory.

It uses nothing that an agent could not use (``kvcomm.connect``, ``kvcomm.engines``), so it doubles as an
example.
"""
