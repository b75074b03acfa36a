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


def test_quick_runs_fit_into_two_minutes_and_show_every_solver() -> None:
    """All limits together stay below two minutes; Gurobi's small licence has its instances."""
    quick = test_solvers.chosen(smoke=False, full=False)
    full = test_solvers.chosen(smoke=False, full=True)
    smoke = test_solvers.chosen(smoke=True, full=False)
    assert sum(run.settings.time_limit_s for run in quick if run.backend != "gurobi") < 100
    assert 0 < len(smoke) < len(quick) < len(full)
    for runs in (quick, smoke):
        assert {run.backend for run in runs} == {"highs", "scip", "gurobi"}
        fitting = {run.formulation for run in runs if run.model == "paper/transformer"}
        assert fitting == {"compact", "paper"}


@pytest.mark.slow
def test_run_ends_with_a_table_for_each_problem() -> None:
    """Each problem has its title and heads, each run a line with status and figures."""
    options = ("--benchmark-only", "--smoke", "-k", "solvers", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", "bench", *options)
    # In a worker of pytest-xdist, benchmarks would be off in this run too.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    tables = [place for place, line in enumerate(lines) if line.split() == HEADS]
    runs = test_solvers.chosen(smoke=True, full=False)
    problems = dict.fromkeys((run.model, run.device) for run in runs)
    assert len(tables) == len(problems)
    for place, (model, device) in zip(tables, problems, strict=True):
        assert f"{model} on {device}" in lines[place - 1]
        mine = [run for run in runs if (run.model, run.device) == (model, device)]
        rows = [line.split() for line in lines[place + 1 : place + 1 + len(mine)]]
        assert [row[:2] for row in rows] == [[run.backend, run.formulation] for run in mine]
        assert all("optimal" in row for row in rows if row[:2] == ["highs", "compact"])
