"""Tables of figures: what stands where, and nothing left out."""

import pytest

from kit.figure_rows import row, without
from poetmodel.bench.pictures import panels
from poetmodel.bench.summaries import (
    overhead_ratio,
    percent,
    shifted_mean_s,
    summary,
)


def test_overheads_by_method_and_budget():
    """Methods go down, budgets across; what has no schedule says why, an open gap is stated."""
    found = [
        row(ram="50%", axis_gap=0.25),
        row(ram="70%", overhead_j=0.5),
        without("infeasible", "dtr", "50%"),
        row("dtr", "70%", overhead_j=10.0, axis_gap=1.0),
        without("not-applicable", "rotor", "50%"),
        without("unknown", "rotor", "70%"),
        row(model="n"),
    ]
    first, second = summary("figure3", found)
    assert (first.title, first.heads) == ("Energy overhead: m, d", ("method", "50%", "70%"))
    assert first.rows == (
        ("optimal", "1 % (gap 25 %)", "0.5 %"),
        ("dtr", "impossible", "10 %"),
        ("rotor", "-", "none in time"),
    )
    assert second.title == "Energy overhead: n, d"


def test_deadlines_maps_and_limits_have_rows_or_columns_of_their_own():
    """Each deadline and method is a row, and each schedule of a map; each limit is a column.

    Of a map stands what is recomputed, paged out and in, and the overhead. One limit has one column
    of gaps, whatever it is.
    """
    (table,) = summary("figure4", [row(), row("paging-only", deadline="110%")])
    assert table.words == 2
    assert table.rows == (("none", "optimal", "1 %"), ("110%", "paging-only", "1 %"))
    counts = {"recomputed": 4, "paged_out": 1, "paged_in": 2}
    none = dict.fromkeys(counts)
    (table,) = summary("figure2", [row(**counts), {**without("infeasible", ram="30%"), **none}])
    assert table.heads[table.words :] == ("recomputed", "paged out", "paged in", "overhead")
    assert table.rows[0][table.words :] == ("4", "1", "2", "1 %")
    assert table.rows[1][table.words :] == ("-", "-", "-", "impossible")
    found = [row(formulation="compact", backend="highs", time_limit_s=1.0, gap=0.5)]
    _, instances = summary("solvers", found)
    assert (instances.heads[-2:], instances.rows[0][-1]) == (("solve", "gap at 1 s"), "50 %")


def test_pofo_is_compared_at_its_budget_and_at_its_time():
    """What is as quick with less RAM may be the optimum of a smaller budget."""
    found = [
        row("pofo", "50%", makespan_s=2.0, peak_ram_bytes=1000),
        row("pofo", "70%", makespan_s=0.5),
        without("not-applicable", "pofo", "90%"),
        row(ram="30%", makespan_s=1.9, peak_ram_bytes=600),
        row(ram="50%", makespan_s=1.5, peak_ram_bytes=900),
        row(ram="70%", makespan_s=1.0, peak_ram_bytes=1100),
    ]
    (table,) = summary("table3", found)
    assert len({len(line) for line in (table.heads, *table.rows)}) == 1
    fifty, seventy, ninety = table.rows
    assert fifty[0] == "50%"
    assert "900 B" in fifty[4]
    assert fifty[-2].startswith("600 B")
    assert fifty[-1] == "40 % RAM, 5 % time"
    assert seventy[-2:] == ("none", "")
    assert ninety[:2] == ("90%", "-")


def test_time_outs_of_solvers_stay():
    """They count with the time they took; an open gap is shown, a refusal is no time-out."""

    def cell(backend, ram, limit_s, **changes):
        changes = {"formulation": "compact", "backend": backend, **changes}
        return row(ram=ram, time_limit_s=limit_s, **changes)

    found = [
        cell("highs", "50%", 10.0, gap=0.5, status="feasible", seconds=10.0),
        cell("highs", "50%", 60.0, gap=0.2, status="feasible", seconds=60.0),
        cell("highs", "70%", 10.0, seconds=0.0),
        cell("highs", "70%", 60.0, seconds=0.0),
        without(
            "refused",
            ram="50%",
            formulation="compact",
            backend="gurobi",
            reason="the licence allows less",
            time_limit_s=60.0,
            columns=None,
        ),
        cell("highs", "50%", 60.0, formulation="paper", gap=0.0, model_gap=0.3),
    ]
    means, instances = summary("solvers", found)
    highs, gurobi, paper = means.rows
    assert highs[:6] == ("compact", "highs", "2", "0", "0", "1")
    assert highs[6] == f"{shifted_mean_s([0.0, 60.0]):.3g} s"
    assert gurobi == ("compact", "gurobi", "1", "1", "0", "0", "-")
    assert paper[5] == "0"
    assert instances.rows[0][-2:] == ("50 %", "20 %")
    assert instances.rows[0][5:8] == ("10", "2,000", "3")
    refused = next(line for line in instances.rows if "gurobi" in line)
    assert (refused[5], refused[-2:]) == ("-", ("", "refused by the licence"))
    assert instances.rows[-1][-1] == "30 %"


@pytest.mark.parametrize("status", ["refused", "not-installed"])
def test_refused_runs_are_never_solved(status):
    """Neither the table of means nor the picture counts them, gap or not."""
    refused = row(formulation="compact", backend="gurobi", status=status, termination=None, gap=0.0)
    solved = row(formulation="compact", backend="highs", ram="70%", status="infeasible", gap=None)
    means, _ = summary("solvers", [refused, solved])
    assert [line[5] for line in means.rows] == ["0", "1"]
    counts = ("1", "0") if status == "refused" else ("0", "1")
    assert means.rows[0][3:5] == counts
    (panel,) = panels("solvers", [refused, solved])
    assert [len(points) for _, points in panel.lines] == [0, 1]


def test_shift_is_undone():
    """Equal times have that mean; an overhead of nothing is none."""
    assert shifted_mean_s([3.0, 3.0]) == pytest.approx(3.0)
    assert overhead_ratio(without("unknown")) is None
    assert shifted_mean_s([0.0, 99.0]) == pytest.approx(9.0)
    assert percent(0.5) == "50 %"
    assert percent(0.0012345) == "0.123 %"
    assert percent(None) == "-"
