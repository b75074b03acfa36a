"""Regions of a model, with budgets for their tensors in RAM when the backward pass begins.

A budget is an additional row of the problem::

    sum(bytes[i] * S_RAM[b, i]) <= budget    i computed in the region, b the first backward stage

``S_RAM[b, i]`` is 1 if tensor i is in RAM when stage b begins. A storage belongs to the regions of
the operation that allocates it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from numbers import Real
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from torch.fx import traceback

from poetmodel.budgets import Budget
from poetmodel.errors import BudgetError, InputError, VerificationError, quote
from poetmodel.graph import Phase
from poetmodel.heuristics.execution import recompute_once
from poetmodel.model import build
from poetmodel.result import Termination
from poetmodel.solver import solve
from poetmodel.solver.facade import DEFAULT_FORMULATION
from poetmodel.solver.outcome import (
    Candidate,
    better_candidate,
    is_gap_closed,
    make_valid_candidate,
)
from poetmodel.solver.request import Request
from poetmodel.solver.search import Search
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from contextlib import AbstractContextManager

    import pyomo.environ as pyo

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import SolveProgress
    from poetmodel.torch.dynamo.joint_graph import JointGraph

_ANNOTATION_PREFIX: Final = "poetmodel.region "
"""Prefix of keys under a node's ``custom`` annotations: the `region` blocks around the node."""
BUDGET_KEY: Final = "memory_budget"
"""Key under a node's ``custom`` annotations: the fraction that PyTorch calls a memory budget."""
_BUDGET_KEYS: Final = (
    BUDGET_KEY,
    # of torch.autograd.graph.region_activation_memory_budget, since PyTorch 2.13
    getattr(traceback, "MEMORY_BUDGET_ANNOTATION_KEY", BUDGET_KEY),
)
_MAX_NAMES: Final = 8
"""Maximum number of module names in an error message."""
_TRIAL_S: Final = 3.0
"""Time limit of each trial problem of `_search_with_less_ram`, and minimum time limit of a model
with the rows of regions [s]."""
_TRIAL_GAP: Final = 0.05
"""MIP gap of a trial problem."""
_MAX_NODES: Final = 100
"""Maximum number of nodes of a graph for which a model with the rows of regions is solved."""
_POLICY: Final = "MUST_RECOMPUTE"
"""Name of the region of storages that a selective-checkpoint policy forbids to save."""
_ROOT_EXPRESSION: Final = re.compile(r"^[LG]\['\w+'\]\.?")
"""Prefix of Dynamo's expression of a module: the compiled model."""


def region(*, ram: str | int, name: str = "region") -> AbstractContextManager[Any]:
    """Limit the bytes that operations in a ``with`` block leave in RAM for the backward pass.

    Parameters
    ----------
    ram : str or int
        Upper bound on the size of tensors that are allocated in the block and are in RAM when the
        backward pass begins: bytes, ``2MiB``, or a percentage of their size with everything kept.
        An invalid budget raises `BudgetError` when the code is compiled.
    name : str
        Blocks are one region if both name and budget are equal, otherwise separate regions. Tensors
        of a nested block count in both regions if the names differ, otherwise in the inner one.

    Returns
    -------
    context manager
        Use it in code that `backend` compiles; elsewhere it has no effect.

    Notes
    -----
    PyTorch's own words are regions too: ``torch.fx.traceback.annotate({"memory_budget": 0.4})`` and
    ``torch.autograd.graph.region_activation_memory_budget(0.4)`` are ``region(ram="40%")``.
    """
    block: AbstractContextManager[Any] = traceback.annotate(
        {_ANNOTATION_PREFIX + name: (name, ram)}
    )
    return block


