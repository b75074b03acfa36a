"""The joint graph as a training graph, its schedule within a budget, and what is told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, shown
from poetmodel.graph import Graph, Phase, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op
from poetmodel.planner import checked_plan
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import refusal, unit_remark
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.torch.compile_cache import Schedules, is_settled
from poetmodel.torch.compiled import of_solve
from poetmodel.torch.dynamo.costs import CALL_S, this_machine
from poetmodel.torch.dynamo.joint_graph import sizes_of
from poetmodel.torch.dynamo.regions import Region, regions_of, solve_within
from poetmodel.units import MAX_BYTES, format_bytes, format_seconds, parse_size

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
REFUSING_S: Final = 1.5
"""Time to find the least budget where one is refused [s]."""
FIRST_TIME_RATIO: Final = 0.15
"""Share of the time limit after which a search without a schedule ends."""
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

    def budget_bytes(
        self, joint: JointGraph, keep_all_bytes: int, eager_bytes: int | None, call: FirstCall
    ) -> int:
        """Return the budget of a graph with these peaks: everything kept, and by itself [B].

        A percentage is of the first shape of a function: the RAM of a host does not depend on its
        inputs. Where everything was kept, it still is; without gradients nothing is.
        """
        if self.ram == EAGER_PEAK:
            return keep_all_bytes if eager_bytes is None else eager_bytes
        is_share = str(self.ram).strip().endswith("%")
        if is_share and joint.is_inference:
            return keep_all_bytes
        first_bytes = call.first_bytes.setdefault(call.function, keep_all_bytes)
        budget_bytes = parse_size(self.ram, field="ram", whole_bytes=first_bytes)
        keeps = is_share and budget_bytes >= first_bytes
        return max(budget_bytes, keep_all_bytes) if keeps else budget_bytes


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
    least_ram: dict[str, SolveResult] = field(default_factory=dict)
    """Solves for the least RAM in this call, by the digest of the graph."""

    def left_s(self, least_s: float = LEAST_S) -> float:
        """Return the time that is left [s], or the least that helps."""
        return max(least_s, self.until_s - monotonic())


def check_budget(ram: object) -> None:
    """Raise `BudgetError` unless it is a budget, and says its unit where it is that small."""
    if ram == EAGER_PEAK:
        return
    size = parse_size(ram, field="ram", whole_bytes=_SOME_BYTES)  # type: ignore[arg-type]
    if size == 0:
        raise BudgetError(f"ram: expected more than 0 bytes, got {shown(ram)}")
    if size <= _PERCENT and str(ram).strip().isdigit():
        raise BudgetError(f"ram: {unit_remark(size, MAX_BYTES).removeprefix('; ')}")


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
    joint.apply(profiles)
    joint.outside_bytes = call.outside.peak_bytes
    graph = joint.training_graph()
    device = wanted.device or this_machine(wanted.cache)
    costs = _costs(graph, wanted, device, [profile.time_s for profile in profiles])
    # Autograd has the gradients of results for the whole backward pass, and the caller the results.
    beside = {
        "results": sum(joint.storages[number].bytes for number in joint.handed_early),
        f"their gradients{_ZEROS if joint.has_zeros else ''}": joint.tangents_bytes,
        "copies of what is overwritten": _copies_bytes(joint),
        "what stays outside": call.outside.rest_bytes,
        "tokens of pages": 0 if wanted.paging is None else TOKEN_BYTES * len(graph.tensors),
    }
    beside_bytes = sum(beside.values())
    keep_all_bytes = checkpoint_all_peak_bytes(graph) + beside_bytes
    eager_bytes = joint.own_peak_bytes(graph)
    if eager_bytes is not None:
        eager_bytes += beside_bytes
    budget_bytes = wanted.budget_bytes(joint, keep_all_bytes, eager_bytes, call)
    beside["what Inductor takes"] = reserved_bytes
    beside_bytes += reserved_bytes
    usable_bytes = max(1, budget_bytes - beside_bytes)
    problem = Problem(
        graph, costs, ram=usable_bytes, paging=wanted.paging is not None, minimize="time"
    )
    regions = regions_of(joint, graph, wanted.regions)
    result = None
    if floor(graph).bytes <= usable_bytes:
        result = _solved(problem, wanted, call, regions)
    if result is not None and result.schedule is None and regions:
        raise BudgetError(_regions_missed(result, regions, name, budget_bytes))
    if result is None or result.schedule is None:
        late = set(joint.held) - joint.handed_early
        gradients_bytes = sum(joint.storages[number].bytes for number in late)
        parts = {"gradients that are handed over": gradients_bytes, **beside}
        told = ", ".join(f"{size:,} B {what}" for what, size in parts.items() if size)
        is_proved = result is None or result.status == Status.INFEASIBLE
        text = _too_little(
            problem, wanted, call, name, budget_bytes, beside_bytes, is_proved=is_proved
        )
        text += f"; at its end there are {told}" if told else ""
        if call.outside.peak_bytes:
            text += f"; between both passes {call.outside.peak_bytes:,} B are for what is outside"
        raise BudgetError(text)
    plan, check = checked_plan(
        graph, costs, result.schedule, mode=StorageMode.BLOCKING, ram_budget_bytes=usable_bytes
    )
    counts = Counter(instruction.op for instruction in plan.program)
    record = PlanRecord(
        name=name,
        ram_budget_bytes=budget_bytes,
        predicted_peak_bytes=check.peak_ram_bytes + beside_bytes,
        keep_all_bytes=keep_all_bytes,
        status=str(result.status),
        gap=result.gap,
        overhead=(result.overhead or 0.0) / (problem.objective.baseline or 1.0),
        recomputed=counts[Op.COMPUTE] - len(graph.nodes),
        paged_out=counts[Op.PAGE_OUT],
        paged_in=counts[Op.PAGE_IN],
        solve_s=result.solve_s,
        given_bytes=_given_bytes(joint),
        device=device.key or device.name,
        eager_bytes=eager_bytes,
        is_predicted=is_predicted,
        outside_bytes=call.outside.peak_bytes if any(call.outside) else None,
        regions=tuple(part.check(graph, result.schedule) for part in regions),
        is_loss_missing=joint.has_loss_outside and not any(call.outside),
    )
    results_bytes = beside["results"] + beside["copies of what is overwritten"]
    forward_beside_bytes = results_bytes + beside["tokens of pages"] + reserved_bytes
    peaks = _pass_peaks(joint, graph, plan, check, (forward_beside_bytes, beside_bytes))
    return GraphPlan(
        record=record,
        result=result,
        plan=plan,
        check=check,
        peaks=peaks,
        forward_outputs=joint.forward_outputs,
    )


def _pass_peaks(
    joint: JointGraph, graph: Graph, plan: Plan, check: PlanCheck, beside_bytes: tuple[int, int]
) -> PassPeaks:
    """Return the peaks of both passes of a plan; `beside_bytes` are beside it in each [B]."""
    forward_beside_bytes, backward_beside_bytes = beside_bytes
    high = [moment.high_bytes for moment in check.moments]
    count = sum(operation.phase is Phase.FORWARD for operation in joint.operations)
    begin = next(
        (k for k, (op, index) in enumerate(plan.program) if op == Op.COMPUTE and index >= count),
        len(high),
    )
    forward_bytes = max(high[:begin], default=0) + forward_beside_bytes
    if joint.is_inference:
        return PassPeaks(max(high, default=0) + backward_beside_bytes)
    held_bytes = check.moments[begin - 1].ram_bytes if begin else 0
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
        retained_bytes = max(retained_bytes, high[k] + freed_bytes)
        if op == Op.FREE and index in saved:  # autograd keeps this copy
            saved.remove(index)
            freed_bytes += graph.tensor_bytes[index]
    return PassPeaks(
        forward_bytes=forward_bytes,
        held_bytes=held_bytes + forward_beside_bytes,
        backward_bytes=max(high[begin:], default=0) + backward_beside_bytes,
        retained_bytes=retained_bytes + backward_beside_bytes,
        copied_bytes=joint.copied_bytes,
    )


def _solved(
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
    result: SolveResult, regions: tuple[Region, ...], name: str, budget_bytes: int
) -> str:
    told = ", ".join(f"{part.name} {format_bytes(part.limit_bytes)}" for part in regions)
    why = ", and nothing can" if result.status == Status.INFEASIBLE else " in time"
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
        found = solve(
            replace(problem, ram="100%", minimize="ram"),
            time_limit=REFUSING_S,
            gap=wanted.gap,
            threads=1,
        )
        call.least_ram[problem.graph.sha256] = found
    return found


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
    is_share = str(wanted.ram).strip().endswith("%")
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
