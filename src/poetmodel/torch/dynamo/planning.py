"""The joint graph as a training graph, its schedule within a budget, and records of plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.budgets import Budget
from poetmodel.clock import processor_clock
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op
from poetmodel.planner import make_checked_plan
from poetmodel.problem import Problem
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.torch.dynamo.costs import CALL_S, host_device, load_machine_rates
from poetmodel.torch.dynamo.joint_graph import storage_sizes
from poetmodel.torch.dynamo.ranks import RankExchange
from poetmodel.torch.dynamo.regions import Region, find_regions, solve_with_regions
from poetmodel.torch.planning.cache import CachedSchedules
from poetmodel.torch.planning.progress import solve_progress_callback
from poetmodel.torch.planning.record import PlanRecord
from poetmodel.torch.planning.reserves import Reserve, Reserves
from poetmodel.torch.planning.task import LeastRam, RamTask, find_min_ram
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from pathlib import Path

    from poetmodel.device.hardware import Storage
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.cache import Cache
    from poetmodel.torch.dynamo.joint_graph import JointGraph
    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.state.paging import Paging

TOKEN_BYTES: Final = 8
"""RAM of the token of each page on storage [B]."""
MIN_SOLVE_S: Final = 1.0
"""Time for solving a graph even after the time limit of the call [s]."""
FIRST_TIME_RATIO: Final = 0.15
"""Limit on the CPU time of the first solve of a problem, as a fraction of the time limit."""
EAGER_PEAK: Final = "eager"
"""The value of ``ram=`` for the peak of the model itself."""
_ZEROS_HINT: Final = " (loss_only=True omits those of all results but the loss)"
LOSS_OUTSIDE: Final = "memory of the loss between forward and backward pass not counted"
"""Text if results need gradients, none of them is a scalar, and no outside memory is known."""
MEASURED: Final = "measured"
"""The value of ``costs=`` for times that are measured on this host instead of estimated."""


@dataclass(frozen=True, kw_only=True)
class GraphRecord(PlanRecord):
    """The plan of one captured graph in numbers. All bytes are those of PyTorch's allocator.

    The name has the number of the graph, function, shapes of the first inputs, and the number of a
    further plan. The overhead is relative to the time of a single pass.
    """

    predicted_peak_bytes: int
    """Peak of the graph's allocations [B]: at most the budget, unless the plan is for a call with
    concurrent calls."""
    paged_out: int
    """Number of page-outs."""
    paged_in: int
    """Number of page-ins."""
    argument_bytes: int
    """Size of parameters, buffers and inputs, which the budget does not count [B]."""
    eager_bytes: int | None
    """Peak with the checkpoints of the model itself [B]; None without any."""
    is_predicted: bool
    """Whether no graph was executed: sizes are predictions, and workspaces are not counted."""
    outside_bytes: int | None = None
    """Bytes of the budget for memory between forward and backward outside of the function [B]; None
    if there is none."""
    regions: tuple[str, ...] = ()
    """Bytes of each region in RAM when the backward pass begins, and its budget, as text."""
    added_bytes: int = 0
    """Size of gradients that the backward pass adds to ``.grad``, not counted in the budget [B]."""
    is_loss_missing: bool = False
    """Whether results need gradients, none of them is a scalar, and no outside memory is known."""

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values for JSON."""
        return asdict(self) | {"regions": list(self.regions)}

    def __str__(self) -> str:
        """Return the plan's line in `GraphPlanner.summary`: peak, decisions, overhead, status."""
        pages_text = f", {self.paged_out} paged out" if self.paged_out else ""
        checkpoint_text = ""
        if self.eager_bytes is not None:
            checkpoint_text = f", {format_bytes(self.eager_bytes)} with the model's own checkpoints"
        suffix = ", workspaces of kernels not counted" if self.is_predicted else ""
        if self.outside_bytes is not None:
            suffix += f", {format_bytes(self.outside_bytes)} between forward and backward pass"
        if self.regions:
            suffix += f", for the backward pass {', '.join(self.regions)}"
        if self.added_bytes:
            suffix += f", {format_bytes(self.added_bytes)} of gradients added to .grad not counted"
        if self.is_loss_missing:
            suffix += f", {LOSS_OUTSIDE}"
        return (
            f"{self.name}: peak {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.ram_budget_bytes)} (keep-all {format_bytes(self.keep_all_bytes)}"
            f"{checkpoint_text}; "
            f"beside it {format_bytes(self.argument_bytes)} of parameters and inputs), "
            f"{self.describe_solve(pages=pages_text)}{suffix}"
        )


