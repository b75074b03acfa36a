"""What the pages say of the grid is what its records say, misses included."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import make_results
from kit.measured_records import grid_record as record
from kit.measured_records import in_folder
from result_pages import plot
from result_pages.comparison import PUBLISHED, comparison_table, finished_sentence, time_ratio
from result_pages.grid import full_page, section
from result_pages.records import SolveRecord, of_goal, percentile

if TYPE_CHECKING:
    from pathlib import Path


TIMED_OUT = record(
    ram="20%", status="feasible", seconds=60.2, gap=0.05, gaps=[[1.0, 0.5], [30.0, 0.05]]
)
UNKNOWN = record(ram="15%", status="unknown", seconds=60.1, gap=None, gaps=[], overhead_j=None)
BELOW = record(ram="10%", status="infeasible", seconds=0.1, gap=None, gaps=[], ram_budget_bytes=40)
LATE = record(deadline="105%", status="infeasible", seconds=1.0, gap=None, gaps=[], overhead_j=None)


def line(text: str, start: str) -> str:
    """Return the one line of a text that begins so."""
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1
    return found[0]


def test_summary_counts_infeasible_instances_apart_and_misses_as_misses() -> None:
    """One without a schedule is neither infeasible nor left out; both proofs are told apart."""
    text = section((record(), TIMED_OUT, UNKNOWN, BELOW, LATE), "run.jsonl", registered={})
    row = line(text, "| Published graphs |")
    assert "| 5 | 1 | 1 | 3 | 1 of 3 (33.3 %) | 1 of 3 (33.3 %) | 60.1 s | 60.2 s |" in row


def test_misses_are_named_with_their_gap_the_worst_first() -> None:
    """Instances that were not proved to 1 % are in a table of their own."""
    text = section((record(), TIMED_OUT, UNKNOWN), "run.jsonl", registered={})
    assert "2 of 3 were not proved to 1 %:" in text
    rows = [row for row in text.splitlines() if row.startswith("| `paper/bert`, ")]
    assert "15%" in rows[0]
    assert "unknown" in rows[0]
    assert "| 60.2 s | 5 % |" in rows[1]
    whole = section((record(),), "run.jsonl", registered={})
    assert "Every feasible instance was proved to 1 %." in whole


def test_what_two_threads_reach_stands_beside_a_miss() -> None:
    """Where an instance was solved again; the summary counts one thread alone."""
    again = (
        TIMED_OUT | {"seconds": 41.0, "gap": 5e-5, "threads": 2},
        UNKNOWN | {"seconds": 30.0, "status": "infeasible", "threads": 2},
    )
    text = section((record(), TIMED_OUT, UNKNOWN), "run.jsonl", registered={}, again=again)
    rows = [row for row in text.splitlines() if row.startswith("| `paper/bert`, ")]
    assert rows[0].endswith("| infeasible |")
    assert rows[1].endswith("| 41 s |")
    assert (
        "2 were solved again with two threads (2026-01-02, A processor), one at a time; 1 then "
        "ended within 1 %, and 1 were proved infeasible." in text
    )
    assert "| 1 of 3 (33.3 %) |" in line(text, "| Published graphs |")


def captured(ram: str, seconds: float, gap: float, **changes: Any) -> dict[str, Any]:
    """Return the record of a captured model, solved with two threads."""
    fields = {"goal": 6, "model": "traced/models/gpt2", "device": "profile", "threads": 2}
    return record(ram=ram, seconds=seconds, gap=gap, **(fields | changes))


def test_captured_models_are_summed_up_by_budget_and_by_graph() -> None:
    """Both gaps, the first schedule, the memory of both processes, and answers that are late."""
    found = (
        captured("60%", 2.0, 0.0),
        captured("floor+2%", 61.5, 0.04, first_schedule_s=3.0, worker_memory_bytes=2**20),
        captured("floor+2%", 61.5, 0.2, model="traced/models/t5", stated_s=0.6),
    )
    text = section(found, "run.jsonl", registered={})
    assert "| 60% | 1 | 1 of 1 (100.0 %) | 1 of 1 (100.0 %) | 2 s | 0.5 s | 0.5 s |" in text
    assert (
        "| floor+2% | 2 | 0 of 2 (0.0 %) | 1 of 2 (50.0 %) | 61.5 s | 1.75 s | 3 s | 2.00 MiB "
        "| 1 |" in text
    )
    assert "| all | 3 |" in text
    assert "| `traced/models/gpt2` | 195 | 2 s | **61.5 s**, gap 4 % |" in text
    assert "2 instances at a time with 2 threads each" in text
    assert "| 60% | - | optimal | 2 s |" in full_page(found, "run.jsonl")


def test_captured_model_without_a_schedule_is_told() -> None:
    """It has neither a first schedule nor a gap, and the latest is never."""
    none = captured("25%", 60.0, 0.0) | {"status": "unknown", "gap": None, "gaps": []}
    text = section((none | {"first_schedule_s": None},), "run.jsonl", registered={})
    assert "| 25% | 1 | 0 of 1 (0.0 %) | 0 of 1 (0.0 %) | 60 s | - | never |" in text


def test_captured_models_have_their_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of what the grid's file has of them; the page names both files."""
    monkeypatch.setattr(make_results, "RESULTS", tmp_path)
    kept = {
        "2026-01-02-grid.jsonl": (record(), captured("60%", 9.0, 0.5)),
        "2026-01-03-captures.jsonl": (captured("40%", 1.0, 0.0),),
    }
    for name, lines in kept.items():
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    source, records = make_results.read_grid()
    assert source == (
        "`bench/results/2026-01-02-grid.jsonl` and `bench/results/2026-01-03-captures.jsonl`"
    )
    assert [each["cell"]["ram"] for each in records] == ["40%", "40%"]


