"""Solve a task: find a first schedule, choose the unit of the objective, and prove a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from poetmodel.clock import limit_time
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.heuristics.greedy import construct, keep_all_if_within_budgets, page_everything
from poetmodel.heuristics.segments import SegmentSearch
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.outcome import (
    Candidate,
    better_candidate,
    is_gap_closed,
    is_tight,
    make_valid_candidate,
)
from poetmodel.solver.request import GRACE_S, Request
from poetmodel.solver.search import CUT_SHORT, Search
from poetmodel.solver.statement import restate, with_bytes_below
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.policy import Policy


RETRY_NOTE: Final = (
    "a verified schedule refutes the proof of the solver; the problem is solved again without "
    "presolve"
)
REFINABLE: Final = frozenset({Termination.PROVED, Termination.STALLED})
"""Terminations after which an open gap may be due to a solver's tolerances."""
EARLY_NODES: Final = 20_000
"""Number of nodes from which the first division into segments is followed by the proof: each other
division takes a second for 80,000 nodes, its verification four, and greedy repair 15."""


class StartCheck(NamedTuple):
    """Result of a task's check of a first schedule, beyond the limits of the problem."""

    is_solution: bool
    """Whether the schedule decides all variables of the task and satisfies all added rows."""
    model_objective: ModelObjective | None = None
    """Value of the schedule in a user-defined objective of a model; None without one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem with the formulation that solves it; `ModelTask` has a user's model.

    If time is a makespan, it solves surrogates of its problem.
    """

    problem: Problem
    formulation: str
    """Name of the formulation; for a model, the formulation by which `build` made it."""
    can_restate: ClassVar[bool] = True
    """Whether valid schedules of the problem solve the task, and its limits and objective can be
    replaced; False for models, which may have added rows."""

    @property
    def is_exact(self) -> bool:
        """Whether bounds and infeasibility proved by the formulation hold for the problem."""
        return self.formulation != "paper"

    @property
    def planned_problem(self) -> Problem:
        """The problem whose schedules are planned: `problem`, or a surrogate in `ModelTask`."""
        return self.problem

    @property
    def reduction(self) -> str:
        """Text on how the formulation reduced a graph that it cannot represent; empty otherwise."""
        if self.formulation != "paper":
            return ""
        from poetmodel.model.paper import describe_reduction

        return describe_reduction(self.problem.graph) or ""

    def check_start(self, start: Schedule) -> StartCheck:  # noqa: ARG002 - models have added rows
        """Accept a schedule: only a model adds rows or an objective to its problem."""
        return StartCheck(is_solution=True)

    def solve(self, search: Search, start: Schedule | None) -> None:
        """Solve the problem of `search`, that of the task or a surrogate.

        Starts from the best of `start`, if valid, and heuristics. If a verified schedule refutes
        the proof, the problem is solved again without presolve; a second refutation drops the
        proof.
        """
        self._solve_once(search, start)
        if not search.is_refuted():
            return
        search.drop_proof()
        if search.request.remaining_s() <= 0 or search.best is None:
            return
        search.log.append(f"poetmodel: {RETRY_NOTE}\n")
        search.resume(presolve=False)
        self._solve_once(search, search.best.schedule)
        if search.is_refuted():
            search.drop_proof()

    def _solve_once(self, search: Search, start: Schedule | None) -> None:
        """Prove a bound, starting with the best of `start` and schedules by heuristics.

        Each schedule counts at once, unless it may violate rows that a user added to a model.
        """
        problem, request = search.problem, search.request
        first: Candidate | None = None
        counts = self.can_restate and self.is_exact
        try:
            first = make_valid_candidate(problem, start)  # without a limit, so that it is not lost
            with limit_time(request.remaining_s() + GRACE_S):
                for known in self._better_candidates(search, first, accepts=counts):
                    first = known
            if counts and first is not None:
                if _is_known_optimal(problem, first):
                    search.best = better_candidate(search.best, first)
                    search.bound = first.value
                    search.end(Termination.PROVED)
                    return
                search.accept(first)
                if search.stop_reason is not None:
                    search.end(search.stop_reason)
                    return
            if self.is_exact:
                self._prove_in_fine_units(search, first)
            else:
                self.prove(search, first)
        except KeyboardInterrupt:
            search.end(Termination.INTERRUPTED)
        except TimeLimitError:
            reason = (
                f"no schedule of the {len(problem.graph.nodes):,} nodes was made within the time "
                f"limit of {format_seconds(request.time_limit_s)}; raise the limit, or coarsen the "
                "graph"
            )
            search.end(Termination.TIME_LIMIT, reason)
        except TooLargeError as error:
            search.end(Termination.STALLED, str(error))
            search.best = search.best or (first if self.can_restate else None)
        if search.best is None and self.can_restate and search.termination in CUT_SHORT:
            search.best = first

    def _better_candidates(
        self, search: Search, best: Candidate | None, *, accepts: bool
    ) -> Iterator[Candidate | None]:
        """Yield the best of `best` and of heuristics so far, which count at once if `accepts`."""
        problem = search.problem
        for candidate in _heuristic_candidates(problem, search.request, best):
            best = better_candidate(best, candidate)
            yield best
            if accepts and best is not None and not _is_known_optimal(problem, best):
                search.accept(best)
            if search.stop_reason is not None:
                break
        if best is None:
            yield self._construct_restricted(problem, search.request)

    def _construct_restricted(self, problem: Problem, request: Request) -> Candidate | None:
        """Construct a schedule without paging or, if that is not valid, without recomputation.

        Such schedules meet many user-defined constraints. None without such constraints.
        """
        if not (self.can_restate and problem.constraints):
            return None
        max_s = request.policy.greedy_time_ratio * request.time_limit_s
        for restricted_problem in (
            replace(problem, paging=False),
            replace(problem, recompute=False),
        ):
            candidate = make_valid_candidate(problem, construct(restricted_problem, max_s=max_s))
            if candidate is not None:
                return candidate
        return None

    def _prove_in_fine_units(self, search: Search, first: Candidate | None) -> None:
        """Prove a bound; while the gap is open, solve again in a finer unit of the objective.

        A solver sees differences only above an absolute tolerance: a small value becomes the new
        reference; one in bytes is solved again for "at least one byte better".
        """
        problem, policy = search.problem, search.request.policy
        objective, stated_problem = problem.objective, problem
        if (
            first is not None
            and self.can_restate
            and not _is_resolvable(problem, first.value, policy)
        ):
            stated_problem = restate(problem, reference_value=first.value)
        child = search.child(stated_problem, best=search.best)
        self.prove(child, first)
        search.end_as(child)
        search.is_infeasible = child.is_infeasible
        search.prove(child.bound)
        while search.termination in REFINABLE and search.request.remaining_s() > 0:
            best = search.best
            if best is None or best.violations or search.is_infeasible:
                return
            if is_gap_closed(problem, best.value, search.bound, search.request.gap):
                return
            reference, start = stated_problem.objective.reference, None
            if objective.is_sum and (reference is None or best.value < reference / 2):
                stated_problem, start = restate(problem, reference_value=best.value), best
            elif objective.is_in_bytes:
                stated_problem = with_bytes_below(stated_problem, round(best.value))
            else:
                return
            known_before = search.best_known()
            child = search.child(stated_problem, best=start)
            try:
                self.prove(child, start)
            except KeyboardInterrupt:
                search.termination = Termination.INTERRUPTED
                return
            except TimeLimitError:
                search.termination = Termination.TIME_LIMIT
                return
            search.end_as(child)
            # Below the known value, the bound of the restated problem is one of this problem.
            search.prove(best.value if child.is_infeasible else min(child.bound, best.value))
            if start is None and search.best_known() == known_before:
                return

    def prove(self, search: Search, start: Candidate | None) -> None:
        """Solve the problem of a search by the formulation, from the valid schedule `start`."""
        if self.formulation == "lazy":
            from poetmodel.solver import lazy

            with limit_time(search.request.remaining_s() + GRACE_S):
                lazy.prove(search)
            _fall_back_to_compact(search)
            return
        from poetmodel.solver.monolithic import prove_formulation

        prove_formulation(search, self.formulation, start=start)


