"""Verified schedules for tests of the report."""

from pathlib import Path
from tempfile import TemporaryDirectory

from kit.commands import training_step, write_graph
from kit.worked import bench_device
from poetmodel.device import Costs, StorageMode
from poetmodel.graph import Graph
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem
from poetmodel.report.subject import Sources, Subject, in_graph
from poetmodel.schedule.io import parse_document
from poetmodel.schedule.relations import dump
from poetmodel.solver import solve


def training_problem(ram):
    """Return the training step of `training_step` on the bench device.

    With 900 B of RAM w2 is resident and w1 lies on storage, with 1,140 B everything is kept.
    """
    with TemporaryDirectory() as folder:
        graph = Graph.load(write_graph(Path(folder) / "step.graph.json", training_step()))
    return Problem(graph, Costs.estimate(graph, bench_device()), ram=ram)


def subject(problem, schedule=None, *, label="A", mode="blocking"):
    """Judge and plan the best schedule of a problem, or another one in its place."""
    document = parse_document(dump(solve(problem).to_dict()), source="x.json")
    chosen = document.schedule if schedule is None else schedule
    verdict = verify(problem, chosen, stated=document.stated if schedule is None else None)
    plan = check = places = None
    if not verdict.simulation.violations:
        plan = make_plan(
            problem.graph,
            problem.costs,
            chosen,
            mode=StorageMode(mode),
            ram_budget_bytes=problem.usable_ram_bytes,
        )
        check = check_plan(problem.graph, problem.costs, plan)
        places = check_arena(problem.graph, plan, place(problem.graph, plan))
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
        places=places,
    )
