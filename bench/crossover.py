"""``python -m bench.crossover``: from which size on a block goes better by reference than inline.

By reference: a reader gets a pinned view (shared memory) or reads the slot one-sided (over a wire), a writer
reserves an extent, writes into it and publishes.  Inline: the reader copies or is sent the bytes, the writer
sends them in its one message.  Which of the two is decided by ``network.zero_copy_threshold``, whose default
is what this measures.

Both are the shipped tier, once with a threshold below every block and once above; what it never does over a
wire, asking for a block, is done with the message that shards are asked with.  Every size is timed in the
same rounds.  A get is what a fetch does: a lookup, then the blocks.  What decides is the *life* of a block:
put once, in a run, as a publish of a prefix does it, and got once, in a run, the way the tier does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar, cast, get_args

import msgspec

from bench.document import DOCUMENT, RECORDS, begin, written_into
from bench.host import Host, wait_for_quiet
from bench.pool import Made, Pool, identity, pools
from bench.report import number
from bench.scale import FULL, MIB, SMOKE, Scale, size_name
from bench.service import DEADLINE_S, settle_processes
from bench.timing import Call, Rounds, Spread, interleave, round_robin
from kvcomm.block import BlockKey, verify_copy
from kvcomm.rpc import Peers, run_blocking
from kvcomm.steps import Answer, Ask, Steps, ask_all
from kvcomm.tier import Block, BlockCopy
from kvcomm.wire.messages import BlockCopies, BlockGet, BlockLookup, BlockPresence, Message
from l2_rdma.attachment import AttachOptions
from l2_rdma.rack import Pool as Address
from l2_rdma.tier import L2Tier
from l2_rdma.wires import Wires

CROSSOVER_FILE, PICTURE_FILE = "crossover.json", "crossover.svg"
T = TypeVar("T")
Verb = Literal["get", "get of a run", "put", "put of a run", "life"]
LIFE: tuple[Verb, Verb] = ("put of a run", "get of a run")
SIZES = tuple(64 << step for step in range(15))
"""64 B to 1 MiB."""
SMOKE_SIZES = (64, 4096)
TRANSPORTS = ("shm", "tcp")
RUN_BLOCKS = 16
"""Of a run, as a publish of a prefix puts it: in one operation.  Its time is for one block."""
ROUNDS, TURN_S = 15, 0.02
REGION_BYTES = 256 * MIB
"""Of the pool that is put into: small enough to be all written to before anything is timed."""
INLINE_BYTES = 1 << 62
"""A threshold above every block."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both ways at one size."""

    size_bytes: int
    reference_us: Spread
    inline_us: Spread
    ratio: Spread
    """Reference over inline, round by round."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One verb over one transport, smallest size first."""

    transport: str
    verb: Verb
    pairs: list[Pair]

    def crossover_bytes(self) -> int | None:
        """The smallest size from which on the reference is never the slower one, by the medians; ``None`` if
        even the largest goes better inline."""
        found = None
        for pair in reversed(self.pairs):
            if pair.ratio.median > 1:
                break
            found = pair.size_bytes
        return found


@dataclass(slots=True)
class Crossover:
    """What one machine measured."""

    machine: str
    described: str
    curves: list[Curve] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def recommended_bytes(self) -> int | None:
        """Where the life of a block of this host's pool crosses, for there the setting decides both of its
        parts; ``None`` if that was not measured, or even the largest goes better inline."""
        lives = [curve for curve in self.curves if (curve.transport, curve.verb) == ("shm", "life")]
        return lives[0].crossover_bytes() if lives else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    wait_for_quiet(options.patience)
    scale = SMOKE if options.smoke else replace(FULL, rounds=ROUNDS, turn_s=TURN_S)
    found = Crossover(options.machine, Host.measured(scale).described())
    for transport in options.transports or TRANSPORTS:
        found.curves += measure(transport, scale, SMOKE_SIZES if options.smoke else SIZES)
    print(rendered(found))
    if options.json:
        Path(options.json).write_bytes(to_json(found))
    if options.write_docs:
        (RECORDS / CROSSOVER_FILE).write_bytes(to_json(found))
        marker = begin("bench.crossover")
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), rendered(found), marker))
    return 0


