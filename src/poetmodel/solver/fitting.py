"""Find a schedule whose plan fits in an arena within the budget, with less RAM if necessary."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack

from poetmodel.clock import limit_time as limit_execution
from poetmodel.device import Costs, StorageMode
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.heuristics.greedy import construct, page_everything, refit
from poetmodel.heuristics.neighbourhood import improve_schedule
from poetmodel.placement import place
from poetmodel.plan.alignment import ALIGNMENT, align_sizes, check_alignment
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem, Quantity
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity, Schedule, simulate
from poetmodel.solver.facade import solve as solve_by_default
from poetmodel.solver.outcome import make_valid_candidate
from poetmodel.solver.request import Request, SearchKeywords
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena

FIRST_SOLVE_RATIO: Final = 0.6
"""Fraction of the time limit for the first solve. The rest is for plans, arenas and further solves:
each has half of the remaining time if the first arena is too large, else one has all of it."""
QUICK_S: Final = 5.0
"""Maximum time of one repair or greedy construction, and of the overrun of a local search [s]."""
QUICK_DIVISORS: Final = (48, 12)
"""Divisors of the RAM whose quotients are the reductions for the quick heuristics: the first to
repair the first schedule or to page every tensor, the second to construct a greedy schedule."""
MARGIN_DIVISOR: Final = 256
"""Divisor of the RAM whose quotient is a margin. If the first solve reached its time limit, the RAM
is reduced by the margin in addition to the excess, because a further solve would cost more than the
margin."""
MAX_SOLVED_GAP: Final = 0.03
"""Largest gap of the first solve after which a smaller budget is solved, too. Above it, a proof is
out of reach in the remaining time, and a local search finds better schedules."""
MAX_PLACING_S: Final = 10.0
"""Maximum time to place one plan in an arena [s]."""


class Fitted(NamedTuple):
    """A result with the plan of its schedule and an arena within the usable RAM."""

    result: SolveResult
    """Result for the stated problem; without a schedule, it has the reason."""
    plan: Plan | None
    """The plan; None without a valid schedule."""
    arena: Arena | None
    """The arena of the plan, no larger than `Problem.usable_ram_bytes`; None without a valid
    schedule."""


def fit_arena(
    problem: Problem,
    *,
    mode: StorageMode | str,
    alignment: int = ALIGNMENT,
    solve: Callable[..., SolveResult] = solve_by_default,
    max_solves: int = 12,
    time_limit: float = 60.0,
    available_bytes: int | None = None,
    **options: Unpack[SearchKeywords],
) -> Fitted:
    """Solve a problem, plan its schedule and place all copies in an arena within the RAM budget.

    If the arena exceeds the budget, the problem is solved again with sizes rounded up and smaller
    budgets, until the arena fits, no budget is left to try, solves or time run out, or a solve is
    interrupted.

    Parameters
    ----------
    problem : Problem
        The problem. The arena has at most its `usable_ram_bytes`.
    mode : {'blocking', 'dma'}
        How the device's storage moves tensors.
    alignment : int
        Offsets are multiples of this power of two [B].
    solve : callable
        The function that solves a problem, with keywords ``time_limit`` and `options`. Later solves
        may have another ``start``, or none.
    max_solves : int
        Maximum number of solves until an arena fits, local searches included. If the first arena
        fits, one more may improve the schedule.
    time_limit : float
        Wall time for all solves, plans and arenas [s].
    available_bytes : int, optional
        Maximum RAM for tensors that the reason of a failure may recommend [B]. Default: the RAM of
        the device minus `Problem.resident_bytes`; without a device, no maximum.
    **options
        Other keyword arguments of `solve`.

    Returns
    -------
    Fitted
        Result, plan and arena. The bound of the result is that of the stated problem, so its gap
        includes the cost of the arena. Without a valid schedule, plan and arena are None. If no
        arena that fits was found, the result has no schedule either. A result without a schedule
        has the reason; its status is ``infeasible`` if it is proved that there is no schedule, or
        that no arena fits. In the latter case, the problem of the result has sizes rounded up to
        multiples of the alignment, so that its explanation suggests RAM that is enough for these.

    Raises
    ------
    InputError
        If the alignment is not a power of two (`PlanError`), or the time limit is invalid. Also if
        tensors may be paged and time is a makespan of overlapping transfers, but the mode is
        ``blocking``.
    ValueError
        If the mode is unknown.

    Notes
    -----
    If the first arena is too large, further solves round sizes up to the alignment, as in the
    arena: if that problem is infeasible, no arena fits. Arenas differ between schedules, and a
    smaller budget may yield a larger arena. If rounding changes a size, the first further solve has
    the stated budget, minus the margin of `MARGIN_DIVISOR` if the first solve reached its limit.
    After an arena that is too large, the next budget is the smaller of its budget and its
    schedule's peak, minus that margin and the smallest excess of all arenas so far, because a
    single arena may be large by chance. Once a budget yields no valid schedule and plan, larger
    budgets follow by bisection between that budget and the smaller of budget and peak of the last
    arena that was too large.

    The first solve has three fifths of the time. If its arena fits and the solve reached its limit,
    the remaining time is used to improve the schedule. If the arena is too large, each further
    solve has half of the remaining time. A further solve is only a local search, without a bound,
    if the first solve reached its limit with a wide gap, unless time is a makespan. A plan and its
    arena are made even after the time limit, and improved while time remains. If time runs out
    before an arena fits, schedules of fast heuristics with less RAM are tried. If `solve` is a
    published method, its schedules are neither improved nor replaced by heuristics. Errors of
    `solve` are passed on.
    """
    check_alignment(alignment)
    mode, request = StorageMode(mode), Request(time_limit_s=time_limit)
    if mode == StorageMode.BLOCKING and problem.is_overlapping and problem.can_page:
        raise InputError(
            "deadline_counts: 'overlap' is the time of a plan whose transfers overlap computation, "
            "but in the plan that gets addresses the core waits for each; state 'serial'"
        )
    device = problem.costs.device
    if available_bytes is None and device is not None:
        available_bytes = device.ram_bytes - problem.resident_bytes
    fitting_search = _FittingSearch(problem, mode, alignment, solve, options, request)
    fitting_search.available_bytes = available_bytes
    return fitting_search.find_fitting(max_solves)


def plan_and_place(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode,
    ram_budget_bytes: int | None,
    arena_limit_bytes: int | None = None,
    alignment: int = ALIGNMENT,
    seed: int = 0,
    may_delay_transfers: bool = True,
    time_limit: float | None = None,
) -> tuple[Plan, Arena]:
    """Plan a schedule and place all copies of the plan in an arena, which may exceed its limit.

    The plan may use the RAM budget [B], at least the peak of the schedule. With
    `may_delay_transfers`, smaller budgets are tried if the arena exceeds `arena_limit_bytes`, by
    default the budget. After `time_limit` [s], plan and arena are not improved any more.
    """
    end_s = time.monotonic() + (math.inf if time_limit is None else time_limit)
    limit_bytes = ram_budget_bytes if arena_limit_bytes is None else arena_limit_bytes
    peak_bytes = simulate(graph, costs, schedule).peak_ram_bytes
    budget_bytes = ram_budget_bytes
    while True:
        plan = make_plan(
            graph,
            costs,
            schedule,
            mode=mode,
            ram_budget_bytes=budget_bytes,
            time_limit=end_s - time.monotonic(),
        )
        placing_limit_s = min(MAX_PLACING_S, end_s - time.monotonic())
        arena = place(graph, plan, alignment=alignment, seed=seed, time_limit=placing_limit_s)
        if limit_bytes is None or budget_bytes is None:
            return plan, arena
        fits_limit = arena.bytes <= limit_bytes
        if (
            fits_limit
            or budget_bytes <= peak_bytes
            or mode != StorageMode.DMA
            or not may_delay_transfers
        ):
            return replace(plan, ram_budget_bytes=limit_bytes), arena
        excess_bytes = arena.bytes - limit_bytes if time.monotonic() < end_s else budget_bytes
        budget_bytes = max(peak_bytes, budget_bytes - excess_bytes)


class _FittingSearch:
    """The search for a schedule whose plan fits in an arena of the usable RAM."""

    def __init__(
        self,
        problem: Problem,
        mode: StorageMode,
        alignment: int,
        solve: Callable[..., SolveResult],
        options: SearchKeywords,
        request: Request,
    ) -> None:
        self.problem, self.mode, self.alignment = problem, mode, alignment
        self.solve, self.request = solve, request
        self.start = options.get("start")
        """Start of the first solve only, because later solves may have other sizes."""
        self.options = options.copy()
        self.options.pop("start", None)
        self.usable_bytes = problem.usable_ram_bytes
        self.available_bytes: int | None = None
        """Maximum RAM for tensors that a hint may recommend; None if unknown."""
        self.arena_bytes = 0
        """Size of the last arena; 0 before the first."""
        self.smallest_arena_bytes: int | None = None
        """Size of the smallest arena so far; None before the first."""
        self.plan_and_place_s = 0.0
        """Time to plan and place the last schedule [s]; 0 before the first."""

    def find_fitting(self, max_solves: int) -> Fitted:
        """Solve, with smaller RAM budgets if the first arena is too large; see `fit_arena`.

        `max_solves` includes the first solve. Without a schedule or without a fitting arena, the
        result has no plan and arena.
        """
        first_result = self._solve_within(self.problem, FIRST_SOLVE_RATIO, self.start)
        if first_result.schedule is None or first_result.violations:
            return Fitted(first_result, None, None)
        plan, arena = self._plan_and_place(first_result.schedule, self.usable_bytes)
        if arena.bytes <= self.usable_bytes:
            return self._improve_fitting(first_result, plan, arena)
        return self._solve_with_less_ram(
            first_result, arena.bytes - self.usable_bytes, max_solves - 1
        )

    def _solve_with_less_ram(
        self, first_result: SolveResult, excess_bytes: int, max_solves: int
    ) -> Fitted:
        """Solve at most `max_solves` more times, with smaller RAM budgets.

        The first arena is `excess_bytes` too large. Without enough time to solve, tries
        `_fit_quickly`.
        """
        result = first_result
        peak_bytes = (
            0 if first_result.simulation is None else first_result.simulation.peak_ram_bytes
        )
        aligned_problem = align_problem(self.problem, self.alignment)
        was_cut_short = first_result.termination == Termination.TIME_LIMIT
        margin_bytes = self.usable_bytes // MARGIN_DIVISOR if was_cut_short else 0
        too_small_bytes, too_large_bytes, budget_bytes = (
            0,
            self.usable_bytes + 1,
            self.usable_bytes - margin_bytes,
        )
        if aligned_problem.graph == self.problem.graph:
            too_large_bytes = min(self.usable_bytes, peak_bytes)
            budget_bytes = too_large_bytes - excess_bytes - margin_bytes
        for _ in range(max_solves):
            if budget_bytes <= too_small_bytes:
                budget_bytes = (too_small_bytes + too_large_bytes) // 2
            if (
                too_large_bytes - too_small_bytes <= 1
                or result.termination == Termination.INTERRUPTED
            ):
                break
            if self.request.remaining_s() <= 2 * self.plan_and_place_s:
                quick_fit = self._fit_quickly(first_result, aligned_problem, too_large_bytes)
                return quick_fit or Fitted(self._no_fit_result(first_result), None, None)
            result = self._solve_from_first(first_result, _with_ram(aligned_problem, budget_bytes))
            if result.schedule is None or result.violations:
                if result.status == Status.INFEASIBLE and budget_bytes == self.usable_bytes:
                    return Fitted(self._infeasible_result(result), None, None)
                too_small_bytes = budget_bytes
                continue
            fitted = self._try_fit(first_result, result, budget_bytes)
            if fitted is not None:
                return fitted
            if self.arena_bytes <= self.usable_bytes:
                # For example, with less RAM the plan misses the deadline.
                too_small_bytes = budget_bytes
                continue
            peak_bytes = 0 if result.simulation is None else result.simulation.peak_ram_bytes
            too_large_bytes = min(budget_bytes, peak_bytes)
            # An arena that fits, but whose plan violates a limit, leaves no excess: bisect then.
            excess_bytes = self._min_excess_bytes()
            budget_bytes = too_large_bytes - excess_bytes - margin_bytes if excess_bytes > 0 else 0
        no_fit_result = self._no_fit_result(first_result, last_termination=result.termination)
        return Fitted(no_fit_result, None, None)

    def _improve_fitting(self, first_result: SolveResult, plan: Plan, arena: Arena) -> Fitted:
        """Solve for the remaining time, from a first schedule whose arena fits."""
        was_cut_short = (
            first_result.method == "optimal" and first_result.termination == Termination.TIME_LIMIT
        )
        if not was_cut_short or self.request.remaining_s() <= 2 * self.plan_and_place_s:
            return Fitted(first_result, plan, arena)
        result = self._solve_within(self.problem, 1.0, start=first_result.schedule)
        first_result = _with_status(
            replace(
                first_result,
                objective_bound=max(first_result.proven_bound, result.proven_bound),
                overhead_bound_j=max(first_result.overhead_bound_j, result.overhead_bound_j),
                build_s=first_result.build_s + result.build_s,
                solve_s=first_result.solve_s + result.solve_s,
            )
        )
        value, first_value = result.value, first_result.value
        if (
            value is not None
            and first_value is not None
            and value < first_value
            and not result.violations
        ):
            result = replace(result, build_s=0.0, solve_s=0.0)
            fitted = self._try_fit(first_result, result, self.usable_bytes)
            if fitted is not None:
                return fitted
        return Fitted(first_result, plan, arena)

    def _fit_quickly(
        self, first_result: SolveResult, aligned_problem: Problem, too_large_bytes: int
    ) -> Fitted | None:
        """Build schedules with less RAM by fast heuristics; return the first whose arena fits.

        Tries a repair of the first schedule, a greedy schedule, and paging of every tensor.
        `too_large_bytes` is a budget that is known to be too large.
        """
        # A result of a published method must have the schedule of that method.
        if first_result.method != "optimal":
            return None
        slightly_smaller, clearly_smaller = (
            _with_ram(aligned_problem, too_large_bytes - too_large_bytes // divisor)
            for divisor in QUICK_DIVISORS
        )
        attempts: tuple[tuple[Callable[[Problem], Schedule | None], Problem], ...] = (
            (partial(_refit_quickly, schedule=first_result.require_schedule()), slightly_smaller),
            (_construct_quickly, clearly_smaller),
            (page_everything, slightly_smaller),
        )
        for heuristic, smaller_problem in attempts:
            schedule = heuristic(smaller_problem)
            if schedule is None:
                continue
            result = replace(first_result, schedule=schedule, build_s=0.0, solve_s=0.0)
            fitted = self._try_fit(first_result, result, smaller_problem.usable_ram_bytes)
            if fitted is not None:
                return fitted
        return None

    def _solve_within(
        self, problem: Problem, time_ratio: float, start: Schedule | None = None
    ) -> SolveResult:
        """Solve within ``time_ratio * (remaining time - plan_and_place_s)``, at least 1 ms."""
        limit_s = max(time_ratio * (self.request.remaining_s() - self.plan_and_place_s), 1e-3)
        keywords: SearchKeywords = {} if start is None else {"start": start}
        result = self.solve(problem, time_limit=limit_s, **{**self.options, **keywords})
        return replace(result, time_limit_s=self.request.time_limit_s)

    def _solve_from_first(self, first_result: SolveResult, smaller_problem: Problem) -> SolveResult:
        """Solve with less RAM; if the first solve ran out of time, from or near its schedule."""
        if first_result.method != "optimal" or first_result.termination != Termination.TIME_LIMIT:
            return self._solve_within(smaller_problem, 1 / 2)
        if (first_result.gap or 0.0) > MAX_SOLVED_GAP and not smaller_problem.is_overlapping:
            return self._search_from_first(first_result, smaller_problem)
        max_s = min(QUICK_S, self.request.remaining_s() / 4)
        start = _refit_quickly(smaller_problem, first_result.require_schedule(), max_s=max_s)
        return self._solve_within(smaller_problem, 1 / 2, start)

    def _search_from_first(
        self, first_result: SolveResult, smaller_problem: Problem
    ) -> SolveResult:
        """Search for a schedule with less RAM near the first one, for half of the remaining time.

        Keeps bound and status of `first_result`: a bound for less RAM does not hold for the
        problem.
        """
        max_s = max((self.request.remaining_s() - self.plan_and_place_s) / 2, 1e-3)
        schedule, seed = None, self.options.get("seed", 0)
        with limit_execution(max_s + QUICK_S), suppress(TimeLimitError):
            schedule = improve_schedule(
                smaller_problem, first_result.require_schedule(), max_s=max_s, seed=seed
            )
        candidate = make_valid_candidate(smaller_problem, schedule)
        result = replace(first_result, problem=smaller_problem, build_s=0.0, solve_s=0.0)
        if candidate is None:
            return replace(result, status=Status.UNKNOWN, schedule=None, simulation=None)
        return replace(result, schedule=candidate.schedule, simulation=candidate.simulation)

    def _try_fit(
        self, first_result: SolveResult, result: SolveResult, budget_bytes: int
    ) -> Fitted | None:
        """Plan and place a later result; None if the arena is too large or a limit is violated.

        `budget_bytes` is the RAM budget of the plan. `first_result` gives the bounds.
        """
        plan, arena = self._plan_and_place(result.require_schedule(), budget_bytes)
        if arena.bytes > self.usable_bytes:
            return None
        fitted = self._make_fitted(first_result, result, plan, arena)
        return None if fitted.result.violations else fitted

    def _plan_and_place(self, schedule: Schedule, budget_bytes: int) -> tuple[Plan, Arena]:
        """Plan and place a schedule within `budget_bytes`; the arena may exceed `usable_bytes`."""
        graph, started_s = self.problem.graph, self.request.elapsed_s()
        plan, arena = plan_and_place(
            graph,
            self.problem.costs,
            replace(schedule, identity=GraphIdentity.from_graph(graph)),
            mode=self.mode,
            ram_budget_bytes=budget_bytes,
            arena_limit_bytes=self.usable_bytes,
            alignment=self.alignment,
            seed=self.options.get("seed", 0),
            may_delay_transfers=not self.problem.is_overlapping,
            time_limit=self.request.remaining_s() / 2,
        )
        self.plan_and_place_s = self.request.elapsed_s() - started_s
        self.arena_bytes = arena.bytes
        if self.smallest_arena_bytes is None or arena.bytes < self.smallest_arena_bytes:
            self.smallest_arena_bytes = arena.bytes
        return plan, arena

    def _make_fitted(
        self, first_result: SolveResult, result: SolveResult, plan: Plan, arena: Arena
    ) -> Fitted:
        """Convert a later result, maybe with less RAM, to one of the stated problem; verify it."""
        schedule = replace(result.require_schedule(), identity=plan.identity)
        verdict = verify(self.problem, schedule, plan=plan)
        stated_result = replace(
            result,
            problem=self.problem,
            schedule=schedule,
            simulation=verdict.simulation,
            violations=verdict.violations,
            objective_bound=first_result.objective_bound,
            overhead_bound_j=first_result.overhead_bound_j,
            build_s=first_result.build_s + result.build_s,
            solve_s=first_result.solve_s + result.solve_s,
        )
        return Fitted(_with_status(stated_result), plan, arena)

    def _infeasible_result(self, result: SolveResult) -> SolveResult:
        """Return the infeasible result for rounded sizes; its reason refers to addresses."""
        reason = (
            f"no addresses fit {self._usable_ram_text()}: tensors at multiples of "
            f"{self.alignment} B need more; {result.reason}"
        )
        # User-defined constraints on bytes change when sizes are rounded up: this is no proof.
        status = Status.UNKNOWN if self.problem.constraints else Status.INFEASIBLE
        return replace(result, status=status, reason=reason)

    def _min_excess_bytes(self) -> int:
        """Return the excess of the smallest arena so far over the usable RAM [B], maybe below 0."""
        return (self.smallest_arena_bytes or 0) - self.usable_bytes

    def _no_fit_result(
        self, first_result: SolveResult, *, last_termination: Termination = Termination.STALLED
    ) -> SolveResult:
        """Return the first result without its schedule, with status UNKNOWN and a reason."""
        excess_bytes = self._min_excess_bytes()
        is_late = self.request.remaining_s() <= 2 * self.plan_and_place_s
        reason = f"no schedule was found{' in time' if is_late else ''} whose addresses fit "
        reason += f"{self._usable_ram_text()}: "
        hints = ["raise the time limit"] if is_late else []
        max_bytes = math.inf if self.available_bytes is None else self.available_bytes
        if self.usable_bytes + excess_bytes <= max_bytes:
            hints.insert(0, "add as much to ram")
        if excess_bytes > 0:
            reason += f"the smallest block found takes {format_bytes(excess_bytes)} more; "
            reason += ", or ".join(hints or ["the device has no more RAM: take a smaller step"])
        else:
            reason += "plans that fit violate other limits; raise the time limit"
        is_interrupted = last_termination == Termination.INTERRUPTED
        if is_interrupted:
            reason = f"interrupted before addresses were found that fit {self._usable_ram_text()}"
        return replace(
            first_result,
            status=Status.UNKNOWN,
            termination=Termination.INTERRUPTED if is_interrupted else Termination.STALLED,
            schedule=None,
            simulation=None,
            reason=reason,
        )

    def _usable_ram_text(self) -> str:
        return f"the {format_bytes(self.usable_bytes)} that tensors may use"


def _with_status(result: SolveResult) -> SolveResult:
    """Return a result that has a schedule, with the status that its gap implies."""
    is_proved = (result.gap or 0.0) <= result.requested_gap
    termination = result.termination
    if is_proved or termination == Termination.PROVED:
        termination = Termination.PROVED if is_proved else Termination.STALLED
    return replace(
        result, status=Status.OPTIMAL if is_proved else Status.FEASIBLE, termination=termination
    )


def _with_ram(problem: Problem, usable_bytes: int) -> Problem:
    """Return the problem with a RAM budget whose usable part has `usable_bytes`."""
    return replace(problem, ram=usable_bytes + problem.resident_bytes)


def _refit_quickly(
    problem: Problem, schedule: Schedule, *, max_s: float = QUICK_S
) -> Schedule | None:
    """Repair a schedule for a problem with less RAM; None if that fails or exceeds `max_s` [s]."""
    with limit_execution(max_s), suppress(TimeLimitError):
        return refit(problem, schedule, max_s=max_s / 2)
    return None


def _construct_quickly(problem: Problem) -> Schedule | None:
    """Construct a greedy schedule; None if that fails or exceeds `QUICK_S`."""
    with limit_execution(QUICK_S), suppress(TimeLimitError):
        return construct(problem, max_s=QUICK_S / 2)
    return None


def align_problem(problem: Problem, alignment: int) -> Problem:
    """Return a problem with sizes rounded up to `alignment`, and limits as absolute numbers.

    The storage limit rises by `alignment` bytes for each tensor, more than the sizes rise.
    """
    graph, resolved_problem = problem.graph, problem.resolved()
    limit_bytes = resolved_problem.aux_limit_bytes
    if limit_bytes is not None:
        resolved_problem = resolved_problem.with_limit(
            Quantity.WRITES, limit_bytes + alignment * len(graph.tensors)
        )
    return replace(resolved_problem, graph=align_sizes(graph, alignment))
