"""Schedules whose addresses fit: solved again with less RAM where the block is above the budget."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Unpack

from poetmodel.clock import time_limit as limited
from poetmodel.device import Costs, StorageMode
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.heuristics.greedy import construct, page_everything, refitted
from poetmodel.heuristics.neighbourhood import improved
from poetmodel.placement import place
from poetmodel.plan.alignment import ALIGNMENT, align_sizes, check_alignment
from poetmodel.planner import make_plan, verify
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity, Schedule, simulate
from poetmodel.solver.facade import solve as solve_by_default
from poetmodel.solver.lazy.params import LazyParams
from poetmodel.solver.outcome import accepted
from poetmodel.solver.request import Request, SearchKeywords
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.problem import Problem

FIRST_RATIO: Final = 0.6
"""Share of the time limit for the first solve; the rest is for its plan, its addresses, and more
solves where these do not fit, each with half of what is left."""
QUICK_S: Final = 5.0
"""Most time for a greedy schedule where the addresses of none that was found fit in time [s]."""
QUICK: Final = (48, 12)
"""The parts of the RAM that are taken off: where the best schedule so far is repaired, and where
another is built."""
MARGIN: Final = 256
"""Where there was no time to prove the best schedule, a part like this of the RAM is taken off
beside the excess: one solve more would cost more."""
LONGEST_PLACING_S: Final = 10.0
"""Most time for the addresses of one plan [s]."""


class Fitted(NamedTuple):
    """A result with the plan of its schedule and addresses for it, within the budget."""

    result: SolveResult
    """Result for the problem as stated; without a schedule, the reason."""
    plan: Plan | None
    """The plan; None without a schedule."""
    arena: Arena | None
    """Its addresses, a block no larger than the budget; None without a schedule."""


def fit_arena(
    problem: Problem,
    *,
    mode: StorageMode | str,
    alignment: int = ALIGNMENT,
    solve: Callable[..., SolveResult] = solve_by_default,
    most_solves: int = 12,
    time_limit: float = 60.0,
    available_bytes: int | None = None,
    **options: Unpack[SearchKeywords],
) -> Fitted:
    """Solve a problem, plan its schedule and place all copies in a block within the RAM budget.

    Where the block exceeds the budget, the problem is solved again with the excess taken off, until
    it fits or no less RAM is left to try.

    Parameters
    ----------
    problem : Problem
        The problem. The block is at most its `usable_ram_bytes`.
    mode : {'blocking', 'dma'}
        How the device's storage moves tensors.
    alignment : int
        Offsets are multiples of this power of two [B].
    solve : callable
        What solves a problem, with a ``time_limit`` and `options`.
    most_solves : int
        How often the problem is solved at most.
    time_limit : float
        Wall time for everything: all solves, plans and addresses [s].
    available_bytes : int, optional
        RAM for tensors that there is at most [B]: no more is advised where no addresses fit.
        Default: the RAM of the device.
    **options
        Other keyword arguments of `solve`.

    Returns
    -------
    Fitted
        Result, plan and arena. The bound of the result is that of the problem as stated, so that
        its gap includes what the addresses cost. Without a schedule plan and arena are None, and
        the result says why: ``infeasible`` where it is proved that no addresses fit.

    Raises
    ------
    InputError
        If transfers may overlap computation in the time that counts, but not in the plan.

    Notes
    -----
    From the second solve on, sizes are rounded up to the alignment, as they are in the block: where
    that is infeasible no addresses fit. Blocks differ between schedules, and less RAM may have a
    larger one. Once a budget is too small for any schedule, budgets between it and the least that
    gave a block too large are tried by halves.

    Taken off is the least excess of all blocks so far, as one may be larger by chance.

    The first solve gets three fifths of the time. If its block fits, what is left goes into a
    better schedule; if not, each further solve gets half of what is left, and is a search alone
    where the first one was cut short with a wide gap. A plan and its addresses are made in any
    case; they are improved as long as there is time. If none fits by then, a greedy schedule with
    clearly less RAM is the answer.
    """
    check_alignment(alignment)
    mode, clock = StorageMode(mode), Request(time_limit_s=time_limit)
    if mode == StorageMode.BLOCKING and problem.is_overlapping and problem.can_page:
        raise InputError(
            "deadline_counts: 'overlap' is the time of a plan whose transfers overlap computation, "
            "but in the plan that gets addresses the core waits for each; state 'serial'"
        )
    device = problem.costs.device
    if available_bytes is None and device is not None:
        available_bytes = device.ram_bytes - problem.resident_bytes
    search = _FittingSearch(problem, mode, alignment, solve, options, clock)
    search.available_bytes = available_bytes
    return search.run(most_solves)


def plan_and_place(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode,
    ram_budget_bytes: int | None,
    room_bytes: int | None = None,
    alignment: int = ALIGNMENT,
    seed: int = 0,
    may_wait: bool = True,
    time_limit: float | None = None,
) -> tuple[Plan, Arena]:
    """Plan a schedule and place all that the plan has in RAM.

    Parameters
    ----------
    graph, costs, schedule, mode
        As in `make_plan`.
    ram_budget_bytes : int or None
        RAM that the plan may use [B].
    room_bytes : int, optional
        RAM for the block, and the budget that the plan states [B]. Default: that of the plan.
    alignment, seed : int
        As in `place`.
    may_wait : bool
        Whether transfers beside the computing may begin later where the block fits only so.
    time_limit : float, optional
        Wall time after which nothing is improved any more [s].
    """
    until_s = time.monotonic() + (math.inf if time_limit is None else time_limit)
    room = ram_budget_bytes if room_bytes is None else room_bytes
    peak_bytes = simulate(graph, costs, schedule).peak_ram_bytes
    budget = ram_budget_bytes
    while True:
        plan = make_plan(
            graph,
            costs,
            schedule,
            mode=mode,
            ram_budget_bytes=budget,
            time_limit=until_s - time.monotonic(),
        )
        placing_s = min(LONGEST_PLACING_S, until_s - time.monotonic())
        arena = place(graph, plan, alignment=alignment, seed=seed, time_limit=placing_s)
        if room is None or budget is None:
            return plan, arena
        fits = arena.bytes <= room
        if fits or budget <= peak_bytes or mode != StorageMode.DMA or not may_wait:
            return replace(plan, ram_budget_bytes=room), arena
        excess = arena.bytes - room if time.monotonic() < until_s else budget
        budget = max(peak_bytes, budget - excess)


class _FittingSearch:
    """The search for a schedule whose addresses fit."""

    def __init__(
        self,
        problem: Problem,
        mode: StorageMode,
        alignment: int,
        solve: Callable[..., SolveResult],
        options: SearchKeywords,
        clock: Request,
    ) -> None:
        self.problem, self.mode, self.alignment = problem, mode, alignment
        self.solve, self.clock = solve, clock
        self.start = options.get("start")
        """Where the first solve begins; later ones may have other sizes."""
        self.options = options.copy()
        self.options.pop("start", None)
        self.usable_bytes = problem.usable_ram_bytes
        self.available_bytes: int | None = None
        """RAM for tensors that there is at most; None where that is not known."""
        self.smallest_bytes: int | None = None
        """The size of the smallest block found."""
        self.placing_s = 0.0
        """How long the last plan with its addresses took [s]."""

    def run(self, most_solves: int) -> Fitted:
        """Solve until the addresses fit, or nothing is left to try."""
        first = self._solve_within(self.problem, FIRST_RATIO, self.start)
        if first.schedule is None or first.violations:
            return Fitted(first, None, None)
        plan, arena = self._placed(first.schedule, self.usable_bytes)
        if arena.bytes <= self.usable_bytes:
            return self._improved(first, plan, arena)
        return self._again(first, arena.bytes - self.usable_bytes, most_solves - 1)

    def _again(self, first: SolveResult, excess: int, most_solves: int) -> Fitted:
        """Solve with less RAM, since the block of the first schedule is larger by an excess."""
        result = first
        peak = 0 if first.simulation is None else first.simulation.peak_ram_bytes
        rounded = rounded_problem(self.problem, self.alignment)
        hurried = first.termination == Termination.TIME_LIMIT
        margin = self.usable_bytes // MARGIN if hurried else 0
        low, high, budget = 0, self.usable_bytes + 1, self.usable_bytes - margin
        if rounded.graph == self.problem.graph:
            high = min(self.usable_bytes, peak)
            budget = high - excess - margin
        for _ in range(most_solves):
            if budget <= low:
                budget = (low + high) // 2
            if high - low <= 1 or result.termination == Termination.INTERRUPTED:
                break
            if self.clock.remaining_s() <= 2 * self.placing_s:
                quick = self._quickly(first, rounded, high)
                return quick or Fitted(self._failed(first), None, None)
            result = self._from(first, _with_ram(rounded, budget))
            if result.schedule is None or result.violations:
                if result.status == Status.INFEASIBLE and budget == self.usable_bytes:
                    return Fitted(self._infeasible(result), None, None)
                low = budget
                continue
            plan, arena = self._placed(result.schedule, budget)
            if arena.bytes <= self.usable_bytes:
                fitted = self._fitted(first, result, plan, arena)
                if not fitted.result.violations:
                    return fitted
                low = budget  # such as a deadline that the plan misses in less RAM
                continue
            peak = 0 if result.simulation is None else result.simulation.peak_ram_bytes
            high = min(budget, peak)
            budget = high - self._least_excess() - margin
        return Fitted(self._failed(first), None, None)

    def _improved(self, first: SolveResult, plan: Plan, arena: Arena) -> Fitted:
        """Spend what is left of the time on a better schedule, from one whose addresses fit."""
        cut_short = first.method == "optimal" and first.termination == Termination.TIME_LIMIT
        if not cut_short or self.clock.remaining_s() <= 2 * self.placing_s:
            return Fitted(first, plan, arena)
        result = self._solve_within(self.problem, 1.0, start=first.schedule)
        first = _judged(
            replace(
                first,
                objective_bound=max(first.proven_bound, result.proven_bound),
                overhead_bound_j=max(first.overhead_bound_j, result.overhead_bound_j),
                build_s=first.build_s + result.build_s,
                solve_s=first.solve_s + result.solve_s,
            )
        )
        value, known = result.value, first.value
        if value is not None and known is not None and value < known and not result.violations:
            placed = self._placed(result.require_schedule(), self.usable_bytes)
            if placed[1].bytes <= self.usable_bytes:
                result = replace(result, build_s=0.0, solve_s=0.0)
                fitted = self._fitted(first, result, *placed)
                if not fitted.result.violations:
                    return fitted
        return Fitted(first, plan, arena)

    def _quickly(self, first: SolveResult, rounded: Problem, high: int) -> Fitted | None:
        """Return a schedule made in no time with clearly less RAM, if its addresses fit."""
        if first.method != "optimal":  # the answer of a baseline would not be its own
            return None
        slightly, clearly = (_with_ram(rounded, high - high // part) for part in QUICK)
        ways: tuple[tuple[Callable[[Problem], Schedule | None], Problem], ...] = (
            (partial(_refitted, schedule=first.require_schedule()), slightly),
            (_greedy, clearly),
            (page_everything, slightly),
        )
        for make, less in ways:
            schedule = make(less)
            if schedule is None:
                continue
            plan, arena = self._placed(schedule, less.usable_ram_bytes)
            if arena.bytes <= self.usable_bytes:
                result = replace(first, schedule=schedule, build_s=0.0, solve_s=0.0)
                fitted = self._fitted(first, result, plan, arena)
                if not fitted.result.violations:
                    return fitted
        return None

    def _solve_within(
        self, stated: Problem, ratio: float, start: Schedule | None = None
    ) -> SolveResult:
        """Solve a problem within a share of the time that is left, but for that of a plan."""
        limit_s = max(ratio * (self.clock.remaining_s() - self.placing_s), 1e-3)
        more: SearchKeywords = {} if start is None else {"start": start}
        result = self.solve(stated, time_limit=limit_s, **{**self.options, **more})
        return replace(result, time_limit_s=self.clock.time_limit_s)

    def _from(self, first: SolveResult, less: Problem) -> SolveResult:
        """Solve with less RAM, from what the first solve has reached if it was cut short."""
        if first.method != "optimal" or first.termination != Termination.TIME_LIMIT:
            return self._solve_within(less, 1 / 2)
        if (first.gap or 0.0) > LazyParams().wide_gap_ratio and not less.is_overlapping:
            return self._searched(first, less)
        most_s = min(QUICK_S, self.clock.remaining_s() / 4)
        start = _refitted(less, first.require_schedule(), most_s=most_s)
        return self._solve_within(less, 1 / 2, start)

    def _searched(self, first: SolveResult, less: Problem) -> SolveResult:
        """Search with less RAM, from what the first solve has reached, for half of the time left.

        A bound would be that of less RAM, which is of no use.
        """
        most_s = max((self.clock.remaining_s() - self.placing_s) / 2, 1e-3)
        schedule, seed = None, self.options.get("seed", 0)
        with limited(most_s + QUICK_S), suppress(TimeLimitError):
            schedule = improved(less, first.require_schedule(), most_s=most_s, seed=seed)
        known = accepted(less, schedule)
        result = replace(first, problem=less, build_s=0.0, solve_s=0.0)
        if known is None:
            return replace(result, status=Status.UNKNOWN, schedule=None, simulation=None)
        return replace(result, schedule=known.schedule, simulation=known.simulation)

    def _placed(self, schedule: Schedule, budget: int) -> tuple[Plan, Arena]:
        """Plan a schedule within a budget, and place it."""
        graph, begun_s = self.problem.graph, self.clock.elapsed_s()
        plan, arena = plan_and_place(
            graph,
            self.problem.costs,
            replace(schedule, identity=GraphIdentity.of(graph)),
            mode=self.mode,
            ram_budget_bytes=budget,
            room_bytes=self.usable_bytes,
            alignment=self.alignment,
            seed=self.options.get("seed", 0),
            may_wait=not self.problem.is_overlapping,
            time_limit=self.clock.remaining_s() / 2,
        )
        self.placing_s = self.clock.elapsed_s() - begun_s
        if self.smallest_bytes is None or arena.bytes < self.smallest_bytes:
            self.smallest_bytes = arena.bytes
        return plan, arena

    def _fitted(self, first: SolveResult, result: SolveResult, plan: Plan, arena: Arena) -> Fitted:
        """Return the result with less RAM as a result of the problem as stated."""
        schedule = replace(result.require_schedule(), identity=plan.identity)
        verdict = verify(self.problem, schedule, plan=plan)
        fitted = replace(
            result,
            problem=self.problem,
            schedule=schedule,
            simulation=verdict.simulation,
            violations=verdict.violations,
            objective_bound=first.objective_bound,
            overhead_bound_j=first.overhead_bound_j,
            build_s=first.build_s + result.build_s,
            solve_s=first.solve_s + result.solve_s,
        )
        return Fitted(_judged(fitted), plan, arena)

    def _infeasible(self, result: SolveResult) -> SolveResult:
        """Return the proof, a result of the problem with sizes rounded up, in its words."""
        reason = (
            f"no addresses fit {self._room()}: tensors at multiples of {self.alignment} B need "
            f"more; {result.reason}"
        )
        # Own constraints on bytes are not the same for sizes that are rounded up.
        status = Status.UNKNOWN if self.problem.constraints else Status.INFEASIBLE
        return replace(result, status=status, reason=reason)

    def _least_excess(self) -> int:
        """Return by how much the smallest block found is larger than the room for it [B]."""
        return (self.smallest_bytes or 0) - self.usable_bytes

    def _failed(self, first: SolveResult) -> SolveResult:
        excess = self._least_excess()
        late = self.clock.remaining_s() <= 2 * self.placing_s
        reason = f"no schedule was found{' in time' if late else ''} whose addresses fit "
        reason += f"{self._room()}: "
        remedies = ["raise the time limit"] if late else []
        most_bytes = math.inf if self.available_bytes is None else self.available_bytes
        if self.usable_bytes + excess <= most_bytes:
            remedies.insert(0, "add as much to ram")
        if excess > 0:
            reason += f"the smallest block found takes {format_bytes(excess)} more; "
            reason += ", or ".join(remedies or ["the device has no more RAM: take a smaller step"])
        else:
            reason += "raise the time limit"
        return replace(
            first,
            status=Status.UNKNOWN,
            termination=Termination.STALLED,
            schedule=None,
            simulation=None,
            reason=reason,
        )

    def _room(self) -> str:
        return f"the {format_bytes(self.usable_bytes)} that tensors may use"


def _judged(result: SolveResult) -> SolveResult:
    """Return a result with the status that its value and bound give it."""
    proved = (result.gap or 0.0) <= result.requested_gap
    ended = result.termination
    if proved or ended == Termination.PROVED:
        ended = Termination.PROVED if proved else Termination.STALLED
    return replace(result, status=Status.OPTIMAL if proved else Status.FEASIBLE, termination=ended)


def _with_ram(problem: Problem, usable_bytes: int) -> Problem:
    return replace(problem, ram=usable_bytes + problem.resident_bytes)


def _refitted(problem: Problem, schedule: Schedule, *, most_s: float = QUICK_S) -> Schedule | None:
    with limited(most_s), suppress(TimeLimitError):
        return refitted(problem, schedule, most_s=most_s / 2)
    return None


def _greedy(problem: Problem) -> Schedule | None:
    with limited(QUICK_S), suppress(TimeLimitError):
        return construct(problem, most_s=QUICK_S / 2)
    return None


def rounded_problem(problem: Problem, alignment: int) -> Problem:
    """Return the problem with numbers for its limits and sizes as they are in a block.

    Storage is larger by as much as the rounding may take there.
    """
    graph, stated = problem.graph, problem.resolved()
    room = stated.aux_limit_bytes
    return replace(
        stated,
        graph=align_sizes(graph, alignment),
        aux_bytes=None if room is None else room + alignment * len(graph.tensors),
    )
