"""From a schedule to the plan that a device runs, and the verdict on both.

What makes and checks plans is imported on use: to verify a schedule without one takes none of it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit
from poetmodel.clock import time_limit as limited
from poetmodel.device import Costs, CostTable, StorageMode
from poetmodel.errors import PlanError, TimeLimitError, VerificationError
from poetmodel.problem import Problem, Quantity, within
from poetmodel.schedule import (
    GraphIdentity,
    Schedule,
    Simulation,
    Verdict,
    check_schedule,
    simulate,
)
from poetmodel.schedule.compilation import compile_schedule
from poetmodel.schedule.identity import OBJECTIVE_VALUE
from poetmodel.schedule.simulation import with_times
from poetmodel.schedule.verification import PlanMetrics, broken_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Instruction, Plan, PlanCheck, Program
    from poetmodel.planner.timing import Timing
    from poetmodel.schedule.homes import Homes

_HALVINGS: Final = 12
"""How often the range is halved that has the least RAM of a plan."""
_PASSES: Final = 4
"""How often page-ins are moved back; moving one can make way for others."""


def make_plan(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode | str,
    ram_budget_bytes: int | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Make the program of a schedule.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Times of computations and transfers.
    schedule : Schedule
        A valid schedule.
    mode : {'blocking', 'dma'}
        How the device's storage moves tensors.
    ram_budget_bytes : int, optional
        RAM that ``dma`` plans may use, without resident bytes [B]. Default: the peak of the
        schedule; less than that is not possible.
    time_limit : float, optional
        Wall time after which ``dma`` plans are no longer improved: transfers begin at their use
        where there is no time for more [s].

    Returns
    -------
    Plan
        ``blocking``: with the energy, the peak and the serial time of the schedule. ``dma``: with
        its computations and page-ins, and the page-outs that some page-in reads or that replace
        state; transfers run beside computations and page-ins, first reads of state among them,
        start as late as they can without a stall.

    Raises
    ------
    PlanError
        If the schedule is not valid.
    CostError
        If the costs do not fit the graph.
    """
    simulation = simulate(graph, costs, schedule)
    if simulation.violations:
        raise PlanError(simulation.violations)
    peak_bytes, wanted = simulation.peak_ram_bytes, StorageMode(mode)
    return _plan_of(graph, costs, schedule, wanted, ram_budget_bytes, peak_bytes, time_limit)


def _plan_of(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    mode: StorageMode,
    ram_budget_bytes: int | None,
    peak_bytes: int,
    limit_s: float | None = None,
) -> Plan:
    """Make the program of a schedule that is valid and has this peak [B]."""
    from poetmodel.plan import Plan

    budget = max(ram_budget_bytes or 0, peak_bytes)
    device, has_homes = costs.device, graph.version > 1
    plan = Plan(
        program=(),
        mode=mode,
        identity=schedule.identity or GraphIdentity.of(graph),
        ram_budget_bytes=ram_budget_bytes,
        device=None if device is None else device.short_name,
        resident=schedule.resident if has_homes else None,
        memory_mapped=has_homes and device is not None and device.is_memory_mapped,
        commit=costs.commit if graph.state_of else None,
        graph=graph,
    )
    homes = plan.homes(graph)
    if mode == StorageMode.BLOCKING:
        return replace(plan, program=compile_schedule(homes, schedule).program)
    program = _overlapping(homes, costs.table(graph), schedule, budget, limit_s)
    return replace(plan, program=program)


def _overlapping(
    homes: Homes, table: CostTable, schedule: Schedule, budget: int, limit_s: float | None
) -> Program:
    """Return the program of a schedule for a device with DMA; in time, or as good as it got."""
    from poetmodel.plan.derivation import with_waits_and_frees
    from poetmodel.planner.sequence import moves_of, start_at_use
    from poetmodel.planner.timing import Timing

    moves = moves_of(homes, schedule)
    best = Timing(homes, table, start_at_use(homes, moves), budget)
    improved = _improved(homes, table, moves, budget, best)
    try:
        with nullcontext() if limit_s is None else limited(limit_s):
            for candidate in improved:
                best = candidate
    except TimeLimitError:
        if limit_s is None:  # of a limit around
            raise
    return with_waits_and_frees(homes, best.steps, StorageMode.DMA)


def _improved(
    homes: Homes, table: CostTable, moves: Sequence[Instruction], budget: int, best: Timing
) -> Iterator[Timing]:
    """Yield ever better programs of a schedule, beginning from one."""
    from poetmodel.planner.search import best_transfers
    from poetmodel.planner.timing import Timing, just_in_time
    from poetmodel.planner.windows import TransferWindows

    windows = TransferWindows(homes, table, moves, budget)
    chosen = windows.steps(best_transfers(windows).transfers)
    candidate = Timing(homes, table, chosen, budget)
    if candidate.peak_ram_bytes <= budget and candidate.makespan_s < best.makespan_s:
        best = candidate
        yield best
    for _ in range(_PASSES):
        later = just_in_time(best)
        if later == best.given:
            break
        timing = Timing(homes, table, later, budget)
        if not within(timing.makespan_s, best.makespan_s):
            break
        best = timing
        yield best


def checked_plan(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode,
    ram_budget_bytes: int,
) -> tuple[Plan, PlanCheck]:
    """Return the plan of a verified schedule, and the figures that an independent check measures.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        The costs of its nodes and transfers.
    schedule : Schedule
        A schedule that meets the budget.
    mode : StorageMode
        Whether computing waits for transfers.
    ram_budget_bytes : int
        The RAM that the plan may take [B].

    Raises
    ------
    VerificationError
        If the plan breaks a rule: a fault of ours.
    """
    from poetmodel.plan import check_plan

    plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=ram_budget_bytes)
    check = check_plan(graph, costs, plan, ram_budget_bytes=ram_budget_bytes)
    if check.violations:
        raise VerificationError(check.violations)
    return plan, check


