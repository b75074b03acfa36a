"""Benchmark of HiGHS, SCIP and Gurobi on two formulations.

Prints a table for each problem: solver, formulation, status, objective, bound, gap, time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from poetmodel.sweeps.measurement import FAILED, NOT_INSTALLED, REFUSED, load_inputs, measure_run
from poetmodel.sweeps.tables import rows
from solver_runs import make_solver_runs

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.sweeps import Run

SMALLEST: Final = (("mlp", "mkr1000"), ("paper/transformer", "paper-m4"))
"""Models and devices of a smoke run; both formulations fit Gurobi's bundled licence."""
SMOKE_LIMIT_S: Final = 2.0
"""Limit of a solve in a smoke run [s]."""
QUICK_LIMIT_S: Final = 4.0
"""Default limit of a solve in any other run [s]; ``--limit`` replaces it."""
RESULT_FIELDS: Final = (
    "status",
    "termination",
    "reason",
    "violations",
    "overhead_j",
    "overhead_bound_j",
    "gap",
    "model_value",
    "model_bound",
    "model_gap",
    "columns",
    "rows",
    "nodes",
    "build_s",
    "solve_s",
)
"""Fields of a result that its record contains in addition to the time."""


def select_runs(*, smoke: bool, limit_s: float = QUICK_LIMIT_S) -> tuple[Run, ...]:
    """Return the runs with a limit, or the smallest of them with `SMOKE_LIMIT_S`."""
    runs = make_solver_runs(SMOKE_LIMIT_S if smoke else limit_s)
    return tuple(run for run in runs if not smoke or (run.model, run.device) in SMALLEST)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the benchmark with its runs."""
    options = metafunc.config.option
    runs = select_runs(smoke=options.smoke, limit_s=options.limit or QUICK_LIMIT_S)
    names = [f"{run.name} | s{run.settings.seed} | {run.settings.time_limit_s:g}s" for run in runs]
    metafunc.parametrize("run", runs, ids=names)


def test_solver(
    benchmark: Any,
    run: Run,
    store_record: Callable[..., None],
    solver_records: list[dict[str, Any]],
) -> None:
    """State, solve and verify one run, once. Time-outs are recorded with their gap."""
    benchmark.group = f"solvers: {run.model}"
    load_inputs(run)
    record = benchmark.pedantic(measure_run, args=(run.to_dict(),), rounds=1, iterations=1)
    solver_records.append(record)
    if record["status"] in (NOT_INSTALLED, REFUSED):
        pytest.skip(record["reason"])
    (row,) = rows([record])
    facts = {name: row[name] for name in RESULT_FIELDS}
    benchmark.extra_info.update(facts)
    store_record("solver", run.name, seconds=record["seconds"], **facts)
    assert record["status"] != FAILED, record["reason"]
