"""Summaries, tables and pictures of figures, from the rows of their cells."""

import csv
from dataclasses import replace

import pytest

from kit.figure_rows import make_row, make_row_without_schedule
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import load_model
from poetmodel.report.charts import map_chart
from poetmodel.report.pictures import Map, Panel
from poetmodel.schedule import checkpoint_all
from poetmodel.sweeps.panels import data_digest, figure_panels, overhead_panels, pareto_panels
from poetmodel.sweeps.pictures import check_suffix, draw
from poetmodel.sweeps.runs import Run
from poetmodel.sweeps.summaries import figure_summaries, format_fraction, overhead_ratio
from poetmodel.sweeps.tables import pareto, rows, write_csv


def test_overheads_by_method_and_budget():
    """Rows are methods, columns budgets; cells without a schedule have a reason, others the gap."""
    found = [
        make_row(ram="50%", axis_gap=0.25),
        make_row(ram="70%", overhead_j=0.5),
        make_row_without_schedule("infeasible", "dtr", "50%"),
        make_row("dtr", "70%", overhead_j=10.0, axis_gap=1.0),
        make_row_without_schedule("not-applicable", "rotor", "50%"),
        make_row_without_schedule("unknown", "rotor", "70%"),
        make_row(model="n"),
    ]
    first, second = figure_summaries("figure3", found)
    assert (first.title, first.heads) == ("Energy overhead: m, d", ("method", "50%", "70%"))
    assert first.rows == (
        ("optimal", "1 % (gap 25 %)", "0.5 %"),
        ("dtr", "impossible", "10 %"),
        ("rotor", "-", "none in time"),
    )
    assert second.title == "Energy overhead: n, d"


def test_deadlines_and_maps_have_rows_of_their_own():
    """Each deadline and method is a row, and each schedule of a map.

    A map has recomputed tensors, page-outs, page-ins, and the overhead.
    """
    (table,) = figure_summaries("figure4", [make_row(), make_row("paging-only", deadline="110%")])
    assert table.n_text_columns == 2
    assert table.rows == (("none", "optimal", "1 %"), ("110%", "paging-only", "1 %"))
    counts = {"recomputed": 4, "paged_out": 1, "paged_in": 2}
    none = dict.fromkeys(counts)
    (table,) = figure_summaries(
        "figure2",
        [make_row(**counts), {**make_row_without_schedule("infeasible", ram="30%"), **none}],
    )
    assert table.heads[table.n_text_columns :] == (
        "recomputed",
        "paged out",
        "paged in",
        "overhead",
    )
    assert table.rows[0][table.n_text_columns :] == ("4", "1", "2", "1 %")
    assert table.rows[1][table.n_text_columns :] == ("-", "-", "-", "impossible")


def test_pofo_is_compared_at_its_budget_and_at_its_time():
    """A schedule that is as fast with less RAM may be the optimum of a smaller budget."""
    found = [
        make_row("pofo", "50%", makespan_s=2.0, peak_ram_bytes=1000),
        make_row("pofo", "70%", makespan_s=0.5),
        make_row_without_schedule("not-applicable", "pofo", "90%"),
        make_row(ram="30%", makespan_s=1.9, peak_ram_bytes=600),
        make_row(ram="50%", makespan_s=1.5, peak_ram_bytes=900),
        make_row(ram="70%", makespan_s=1.0, peak_ram_bytes=1100),
    ]
    (table,) = figure_summaries("table3", found)
    assert len({len(line) for line in (table.heads, *table.rows)}) == 1
    fifty, seventy, ninety = table.rows
    assert fifty[0] == "50%"
    assert "900 B" in fifty[4]
    assert fifty[-2].startswith("600 B")
    assert fifty[-1] == "40 % RAM, 5 % time"
    assert seventy[-2:] == ("none", "")
    assert ninety[:2] == ("90%", "-")


def test_shares_have_three_digits():
    """Fractions are percentages with at most three digits; without a schedule, there is none."""
    assert overhead_ratio(make_row_without_schedule("unknown")) is None
    assert format_fraction(0.5) == "50 %"
    assert format_fraction(0.0012345) == "0.123 %"
    assert format_fraction(None) == "-"


