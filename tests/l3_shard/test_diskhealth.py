"""When a disk is written to and read from, by what it did."""

import errno

from l3_shard.diskhealth import ERRORS_MAX, ERRORS_WITHIN_S, RETRY_S, DiskHealth


def state(health: DiskHealth) -> str:
    return health.state


def opened() -> DiskHealth:
    health = DiskHealth()
    assert state(health) == "opening" and not health.reads and not health.writes(0.0)
    health.opened()
    return health


def test_a_full_disk_is_read_and_tried_again_after_a_while():
    health = opened()
    assert not health.failed(errno.ENOSPC, 10.0)
    assert state(health) == "full" and health.reads and not health.writes(10.0)
    assert health.retry_at() == 10.0 + RETRY_S
    assert health.writes(10.0 + RETRY_S)
    assert not health.failed(errno.EDQUOT, 20.0) and not health.writes(20.0)
    health.wrote()
    assert state(health) == "on" and health.writes(20.0) and health.retry_at() is None


def test_a_disk_is_never_off_for_want_of_room():
    health = opened()
    for second in range(10 * ERRORS_MAX):
        assert not health.failed(errno.ENOSPC, float(second))
    assert state(health) == "full" and health.error_count == 10 * ERRORS_MAX


def test_too_many_errors_in_a_short_time_switch_it_off_for_good():
    health = opened()
    told = [health.failed(errno.EIO, 0.1 * number) for number in range(ERRORS_MAX + 3)]
    assert told == [False] * (ERRORS_MAX - 1) + [True] + [False] * 3, "it is said once"
    assert state(health) == "off" and not health.reads and not health.writes(1e9)
    health.wrote()
    assert state(health) == "off"


def test_rare_errors_do_not_add_up():
    health = opened()
    for number in range(5 * ERRORS_MAX):
        assert not health.failed(errno.EIO, number * 1.01 * ERRORS_WITHIN_S / (ERRORS_MAX - 1))
    assert state(health) == "on"


def test_nothing_is_asked_of_a_disk_that_does_not_answer():
    health = opened()
    health.overdue()
    health.overdue()
    health.came()
    assert state(health) == "stalled" and not health.reads and not health.writes(0.0)
    health.came()
    assert state(health) == "on"


def test_a_disk_that_cannot_be_read_at_all_is_off():
    health = DiskHealth()
    health.give_up()
    assert state(health) == "off"
