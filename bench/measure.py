"""Measuring one cell of the grid: it is solved once, and its course and its end are noted."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from cases import GAP
from grid import METHODS, graph_of
from poetmodel.errors import PoetModelError
from poetmodel.graph import floor
from records import model_gap
from resuming import FAILED

if TYPE_CHECKING:
    from grid import Cell
    from poetmodel import SolveProgress, SolveResult

_STEP: Final = 0.9
"""A gap is noted when it is below this share of the last one noted."""


@dataclass(slots=True)
class Course:
    """What a solve tells on its way: when it first had a schedule, and how the gap fell."""

    first_schedule_s: float | None = None
    """When the first schedule was there, building included [s]."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times [s] and the gap from then on, each less than `_STEP` of the one before."""

    def note(self, progress: SolveProgress) -> None:
        """Take note of one state of the solve."""
        if progress.incumbent is None:
            return
        if self.first_schedule_s is None:
            self.first_schedule_s = progress.seconds
        self.reach(progress.seconds, progress.gap)

    def reach(self, seconds: float, gap: float | None) -> None:
        """Take note of a gap, if it is much less than the last."""
        if gap is None or (self.gaps and gap >= _STEP * self.gaps[-1][1] and gap > 0.0):
            return
        if self.gaps and self.gaps[-1][1] == 0.0:
            return
        self.gaps.append((round(seconds, 3), float(f"{gap:.4g}")))


def measure(cell: Cell, *, threads: int = 1) -> dict[str, Any]:
    """Solve a cell and return what a record says of it.

    Parameters
    ----------
    cell : Cell
        What to solve. Its graph is read before the clock starts.
    threads : int
        Threads that the solver may use.

    Returns
    -------
    dict
        ``seconds`` of wall time for stating, building, solving and judging, and plain facts. Where
        the package refuses the cell, ``status`` is `FAILED` and ``reason`` says why.
    """
    graph = graph_of(cell.model)
    method = METHODS[cell.method]
    course = Course()
    cpu_s, begun = time.process_time(), time.perf_counter()
    facts: dict[str, Any]
    try:
        result = pm.solve(
            cell.problem(),
            formulation=method.formulation,
            backend=method.backend,
            time_limit=cell.limit_s,
            gap=GAP,
            threads=threads,
            seed=cell.seed,
            on_progress=course.note,
        )
    except PoetModelError as error:
        facts = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - begun
    else:
        seconds = time.perf_counter() - begun
        facts = _facts(result, course, seconds)
    return {
        "cell": cell.to_dict(),
        "threads": threads,
        "seconds": seconds,
        "cpu_s": time.process_time() - cpu_s,
        "peak_memory_bytes": peak_memory_bytes(),
        "graph_nodes": len(graph.nodes),
        "graph_tensors": len(graph.tensors),
        "floor_bytes": floor(graph).bytes,
        **facts,
    }


def _facts(result: SolveResult, course: Course, seconds: float) -> dict[str, Any]:
    problem, statistics = result.problem, dict(result.statistics)
    gap = model_gap(result) if result.formulation == "paper" else result.gap
    if result.schedule is not None:
        if course.first_schedule_s is None:
            course.first_schedule_s = seconds
        course.reach(seconds, gap)
    return {
        "status": str(result.status),
        "termination": str(result.termination),
        "reason": result.reason,
        "formulation": result.formulation,
        "backend": result.backend,
        "gap": gap,
        "requested_gap": result.requested_gap,
        "overhead_j": result.overhead_j,
        "overhead_bound_j": result.overhead_bound_j,
        "baseline_energy_j": result.baseline_energy_j,
        "peak_ram_bytes": None if result.simulation is None else result.simulation.peak_ram_bytes,
        "ram_budget_bytes": problem.ram_budget_bytes,
        "deadline_s": problem.deadline_s,
        "violations": len(result.violations),
        "first_schedule_s": course.first_schedule_s,
        "gaps": course.gaps,
        "build_s": result.build_s,
        "solve_s": result.solve_s,
        "statistics": statistics,
        "versions": dict(result.versions),
    }


def peak_memory_bytes() -> int:
    """Return the most memory that this process ever had resident [B]."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def warm() -> None:
    """Load solver and modelling library by a small solve, so that no measurement pays for it."""
    from poetmodel.graph.catalogue import load_model

    graph = load_model("mlp")
    costs = pm.Costs.estimate(graph, pm.Device.load("mkr1000"))
    pm.solve(pm.Problem(graph, costs, ram="70%"), time_limit=5.0)
