"""Solve variants of a problem one after the other within a common time limit.

A solve starts from the best schedule of earlier solves that is valid for its variant, unless the
variant tries paging first and finds a schedule.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from poetmodel.problem import Problem, Quantity
from poetmodel.result import SolveResult, Termination
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.solver.facade import solve
from poetmodel.solver.outcome import make_valid_candidate
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.backends import OptionValue
    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedProblem:
    """A variant of a problem, and the options of its solve."""

    problem: Problem
    gap: float = 1e-4
    """Gap tolerance; 1 to stop at the first schedule."""
    tries_paging_first: bool = False
    """Whether up to half of the time is for a first schedule without recomputation at the minimum
    RAM. Such a schedule often exists and is found fast."""


def solve_variants(
    variants: Sequence[ChangedProblem],
    *,
    time_limit: float,
    min_s: float = 0.1,
    backend: str = "highs",
    threads: int = 1,
    solver_options: Mapping[str, OptionValue] | None = None,
    start: Schedule | None = None,
) -> list[SolveResult]:
    """Solve variants of a problem in the given order, each from the best valid schedule so far.

    Variants with stricter limits should precede those with looser limits, so that schedules of
    earlier variants with the same minimized quantity are valid for later ones. If none is valid, a
    variant starts from `start`. A variant with `tries_paging_first` spends up to half of its time
    on a schedule without recomputation at the minimum RAM. If that search finds a schedule, the
    variant starts from it.

    `time_limit` is the wall time for all variants, divided equally among the remaining ones [s].
    Each has at least `min_s`, which is above 0 [s]. After Ctrl-C, the list ends with the result of
    the interrupted variant, or before it if Ctrl-C ended its search with paging.
    """
    end_s = time.monotonic() + time_limit
    solve_problem = partial(solve, backend=backend, threads=threads, solver_options=solver_options)
    results: list[SolveResult] = []
    for index, variant in enumerate(variants):
        best_schedule = _best_valid_schedule(results, variant.problem) or start
        remaining_s = end_s - time.monotonic()
        limit_s = max(min_s, remaining_s / (len(variants) - index))
        if variant.tries_paging_first:
            limit_s /= 2
            min_ram_problem = _paging_problem_at_min_ram(variant.problem)
            paging_result = solve_problem(min_ram_problem, time_limit=limit_s, gap=1.0)
            if paging_result.termination == Termination.INTERRUPTED:
                break
            best_schedule = paging_result.schedule or best_schedule
        result = solve_problem(
            variant.problem, time_limit=limit_s, gap=variant.gap, start=best_schedule
        )
        results.append(result)
        if result.termination == Termination.INTERRUPTED:
            break
    return results


def with_graph_identity(schedule: Schedule, graph: Graph) -> Schedule:
    """Return the schedule with the identity of `graph`, which has the same nodes and tensors.

    A schedule without an identity is returned unchanged.
    """
    identity = schedule.identity
    if identity is None or identity.sha256 == graph.sha256:
        return schedule
    return replace(schedule, identity=GraphIdentity.from_graph(graph))


def _best_valid_schedule(results: Sequence[SolveResult], problem: Problem) -> Schedule | None:
    """Return the schedule of earlier results that is valid and best for `problem`, or None.

    Only results with the same minimized quantity are considered. Their schedules are verified and
    valued in `problem`; of equal values, the first one is returned.
    """
    candidates = (
        make_valid_candidate(problem, with_graph_identity(result.schedule, problem.graph))
        for result in results
        if result.schedule is not None and result.problem.minimize == problem.minimize
    )
    valid_candidates = [candidate for candidate in candidates if candidate is not None]
    return (
        min(valid_candidates, key=lambda candidate: candidate.value).schedule
        if valid_candidates
        else None
    )


def _paging_problem_at_min_ram(problem: Problem) -> Problem:
    """Return the problem that minimizes energy in the minimum RAM, without recomputation.

    All other limits remain.
    """
    ram = min(MAX_BYTES, max(1, problem.floor.bytes + problem.resident_bytes))
    return replace(problem, ram=ram, minimize=Quantity.ENERGY, recompute=False)
