"""The cases: one module a question, each with ``run(scale) -> Report``."""

from __future__ import annotations

CASES = (
    "l2_view",
    "l2_copy",
    "tcp_reads",
    "verbs_reads",
    "absent",
    "l3_block",
    "copies",
    "disk",
    "state",
    "eventual",
    "strong",
    "failover",
    "repair",
    "prefill",
    "streams",
    "hotkeys",
    "hot_record",
    "affinity",
    "penetration",
    "overload",
    "footprint",
)
"""In the order of the report."""