def test_circumstances_are_told() -> None:
    """Machine, versions, date, and how many instances ran at a time."""
    text = section((record(),), "run.jsonl", registered={})
    assert "2026-01-02, A processor, 2 cores, 2 instances at a time with one thread each" in text


def test_of_several_machines_each_is_told_with_what_it_measured() -> None:
    """Parts by their headings."""
    other = record(recorded="2026-02-03T00:00:00+00:00")
    other["machine"] = other["machine"] | {"cpu": "Another one"}
    other["cell"] = other["cell"] | {"goal": 5}
    text = section((record(), other), "run.jsonl", registered={})
    assert "*Published graphs*: 2026-01-02, A processor, 2 cores" in text
    assert "*Against others*: 2026-02-03, Another one, 2 cores" in text


def test_of_several_versions_each_is_told_with_what_it_measured() -> None:
    """A part whose instances had two of them is named with both."""
    older = record(recorded="2026-01-01T00:00:00+00:00", ram="30%")
    older["machine"] = older["machine"] | {"versions": {"highspy": "0.9"}}
    newer = record(ram="40%")
    newer["machine"] = newer["machine"] | {"versions": {"highspy": "1.0"}}
    text = section((older, newer), "run.jsonl", registered={})
    told = [line for line in text.split(". ") if "*Published graphs*" in line]
    assert len(told) == 2
    assert "2026-01-01" in text.partition("highspy 0.9")[0]
    assert "2026-01-02" in text.partition("highspy 0.9")[2].partition("highspy 1.0")[0]


def test_share_of_small_models_takes_columns_and_rows() -> None:
    """One column or row too many does not fit; infeasible instances do not count."""
    sizes = ({"columns": 2000, "rows": 2000}, {"columns": 2001, "rows": 1}, {"rows": 2001}, {})
    records = [record(ram=f"{i}0%", statistics=size) for i, size in enumerate(sizes, 1)]
    text = section((*records, BELOW), "run.jsonl", registered={})
    assert "2 of 4 (50.0 %) of the feasible instances" in text


def test_largest_model_counts_where_it_is_recorded() -> None:
    """The maximum over all rounds takes the place of the last model's size."""
    run = SolveRecord(record(statistics={"columns": 5, "max_columns": 9, "rows": 7}))
    assert (run.size("columns"), run.size("rows")) == (9, 7)


def test_full_page_has_every_instance_but_those_below_the_floor() -> None:
    """Seconds, gap, columns and rounds of each; time-outs are bold."""
    text = full_page((record(), TIMED_OUT, UNKNOWN, BELOW, LATE), "run.jsonl")
    assert len([row for row in text.splitlines() if row.startswith("| paper-m4 |")]) == 4
    assert "| 20% | - | feasible | **60.2 s** | 5 % |" in text
    assert "| 40% | 105% | infeasible | 1 s | - |" in text
    assert "| 300 | 400 | 2 | 0.5 s | 1.00 MiB |" in text


def test_ratio_is_a_lower_bound_at_the_limit() -> None:
    """A ratio to a time-out says so, and there is none to a default that proved too little."""
    default = SolveRecord(record())
    stopped = SolveRecord(record(seconds=300.0, gap=0.4, status="feasible"))
    assert time_ratio(SolveRecord(record(seconds=1000.0)), default) == "500x"
    assert time_ratio(stopped, default) == "> 150x"
    assert time_ratio(SolveRecord(UNKNOWN), default) == "-"
    assert time_ratio(default, SolveRecord(TIMED_OUT)) == "-"


def test_what_was_wanted_of_the_comparison_is_counted() -> None:
    """Where `paper` finishes the default is quick enough or not; time-outs are no such instance."""
    quick = record(goal=5, ram="50%", seconds=0.01)
    rest = (
        record(goal=5, ram="50%", method="paper", seconds=8.0),
        record(goal=5, ram="70%", seconds=0.02),
        record(goal=5, ram="70%", method="paper", seconds=1.0),
        record(goal=5, ram="90%", seconds=0.01),
        TIMED_OUT | {"cell": record(goal=5, ram="90%", method="paper")["cell"]},
    )
    text = finished_sentence((quick, *rest))
    assert "That holds for 1 of 2." in text
    assert "`paper` itself takes 1 s to 1 s, of which a 500th is 2.0 to 2 ms" in text
    assert finished_sentence((quick, rest[0])).endswith("That holds for 1 of 1.")


