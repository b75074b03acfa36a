"""What compiled PyTorch steps report, made without PyTorch, for tests of the report."""

from poetmodel.device import StorageMode
from poetmodel.graph.io import graph_to_dict
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.solver import solve

RESERVED_BYTES = 6
"""What the step keeps beside its schedule."""


def certificate(**changes):
    """Return what a verification found: 9 equal results, measured figures below the planned."""
    return {
        "name": "skip",
        "compared": 9,
        "differences": [],
        "random_equal": True,
        "budget_bytes": 106,
        "plan_peak_bytes": 100,
        "storage_peak_bytes": 70,
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
        "reasons": [],
        "equal": True,
        "within_budget": True,
        **changes,
    }


def step_values(problem, **changes):
    """Return what ``step.report()`` would of a step that runs the best schedule of a problem."""
    graph, costs = problem.graph, problem.costs
    result = solve(problem)
    schedule, usable = result.require_schedule(), problem.usable_ram_bytes
    mode = StorageMode.BLOCKING
    plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=usable)
    check = check_plan(graph, costs, plan, ram_budget_bytes=usable)
    return {
        "format": "poetmodel-compiled-step",
        "version": 2,
        "name": graph.name,
        "torch": "2.13.0+cpu",
        "call": "poetmodel.torch.compile(model, loss_fn, inputs, ram='50%')",
        "graph": {
            "nodes": len(graph.nodes),
            "tensors": 7,
            "scheduled_tensors": len(graph.tensors),
            "threshold_bytes": 4,
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
        "result": result.to_dict(),
        "scheduled": {"graph": graph_to_dict(graph), "costs": costs.table(graph).to_dict()},
        **changes,
    }
