"""The comparison of solvers under pytest-benchmark: what a run ends with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import test_solvers
from kit.figure_rows import row
from solver_tables import comparison

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


@pytest.mark.parametrize(
    ("status", "words"),
    [("refused", "refused by the licence"), ("not-installed", "not installed")],
)
def test_refused_runs_have_no_figures(status: str, words: str) -> None:
    """What the licence refuses, or no solver took, has its reason alone, gap or not."""
    refused = row(formulation="compact", backend="gurobi", status=status, termination=None, gap=0.0)
    (table,) = comparison([refused])
    assert table.rows[0][3:] == (words, "-", "-", "-", "-")


def test_comparison_tells_what_each_solver_reached() -> None:
    """Objective, bound and gap of the problem, for ``paper`` of its own model; time-outs stay."""
    timed = {"termination": "time_limit", "status": "feasible", "time_limit_s": 10.0}
    found = [
        row(backend="highs", formulation="compact"),
        row(backend="scip", formulation="compact", gap=0.25, overhead_bound_j=0.75, **timed),
        row(
            backend="highs",
            formulation="paper",
            status="feasible",
            gap=1.0,
            model_value=0.5,
            model_bound=0.5,
            model_gap=0.0,
            violations=2,
        ),
        row(backend="scip", formulation="paper", gap=1.0, model_bound=0.1, **timed),
        row(backend="gurobi", formulation="compact", gap=1.0, **{**timed, "solve_s": 0.0}),
    ]
    (table,) = comparison(found)
    assert table.title == "m on d, 50% of RAM"
    assert table.heads[3:] == ("status", "objective", "bound", "gap", "time")
    assert [line[3:] for line in table.rows] == [
        ("optimal", "1 J", "1 J", "0 %", "2 s"),
        ("feasible, time limit", "1 J", "750 mJ", "25 %", "2 s"),
        ("feasible, rejected by the verifier", "500 mJ", "500 mJ", "0 %", "2 s"),
        ("unknown, time limit", "-", "100 mJ", "none in time", "2 s"),
        ("feasible, time limit while building", "1 J", "1 J", "none in time", "2 s"),
    ]
