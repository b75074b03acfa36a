"""Budgets of regions of a model: bytes of their tensors in RAM when the backward pass begins.

A budget is an additional row of the problem, over the tensors that stay in RAM until that stage::

    sum(bytes[i] * S_RAM[b, i]) <= budget    i made in the region, b the first backward stage

A storage counts once, with the operation that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from operator import itemgetter
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from torch.fx import traceback

from poetmodel.budgets import Budget
from poetmodel.errors import InputError, VerificationError, shown
from poetmodel.graph import Phase
from poetmodel.heuristics.execution import recompute_once
from poetmodel.model import build
from poetmodel.result import Termination
from poetmodel.solver import solve
from poetmodel.solver.facade import DEFAULT
from poetmodel.solver.outcome import (
    Candidate,
    Outcome,
    better_candidate,
    is_closed,
    make_result,
    verified_candidate,
)
from poetmodel.solver.request import Request
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

_KEY: Final = "poetmodel.region "
_MAX_NAMES: Final = 8
"""Maximum number of modules in a refusal."""
_TRIAL_S: Final = 3.0
"""Time limit of each trial problem for a schedule that meets the budgets [s]."""
_TRIAL_GAP: Final = 0.05
"""MIP gap of a trial problem."""
_MAX_NODES: Final = 100
"""Graphs with at most this number of nodes get a model with the rows of regions."""
_POLICY: Final = "MUST_RECOMPUTE"
"""Name of the region of storages that a selective-checkpoint policy forbids to save."""
_ROOT: Final = re.compile(r"^[LG]\['\w+'\]\.?")
"""Dynamo's expression of the model itself."""


def region(*, ram: str | int, name: str = "region") -> AbstractContextManager[Any]:
    """Limit the bytes that operations in a ``with`` block leave in RAM for the backward pass.

    Parameters
    ----------
    ram : str or int
        Upper bound on bytes made inside that are in RAM when the backward pass begins: bytes,
        ``2MiB``, or a percentage of the same bytes with everything kept.
    name : str
        Blocks with equal name and budget are one region. Tensors made in a nested block count in
        both.

    Returns
    -------
    context manager
        Use it in code that `backend` compiles; elsewhere it has no effect.
    """
    block: AbstractContextManager[Any] = traceback.annotate({_KEY + name: (name, ram)})
    return block


def region_errors(regions: Any) -> Iterator[str]:
    """Yield an error for each invalid budget of a module or pattern."""
    if not isinstance(regions, Mapping | None):
        yield f"regions: expected budgets by module, such as encoder.*, got {shown(regions)}"
        return
    for pattern, ram in (regions or {}).items():
        try:
            Budget.parse(ram, field=f"regions: {pattern}")
        except InputError as error:
            yield from error.faults


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of a model with a budget, as the set of tensors that it makes."""

    name: str
    tensors: frozenset[int]
    limit_bytes: int
    stage: int
    """First backward stage."""

    def slack_bytes(self, graph: Graph, held: Collection[int]) -> int:
        """Return the budget less the region's tensors among `held`; negative if violated [B]."""
        used_bytes = sum(graph.tensor_bytes[i] for i in self.tensors.intersection(held))
        return self.limit_bytes - used_bytes

    def excess_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Return the bytes by which a schedule exceeds the budget; 0 if it does not [B]."""
        return max(0, -self.slack_bytes(graph, tensors_at(schedule, self.stage)))

    def check(self, graph: Graph, schedule: Schedule) -> str:
        """Return the region's use of its budget as text; raise `VerificationError` if exceeded."""
        used_bytes = self.limit_bytes - self.slack_bytes(graph, tensors_at(schedule, self.stage))
        text = f"{self.name} {format_bytes(used_bytes)} of {format_bytes(self.limit_bytes)}"
        if used_bytes > self.limit_bytes:
            raise VerificationError(f"region {text}")
        return text


