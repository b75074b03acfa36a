"""Solve variants of a problem one after the other within a common time limit.

A solve starts from the best schedule of earlier solves that is valid for its variant, unless the
variant tries paging first and finds a schedule.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.problem import Problem, Quantity
from poetmodel.result import SolveResult, Termination
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.solver.facade import execute
from poetmodel.solver.outcome import make_valid_candidate
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.graph import Graph
    from poetmodel.solver.request import SearchOptions

MIN_SOLVE_S: Final = 0.1
"""Minimum time of the solve of a variant [s]."""


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
    search: SearchOptions,
    *,
    min_s: float = MIN_SOLVE_S,
    start: Schedule | None = None,
) -> list[SolveResult]:
    """Solve variants of a problem in the given order, each from the best valid schedule so far.

    Variants with stricter limits should come first: their schedules are valid for looser ones.
    The time of `search` is that of all, divided equally; each has at least `min_s` [s]. With
    `tries_paging_first`, up to half of a variant's time goes to a schedule without recomputation.
    After Ctrl-C, the list is shorter.
    """
    end_s = time.monotonic() + search.time_limit_s
    results: list[SolveResult] = []
    for index, variant in enumerate(variants):
        best_schedule = _best_valid_schedule(results, variant.problem) or start
        remaining_s = end_s - time.monotonic()
        limit_s = max(min_s, remaining_s / (len(variants) - index))
        if variant.tries_paging_first:
            limit_s /= 2
            min_ram_problem = _paging_problem_at_min_ram(variant.problem)
            request = replace(search, time_limit_s=limit_s, gap=1.0).start()
            paging_result = execute(min_ram_problem, request)
            if paging_result.termination == Termination.INTERRUPTED:
                break
            best_schedule = paging_result.schedule or best_schedule
        request = replace(search, time_limit_s=limit_s, gap=variant.gap).start()
        result = execute(variant.problem, request, best_schedule)
        results.append(result)
        if result.termination == Termination.INTERRUPTED:
            break
    return results


def with_graph_identity(schedule: Schedule, graph: Graph) -> Schedule:
    """Return the schedule with the identity of `graph`, which has the same nodes and tensors."""
    identity = schedule.identity
    if identity is None or identity.sha256 == graph.sha256:
        return schedule
    return replace(schedule, identity=GraphIdentity.from_graph(graph))


def _best_valid_schedule(results: Sequence[SolveResult], problem: Problem) -> Schedule | None:
    """Return the best valid schedule for `problem` of results that minimize the same quantity."""
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
    """Return the problem that minimizes energy in the minimum RAM, without recomputation."""
    ram = min(MAX_BYTES, max(1, problem.floor.bytes + problem.resident_bytes))
    return replace(problem, ram=ram, minimize=Quantity.ENERGY, recompute=False)
