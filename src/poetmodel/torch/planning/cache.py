"""Schedules of earlier solves, cached by problem; a cached schedule is always verified again."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel import __version__
from poetmodel.errors import InputError
from poetmodel.result import Termination
from poetmodel.schedule import Schedule
from poetmodel.schedule.identity import GraphIdentity
from poetmodel.solver.facade import DEFAULT_FORMULATION
from poetmodel.solver.outcome import make_valid_candidate
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.torch.cache import digest

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.torch.cache import Cache

_SPANS: Final = ("R", "kept", "stored", "M_in", "M_out")
"""Names of a schedule's fields in the cache; spans of stages replace long lists of pairs."""


def is_final_result(result: SolveResult, *, time_limit_s: float) -> bool:
    """Return whether to use a cached result instead of solving for `time_limit_s` seconds."""
    if result.termination == Termination.TIME_LIMIT:
        return (result.time_limit_s or 0.0) >= time_limit_s
    return result.termination != Termination.INTERRUPTED


class CachedSchedules:
    """Reads and stores schedules of problems in a cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def load_result(self, problem: Problem, *, gap: float) -> SolveResult | None:
        """Return the cached result of a problem, with its schedule verified now; None if invalid.

        A proof with a larger gap than `gap` becomes ``interrupted``: the result is not final.
        """
        content = self._cache.read("schedule", _problem_key(problem))
        if content is None:
            return None
        try:
            decisions: dict[str, Any] = {
                name: [tuple(map(int, span)) for span in content["schedule"][name]]
                for name in _SPANS
            }
            schedule = Schedule.from_spans(
                **decisions,
                resident=map(int, content["schedule"]["resident"]),
                identity=GraphIdentity.from_graph(problem.graph),
            )
            candidate = make_valid_candidate(problem, schedule)
            request = Request(time_limit_s=content["time_limit_s"], gap=gap)
            termination = Termination(content["termination"])
            search = Search(
                problem=problem,
                request=request,
                termination=termination,
                best=candidate,
                bound=float(content["bound"]) - problem.objective.baseline,
                versions=content["versions"],
            )
        except (InputError, TypeError, ValueError, KeyError, IndexError):
            return None
        if candidate is None:
            return None
        result = search.result(formulation=DEFAULT_FORMULATION)
        if result.termination == Termination.STALLED != termination:
            # The solve stopped at a wider gap: the caller solves again.
            return replace(result, termination=Termination.INTERRUPTED)
        return result

    def store(self, result: SolveResult) -> None:
        """Store the result of a solve with a time limit, unless the cached one is better."""
        problem, schedule = result.problem, result.schedule
        if schedule is None or result.time_limit_s is None:
            return
        cached_result = self.load_result(problem, gap=result.requested_gap)
        if cached_result is not None and rank_key(cached_result) < rank_key(result):
            return
        content = {
            "schedule": {name: getattr(schedule, name) for name in (*_SPANS, "resident")},
            "bound": result.proven_bound,
            "termination": str(result.termination),
            "time_limit_s": result.time_limit_s,
            "versions": dict(result.versions),
        }
        self._cache.write("schedule", _problem_key(problem), content)


def rank_key(result: SolveResult) -> tuple[float, float]:
    """Return (value, gap), smaller is better; missing ones are infinite and 1."""
    value, gap = result.value, result.gap
    return (float("inf") if value is None else value, 1.0 if gap is None else gap)


def _problem_key(problem: Problem) -> str:
    device = problem.costs.device
    costs = [problem.table.to_dict(), None if device is None else str(asdict(device))]
    return digest(__version__, problem.graph.sha256, problem.to_dict(), costs)
