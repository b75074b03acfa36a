"""Convert schedules to the plans that devices execute, and verify schedules and plans.

Modules that make and check plans are imported on use, so that verifying a schedule without a plan
imports none of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.clock import check_time_limit, limit_time
from poetmodel.device import Costs, CostTable, StorageMode
from poetmodel.errors import PlanError, TimeLimitError, VerificationError
from poetmodel.problem import Problem, Quantity, is_within
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
from poetmodel.schedule.simulation import replace_makespan
from poetmodel.schedule.verification import (
    check_identity,
    check_simulation,
    simulate_for,
    violated_limits,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Instruction, Plan, PlanCheck, Program
    from poetmodel.planner.timing import Timing
    from poetmodel.schedule.homes import Homes

_MAX_BISECTIONS: Final = 12
"""Maximum number of iterations of the bisection for the minimum RAM of a plan."""
_MAX_DELAY_PASSES: Final = 4
"""Maximum number of passes that delay page-ins; delaying one page-in can allow a later start of
another one."""


def make_plan(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode | str,
    ram_budget_bytes: int | None = None,
    time_limit: float | None = None,
) -> Plan:
    """Make the plan of a schedule: its program of computations, transfers, waits and frees.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Times of computations and transfers; the plan's device and commits.
    schedule : Schedule
        A valid schedule.
    mode : {'blocking', 'dma'}
        Whether transfers block the core, or overlap computations by DMA.
    ram_budget_bytes : int, optional
        RAM budget of ``dma`` plans, without resident bytes [B]. Default, and minimum: the peak of
        the schedule. Plans of both modes store the argument as given.
    time_limit : float, optional
        Time after which ``dma`` plans are no longer improved [s]. Default: no limit. In a plan
        without any improvement, each page-in begins right before its first use.

    Returns
    -------
    Plan
        A ``blocking`` plan has the energy, the peak and the serial time of the schedule. A ``dma``
        plan has the computations and page-ins of the schedule, and only those page-outs that a
        page-in reads or that write back state. A search chooses when transfers begin, so that the
        makespan is small. Then page-ins, including first reads of state, are moved later where that
        delays no computation.

    Raises
    ------
    PlanError
        If the schedule is not valid.
    CostError
        If the costs do not match the graph.
    ValueError
        If `mode` is no storage mode.
    TooLargeError
        If spans with invalid entries of the schedule have more than `MAX_PAIRS` pairs.
    TimeLimitError
        If a time limit of the calling context passes, except during improvements with `time_limit`.
    """
    simulation = simulate(graph, costs, schedule)
    if simulation.violations:
        raise PlanError(simulation.violations)
    peak_bytes, storage_mode = simulation.peak_ram_bytes, StorageMode(mode)
    return _make_unchecked_plan(
        graph, costs, schedule, storage_mode, ram_budget_bytes, peak_bytes, time_limit
    )


def _make_unchecked_plan(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    mode: StorageMode,
    ram_budget_bytes: int | None,
    peak_bytes: int,
    limit_s: float | None = None,
) -> Plan:
    """Make the plan of a valid schedule of peak `peak_bytes`; `limit_s` limits improvements."""
    from poetmodel.plan import Plan

    budget = max(ram_budget_bytes or 0, peak_bytes)
    device, has_homes = costs.device, graph.version > 1
    plan = Plan(
        program=(),
        mode=mode,
        identity=schedule.identity or GraphIdentity.from_graph(graph),
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
    program = _make_dma_program(homes, costs.table(graph), schedule, budget, limit_s)
    return replace(plan, program=program)


def _make_dma_program(
    homes: Homes, table: CostTable, schedule: Schedule, budget: int, limit_s: float | None
) -> Program:
    """Return a DMA program for RAM `budget` [B], with improvements found within `limit_s` [s]."""
    from poetmodel.plan.derivation import add_waits_and_frees
    from poetmodel.planner.sequence import extract_actions, move_page_ins_to_readers
    from poetmodel.planner.timing import Timing

    actions = extract_actions(homes, schedule)
    best_timing = Timing(homes, table, move_page_ins_to_readers(homes, actions), budget)
    improved_timings = _improve_timing(homes, table, actions, budget, best_timing)
    try:
        with nullcontext() if limit_s is None else limit_time(limit_s):
            for candidate in improved_timings:
                best_timing = candidate
    except TimeLimitError:
        if limit_s is None:  # an outer time limit has expired
            raise
    return add_waits_and_frees(homes, best_timing.instructions, StorageMode.DMA)


def _improve_timing(
    homes: Homes, table: CostTable, actions: Sequence[Instruction], budget: int, best_timing: Timing
) -> Iterator[Timing]:
    """Yield timings at least as fast as `best_timing`: by a search, then by delaying page-ins."""
    from poetmodel.planner.search import choose_transfers
    from poetmodel.planner.timing import Timing, delay_page_ins
    from poetmodel.planner.windows import TransferWindows

    windows = TransferWindows(homes, table, actions, budget)
    chosen_instructions = windows.insert_transfers(choose_transfers(windows).transfers)
    candidate = Timing(homes, table, chosen_instructions, budget)
    if candidate.peak_ram_bytes <= budget and candidate.makespan_s < best_timing.makespan_s:
        best_timing = candidate
        yield best_timing
    for _ in range(_MAX_DELAY_PASSES):
        delayed_instructions = delay_page_ins(best_timing)
        if delayed_instructions == best_timing.input_instructions:
            break
        timing = Timing(homes, table, delayed_instructions, budget)
        if not is_within(timing.makespan_s, best_timing.makespan_s):
            break
        best_timing = timing
        yield best_timing


def make_checked_plan(
    graph: Graph,
    costs: Costs,
    schedule: Schedule,
    *,
    mode: StorageMode,
    ram_budget_bytes: int,
) -> tuple[Plan, PlanCheck]:
    """Make the plan of a verified schedule and check it; return the plan and its check.

    Parameters
    ----------
    graph : Graph
        The training graph.
    costs : Costs
        Costs of the graph's nodes and transfers.
    schedule : Schedule
        A schedule that meets the budget and the storage limit of the costs' device.
    mode : StorageMode
        Whether transfers block the core, or overlap computations by DMA.
    ram_budget_bytes : int
        RAM budget of the plan, without resident bytes [B].

    Raises
    ------
    PlanError
        If the schedule is not valid.
    CostError
        If the costs do not match the graph.
    VerificationError
        If the plan is invalid; for a schedule within the limits, this is a bug of this package.
    TooLargeError
        If spans with invalid entries of the schedule have more than `MAX_PAIRS` pairs.
    TimeLimitError
        If a time limit of the calling context passes.
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
        The schedule to verify.
    stated : mapping of str to number, optional
        Metrics, bounds and gaps stated in a file, such as ``energy_j`` and ``peak_ram_bytes``. A
        false one is a violation, as in `check_schedule`. Without `plan`, a stated makespan above
        that of the default plan counts as the time, up to the time without any overlap, because
        another plan may be slower, such as one whose addresses fit. If RAM is minimized, a larger
        stated RAM counts likewise, up to the budget.
    plan : Plan, optional
        The plan to verify if the time of the problem is a makespan, otherwise ignored; its peak is
        compared with its own budget and that of the problem. Default: the plan that `make_plan`
        makes for DMA and the budget of the problem. If RAM is minimized, the default is made for
        the smallest budget that is found to suffice.
    planning_s : float, optional
        Wall time for making and checking a plan [s]. If it does not suffice, the time is that of a
        plan without overlap: the sum of all computations and transfers. Default: no limit.

    Returns
    -------
    Verdict
        Metrics and all violations. For a makespan, ``makespan_s`` and the time that counts are
        those of `check_plan` or `stated`, and the violations of the plan are listed, too. An
        invalid schedule has no plan: its makespan is the time without any overlap.

    Raises
    ------
    ScheduleError
        If `schedule` is no `Schedule`, or was made for another graph.
    PlanError
        If `plan` was made for another graph.
    TooLargeError
        If spans with invalid entries of the schedule have more than `MAX_PAIRS` pairs.
    TimeLimitError
        If a time limit of the calling context passes, except during planning with `planning_s`.
    """
    if not problem.is_overlapping:
        return check_schedule(problem, schedule, stated=stated)
    checker = _PlanChecker(
        problem=problem,
        schedule=schedule,
        stated=stated or {},
        plan=plan,
        planning_s=planning_s,
    )
    check_identity(problem.graph, schedule)
    simulation = simulate_for(problem, schedule)
    makespan_s, ram_bytes = checker.measure(simulation)
    planned_simulation = replace_makespan(
        simulation, problem, makespan_s=makespan_s, ram_bytes=ram_bytes
    )
    verdict = check_simulation(problem, schedule, planned_simulation, stated)
    return replace(verdict, violations=(*verdict.violations, *checker.violations))


class _PlanMetrics(NamedTuple):
    """Makespan of a plan [s], None without costs; its RAM if RAM is minimized [B], else None."""

    makespan_s: float | None
    ram_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class _PlanChecker:
    """Makes and checks the plan of a schedule; the fields are the parameters of `verify`."""

    problem: Problem
    schedule: Schedule
    stated: Mapping[str, float | None]
    plan: Plan | None
    planning_s: float | None
    violations: list[str] = field(default_factory=list)
    """Violations of the plan that `measure` checked."""

    def measure(self, simulation: Simulation) -> _PlanMetrics:
        """Return the makespan of the checked plan and, if RAM is minimized, its RAM.

        Without a valid schedule or enough time, the makespan is that of a plan without overlap, and
        the RAM is None. Without `plan`, metrics are increased to the values in `stated`.
        """
        problem = self.problem
        blocking_metrics = _PlanMetrics(simulation.makespan_s)
        if simulation.violations:  # no program can execute the schedule
            return blocking_metrics
        transfers = simulation.page_ins or simulation.page_outs or simulation.committed_bytes
        if not transfers and self.plan is None and problem.minimize != Quantity.RAM:
            return blocking_metrics  # the plan is the schedule
        ram_bytes = None
        try:
            with nullcontext() if self.planning_s is None else limit_time(self.planning_s):
                check_time_limit()
                if self.plan is None and problem.minimize == Quantity.RAM:
                    ram_bytes = self._min_ram_bytes(simulation)
                check = self._make_and_check(simulation, ram_bytes or problem.usable_ram_bytes)
        except TimeLimitError:
            if self.planning_s is None:  # an outer time limit has expired
                raise
            return blocking_metrics
        self.violations += [f"plan: {violation}" for violation in check.violations]
        if self.plan is not None:
            plan_peak_bytes = check.peak_ram_bytes if problem.minimize == Quantity.RAM else None
            return _PlanMetrics(check.makespan_s, plan_peak_bytes)
        checked_metrics = _PlanMetrics(check.makespan_s, ram_bytes)
        max_metrics = _PlanMetrics(simulation.makespan_s, problem.usable_ram_bytes)
        return _increase_to_stated_values(checked_metrics, self.stated, max_metrics)

    def _make_and_check(self, simulation: Simulation, budget: int) -> PlanCheck:
        """Make the plan within a RAM budget [B], or use `plan` if there is one, and check it.

        A plan that is made has no budget if the schedule's peak exceeds it; `plan` is checked with
        the smaller of `budget` and its own budget.
        """
        from poetmodel.plan.simulation import check_plan_of

        problem, plan, checked_budget_bytes = self.problem, self.plan, None
        if plan is None:
            peak_bytes = simulation.peak_ram_bytes
            plan_budget_bytes = budget if peak_bytes <= budget else None
            plan = _make_unchecked_plan(
                problem.graph,
                problem.costs,
                self.schedule,
                StorageMode.DMA,
                plan_budget_bytes,
                peak_bytes,
            )
        else:
            checked_budget_bytes = min(budget, plan.ram_budget_bytes or budget)
        return check_plan_of(problem, plan, ram_budget_bytes=checked_budget_bytes)

    def _min_ram_bytes(self, simulation: Simulation) -> int:
        """Bisect for the smallest RAM budget whose plan meets all limits [B]; else the usable RAM.

        Returns the schedule's peak, without a plan, if that is at least the usable RAM.
        """
        min_bytes, usable_bytes = simulation.peak_ram_bytes, self.problem.usable_ram_bytes
        if min_bytes >= usable_bytes or self._peak_if_valid(simulation, min_bytes) is not None:
            return min_bytes
        peak_bytes, max_bytes = self._peak_if_valid(simulation, usable_bytes), usable_bytes
        if peak_bytes is None:
            return usable_bytes
        for _ in range(_MAX_BISECTIONS):
            middle_bytes = (min_bytes + min(max_bytes, peak_bytes)) // 2
            if middle_bytes <= min_bytes:
                break
            smaller_peak_bytes = self._peak_if_valid(simulation, middle_bytes)
            min_bytes, max_bytes, peak_bytes = (
                (middle_bytes, max_bytes, peak_bytes)
                if smaller_peak_bytes is None
                else (min_bytes, middle_bytes, smaller_peak_bytes)
            )
        # The plan for a budget of `peak_bytes` is nearly always the same.
        if peak_bytes < max_bytes and self._peak_if_valid(simulation, peak_bytes) is not None:
            return peak_bytes
        return max_bytes

    def _peak_if_valid(self, simulation: Simulation, budget: int) -> int | None:
        """Return the peak of the plan within a budget [B]; None if it violates a rule or limit."""
        problem, check = self.problem, self._make_and_check(simulation, budget)
        timed_simulation = replace_makespan(simulation, problem, makespan_s=check.makespan_s)
        violations = check.violations or violated_limits(problem, timed_simulation)
        return None if violations else check.peak_ram_bytes


def _increase_to_stated_values(
    metrics: _PlanMetrics, stated: Mapping[str, float | None], max_metrics: _PlanMetrics
) -> _PlanMetrics:
    """Return makespan and RAM, increased to the values stated in a file, up to `max_metrics`.

    A file may state the values of another, slower plan.
    """
    makespan_s, ram_bytes = metrics
    stated_s, stated_bytes = stated.get("makespan_s"), stated.get(OBJECTIVE_VALUE)
    if stated_s is not None and makespan_s is not None:
        makespan_s = max(makespan_s, min(stated_s, max_metrics.makespan_s or 0.0))
    if stated_bytes is not None and ram_bytes is not None:
        ram_bytes = max(ram_bytes, min(int(stated_bytes), max_metrics.ram_bytes or 0))
    return _PlanMetrics(makespan_s, ram_bytes)
