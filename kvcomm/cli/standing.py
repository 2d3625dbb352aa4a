"""What a controller tells the monitoring of itself and of its cluster."""

from __future__ import annotations

from collections import Counter

from kvcomm.cli.following import ENDS
from kvcomm.metrics import OPERATION_STEPS, Metrics
from kvcomm.wire.messages import ClusterView

STATES = ("alive", "suspect", "dead", "unknown")


def refresh_controller(metrics: Metrics, view: ClusterView, term: int) -> None:
    """Take over what a controller's view says.

    Args:
        term: of the lease under which it leads; 0 = it does not, and then knows of no operations.
    """
    metrics.gauge("kvcomm_controller_term").set(term)
    metrics.gauge("kvcomm_controller_leads").set(int(term > 0))
    states = Counter(node.state for node in view.nodes)
    for state in STATES:
        metrics.gauge("kvcomm_cluster_nodes", state=state).set(states[state])
    steps = Counter(each.step for each in view.operations)
    for step in OPERATION_STEPS:
        metrics.gauge("kvcomm_operations", step=step).set(steps[step])
    begun = metrics.counter("kvcomm_operations_total")
    # Numbers begin anew where the controllers have lost their records.
    begun.advance_to(max([begun.value, *(each.operation for each in view.operations)]))
    under_way = [each.done_share for each in view.operations if each.step not in ENDS]
    metrics.gauge("kvcomm_operation_done_share").set(min(under_way, default=1.0))