class PassPeaks(NamedTuple):
    """Peak RAM of the passes of one compiled graph, without its inputs and parameters [B]."""

    forward_bytes: int
    """Peak of the forward pass."""
    held_bytes: int = 0
    """Saved tensors and results between both passes; an upper bound with Inductor's kernels."""
    saved_bytes: int = 0
    """Saved tensors of the plan that are not results; 0 with Inductor's kernels, as unknown."""
    backward_bytes: int = 0
    """Peak of the backward pass, with results and gradients; 0 without a backward pass."""
    retained_bytes: int | None = None
    """Peak of a backward pass with ``retain_graph=True``, which frees no saved tensor. None if only
    an upper bound is known: `backward_bytes` plus all saved tensors."""
    copied_bytes: int = 0
    """Gradients that autograd copies after the backward pass."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """A plan of a captured graph with its check and peaks."""

    record: GraphRecord
    result: SolveResult
    """The solve that found the schedule."""
    plan: Plan
    check: PlanCheck
    """Peaks and time of the plan by the independent checker."""
    peaks: PassPeaks
    forward_outputs: int
    """Number of results among the outputs of the forward pass; the rest are saved tensors."""
    inserted_node: int | None = None
    """The node of the plan's graph between both passes that bounds the saved bytes and is no
    operation; None without it."""

    @property
    def time_s(self) -> float:
        """Estimated time of both passes, with recomputations and transfers [s]."""
        return self.check.makespan_s or 0.0


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Options of a back end; `poetmodel.torch.backend` describes each field but `paging`."""

    ram: str | int
    device: Device | None
    costs: str | None
    paging: Paging | Storage | None
    """Transfer times of pages; None without paging."""
    time_limit_s: float
    gap: float
    on_progress: Callable[[SolveProgress], bool | None] | None
    cache: Cache
    outside: str | int | None = None
    regions: Mapping[str, str | int] | None = None
    loss_only: bool = False
    add_gradients: bool = False

    @property
    def budget(self) -> Budget | None:
        """The parsed budget; None for ``eager``, the peak of the model itself."""
        return None if self.ram == EAGER_PEAK else Budget.parse(self.ram)

    @property
    def keep_all_fraction(self) -> float | None:
        """The budget as a fraction of the keep-all peak, 1 for ``eager``; None for bytes."""
        if self.budget is None:
            return 1.0
        return None if self.budget.fraction is None else float(self.budget.fraction)

    @property
    def stated_bytes(self) -> int | None:
        """The budget in bytes [B]; None for a percentage or ``eager``."""
        return None if self.budget is None else self.budget.size_bytes

    def budget_bytes(
        self, joint: JointGraph, keep_all_bytes: int, eager_bytes: int | None, call: FirstCall
    ) -> int:
        """Return the budget of a graph [B]; ``eager`` means `eager_bytes`, the checkpointed peak.

        A percentage refers to the first shape of a function (stored in `call`), because the RAM of
        the host does not depend on inputs. From 100 % the budget is at least `keep_all_bytes`.
        Without gradients no tensor is saved, and any percentage means `keep_all_bytes`.
        """
        budget = self.budget
        if budget is None:
            return keep_all_bytes if eager_bytes is None else eager_bytes
        if budget.fraction is not None and joint.is_inference:
            return keep_all_bytes
        first_keep_all_bytes = call.first_keep_all_bytes.setdefault(call.function, keep_all_bytes)
        budget_bytes = budget.resolve(first_keep_all_bytes)
        return max(budget_bytes, keep_all_bytes) if budget.keeps_all else budget_bytes