# -- pictures ------------------------------------------------------------------------------------
def test_overheads_are_lines_along_the_budgets():
    """One panel per model, device and deadline; points ascend, others are omitted."""
    found = [
        make_row(ram="70%"),
        make_row(ram="50%", overhead_j=2.0),
        make_row_without_schedule("unknown", "dtr"),
    ]
    first, second = figure_panels("figure3", [*found, make_row(deadline="110%")])
    assert first.lines == (("optimal", ((50.0, 2.0), (70.0, 1.0))), ("dtr", ()))
    assert second.title == "m, d\ndeadline 110%"


def test_peaks_and_times():
    """Table 3 shows peak RAM against time."""
    (panel,) = figure_panels("table3", [make_row("pofo", peak_ram_bytes=2048, makespan_s=0.5)])
    assert panel.lines == (("pofo", ((2.0, 500.0),)),)


@pytest.mark.slow
def test_maps_show_the_schedule_of_each_cell(tmp_path):
    """A map for each schedule, with cells as the relations have them; without one there is none."""
    graph = load_model("paper/linear")
    plain = checkpoint_all(graph)
    again = replace(plain, R=tuple(sorted((*plain.R, (26, 0)))))
    documents = {"a": plain.to_dict(), "b": again.to_dict()}
    found = [
        make_row(model="paper/linear", device=device, ram="50%", key=key)
        for device, key in (("paper-m0", "a"), ("paper-m4", "b"), ("jetson-tx2", "none"))
    ]
    first, second = figure_panels("figure2", found, documents.get)
    assert isinstance(first, Map)
    assert isinstance(second, Map)
    assert first.title == "paper/linear, paper-m0, 50%\n0 recomputations, 0 page-outs, 0 page-ins"
    assert first.chart == map_chart(graph, plain)
    assert second.chart != first.chart
    assert data_digest([first]) != data_digest([second])
    pytest.importorskip("matplotlib")
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    for path in (one, two):
        draw(path, [first, second])
    assert one.read_bytes() == two.read_bytes()
    assert f"data {data_digest([first, second])}".encode() in one.read_bytes()
    assert b"recomputed" in one.read_bytes()


def _panel(*heights):
    points = tuple((float(k), height) for k, height in enumerate(heights, start=1))
    lines = (("optimal", points), ("dtr", points), ("none", ()))
    return Panel(title="title", x_name="x", y_name="y", lines=lines)


def test_picture_is_reproducible_and_says_what_it_shows(tmp_path):
    """Zero overheads, empty lines and panels can be drawn; the file bears the digest."""
    pytest.importorskip("matplotlib")
    shown = [_panel(0.0, 0.5), _panel(), replace(_panel(1.0, 2.0), in_percent=False)]
    one, two, three = (tmp_path / name for name in ("one.svg", "two.svg", "three.png"))
    for path in (one, two, three):
        draw(path, shown)
    assert one.read_bytes() == two.read_bytes()
    assert b"no schedule" in one.read_bytes()
    for path in (one, three):
        assert f"data {data_digest(shown)}".encode() in path.read_bytes()
    assert data_digest(shown) != data_digest(shown[:1])