def region_errors(regions: Any) -> Iterator[str]:
    """Yield an error for each invalid budget in `regions`."""
    if not isinstance(regions, Mapping | None):
        yield f"regions: expected budgets by module, such as encoder.*, got {quote(regions)}"
        return
    for pattern, ram in (regions or {}).items():
        try:
            Budget.parse(ram, field=f"regions: {pattern}")
        except InputError as error:
            yield from error.faults


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a model with a budget, stated by the tensors that its operations compute."""

    name: str
    tensors: frozenset[int]
    """Indices in the training graph."""
    limit_bytes: int
    """Budget of the tensors that are in RAM when `stage` begins [B]."""
    stage: int
    """First stage after the forward pass."""

    def slack_bytes(self, graph: Graph, present_tensors: Collection[int]) -> int:
        """Return the budget less the region's bytes in `present_tensors`; may be negative [B]."""
        used_bytes = sum(graph.tensor_bytes[i] for i in self.tensors.intersection(present_tensors))
        return self.limit_bytes - used_bytes

    def excess_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Return the bytes by which a schedule exceeds the budget; 0 if it does not [B]."""
        return max(0, -self.slack_bytes(graph, tensors_in_ram(schedule, self.stage)))

    def describe_use(self, graph: Graph, schedule: Schedule) -> str:
        """Return the use of the budget as text; raise `VerificationError` if it is exceeded."""
        used_bytes = self.limit_bytes - self.slack_bytes(
            graph, tensors_in_ram(schedule, self.stage)
        )
        text = f"{self.name} {format_bytes(used_bytes)} of {format_bytes(self.limit_bytes)}"
        if used_bytes > self.limit_bytes:
            raise VerificationError([f"region {text}"])
        return text


def find_regions(
    joint: JointGraph, graph: Graph, module_budgets: Mapping[str, str | int] | None
) -> tuple[Region, ...]:
    """Return the regions of a graph: modules, ``with`` blocks, and `_POLICY`, in this order.

    `module_budgets` has budgets by module name or pattern, which must match a tensor. Blocks are
    those of `region`, and of PyTorch's memory budgets, of which equal ones are one region.
    `_POLICY` allows 0 B of the tensors that must be recomputed. Only forward operations count.
    """
    phases = [operation.phase for operation in joint.step_graph.operations]
    if joint.is_inference or Phase.BACKWARD not in phases:
        return ()
    stage = phases.index(Phase.BACKWARD)
    tensors_of_budget: dict[tuple[str, str | int], set[int]] = {
        (name, ram): set() for name, ram in (module_budgets or {}).items()
    }
    module_paths = set()
    for operation in joint.step_graph.operations[:stage]:
        meta = operation.node.meta
        module_stack = (meta.get("nn_module_stack") or {}).values()
        paths = [_ROOT_EXPRESSION.sub("", str(path)) for path, _ in module_stack]
        module_paths.update(paths)
        for (name, _), tensors in tensors_of_budget.items():
            if any(fnmatchcase(path, name) for path in paths):
                tensors.update(operation.storages)
        for budget in _annotated_budgets(meta.get("custom") or {}):
            tensors_of_budget.setdefault(budget, set()).update(operation.storages)
    empty_names = [name for (name, _), tensors in tensors_of_budget.items() if not tensors]
    if empty_names:
        raise InputError(
            f"regions: {quote(name)} is no module that makes a tensor; modules are "
            f"{', '.join(sorted(filter(None, module_paths))[:_MAX_NAMES])}"
            for name in empty_names
        )
    regions = [
        _make_region(graph, stage, name, ram, frozenset(tensors))
        for (name, ram), tensors in tensors_of_budget.items()
    ]
    if joint.must_recompute_storages:
        policy_region = Region(
            name=_POLICY, tensors=joint.must_recompute_storages, limit_bytes=0, stage=stage
        )
        regions.append(policy_region)
    return tuple(regions)


def _annotated_budgets(annotations: Mapping[str, Any]) -> Iterator[tuple[str, str | int]]:
    """Yield name and RAM of each region that a node's annotations state, ours or PyTorch's."""
    for key, value in annotations.items():
        if str(key).startswith(_ANNOTATION_PREFIX):
            name, ram = value
            yield name, ram
        elif key in _BUDGET_KEYS:
            is_fraction = isinstance(value, Real) and not isinstance(value, bool)
            if not is_fraction or not 0 <= value <= 1:
                raise BudgetError(
                    f"{BUDGET_KEY}: expected a fraction from 0 to 1 of the tensors that are saved, "
                    f"got {quote(value)}; a size needs poetmodel.torch.region"
                )
            yield f"{BUDGET_KEY} {value:g}", f"{100 * value:.9g}%"


def _make_region(
    graph: Graph, stage: int, name: str, ram: str | int, tensors: frozenset[int]
) -> Region:
    """Return a region; 100 % of `ram` are the tensors that nodes from `stage` on read."""
    kept_tensors = (i for i in tensors if max(graph.users_of[i], default=0) >= stage)
    keep_all_bytes = sum(graph.tensor_bytes[i] for i in kept_tensors)
    limit_bytes = Budget.parse(ram, field=f"region {name}").resolve(keep_all_bytes)
    return Region(name=name, tensors=tensors, limit_bytes=limit_bytes, stage=stage)


def tensors_in_ram(schedule: Schedule, stage: int) -> set[int]:
    """Return the tensors that are in RAM when `stage` begins."""
    return {i for t, i in schedule.S_RAM if t == stage}


def solve_with_regions(
    problem: Problem,
    regions: tuple[Region, ...],
    *,
    gap: float,
    time_limit: float,
    on_progress: Callable[[SolveProgress], bool | None],
) -> SolveResult:
    """Solve a problem subject to the budgets of regions.

    Solves without budgets in a third of `time_limit`, for a valid bound; then searches, and for at
    most `_MAX_NODES` nodes solves a model, at least for `_TRIAL_S`. Other fields may be those of
    the first solve if no schedule was found.
    """
    deadline_s = monotonic() + time_limit
    result = solve(problem, time_limit=time_limit / 3, gap=gap, on_progress=on_progress)
    first_schedule = result.schedule
    if first_schedule is None or not any(
        region.excess_bytes(problem.graph, first_schedule) for region in regions
    ):
        return result
    baseline = problem.objective.baseline
    bound = max(result.proven_bound - baseline, _cost_lower_bound(problem, regions))
    candidate = make_valid_candidate(problem, _recompute_excess(problem, regions, first_schedule))
    if candidate is None or not is_gap_closed(problem, candidate.value, bound, gap):
        candidate = better_candidate(
            candidate, _search_with_less_ram(problem, regions, first_schedule, deadline_s)
        )
    schedule = None if candidate is None else candidate.schedule
    is_open = candidate is None or not is_gap_closed(problem, candidate.value, bound, gap)
    if is_open and len(problem.graph.nodes) <= _MAX_NODES:
        remaining_s = max(_TRIAL_S, deadline_s - monotonic())
        model_result = solve(
            _build_model(problem, regions), time_limit=remaining_s, gap=gap, start=schedule
        )
        if model_result.schedule is not None:
            return replace(
                model_result, objective_bound=max(model_result.proven_bound, bound + baseline)
            )
        if schedule is None:
            return model_result
    if candidate is None:
        return replace(result, schedule=None)
    is_proved = is_gap_closed(problem, candidate.value, bound, gap)
    search = Search(
        problem=problem,
        request=Request(time_limit_s=time_limit, gap=gap),
        termination=Termination.PROVED if is_proved else Termination.TIME_LIMIT,
        best=candidate,
        bound=bound,
    )
    return search.result(formulation=DEFAULT_FORMULATION)


def _cost_lower_bound(problem: Problem, regions: Iterable[Region]) -> float:
    """Return a lower bound on the cost of restoring bytes above budgets."""
    return max(_region_cost_bound(problem, region) for region in regions)


def _region_cost_bound(problem: Problem, region: Region) -> float:
    """Return a lower bound on the objective's cost of restoring bytes above one region's budget."""
    graph, costs = problem.graph, problem.objective.coefficients
    restorations: list[tuple[float, int]] = []
    read_tensors = {i for i in region.tensors if max(graph.users_of[i], default=0) >= region.stage}
    for k in {graph.node_of[i] for i in read_tensors}:
        size = sum(graph.tensor_bytes[i] for i in read_tensors.intersection(graph.outputs_of[k]))
        cost = costs.compute[k] if graph.nodes[k].recomputable else inf
        if problem.paging:
            cost = min(
                cost, *(costs.page_in[i] for i in read_tensors.intersection(graph.outputs_of[k]))
            )
        if size:
            restorations.append((cost / size, size))
    excess_bytes, cost_bound = sum(size for _, size in restorations) - region.limit_bytes, 0.0
    for rate, size in sorted(restorations):
        if excess_bytes <= 0 or rate == inf:
            break
        cost_bound += rate * min(size, excess_bytes)
        excess_bytes -= size
    return cost_bound


def _recompute_excess(
    problem: Problem, regions: tuple[Region, ...], first_schedule: Schedule
) -> Schedule | None:
    """Return a schedule that meets all budgets by recomputation, or None; ignores the RAM budget.

    Greedy: evicts the tensor with the lowest recomputation cost per byte; at the end saves again
    evicted tensors that fit.
    """
    graph, costs = problem.graph, problem.objective.coefficients.compute
    saved_tensors = tensors_in_ram(first_schedule, regions[0].stage)

    def find_recomputed_nodes(i: int) -> set[int]:
        """Return the node of `i`, and its ancestors through tensors not in `saved_tensors`."""
        nodes, pending = set[int](), [i]
        while pending:
            k = graph.node_of[pending.pop()]
            if k not in nodes:
                nodes.add(k)
                pending += (j for j in graph.inputs_of[k] if j not in saved_tensors)
        return nodes

    evicted_tensors = list[int]()
    recomputed_nodes = set[int]()
    while exceeded_regions := [
        region for region in regions if region.slack_bytes(graph, saved_tensors) < 0
    ]:
        candidates: list[tuple[float, int, set[int]]] = []
        for i in {
            i
            for region in exceeded_regions
            for i in region.tensors & saved_tensors
            if graph.tensor_bytes[i]
        }:
            nodes = find_recomputed_nodes(i) - recomputed_nodes
            if all(graph.nodes[k].recomputable for k in nodes):
                rate = sum(costs[k] for k in nodes) / graph.tensor_bytes[i]
                candidates.append((rate, i, nodes))
        if not candidates:
            return None
        _, cheapest_tensor, nodes = min(candidates, key=itemgetter(0, 1))
        saved_tensors.remove(cheapest_tensor)
        evicted_tensors.append(cheapest_tensor)
        recomputed_nodes |= nodes
    # The last evicted tensor may be larger than the excess: save earlier ones again that fit.
    for i in reversed(evicted_tensors):
        if all(region.slack_bytes(graph, saved_tensors | {i}) >= 0 for region in regions):
            saved_tensors.add(i)
    return recompute_once(graph, saved_tensors)


def _search_with_less_ram(
    problem: Problem, regions: tuple[Region, ...], first_schedule: Schedule, deadline_s: float
) -> Candidate | None:
    """Return a verified schedule that meets the budgets of regions; None if none is found in time.

    Each trial has a larger workspace at the first backward node, by the excess of the previous
    schedule. `deadline_s` is on the monotonic clock [s].
    """
    graph, stage = problem.graph, regions[0].stage
    trial_schedule: Schedule | None = first_schedule
    while trial_schedule is not None:
        excess_bytes = sum(region.excess_bytes(graph, trial_schedule) for region in regions)
        remaining_s = min(_TRIAL_S, deadline_s - monotonic())
        if not excess_bytes or remaining_s <= 0:
            return None if excess_bytes else make_valid_candidate(problem, trial_schedule)
        present_bytes = sum(graph.tensor_bytes[i] for i in tensors_in_ram(trial_schedule, stage))
        reserved_bytes = problem.ram_budget_bytes - present_bytes + excess_bytes
        node = graph.nodes[stage]
        node = replace(node, workspace_bytes=max(node.workspace_bytes, reserved_bytes))
        nodes = (*graph.nodes[:stage], node, *graph.nodes[stage + 1 :])
        trial_problem = replace(
            problem, graph=replace(graph, nodes=nodes), ram=problem.ram_budget_bytes
        )
        schedule = solve(trial_problem, time_limit=remaining_s, gap=_TRIAL_GAP).schedule
        trial_schedule = None if schedule is None else replace(schedule, identity=None)
    return None


def _build_model(problem: Problem, regions: tuple[Region, ...]) -> pyo.ConcreteModel:
    """Return a model with a row per region; memory rows are left to `solve`."""
    import pyomo.environ as pyo

    model = build(problem, memory_rows=False)
    model.regions = pyo.ConstraintList()
    for region in regions:
        sizes = problem.graph.tensor_bytes
        terms = [
            sizes[i] * model.S_RAM[region.stage, i]
            for i in sorted(region.tensors)
            if sizes[i] and (region.stage, i) in model.S_RAM
        ]
        if terms:
            model.regions.add(sum(terms) <= region.limit_bytes)
    return model
