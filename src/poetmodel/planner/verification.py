"""The verdict on a schedule whose transfers run beside the computing: that on its plan, too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from poetmodel.device import StorageMode
from poetmodel.plan import check_plan
from poetmodel.planner.planning import make_plan
from poetmodel.schedule import simulate
from poetmodel.schedule import verify as verify_schedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.plan import Plan
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule, Verdict


def verify(
    problem: Problem,
    schedule: Schedule,
    *,
    stated: Mapping[str, float | None] | None = None,
    plan: Plan | None = None,
) -> Verdict:
    """Judge a schedule against the rules of execution and the limits of a problem.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits.
    schedule : Schedule
        The relations.
    stated : mapping of str to number, optional
        Figures that a file claims, such as ``energy_j`` and ``peak_ram_bytes``; each is compared
        with the judge's.
    plan : Plan, optional
        Where the problem's time is a makespan: the plan to judge. Default: the one that `make_plan`
        makes for DMA and the problem's budget.

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
        return verify_schedule(problem, schedule, stated=stated)
    graph, costs = problem.graph, problem.costs
    walk = simulate(graph, costs, schedule)
    if walk.violations:  # there is no program that does what cannot be done
        serial_s = walk.makespan_s
        return verify_schedule(problem, schedule, stated=stated, makespan_s=serial_s)
    if plan is None:
        budget = problem.usable_ram_bytes
        fits = walk.peak_ram_bytes <= budget
        plan = make_plan(
            graph,
            costs,
            schedule,
            mode=StorageMode.DMA,
            ram_budget_bytes=budget if fits else None,
        )
    check = check_plan(graph, costs, plan, aux_bytes=problem.aux_limit_bytes)
    verdict = verify_schedule(problem, schedule, stated=stated, makespan_s=check.makespan_s)
    own = (f"plan: {violation}" for violation in check.violations)
    return replace(verdict, violations=(*verdict.violations, *own))