def regions_of(
    joint: JointGraph, graph: Graph, settings: Mapping[str, str | int] | None
) -> tuple[Region, ...]:
    """Return the regions of a graph: modules, ``with`` blocks, and `_POLICY`.

    Empty without a backward pass. Raises `InputError` if a region makes no tensor.
    """
    phases = [operation.phase for operation in joint.operations]
    if joint.is_inference or Phase.BACKWARD not in phases:
        return ()
    stage = phases.index(Phase.BACKWARD)
    budgets: dict[tuple[str, str | int], set[int]] = {
        (name, ram): set() for name, ram in (settings or {}).items()
    }
    modules = set()
    for operation in joint.operations[:stage]:
        meta = operation.node.meta
        stack = (meta.get("nn_module_stack") or {}).values()
        paths = [_ROOT.sub("", str(path)) for path, _ in stack]
        modules.update(paths)
        for (name, _), made in budgets.items():
            if any(fnmatchcase(path, name) for path in paths):
                made.update(operation.storages)
        for key, own in (meta.get("custom") or {}).items():
            if str(key).startswith(_KEY):
                budgets.setdefault(tuple(own), set()).update(operation.storages)
    empty = [name for (name, _), made in budgets.items() if not made]
    if empty:
        raise InputError(
            f"regions: {shown(name)} is no module that makes a tensor; modules are "
            f"{', '.join(sorted(filter(None, modules))[:_MAX_NAMES])}"
            for name in empty
        )
    found = [
        _make_region(graph, stage, name, ram, frozenset(made))
        for (name, ram), made in budgets.items()
    ]
    if joint.must_recompute:
        forbidden = Region(name=_POLICY, tensors=joint.must_recompute, limit_bytes=0, stage=stage)
        found.append(forbidden)
    return tuple(found)


def _make_region(
    graph: Graph, stage: int, name: str, ram: str | int, tensors: frozenset[int]
) -> Region:
    """Return a region; a percentage refers to its bytes in RAM at `stage` with everything kept."""
    kept = (i for i in tensors if max(graph.users_of[i], default=0) >= stage)
    keep_all_bytes = sum(graph.tensor_bytes[i] for i in kept)
    limit_bytes = Budget.parse(ram, field=f"region {name}").resolve(keep_all_bytes)
    return Region(name=name, tensors=tensors, limit_bytes=limit_bytes, stage=stage)


def tensors_at(schedule: Schedule, stage: int) -> set[int]:
    """Return the tensors that are in RAM when a stage begins."""
    return {i for t, i in schedule.S_RAM if t == stage}


def solve_within(
    problem: Problem,
    regions: tuple[Region, ...],
    *,
    gap: float,
    time_limit: float,
    on_progress: Callable[[SolveProgress], bool | None],
) -> SolveResult:
    """Solve a problem with the rows of regions; the result lacks a schedule if none was found.

    The bound without these rows also holds with them. A small graph gets a model with them.
    """
    deadline_s = monotonic() + time_limit
    result = solve(problem, time_limit=time_limit / 3, gap=gap, on_progress=on_progress)
    first = result.schedule
    if first is None or not any(region.excess_bytes(problem.graph, first) for region in regions):
        return result
    baseline = problem.objective.baseline
    bound = max(result.proven_bound - baseline, _min_cost(problem, regions))
    found = verified_candidate(problem, _recompute_excess(problem, regions, first))
    if found is None or not is_closed(problem, found.value, bound, gap):
        found = better_candidate(found, _search_with_less_ram(problem, regions, first, deadline_s))
    schedule = None if found is None else found.schedule
    is_open = found is None or not is_closed(problem, found.value, bound, gap)
    if is_open and len(problem.graph.nodes) <= _MAX_NODES:
        left_s = max(_TRIAL_S, deadline_s - monotonic())
        proved = solve(_build_model(problem, regions), time_limit=left_s, gap=gap, start=schedule)
        if proved.schedule is not None:
            return replace(proved, objective_bound=max(proved.proven_bound, bound + baseline))
        if schedule is None:
            return proved
    if found is None:
        return replace(result, schedule=None)
    is_proved = is_closed(problem, found.value, bound, gap)
    outcome = Outcome(
        termination=Termination.PROVED if is_proved else Termination.TIME_LIMIT,
        candidate=found,
        bound=bound,
    )
    request = Request(time_limit_s=time_limit, gap=gap)
    return make_result(problem, request, outcome, formulation=DEFAULT)


def _min_cost(problem: Problem, regions: Iterable[Region]) -> float:
    """Return a lower bound on the cost of tensors beyond the budgets of regions.

    The backward pass reads tensors of a region from RAM, or they are recomputed or paged in. For
    each region the bound is a fractional knapsack over the excess bytes; the largest bound counts.
    """
    return max(_min_cost_of(problem, region) for region in regions)


