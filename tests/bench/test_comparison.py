"""The comparison of solvers under pytest-benchmark: what a run ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import test_solvers

ROOT = Path(__file__).resolve().parents[2]
HEADS = ["solver", "formulation", "limit", "status", "objective", "bound", "gap", "time"]


def test_quick_cells_fit_into_two_minutes_and_show_every_solver() -> None:
    """All limits together stay below two minutes; Gurobi's small licence has its instances."""
    quick = test_solvers.chosen(smoke=False, full=False)
    full = test_solvers.chosen(smoke=False, full=True)
    smoke = test_solvers.chosen(smoke=True, full=False)
    assert sum(cell.settings.time_limit_s for cell in quick if cell.backend != "gurobi") < 100
    assert 0 < len(smoke) < len(quick) < len(full)
    for cells in (quick, smoke):
        assert {cell.backend for cell in cells} == {"highs", "scip", "gurobi"}
        fitting = {cell.formulation for cell in cells if cell.model == "paper/transformer"}
        assert fitting == {"compact", "paper"}


@pytest.mark.slow
def test_run_ends_with_a_table_for_each_problem() -> None:
    """Each problem has its title and heads, each cell a line with status and figures."""
    options = ("--benchmark-only", "--smoke", "-k", "solvers", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "bench", *options)
    # In a worker of pytest-xdist, benchmarks would be off in this run too.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    tables = [place for place, line in enumerate(lines) if line.split() == HEADS]
    cells = test_solvers.chosen(smoke=True, full=False)
    problems = dict.fromkeys((cell.model, cell.device) for cell in cells)
    assert len(tables) == len(problems)
    for place, (model, device) in zip(tables, problems, strict=True):
        assert f"{model} on {device}" in lines[place - 1]
        mine = [cell for cell in cells if (cell.model, cell.device) == (model, device)]
        rows = [line.split() for line in lines[place + 1 : place + 1 + len(mine)]]
        assert [row[:2] for row in rows] == [[cell.backend, cell.formulation] for cell in mine]
        assert all("optimal" in row for row in rows if row[:2] == ["highs", "compact"])