class OutsideMemory(NamedTuple):
    """Memory between the forward and the backward pass of a function, besides its results."""

    peak_bytes: int = 0
    """Peak [B]."""
    rest_bytes: int = 0
    """Bytes that remain in RAM during the backward pass, without the tangents [B]."""


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The call of a compiled function in which a graph is planned."""

    function: Hashable
    """Identifies the function by its code and parameters."""
    title: str = ""
    """Suffix of the names of the call's graphs."""
    first_keep_all_bytes: dict[Hashable, int]
    """Keep-all peak of the first shape of each function, by `function` [B]."""
    until_s: float
    """Time at which solving of the call's graphs ends, on the monotonic clock [s]."""
    outside: OutsideMemory
    """Memory between both passes outside of the function."""
    is_sharded: bool = False
    """Whether FSDP2 shards parameters of the function."""
    show_phase: Callable[[str], None] = lambda _: None
    """Called with a description when another part of planning begins."""
    has_concurrent_calls: bool = False
    """Whether other calls are expected between the forward and backward pass of this one."""
    wrapped_bytes: int = 0
    """Bytes of DDP and FSDP2 during the call [B]."""
    ranks: RankExchange = field(default_factory=RankExchange)
    """Exchange with the other processes that plan the call."""
    rates: tuple[float, float] | None = None
    """Smallest `load_machine_rates` of all processes; None to load those of this process."""
    min_ram: dict[str, SolveResult] = field(default_factory=dict)
    """Results of `find_min_ram` in this call, by the hash of the graph."""

    def remaining_s(self, min_s: float = MIN_SOLVE_S) -> float:
        """Return the remaining time of the call, at least `min_s` [s]."""
        return max(min_s, self.until_s - monotonic())


def plan(
    joint: JointGraph,
    profiles: Sequence[OpProfile],
    settings: BackendOptions,
    *,
    name: str,
    call: FirstCall,
    reserved_bytes: int = 0,
    is_predicted: bool = False,
) -> GraphPlan:
    """Plan a graph with the profiles of its operations, within its budget.

    Changes `joint` (profiles, outside memory) and `call` (keep-all peak of the first shape).
    `reserved_bytes` of the budget are for memory of Inductor that is not in the plan [B]. Raises
    `BudgetError` without a plan.
    """
    graph_problem = GraphProblem.from_joint(
        joint,
        profiles,
        settings,
        name=name,
        call=call,
        reserved_bytes=reserved_bytes,
        is_predicted=is_predicted,
    )
    keep_all_bytes, eager_bytes = graph_problem.keep_all_bytes, graph_problem.eager_bytes
    budget_bytes = settings.budget_bytes(
        joint,
        keep_all_bytes + call.wrapped_bytes,
        None if eager_bytes is None else eager_bytes + call.wrapped_bytes,
        call,
    )
    reserves = graph_problem.reserves.with_item("memory of DDP and FSDP2", call.wrapped_bytes)
    backward_results = set(joint.final_results) - joint.forward_results
    gradients_bytes = sum(joint.step_graph.storages[number].bytes for number in backward_results)
    notes = [f"returned gradients take {gradients_bytes:,} B"] if gradients_bytes else []
    if call.outside.peak_bytes:
        notes.append(
            f"between both passes {call.outside.peak_bytes:,} B are for memory outside of the "
            "function"
        )
    has_fraction = settings.budget is not None and settings.budget.fraction is not None
    if has_fraction and joint.has_loss_outside:
        notes.append(
            f"{settings.ram} is of the first call alone: if more calls wait for their backward "
            "passes with it, state the bytes of all"
        )
    problem = graph_problem.make_problem(max(1, budget_bytes - reserves.bytes))
    task = graph_problem.make_task(problem, budget_bytes, reserves=reserves, notes=tuple(notes))
    regions = find_regions(joint, problem.graph, settings.regions)
    result = None
    if floor(problem.graph).bytes <= problem.usable_ram_bytes:
        result = _shared_solve(task, settings, call, regions)
    if result is not None and result.schedule is None and regions:
        raise BudgetError(_regions_message(regions, name, budget_bytes, result.status))
    if result is None or result.schedule is None:
        min_ram_result = _find_cached_min_ram(problem, settings, call)
        is_proved = (
            result is None
            or result.status == Status.INFEASIBLE
            or (min_ram_result.bound or 0.0) > problem.usable_ram_bytes
        )
        least = LeastRam.from_result(min_ram_result, reserves.bytes)
        raise task.make_error(least, is_proved=is_proved)
    return graph_problem.make_plan(problem, result, regions, budget_bytes=budget_bytes)


