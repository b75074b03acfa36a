"""Variants of a problem, solved one after the other in a shared time.

Each begins with the best schedule of those before it.
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
from poetmodel.solver.outcome import accepted
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.backends import OptionValue
    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedProblem:
    """A changed problem, and how to solve it."""

    problem: Problem
    gap: float = 1e-4
    """Gap tolerance; 1 to end with the first schedule."""
    paging_first: bool = False
    """Whether half of the time is for a schedule of the minimum RAM by paging alone, which is often
    the least RAM and found soon."""


def solve_variants(
    variants: Sequence[ChangedProblem],
    *,
    time_limit: float,
    least_s: float = 0.1,
    backend: str = "highs",
    threads: int = 1,
    solver_options: Mapping[str, OptionValue] | None = None,
    start: Schedule | None = None,
) -> list[SolveResult]:
    """Solve variants of a problem, those that allow less before those that allow more.

    A variant begins with the best schedule of those before it, or with `start` where none is valid.
    `time_limit` is the wall time for all of them; what one leaves, the next ones share equally.
    Each has `least_s` above 0 even if none is left [s]. After Ctrl-C
    the results are those so far.
    """
    ends_s = time.monotonic() + time_limit
    search = partial(solve, backend=backend, threads=threads, solver_options=solver_options)
    results: list[SolveResult] = []
    for index, variant in enumerate(variants):
        best = _best(results, variant.problem) or start
        left_s = ends_s - time.monotonic()
        share_s = max(least_s, left_s / (len(variants) - index))
        if variant.paging_first:
            share_s /= 2
            tight = _paged_at_minimum_ram(variant.problem)
            best = search(tight, time_limit=share_s, gap=1.0).schedule or best
        result = search(variant.problem, time_limit=share_s, gap=variant.gap, start=best)
        results.append(result)
        if result.termination == Termination.INTERRUPTED:
            break
    return results


def of_graph(schedule: Schedule, graph: Graph) -> Schedule:
    """Return a schedule as one of a graph that has the same nodes and tensors."""
    identity = schedule.identity
    if identity is None or identity.sha256 == graph.sha256:
        return schedule
    return replace(schedule, identity=GraphIdentity.of(graph))


def _best(results: Sequence[SolveResult], problem: Problem) -> Schedule | None:
    """Return the best schedule so far that is valid for a problem, by its objective."""
    known = (
        accepted(problem, of_graph(result.schedule, problem.graph))
        for result in results
        if result.schedule is not None and result.problem.minimize == problem.minimize
    )
    valid = [candidate for candidate in known if candidate is not None]
    return min(valid, key=lambda candidate: candidate.value).schedule if valid else None


def _paged_at_minimum_ram(problem: Problem) -> Problem:
    ram = min(MAX_BYTES, max(1, problem.floor.bytes + problem.resident_bytes))
    return replace(problem, ram=ram, minimize=Quantity.ENERGY, recompute=False)
