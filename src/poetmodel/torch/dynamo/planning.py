"""The joint graph as a training graph, its schedule within a budget, and what is told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.budgets import Budget
from poetmodel.clock import processor_clock
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, shown
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op
from poetmodel.planner import checked_plan
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import missing_unit_hint, refusal
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.torch.compile_cache import Schedules, is_settled
from poetmodel.torch.compiled import of_solve
from poetmodel.torch.dynamo.costs import CALL_S, machine_rates, this_machine
from poetmodel.torch.dynamo.joint_graph import sizes_of
from poetmodel.torch.dynamo.regions import Region, regions_of, solve_within
from poetmodel.units import MAX_BYTES, format_bytes, format_seconds

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
    from poetmodel.torch.runtime.profiling import Paging

TOKEN_BYTES: Final = 8
"""RAM of the token for each page that is out [B]."""
_SOME_BYTES: Final = 2**40
"""What a percentage is of where a budget is only read [B]."""
_PERCENT: Final = 100
"""Up to here a number without a unit is probably meant in percent."""
LEAST_S: Final = 1.0
"""Time to solve a graph even if that of the call is over [s]."""
REFUSING_S: Final = 1.0
"""Processor time to find the least budget where one is refused [s]."""
REFUSING_NODE_S: Final = 1e-4
"""The same for each node, beside that [s]."""
REFUSING_WALL_RATIO: Final = 30.0
"""Longest wall time of that, over its processor time, on a busy machine."""
FIRST_TIME_RATIO: Final = 0.15
"""Share of the time limit, in processor time, after which a search without a schedule ends."""
EAGER_PEAK: Final = "eager"
"""The budget that is what the model takes by itself."""
_ZEROS: Final = " (loss_only=True leaves out those of all but the loss)"
LOSS_OUTSIDE: Final = "what the loss takes between forward and backward pass not counted"
"""What is said where no result that needs a gradient is a number."""
MEASURED: Final = "measured"
"""The costs that are measured on this host, in place of estimates."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """How one captured graph keeps its budget. All bytes are those of PyTorch's allocator."""

    name: str
    """Its number, its function, and the shapes of inputs."""
    ram_budget_bytes: int
    predicted_peak_bytes: int
    """The highest total of what the graph allocates: at most the budget [B]."""
    keep_all_bytes: int
    """The same with every activation kept [B]."""
    status: str
    gap: float | None
    overhead: float
    """Time over that of one pass, as a fraction."""
    recomputed: int
    paged_out: int
    paged_in: int
    solve_s: float
    given_bytes: int
    """Parameters, buffers and inputs, which the budget does not count [B]."""
    device: str
    eager_bytes: int | None
    """The peak with the model's own checkpoints [B]; None where it has none."""
    is_predicted: bool
    """Whether sizes are PyTorch's predictions and workspaces are not counted: nothing was run."""
    outside_bytes: int | None = None
    """What of the budget is for what lives between the forward and the backward pass [B]; None
    where nothing is."""
    regions: tuple[str, ...] = ()
    """What regions have in RAM when the backward pass begins, and their budgets."""
    added_bytes: int = 0
    """Gradients that the backward pass adds to ``.grad``, which the budget does not count [B]."""
    is_loss_missing: bool = False
    """Whether results need gradients, none of them is a number, and nothing is known outside."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self) | {"regions": list(self.regions)}

    def __str__(self) -> str:
        proved = "" if self.gap is None else f" (at least {self.overhead * (1 - self.gap):.1%})"
        pages = f", {self.paged_out} paged out" if self.paged_out else ""
        own = ""
        if self.eager_bytes is not None:
            own = f", {format_bytes(self.eager_bytes)} with the model's own checkpoints"
        more = ", workspaces of kernels not counted" if self.is_predicted else ""
        if self.outside_bytes is not None:
            more += f", {format_bytes(self.outside_bytes)} between forward and backward pass"
        if self.regions:
            more += f", for the backward pass {', '.join(self.regions)}"
        if self.added_bytes:
            more += f", {format_bytes(self.added_bytes)} of gradients added to .grad not counted"
        if self.is_loss_missing:
            more += f", {LOSS_OUTSIDE}"
        return (
            f"{self.name}: peak {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.ram_budget_bytes)} (keep-all {format_bytes(self.keep_all_bytes)}"
            f"{own}; "
            f"beside it {format_bytes(self.given_bytes)} of parameters and inputs), "
            f"{self.recomputed} recomputed{pages}, "
            f"overhead {self.overhead:.1%}{proved} on {self.device}, "
            f"{self.status}, solved in {format_seconds(self.solve_s)}{more}"
        )


class PassPeaks(NamedTuple):
    """Peak RAM of the passes of one compiled graph, without its inputs and parameters [B]."""

    forward_bytes: int
    held_bytes: int = 0
    """Saved tensors and results between both passes."""
    saved_bytes: int = 0
    """Saved tensors that are no results."""
    backward_bytes: int = 0
    """With results and gradients; 0 without a backward pass."""
    retained_bytes: int | None = None
    """Of a backward pass with ``retain_graph=True``, where saved tensors stay; None if only the
    upper bound is known: `backward_bytes` and all saved tensors."""
    copied_bytes: int = 0
    """Gradients that autograd copies after the backward pass."""


@dataclass(frozen=True, kw_only=True)
class GraphPlan:
    """A plan of a captured graph."""

    record: PlanRecord
    result: SolveResult
    plan: Plan
    check: PlanCheck
    peaks: PassPeaks
    forward_outputs: int
    """Outputs of the forward pass that are results; the others are saved tensors."""
    turn: int | None = None
    """Node of the plan's graph between both passes; None without one."""

    @property
    def time_s(self) -> float:
        """Estimated time of both passes, with recomputations and transfers [s]."""
        return self.check.makespan_s or 0.0


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Request of a back end; `poetmodel.torch.backend` describes each field."""

    ram: str | int
    device: Device | None
    costs: str | None
    paging: Paging | Storage | None
    time_limit: float
    gap: float
    on_progress: Callable[[SolveProgress], bool | None] | None
    cache: Cache
    outside: str | int | None = None
    regions: Mapping[str, str | int] | None = None
    loss_only: bool = False
    add_gradients: bool = False

    @property
    def budget(self) -> Budget | None:
        """The budget as stated; None for the peak of the model by itself, ``eager``."""
        return None if self.ram == EAGER_PEAK else Budget.parse(self.ram)

    @property
    def share_of_whole(self) -> float | None:
        """The budget as a fraction of what is taken with everything kept; None for bytes."""
        if self.budget is None:
            return 1.0
        return None if self.budget.share is None else float(self.budget.share)

    @property
    def stated_bytes(self) -> int | None:
        """The budget in bytes; None for a fraction [B]."""
        return None if self.budget is None else self.budget.size_bytes

    def budget_bytes(
        self, joint: JointGraph, keep_all_bytes: int, eager_bytes: int | None, call: FirstCall
    ) -> int:
        """Return the budget of a graph with these peaks: everything kept, and by itself [B].

        A percentage is of the first shape of a function: the RAM of a host does not depend on its
        inputs. Where everything was kept, it still is; without gradients nothing is.
        """
        budget = self.budget
        if budget is None:
            return keep_all_bytes if eager_bytes is None else eager_bytes
        if budget.share is not None and joint.is_inference:
            return keep_all_bytes
        first_bytes = call.first_bytes.setdefault(call.function, keep_all_bytes)
        budget_bytes = budget.resolve(first_bytes)
        return max(budget_bytes, keep_all_bytes) if budget.keeps_all else budget_bytes


class Outside(NamedTuple):
    """What lives between the forward and the backward pass of a function, beside its results."""

    peak_bytes: int = 0
    """At most [B]."""
    rest_bytes: int = 0
    """What of it stays for the backward pass, but for the gradients that come in [B]."""


@dataclass(frozen=True, kw_only=True)
class FirstCall:
    """The call of a compiled function in which a graph is planned."""

    function: Hashable
    """Identifies the function among those of a back end."""
    title: str = ""
    """What the names of its graphs end with."""
    first_bytes: dict[Hashable, int]
    """The keep-all peak of the first shape of each function [B]."""
    until_s: float
    """When the time for all graphs of the call is over, on the monotonic clock [s]."""
    outside: Outside
    """What lives beside the function."""
    is_sharded: bool = False
    """Whether FSDP2 shards the parameters of its module."""
    tell: Callable[[str], None] = lambda _: None
    """Takes the stage that begins."""
    is_several: bool = False
    """Whether calls of other graphs, or more of this one, are expected to wait beside the call."""
    planned: GraphPlan | None = None
    """The plan that is carried out; by default one is solved for."""
    wrapped_bytes: int = 0
    """What DDP or FSDP2 has beside the function [B]."""
    share: Callable[[str, Callable[[], Any]], Any] = lambda _, make: make()
    """Takes the form of a graph and what solves it, and returns the answer for all processes."""
    gather: Callable[[str, Any], list[Any]] = lambda _, value: [value]
    """Takes the form of a graph and a value, and returns the values of all processes."""
    rates: tuple[float, float] | None = None
    """Rates of the slowest machine of all processes, as `machine_rates` has them."""
    least_ram: dict[str, SolveResult] = field(default_factory=dict)
    """Solves for the least RAM in this call, by the digest of the graph."""

    def left_s(self, least_s: float = LEAST_S) -> float:
        """Return the time that is left [s], or the least that helps."""
        return max(least_s, self.until_s - monotonic())


def check_budget(ram: object) -> None:
    """Raise `BudgetError` unless it is a budget, and says its unit where it is that small."""
    if ram == EAGER_PEAK:
        return
    size = Budget.parse(ram).resolve(_SOME_BYTES)  # type: ignore[arg-type]
    if size == 0:
        raise BudgetError(f"ram: expected more than 0 bytes, got {shown(ram)}")
    if size <= _PERCENT and str(ram).strip().isdigit():
        raise BudgetError(f"ram: {missing_unit_hint(size, MAX_BYTES).removeprefix('; ')}")


def plan(
    joint: JointGraph,
    profiles: Sequence[OpProfile],
    wanted: BackendOptions,
    *,
    name: str,
    call: FirstCall,
    reserved_bytes: int = 0,
    is_predicted: bool = False,
) -> GraphPlan:
    """Plan a graph, whose operations have these profiles, within its budget less what is reserved.

    Raises
    ------
    BudgetError
        If the budget is too small: says the least that is known to do.
    """
    graph_problem = GraphProblem.of(
        joint,
        profiles,
        wanted,
        name=name,
        call=call,
        reserved_bytes=reserved_bytes,
        is_predicted=is_predicted,
    )
    whole_bytes, own_bytes = graph_problem.keep_all_bytes, graph_problem.eager_bytes
    budget_bytes = wanted.budget_bytes(
        joint,
        whole_bytes + call.wrapped_bytes,
        None if own_bytes is None else own_bytes + call.wrapped_bytes,
        call,
    )
    beside_bytes = graph_problem.beside_bytes + call.wrapped_bytes
    usable_bytes = max(1, budget_bytes - beside_bytes)
    problem = graph_problem.problem(usable_bytes)
    graph = problem.graph
    regions = regions_of(joint, graph, wanted.regions)
    result = None
    if floor(graph).bytes <= usable_bytes:
        result = _solved(problem, wanted, call, regions)
    if result is not None and result.schedule is None and regions:
        raise BudgetError(_regions_missed(regions, name, budget_bytes, result.status))
    if result is None or result.schedule is None:
        late = set(joint.held) - joint.handed_early
        gradients_bytes = sum(joint.storages[number].bytes for number in late)
        parts = {"gradients that are handed over": gradients_bytes, **graph_problem.beside}
        told = ", ".join(f"{size:,} B {what}" for what, size in parts.items() if size)
        is_proved = result is None or result.status == Status.INFEASIBLE
        text = _too_little(
            problem, wanted, call, name, budget_bytes, beside_bytes, is_proved=is_proved
        )
        text += f"; at its end there are {told}" if told else ""
        if call.outside.peak_bytes:
            text += f"; between both passes {call.outside.peak_bytes:,} B are for what is outside"
        raise BudgetError(text)
    return graph_problem.planned(problem, result, regions, budget_bytes=budget_bytes)


@dataclass(frozen=True, kw_only=True)
class GraphProblem:
    """A captured graph with sizes and costs, ready to be planned within budgets."""

    joint: JointGraph
    wanted: BackendOptions
    name: str
    call: FirstCall
    graph: Graph
    device: Device
    times_s: tuple[float, ...]
    """Measured times of its operations [s]."""
    beside: Mapping[str, int]
    """What the backward pass has beside the plan, in words [B]."""
    forward_beside_bytes: int
    """The same of the forward pass [B]."""
    keep_all_bytes: int
    """Peak with everything kept, without what DDP and FSDP2 have [B]."""
    eager_bytes: int | None
    """Peak with the checkpoints of the model [B]; None where it has none."""
    is_predicted: bool

    @classmethod
    def of(
        cls,
        joint: JointGraph,
        profiles: Sequence[OpProfile],
        wanted: BackendOptions,
        *,
        name: str,
        call: FirstCall,
        reserved_bytes: int = 0,
        is_predicted: bool = False,
    ) -> GraphProblem:
        """Return the problem of a graph; sets the sizes of the graph to those of the profiles."""
        joint.apply(profiles)
        joint.outside_bytes = call.outside.peak_bytes
        graph = joint.training_graph()
        # Autograd has the gradients of results for the whole backward pass, the caller the results.
        beside = {
            "results": sum(joint.storages[number].bytes for number in joint.handed_early),
            f"their gradients{_ZEROS if joint.has_zeros else ''}": joint.tangents_bytes,
            "copies of what is overwritten": _copies_bytes(joint),
            "what stays outside": call.outside.rest_bytes,
            "tokens of pages": 0 if wanted.paging is None else TOKEN_BYTES * len(graph.tensors),
        }
        keep_all_bytes = checkpoint_all_peak_bytes(graph) + sum(beside.values())
        eager_bytes = joint.own_peak_bytes(graph)
        if eager_bytes is not None:
            eager_bytes += sum(beside.values())
        beside["what Inductor takes"] = reserved_bytes
        early = ("results", "copies of what is overwritten", "tokens of pages")
        return cls(
            joint=joint,
            wanted=wanted,
            name=name,
            call=call,
            graph=graph,
            device=wanted.device or this_machine(call.rates or machine_rates(wanted.cache)),
            times_s=tuple(profile.time_s for profile in profiles),
            beside=beside,
            forward_beside_bytes=sum(beside[key] for key in early) + reserved_bytes,
            keep_all_bytes=keep_all_bytes,
            eager_bytes=eager_bytes,
            is_predicted=is_predicted,
        )

    @property
    def beside_bytes(self) -> int:
        """What the backward pass has beside the plan [B]."""
        return sum(self.beside.values())

    @property
    def turn(self) -> int:
        """Number of the node between both passes, in graphs that have one."""
        return sum(operation.phase is Phase.FORWARD for operation in self.joint.operations)

    def problem(self, usable_bytes: int, *, saved_bytes: int | None = None) -> Problem:
        """Return the problem of a schedule within a budget for what is planned.

        Parameters
        ----------
        usable_bytes : int
            RAM for the operations of the graph [B].
        saved_bytes : int, optional
            Most that is in RAM between both passes [B]: a node without results is there then,
            which takes the rest of the RAM.
        """
        graph, times_s = self.graph, list(self.times_s)
        if saved_bytes is not None:
            self.joint.outside_bytes = self.call.outside.peak_bytes
            graph = self.joint.training_graph(turn_bytes=max(0, usable_bytes - saved_bytes))
            times_s.insert(self.turn, 0.0)
        costs = _costs(graph, self.wanted, self.device, times_s)
        paging = self.wanted.paging is not None
        return Problem(graph, costs, ram=usable_bytes, paging=paging, minimize="time")

    def within(self, peak_bytes: int, saved_bytes: int) -> GraphPlan | None:
        """Return a plan within two limits; None if none was found in time.

        Parameters
        ----------
        peak_bytes : int
            Most RAM of each pass, with what it has beside the plan [B].
        saved_bytes : int
            Most RAM of tensors that are saved for the backward pass, without results [B].
        """
        usable_bytes = peak_bytes - self.beside_bytes
        if usable_bytes <= 0:
            return None
        problem = self.problem(usable_bytes, saved_bytes=saved_bytes)
        if floor(problem.graph).bytes > usable_bytes:
            return None
        regions = regions_of(self.joint, problem.graph, self.wanted.regions)
        result = _solved(problem, self.wanted, self.call, regions)
        if result.schedule is None:
            return None
        return self.planned(problem, result, regions, budget_bytes=peak_bytes, turn=self.turn)

    def refusal_of_whole(self, budget_bytes: int) -> BudgetError:
        """Return the error for a budget that holds every tensor, but in which no plan was found."""
        regions = regions_of(self.joint, self.graph, self.wanted.regions)
        if regions:
            return BudgetError(_regions_missed(regions, self.name, budget_bytes))
        return BudgetError(refusal(self.name, budget_bytes, enough_bytes=None, is_proved=False))

    def planned(
        self,
        problem: Problem,
        result: SolveResult,
        regions: Sequence[Region],
        *,
        budget_bytes: int,
        turn: int | None = None,
    ) -> GraphPlan:
        """Return the plan of a schedule, which an independent check has simulated."""
        graph, schedule = problem.graph, result.require_schedule()
        plan, check = checked_plan(
            graph,
            problem.costs,
            schedule,
            mode=StorageMode.BLOCKING,
            ram_budget_bytes=problem.ram_budget_bytes,
        )
        peaks = self._pass_peaks(graph, plan, check, turn)
        counts = Counter(instruction.op for instruction in plan.program)
        wrapped_bytes = self.call.wrapped_bytes
        peak_bytes = check.peak_ram_bytes + self.beside_bytes + wrapped_bytes
        if turn is not None:
            peak_bytes = max(peaks.forward_bytes, peaks.backward_bytes)
        outside = self.call.outside
        record = PlanRecord(
            name=self.name,
            ram_budget_bytes=budget_bytes,
            predicted_peak_bytes=peak_bytes,
            keep_all_bytes=self.keep_all_bytes + (0 if turn is not None else wrapped_bytes),
            status=str(result.status),
            gap=result.gap,
            overhead=(result.overhead or 0.0) / (problem.objective.baseline or 1.0),
            recomputed=counts[Op.COMPUTE] - len(graph.nodes),
            paged_out=counts[Op.PAGE_OUT],
            paged_in=counts[Op.PAGE_IN],
            solve_s=result.solve_s,
            given_bytes=_given_bytes(self.joint),
            device=self.device.key or self.device.name,
            eager_bytes=self.eager_bytes,
            is_predicted=self.is_predicted,
            outside_bytes=outside.peak_bytes if any(outside) else None,
            regions=tuple(part.check(graph, schedule) for part in regions),
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
            turn=turn,
        )

    def _pass_peaks(
        self, graph: Graph, plan: Plan, check: PlanCheck, turn: int | None
    ) -> PassPeaks:
        """Return the peaks of both passes of a plan, with what is beside it."""
        high = [moment.high_bytes for moment in check.moments]
        count = self.turn
        begin = next(
            (k for k, (op, i) in enumerate(plan.program) if op == Op.COMPUTE and i >= count),
            len(high),
        )
        if self.joint.is_inference:
            return PassPeaks(max(high, default=0) + self.beside_bytes)
        held_bytes = check.moments[begin - 1].ram_bytes if begin else 0
        first = begin if turn is None else begin + 1
        saved, freed_bytes, retained_bytes = set[int](), 0, 0
        for k, (op, index) in enumerate(plan.program):
            if k < begin:
                if op == Op.COMPUTE:
                    saved.update(graph.outputs_of[index])
                elif op == Op.PAGE_IN:
                    saved.add(index)
                elif op == Op.FREE:
                    saved.discard(index)
                continue
            if k >= first:
                retained_bytes = max(retained_bytes, high[k] + freed_bytes)
            if op == Op.FREE and index in saved:  # autograd keeps this copy
                saved.remove(index)
                freed_bytes += graph.tensor_bytes[index]
        return PassPeaks(
            forward_bytes=max(high[:begin], default=0) + self.forward_beside_bytes,
            held_bytes=held_bytes + self.forward_beside_bytes,
            saved_bytes=held_bytes,
            backward_bytes=max(high[first:], default=0) + self.beside_bytes,
            retained_bytes=retained_bytes + self.beside_bytes,
            copied_bytes=self.joint.copied_bytes,
        )


def _solved(
    problem: Problem, wanted: BackendOptions, call: FirstCall, regions: tuple[Region, ...]
) -> SolveResult:
    """Return the schedule that one process found for all: the known one where it will do."""
    result: SolveResult = call.share(
        problem.graph.sha256, lambda: _solved_here(problem, wanted, call, regions)
    )
    return result


def _solved_here(
    problem: Problem, wanted: BackendOptions, call: FirstCall, regions: tuple[Region, ...]
) -> SolveResult:
    """Return the known schedule of a problem if it is good enough, else solve.

    If the first part of the time brings no schedule, the solve ends, unless the schedule of the
    least RAM fits.
    """
    schedules = Schedules(wanted.cache)
    known = None if regions else schedules.result(problem, gap=wanted.gap)
    if known is not None and is_settled(known, within_s=wanted.time_limit):
        return known
    shown = of_solve(call.tell)

    def on_progress(progress: SolveProgress) -> bool | None:
        shown(progress)
        return None if wanted.on_progress is None else wanted.on_progress(progress)

    call.tell("solving")
    if regions:
        return solve_within(
            problem,
            regions,
            gap=wanted.gap,
            time_limit=call.left_s(),
            on_progress=on_progress,
        )

    def run(limit_s: float, start: Schedule | None) -> SolveResult:
        return solve(
            problem,
            time_limit=limit_s,
            gap=wanted.gap,
            threads=1,
            start=start,
            on_progress=on_progress,
        )

    start = None if known is None else known.schedule
    if start is None:
        with processor_clock(call.left_s()):
            result = run(FIRST_TIME_RATIO * wanted.time_limit, None)
        start, first_s = result.schedule, result.solve_s
        if start is None and result.termination == Termination.TIME_LIMIT:
            least = _least_ram(problem, wanted, call)
            if least.simulation and least.simulation.peak_ram_bytes <= problem.usable_ram_bytes:
                start = least.schedule
        if start is not None and result.termination == Termination.TIME_LIMIT:
            result = run(call.left_s(), start)
            result = replace(result, solve_s=first_s + result.solve_s)
    else:
        result = run(call.left_s(), start)
    # Another call would not have more time for it.
    result = replace(result, time_limit_s=wanted.time_limit)
    schedules.keep(result)
    return result


def _regions_missed(
    regions: tuple[Region, ...], name: str, budget_bytes: int, status: Status | None = None
) -> str:
    """Return that no plan keeps budgets of regions; `status` is that of the solve, if known."""
    told = ", ".join(f"{part.name} {format_bytes(part.limit_bytes)}" for part in regions)
    why = {None: "", Status.INFEASIBLE: ", and nothing can"}.get(status, " in time")
    return (
        f"regions: nothing was found for {name} that keeps {told} within "
        f"{format_bytes(budget_bytes)}{why}: allow more"
    )


def _costs(graph: Graph, wanted: BackendOptions, device: Device, times_s: Sequence[float]) -> Costs:
    """Return the costs of a step: estimated, or from measured profiles of operations."""
    estimated = Costs.estimate(graph, device).table(graph)
    compute_s = [CALL_S + time_s for time_s in estimated.compute_time_s]
    if wanted.costs == MEASURED:
        compute_s = [*times_s, 0.0]
    page_in = page_out = None
    if wanted.paging is not None:
        page_in, page_out = (
            [(way.time_s(size), way.time_s(size)) for size in graph.tensor_bytes]
            for way in (wanted.paging.page_in, wanted.paging.page_out)
        )
    return Costs.from_arrays(
        graph,
        compute_time_s=compute_s,
        compute_energy_j=compute_s,
        page_in=page_in,
        page_out=page_out,
    )


def _copies_bytes(joint: JointGraph) -> int:
    """Return the bytes of copies of overwritten arguments that others read [B]."""
    read = {
        source
        for operation in joint.operations
        for source in operation.node.all_input_nodes
        if source in joint.mutated
    }
    return sum(sizes_of(read).values())


def _given_bytes(joint: JointGraph) -> int:
    given = [node for node in joint.arguments if node not in joint.tangents]
    return sum(sizes_of(given).values())


def _least_ram(problem: Problem, wanted: BackendOptions, call: FirstCall) -> SolveResult:
    """Search for a short time for the least budget of a problem, once in a call."""
    found = call.least_ram.get(problem.graph.sha256)
    if found is None:
        call.tell("looking for the least budget")
        found = least_ram(problem, wanted.gap)
        call.least_ram[problem.graph.sha256] = found
    return found


def least_ram(problem: Problem, gap: float) -> SolveResult:
    """Search for a short time for the least budget of a problem, whatever else the machine does."""
    limit_s = REFUSING_S + REFUSING_NODE_S * len(problem.graph.nodes)
    with processor_clock(REFUSING_WALL_RATIO * limit_s):
        return solve(
            replace(problem, ram="100%", minimize="ram"),
            time_limit=limit_s,
            gap=gap,
            threads=1,
        )


def _too_little(
    problem: Problem,
    wanted: BackendOptions,
    call: FirstCall,
    name: str,
    budget_bytes: int,
    beside_bytes: int,
    *,
    is_proved: bool,
) -> str:
    """Return why a budget cannot be kept, with the least one that was found."""
    least = _least_ram(problem, wanted, call)
    is_proved = is_proved or (least.bound or 0.0) > problem.usable_ram_bytes
    if least.simulation is None:
        return refusal(name, budget_bytes, enough_bytes=None, is_proved=is_proved)
    is_share = wanted.budget is not None and wanted.budget.share is not None
    return refusal(
        name,
        budget_bytes,
        enough_bytes=least.simulation.peak_ram_bytes + beside_bytes,
        needed_bytes=ceil(least.bound or 0.0) + beside_bytes,
        whole_bytes=call.first_bytes.get(call.function) if is_share else None,
        is_proved=is_proved,
    )


def write_page(path: str | Path, planned: GraphPlan) -> None:
    """Write the page about the schedule of a graph; needs ``poetmodel[report]``."""
    from poetmodel.report.page import check_report, write_report
    from poetmodel.report.subject import solved_subject

    check_report(path)
    name, plan, check = planned.record.name, planned.plan, planned.check
    subject = solved_subject(planned.result, name=name, plan=plan, check=check)
    write_report(path, [subject])
