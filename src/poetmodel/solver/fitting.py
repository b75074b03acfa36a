"""Schedules whose addresses fit: solved again with less RAM where the block is above the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.placement import place
from poetmodel.plan.arena import ALIGNMENT, aligned, check_alignment
from poetmodel.planner import make_plan, verify
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity, simulate
from poetmodel.solver.facade import solve as solve_by_default
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


class Fitted(NamedTuple):
    """A result with the plan of its schedule and addresses for it, within the budget."""

    result: SolveResult
    """What was found for the problem as stated; without a schedule, why."""
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
    **options: Any,
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
        What solves a problem, with `options`.
    most_solves : int
        How often the problem is solved at most.
    **options
        Keyword arguments of `solve`. A time limit is that of each solve.

    Returns
    -------
    Fitted
        Result, plan and arena. The bound of the result is that of the problem as stated, so that
        its gap includes what the addresses cost. Without a schedule plan and arena are None, and
        the result says why: ``infeasible`` where it is proved that no addresses fit.

    Notes
    -----
    From the second solve on, sizes are rounded up to the alignment, as they are in the block: where
    that is infeasible no addresses fit. Blocks differ between schedules, and less RAM may have a
    larger one. Once a budget is too small for any schedule, budgets between it and the least that
    gave a block too large are tried by halves.
    """
    check_alignment(alignment)
    search = _Search(problem, StorageMode(mode), alignment, solve, options)
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
    """
    room = ram_budget_bytes if room_bytes is None else room_bytes
    peak_bytes = simulate(graph, costs, schedule).peak_ram_bytes
    budget = ram_budget_bytes
    while True:
        plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=budget)
        arena = place(graph, plan, alignment=alignment, seed=seed)
        if room is None or budget is None:
            return plan, arena
        fits = arena.bytes <= room
        if fits or budget <= peak_bytes or mode != StorageMode.DMA or not may_wait:
            return replace(plan, ram_budget_bytes=room), arena
        budget = max(peak_bytes, budget - (arena.bytes - room))


class _Search:
    """The search for a schedule whose addresses fit."""

    def __init__(
        self,
        problem: Problem,
        mode: StorageMode,
        alignment: int,
        solve: Callable[..., SolveResult],
        options: Mapping[str, Any],
    ) -> None:
        self.problem, self.mode, self.alignment = problem, mode, alignment
        self.solve, self.options = solve, options
        self.usable_bytes = problem.usable_ram_bytes
        self.smallest_bytes: int | None = None
        """The size of the smallest block found."""

    def run(self, most_solves: int) -> Fitted:
        """Solve until the addresses fit, or nothing is left to try."""
        first = result = self.solve(self.problem, **self.options)
        if result.schedule is None or result.violations:
            return Fitted(result, None, None)
        plan, arena = self._placed(result, self.usable_bytes)
        if arena.bytes <= self.usable_bytes:
            return Fitted(result, plan, arena)
        rounded = rounded_problem(self.problem, self.alignment)
        low, high, budget = 0, self.usable_bytes + 1, self.usable_bytes
        if rounded.graph == self.problem.graph:
            high = min(budget, result.peak_ram_bytes or 0)
            budget = high - (arena.bytes - self.usable_bytes)
        for _ in range(most_solves - 1):
            if budget <= low:
                budget = (low + high) // 2
            if high - low <= 1 or result.termination == Termination.INTERRUPTED:
                break
            less = replace(rounded, ram=budget + rounded.resident_bytes)
            result = self.solve(less, **self.options)
            if result.schedule is None or result.violations:
                if result.status == Status.INFEASIBLE and budget == self.usable_bytes:
                    return Fitted(self._infeasible(result), None, None)
                low = budget
                continue
            plan, arena = self._placed(result, budget)
            if arena.bytes <= self.usable_bytes:
                return self._fitted(first, result, plan, arena)
            high = min(budget, result.peak_ram_bytes or 0)
            budget = high - (arena.bytes - self.usable_bytes)
        return Fitted(self._failed(first), None, None)

    def _placed(self, result: SolveResult, budget: int) -> tuple[Plan, Arena]:
        """Plan a schedule within a budget, and place it."""
        graph = self.problem.graph
        plan, arena = plan_and_place(
            graph,
            self.problem.costs,
            replace(result.require_schedule(), identity=GraphIdentity.of(graph)),
            mode=self.mode,
            ram_budget_bytes=budget,
            room_bytes=self.usable_bytes,
            alignment=self.alignment,
            seed=self.options.get("seed", 0),
            may_wait=not self.problem.is_overlapping,
        )
        if self.smallest_bytes is None or arena.bytes < self.smallest_bytes:
            self.smallest_bytes = arena.bytes
        return plan, arena

    def _fitted(self, first: SolveResult, result: SolveResult, plan: Plan, arena: Arena) -> Fitted:
        """Return what was found with less RAM as a result of the problem as stated."""
        schedule = replace(result.require_schedule(), identity=plan.identity)
        verdict = verify(self.problem, schedule)
        found = replace(
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
        proved = (found.objective_gap or 0.0) <= found.requested_gap
        ended = result.termination
        if proved or ended == Termination.PROVED:
            ended = Termination.PROVED if proved else Termination.STALLED
        status = Status.OPTIMAL if proved else Status.FEASIBLE
        return Fitted(replace(found, status=status, termination=ended), plan, arena)

    def _infeasible(self, result: SolveResult) -> SolveResult:
        """Return the proof, a result of the problem with sizes rounded up, in its words."""
        reason = (
            f"no addresses fit {self._room()}: tensors at multiples of {self.alignment} B need "
            f"more; {result.reason}"
        )
        # Own constraints on bytes are not the same for sizes that are rounded up.
        status = Status.UNKNOWN if self.problem.constraints else Status.INFEASIBLE
        return replace(result, status=status, reason=reason)

    def _failed(self, first: SolveResult) -> SolveResult:
        excess = (self.smallest_bytes or 0) - self.usable_bytes
        reason = (
            f"no schedule was found whose addresses fit {self._room()}: the smallest block found "
            f"takes {format_bytes(excess)} more; add as much to ram"
        )
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


def rounded_problem(problem: Problem, alignment: int) -> Problem:
    """Return the problem with numbers for its limits and sizes as they are in a block.

    Storage is larger by as much as the rounding may take there.
    """
    graph, stated = problem.graph, problem.resolved()
    room = stated.aux_limit_bytes
    return replace(
        stated,
        graph=aligned_graph(graph, alignment),
        aux_bytes=None if room is None else room + alignment * len(graph.tensors),
    )


def aligned_graph(graph: Graph, alignment: int) -> Graph:
    """Return a graph with the sizes that its tensors and workspaces have in a block."""
    nodes = tuple(
        replace(
            node,
            workspace_bytes=aligned(node.workspace_bytes, alignment),
            outputs=tuple(
                replace(one, bytes=aligned(one.bytes, alignment)) for one in node.outputs
            ),
        )
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)
