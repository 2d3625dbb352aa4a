from itertools import count

from l3_shard.timers import Timers


def test_what_is_due_is_done_once_in_order():
    timers, done = Timers(count()), list[str]()
    assert timers.deadline() is None
    timers.at(2.0, lambda: done.append("late"))
    timers.at(1.0, lambda: done.append("first"))
    timers.at(1.0, lambda: done.append("second"))
    assert timers.deadline() == 1.0
    timers.run(0.9)
    assert done == []
    timers.run(1.0)
    assert done == ["first", "second"] and timers.deadline() == 2.0
    timers.run(5.0)
    assert done == ["first", "second", "late"] and timers.deadline() is None


def test_a_timer_may_set_another_that_is_due_at_once():
    timers, done = Timers(count()), list[int]()
    timers.at(1.0, lambda: timers.at(1.0, lambda: done.append(1)))
    timers.run(1.0)
    assert done == [1]
