"""Blocks read through every transport while their slots are reused all the time: not one wrong byte.

And the proof that the test can see them: with verification switched off, it does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvcomm.block import HEADER_BYTES
from kvcomm.tier import Block
from l2_rdma.layout import SUSPECT_COUNT, SUSPECT_FIRST_WORD, WORD_BYTES
from l2_rdma.remote import RemoteReader
from tests.contracts.transports.churner import COPY_BYTES, KEYS, SLOTS, payload
from tests.contracts.transports.worlds import ROOT, Link, Peer, World, environment
from tests.l2_rdma.regions import key_of
from tests.peers import soon, until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

LIMIT_S = 60
READERS = 2


@pytest.fixture
def churner(world: World) -> Iterator[Peer]:
    with world.peer(incarnation=41, module="churner") as peer:
        yield peer


def churn(churner: Peer, *, reads: int, seconds: float, mode: str) -> tuple[int, list[dict[str, Any]]]:
    """How many blocks the owner evicted meanwhile, and what each reader counted."""
    control = churner.control()
    control.ask("churn", True)
    command = [
        sys.executable,
        "-m",
        "tests.contracts.transports.torn",
        churner.transport,
        str(churner.directory),
    ]
    with ExitStack() as stack:
        readers = []
        for number in range(READERS):
            reader = subprocess.Popen(
                [*command, str(reads + number), str(seconds), mode],
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(reader.communicate)
            stack.callback(reader.kill)
            readers.append(reader)
        counts = [json.loads(each.communicate(timeout=LIMIT_S)[0]) for each in readers]
        assert [each.returncode for each in readers] == [0] * READERS
    return control.ask("churn", False)[1], counts


def test_no_wrong_byte_while_every_slot_is_reused(churner: Peer) -> None:
    evicted, counts = churn(churner, reads=40_000, seconds=5, mode="verify")

    def total(name: str) -> int:
        return sum(each[name] for each in counts)

    assert total("wrong") == 0
    assert total("corrupt") == 0, "no stable slot was ever found damaged"
    assert total("unavailable") == 0
    assert total("hits") > 20, "the readers found blocks; how many, is the machine's affair"
    assert total("retries") > 0, "slots moved between index and slot"
    assert evicted > 100, "slots were reused under the readers"


def test_the_test_sees_wrong_bytes_when_nothing_is_verified(churner: Peer) -> None:
    _, counts = churn(churner, reads=1_000_000, seconds=20, mode="trust")

    assert sum(each["wrong"] for each in counts) > 0


# -- old knowledge


@contextmanager
def reading(world: World, peer: Peer) -> Iterator[tuple[Link, RemoteReader]]:
    with world.link(peer) as link:
        yield link, RemoteReader(link.channel, link.transport)


def got(reader: RemoteReader, *numbers: int) -> dict[int, bytes]:
    """What reading all of them in one batch brings."""
    found: dict[int, bytes] = {}

    def keep(index: int, block: Block) -> None:
        assert block.key == key_of(numbers[index])
        found[numbers[index]] = bytes(block.payload)

    reader.get([key_of(number) for number in numbers], keep, soon())
    return found


def put(link: Link, *numbers: int) -> None:
    assert [link.control.ask("put", number) for number in numbers] == ["published"] * len(numbers)


def test_a_slot_that_was_reused_after_the_lookup_is_a_miss(world: World, churner: Peer) -> None:
    """The reader goes by its memory of the index to a slot that holds another block of the same size."""
    with reading(world, churner) as (link, reader):
        put(link, *range(SLOTS))
        assert reader.lookup([key_of(number) for number in range(SLOTS)], soon()) == [True] * SLOTS
        put(link, *range(SLOTS, 2 * SLOTS))

        assert got(reader, *range(SLOTS)) == {}
        assert reader.counters.misses == SLOTS
        assert reader.counters.corrupt == 0
        assert got(reader, *range(SLOTS, 2 * SLOTS)) == {
            number: payload(number) for number in range(SLOTS, 2 * SLOTS)
        }


def test_a_block_that_moved_after_the_lookup_is_found_where_it_is_now(world: World, churner: Peer) -> None:
    with reading(world, churner) as (link, reader):
        put(link, *range(SLOTS))
        reader.lookup([key_of(number) for number in range(SLOTS)], soon())
        put(link, *range(SLOTS, 2 * SLOTS))
        put(link, *range(SLOTS - 1, -1, -1))  # back again, in other slots

        assert got(reader, *range(SLOTS)) == {number: payload(number) for number in range(SLOTS)}


def test_what_an_index_says_of_another_life_leads_nowhere(world: World, churner: Peer) -> None:
    """The pool was restarted in the same place; its slots hold other blocks.  Whoever remembers the old index
    (and forgets whose it was) finds no old bytes, and no new ones under an old name."""
    with ExitStack() as stack:
        link, old = stack.enter_context(reading(world, churner))
        put(link, *range(SLOTS))
        assert old.lookup([key_of(number) for number in range(SLOTS)], soon()) == [True] * SLOTS
        remembered = dict(old._hints)
        churner.kill()
        successor = stack.enter_context(world.peer(42, instead_of=churner, module="churner"))
        fresh_link, fresh = stack.enter_context(reading(world, successor))
        put(fresh_link, *range(SLOTS, 2 * SLOTS))
        fresh._hints.update(remembered)

        assert got(fresh, *range(SLOTS)) == {}
        assert fresh.counters.misses == SLOTS
        assert len(got(fresh, *range(SLOTS, 2 * SLOTS))) == SLOTS

        late = got(old, *range(SLOTS))
        if world.traits.death_shows:
            assert late == {}
            assert old.counters.unavailable == SLOTS
            assert old.failure is not None
        assert all(late[number] == payload(number) for number in late)
        assert old.counters.hits + old.counters.misses == SLOTS


def test_a_damaged_block_is_never_served_and_the_owner_learns_of_it(world: World, churner: Peer) -> None:
    with reading(world, churner) as (link, reader):
        put(link, 0, 1)
        [slot] = [
            at
            for at in range(link.slots, link.channel.header.layout.slots_end, COPY_BYTES)
            if link.control.peek(at + HEADER_BYTES, 64) == payload(1)[:64]
        ]
        link.control.ask("poke", slot + COPY_BYTES - 1, b"\xee")

        assert got(reader, 0, 1) == {0: payload(0)}
        assert reader.counters.corrupt == 1
        until(lambda: reported(link))
        link.control.ask("tick")
        assert link.control.ask("quarantined") == 1
        assert reader.lookup([key_of(0), key_of(1)], soon()) == [True, False]


def reported(link: Link) -> bool:
    """Whether a reader's report, for which it does not wait, has arrived."""
    return any(link.control.peek(SUSPECT_FIRST_WORD * WORD_BYTES, SUSPECT_COUNT * WORD_BYTES))


def test_keys_that_were_never_there_cost_nothing_but_misses(world: World, churner: Peer) -> None:
    with reading(world, churner) as (_, reader):
        assert reader.lookup([key_of(number) for number in range(1000)], soon()) == [False] * 1000
        assert got(reader, *range(KEYS)) == {}
