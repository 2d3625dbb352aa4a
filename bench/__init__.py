"""Benchmarks: what the service costs beside the cheapest thing that could do the same job, in the same
rounds.

``python -m bench`` runs every case and prints a table; ``--write-docs`` puts it into ``docs/benchmarks.md``.

* ``timing``: interleaved rounds, spreads and ratios; the only place that reads a clock, but for ``arms``.
* ``arms``: rollouts of a model under several ways to keep a context short, in lockstep.
* ``report``: what a case found, as data, as JSON and as Markdown.
* ``peers/``: the baselines (memory copy, raw socket, Redis, Mooncake), each a context manager that says why
it
  cannot run instead of raising.
* ``cases/``: one module a question; ``run(scale)`` returns a report.
"""