@dataclass(frozen=True, kw_only=True)
class GraphProblem:
    """A captured graph with sizes and costs, which can be planned within different limits."""

    joint: JointGraph
    settings: BackendOptions
    name: str
    call: FirstCall
    graph: Graph
    device: Device
    times_s: tuple[float, ...]
    """Time of each operation by its profile; used only for measured costs [s]."""
    reserves: Reserves
    """Memory that is not in the plan; without that of DDP and FSDP2."""
    keep_all_bytes: int
    """Peak with everything kept, without memory of DDP, FSDP2 and Inductor [B]."""
    eager_bytes: int | None
    """Peak with the checkpoints of the model itself [B]; None without any."""
    is_predicted: bool
    """Whether no graph is executed: sizes are predictions."""

    @classmethod
    def from_joint(
        cls,
        joint: JointGraph,
        profiles: Sequence[OpProfile],
        settings: BackendOptions,
        *,
        name: str,
        call: FirstCall,
        reserved_bytes: int = 0,
        is_predicted: bool = False,
    ) -> GraphProblem:
        """Return the problem of `joint`; sets its profiles.

        `reserved_bytes` are for memory of Inductor, and not part of `keep_all_bytes` [B].
        `is_predicted` is only recorded.
        """
        joint.apply_profiles(profiles)
        graph = joint.training_graph(outside_bytes=call.outside.peak_bytes)
        zeros_hint = _ZEROS_HINT if joint.has_zero_tangents else ""
        # In the backward pass autograd holds the gradients of results, and the caller the results.
        overwritten_bytes = _copies_bytes(joint)
        results_bytes = sum(
            joint.step_graph.storages[number].bytes for number in joint.forward_results
        )
        tokens_bytes = 0 if settings.paging is None else TOKEN_BYTES * len(graph.tensors)
        rest_bytes = call.outside.rest_bytes
        reserves = Reserves(
            (
                Reserve("results", results_bytes),
                Reserve(f"their gradients{zeros_hint}", joint.tangents_bytes, is_forward=False),
                Reserve("copies of overwritten arguments", overwritten_bytes),
                Reserve("memory outside of the function", rest_bytes, is_forward=False),
                Reserve("tokens of pages", tokens_bytes),
            )
        )
        keep_all_bytes = checkpoint_all_peak_bytes(graph) + reserves.bytes
        eager_bytes = joint.checkpointed_peak_bytes(graph)
        if eager_bytes is not None:
            eager_bytes += reserves.bytes
        return cls(
            joint=joint,
            settings=settings,
            name=name,
            call=call,
            graph=graph,
            device=settings.device or host_device(call.rates or load_machine_rates(settings.cache)),
            times_s=tuple(profile.time_s for profile in profiles),
            reserves=reserves.with_item("memory of Inductor", reserved_bytes),
            keep_all_bytes=keep_all_bytes,
            eager_bytes=eager_bytes,
            is_predicted=is_predicted,
        )

    @property
    def extra_bytes(self) -> int:
        """Memory during the backward pass that is not in the plan [B]."""
        return self.reserves.bytes

    @property
    def n_forward_operations(self) -> int:
        """Number of forward operations, and the index of a node inserted between both passes."""
        return sum(
            operation.phase is Phase.FORWARD for operation in self.joint.step_graph.operations
        )

    def make_problem(self, usable_bytes: int, *, saved_bytes: int | None = None) -> Problem:
        """Return the minimum-time problem in `usable_bytes`, `saved_bytes` between both passes."""
        graph, times_s = self.graph, list(self.times_s)
        if saved_bytes is not None:
            graph = self.joint.training_graph(
                outside_bytes=self.call.outside.peak_bytes,
                middle_bytes=max(0, usable_bytes - saved_bytes),
            )
            times_s.insert(self.n_forward_operations, 0.0)
        costs = _make_costs(graph, self.settings, self.device, times_s)
        paging = self.settings.paging is not None
        return Problem(graph, costs, ram=usable_bytes, paging=paging, minimize="time")

    def make_task(
        self,
        problem: Problem,
        budget_bytes: int,
        *,
        reserves: Reserves | None = None,
        notes: tuple[str, ...] = (),
    ) -> RamTask:
        """Return the task of a problem; percentages are of the first shape, `notes` for errors."""
        call, budget = self.call, self.settings.budget
        return RamTask(
            name=self.name,
            problem=problem,
            budget_bytes=budget_bytes,
            reserves=self.reserves if reserves is None else reserves,
            keep_all_bytes=call.first_keep_all_bytes.get(
                call.function, self.keep_all_bytes + call.wrapped_bytes
            ),
            is_fraction=budget is None or budget.fraction is not None,
            notes=notes,
        )

    def make_error(self, budget_bytes: int, least: LeastRam) -> BudgetError:
        """Return the error that no plan was found within a budget in time."""
        problem = self.make_problem(max(1, budget_bytes - self.extra_bytes))
        return self.make_task(problem, budget_bytes).make_error(least, is_proved=False)

    def plan_within(
        self, peak_bytes: int, saved_bytes: int, known: SolveResult | None = None
    ) -> GraphPlan | None:
        """Return a plan within two limits [B]; None if none is found in the remaining time.

        `peak_bytes` bounds each pass with `extra_bytes`; `saved_bytes` is without results. `known`:
        the result that another process found.
        """
        usable_bytes = peak_bytes - self.extra_bytes
        if usable_bytes <= 0:
            return None
        problem = self.make_problem(usable_bytes, saved_bytes=saved_bytes)
        if floor(problem.graph).bytes > usable_bytes:
            return None
        regions = find_regions(self.joint, problem.graph, self.settings.regions)
        result = known
        if result is None:
            task = self.make_task(problem, peak_bytes)
            result = _solve(task, self.settings, self.call, regions)
        if result.schedule is None:
            return None
        return self.make_plan(
            problem,
            result,
            regions,
            budget_bytes=peak_bytes,
            inserted_node=self.n_forward_operations,
        )

    def make_keep_all_error(self, budget_bytes: int) -> BudgetError:
        """Return the error that no plan was found within a budget of the keep-all peak or more."""
        regions = find_regions(self.joint, self.graph, self.settings.regions)
        if regions:
            return BudgetError(_regions_message(regions, self.name, budget_bytes))
        return self.make_error(budget_bytes, LeastRam(None))

    def make_plan(
        self,
        problem: Problem,
        result: SolveResult,
        regions: Sequence[Region],
        *,
        budget_bytes: int,
        inserted_node: int | None = None,
    ) -> GraphPlan:
        """Return the plan of the schedule of `result`, with its check, peaks and record.

        `budget_bytes` is only recorded. `inserted_node` is the node between both passes, for
        concurrent calls: then the peaks exclude memory of DDP and FSDP2, as `LiveCalls` adds it.
        Raises `NoScheduleError` without a schedule, `VerificationError` for an invalid plan.
        """
        graph, schedule = problem.graph, result.require_schedule()
        plan, check = make_checked_plan(
            graph,
            problem.costs,
            schedule,
            mode=StorageMode.BLOCKING,
            ram_budget_bytes=problem.ram_budget_bytes,
        )
        peaks = self._pass_peaks(graph, plan, check, inserted_node)
        n_instructions = Counter(instruction.op for instruction in plan.program)
        wrapped_bytes = self.call.wrapped_bytes
        peak_bytes = check.peak_ram_bytes + self.extra_bytes + wrapped_bytes
        if inserted_node is not None:
            peak_bytes = max(peaks.forward_bytes, peaks.backward_bytes)
        outside = self.call.outside
        record = GraphRecord.of(
            result,
            plan,
            name=self.name,
            ram_budget_bytes=budget_bytes,
            predicted_peak_bytes=peak_bytes,
            keep_all_bytes=self.keep_all_bytes
            + (0 if inserted_node is not None else wrapped_bytes),
            paged_out=n_instructions[Op.PAGE_OUT],
            paged_in=n_instructions[Op.PAGE_IN],
            argument_bytes=_arguments_bytes(self.joint),
            device=self.device.key or self.device.name,
            eager_bytes=self.eager_bytes,
            is_predicted=self.is_predicted,
            outside_bytes=outside.peak_bytes if any(outside) else None,
            regions=tuple(region.describe_use(graph, schedule) for region in regions),
            added_bytes=self.joint.added_bytes,
            is_loss_missing=self.joint.has_loss_outside and not any(outside),
        )
        return GraphPlan(
            record=record,
            result=result,
            plan=plan,
            check=check,
            peaks=peaks,
            forward_outputs=self.joint.forward_outputs,
            inserted_node=inserted_node,
        )

    def _pass_peaks(
        self, graph: Graph, plan: Plan, check: PlanCheck, inserted_node: int | None
    ) -> PassPeaks:
        """Return the peaks of both passes with `reserves`, without DDP and FSDP2.

        `saved_bytes` and `copied_bytes` are without `reserves`, too.
        """
        high_bytes = [record.peak_bytes for record in check.records]
        count = self.n_forward_operations
        first_after_forward = next(
            (
                position
                for position, (op, index) in enumerate(plan.program)
                if op == Op.COMPUTE and index >= count
            ),
            len(high_bytes),
        )
        if self.joint.is_inference:
            return PassPeaks(max(high_bytes, default=0) + self.extra_bytes)
        held_bytes = check.records[first_after_forward - 1].ram_bytes if first_after_forward else 0
        first_backward = first_after_forward if inserted_node is None else first_after_forward + 1
        saved_tensors, freed_bytes, retained_bytes = set[int](), 0, 0
        for position, (op, index) in enumerate(plan.program):
            if position < first_after_forward:
                if op == Op.COMPUTE:
                    saved_tensors.update(graph.outputs_of[index])
                elif op == Op.PAGE_IN:
                    saved_tensors.add(index)
                elif op == Op.FREE:
                    saved_tensors.discard(index)
                continue
            if position >= first_backward:
                retained_bytes = max(retained_bytes, high_bytes[position] + freed_bytes)
            # With retain_graph autograd holds the copies that the plan frees here.
            if op == Op.FREE and index in saved_tensors:
                saved_tensors.remove(index)
                freed_bytes += graph.tensor_bytes[index]
        return PassPeaks(
            forward_bytes=max(high_bytes[:first_after_forward], default=0)
            + self.reserves.forward_bytes,
            held_bytes=held_bytes + self.reserves.forward_bytes,
            saved_bytes=held_bytes,
            backward_bytes=max(high_bytes[first_backward:], default=0) + self.extra_bytes,
            retained_bytes=retained_bytes + self.extra_bytes,
            copied_bytes=self.joint.copied_bytes,
        )


