"""Subjects of the report for tests: verified schedules, and reports of compiled steps."""

from kit.commands import training_step
from kit.worked import bench_device
from poetmodel.case.case import Case
from poetmodel.case.checked_plan import CheckedPlan
from poetmodel.case.opening import Checked, drop_unknown_pairs
from poetmodel.device import Costs, StorageMode
from poetmodel.graph import Graph
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem
from poetmodel.schedule.document import load_document
from poetmodel.schedule.relations import format_document
from poetmodel.solver import solve


def training_problem(ram):
    """Return the problem of `training_step` on the bench device.

    With 900 B of RAM w2 is resident and w1 is on storage, with 1,140 B everything is kept.
    """
    graph = Graph.from_dict(training_step())
    return Problem(graph, Costs.estimate(graph, bench_device()), ram=ram)


def subject(problem, schedule=None, *, label="A", mode="blocking"):
    """Return the subject of the best schedule of a problem, or of `schedule`.

    The schedule is verified. If the simulator finds no violation, it is planned for `mode`, and the
    plan and its addresses are checked; otherwise the subject has no plan.
    """
    document = load_document("x.json", format_document(solve(problem).to_dict()).encode())
    chosen = document.schedule if schedule is None else schedule
    verdict = verify(problem, chosen, stated=document.stated_metrics if schedule is None else None)
    planned = None
    if not verdict.simulation.violations:
        plan = make_plan(
            problem.graph,
            problem.costs,
            chosen,
            mode=StorageMode(mode),
            ram_budget_bytes=problem.usable_ram_bytes,
        )
        arena = place(problem.graph, plan)
        planned = CheckedPlan(
            problem=problem,
            plan=plan,
            check=check_plan(problem.graph, problem.costs, plan),
            arena=arena,
            arena_check=check_arena(problem.graph, plan, arena),
        )
    return Checked(
        label=label,
        case=Case(source="skip.json", profile="skip costs.csv"),
        file="x.json",
        document=document,
        schedule=drop_unknown_pairs(problem.graph, chosen),
        problem=problem,
        costs=problem.costs,
        verdict=verdict,
        planned=planned,
    )


RESERVED_BYTES = 6
"""Reserved bytes of the step [B]."""


def certificate(**changes):
    """Return the entry "certificate" of a step's report: 9 equal results, no difference.

    `changes` replace its values.
    """
    return {
        "name": "skip",
        "compared": 9,
        "differences": [],
        "random_equal": True,
        "budget_bytes": 106,
        "plan_peak_bytes": 100,
        "heap_peak_bytes": 90,
        "eager_heap_peak_bytes": 180,
        "second_gradients_bytes": 0,
        "written_bytes": 40,
        "read_bytes": 40,
        "plan_written_bytes": 40,
        "plan_read_bytes": 40,
        "time_s": 0.25,
        "plan_time_s": 0.2,
        "plan_device": None,
        "eager_time_s": 0.125,
        "threads": 1,
        "equal": True,
        "within_budget": True,
        **changes,
    }


def step_values(problem, **changes):
    """Return the values of ``step.report()`` for a step with the best schedule of a problem.

    `changes` replace them.
    """
    graph, costs = problem.graph, problem.costs
    result = solve(problem)
    schedule, usable = result.require_schedule(), problem.usable_ram_bytes
    mode = StorageMode.BLOCKING
    plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=usable)
    check = check_plan(graph, costs, plan, ram_budget_bytes=usable)
    return {
        "name": graph.name,
        "torch": "2.13.0+cpu",
        "call": "poetmodel.torch.compile(model, loss_fn, inputs, ram='50%')",
        "graph": {
            "nodes": len(graph.nodes),
            "tensors": 7,
            "scheduled_tensors": len(graph.tensors),
            "batch_size": 1,
            "resident_bytes": {"parameters": 12, "gradients": 8},
        },
        "costs": ["compute times: least of 5 steps, 1 thread(s)", "energies: a nominal 1 W"],
        "budget_bytes": problem.ram_budget_bytes + RESERVED_BYTES,
        "keep_all_bytes": 190,
        "reserved_bytes": RESERVED_BYTES,
        "reserves": {"inputs": RESERVED_BYTES},
        "plan": {
            "mode": str(mode),
            "device": None,
            "instructions": len(plan.program),
            "recomputed": sum(op == "compute" for op, _ in plan.program) - len(graph.nodes),
            "peak_bytes": check.peak_ram_bytes + RESERVED_BYTES,
            "written_bytes": check.written_bytes,
            "read_bytes": check.read_bytes,
            "compute_s": check.compute_s,
            "transfer_s": check.transfer_s,
            "stall_s": check.stall_s,
            "makespan_s": check.makespan_s,
            "energy_j": check.energy_j,
        },
        "compile_s": 1.5,
        "certificate": certificate(),
        **changes,
    }


def step_subject(problem, **changes):
    """Return the subject of a compiled step with the best schedule of a problem.

    `changes` replace values of the step's report.
    """
    return planned_subject(problem, step_values(problem, **changes))


def planned_subject(problem, step):
    """Return the subject of the best schedule of a problem, and its plan.

    `step` has the values of ``step.report()``.
    """
    result = solve(problem)
    usable = problem.usable_ram_bytes
    plan = make_plan(
        problem.graph,
        problem.costs,
        result.require_schedule(),
        mode=StorageMode.BLOCKING,
        ram_budget_bytes=usable,
    )
    check = check_plan(problem.graph, problem.costs, plan, ram_budget_bytes=usable)
    planned = CheckedPlan(problem=problem, plan=plan, check=check)
    name = "compiled step"
    checked = Checked.of_result(result, case=Case(source=name), file=name)
    return checked.of_step(step, planned)