def test_axes_of_overheads_are_in_percent(tmp_path):
    """Small overheads are written out, with their unit, and no powers of ten are left."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "one.svg"
    draw(path, [_panel(0.06, 0.45)])
    text = path.read_text()
    assert ">0.1 %<" in text
    assert "mathdefault" not in text


# -- tables --------------------------------------------------------------------------------------
def _record(ram, overhead_j, *, bound_j=0.0, peak=0, time_s=1.0, **cell):
    """Make a record of a model of 10 J; without an overhead there is no schedule."""
    run = Run(**{"model": "m", "device": "d", "ram": f"{ram}B", **cell})
    figures = {"problem": {"ram_budget_bytes": ram}}
    if overhead_j is not None:
        figures |= {
            "energy_j": 10.0 + overhead_j,
            "baseline_energy_j": 10.0,
            "overhead_j": overhead_j,
            "overhead_bound_j": bound_j,
            "peak_ram_bytes": peak or ram,
            "makespan_s": time_s,
        }
    status = "infeasible" if overhead_j is None else "feasible"
    if overhead_j is not None and bound_j >= overhead_j:
        status = "optimal"
    return {
        "key": run.key,
        "cell": run.to_dict(),
        "status": status,
        "result": figures,
        "counts": None,
    }


def test_bounds_of_larger_budgets_hold_for_smaller_ones():
    """1 J is proven for 30 B, hence for 20 B; a bound for 10 B does not hold with more RAM.

    Another deadline or method is separate; a bound is never above the value.
    """
    found = rows(
        [
            _record(10, 8.0, bound_j=4.0),
            _record(20, 4.0, bound_j=0.5),
            _record(30, 2.0, bound_j=1.0),
            _record(40, 1.0),
        ]
    )
    assert [row["axis_bound_j"] for row in found] == [4.0, 1.0, 1.0, 0.0]
    assert [row["axis_gap"] for row in found] == [0.5, 0.75, 0.5, 1.0]
    found = rows(
        [
            _record(10, 1.0, method="dtr"),
            _record(20, 4.0, bound_j=3.0),
            _record(20, 4.0, bound_j=4.0, deadline="110%"),
            _record(10, 2.0),
        ]
    )
    assert [row["axis_bound_j"] for row in found] == [0.0, 3.0, 4.0, 2.0]


def test_runs_without_a_schedule_have_empty_figures():
    """They have a row, with the reason in it."""
    record = _record(10, None) | {"reason": "below the floor"}
    failed = _record(20, None) | {"result": None, "status": "failed"}
    found = rows([record, failed])
    assert [row["energy_j"] for row in found] == [None, None]
    assert [row["reason"] for row in found] == ["below the floor", None]


def test_csv_has_all_rows(tmp_path):
    """Headings first, a line per run, empty for missing values."""
    found = rows(iter([_record(10, 1.0), _record(20, None)]))
    write_csv(tmp_path / "cells.csv", found)
    with (tmp_path / "cells.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["overhead_j"] for line in lines] == ["1.0", ""]
    write_csv(tmp_path / "empty.csv", [])


def test_picture_of_a_sweep(tmp_path, told):
    """Panels per model and device, lines per method; other endings are refused."""
    pytest.importorskip("matplotlib")
    found = rows([_record(10, 1.0), _record(20, 0.5), _record(20, None), _record(9, 1, model="n")])
    draw(tmp_path / "sweep.svg", overhead_panels(found))
    text = (tmp_path / "sweep.svg").read_text()
    assert text.startswith("<?xml")
    draw(tmp_path / "empty.png", overhead_panels([]))
    draw(tmp_path / "sweep.pdf", overhead_panels(found))
    with told.raises(InputError):
        check_suffix(tmp_path / "sweep.txt")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("the size-limited licence allows 2,000", "refused"), ("is missing", "not-installed")],
)
def test_older_records_do_not_tell_refusals_from_missing_solvers(reason, status):
    """Their common status is distinguished by its reason."""
    record = _record(20, None) | {"result": None, "status": "unavailable", "reason": reason}
    assert rows([record])[0]["status"] == status


def test_front_of_energy_ram_and_time():
    """A row is not on the front if another is better in one value and as good in the rest.

    Nor are rejected schedules.
    """
    rejected = _record(5, 0.5, time_s=0.5, method="paper")
    rejected["result"]["violations"] = ["R[1,1]: made up"]
    found = rows(
        [
            _record(30, 1.0, bound_j=1.0, time_s=3.0),
            _record(30, 1.0, time_s=3.0, method="dtr"),  # equal: the first stays
            _record(40, 1.0, time_s=3.0),  # more RAM for nothing
            _record(20, 2.0, time_s=3.0),
            _record(40, 3.0, time_s=1.0, method="capuchin"),  # dear but quick
            _record(50, 3.0, time_s=2.0, method="rotor"),
            _record(10, None),
            rejected,  # dominates all others, if it were valid
            _record(99, 9.0, time_s=9.0, model="other"),
        ]
    )
    front = pareto(found)
    assert [(row["model"], row["peak_ram_bytes"], row["proven"]) for row in front] == [
        ("m", 20, False),
        ("m", 30, True),
        ("m", 40, False),
        ("other", 99, False),
    ]
    assert front[2]["method"] == "capuchin"


def test_frontier_is_drawn_by_ram():
    """Overhead falls along the RAM of the front; schedules that are only faster are omitted."""
    front = [
        {**make_row(overhead_j=100 * overhead), "peak_ram_bytes": ram, "proven": True}
        for ram, overhead in ((1024, 0.3), (2048, 0.3), (3072, 0.1))
    ]
    (panel,) = pareto_panels(front)
    ((_, points),) = panel.lines
    assert [x for x, _ in points] == [1.0, 3.0]
