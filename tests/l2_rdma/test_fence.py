import os
import signal

import pytest

from l2_rdma import fence


def test_fences_can_be_had_on_this_machine():
    fence.full_fence()
    fence.barrier_everywhere()
    assert fence.grace_s() >= 0.0


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_is_in_the_fence_does_not_hang():
    with fence._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(5)
            fence.full_fence()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
