"""One cell, solved and put into a record of plain values."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines import run
from poetmodel.baselines.registry import method
from poetmodel.bench.cells import Cell
from poetmodel.bench.environment import machine
from poetmodel.errors import BackendUnavailableError, MethodNotApplicableError, PoetModelError
from poetmodel.schedule import RELATIONS, GraphIdentity, Schedule

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

SCHEMA: Final = 1
"""Version of the records."""
NOT_APPLICABLE: Final = "not-applicable"
"""Status of a method that cannot treat the graph or keep the limits."""
UNAVAILABLE: Final = "unavailable"
"""Status where the solver is missing or its licence refuses the model."""
FAILED: Final = "failed"
"""Status of a cell that ended without an answer; it is run again when the sweep is resumed."""

Record = dict[str, Any]


def measure(fields: dict[str, Any], start: dict[str, Any] | None = None) -> Record:
    """Solve a cell and return its record.

    Parameters
    ----------
    fields : dict
        The cell, as `Cell.to_dict` gives it.
    start : dict, optional
        Relations of a schedule of the same problem with less RAM, for methods that take a start.

    Returns
    -------
    dict
        The record. Its ``schedule`` is the content of a schedule file, or None; it is kept apart
        from the line in the file.

    Notes
    -----
    Runs in whatever process it is called in; arguments and answer are plain values, so that they
    travel between machines.
    """
    cell = Cell.from_dict(fields)
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    facts: Record = {"status": FAILED, "reason": "", "result": None, "schedule": None}
    try:
        facts |= _facts(_solve(cell, start))
    except MethodNotApplicableError as error:
        facts |= {"status": NOT_APPLICABLE, "reason": str(error)}
    except BackendUnavailableError as error:
        facts |= {"status": UNAVAILABLE, "reason": str(error)}
    except PoetModelError as error:
        facts |= {"reason": f"{type(error).__name__}: {error}"}
    return {
        **blank(cell),
        "seconds": time.monotonic() - begun_s,
        "cpu_s": time.process_time() - begun_cpu_s,
        "warm_start": start is not None,
        **facts,
    }


def blank(cell: Cell) -> Record:
    """Return what every record says, whatever came of its cell."""
    return {
        "schema": SCHEMA,
        "kind": "cell",
        "key": cell.key,
        "name": cell.name,
        "cell": cell.to_dict(),
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
    }


def failure(cell: Cell, reason: str) -> Record:
    """Return the record of a cell whose worker did not answer."""
    return {**blank(cell), "status": FAILED, "reason": reason, "result": None, "schedule": None}


def _solve(cell: Cell, start: dict[str, Any] | None) -> SolveResult:
    problem, settings = cell.problem(), cell.settings
    options: dict[str, Any] = {
        "time_limit": settings.time_limit_s,
        "gap": settings.gap,
        "threads": settings.threads,
        "seed": settings.seed,
    }
    if method(cell.method).by_solver:
        options |= {"backend": cell.backend, "formulation": cell.formulation}
        if start is not None:
            identity = GraphIdentity.of(problem.graph)
            options["start"] = Schedule(
                **{name: start[name] for name in RELATIONS}, identity=identity
            )
    return run(problem, cell.method, **options)


def _facts(result: SolveResult) -> Record:
    document = result.to_dict()
    figures = {
        key: value for key, value in document.items() if key not in ("nodes", "tensors", *RELATIONS)
    }
    schedule = result.schedule
    counts = None
    if schedule is not None:
        counts = {
            "recomputed": len(schedule.R) - len(result.problem.graph.nodes),
            "paged_out": len(schedule.M_out),
            "paged_in": len(schedule.M_in),
        }
    return {
        "status": str(result.status),
        "reason": result.reason,
        "termination": str(result.termination),
        "result": figures,
        "counts": counts,
        "statistics": dict(result.statistics),
        "versions": dict(result.versions),
        "schedule": None if schedule is None else document,
    }
