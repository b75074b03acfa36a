"""Incumbent and bound over time, as a page shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.report_subjects import subject
from kit.worked import comb_problem, skip_problem
from poetmodel.report.charts import progress_chart, progress_of
from poetmodel.solver import solve


def test_history_of_the_file_is_drawn() -> None:
    """Energies are shares of a single pass, and the end says whether it is proven."""
    one = subject(comb_problem())
    chart = progress_of(one)
    assert chart is not None
    assert chart["history"] == [list(moment) for moment in one.document.history]
    assert chart["unit"] == "%"
    assert 100 * chart["factor"] == pytest.approx(one.problem.baseline_energy_j)
    assert chart["proven"]
    assert chart["end"].startswith("proven optimal after ")


@pytest.mark.parametrize(
    ("minimize", "unit", "name"),
    [
        ("time", "s", "time beyond a single pass"),
        ("ram", "B", "peak RAM"),
        ("writes", "B", "written to storage"),
    ],
)
def test_other_quantities_have_their_units(minimize: str, unit: str, name: str) -> None:
    """What is minimized is drawn."""
    problem = replace(comb_problem(), minimize=minimize)
    history = [(0.1, None, 0.0), (0.2, 5.0, 2.0), (0.3, 4.0, 4.0)]
    chart = progress_chart(problem, history, status="optimal")
    assert chart is not None
    assert (chart["unit"], chart["y_name"]) == (unit, name)


@pytest.mark.parametrize(
    ("history", "status", "end"),
    [
        ([(0.5, 4.0, 1.0), (60.0, 4.0, 3.0)], "feasible", "stopped after 60 s: at most 25 %"),
        ([(0.5, None, 1.0), (60.0, None, 3.0)], None, "no schedule after 60 s"),
        ([(0.5, 4.0, None), (2.0, 4.0, 4.0)], "optimal", "proven optimal after 2 s"),
    ],
)
def test_end_is_told(
    history: list[tuple[float, float | None, float | None]], status: str | None, end: str
) -> None:
    """How the solve ended, and what was open then."""
    chart = progress_chart(comb_problem(), history, status=status)
    assert chart is not None
    assert chart["end"].startswith(end)


def test_old_files_have_no_chart() -> None:
    """Without a history, or with its end alone, there is nothing to draw."""
    one = subject(skip_problem())
    assert progress_of(replace(one, document=replace(one.document, history=()))) is None
    assert progress_of(replace(one, costs=None)) is None
    last = solve(skip_problem()).history[-1:]
    assert progress_chart(skip_problem(), last, status="optimal") is None
