"""Solve variants of a problem one after the other within a common time limit.

Each solve starts from the best schedule of the previous ones.
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
    """A changed problem, and the options of its solve."""

    problem: Problem
    gap: float = 1e-4
    """Gap tolerance; 1 to stop at the first schedule."""
    paging_first: bool = False
    """Whether half of the time is for a paging-only schedule at the minimum RAM. That is often the
    smallest possible RAM, and soon found."""


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
    """Solve variants of a problem in the given order, each from the best schedule so far.

    Variants with stricter limits should precede those with looser ones, so that schedules of
    earlier variants are valid for later ones. If none is valid, a variant starts from `start`.
    `time_limit` is the wall time for all variants, divided equally among those that remain [s].
    Each has at least `min_s`, which is above 0 [s]. After Ctrl-C, the list has the results so far.
    """
    ends_s = time.monotonic() + time_limit
    search = partial(solve, backend=backend, threads=threads, solver_options=solver_options)
    results: list[SolveResult] = []
    for index, variant in enumerate(variants):
        best = _best_valid(results, variant.problem) or start
        left_s = ends_s - time.monotonic()
        limit_s = max(min_s, left_s / (len(variants) - index))
        if variant.paging_first:
            limit_s /= 2
            min_ram_problem = _page_only_at_min_ram(variant.problem)
            best = search(min_ram_problem, time_limit=limit_s, gap=1.0).schedule or best
        result = search(variant.problem, time_limit=limit_s, gap=variant.gap, start=best)
        results.append(result)
        if result.termination == Termination.INTERRUPTED:
            break
    return results


def with_graph_identity(schedule: Schedule, graph: Graph) -> Schedule:
    """Return a schedule with the identity of a graph that has the same nodes and tensors."""
    identity = schedule.identity
    if identity is None or identity.sha256 == graph.sha256:
        return schedule
    return replace(schedule, identity=GraphIdentity.of(graph))


def _best_valid(results: Sequence[SolveResult], problem: Problem) -> Schedule | None:
    """Return the best schedule of earlier results that is valid for a problem; None without one.

    Only results with the same minimized quantity are considered.
    """
    candidates = (
        make_valid_candidate(problem, with_graph_identity(result.schedule, problem.graph))
        for result in results
        if result.schedule is not None and result.problem.minimize == problem.minimize
    )
    valid = [candidate for candidate in candidates if candidate is not None]
    return min(valid, key=lambda candidate: candidate.value).schedule if valid else None


def _page_only_at_min_ram(problem: Problem) -> Problem:
    """Return the problem of least energy by paging alone, with the minimum RAM as budget."""
    ram = min(MAX_BYTES, max(1, problem.floor.bytes + problem.resident_bytes))
    return replace(problem, ram=ram, minimize=Quantity.ENERGY, recompute=False)
