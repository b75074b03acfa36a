"""A compiled step: captured, measured, solved, planned, and compared with eager PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.budgets import Budget
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import InputError, quote
from poetmodel.planner import make_checked_plan
from poetmodel.problem import Problem, Quantity
from poetmodel.result import Status, Termination, gap_over_time
from poetmodel.solver import solve
from poetmodel.torch.cache import Cache
from poetmodel.torch.capturing.front import Changed
from poetmodel.torch.capturing.guards import Guards, refuse_inference_mode, refuse_inputs
from poetmodel.torch.capturing.inputs import flatten, input_errors, refuse
from poetmodel.torch.compile_cache import CachedStep
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.planning.options import type_errors
from poetmodel.torch.planning.progress import solve_progress_callback
from poetmodel.torch.planning.record import PlanRecord
from poetmodel.torch.planning.reserves import Reserve, Reserves
from poetmodel.torch.planning.rounds import search_in_rounds
from poetmodel.torch.planning.task import LeastRam, RamTask, find_min_ram
from poetmodel.torch.runtime.comparison import check_agreement
from poetmodel.torch.runtime.convolutions import choose_divisions, divide_convolutions
from poetmodel.torch.runtime.profiling import MEASURING_S, Profile, measure
from poetmodel.torch.runtime.runner import Runner
from poetmodel.torch.state.memory import release_memory
from poetmodel.torch.state.pages import make_folder
from poetmodel.torch.step.scheduled import (
    build_scheduled_graph,
    keep_all_bytes,
    select_costs,
)
from poetmodel.torch.step.trace import Trace, capture_step

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.capturing.front import Capture
    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.state.store import StateStore


DEFAULT_TIME_LIMIT_S: Final = 60.0
"""Maximum time for the solver by default [s]."""
DEFAULT_GAP: Final = 0.01
"""Gap at which the solver stops by default, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The options of `compile`, which documents each field."""

    ram: str | int
    storage: str | Path | None
    paging: bool | None
    recompute: bool
    device: str | Device | None
    minimize: str | None
    deadline: str | float | None
    time_limit: float | None
    gap: float | None
    steps: int
    rollback: bool
    dynamic: str
    accumulate: int
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
    clip_grad_norm: float | None
    cache: str | Path | bool

    def __post_init__(self) -> None:
        """Check the options; raise one `InputError` for all errors."""
        faults = [*type_errors({field.name: getattr(self, field.name) for field in fields(self)})]
        if self.dynamic not in ("error", "retrace"):
            faults.append(f"dynamic: expected error or retrace, got {quote(self.dynamic)}")
        if self.paging and self.storage is None:
            faults.append("paging: needs a folder for pages; set storage=, or paging=False")
        if type(self.accumulate) is not int or self.accumulate < 1:
            faults.append(f"accumulate: expected 1 or more steps, got {quote(self.accumulate)}")
        elif self.accumulate > 1 and self.optimizer is not None:
            faults.append("accumulate: a step with an optimizer updates at once; leave one out")
        if type(self.steps) is not int or self.steps < 1:
            faults.append(f"steps: expected 1 or more steps, got {quote(self.steps)}")
        if faults:
            raise InputError(faults)

    @property
    def limit_s(self) -> float:
        """Maximum time for the solver [s]."""
        return DEFAULT_TIME_LIMIT_S if self.time_limit is None else self.time_limit

    @property
    def gap_tolerance(self) -> float:
        """Gap of the overhead at which the solver stops, as a fraction."""
        return DEFAULT_GAP if self.gap is None else self.gap

    @property
    def can_page(self) -> bool:
        """Whether tensors may be paged."""
        return self.storage is not None if self.paging is None else self.paging


class Compiled:
    """A step compiled for one set of input shapes: trace, costs, schedule, plan and program.

    Creating the object captures, measures and solves the step, and compares it with eager PyTorch.
    If the comparison fails, the object is closed. `first_compiled` is the step for the first input
    shapes, None for these: a budget in percent refers to its keep-all peak, and its state file is
    shared. `show_phase` is called with the name of each phase, and with the gap during the solve.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        inputs: Inputs,
        options: CompileOptions,
        *,
        first_compiled: Compiled | None = None,
        show_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        start_s = perf_counter()
        show_phase("capturing the step")
        _check_host(model)
        refuse(type(model).__name__, input_errors(inputs))
        refuse_inputs(flatten(inputs)[0])  # before PyTorch's warnings about them
        joint = capture_step(
            model,
            loss_fn,
            inputs,
            optimizer=options.optimizer,
            clip_grad_norm=options.clip_grad_norm,
            follows_state=options.dynamic == "retrace",
        )
        joint = replace(joint, accumulate=options.accumulate)
        self.cached_step = CachedStep(Cache.from_option(options.cache), joint)
        """Cached results of earlier compilations of the step."""
        self.trace = self.cached_step.load_trace()
        self.guards = Guards(joint)
        self.trace_s = perf_counter() - start_s
        """Time to capture the step, and to execute it once to find tensors and workspaces, unless
        these are cached [s]."""
        self.keep_all_bytes = keep_all_bytes(self.trace)
        """The keep-all peak of tensors and workspaces [B]."""
        self.budget_bytes = self._resolve_budget(options, first_compiled)
        """The budget for tensors and workspaces [B]."""
        divisions = choose_divisions(self.trace, budget_bytes=self.budget_bytes)
        self.trace = divide_convolutions(self.trace, divisions)
        self.scheduled = build_scheduled_graph(
            self.trace, budget_bytes=self.budget_bytes, decide_homes=options.can_page
        )
        """The graph of the solved problem; `costs` has its costs."""
        costs_start_s = perf_counter()
        show_phase("finding the costs of operations")
        costs, self.profile, self.notes = _find_costs(self.trace, options, self.cached_step)
        """`profile` is the measurement of the costs, None for estimates; `notes` describe the
        origin of the costs, and operations executed in pieces, for display."""
        if divisions:
            note = f"{len(divisions)} operations are executed in pieces, with the same bits"
            self.notes = (*self.notes, note)
        self.profile_s = perf_counter() - costs_start_s
        """Time to measure or estimate costs [s]."""
        self.costs = select_costs(costs, self.scheduled.graph)
        self.options = options
        self.state_store: StateStore | None = (
            None if first_compiled is None else first_compiled.state_store
        )
        """The store of state in a file, shared by all input shapes; None without a state file."""
        task = self._make_task(first_compiled)
        self.result = self._solve(task, solve_progress_callback(show_phase, options.limit_s))
        """Result of the solver. `plan` and `runner` execute its schedule."""
        self.plan, self.check = self._make_plan(self.result)
        self.runner = self._make_runner(self.plan)
        show_phase("comparing with eager PyTorch")
        try:
            check_agreement(self.trace, self.runner)
        except BaseException:
            self.close()
            raise
        release_memory()
        self.compile_s = perf_counter() - start_s
        """Time to create this object [s]."""

    @property
    def peak_bytes(self) -> int:
        """The peak of the plan plus the reserved bytes; executions do not exceed this sum [B]."""
        return self.check.peak_ram_bytes + self.scheduled.reserved_bytes

    @property
    def device(self) -> str | None:
        """Name of the device of the plan's times; None if the costs have no device."""
        device = self.costs.device
        return None if device is None else device.name

    @property
    def record(self) -> PlanRecord:
        """The plan in numbers."""
        return PlanRecord.of(
            self.result,
            self.plan,
            name=self.trace.joint.name,
            ram_budget_bytes=self.budget_bytes,
            keep_all_bytes=self.keep_all_bytes,
            device=self.device,
        )

    def _resolve_budget(self, options: CompileOptions, first_compiled: Compiled | None) -> int:
        """Return the budget of the step [B]; a percentage is of the first shapes' keep-all peak.

        The RAM of a host does not depend on inputs. A percentage with which the first shapes keep
        all tensors permits that for these shapes, too.
        """
        keep_all_bytes = self.keep_all_bytes
        budget = Budget.parse(options.ram)
        if first_compiled is None or budget.fraction is None:
            return budget.resolve(keep_all_bytes)
        first_keeps_all = first_compiled.budget_bytes >= first_compiled.keep_all_bytes
        return (
            max(first_compiled.budget_bytes, keep_all_bytes)
            if first_keeps_all
            else first_compiled.budget_bytes
        )

    def _make_task(self, first_compiled: Compiled | None) -> RamTask:
        """Return the task for the budget minus reserved bytes; percentages are of first shapes."""
        scheduled, costs, options = self.scheduled, self.costs, self.options
        minimize = options.minimize
        if minimize is None:
            minimize = Quantity.TIME if costs.device is None else Quantity.ENERGY
        problem = Problem(
            scheduled.graph,
            costs,
            ram=max(1, self.budget_bytes - scheduled.reserved_bytes),
            deadline=options.deadline,
            recompute=options.recompute,
            paging=options.can_page,
            minimize=minimize,
        )
        first = self if first_compiled is None else first_compiled
        return RamTask(
            name=self.trace.joint.name,
            problem=problem,
            budget_bytes=self.budget_bytes,
            reserves=Reserves(tuple(Reserve(*item) for item in scheduled.reserves)),
            keep_all_bytes=first.keep_all_bytes,
            is_fraction=Budget.parse(options.ram).fraction is not None,
        )

    def _solve(self, task: RamTask, on_progress: Callable[[SolveProgress], None]) -> SolveResult:
        """Solve the task, or return its cached result if it is final.

        The solver has as many threads as PyTorch, which is idle at that time. Without a schedule,
        `reason` explains the reserved bytes.
        """
        options = self.options
        if task.usable_bytes <= 0:
            raise task.make_error(self._find_least_ram(task))

        def solve_within(limit_s: float, start: Schedule | None) -> SolveResult:
            """Solve the problem within `limit_s` [s], from an initial schedule if any."""
            return solve(
                task.problem,
                threads=torch.get_num_threads(),
                time_limit=limit_s,
                gap=options.gap_tolerance,
                start=start,
                on_progress=on_progress,
            )

        has_rounds = options.time_limit is None and options.gap is None and self.profile is not None
        has_rounds = has_rounds and task.problem.minimize == Quantity.TIME

        def solve_from(known: SolveResult | None) -> SolveResult:
            if has_rounds:
                return search_in_rounds(
                    solve_within, known, steps=options.steps, time_limit_s=options.limit_s
                )
            return solve_within(options.limit_s, None if known is None else known.schedule)

        result = task.solve(
            self.cached_step,
            gap=options.gap_tolerance,
            time_limit_s=options.limit_s,
            solve_from=solve_from,
        )
        if result.schedule is not None:
            if has_rounds:
                self._note_end_of_search(result)
            return result
        if options.deadline is None:
            is_proved = result.status == Status.INFEASIBLE
            reason = str(task.make_error(self._find_least_ram(task), is_proved=is_proved))
        else:
            reason = (
                f"{result.reason}; that RAM budget is ram={self.budget_bytes:,} B minus the "
                f"{self.scheduled.reserved_bytes:,} B that are reserved; everything is kept at "
                f"ram={self.keep_all_bytes:,} B"
            )
        return replace(result, reason=reason)

    def _note_end_of_search(self, result: SolveResult) -> None:
        """Add a note if a search in rounds ended because it could gain less than it costs."""
        ended_early = (result.time_limit_s or 0.0) < self.options.limit_s and result.gap
        if not ended_early or result.termination != Termination.TIME_LIMIT:
            return
        gaps = [gap for _, gap in gap_over_time(result.history) if gap < 1]
        before = f" ({gaps[0]:.2%} before)" if gaps else ""
        self.notes = (
            *self.notes,
            f"the search ended after {result.time_limit_s:.3g} s at a gap of {result.gap:.2%}"
            f"{before}: {self.options.steps:,} steps may gain less than it costs; time_limit, gap "
            "or steps continue it",
        )

    def _find_least_ram(self, task: RamTask) -> LeastRam:
        """Search for the smallest budget that suffices, without a deadline; at most keep-all."""
        problem = replace(task.problem, deadline=None)
        result = find_min_ram(problem, self.options.gap_tolerance)
        least = LeastRam.from_result(result, self.scheduled.reserved_bytes)
        return LeastRam(
            min(least.sufficient_bytes or self.keep_all_bytes, self.keep_all_bytes),
            min(least.needed_bytes, self.keep_all_bytes),
        )

    def _make_plan(self, result: SolveResult) -> tuple[Plan, PlanCheck]:
        """Return a result's checked plan, with blocking transfers; state of size 0 is resident."""
        graph, costs = self.scheduled.graph, self.costs
        usable_bytes = self.budget_bytes - self.scheduled.reserved_bytes
        schedule = _make_reserved_state_resident(graph, result.require_schedule())
        mode = StorageMode.BLOCKING
        return make_checked_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=usable_bytes)

    def _make_runner(self, plan: Plan) -> Runner:
        """Return the runner of a plan, with its files; sets or reuses `state_store`."""
        runner = Runner(
            self.trace,
            self.scheduled.to_whole_plan(plan),
            folder=self.options.storage,
            rollback=self.options.rollback,
            state_store=self.state_store,
        )
        self.state_store = runner.state_store
        return runner

    def execute(self, flat_inputs: Sequence[Any]) -> Any:
        """Execute a valid step on flat inputs; return its loss, or the model's output.

        Raises `Changed` before anything is executed if no capture of Dynamo is valid.
        Afterwards Dynamo repeats what forward changes in Python.
        """
        captures = self.trace.joint.captures
        outputs: list[Any] = []

        def run(capture: Capture, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            if capture not in captures:
                raise Changed(captured=capture)
            if not self.guards.hold_within(flat_inputs, tensors):
                raise Changed
            constants = captures.replaced_constants(tensors)
            if constants and self.options.optimizer is not None:  # they may be on storage
                raise Changed(("a tensor outside of the model, which forward reads, is another",))
            try:
                module_tensors = self.trace.joint.module_tensors(tensors)
            except AttributeError:
                raise Changed from None
            results = self.runner.run(
                flat_inputs, constants=constants, module_tensors=module_tensors
            )
            outputs.append(self.runner.build_output(results))
            return captures.arrange(capture, results)

        captures.call(flat_inputs, run)
        return outputs[0]

    def close(self) -> None:
        """Move all state to RAM; remove the page file, and the state file of all input shapes."""
        self.runner.close()
        if self.state_store is not None:
            self.state_store.close()


def _make_reserved_state_resident(graph: Graph, schedule: Schedule) -> Schedule:
    """Return a schedule in which all state with a size of 0 in `graph`, reserved, is resident."""
    sizes = graph.tensor_bytes
    free_state = {i for i in graph.state_tensors if not sizes[i]}.difference(schedule.resident)
    if not free_state:
        return schedule
    replacements = graph.replacement_of
    state = free_state | {replacements[i] for i in free_state if i in replacements}
    decisions: dict[str, Any] = {
        name: tuple(pair for pair in getattr(schedule, name) if pair[1] not in state)
        for name in ("S_RAM", "S_AUX", "M_in", "M_out")
    }
    return replace(
        schedule, resident=tuple(sorted(free_state.union(schedule.resident))), **decisions
    )


def _check_host(model: torch.nn.Module) -> None:
    """Refuse inference mode, CPU autocast, and parameters on other devices than the CPU."""
    refuse_inference_mode()
    if torch.is_autocast_enabled("cpu"):
        raise CaptureError(
            "autocast is active: use it inside the model and the loss, and compile outside of it"
        )
    if not isinstance(model, torch.nn.Module):
        return  # the capture raises
    device_types = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if device_types:
        raise InputError(
            f"{type(model).__name__}: steps are only executed on the cpu, and parameters are on "
            f"{' and '.join(sorted(device_types))}"
        )


def _find_costs(
    trace: Trace, options: CompileOptions, cached_step: CachedStep
) -> tuple[Costs, Profile | None, tuple[str, ...]]:
    """Return (costs of the step, their measurement, notes on their origin).

    The measurement, cached or made now in the folder for pages, is None for estimates.
    """
    if options.device is not None:
        device = options.device
        if not isinstance(device, Device):
            device = Device.load(device)
        costs = Costs.estimate(trace.graph, device)
        return costs, None, (f"costs: estimated for {costs.source}",)
    folder = options.storage if options.can_page else None
    if folder is not None:
        make_folder(folder)
    profile = cached_step.load_profile(
        trace, folder, partial(measure, trace, folder=folder, max_s=MEASURING_S)
    )
    return profile.costs, profile, profile.notes
