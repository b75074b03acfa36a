"""Tables of a sweep: bounds along the budgets, the front, and files."""

import csv

import pytest

from poetmodel.bench.pictures import check_form, draw, overheads
from poetmodel.bench.runs import Run
from poetmodel.bench.tables import pareto, rows, write_csv, write_parquet
from poetmodel.errors import InputError


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
    """1 J is proven for 30 B, hence for 20 B; what is proven for 10 B says nothing of more RAM.

    Another deadline or method is another axis; a bound is never above the value.
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
    assert pareto(found) == []


def test_front_of_energy_ram_and_time():
    """What another row beats in one figure and matches in the rest is not on the front."""
    found = rows(
        [
            _record(30, 1.0, bound_j=1.0, time_s=3.0),
            _record(30, 1.0, time_s=3.0, method="dtr"),  # equal: the first stays
            _record(40, 1.0, time_s=3.0),  # more RAM for nothing
            _record(20, 2.0, time_s=3.0),
            _record(40, 3.0, time_s=1.0, method="capuchin"),  # dear but quick
            _record(50, 3.0, time_s=2.0, method="rotor"),
            _record(10, None),
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


def test_csv_has_all_rows(tmp_path):
    """Heads first, a line per run, empty where there is nothing."""
    found = rows([_record(10, 1.0), _record(20, None)])
    write_csv(tmp_path / "cells.csv", found)
    with (tmp_path / "cells.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert [line["overhead_j"] for line in lines] == ["1.0", ""]
    write_csv(tmp_path / "empty.csv", [])


@pytest.mark.filterwarnings("default")
def test_parquet_has_all_rows(tmp_path):
    """The same table, with numbers as numbers."""
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    found = rows([_record(10, 1.0), _record(20, None)])
    write_parquet(tmp_path / "cells.parquet", found)
    frame = pandas.read_parquet(tmp_path / "cells.parquet")
    assert list(frame.columns) == list(found[0])
    assert frame["overhead_j"].sum() == 1.0


def test_picture_of_a_sweep(tmp_path, told):
    """Panels per model and device, lines per method; other endings are refused."""
    pytest.importorskip("matplotlib")
    found = rows([_record(10, 1.0), _record(20, 0.5), _record(20, None), _record(9, 1, model="n")])
    draw(tmp_path / "sweep.svg", overheads(found))
    text = (tmp_path / "sweep.svg").read_text()
    assert text.startswith("<?xml")
    draw(tmp_path / "empty.png", overheads([]))
    draw(tmp_path / "sweep.pdf", overheads(found))
    with told.raises(InputError):
        check_form(tmp_path / "sweep.txt")


@pytest.mark.parametrize(
    ("reason", "status"),
    [("the size-limited licence allows 2,000", "refused"), ("is missing", "not-installed")],
)
def test_older_records_do_not_tell_refusals_from_missing_solvers(reason, status):
    """Their one status for both is told apart by its reason."""
    record = _record(20, None) | {"result": None, "status": "unavailable", "reason": reason}
    assert rows([record])[0]["status"] == status
