"""The joint graph as a training graph, its schedule within a budget, and what is told of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import fx

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.errors import BudgetError, VerificationError
from poetmodel.graph import Graph, Node, Phase, Tensor, checkpoint_all_peak_bytes, floor
from poetmodel.plan import Op, check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem
from poetmodel.solver import solve
from poetmodel.torch.capturing.replay import flops_of, storage_key
from poetmodel.torch.dynamo.costs import CALL_S, this_machine
from poetmodel.torch.dynamo.operations import (
    Operation,
    Operations,
    fake,
    node_names,
    operator_name,
    storage_of,
)
from poetmodel.torch.known_steps import Schedules, is_settled
from poetmodel.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from poetmodel.device.hardware import Storage
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.result import SolveResult
    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.cache import Cache
    from poetmodel.torch.dynamo.costs import Form
    from poetmodel.torch.runtime.profiling import Paging

    Step: TypeAlias = tuple[Op, Operation | int]
    """An operation to compute, or the key of a storage to page."""

RESULTS: Final = "results"
"""Name of the node that stands for the end of the step, where results are handed over."""
TOKEN_BYTES: Final = 8
"""RAM of the token for each page that is out [B]."""
MEASURED: Final = "measured"
"""The costs that are measured on this host, in place of estimates."""


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """How one captured graph keeps its budget. All bytes are those of PyTorch's allocator."""

    name: str
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
    is_predicted: bool
    """Whether sizes are PyTorch's predictions and workspaces are not counted: nothing was run."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        proved = "" if self.gap is None else f" (at least {self.overhead * (1 - self.gap):.1%})"
        pages = f", {self.paged_out} paged out" if self.paged_out else ""
        predicted = ", workspaces of kernels not counted" if self.is_predicted else ""
        return (
            f"{self.name}: peak {format_bytes(self.predicted_peak_bytes)} of "
            f"{format_bytes(self.ram_budget_bytes)} (keep-all {format_bytes(self.keep_all_bytes)}; "
            f"beside it {format_bytes(self.given_bytes)} of parameters and inputs), "
            f"{self.recomputed} recomputed{pages}, "
            f"overhead {self.overhead:.1%}{proved} on {self.device}, "
            f"{self.status}, solved in {format_seconds(self.solve_s)}{predicted}"
        )


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan of a captured graph."""

    steps: tuple[Step, ...]
    record: PlanRecord
    result: SolveResult
    plan: Plan
    check: PlanCheck


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Request of a back end; `poetmodel.torch.backend` describes each field."""

    ram: str | int
    device: Device | None
    costs: str | None
    paging: Paging | Storage | None
    time_limit: float
    gap: float
    on_progress: Callable[[SolveProgress], bool | None] | None
    cache: Cache


def plan(
    operations: Operations,
    forms: Sequence[Form],
    wanted: Wanted,
    *,
    name: str,
    reserved_bytes: int = 0,
    is_predicted: bool = False,
) -> Planned:
    """Plan a graph, whose operations have these forms, within its budget less what is reserved.

    Raises
    ------
    BudgetError
        If the budget is too small: says the least that is known to do.
    """
    for operation, form in zip(operations.operations, forms, strict=True):
        operations.bytes.update(_made_bytes(operation, form))
    graph, tensor_of = _graph(operations, [form.workspace_bytes for form in forms])
    device = wanted.device or this_machine(wanted.cache)
    costs = _costs(graph, wanted, device, [form.time_s for form in forms])
    # Autograd has the gradients of results for the whole backward pass, and the caller the results.
    beside_bytes = _copies_bytes(operations) + sum(_sizes(operations.tangents).values())
    beside_bytes += sum(operations.bytes[key] for key in operations.handed_early)
    if wanted.paging is not None:
        beside_bytes += TOKEN_BYTES * len(graph.tensors)
    keep_all_bytes = checkpoint_all_peak_bytes(graph) + beside_bytes
    budget_bytes = parse_size(wanted.ram, field="ram", whole_bytes=keep_all_bytes)
    if operations.is_inference and str(wanted.ram).strip().endswith("%"):
        budget_bytes = keep_all_bytes  # nothing is kept for a backward pass
    beside_bytes += reserved_bytes
    usable_bytes = max(1, budget_bytes - beside_bytes)
    problem = Problem(
        graph, costs, ram=usable_bytes, paging=wanted.paging is not None, minimize="time"
    )
    if floor(graph).bytes > usable_bytes:
        raise BudgetError(_too_little(problem, wanted, name, budget_bytes, beside_bytes))
    result = _solved(problem, wanted)
    if result.schedule is None:
        raise BudgetError(_too_little(problem, wanted, name, budget_bytes, beside_bytes))
    plan = make_plan(
        graph, costs, result.schedule, mode=StorageMode.BLOCKING, ram_budget_bytes=usable_bytes
    )
    check = check_plan(graph, costs, plan, ram_budget_bytes=usable_bytes)
    if check.violations:  # a fault of ours, never to be passed on
        raise VerificationError(check.violations)
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
        given_bytes=_given_bytes(operations),
        device=device.key or device.name,
        is_predicted=is_predicted,
    )
    return Planned(
        steps=tuple(_steps(operations, graph, plan, tensor_of)),
        record=record,
        result=result,
        plan=plan,
        check=check,
    )


def _made_bytes(operation: Operation, form: Form) -> dict[int, int]:
    """Return the size of what an operation was seen to make, by the key of its storage [B].

    What is predicted of a gradient that nobody wants, kernels may leave out.
    """
    value = fake(operation.node)
    outputs = list(value) if isinstance(value, tuple | list) else [value]
    sizes = dict.fromkeys(operation.makes, 0)
    for output, layout in zip(outputs, form.layouts, strict=False):
        if isinstance(output, torch.Tensor) and layout is not None:
            key = storage_key(output)
            if key in sizes:
                sizes[key] = form.sizes_bytes[layout[-1]]
    return sizes


def _solved(problem: Problem, wanted: Wanted) -> SolveResult:
    """Return the schedule that is known of a problem where it will do, else solve."""
    schedules = Schedules(wanted.cache)
    known = schedules.result(problem, gap=wanted.gap)
    if known is not None and is_settled(known, within_s=wanted.time_limit):
        return known
    result = solve(
        problem,
        time_limit=wanted.time_limit,
        gap=wanted.gap,
        threads=1,
        start=schedules.start(problem) if known is None else known.schedule,
        on_progress=wanted.on_progress,
    )
    schedules.keep(result)
    return result


def _steps(
    operations: Operations, graph: Graph, plan: Plan, tensor_of: Mapping[int, str]
) -> Iterator[Step]:
    """Yield a program in operations and keys of storages."""
    operation_of = [*operations.operations, None]  # the last node stands for the end
    key_of = {name: key for key, name in tensor_of.items()}
    for op, index in plan.program:
        operation = operation_of[index] if op == Op.COMPUTE else None
        if operation is not None:
            yield op, operation
        elif op in (Op.PAGE_OUT, Op.PAGE_IN):
            yield op, key_of[graph.tensors[index].name]


def _graph(operations: Operations, workspaces: Sequence[int]) -> tuple[Graph, dict[int, str]]:
    """Return the training graph, and the name there of the storage of each key.

    The name of the graph says nothing, so that one that is captured again is known.
    """
    names = node_names(operation.node for operation in operations.operations)
    tensor_of = {
        key: f"{names[k]}:{number}" if len(operation.makes) > 1 else names[k]
        for k, operation in enumerate(operations.operations)
        for number, key in enumerate(operation.makes)
    }
    nodes = [
        _node(operations, operation, names[k], tensor_of, workspaces[k])
        for k, operation in enumerate(operations.operations)
    ]
    results = Node(
        name=RESULTS,
        op=RESULTS,
        phase=nodes[-1].phase if nodes else Phase.FORWARD,
        inputs=tuple(tensor_of[key] for key in operations.held),
        outputs=(),
        workspace_bytes=operations.copied_bytes,
        recomputable=False,
        bytes_moved=0,
    )
    graph = Graph(name="captured", nodes=(*nodes, results), kernels="pytorch")
    return graph, tensor_of


def _node(
    operations: Operations,
    operation: Operation,
    name: str,
    tensor_of: dict[int, str],
    workspace_bytes: int,
) -> Node:
    sizes, handed = operations.bytes, operations.handed_early
    if len(operation.makes) > 1:  # made again beside what the caller has
        workspace_bytes += sum(sizes[key] for key in handed.intersection(operation.makes))
    moved = sum(sizes[key] for key in (*operation.makes, *operation.reads))
    arguments, keywords = fx.node.map_arg((operation.node.args, operation.node.kwargs), fake)
    return Node(
        name=name,
        op=operator_name(operation.node),
        phase=Phase.BACKWARD if operation.is_backward else Phase.FORWARD,
        inputs=tuple(tensor_of[key] for key in operation.reads),
        outputs=tuple(
            Tensor(name=tensor_of[key], bytes=0 if key in handed else sizes[key])
            for key in operation.makes
        ),
        workspace_bytes=workspace_bytes,
        flops=flops_of(operation.node.target, arguments, keywords, fake(operation.node)),
        bytes_moved=moved,
        recomputable=operation.is_repeatable,
    )


def _costs(graph: Graph, wanted: Wanted, device: Device, times_s: Sequence[float]) -> Costs:
    """Return the costs of a step: estimated, or from measured forms of operations."""
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


def _copies_bytes(operations: Operations) -> int:
    """Return the bytes of copies of overwritten arguments that others read [B]."""
    read = {
        source
        for operation in operations.operations
        for source in operation.node.all_input_nodes
        if source in operations.mutated
    }
    return sum(_sizes(read).values())


def _given_bytes(operations: Operations) -> int:
    given = [node for node in operations.arguments if node not in operations.tangents]
    return sum(_sizes(given).values())


def _sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Return the size of each storage that some nodes show, by its key [B]."""
    keys = ((storage_of(node), node) for node in nodes)
    return {key: fake(node).untyped_storage().nbytes() for key, node in keys if key is not None}


