"""The deterministic simulator: a cluster of the shipped machines in one thread, everything around them drawn
from
one seed.

``world`` is time and hosts, ``network`` and ``disk`` are what goes wrong, ``cluster`` puts the shipped shard
machines and the shipped client on them, ``swarm`` draws a world from a seed, ``nemesis`` breaks it,
``history`` is what clients saw, and the checkers (``watch``, ``eventual``, ``linearizable``) judge it
without the code under test.

May import: ``kvcomm``; the tiers inside function bodies only (a composition root, like ``kvcomm.cli``).
"""
