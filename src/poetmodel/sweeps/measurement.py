"""Solve one run and return its record of plain values."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import solver_packages
from poetmodel.baselines.lookup import method
from poetmodel.baselines.running import run_method
from poetmodel.device import Costs
from poetmodel.errors import (
    BackendUnavailableError,
    LicenceError,
    MethodNotApplicableError,
    PoetModelError,
)
from poetmodel.files import installed_version, processor_line
from poetmodel.graph import Graph, operation
from poetmodel.headers import WRITTEN_BY
from poetmodel.problem import Problem
from poetmodel.report.presenter import state_metrics
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule
from poetmodel.schedule.identity import COSTS, HISTORY, RESIDENT
from poetmodel.solver.request import SearchOptions
from poetmodel.sweeps.runs import Run, load_device, load_graph

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

SCHEMA: Final = 1
"""Version of the format of records."""
NOT_APPLICABLE: Final = "not-applicable"
"""Status if a method does not apply to the graph, or its schedule violates a limit."""
NOT_INSTALLED: Final = "not-installed"
"""Status if the solver is not installed."""
REFUSED: Final = "refused"
"""Status if the solver's licence is missing or refuses the model."""
FAILED: Final = "failed"
"""Status of a run that ended with an error; a resumed sweep repeats it."""

WARM_UP_S: Final = 10.0
"""Time limit of the warm-up solve, which loads a method and its solver [s]."""

Record = dict[str, Any]
"""Record of a run: a JSON object, stored as one line of a file."""


def common_fields(kind: str, name: str) -> Record:
    """Return the fields that all records have: schema, kind, name, time, Git commit and machine.

    Records of runs have the kind ``cell``, so that older files stay readable.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "name": name,
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "machine": describe_machine(),
    }


@cache
def git_commit() -> str | None:
    """Return the short hash of poetmodel's checked out commit; None without checkout or Git."""
    root = Path(__file__).parents[3]
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    command = [git, "-C", str(root), "rev-parse", "--short", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - git
    return result.stdout.strip() or None


@cache
def describe_machine() -> dict[str, Any]:
    """Return processor, cores, operating system, and versions of Python, solvers and libraries."""
    return {
        "cpu": processor_line("model name").partition(": ")[2] or platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {
            name: version
            for name in ("poetmodel", "pyomo", *solver_packages(), "numpy", "scipy")
            if (version := installed_version(name))
        },
    }


def fields_before_result(run: Run) -> Record:
    """Return the fields of a run's record that do not depend on its result."""
    return {**common_fields("cell", run.name), "key": run.key, "cell": run.to_dict()}


def failure_record(run: Run, reason: str) -> Record:
    """Return the record of a run that raised an exception, or whose process died."""
    return {
        **fields_before_result(run),
        "status": FAILED,
        "reason": reason,
        "result": None,
        "schedule": None,
    }


def measure_run(
    run_fields: dict[str, Any],
    start: dict[str, Any] | None = None,
    problem: Problem | None = None,
) -> Record:
    """Solve a run, or its `problem` if given, in any process; return its record of JSON values.

    `start` has a schedule of the same problem with less RAM, by key of a schedule file. A
    `PoetModelError` is recorded as ``status`` and ``reason``. Measured times do not include
    `load_inputs`.
    """
    run = Run.from_dict(run_fields)
    load_inputs(run, has_problem=problem is not None)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    outcome: Record = {"status": FAILED, "reason": "", "result": None, "schedule": None}
    try:
        outcome |= result_fields(_solve(run, start, problem))
    except MethodNotApplicableError as error:
        outcome |= {"status": NOT_APPLICABLE, "reason": str(error)}
    except LicenceError as error:
        outcome |= {"status": REFUSED, "reason": str(error)}
    except BackendUnavailableError as error:
        outcome |= {"status": NOT_INSTALLED, "reason": str(error)}
    except PoetModelError as error:
        outcome |= {"reason": f"{type(error).__name__}: {error}"}
    return {
        **fields_before_result(run),
        "seconds": time.monotonic() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "warm_start": start is not None,
        **outcome,
    }


def result_fields(result: SolveResult) -> Record:
    """Return the record fields of a solve, from ``status`` and ``reason`` to ``schedule``.

    ``schedule`` is the content of a schedule file, None without one.
    """
    document = result.to_dict()
    schedule_keys = (WRITTEN_BY, COSTS, "nodes", "tensors", *RELATIONS, RESIDENT, HISTORY)
    schedule, simulation = result.schedule, result.simulation
    counts = simulation and {
        "recomputed": sum(simulation.recomputations.values()),
        "paged_out": sum(simulation.page_outs.values()),
        "paged_in": sum(simulation.page_ins.values()),
    }
    return {
        "status": str(result.status),
        "reason": result.reason,
        "termination": str(result.termination),
        "result": {key: value for key, value in document.items() if key not in schedule_keys},
        "counts": counts,
        **_state_field(result),
        "statistics": dict(result.statistics),
        "versions": dict(result.versions),
        "schedule": None if schedule is None else document,
    }


def _state_field(result: SolveResult) -> Record:
    """Return the field ``state`` of a record; empty without state or without a schedule."""
    if result.simulation is None:
        return {}
    metrics = state_metrics(result.problem.graph, result.simulation)
    return {} if metrics is None else {"state": metrics}


def load_inputs(run: Run, *, has_problem: bool = False) -> None:
    """Load method, solver, graph and device before a run is timed; ignore errors of poetmodel.

    With `has_problem`, graph and device are not needed.
    """
    _warm_up(run.method, run.backend, run.formulation)
    if has_problem:
        return
    with suppress(PoetModelError):  # the measurement raises the error again
        load_graph(run.model, run.shape)
        load_device(run.device)


@cache
def _warm_up(method_name: str, backend: str | None, formulation: str | None) -> None:
    """Load a method and its solver, once in a process; errors of poetmodel are ignored."""
    inputs_by_node = {
        "x": [],
        "a": ["x"],
        "b": ["a"],
        "loss": ["b"],
        "g": ["loss", "a"],
        "h": ["g", "x"],
    }
    nodes = tuple(
        operation(node, output_bytes=4, inputs=inputs_by_node[node]) for node in inputs_by_node
    )
    graph = Graph(name="warm-up", nodes=nodes)
    transfer_costs = [(1.0, 1.0)] * len(nodes)
    unit_costs = [1.0] * len(nodes)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=unit_costs,
        compute_energy_j=unit_costs,
        page_in=transfer_costs,
        page_out=transfer_costs,
    )
    with suppress(PoetModelError):
        search = SearchOptions(method=method_name, time_limit_s=WARM_UP_S)
        if method(method_name).uses_solver:
            search = replace(search, backend=backend or search.backend, formulation=formulation)
        run_method(Problem(graph, costs, ram=12), search.start())


def _solve(run: Run, start: dict[str, Any] | None, problem: Problem | None) -> SolveResult:
    """Solve the problem of a run by its method; methods with a solver begin with `start`."""
    problem, schedule = problem or run.build_problem(), None
    if start is not None and method(run.method).uses_solver:
        schedule = Schedule.from_entries(start, GraphIdentity.from_graph(problem.graph))
    return run_method(problem, run.case.search.start(), schedule)