def _too_little(
    problem: Problem, wanted: Wanted, name: str, budget_bytes: int, beside_bytes: int
) -> str:
    """Return why a budget cannot be kept, with the least one that can."""
    least = solve(
        replace(problem, ram="100%", minimize="ram"),
        time_limit=wanted.time_limit,
        gap=wanted.gap,
        threads=1,
    )
    text = f"ram: {format_bytes(budget_bytes)} is too little for {name}"
    if least.peak_ram_bytes is None:
        return text
    enough_bytes = least.peak_ram_bytes + beside_bytes
    needed_bytes = ceil(least.bound or 0.0) + beside_bytes
    if needed_bytes >= enough_bytes:
        return f"{text}: the least is ram={enough_bytes}"
    return f"{text}: ram={enough_bytes} is enough, and less than {needed_bytes:,} B never is"


def write_page(path: str | Path, planned: Planned) -> None:
    """Write the page about the schedule of a graph; needs ``poetmodel[report]``."""
    from poetmodel.report.page import check_report, write_report
    from poetmodel.report.subject import Sources, Subject, in_graph
    from poetmodel.schedule.io import parse_document
    from poetmodel.schedule.relations import dump

    check_report(path)
    problem = planned.result.problem
    document = parse_document(dump(planned.result.to_dict()), source="result")
    subject = Subject(
        label="A",
        sources=Sources(schedule=planned.record.name, graph=planned.record.name),
        document=document,
        schedule=in_graph(problem.graph, document.schedule),
        problem=problem,
        costs=problem.costs,
        verdict=verify(problem, document.schedule, stated=document.stated),
        plan=planned.plan,
        check=planned.check,
    )
    write_report(path, [subject])
