"""Verified schedules for tests of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.device import StorageMode
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.report.subject import Sources, Subject, in_graph
from poetmodel.schedule.io import parse_document
from poetmodel.schedule.relations import dump
from poetmodel.solver import solve

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


def subject(
    problem: Problem, schedule: Schedule | None = None, *, label: str = "A", mode: str = "blocking"
) -> Subject:
    """Judge and plan the best schedule of a problem, or another one in its place."""
    document = parse_document(dump(solve(problem).to_dict()), source="x.json")
    chosen = document.schedule if schedule is None else schedule
    verdict = verify(problem, chosen, stated=document.stated if schedule is None else None)
    plan = check = None
    if not verdict.simulation.violations:
        plan = make_plan(
            problem.graph,
            problem.costs,
            chosen,
            mode=StorageMode(mode),
            ram_budget_bytes=problem.usable_ram_bytes,
        )
        check = check_plan(problem.graph, problem.costs, plan)
    return Subject(
        label=label,
        sources=Sources(schedule="x.json", graph="skip.json", profile="skip costs.csv"),
        document=document,
        schedule=in_graph(problem.graph, chosen),
        problem=problem,
        costs=problem.costs,
        verdict=verdict,
        plan=plan,
        check=check,
    )
