"""Run the grid: one fresh process and one JSON line an instance; can be stopped and resumed.

``python bench/run_grid.py --workers 2 --out bench/results/$(date +%F)-grid.jsonl`` runs all
but captured models, in a mixed order that is the same each time: a run that is cut short is a fair
sample.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from cases import GAP
from grid import CAPTURED, GOALS, METHODS, Instance, graph_of, in_running_order, instances
from harness import FreshProcesses, parsed, record, recorded, run_all
from poetmodel.bench.measurement import FAILED
from poetmodel.bench.tables import model_gap
from poetmodel.errors import PoetModelError
from poetmodel.graph import floor
from poetmodel.graph.catalogue import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyomo.environ as pyo

    from poetmodel import SolveProgress, SolveResult
    from poetmodel.bench.measurement import Record
    from poetmodel.problem import Problem

KIND: Final = "cell"
"""Kind of the records."""
GRACE_S: Final = 120.0
"""How long after its limit an instance may take until its process is ended [s]."""
AGAIN_GAP: Final = 0.01
"""Gap above which ``--again`` solves an instance again."""
NOTED_RATIO: Final = 0.9
"""A gap is noted when it is below this share of the last one noted."""
PRELOADED: Final = (
    "pyomo.environ",
    "highspy",
    "scipy.sparse",
    "networkx",
    "poetmodel.backends.highs",
    "poetmodel.solver",
    "poetmodel.device",
)


# -- one instance ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Course:
    """What a solve tells on its way: when it first had a schedule, and how the gap fell."""

    first_schedule_s: float | None = None
    """When the first schedule was there, building included [s]."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Times [s] and the gap from then on, each less than `NOTED_RATIO` of the one before."""

    def note(self, progress: SolveProgress) -> None:
        """Take note of one state of the solve."""
        if progress.incumbent is None:
            return
        if self.first_schedule_s is None:
            self.first_schedule_s = progress.seconds
        self.reach(progress.seconds, progress.gap)

    def reach(self, seconds: float, gap: float | None) -> None:
        """Take note of a gap, if it is much less than the last."""
        if gap is None or (self.gaps and gap >= NOTED_RATIO * self.gaps[-1][1] and gap > 0.0):
            return
        if self.gaps and self.gaps[-1][1] == 0.0:
            return
        self.gaps.append((round(seconds, 3), float(f"{gap:.4g}")))


def measure(
    fields: dict[str, Any],
    _start: None = None,
    *,
    threads: int = 1,
    workers: int = 1,
    gap: float = GAP,
    stated: Callable[[Problem], Problem | pyo.ConcreteModel] = lambda problem: problem,
) -> Record:
    """Solve an instance and return its record; its graph is read before the clock starts.

    ``seconds`` is wall time for stating, building, solving and verifying; ``stated_s`` is the part
    before `solve` is called. Where the package refuses the instance, ``status`` is `FAILED` and
    ``reason`` says why. `stated` returns what is solved in place of the instance's problem.
    """
    instance = Instance(**fields)
    graph, method = graph_of(instance.model), METHODS[instance.method]
    course = Course()
    cpu_s, begun, stated_s = time.process_time(), time.perf_counter(), None
    try:
        problem = stated(instance.problem())
        stated_s = time.perf_counter() - begun
        result = pm.solve(
            problem,
            formulation=method.get("formulation"),
            backend=method.get("backend", "highs"),
            time_limit=instance.limit_s,
            gap=gap,
            threads=threads,
            seed=instance.seed,
            on_progress=course.note,
        )
    except PoetModelError as error:
        seconds = time.perf_counter() - begun
        facts: dict[str, Any] = {"status": FAILED, "reason": f"{type(error).__name__}: {error}"}
    else:
        seconds = time.perf_counter() - begun
        facts = _facts(result, course, seconds)
    return record(
        KIND,
        instance.name,
        cell=fields,
        workers=workers,
        threads=threads,
        seconds=seconds,
        stated_s=stated_s,
        cpu_s=time.process_time() - cpu_s,
        peak_memory_bytes=peak_memory_bytes(),
        worker_memory_bytes=peak_memory_bytes(resource.RUSAGE_CHILDREN),
        graph_nodes=len(graph.nodes),
        graph_tensors=len(graph.tensors),
        floor_bytes=floor(graph).bytes,
        **facts,
    )


def _facts(result: SolveResult, course: Course, seconds: float) -> dict[str, Any]:
    problem, statistics = result.problem, dict(result.statistics)
    gap = model_gap(statistics) if result.formulation == "paper" else result.objective_gap
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
        "objective_value": result.objective_value,
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


def peak_memory_bytes(whose: int = resource.RUSAGE_SELF) -> int:
    """Return the most memory that this process, or one that it started, ever had resident [B]."""
    peak = resource.getrusage(whose).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def warm_up() -> None:
    """Load solver and modelling library by a small solve, so that no measurement pays for it."""
    graph = load_model("mlp")
    costs = pm.Costs.estimate(graph, pm.Device.load("mkr1000"))
    pm.solve(pm.Problem(graph, costs, ram="70%"), time_limit=5.0)


def measure_warm(fields: dict[str, Any], start: None, **options: Any) -> Record:
    """Load everything, then `measure`."""
    warm_up()
    return measure(fields, start, **options)


# -- the command -----------------------------------------------------------------------------------


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--goal",
        type=int,
        action="append",
        choices=GOALS,
        help="default: those of the --again record, else all but captured models, which are "
        "solved with two threads",
    )
    parser.add_argument("--only", default="", help="instances whose name contains this")
    parser.add_argument(
        "--again",
        type=Path,
        help="record whose instances above 1 %%, or without a verdict, are run",
    )
    parser.add_argument("--workers", type=int, default=1, help="instances at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each solve")
    parser.add_argument("--limit", type=float, help="seconds of every instance; default: its own")
    parser.add_argument("--sample", type=int, help="only the first instances of the mixed order")
    return parsed(parser, "grid.jsonl", arguments)


def is_left(record: Record) -> bool:
    """Return whether an instance, solved by default, ended with a gap above `AGAIN_GAP` or nothing.

    Nothing is neither a schedule nor a proof that there is none.
    """
    gap = record.get("gap")
    open_ = record["status"] == "unknown" if gap is None else gap > AGAIN_GAP
    return bool(record["cell"]["method"] == "default" and open_)


def chosen_instances(options: argparse.Namespace) -> tuple[Instance, ...]:
    """Return the instances that the options ask for, in running order."""
    goals = options.goal or [goal for goal in GOALS if options.again or goal not in CAPTURED]
    chosen = in_running_order(instances(goals))
    if options.again is not None:
        records = recorded(options.again).records()
        left = {record["name"] for record in records if is_left(record)}
        chosen = tuple(each for each in chosen if each.name in left)
    chosen = tuple(each for each in chosen if options.only in each.name)[: options.sample]
    if options.limit is not None:
        chosen = tuple(replace(each, limit_s=options.limit) for each in chosen)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run instances; return the exit status: 130 where the run was stopped."""
    options = _options(arguments)
    warm_up()  # fails here, before anything is recorded, where nothing can be solved at all
    return run_all(
        chosen_instances(options),
        recorded(options.out),
        partial(measure_warm, threads=options.threads, workers=options.workers),
        FreshProcesses(options.workers, preloaded=PRELOADED, grace_s=GRACE_S),
        kind=KIND,
        workers=options.workers,
    )


if __name__ == "__main__":
    sys.exit(main())
