"""Memory rows: the bytes that are live at every step that may execute, without a recurrence."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.graph import Graph, floor
from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import (
    RESOLVED,
    ExactLimit,
    Term,
    entry,
    keep_limit,
    linear,
    merged,
    never,
    stated_limit,
)
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from poetmodel.problem import Problem


class StepView:
    """Entries of the relations as memory rows need them, over the variables of ``compact``.

    Where stages are merged, at enforced rows only: there a group ends or is a single stage.
    """

    def __init__(self, m: pyo.ConcreteModel) -> None:
        self.m = m
        self.problem: Problem = m.problem
        self.graph: Graph = m.problem.graph

    def in_ram(self, t: int, i: int) -> Any | None:
        """Return the variable of ``S_RAM[t,i]``, or None where it is zero."""
        group_of = self.m.events.group_of
        if t >= len(group_of):
            return None
        segment = self.m.events.segment(i, group_of[self.graph.node_of[i]], group_of[t])
        return None if segment is None else self.m.kept[i, segment]

    def computed(self, t: int, k: int) -> Any | None:
        """Return the variable of ``R[t,k]``, ``k < t``, or None where it is zero."""
        return entry(self.m.recomputed, (self.m.events.group_of[t], k))

    def paged_in(self, t: int, i: int) -> Any | None:
        """Return the variable of ``M_in[t,i]``, or None where it is zero."""
        return entry(self.m.paged_in, (self.m.events.group_of[t], i))


class MemoryRows:
    """Generates memory rows of a model, and the liveness columns that they need."""

    def __init__(self, view: StepView) -> None:
        self.view = view
        self.graph = view.graph
        self.sizes = self.graph.tensor_bytes
        self.live: dict[tuple[int, ...], tuple[list[Any], int]] = {}
        """For each set of variables (by id) that make a tensor live: the set, and its number."""

    def rows(self, t: int, wanted: Iterable[int]) -> Iterator[tuple[int, list[Any], int]]:
        """Yield (step, terms, constant bytes) of those wanted steps of a stage that may execute.

        A term is on a variable or on the number of a live column.
        """
        view, sizes = self.view, self.sizes
        node_of = self.graph.node_of[: bisect_left(self.graph.node_of, t)]
        older = [(i, k) for i, k in enumerate(node_of) if sizes[i]]
        held = [(k, sizes[i], view.in_ram(t, i)) for i, k in older]
        before = [(k, size, var) for k, size, var in held if var is not None]
        for k in wanted:
            if k < t and not self._may_execute(t, k):
                continue
            terms: list[Any] = [(size, var) for j, size, var in before if j > k]
            constant = self._own_step(t, k, terms)
            for i, made in older:
                if made < k:
                    constant += self._live(t, i, k, terms)
            yield k, terms, constant

    def _may_execute(self, t: int, k: int) -> bool:
        view = self.view
        return view.computed(t, k) is not None or any(
            view.paged_in(t, i) is not None for i in self.graph.outputs_of[k]
        )

    def _own_step(self, t: int, k: int, terms: list[Any]) -> int:
        """Add outputs and workspace of step `k` itself; return their constant part [B]."""
        view, node = self.view, self.graph.nodes[k]
        made = node.output_bytes + node.workspace_bytes
        if k == t:
            return made
        computed = view.computed(t, k)
        if computed is not None:
            terms.append((made, computed))
        for i in self.graph.outputs_of[k]:
            for var in (view.in_ram(t, i), view.paged_in(t, i)):
                if var is not None:
                    terms.append((self.sizes[i], var))
        return 0

    def _live(self, t: int, i: int, k: int, terms: list[Any]) -> int:
        """Add tensor `i`, made before step `k`, if a later use in stage `t` or `t+1` needs it."""
        view = self.view
        needed = []
        for j in self.graph.users_of[i]:
            if j == t:
                return self.sizes[i]
            if k <= j < t:
                var = view.computed(t, j)
                if var is not None:
                    needed.append(var)
        var = view.in_ram(t + 1, i)
        if var is not None:
            needed.append(var)
        if len(needed) == 1:
            terms.append((self.sizes[i], needed[0]))
        elif needed:
            key = tuple(id(var) for var in needed)
            _, number = self.live.setdefault(key, (needed, len(self.live)))
            terms.append((self.sizes[i], number))
        return 0


def _memory(m: pyo.ConcreteModel) -> None:
    """Keep within RAM at every step that may execute.

    At step ``(t,k)``, tensors whose step is still to come count if they were in RAM at the
    beginning of the stage, the step's own outputs with every copy, and older ones while somebody
    needs them::

        sum(bytes[i] * S_RAM[t,i],  node(i) > k)
        + sum(bytes[i] * (S_RAM[t,i] + M_in[t,i] + R[t,k]),  i in out(k))
        + sum(bytes[i] * live[t,i,k],  node(i) < k) + workspace[k] * R[t,k]  <=  budget

        live[t,i,k] >= S_RAM[t+1,i],  live[t,i,k] >= R[t,j] for every reader j >= k of i
    """
    state_memory(m, StepView(m))


def state_memory(
    m: pyo.ConcreteModel, view: StepView, steps: Mapping[int, Collection[int]] | None = None
) -> None:
    """Add memory rows and liveness columns, with `steps` only for these steps of these stages."""
    problem = m.problem
    limit = problem.usable_ram_bytes
    least = floor(problem.graph).bytes
    if not problem.objective.is_sum:
        unit = problem.useful_ram_bytes
        m.peak = pyo.Var(bounds=(min(least / unit, 1), max(limit, 0) / unit * (1 + RESOLVED)))
    if least > limit:
        m.memory = never(m)
        return
    generator = MemoryRows(view)
    if steps is None:
        steps = {t: range(t + 1) for t in range(len(problem.graph.nodes))}
    rows = [(t, *row) for t in sorted(steps) for row in generator.rows(t, sorted(steps[t]))]
    m.live = pyo.Var(range(len(generator.live)), bounds=(0, 1))
    m.live_for = tuple(needed for needed, _ in generator.live.values())
    m.liveness = pyo.ConstraintList()
    for needed, number in generator.live.values():
        for var in needed:
            m.liveness.add((None, linear([(1, var), (-1, m.live[number])]), 0))
    stated = {}
    for t, k, terms, constant in rows:
        named = [(size, m.live[v] if isinstance(v, int) else v) for size, v in terms]
        row = _row(m, (t, k), named, constant)
        if row is not None:
            stated[t, k] = row
    m.memory = pyo.Constraint(list(stated), rule=lambda _, t, k: stated[t, k])


def assign_memory(
    m: pyo.ConcreteModel, schedule: Schedule, values: Mapping[int, float]
) -> Iterator[tuple[Any, float]]:
    """Yield (variable, value) of the liveness columns and of the peak, for a start.

    `values` are those of the other variables, by `id`.
    """
    for number, needed in enumerate(getattr(m, "live_for", ())):
        yield m.live[number], max(values[id(var)] for var in needed)
    if hasattr(m, "peak"):
        peak = simulate(m.problem.graph, None, schedule).peak_ram_bytes
        yield m.peak, peak / m.problem.useful_ram_bytes


def _row(
    m: pyo.ConcreteModel, step: tuple[int, int], terms: Iterable[Term], constant: int
) -> Any | None:
    limit = ExactLimit(merged(terms), m.problem.usable_ram_bytes - constant)
    if m.problem.objective.is_sum:
        return stated_limit(m, "memory", step, limit)
    keep_limit(m, "memory", step, limit)  # the peak may have to be lower than it can be now
    unit = m.problem.useful_ram_bytes
    scale = max([unit, *(size for size, _ in limit.terms)])
    return (
        None,
        linear([*((size / scale, var) for size, var in limit.terms), (-unit / scale, m.peak)]),
        -constant / scale,
    )


MEMORY = Component(
    "memory",
    _memory,
    "Checkmate (MLSys 2020), equations 2 and 3, stated per step without the recurrence",
    AFTER_VARIABLES,
)
