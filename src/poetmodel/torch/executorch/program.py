"""`to_executorch`: write a training step within a RAM budget as an ExecuTorch program."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.budgets import Budget
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import InputError, VerificationError, quote
from poetmodel.files import check_writable, write_bytes
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.plan import Op, check_plan
from poetmodel.plan.arena_check import check_arena
from poetmodel.planner import verify
from poetmodel.problem import Limits, Problem
from poetmodel.result import Status
from poetmodel.solver import fit_arena, solve
from poetmodel.solver.fitting import plan_and_place
from poetmodel.torch.executorch.edge import RemoveCopies, capture_edge_program, lower_program
from poetmodel.torch.executorch.planning import ReorderOperations, read_edge
from poetmodel.torch.planning.record import PlanRecord
from poetmodel.torch.planning.reserves import Reserve, Reserves
from poetmodel.torch.planning.task import LeastRam, RamTask
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from executorch.exir import EdgeProgramManager

    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import OnProgress, SolveKeywords
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.executorch.edge import LoweredProgram
    from poetmodel.torch.graph.step_graph import StepGraph

DEVICE: Final = "rpi4b"
"""The device for the time estimates of operations, by default."""
_MAX_ATTEMPTS: Final = 4
"""Maximum number of attempts to lower a program. Each attempt after the first has less RAM, because
the last arena was too large."""


@dataclass(frozen=True, kw_only=True)
class ExecutorchProgram(PlanRecord):
    """A written ExecuTorch program. All sizes are bytes in an arena, the budget included.

    `solve_s` excludes a fallback to minimum RAM; `keep_all_bytes` includes `resident_bytes`.
    """

    path: Path
    arena_bytes: int
    """Arena of the file; at most the budget [B]."""
    executorch_bytes: int
    """Arena of the program without poetmodel, with ExecuTorch's greedy planner [B]."""
    greedy_bytes: int
    """Arena of this program with the offsets of ExecuTorch's greedy planner [B]."""
    resident_bytes: int
    """Trained parameters and changed buffers, which are part of the arena [B]."""
    sgd: Mapping[str, Any] | None
    """Arguments of ``get_sgd_optimizer`` besides the parameters; None without an optimizer."""
    result: SolveResult = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, without the result."""
        values = {key: value for key, value in vars(self).items() if key != "result"}
        return values | {"path": str(self.path)}

    def __str__(self) -> str:
        """Return a line: name, sizes, recomputations, overhead, device, status and solve time."""
        return (
            f"{self.name}: arena {format_bytes(self.arena_bytes)} of "
            f"{format_bytes(self.ram_budget_bytes)} (keep-all {format_bytes(self.keep_all_bytes)}, "
            f"ExecuTorch's own {format_bytes(self.executorch_bytes)}; "
            f"{format_bytes(self.resident_bytes)} are parameters and buffers), "
            f"{self.describe_solve()}"
        )


def to_executorch(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    ram: str | int,
    path: str | Path,
    optimizer: torch.optim.Optimizer | None = None,
    device: str | Device = DEVICE,
    time_limit: float = 60.0,
    gap: float = 0.01,
    on_progress: OnProgress | None = None,
    storage: str | Path | None = None,
    paging: bool | None = None,
) -> ExecutorchProgram:
    """Write a training step as an ExecuTorch program whose arena is within a budget.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`; every batch has the shapes of the inputs. The program reads the tensors
        among the inputs in their order, named inputs in the order of their sorted names.
    ram : str or int
        The budget for the arena of the program: trained parameters, changed buffers, inputs,
        activations, gradients. Bytes, a size such as ``256KiB``, or a percentage of the keep-all
        peak of the step.
    path : str or Path
        The file to write, ``*.pte``.
    optimizer : torch.optim.Optimizer, optional
        An SGD of all trained parameters; ExecuTorch has no other optimizer. The program itself only
        computes gradients. The result has the arguments for the same optimizer in ExecuTorch's
        runtime, which stores its moments outside the arena.
    device : str or Device
        The device for the time estimates of operations.
    time_limit : float
        Wall time of one search for a schedule and its offsets [s]. If none fits, a search for
        minimum RAM follows; an arena of the file that is too large causes further searches.
    gap : float
        Gap of the overhead at which the solver stops.
    on_progress : callable, optional
        As for `poetmodel.solve`: called with the progress of each solve.
    storage, paging
        Not supported: ExecuTorch programs do not page.

    Returns
    -------
    ExecutorchProgram
        The written program, with its sizes and the result of the solve.

    Raises
    ------
    BudgetError
        If the budget is invalid, or too small: the message then states the smallest budget known to
        suffice.
    CaptureError
        If the step is invalid or cannot be exported, or an operator has no kernel; if forward
        changes Python state that it reads, draws from another generator than PyTorch's, seeds, or
        does what TorchDynamo does not trace. The message names the operator or the line.
    InputError
        If an option is invalid, the file cannot be written, the optimizer is not supported, or
        paging is requested.
    NoScheduleError
        If no schedule was found in time.
    VerificationError
        If the plan or its arena violates a rule, or the arena of the file still exceeds the budget
        after the further searches. This is a bug of poetmodel.
    """
    output_path = Path(path)
    _check_arguments(output_path, storage, paging)
    Limits(ram=ram).check()
    sgd = None if optimizer is None else _sgd_options(optimizer, model, loss_fn)
    if isinstance(device, str):
        device = Device.load(device)
    name = type(model).__name__
    edge = capture_edge_program(name, model, loss_fn, inputs)
    executorch_bytes = lower_program(edge, use_our_offsets=False).arena_bytes
    edge = edge.transform([RemoveCopies()])
    edge_graph = read_edge(edge.exported_program(), name=name)
    keep_all_bytes = checkpoint_all_peak_bytes(edge_graph.graph) + edge_graph.resident_bytes
    budget = Budget.parse(ram)
    budget_bytes = budget.resolve(keep_all_bytes)
    problem = Problem(
        edge_graph.graph,
        Costs.estimate(edge_graph.graph, device),
        ram=max(1, budget_bytes - edge_graph.resident_bytes),
        paging=False,
        minimize="time",
    )
    task = RamTask(
        name=f"the arena of {name}",
        problem=problem,
        budget_bytes=budget_bytes,
        reserves=Reserves((Reserve("parameters and buffers", edge_graph.resident_bytes),)),
        keep_all_bytes=keep_all_bytes,
        is_fraction=budget.fraction is not None,
    )
    options: SolveKeywords = {"time_limit": time_limit, "gap": gap, "on_progress": on_progress}
    result, plan, program = _solve_and_lower(task, options, edge, edge_graph.step_graph)
    write_bytes(output_path, program.program)
    return ExecutorchProgram.of(
        result,
        plan,
        name=name,
        path=output_path,
        ram_budget_bytes=budget_bytes,
        arena_bytes=program.arena_bytes,
        keep_all_bytes=keep_all_bytes,
        executorch_bytes=executorch_bytes,
        greedy_bytes=program.greedy_bytes,
        resident_bytes=edge_graph.resident_bytes,
        device=device.key or device.name,
        sgd=sgd,
        result=result,
    )


def _solve_and_lower(
    task: RamTask,
    options: SolveKeywords,
    edge: EdgeProgramManager,
    step_graph: StepGraph,
) -> tuple[SolveResult, Plan, LoweredProgram]:
    """Solve a step and lower it in the order of the plan; return (result, plan, program).

    While the file's arena exceeds the budget, repeats with the solver's RAM reduced by the excess.
    """
    excess_bytes = 0
    for _ in range(_MAX_ATTEMPTS):
        result, plan = _solve_fitting(task, options)
        order = [index for op, index in plan.program if op == Op.COMPUTE]
        reordered_edge = edge.transform([ReorderOperations(step_graph, order)])
        program = lower_program(reordered_edge, use_our_offsets=True)
        excess_bytes = program.arena_bytes - task.budget_bytes
        if excess_bytes <= 0:
            return result, plan, program
        ram_bytes = task.problem.usable_ram_bytes - excess_bytes
        task = replace(task, problem=replace(task.problem, ram=ram_bytes))
    raise VerificationError(  # our bug: never return such a result
        [f"{step_graph.name}: the arena of the file is {excess_bytes:,} B above the budget"]
    )


def _solve_fitting(task: RamTask, options: SolveKeywords) -> tuple[SolveResult, Plan]:
    """Return (result, plan) of a schedule whose arena fits, or else of minimum RAM, checked."""
    problem = task.problem
    result, plan, arena = fit_arena(problem, mode=StorageMode.BLOCKING, **options)
    if plan is None or arena is None:
        result, plan, arena = _solve_min_ram(task, options, result)
    violations = (
        *check_plan(problem.graph, problem.costs, plan).violations,
        *check_arena(problem.graph, plan, arena).violations,
    )
    if violations:  # our bug: never return such a result
        raise VerificationError(violations)
    return result, plan


def _solve_min_ram(
    task: RamTask, options: SolveKeywords, failed_result: SolveResult
) -> tuple[SolveResult, Plan, Arena]:
    """Solve for minimum RAM, with gap 0; refuse the budget if even this arena does not fit.

    Return `failed_result` with the new schedule and status FEASIBLE, its plan and its arena.
    """
    problem = task.problem
    ram_bytes = problem.usable_ram_bytes
    exact_options: SolveKeywords = {**options, "gap": 0.0}
    min_ram_result = solve(replace(problem, ram="100%", minimize="ram"), **exact_options)
    schedule = min_ram_result.require_schedule()
    plan, arena = plan_and_place(
        problem.graph,
        problem.costs,
        schedule,
        mode=StorageMode.BLOCKING,
        ram_budget_bytes=None,
        arena_limit_bytes=ram_bytes,
    )
    if arena.bytes <= ram_bytes:
        verdict = verify(problem, schedule, plan=plan)
        result = replace(
            failed_result,
            schedule=schedule,
            simulation=verdict.simulation,
            violations=verdict.violations,
            status=Status.FEASIBLE,
            reason="",
        )
        return result, plan, arena
    least = LeastRam(
        arena.bytes + task.reserves.bytes, ceil(min_ram_result.bound or 0.0) + task.reserves.bytes
    )
    raise task.make_error(least)


def _check_arguments(output_path: Path, storage: object, paging: object) -> None:
    """Raise `InputError` for storage or paging, and for a file not ``*.pte`` or not writable."""
    if storage is not None or paging:
        option = "paging" if storage is None else "storage"
        raise InputError(
            f"{option}: an ExecuTorch program has all data in its arena and cannot page; "
            "leave it out, or write C that pages with pmt.export"
        )
    if output_path.suffix != ".pte":
        raise InputError(f"path: expected a file *.pte, got {quote(str(output_path))}")
    check_writable(output_path)


def _sgd_options(optimizer: torch.optim.Optimizer, *objects: object) -> dict[str, Any]:
    """Return arguments for ExecuTorch's SGD, which must be able to replace `optimizer`."""
    for error in _sgd_errors(optimizer, objects):
        raise InputError(f"optimizer: {error}")
    (group,) = optimizer.param_groups
    options = {key: float(group[key]) for key in ("lr", "momentum", "dampening", "weight_decay")}
    return {**options, "nesterov": bool(group["nesterov"])}


def _sgd_errors(optimizer: torch.optim.Optimizer, objects: tuple[object, ...]) -> Iterator[str]:
    """Yield each reason why ExecuTorch's SGD cannot replace an optimizer of `objects`."""
    if type(optimizer) is not torch.optim.SGD:
        yield (
            f"ExecuTorch's training runtime has only SGD, got {type(optimizer).__name__}; use "
            "torch.optim.SGD, or leave the optimizer out and use the gradients"
        )
    groups = optimizer.param_groups
    if len(groups) != 1 or groups[0]["maximize"]:
        yield "ExecuTorch's SGD has one group of parameters, and no maximize; use such an SGD"
    dtypes = sorted({str(parameter.dtype) for parameter in groups[0]["params"]} - {"torch.float32"})
    if dtypes:
        yield (
            f"ExecuTorch's SGD supports only float32 parameters, got {', '.join(dtypes)}; train in "
            "float32, or leave the optimizer out and use the gradients"
        )
    modules = [candidate for candidate in objects if isinstance(candidate, torch.nn.Module)]
    trained_ids = {
        id(parameter)
        for module in modules
        for parameter in module.parameters()
        if parameter.requires_grad
    }
    if trained_ids != {id(parameter) for parameter in groups[0]["params"]}:
        yield (
            "expected exactly the parameters that require a gradient; set requires_grad to "
            "False for the others"
        )
