"""Which transport is chosen, and what is said of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from l2_rdma.choice import NOISE, Measured, choose
from l2_rdma.transports.port import TransportName

ORDER = ("shm", "cuda", "verbs", "tcp")
BLOCK_BYTES = 2 << 20
SHM = Measured("shm", 10e-6, 7e9)
CUDA = Measured("cuda", 10e-6, 7e9)
VERBS = Measured("verbs", 5e-6, 20e9)
TCP = Measured("tcp", 100e-6, 1.2e9)


def test_the_cheapest_for_a_block_is_used_whatever_the_order_says() -> None:
    choice = choose([CUDA, VERBS, TCP], {}, ORDER, BLOCK_BYTES)
    assert choice.used == "verbs"
    assert [each.transport for each in choice.ranking] == ["verbs", "cuda", "tcp"]


def test_memory_of_this_host_is_read_in_place_and_needs_no_copy_however_fast() -> None:
    choice = choose([TCP, VERBS, SHM], {}, ("tcp", "verbs", "shm"), BLOCK_BYTES)
    assert choice.used == "shm"
    assert [each.transport for each in choice.ranking] == ["shm", "verbs", "tcp"]
    assert choice.reasons["verbs"] == "this host's memory is read in place, without a copy"
    assert choice.reasons["tcp"].startswith("slower: ")


def test_small_blocks_are_a_matter_of_latency() -> None:
    slow_but_near = Measured("cuda", 1e-6, 1e9)
    assert choose([slow_but_near, VERBS], {}, ORDER, 64 << 10).used == "verbs"
    assert choose([slow_but_near, VERBS], {}, ORDER, 64).used == "cuda"


def test_what_is_slower_says_by_how_much() -> None:
    reasons = choose([SHM, TCP], {}, ORDER, BLOCK_BYTES).reasons
    assert reasons["tcp"] == "slower: 1.85 ms against 310 us for a 2 MiB block"
    assert reasons["verbs"] == reasons["cuda"] == "was not tried"
    assert "shm" not in reasons


def test_what_was_refused_says_why() -> None:
    choice = choose([TCP], {"verbs": "no RDMA device"}, ORDER)
    assert choice.used == "tcp"
    assert choice.reasons["verbs"] == "refused: no RDMA device"


def test_the_order_decides_between_what_is_equal_but_for_noise() -> None:
    near = Measured("verbs", CUDA.latency_s, CUDA.bytes_per_s * (1 + NOISE / 2))
    assert choose([CUDA, near], {}, ("cuda", "verbs")).used == "cuda"
    choice = choose([CUDA, near], {}, ("verbs", "cuda"))
    assert choice.used == "verbs"
    assert choice.reasons["cuda"].startswith("no better: ")


def test_what_is_not_configured_is_not_used() -> None:
    choice = choose([VERBS, TCP], {}, ("tcp",))
    assert choice.used == "tcp"
    assert choice.reasons == {"verbs": "not among network.transports"}


def test_nothing_works() -> None:
    choice = choose([], {"tcp": "connection refused"}, ("tcp",))
    assert choice.used is None
    assert choice.ranking == ()
    assert choice.reasons == {"tcp": "refused: connection refused"}


@given(
    st.lists(
        st.tuples(st.sampled_from(ORDER), st.floats(1e-7, 1e-1), st.floats(1e6, 1e11)),
        unique_by=lambda each: each[0],
    ),
    st.permutations(ORDER),
    st.integers(1, 64 << 20),
)
def test_the_used_one_is_never_much_worse_and_everybody_else_has_a_reason(
    costs: list[tuple[TransportName, float, float]], order: list[str], block_bytes: int
) -> None:
    measured = [Measured(*each) for each in costs]
    choice = choose(measured, {}, order, block_bytes)
    assert {each.transport for each in choice.ranking} == {each.transport for each in measured}
    assert set(choice.reasons) == set(order) - {choice.used}
    if not measured:
        return
    costs_s: dict[str, float] = {each.transport: each.cost_s(block_bytes) for each in measured}
    assert choice.used is not None
    if "shm" in costs_s:
        assert choice.used == "shm"
    else:
        limit_s = min(costs_s.values()) * (1 + NOISE)
        assert costs_s[choice.used] <= limit_s
        before = set(order[: order.index(choice.used)]) & set(costs_s)
        assert all(costs_s[name] >= limit_s for name in before)
    others = [costs_s[each.transport] for each in choice.ranking[1:]]
    assert others == sorted(others)