def measure(transport: str, scale: Scale, sizes: Sequence[int]) -> list[Curve]:
    """Every verb, by reference and inline, of every size."""
    curves = [Curve(transport, verb, []) for verb in get_args(Verb)]
    with ExitStack() as stack:
        read, written = stack.enter_context(pools(2, region_bytes=REGION_BYTES, transports=[transport]))
        readers = [stack.enter_context(_agent(read, transport, limit)) for limit in (0, INLINE_BYTES)]
        if transport != "shm":
            readers[1].asks = read.remote_address
        writers = [stack.enter_context(_agent(written, transport, limit)) for limit in (0, INLINE_BYTES)]
        _write_to_all_of(writers[0])
        settle_processes([os.getpid(), read.pid, written.pid])
        for size_bytes in sorted(sizes, reverse=True):  # small blocks then go where large ones have been
            print(f"{transport}, {size_name(size_bytes)} ...", file=sys.stderr, flush=True)
            keys = read.fill(max(scale.working_set, RUN_BLOCKS), size_bytes)
            calls: list[Call] = []
            for at, (reader, writer) in enumerate(zip(readers, writers, strict=True)):
                for count_of_blocks, of_a_run in ((1, ""), (RUN_BLOCKS, " of a run")):
                    get, put = (_names(cast("Verb", f"{verb}{of_a_run}"))[at] for verb in ("get", "put"))
                    calls.append(reader.get(get, _runs(keys, count_of_blocks)))
                    calls.append(writer.put(put, _Fresh(count_of_blocks, size_bytes)))
            rounds = interleave(calls, rounds=scale.rounds, turn_s=scale.turn_s)
            rounds = with_lives(rounds, gets_inline=transport == "shm")
            for curve in curves:
                curve.pairs.insert(0, _pair(rounds, curve.verb, size_bytes))
    return curves


def with_lives(rounds: Rounds, *, gets_inline: bool) -> Rounds:
    """The same rounds, with what the life of a block took in each (by the round's medians).

    Args:
        gets_inline: whether the tier has an inline get; it reads one-sided over every wire.
    """
    put, get = (_names(verb) for verb in LIFE)
    parts = [(put[0], get[0]), (put[1], get[1] if gets_inline else get[0])]
    seconds = dict(rounds.seconds)
    for life, both in zip(_names("life"), parts, strict=True):
        seconds[life] = [
            [sum(median(taken) for taken in one_round)]
            for one_round in zip(*(rounds.seconds[part] for part in both), strict=True)
        ]
    return Rounds(seconds, rounds.load)


def _pair(rounds: Rounds, verb: Verb, size_bytes: int) -> Pair:
    reference, inline = _names(verb)
    return Pair(
        size_bytes,
        rounds.spread(reference).scaled(1e6),
        rounds.spread(inline).scaled(1e6),
        rounds.ratio(reference, inline),
    )


