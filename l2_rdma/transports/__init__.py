"""The wires that reach a region one-sided, behind one port.

``port`` says what every transport does and promises; ``poll`` is the loop they share, ``desk`` the pool's
side of their negotiation, ``known`` finds out which of them run here.  ``shm``, ``tcp``, ``verbs`` and
``cuda`` are the transports; what only one of them needs (pyverbs, CUDA) is imported when it is first used.

Imports ``kvcomm`` and ``l2_rdma`` only.
"""