def _shared_solve(
    task: RamTask, settings: BackendOptions, call: FirstCall, regions: tuple[Region, ...]
) -> SolveResult:
    """Solve a task in the first process, and share its result; without a group, in each."""
    result: SolveResult = call.ranks.share(
        task.problem.graph.sha256, lambda: _solve(task, settings, call, regions)
    )
    return result


def _solve(
    task: RamTask, settings: BackendOptions, call: FirstCall, regions: tuple[Region, ...]
) -> SolveResult:
    """Solve a task in the remaining time of the call, or return its cached final result.

    A first solve has `FIRST_TIME_RATIO` of the time limit. A second improves its schedule or, if
    there is none, that of `find_min_ram`. Results with regions are not cached.
    """
    problem = task.problem
    show_progress = solve_progress_callback(call.show_phase, settings.time_limit_s)

    def on_progress(progress: SolveProgress) -> bool | None:
        show_progress(progress)
        return None if settings.on_progress is None else settings.on_progress(progress)

    def solve_within(limit_s: float, start: Schedule | None) -> SolveResult:
        """Solve the problem within `limit_s` [s], from an initial schedule if any."""
        return solve(
            problem,
            time_limit=limit_s,
            gap=settings.gap,
            threads=1,
            start=start,
            on_progress=on_progress,
        )

    def solve_from(known: SolveResult | None) -> SolveResult:
        """Solve the problem from a cached schedule, or in two solves."""
        if known is not None:
            result = solve_within(call.remaining_s(), known.schedule)
        else:
            with processor_clock(call.remaining_s()):
                result = solve_within(FIRST_TIME_RATIO * settings.time_limit_s, None)
            start, first_solve_s = result.schedule, result.solve_s
            if start is None and result.termination == Termination.TIME_LIMIT:
                min_ram_result = _find_cached_min_ram(problem, settings, call)
                simulation = min_ram_result.simulation
                if simulation and simulation.peak_ram_bytes <= problem.usable_ram_bytes:
                    start = min_ram_result.schedule
            if start is not None and result.termination == Termination.TIME_LIMIT:
                result = solve_within(call.remaining_s(), start)
                result = replace(result, solve_s=first_solve_s + result.solve_s)
        # Another call has the same time limit, and would not find more.
        return replace(result, time_limit_s=settings.time_limit_s)

    if regions:
        return solve_with_regions(
            problem,
            regions,
            gap=settings.gap,
            time_limit=call.remaining_s(),
            on_progress=on_progress,
        )
    return task.solve(
        CachedSchedules(settings.cache),
        gap=settings.gap,
        time_limit_s=settings.time_limit_s,
        solve_from=solve_from,
    )


