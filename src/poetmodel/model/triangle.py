"""Variables over the whole triangle of stages, for formulations that leave every choice open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.model.component import Component
from poetmodel.model.linear import entry
from poetmodel.model.memory import StepView, assign_memory
from poetmodel.model.objective import Decisions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.schedule import Schedule


def triangle_nodes(m: pyo.ConcreteModel) -> list[tuple[int, int]]:
    """Return all (stage, node), node <= stage."""
    n = len(m.problem.graph.nodes)
    return [(t, k) for t in range(n) for k in range(t + 1)]


def triangle_tensors(m: pyo.ConcreteModel, *, own_stage: bool = False) -> list[tuple[int, int]]:
    """Return all (stage, tensor) after the tensor's first stage, or from it on."""
    graph = m.problem.graph
    shift = 0 if own_stage else 1
    return [
        (t, i)
        for t in range(len(graph.nodes))
        for i, k in enumerate(graph.node_of)
        if k + shift <= t
    ]


def _variables(m: pyo.ConcreteModel) -> None:
    """Declare the paper's five binary relations over their triangles.

    ::

        R[t,k], k <= t         S_RAM[t,i], S_AUX[t,i], M_in[t,i], node(i) < t
        R[t,t] = 1             M_out[t,i], node(i) <= t

    Recomputations of nodes that must not be computed twice, and page-ins and page-outs where paging
    is not allowed, are fixed to 0. Tensors that lie on storage from the start have S_AUX = 1.
    """
    problem = m.problem
    graph = problem.graph
    m.R = pyo.Var(triangle_nodes(m), domain=pyo.Binary)
    m.S_RAM = pyo.Var(triangle_tensors(m), domain=pyo.Binary)
    m.S_AUX = pyo.Var(triangle_tensors(m), domain=pyo.Binary)
    m.M_in = pyo.Var(triangle_tensors(m), domain=pyo.Binary)
    m.M_out = pyo.Var(triangle_tensors(m, own_stage=True), domain=pyo.Binary)
    for t, k in m.R:
        if t == k:
            m.R[t, k].fix(1)
        elif not problem.may_recompute(k):
            m.R[t, k].fix(0)
    for t, i in m.S_AUX:
        if graph.nodes[graph.node_of[i]].on_aux:
            m.S_AUX[t, i].fix(1)
    if not problem.can_page:
        for relation in (m.M_in, m.M_out):
            for index in relation:
                relation[index].fix(0)
    m.decisions = Decisions(
        recomputations=[(k, var) for (t, k), var in m.R.items() if k < t and not var.fixed],
        page_ins=[(i, var) for (_, i), var in m.M_in.items() if not var.fixed],
        page_outs=[(i, var) for (_, i), var in m.M_out.items() if not var.fixed],
    )


TRIANGLE = Component("variables", _variables, source="POET (ICML 2022), section 5.2")


class TriangleView(StepView):
    """Entries of the relations for memory rows."""

    def in_ram(self, t: int, i: int) -> Any | None:
        """Return the variable of ``S_RAM[t,i]``, or None where it is zero."""
        return entry(self.m.S_RAM, (t, i))

    def computed(self, t: int, k: int) -> Any | None:
        """Return the variable of ``R[t,k]``, ``k < t``, or None where it is fixed to zero."""
        var = self.m.R[t, k]
        return None if var.fixed else var

    def paged_in(self, t: int, i: int) -> Any | None:
        """Return the variable of ``M_in[t,i]``, or None where it is fixed to zero."""
        var = self.m.M_in[t, i]
        return None if var.fixed else var


class TriangleRelations:
    """Reads the chosen entries of a solved model."""

    def __init__(self, m: pyo.ConcreteModel) -> None:
        self._m = m

    def chosen(self, value: Any) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that holds, given a variable's value."""
        for name in ("R", "S_RAM", "S_AUX", "M_in", "M_out"):
            for (t, k), var in getattr(self._m, name).items():
                if value(var):
                    yield name, t, k

    def assign(self, schedule: Schedule) -> Iterator[tuple[Any, float]]:
        """Yield (variable, value) of what a schedule says."""
        values: dict[int, float] = {}
        for name in ("R", "S_RAM", "S_AUX", "M_in", "M_out"):
            entries = set(getattr(schedule, name))
            for index, var in getattr(self._m, name).items():
                values[id(var)] = float(index in entries)
                yield var, values[id(var)]
        if hasattr(self._m, "stored"):
            out = {i for _, i in schedule.M_out}
            yield from ((var, float(i in out)) for i, var in self._m.stored.items())
        yield from assign_memory(self._m, schedule, values)
