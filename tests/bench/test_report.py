"""Claims decide by the median, reports survive JSON, tables show everything, documents keep their prose."""

from __future__ import annotations

import pytest

from bench.document import BEGIN, DOCUMENT, END, begin, rendered, written_into
from bench.host import Host
from bench.report import Claim, Report, claims_table, detail_table, from_json, to_json
from bench.scale import size_name
from bench.timing import Rounds, Spread

ROUNDS = Rounds({"memcpy": [[1e-6], [2e-6]], "ours": [[3e-6], [6e-6]]}, (0.5, 0.7))
HOST = Host("cpu", 2, 24.0, "6.1", "3.11", 0.5, {"2 MiB": Spread(1, 2, 3)})


def report() -> Report:
    made = Report("case", "A case")
    made.add(ROUNDS, "2 MiB", {"ours": "memcpy"})
    made.claim("ours", "<=", 2.0, "x", ROUNDS.ratio("ours", "memcpy"))
    made.skip("theirs", "not installed")
    made.notes.append("A note.")
    return made


@pytest.mark.parametrize(
    ("sign", "target", "met"), [("<=", 5.0, True), ("<=", 4.9, False), (">=", 5.0, True), (">=", 5.1, False)]
)
def test_the_median_decides(sign: str, target: float, met: bool):
    assert Claim("c", sign, target, "us", Spread(1.0, 5.0, 9.0)).met == met  # type: ignore[arg-type]


def test_reports_survive_json():
    assert from_json(to_json([report(), Report.failed("other", "broke")])) == [
        report(),
        Report.failed("other", "broke"),
    ]


def test_rows_carry_microseconds_and_ratios():
    copy, ours = report().rows
    assert (copy.what, copy.baseline, copy.ratio) == ("memcpy", "", None)
    assert ours.us.median == pytest.approx(4.5)
    assert ours.ratio is not None and ours.ratio.median == pytest.approx(3.0)


def test_tables_show_targets_measured_and_missing():
    table = claims_table([report(), Report.failed("other", "it broke")])
    assert "| ours ≤ 2 x | 3 (3 – 3) x | **not met** |" in table
    assert "| theirs | | not run: not installed |" in table
    assert "| everything of other | | not run: it broke |" in table
    detail = detail_table(report())
    assert "| ours | 2 MiB | 4.5 (3 – 6) | 3 (3 – 3) × memcpy |" in detail
    assert "Load average while it ran: 0.5 to 0.7." in detail and "A note." in detail


def test_a_report_of_another_machine_says_so_everywhere():
    table = claims_table([report().of("guest")])
    assert "| guest: ours ≤ 2 x |" in table and "| guest: theirs | | not run" in table
    assert report().of("guest").title == "A case (guest)"


def test_a_document_keeps_what_stands_around_the_markers():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = written_into(text, rendered(HOST, [report()]))
    assert once.startswith("before\n") and once.endswith("\nafter\n")
    assert "old" not in once and "A note." in once
    assert written_into(once, rendered(HOST, [report()])) == once


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}{BEGIN}"])
def test_a_document_without_its_markers_is_refused(text: str):
    with pytest.raises(ValueError, match="needs the lines"):
        written_into(text, "new")


@pytest.mark.parametrize("module", ["bench", "bench --section transports", "bench.curves", "bench.crossover"])
def test_our_document_has_its_markers(module: str):
    assert written_into(DOCUMENT.read_text(), "new", begin(module))


def test_each_marker_has_a_part_of_its_own():
    text = f"{begin('one')}\nold\n{END}\nbetween\n{begin('two')}\nolder\n{END}\nafter"
    new = written_into(text, "new", begin("two"))
    assert "old\n" in new and "older" not in new and "between" in new and new.endswith("after")


def test_sizes_have_names():
    assert [size_name(size) for size in (128, 4096, 65536, 2 << 20, 16 << 20)] == [
        "128 B",
        "4 KiB",
        "64 KiB",
        "2 MiB",
        "16 MiB",
    ]