def _regions_message(
    regions: tuple[Region, ...], name: str, budget_bytes: int, status: Status | None = None
) -> str:
    """Return the message that no plan of the graph `name` meets the budgets of its regions.

    `budget_bytes` is the budget of the whole step. Without `status`, no reason is given.
    """
    budgets = ", ".join(f"{region.name} {format_bytes(region.limit_bytes)}" for region in regions)
    reason = {None: "", Status.INFEASIBLE: ", and none exists"}.get(status, " in time")
    return (
        f"regions: no plan was found for {name} that meets {budgets} within "
        f"{format_bytes(budget_bytes)}{reason}: allow more"
    )


def _make_costs(
    graph: Graph, settings: BackendOptions, device: Device, times_s: Sequence[float]
) -> Costs:
    """Return costs by estimates for `device` or, if measured, `times_s`; energies are times [s]."""
    estimated_costs = Costs.estimate(graph, device).table(graph)
    compute_s = [CALL_S + time_s for time_s in estimated_costs.compute_time_s]
    if settings.costs == MEASURED:
        compute_s = [*times_s, 0.0]
    page_in = page_out = None
    if settings.paging is not None:
        page_in, page_out = (
            [(transfer.time_s(size), transfer.time_s(size)) for size in graph.tensor_bytes]
            for transfer in (settings.paging.page_in, settings.paging.page_out)
        )
    return Costs.from_arrays(
        graph,
        compute_time_s=compute_s,
        compute_energy_j=compute_s,
        page_in=page_in,
        page_out=page_out,
    )