def _fall_back_to_compact(search: Search) -> None:
    """Solve with ``compact`` if ``lazy`` stalled and stages are limited or decisions rewarded.

    Groups cannot represent some per-stage constraints and rewards.
    """
    problem, request = search.problem, search.request
    has_stage_terms = bool(problem.stage_limits) or any(any(column) for column in problem.rewards)
    if (
        search.termination != Termination.STALLED
        or not has_stage_terms
        or request.remaining_s() <= 0
    ):
        return
    from poetmodel.model.building import estimate_build_s
    from poetmodel.solver.monolithic import prove_formulation

    if estimate_build_s(problem, "compact") > request.remaining_s():
        return
    search.stop_reason = None
    try:
        prove_formulation(search, "compact", start=search.best)
    except KeyboardInterrupt:
        search.termination = Termination.INTERRUPTED
    except TooLargeError:
        return


def _is_known_optimal(problem: Problem, candidate: Candidate) -> bool:
    """Return whether the value of a candidate reaches the bound that is known without a solve."""
    return is_tight(problem, candidate.value, problem.objective.known_bound)


def _is_resolvable(problem: Problem, value: float, policy: Policy) -> bool:
    """Return whether the unit of the objective suits `value`, or the unit has no reference."""
    if value <= 0 or not problem.objective.is_sum:
        return True
    return policy.min_units <= value / problem.objective.unit <= policy.max_units


