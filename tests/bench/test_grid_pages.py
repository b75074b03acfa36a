"""What the pages say of the grid is what its records say, misses included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import make_results
from kit.measured_records import grid_record as record
from kit.measured_records import write_records
from result_pages import charts
from result_pages.comparison import finished_sentence, time_ratio
from result_pages.grid import full_page, section
from result_pages.records import SolveRecord, of_goal, percentile

if TYPE_CHECKING:
    from pathlib import Path

    from kit.messages import Told


TIMED_OUT = record(
    ram="20%", status="feasible", seconds=60.2, gap=0.05, gaps=[[1.0, 0.5], [30.0, 0.05]]
)
UNKNOWN = record(ram="15%", status="unknown", seconds=60.1, gap=None, gaps=[], overhead_j=None)
BELOW = record(ram="10%", status="infeasible", seconds=0.1, gap=None, gaps=[], ram_budget_bytes=40)
LATE = record(deadline="105%", status="infeasible", seconds=1.0, gap=None, gaps=[], overhead_j=None)
CRASHED = {
    **{name: record()[name] for name in ("machine", "recorded", "load_average")},
    "cell": record(ram="25%")["cell"],
    **{"status": "failed", "seconds": 5.0, "reason": "the process ended with -9"},
}
"""A record of a process that died has little in it."""


def captured(ram: str, seconds: float, gap: float, **changes: Any) -> dict[str, Any]:
    """Return the record of a captured model, solved with two threads."""
    fields = {"goal": 6, "model": "traced/models/gpt2", "device": "profile", "threads": 2}
    return record(ram=ram, seconds=seconds, gap=gap, **(fields | changes))


def elsewhere(cpu: str = "A processor", highspy: str = "1.0", **changes: Any) -> dict[str, Any]:
    """Return the record of an instance on another machine, or with other versions."""
    found = record(**changes)
    return found | {"machine": found["machine"] | {"cpu": cpu, "versions": {"highspy": highspy}}}


KINDS = (record(), TIMED_OUT, UNKNOWN, BELOW, LATE)
"""Proved; ended with a gap; without a schedule; below the floor; later than any schedule."""
AGAIN = (
    TIMED_OUT | {"seconds": 41.0, "gap": 5e-5, "threads": 2},
    UNKNOWN | {"seconds": 30.0, "status": "infeasible", "threads": 2},
)
"""What was not proved, solved again with two threads."""
COMPARED = (
    record(goal=5, ram="50%", seconds=0.01),
    record(goal=5, ram="50%", method="paper", seconds=8.0),
    record(goal=5, ram="70%", seconds=0.02),
    record(goal=5, ram="70%", method="paper", seconds=1.0),
    record(goal=5, ram="90%", seconds=0.01),
    TIMED_OUT | {"cell": record(goal=5, ram="90%", method="paper")["cell"]},
)
"""Where `paper` finishes the default is quick enough, or not; then a time-out."""
REFUSED = (
    record(goal=5),
    record(goal=5, method="compact", seconds=60.0, gap=0.3, gaps=[], status="feasible"),
    record(goal=5, method="paper", seconds=300.0, gap=0.4, gaps=[[300.0, 0.4]], violations=2),
    record(
        goal=5, method="paper, Gurobi", status="failed", gap=None, reason="licence: 2,000 columns"
    ),
)
"""A time-out, a schedule that was rejected, and a licence that is too small."""
LOST = captured("25%", 60.0, 0.0) | {"status": "unknown", "gap": None, "gaps": []}
RECORDS: dict[str, tuple[dict[str, Any], ...]] = {
    "proved": (record(),),
    "every kind": KINDS,
    "crashed": (record(), CRASHED),
    "captured": (
        captured("60%", 2.0, 0.0),
        captured("floor+2%", 61.5, 0.04, first_schedule_s=3.0, worker_memory_bytes=2**20),
        captured("floor+2%", 61.5, 0.2, model="traced/models/t5", stated_s=0.6),
        LOST | {"first_schedule_s": None},
    ),
    "two machines": (
        record(),
        elsewhere("Another one", goal=5, recorded="2026-02-03T00:00:00+00:00"),
    ),
    "two versions": (
        elsewhere(highspy="0.9", ram="30%", recorded="2026-01-01T00:00:00+00:00"),
        elsewhere(ram="40%"),
    ),
    "two of four small": (
        record(ram="10%", statistics={"columns": 2000, "rows": 2000}),
        record(ram="20%", statistics={"columns": 2001, "rows": 1}),
        record(ram="30%", statistics={"rows": 2001}),
        record(ram="40%", statistics={}),
        BELOW,
    ),
    "compared": COMPARED,
    "refused": REFUSED,
}


@pytest.mark.parametrize("case", RECORDS)
def test_section_is_what_the_records_say(case: str, told: Told) -> None:
    """Misses by name, the worst first; what is infeasible apart; machines, versions and sources."""
    text = section(RECORDS[case], "run.jsonl", registered={})
    told(text)
    assert ("| Checkmate |" in text) == any(run["cell"]["goal"] == 5 for run in RECORDS[case])


def test_what_two_threads_reach_stands_beside_a_miss(told: Told) -> None:
    """Where an instance was solved again; the summary counts one thread alone."""
    told(section(KINDS[:3], "run.jsonl", registered={}, again=AGAIN))


@pytest.mark.parametrize("registered", [{1: 2}, {1: 2, 2: 1500}, {1: 7}], ids=str)
def test_instances_that_are_missing_are_counted(registered: dict[int, int], told: Told) -> None:
    """A run that was stopped says of which goals how many instances are not on record."""
    told(section(KINDS[:2], "run.jsonl", registered=registered))


@pytest.mark.parametrize("case", ["every kind", "crashed", "captured"])
def test_full_page_has_every_instance_but_those_below_the_floor(case: str, told: Told) -> None:
    """Seconds, gap, columns and rounds of each; time-outs are bold."""
    told(full_page(RECORDS[case], "run.jsonl"))


def test_captured_models_have_their_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of what the grid's file has of them; the page names both files."""
    monkeypatch.setattr(make_results, "RESULTS", tmp_path)
    kept = {
        "2026-01-02-grid": (record(), captured("60%", 9.0, 0.5)),
        "2026-01-03-captures": (captured("40%", 1.0, 0.0),),
    }
    for name, lines in kept.items():
        write_records(tmp_path, name, *lines)
    source, records = make_results.read_grid()
    assert source == (
        "`bench/results/2026-01-02-grid.jsonl` and `bench/results/2026-01-03-captures.jsonl`"
    )
    assert [each["cell"]["ram"] for each in records] == ["40%", "40%"]