def _copies_bytes(joint: JointGraph) -> int:
    """Return the size of overwritten arguments that operations read [B]: one copy each."""
    overwritten_arguments = {
        source
        for operation in joint.step_graph.operations
        for source in operation.node.all_input_nodes
        if source in joint.overwritten_arguments
    }
    return sum(storage_sizes(overwritten_arguments).values())


def _arguments_bytes(joint: JointGraph) -> int:
    """Return the size of parameters, buffers and inputs [B]."""
    arguments = [node for node in joint.arguments if node not in joint.tangents]
    return sum(storage_sizes(arguments).values())


def _find_cached_min_ram(
    problem: Problem, settings: BackendOptions, call: FirstCall
) -> SolveResult:
    """Return the result of `find_min_ram` for a problem; cached in `call` by the graph's hash."""
    result = call.min_ram.get(problem.graph.sha256)
    if result is None:
        call.show_phase("searching for the smallest budget")
        result = find_min_ram(problem, settings.gap)
        call.min_ram[problem.graph.sha256] = result
    return result


def write_report_page(path: str | Path, graph_plan: GraphPlan) -> None:
    """Write the page about the schedule of a graph; needs ``poetmodel[report]``."""
    from poetmodel.case.case import Case
    from poetmodel.case.checked_plan import CheckedPlan
    from poetmodel.case.opening import Checked
    from poetmodel.report.page import check_report, write_report

    check_report(path)
    name, result = graph_plan.record.name, graph_plan.result
    planned = CheckedPlan(problem=result.problem, plan=graph_plan.plan, check=graph_plan.check)
    checked = Checked.of_result(result, case=Case(source=name), file=name)
    write_report(path, [replace(checked, planned=planned)])
