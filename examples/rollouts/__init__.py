"""Train a toy on compacted rollouts, and ask it for what was cut: ``python -m examples.rollouts``.

Reads from the inside out: ``task`` (what is played), ``arms`` (how context is kept), ``stream`` and
``playing`` (the engine writes rollouts), ``grpo`` (the trainer replays them), ``training`` and ``recall``
(the experiments), ``pictures``.
"""