def to_json(found: Crossover) -> bytes:
    """As JSON; ``from_json`` is the inverse."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1)


def from_json(text: bytes) -> Crossover:
    """Raises ``msgspec.ValidationError`` if the text does not hold a crossover."""
    return msgspec.json.decode(text, type=Crossover)


def rendered(found: Crossover) -> str:
    """As Markdown."""
    picture = f"![By reference over inline, by size](plots/{PICTURE_FILE})"
    parts = [f"### By reference or inline: {found.machine}", found.described, picture]
    for transport in dict.fromkeys(curve.transport for curve in found.curves):
        curves = [curve for curve in found.curves if curve.transport == transport]
        parts += [_table(transport, curves), "\n".join(_crossing(curve) for curve in curves)]
    best = found.recommended_bytes()
    if best is not None:
        parts.append(f"Recommended `network.zero_copy_threshold`: {size_name(best)}.")
    parts += [f"Not run: {what} ({reason})." for what, reason in found.skipped.items()]
    return "\n\n".join(parts)


def _table(transport: str, curves: Sequence[Curve]) -> str:
    """A row a size: microseconds by reference and inline, and the ratio."""
    lines = [
        f"| over {transport}, µs | " + " | ".join(curve.verb for curve in curves) + " |",
        "| ---: |" + " ---: |" * len(curves),
    ]
    for row in zip(*(curve.pairs for curve in curves), strict=True):
        cells = [
            f"{number(pair.reference_us.median)} / {number(pair.inline_us.median)} "
            f"({number(pair.ratio.median)})"
            for pair in row
        ]
        lines.append(f"| {size_name(row[0].size_bytes)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _crossing(curve: Curve) -> str:
    at = curve.crossover_bytes()
    crossing = "inline is faster at every size" if at is None else f"by reference from {size_name(at)} on"
    return f"* {curve.verb} over {curve.transport}: {crossing}"


class _Agent:
    """One that gets and puts through a tier of its own."""

    def __init__(self, tier: L2Tier, peers: Peers) -> None:
        self._tier = tier
        self._peers = peers
        self.asks: str | None = None
        """Whom it asks for blocks, by a message, instead of the tier."""

    def get(self, name: str, runs: Sequence[Sequence[BlockKey]]) -> Call:
        return Call(name, round_robin(self._ask if self.asks else self._get, runs), items=len(runs[0]))

    def put(self, name: str, fresh: _Fresh) -> Call:
        """Of blocks that nobody has seen; making them is not in the time."""
        upcoming = fresh.next()

        def renew() -> None:
            upcoming[:] = fresh.next()

        return Call(name, lambda: self.store(upcoming), items=len(upcoming), after=renew)

    def store(self, copies: Sequence[BlockCopy]) -> None:
        statuses = self._run(self._tier.put(copies))
        if set(statuses) != {"stored"}:
            raise RuntimeError(f"a put was not taken: {statuses}")

    def _ask(self, keys: Sequence[BlockKey]) -> None:
        [held] = self._answers(BlockLookup(0, list(keys)))
        assert isinstance(held.message, BlockPresence)
        [answer] = self._answers(BlockGet(0, list(keys)))
        assert isinstance(answer.message, BlockCopies)
        [copies] = answer.payload
        for key, copy_bytes in zip(keys, answer.message.copy_bytes, strict=True):
            verify_copy(copies[:copy_bytes], key)
            copies = copies[copy_bytes:]

    def _answers(self, message: Message) -> list[Answer]:
        assert self.asks is not None
        return self._run(ask_all([Ask(self.asks, message)]))

    def _get(self, keys: Sequence[BlockKey]) -> None:
        found: list[Block] = []
        self._run(self._tier.lookup(keys))
        self._run(self._tier.get(keys, lambda _, block: found.append(block)))
        if len(found) < len(keys):
            raise RuntimeError("the pool lost a block that was to be fetched")

    def _run(self, steps: Steps[T]) -> T:
        return run_blocking(steps, self._peers, time.monotonic() + DEADLINE_S)


def _runs(keys: Sequence[BlockKey], items: int) -> list[list[BlockKey]]:
    """Runs of ``items`` keys, one beginning at each."""
    return [[keys[(first + at) % len(keys)] for at in range(items)] for first in range(len(keys))]


class _Fresh:
    """Runs of new blocks, always of the same payloads."""

    _numbers = count(1 << 20)

    def __init__(self, blocks: int, size_bytes: int) -> None:
        self._made = Made(blocks, size_bytes)

    def next(self) -> list[BlockCopy]:
        return self._made.copies(self._numbers)


@contextmanager
def _agent(pool: Pool, transport: str, threshold_bytes: int) -> Iterator[_Agent]:
    address = pool.address if transport == "shm" else pool.remote_address
    mine, pools = identity(), [Address(pool.node, address)]
    options = AttachOptions(zero_copy_threshold_bytes=threshold_bytes)
    tier = L2Tier(lambda: pools, mine, wires=Wires((transport,)), options=options)
    peers = Peers(mine)
    try:
        yield _Agent(tier, peers)
    finally:
        tier.close()
        peers.close()


def _write_to_all_of(writer: _Agent) -> None:
    """After this a put evicts, and lands in memory that has been used."""
    fresh = _Fresh(1, MIB)
    for _ in range(REGION_BYTES // MIB):
        writer.store(fresh.next())


def _names(verb: Verb) -> tuple[str, str]:
    return f"{verb} by reference", f"{verb} inline"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.crossover", description=__doc__)
    parser.add_argument("transports", nargs="*", choices=[[], *TRANSPORTS], metavar="transport")
    parser.add_argument("--machine", default="this machine", help="where this is measured")
    parser.add_argument("--smoke", action="store_true", help="two sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="write what was measured there")
    parser.add_argument("--write-docs", action="store_true", help=f"record it beside {DOCUMENT.name}")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S", help="wait so long for quiet")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