def test_comparison_keeps_time_outs_rejections_and_refusals() -> None:
    """What a method could not do is said in its place."""
    methods: dict[str, dict[str, Any]] = {
        "default": {},
        "compact": {"seconds": 60.0, "gap": 0.3, "gaps": [], "status": "feasible"},
        "paper": {"seconds": 300.0, "gap": 0.4, "gaps": [[300.0, 0.4]], "violations": 2},
        "paper, Gurobi": {"status": "failed", "gap": None, "reason": "licence: 2,000 columns"},
    }
    records = [record(goal=5, method=method, **changes) for method, changes in methods.items()]
    row = line(comparison_table(records), "| `paper/bert`")
    assert "| 2 s | **60 s**, gap 30 % | **300 s**, gap 40 %, rejected | too large" in row
    assert row.endswith("| too large for its licence | > 30x | > 150x | - |")


def test_instances_go_in_a_natural_order() -> None:
    """Sizes and budgets are sorted as numbers, the floor first, no deadline before the tightest."""
    models = [record(goal=4, model=f"paper/bert-{blocks}") for blocks in (96, 24)]
    assert [run.cell["model"][-2:] for run in of_goal(models, 4)] == ["24", "96"]
    budgets = [record(ram=ram) for ram in ("90%", "15%", "floor+2%")]
    assert [run.cell["ram"] for run in of_goal(budgets, 1)] == ["floor+2%", "15%", "90%"]
    deadlines = [record(deadline=deadline) for deadline in ("105%", None, "130%")]
    assert [run.cell["deadline"] for run in of_goal(deadlines, 1)] == [None, "130%", "105%"]


def test_percentile_is_a_value_that_occurs() -> None:
    """95 % of 20 values are at most the nineteenth."""
    assert percentile(range(1, 21), 0.95) == 19
    assert percentile([7.0], 0.95) == 7.0


def test_crashed_instance_is_a_miss() -> None:
    """A record of a process that died has little in it, and counts."""
    crashed = {name: record()[name] for name in ("cell", "machine", "recorded", "load_average")}
    crashed |= {"status": "failed", "seconds": 5.0, "reason": "the process ended with -9"}
    text = section((record(), crashed), "run.jsonl", registered={})
    assert "1 of 2 (50.0 %)" in text
    assert "failed" in full_page((record(), crashed), "run.jsonl")


def test_plot_tells_what_it_shows(tmp_path: Path) -> None:
    """A plot is current for its records and stale for others; equal records, equal files."""
    pytest.importorskip("matplotlib")
    records = (record(), record(goal=4, model="paper/bert-24", graph_nodes=387), TIMED_OUT)
    paths = (tmp_path / "one.svg", tmp_path / "two.svg")
    for path in paths:
        plot.scale(records).write(path)
    assert plot.scale(records).current(paths[0])
    assert not plot.scale(records[:2]).current(paths[0])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_plot_marks_what_was_not_proved() -> None:
    """A point is at the time to 1 %, or at the end where that was not reached."""
    found = plot.points((record(), TIMED_OUT, UNKNOWN))
    assert found["paper-m4", "40%"] == [(195, 1.0, True, 2**20)]
    assert found["paper-m4", "20%"] == [(195, 60.2, False, 2**20)]


def test_grid_has_its_own_file_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest grid is used beside the newest other run; checking needs no plotting library."""
    pytest.importorskip("matplotlib")
    other = record() | {"kind": "startup", "name": "python", "rounds": 1}
    (tmp_path / "2026-01-02.jsonl").write_text(json.dumps(other) + "\n")
    old, new = json.dumps(record(seconds=9.0)), json.dumps(record())
    (tmp_path / "2026-01-02-grid.jsonl").write_text(f"{old}\n{new}\n{new[:30]}")
    in_folder(tmp_path, monkeypatch)
    assert make_results.main([]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    capsys.readouterr()
    assert make_results.main(["--check"]) == 0
    assert capsys.readouterr().out == ""
    assert "## The grid" in (tmp_path / "results.md").read_text()
    assert "| 40% | - | optimal | 2 s |" in (tmp_path / "results-grid.md").read_text()
    (tmp_path / "2026-01-02-grid.jsonl").write_text(json.dumps(record(seconds=3.0, gaps=[])))
    assert make_results.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().out


def test_published_figures_name_their_source() -> None:
    """What others report stands beside the comparison, each with where it was found."""
    text = section((record(goal=5),), "run.jsonl", registered={})
    for source in ("arXiv:1910.02653", "ICML 2022, sections", "arXiv:2304.14463"):
        assert source in text
    assert PUBLISHED in text


def test_instances_that_are_missing_are_counted() -> None:
    """A run that was stopped says of which goals how many instances are not on record."""
    records = (record(), TIMED_OUT)
    assert "not complete" not in section(records, "r", registered={1: 2})
    text = section(records, "r", registered={1: 2, 2: 1500})
    assert "instances that are missing are 1,500 of goal 2." in text
    text = section(records, "r", registered={1: 7})
    assert "| Published graphs | 2 of 7 |" in text
    assert "instances that are missing are 5 of goal 1." in text
