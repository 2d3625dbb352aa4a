"""KV-streams: compact a live context without computing what is kept again, share it, replay it exactly.

Owns the bookkeeping of compacted rollouts (``events``, ``view``, ``pool``, ``lineage``, ``session``), the
choice of what is cut (``policies``), the record that a trainer gets (``rollout``), the trainer's side
(``replay``, ``mismatch``) and the sharing of compacted contexts (``context``, ``sharing``).  Imports the
floor alone; torch only in the modules that compute with tensors, which say so.
"""
