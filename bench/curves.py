"""``python -m bench.curves``: latency and bandwidth by size, of our transports and of what else could bring
the bytes.

* **Latency**: one read at a time, until the bytes are there.
* **Bandwidth**: a run of reads at once, as many as :func:`in_flight` says, each into memory of its own.

Measured like the cases: in interleaved rounds, over a working set of distinct pieces.  What other machines
have recorded (``--json``) is put beside it (``--merge``), each in a section of its own; nothing here compares
across sections.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.document import DOCUMENT, RECORDS, begin, written_into
from bench.gpu_sections import from_gpu_json
from bench.host import Host, wait_for_quiet
from bench.scale import FULL, KIB, MIB, SMOKE, Scale, size_name
from bench.sections import Point, Section, from_json, tables, to_json
from bench.sources import SOURCES, Source, Way
from bench.timing import Call, Rounds, Spread, clock_cost_s, interleave, repeated

CURVES_FILE = "curves.json"
SIZES = tuple(64 << 2 * step for step in range(10))
"""64 B to 16 MiB, each four times the last."""
SMOKE_SIZES = (64, 4 * KIB)
IN_FLIGHT_MAX, RUN_BYTES_MAX = 16, 32 * MIB
SLOW_CLOCK_S, IN_A_ROW = 1e-6, 16
ROUNDS, TURN_S = 11, 0.025
"""Many curves and sizes, so fewer and shorter turns than a case has."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    sections = [] if options.no_run else [_section(options)]
    for recorded in options.merge:
        text = Path(recorded).read_bytes()
        sections += from_json(text) if text.startswith(b"[") else [from_gpu_json(text)]
    if len({section.machine for section in sections}) != len(sections):
        raise SystemExit("two sections are of one machine; name this one's by --machine")
    print(tables(sections))
    if options.json:
        Path(options.json).write_bytes(to_json(sections))
    if options.write_docs:
        (RECORDS / CURVES_FILE).write_bytes(to_json(sections))
        marker = begin("bench.curves")
        DOCUMENT.write_text(written_into(DOCUMENT.read_text(), tables(sections), marker))
    return 0


def _section(options: argparse.Namespace) -> Section:
    wait_for_quiet(options.patience)
    scale = SMOKE if options.smoke else replace(FULL, rounds=ROUNDS, turn_s=TURN_S)
    sizes = SMOKE_SIZES if options.smoke else [size for size in SIZES if size <= options.largest]
    section = Section(options.machine, Host.measured(scale).described())
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(SOURCES[name](scale.working_set, sizes))
            for name in options.sources or SOURCES
        }
        section.skipped = {name: source for name, source in opened.items() if isinstance(source, str)}
        sources = [source for source in opened.values() if not isinstance(source, str)]
        measure(sources, section, scale, sizes)
    return section


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument(
        "sources", nargs="*", choices=[[], *SOURCES], metavar="source", help=", ".join(SOURCES)
    )
    parser.add_argument("--machine", default="this machine", help="the name of the section")
    parser.add_argument("--smoke", action="store_true", help="two small sizes: does it run at all?")
    parser.add_argument(
        "--largest", type=int, default=SIZES[-1], metavar="BYTES", help="leave out larger sizes"
    )
    parser.add_argument("--json", metavar="FILE", help="write the sections there")
    parser.add_argument("--merge", nargs="*", default=[], metavar="FILE", help="recorded elsewhere")
    parser.add_argument("--no-run", action="store_true", help="measure nothing, only merge")
    parser.add_argument("--write-docs", action="store_true", help=f"record them beside {DOCUMENT.name}")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S", help="wait so long for quiet")
    return parser.parse_args(arguments)


def measure(sources: Sequence[Source], section: Section, scale: Scale, sizes: Sequence[int]) -> None:
    """Time every source at every size, all of one size in the same rounds."""
    for size_bytes in sizes:
        print(f"{size_name(size_bytes)} ...", file=sys.stderr, flush=True)
        items = in_flight(size_bytes)
        ways = [_in_a_row(way) for source in sources for way in source.ways(size_bytes, items)]
        operations = [operation for way in ways for operation in (way.one, way.run) if operation is not None]
        rounds = interleave(
            operations, rounds=scale.rounds, turn_s=scale.turn_s, warm_calls=scale.working_set
        )
        section.points += [_point(way, size_bytes, rounds) for way in ways]


def _in_a_row(way: Way) -> Way:
    """Several reads, one after the other, are timed as one where the clock is slow."""
    if clock_cost_s() < SLOW_CLOCK_S or not isinstance(way.one, Call):
        return way
    return replace(way, one=repeated(way.one, IN_A_ROW))


def in_flight(size_bytes: int) -> int:
    """Reads of a run."""
    return max(1, min(IN_FLIGHT_MAX, RUN_BYTES_MAX // size_bytes))


def _point(way: Way, size_bytes: int, rounds: Rounds) -> Point:
    gb_s = None
    if way.run is not None:
        taken = rounds.spread(way.run.name)
        gb_s = Spread(*(size_bytes / seconds / 1e9 for seconds in (taken.p90, taken.median, taken.p10)))
    return Point(way.name, size_bytes, rounds.spread(way.one.name).scaled(1e6), gb_s)


if __name__ == "__main__":
    sys.exit(main())
