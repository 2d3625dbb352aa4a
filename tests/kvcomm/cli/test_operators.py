"""Asking the controllers: any of them how it is, the leading one to do something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcomm.cli.following import follow, left_text
from kvcomm.cli.operators import ORDER_S, Operators
from kvcomm.errors import OutcomeUnknown, Refused, Unavailable
from kvcomm.wire.messages import (
    ClusterGet,
    ClusterView,
    Failure,
    Message,
    OperationView,
    OrderAnswer,
    ScaleOrder,
)

NAMES = [f"controller-{index}" for index in range(3)]
SILENT = Failure("unavailable", "no connection")


def not_leader(leader: str) -> Failure:
    return Failure("not_leader", "another one does", leader.encode())


class Cluster:
    """Three controllers that answer as they are told; time passes only by sleeping."""

    def __init__(self, leader: str = "controller-1") -> None:
        self.leader, self.now = leader, 0.0
        self.silent: set[str] = set()
        self.stopping: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.taken: list[Message] = []
        self.at: dict[float, Callable[[], None]] = {}
        self.steps: list[OperationView] = []
        self.lose_answers = 0
        self.refusal: Failure | None = None

    def ask(self, name: str, message: Message) -> tuple[Message, bool]:
        self.asked.append((name, type(message).__name__))
        if name in self.silent:
            return SILENT, False
        if name in self.stopping:
            return Failure("unavailable", "this node is stopping"), True
        if isinstance(message, ClusterGet):
            operations = self.steps[:1] if name == self.leader else []
            if name == self.leader and len(self.steps) > 1:
                self.steps.pop(0)
            return ClusterView(name, self.leader, 4, "whole", None, [], operations), True
        if name != self.leader:
            return not_leader(self.leader), True
        if self.refusal is not None:
            return self.refusal, True
        self.taken.append(message)
        if self.lose_answers:
            self.lose_answers -= 1
            self.refusal = Failure("refused", "operation 7 is under way")
            return SILENT, False
        return OrderAnswer(7, []), True

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()

    def operators(self, names: list[str] | None = None) -> Operators:
        return Operators(
            "small", NAMES if names is None else names, self.ask, clock=self.clock, sleep=self.sleep
        )

    def clock(self) -> float:
        return self.now


def test_the_leaders_view_goes_before_others_and_the_leader_is_asked_first_next_time():
    cluster = Cluster()
    asked = cluster.operators()
    assert asked.view().controller == "controller-1"
    assert asked.view().controller == "controller-1"
    assert [name for name, _ in cluster.asked] == ["controller-0", "controller-1", "controller-1"]


def test_without_a_leader_any_view_is_better_than_none():
    cluster = Cluster(leader="")
    cluster.silent = {"controller-0"}
    assert cluster.operators().view().controller in ("controller-1", "controller-2")


def test_who_is_stopping_is_passed_over():
    cluster = Cluster()
    cluster.stopping = {"controller-0"}
    answer = cluster.operators().ask(ClusterGet())
    assert isinstance(answer, ClusterView) and answer.controller == "controller-1"


def test_an_order_follows_the_leader():
    cluster = Cluster("controller-2")
    assert cluster.operators().order(ScaleOrder(4)).operation == 7
    assert [name for name, _ in cluster.asked] == ["controller-0", "controller-2"]


def test_an_order_waits_for_the_next_leader():
    cluster = Cluster(leader="")
    cluster.at[5.0] = lambda: setattr(cluster, "leader", "controller-2")
    assert cluster.operators().order(ScaleOrder(4)).operation == 7
    assert 5.0 <= cluster.now < ORDER_S


def test_an_order_is_given_up_in_time_and_says_what_was_the_matter():
    cluster = Cluster(leader="")
    with pytest.raises(Unavailable, match=r"not taken in 20 s \(controller-.: another one does\)"):
        cluster.operators().order(ScaleOrder(4))
    assert cluster.now <= ORDER_S


def test_a_leader_that_is_silent_is_not_waited_for_alone():
    cluster = Cluster("controller-0")
    cluster.silent = {"controller-0"}
    cluster.at[3.0] = lambda: setattr(cluster, "leader", "controller-1")
    assert cluster.operators().order(ScaleOrder(4)).operation == 7
    assert cluster.taken == [ScaleOrder(4)]


def test_what_the_leader_refuses_is_told_as_it_is():
    cluster = Cluster()
    cluster.refusal = Failure("refused", "2 shards would be left for 3 replicas")
    with pytest.raises(Refused, match="2 shards would be left"):
        cluster.operators().order(ScaleOrder(2))


def test_a_lost_answer_to_an_order_that_was_taken_is_no_refusal():
    cluster = Cluster()
    cluster.lose_answers = 1
    with pytest.raises(OutcomeUnknown, match=r"may have been taken: .*under way; look with: kvcomm status"):
        cluster.operators().order(ScaleOrder(4))
    assert len(cluster.taken) == 1


def test_without_controllers_it_is_said_how_to_start_some():
    with pytest.raises(Unavailable, match="kvcomm controller --node controller-0 --instance small"):
        Cluster().operators([]).view()
    cluster = Cluster()
    cluster.silent = {*NAMES}
    with pytest.raises(Unavailable, match="reads and writes go on without them, changes wait"):
        cluster.operators().view()


def step(name: str, done_share: float = 0.0) -> OperationView:
    return OperationView(7, "shard-3 joins", name, done_share, 2.0)


@pytest.mark.parametrize("end", ["done", "cancelled", "rolled back", "failed"])
def test_an_operation_is_followed_to_its_end(end: str, capsys: pytest.CaptureFixture[str]):
    cluster = Cluster()
    cluster.steps = [
        step("planned"),
        step("copying", 0.5),
        step("copying", 0.9),
        step("purging", 1.0),
        step(end),
    ]
    ended = follow(cluster.operators(), 7, 60.0, clock=cluster.clock, sleep=cluster.sleep)
    assert ended is not None and ended.step == end
    said = capsys.readouterr().err
    assert said.count("copying") == 1, "a line a step where nobody looks"
    assert f"operation 7: {end}: shard-3 joins" in said


def test_a_change_of_the_leader_is_waited_for():
    cluster = Cluster()
    cluster.silent, cluster.steps = {*NAMES}, [step("done")]
    cluster.at[4.0] = cluster.silent.clear
    ended = follow(cluster.operators(), 7, 60.0, quiet=True, clock=cluster.clock, sleep=cluster.sleep)
    assert ended is not None and cluster.now >= 4.0


def test_following_ends_at_the_deadline_and_the_operation_goes_on():
    cluster = Cluster()
    cluster.steps = [step("copying")]
    assert follow(cluster.operators(), 7, 3.0, quiet=True, clock=cluster.clock, sleep=cluster.sleep) is None
    assert cluster.now == pytest.approx(3.0, abs=0.5)


@pytest.mark.parametrize(
    ("eta_s", "text"),
    [(-1, "time left not known yet"), (0, "0 s left"), (59.4, "59 s left"), (61, "1 min 1 s left"),
     (3_700, "1 h 1 min left"), (7_205, "2 h 5 s left")],
)  # fmt: skip
def test_the_time_left_is_told(eta_s: float, text: str):
    assert left_text(eta_s) == text