def verify(
    problem: Problem,
    schedule: Schedule,
    *,
    stated: Mapping[str, float | None] | None = None,
    plan: Plan | None = None,
    planning_s: float | None = None,
) -> Verdict:
    """Verify a schedule against the rules of execution and the limits of a problem.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits.
    schedule : Schedule
        The relations.
    stated : mapping of str to number, optional
        Figures that a file claims, such as ``energy_j`` and ``peak_ram_bytes``; each is compared
        with the simulator's. A makespan may be that of a slower plan than the default one, such as
        one whose addresses fit, and is then the time that counts; none is slower than a plan
        without any overlap. So may the RAM of a plan, where that is minimized, within the budget.
    plan : Plan, optional
        The plan to verify, where the time of the problem is a makespan. Default: the one that
        `make_plan` makes for DMA and the budget of the problem.
    planning_s : float, optional
        Wall time for making and checking a plan [s]; where it does not suffice, transfers and
        computing take turns: that is a plan, too, and takes all times together. Default: no limit.

    Returns
    -------
    Verdict
        Figures and every violation. With a plan ``makespan_s`` and the time that counts are what
        `check_plan` measured on it, and its violations are listed too.

    Raises
    ------
    ScheduleError
        If the schedule was made for another graph.
    """
    if not problem.is_overlapping:
        return check_schedule(problem, schedule, stated=stated)
    from poetmodel.plan import check_plan

    graph, costs = problem.graph, problem.costs
    faults: list[str] = []

    def checked(peak_bytes: int, budget: int) -> PlanCheck:
        within_bytes = budget if peak_bytes <= budget else None
        wanted = plan or _plan_of(graph, costs, schedule, StorageMode.DMA, within_bytes, peak_bytes)
        return check_plan(graph, costs, wanted, aux_bytes=problem.aux_limit_bytes)

    def planned(simulation: Simulation) -> PlanMetrics:
        blocking = PlanMetrics(simulation.makespan_s)
        if simulation.violations:  # no program can execute it
            return blocking
        peak_bytes, ram_bytes = simulation.peak_ram_bytes, None
        try:
            with nullcontext() if planning_s is None else limited(planning_s):
                check_time_limit()
                if plan is None and problem.minimize == Quantity.RAM:
                    ram_bytes = _least_ram_bytes(
                        problem, schedule, simulation, partial(checked, peak_bytes)
                    )
                check = checked(peak_bytes, ram_bytes or problem.usable_ram_bytes)
        except TimeLimitError:
            if planning_s is None:  # of a limit around
                raise
            return blocking
        faults.extend(f"plan: {violation}" for violation in check.violations)
        if plan is not None:
            taken = check.peak_ram_bytes if problem.minimize == Quantity.RAM else None
            return PlanMetrics(check.makespan_s, taken)
        figures = PlanMetrics(check.makespan_s, ram_bytes)
        most = PlanMetrics(simulation.makespan_s, problem.usable_ram_bytes)
        return _as_stated(figures, stated or {}, most)

    verdict = check_schedule(problem, schedule, stated=stated, makespan_s=planned)
    return replace(verdict, violations=(*verdict.violations, *faults)) if faults else verdict


def _as_stated(
    figures: PlanMetrics, stated: Mapping[str, float | None], most: PlanMetrics
) -> PlanMetrics:
    """Return the figures that a file states of another plan, where they are larger, up to most."""
    makespan_s, ram_bytes = figures
    claimed_s, claimed_bytes = stated.get("makespan_s"), stated.get(OBJECTIVE_VALUE)
    if claimed_s is not None and makespan_s is not None:
        makespan_s = max(makespan_s, min(claimed_s, most.makespan_s or 0.0))
    if claimed_bytes is not None and ram_bytes is not None:
        ram_bytes = max(ram_bytes, min(int(claimed_bytes), most.ram_bytes or 0))
    return PlanMetrics(makespan_s, ram_bytes)


def _least_ram_bytes(
    problem: Problem,
    schedule: Schedule,
    simulation: Simulation,
    checked: Callable[[int], PlanCheck],
) -> int:
    """Return about the least RAM in which the plan of a schedule keeps all limits [B].

    That is its peak, or more where page-ins have to begin early; `checked` makes the plan in so
    much. All that there is where none keeps them.
    """

    def kept(ram_bytes: int) -> int | None:
        """Return the peak of the plan in so much RAM; None if it breaks a limit [B]."""
        check = checked(ram_bytes)
        timed = with_times(
            simulation,
            problem.graph,
            problem.costs,
            schedule,
            deadline_counts=problem.deadline_counts,
            makespan_s=check.makespan_s,
        )
        broken = check.violations or broken_limits(problem, timed)
        return None if broken else check.peak_ram_bytes

    low, most = simulation.peak_ram_bytes, problem.usable_ram_bytes
    if low >= most or kept(low) is not None:
        return low
    taken, high = kept(most), most
    if taken is None:
        return most
    for _ in range(_HALVINGS):
        middle = (low + min(high, taken)) // 2
        if middle <= low:
            break
        less = kept(middle)
        low, high, taken = (middle, high, taken) if less is None else (low, middle, less)
    if taken < high and kept(taken) is not None:  # the same plan, but for a rare worse one
        return taken
    return high