def test_largest_model_counts_where_it_is_recorded() -> None:
    """The maximum over all rounds takes the place of the last model's size."""
    run = SolveRecord(record(statistics={"columns": 5, "max_columns": 9, "rows": 7}))
    assert (run.size("columns"), run.size("rows")) == (9, 7)


def test_ratio_is_a_lower_bound_at_the_limit() -> None:
    """A ratio to a time-out says so, and there is none to a default that proved too little."""
    default = SolveRecord(record())
    stopped = SolveRecord(record(seconds=300.0, gap=0.4, status="feasible"))
    assert time_ratio(SolveRecord(record(seconds=1000.0)), default) == "500x"
    assert time_ratio(stopped, default) == "> 150x"
    assert time_ratio(SolveRecord(UNKNOWN), default) == "-"
    assert time_ratio(default, SolveRecord(TIMED_OUT)) == "-"


def test_one_instance_is_no_range(told: Told) -> None:
    """What was wanted of the comparison, where `paper` finishes once."""
    told(finished_sentence(COMPARED[:2]))


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


def test_plot_tells_what_it_shows(tmp_path: Path) -> None:
    """A plot is current for its records and stale for others; equal records, equal files."""
    pytest.importorskip("matplotlib")
    records = (record(), record(goal=4, model="paper/bert-24", graph_nodes=387), TIMED_OUT)
    paths = (tmp_path / "one.svg", tmp_path / "two.svg")
    for path in paths:
        charts.scale(records).write(path)
    assert charts.scale(records).current(paths[0])
    assert not charts.scale(records[:2]).current(paths[0])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_plot_marks_what_was_not_proved() -> None:
    """A point is at the time to 1 %, or at the end where that was not reached."""
    found = charts.points((record(), TIMED_OUT, UNKNOWN))
    assert found["paper-m4", "40%"] == [(195, 1.0, True, 2**20)]
    assert found["paper-m4", "20%"] == [(195, 60.2, False, 2**20)]