def _min_cost_of(problem: Problem, region: Region) -> float:
    """Return the bound of `_min_cost` for one region."""
    graph, costs = problem.graph, problem.objective.coefficients
    restorations: list[tuple[float, int]] = []
    read = {i for i in region.tensors if max(graph.users_of[i], default=0) >= region.stage}
    for k in {graph.node_of[i] for i in read}:
        size = sum(graph.tensor_bytes[i] for i in read.intersection(graph.outputs_of[k]))
        cost = costs.compute[k] if graph.nodes[k].recomputable else inf
        if problem.paging:
            cost = min(cost, *(costs.page_in[i] for i in read.intersection(graph.outputs_of[k])))
        if size:
            restorations.append((cost / size, size))
    left_bytes, total = sum(size for _, size in restorations) - region.limit_bytes, 0.0
    for rate, size in sorted(restorations):
        if left_bytes <= 0 or rate == inf:
            break
        total += rate * min(size, left_bytes)
        left_bytes -= size
    return total


def _recompute_excess(
    problem: Problem, regions: tuple[Region, ...], first: Schedule
) -> Schedule | None:
    """Return a schedule that recomputes tensors until all regions fit; None if it is impossible.

    Of the regions with excess bytes the tensor with the lowest cost per byte is evicted, one after
    the other. Its cost includes the recomputation of all its missing inputs.
    """
    graph, costs = problem.graph, problem.objective.coefficients.compute
    saved = tensors_at(first, regions[0].stage)

    def recomputed_nodes(i: int) -> set[int]:
        """Return the nodes to recompute for a tensor that is not saved."""
        nodes, pending = set[int](), [i]
        while pending:
            k = graph.node_of[pending.pop()]
            if k not in nodes:
                nodes.add(k)
                pending += (j for j in graph.inputs_of[k] if j not in saved)
        return nodes

    computed, evicted = set[int](), list[int]()
    while over := [region for region in regions if region.slack_bytes(graph, saved) < 0]:
        candidates: list[tuple[float, int, set[int]]] = []
        for i in {i for region in over for i in region.tensors & saved if graph.tensor_bytes[i]}:
            nodes = recomputed_nodes(i) - computed
            if all(graph.nodes[k].recomputable for k in nodes):
                rate = sum(costs[k] for k in nodes) / graph.tensor_bytes[i]
                candidates.append((rate, i, nodes))
        if not candidates:
            return None
        _, cheapest, nodes = min(candidates, key=itemgetter(0, 1))
        saved.remove(cheapest)
        evicted.append(cheapest)
        computed |= nodes
    for i in reversed(evicted):  # the last tensor may be larger than the excess
        if all(region.slack_bytes(graph, saved | {i}) >= 0 for region in regions):
            saved.add(i)
    return recompute_once(graph, saved)


def _search_with_less_ram(
    problem: Problem, regions: tuple[Region, ...], first: Schedule, deadline_s: float
) -> Candidate | None:
    """Return a schedule that meets the budgets of regions; None if none is found in time.

    Each trial problem has less RAM at the first backward stage, by the excess of the last schedule.
    """
    graph, stage = problem.graph, regions[0].stage
    found: Schedule | None = first
    while found is not None:
        excess_bytes = sum(region.excess_bytes(graph, found) for region in regions)
        left_s = min(_TRIAL_S, deadline_s - monotonic())
        if not excess_bytes or left_s <= 0:
            return None if excess_bytes else verified_candidate(problem, found)
        held_bytes = sum(graph.tensor_bytes[i] for i in tensors_at(found, stage))
        reserved_bytes = problem.ram_budget_bytes - held_bytes + excess_bytes
        node = graph.nodes[stage]
        node = replace(node, workspace_bytes=max(node.workspace_bytes, reserved_bytes))
        nodes = (*graph.nodes[:stage], node, *graph.nodes[stage + 1 :])
        trial = replace(problem, graph=replace(graph, nodes=nodes), ram=problem.ram_budget_bytes)
        schedule = solve(trial, time_limit=left_s, gap=_TRIAL_GAP).schedule
        found = None if schedule is None else replace(schedule, identity=None)
    return None


def _build_model(problem: Problem, regions: tuple[Region, ...]) -> pyo.ConcreteModel:
    """Return a model of a problem with the rows of regions."""
    import pyomo.environ as pyo

    model = build(problem, memory_rows=False)
    model.regions = pyo.ConstraintList()
    for region in regions:
        sizes = problem.graph.tensor_bytes
        kept = [
            sizes[i] * model.S_RAM[region.stage, i]
            for i in sorted(region.tensors)
            if sizes[i] and (region.stage, i) in model.S_RAM
        ]
        if kept:
            model.regions.add(sum(kept) <= region.limit_bytes)
    return model