def _heuristic_candidates(
    problem: Problem, request: Request, start: Candidate | None
) -> Iterator[Candidate | None]:
    """Yield schedules by greedy repair and by segments, if valid; in need by paging everything.

    On 36 problems of 200 to 8,000 nodes greedy repair was always better, and mostly quicker.
    """
    is_large = len(problem.graph.nodes) >= EARLY_NODES and SegmentSearch.applies_to(problem)
    best = start
    for candidate in (_large_candidates if is_large else _small_candidates)(problem, request):
        best = better_candidate(best, candidate)
        yield candidate
    # With page_everything, the peak is the minimum RAM.
    if best is None or not problem.objective.is_sum:
        yield make_valid_candidate(problem, page_everything(problem))


def _small_candidates(problem: Problem, request: Request) -> Iterator[Candidate | None]:
    """Yield the schedule by greedy repair, and those by segments in need or if RAM is minimized."""
    greedy = _greedy_candidate(problem, request)
    yield greedy
    if (greedy is None or not problem.objective.is_sum) and SegmentSearch.applies_to(problem):
        segments = SegmentSearch(problem)
        yield _segment_candidate(segments, segments.find_best, request)
        yield _segment_candidate(segments, segments.improve, request)


def _large_candidates(problem: Problem, request: Request) -> Iterator[Candidate | None]:
    """Yield the schedule of the first division into segments; in need others, and greedy repair.

    The repair of a linear relaxation's solution is quicker than that of keep-all, and better.
    """
    segments = SegmentSearch(problem)
    first = _segment_candidate(segments, segments.find_first, request)
    yield first
    if first is not None and problem.objective.is_sum:
        return
    divided = better_candidate(first, _segment_candidate(segments, segments.find_best, request))
    yield divided
    greedy = _greedy_candidate(problem, request)
    yield greedy
    if divided is not None and better_candidate(divided, greedy) is divided:
        yield _segment_candidate(segments, segments.improve, request)


def _segment_candidate(
    segments: SegmentSearch, search: Callable[[], None], request: Request
) -> Candidate | None:
    """Return the best schedule after `search`; None if it is invalid, too large, late or known."""
    known = segments.best
    try:
        with limit_time(request.remaining_s() + GRACE_S):
            search()
            if segments.best is known:
                return None
            return make_valid_candidate(segments.problem, segments.schedule())
    except (TimeLimitError, TooLargeError):
        return None


def _greedy_candidate(problem: Problem, request: Request) -> Candidate | None:
    """Return the better schedule of keep-all and `construct`; None if neither is valid."""
    policy = request.policy
    keep_all = make_valid_candidate(problem, keep_all_if_within_budgets(problem))
    if keep_all is not None and _is_known_optimal(problem, keep_all):
        return keep_all
    try:
        with limit_time(max(request.remaining_s() * policy.max_greedy_time_ratio, GRACE_S)):
            schedule = construct(problem, max_s=request.time_limit_s * policy.greedy_time_ratio)
            return better_candidate(keep_all, make_valid_candidate(problem, schedule))
    except (TimeLimitError, TooLargeError):  # on graphs of thousands of nodes
        return keep_all
