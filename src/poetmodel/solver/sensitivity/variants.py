"""Solve variants of a problem one after the other within a common time limit."""

from __future__ import annotations

import time
from dataclasses import replace
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


class Variants:
    """Solves of `n` variants of a problem, one after the other, within the time of a search.

    Each has an equal part of the time that remains, at least `min_s` [s]. Variants with stricter
    limits should come first: their schedules are valid for looser ones.
    """

    def __init__(
        self,
        n: int,
        search: SearchOptions,
        *,
        min_s: float = MIN_SOLVE_S,
        start: Schedule | None = None,
        shares_schedules: bool = True,
    ) -> None:
        self._n_left, self._min_s = n, min_s
        self._end_s = time.monotonic() + search.time_limit_s
        self._start, self._shares_schedules = start, shares_schedules
        self._search = search
        self._results: list[SolveResult] = []
        self.is_interrupted = False
        """Whether Ctrl-C has ended a solve, after which none begins."""

    def skip(self) -> None:
        """Leave out a variant: its time is for the next ones."""
        self._n_left -= 1

    def solve(
        self,
        problem: Problem,
        *,
        gap: float = 1e-4,
        start: Schedule | None = None,
        tries_paging_first: bool = False,
    ) -> SolveResult | None:
        """Solve the next variant from the best schedule so far that is valid for it, or `start`.

        A `gap` of 1 ends at the first schedule. With `tries_paging_first`, up to half of the time
        is for one without recomputation at the minimum RAM, which often exists and is found fast.
        None after Ctrl-C; the interrupted solve has a result, unless it preceded the variant's own.
        """
        limit_s = max(self._min_s, (self._end_s - time.monotonic()) / self._n_left)
        self._n_left -= 1
        if self.is_interrupted:
            return None
        start = start or self._start
        if self._shares_schedules:
            start = _best_valid_schedule(self._results, problem) or start
        if tries_paging_first:
            limit_s /= 2
            paging_result = self._solve_within(limit_s, _paging_problem_at_min_ram(problem), 1.0)
            if paging_result.termination == Termination.INTERRUPTED:
                return None
            start = paging_result.schedule or start
        result = self._solve_within(limit_s, problem, gap, start)
        self._results.append(result)
        return result

    def solve_uninterrupted(
        self, problem: Problem, *, gap: float, start: Schedule | None = None
    ) -> SolveResult:
        """Solve the next variant as `solve` does; Ctrl-C raises `KeyboardInterrupt`."""
        result = self.solve(problem, gap=gap, start=start)
        if result is None or self.is_interrupted:
            raise KeyboardInterrupt
        return result

    def _solve_within(
        self, limit_s: float, problem: Problem, gap: float, start: Schedule | None = None
    ) -> SolveResult:
        request = replace(self._search, time_limit_s=limit_s, gap=gap).start()
        result = execute(problem, request, start)
        self.is_interrupted = result.termination == Termination.INTERRUPTED
        return result


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
