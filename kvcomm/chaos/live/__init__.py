"""Chaos on real processes: ``kvcomm chaos run``.

``hosts`` are the machines of a cluster on this one (network namespaces, or loopback with drop tables),
``cluster`` the processes on them, ``agent`` the clients of one host, ``story`` does a scenario's steps.  What
was seen is judged by the pure modules of ``kvcomm.chaos``.

May import: ``kvcomm``, ``l3_shard`` inside function bodies.
"""
