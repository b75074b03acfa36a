"""Budgets of parts of a model: what they made that is in RAM when the backward pass begins.

A budget is a row more of the problem, over what stays in RAM until that stage::

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
_SHOWN: Final = 8
"""Modules that a refusal names."""
_TRY_S: Final = 3.0
"""Time to solve each problem that is tried for a schedule that keeps regions [s]."""
_GAP: Final = 0.05
"""Its gap."""
_MOST_NODES: Final = 100
"""Graphs up to so many nodes have a model with the rows of regions."""
_POLICY: Final = "MUST_RECOMPUTE"
"""The region without room of what a policy of selective checkpointing forbids to save."""
_ROOT: Final = re.compile(r"^[LG]\['\w+'\]\.?")
"""What Dynamo calls the model itself."""


def region(*, ram: str | int, name: str = "region") -> AbstractContextManager[Any]:
    """Bound what the operations inside of a ``with`` block leave in RAM for the backward pass.

    Parameters
    ----------
    ram : str or int
        The most bytes made inside that are in RAM when the backward pass begins: bytes, ``2MiB``,
        or a percentage of the same bytes when everything is kept.
    name : str
        Blocks of one name and budget are one region. What a block inside makes counts in both.

    Returns
    -------
    context manager
        Use it in what `backend` compiles; elsewhere it does nothing.
    """
    block: AbstractContextManager[Any] = traceback.annotate({_KEY + name: (name, ram)})
    return block


def region_faults(regions: Any) -> Iterator[str]:
    """Yield what is wrong with budgets by names of modules."""
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
    """A part of a model, by what it makes."""

    name: str
    tensors: frozenset[int]
    limit_bytes: int
    stage: int
    """The first backward stage."""

    def room_bytes(self, graph: Graph, held: Collection[int]) -> int:
        """Return the room that is left where some tensors are in RAM; below 0: too much [B]."""
        used_bytes = sum(graph.tensor_bytes[i] for i in self.tensors.intersection(held))
        return self.limit_bytes - used_bytes

    def excess_bytes(self, graph: Graph, schedule: Schedule) -> int:
        """Return what of it is too much in RAM when the backward pass begins [B]."""
        return max(0, -self.room_bytes(graph, held_at(schedule, self.stage)))

    def check(self, graph: Graph, schedule: Schedule) -> str:
        """Return how a schedule keeps its budget, as a phrase; raise if it does not."""
        used_bytes = self.limit_bytes - self.room_bytes(graph, held_at(schedule, self.stage))
        told = f"{self.name} {format_bytes(used_bytes)} of {format_bytes(self.limit_bytes)}"
        if used_bytes > self.limit_bytes:
            raise VerificationError(f"region {told}")
        return told


def regions_of(
    joint: JointGraph, graph: Graph, wanted: Mapping[str, str | int] | None
) -> tuple[Region, ...]:
    """Return the regions of a graph: of modules, of ``with`` blocks, and of `_POLICY`."""
    phases = [operation.phase for operation in joint.operations]
    if joint.is_inference or Phase.BACKWARD not in phases:
        return ()
    stage = phases.index(Phase.BACKWARD)
    budgets: dict[tuple[str, str | int], set[int]] = {
        (name, ram): set() for name, ram in (wanted or {}).items()
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
    missed = [name for (name, _), made in budgets.items() if not made]
    if missed:
        raise InputError(
            f"regions: {shown(name)} is no module that makes something; there are "
            f"{', '.join(sorted(filter(None, modules))[:_SHOWN])}"
            for name in missed
        )
    found = [
        _region(graph, stage, name, ram, frozenset(made)) for (name, ram), made in budgets.items()
    ]
    if joint.must_recompute:
        part = Region(name=_POLICY, tensors=joint.must_recompute, limit_bytes=0, stage=stage)
        found.append(part)
    return tuple(found)


def _region(graph: Graph, stage: int, name: str, ram: str | int, tensors: frozenset[int]) -> Region:
    kept = (i for i in tensors if max(graph.users_of[i], default=0) >= stage)
    whole_bytes = sum(graph.tensor_bytes[i] for i in kept)
    limit_bytes = Budget.parse(ram, field=f"region {name}").resolve(whole_bytes)
    return Region(name=name, tensors=tensors, limit_bytes=limit_bytes, stage=stage)


def held_at(schedule: Schedule, stage: int) -> set[int]:
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
    """Solve a problem with the rows of regions; without a schedule where none was found.

    The bound without these rows holds with them, too. A small graph has a model with them.
    """
    end_s = monotonic() + time_limit
    result = solve(problem, time_limit=time_limit / 3, gap=gap, on_progress=on_progress)
    first = result.schedule
    if first is None or not any(part.excess_bytes(problem.graph, first) for part in regions):
        return result
    baseline = problem.objective.baseline
    bound = max(result.proven_bound - baseline, _least(problem, regions))
    found = verified_candidate(problem, _recomputing(problem, regions, first))
    if found is None or not is_closed(problem, found.value, bound, gap):
        found = better_candidate(found, _searched(problem, regions, first, end_s))
    schedule = None if found is None else found.schedule
    is_open = found is None or not is_closed(problem, found.value, bound, gap)
    if is_open and len(problem.graph.nodes) <= _MOST_NODES:
        left_s = max(_TRY_S, end_s - monotonic())
        proved = solve(_stated(problem, regions), time_limit=left_s, gap=gap, start=schedule)
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


def _least(problem: Problem, regions: Iterable[Region]) -> float:
    """Return the least cost of what cannot all be in RAM when the backward pass begins.

    What it reads of a region must be there, or be computed again or paged in: a fractional knapsack
    of the bytes that are too many, for the region where that costs most.
    """
    return max(_least_of(problem, part) for part in regions)


def _least_of(problem: Problem, part: Region) -> float:
    graph, costs = problem.graph, problem.objective.coefficients
    ways: list[tuple[float, int]] = []
    read = {i for i in part.tensors if max(graph.users_of[i], default=0) >= part.stage}
    for k in {graph.node_of[i] for i in read}:
        size = sum(graph.tensor_bytes[i] for i in read.intersection(graph.outputs_of[k]))
        cost = costs.compute[k] if graph.nodes[k].recomputable else inf
        if problem.paging:
            cost = min(cost, *(costs.page_in[i] for i in read.intersection(graph.outputs_of[k])))
        if size:
            ways.append((cost / size, size))
    left_bytes, total = sum(size for _, size in ways) - part.limit_bytes, 0.0
    for rate, size in sorted(ways):
        if left_bytes <= 0 or rate == inf:
            break
        total += rate * min(size, left_bytes)
        left_bytes -= size
    return total


def _recomputing(problem: Problem, regions: tuple[Region, ...], first: Schedule) -> Schedule | None:
    """Return a schedule that keeps less for the backward pass, and computes the rest once again.

    Of what regions have too much goes, one after the other, what costs least for its bytes,
    together with all that it is computed from and that is not there.
    """
    graph, costs = problem.graph, problem.objective.coefficients.compute
    saved = held_at(first, regions[0].stage)

    def again(i: int) -> set[int]:
        """Return the nodes that are computed again for a tensor that is not saved."""
        nodes, pending = set[int](), [i]
        while pending:
            k = graph.node_of[pending.pop()]
            if k not in nodes:
                nodes.add(k)
                pending += (j for j in graph.inputs_of[k] if j not in saved)
        return nodes

    computed, gone = set[int](), list[int]()
    while over := [part for part in regions if part.room_bytes(graph, saved) < 0]:
        ways: list[tuple[float, int, set[int]]] = []
        for i in {i for part in over for i in part.tensors & saved if graph.tensor_bytes[i]}:
            nodes = again(i) - computed
            if all(graph.nodes[k].recomputable for k in nodes):
                rate = sum(costs[k] for k in nodes) / graph.tensor_bytes[i]
                ways.append((rate, i, nodes))
        if not ways:
            return None
        _, cheapest, nodes = min(ways, key=itemgetter(0, 1))
        saved.remove(cheapest)
        gone.append(cheapest)
        computed |= nodes
    for i in reversed(gone):  # the last one was larger, maybe, than what was too much
        if all(part.room_bytes(graph, saved | {i}) >= 0 for part in regions):
            saved.add(i)
    return recompute_once(graph, saved)


def _searched(
    problem: Problem, regions: tuple[Region, ...], first: Schedule, end_s: float
) -> Candidate | None:
    """Return a schedule that keeps regions, if one is found in time.

    Each problem that is tried has less RAM where they count, by what they had too much before.
    """
    graph, stage = problem.graph, regions[0].stage
    found: Schedule | None = first
    while found is not None:
        excess_bytes = sum(part.excess_bytes(graph, found) for part in regions)
        left_s = min(_TRY_S, end_s - monotonic())
        if not excess_bytes or left_s <= 0:
            return None if excess_bytes else verified_candidate(problem, found)
        held_bytes = sum(graph.tensor_bytes[i] for i in held_at(found, stage))
        taken_bytes = problem.ram_budget_bytes - held_bytes + excess_bytes
        node = graph.nodes[stage]
        node = replace(node, workspace_bytes=max(node.workspace_bytes, taken_bytes))
        nodes = (*graph.nodes[:stage], node, *graph.nodes[stage + 1 :])
        tried = replace(problem, graph=replace(graph, nodes=nodes), ram=problem.ram_budget_bytes)
        schedule = solve(tried, time_limit=left_s, gap=_GAP).schedule
        found = None if schedule is None else replace(schedule, identity=None)
    return None


def _stated(problem: Problem, regions: tuple[Region, ...]) -> pyo.ConcreteModel:
    """Return a model of a problem with the rows of regions."""
    import pyomo.environ as pyo

    model = build(problem, memory_rows=False)
    model.regions = pyo.ConstraintList()
    for part in regions:
        sizes = problem.graph.tensor_bytes
        kept = [
            sizes[i] * model.S_RAM[part.stage, i]
            for i in sorted(part.tensors)
            if sizes[i] and (part.stage, i) in model.S_RAM
        ]
        if kept:
            model.regions.add(sum(kept) <= part.limit_bytes)
    return model
