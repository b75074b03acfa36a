"""The relations of the paper over their triangles: as users address them, and as variables."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyomo.core as pyo

from poetmodel.errors import ModelError
from poetmodel.model.formulation import Component
from poetmodel.model.homes import assigned_homes, declare_homes
from poetmodel.model.linear import entry
from poetmodel.model.memory import StepView, assign_memory
from poetmodel.model.objective import Decisions
from poetmodel.schedule import RELATIONS, Schedule

if TYPE_CHECKING:
    from poetmodel.graph import Graph


def first_stages(graph: Graph, name: str) -> Sequence[int]:
    """Return for each node, or tensor, the first stage in which a relation has an entry for it."""
    if name == "R":
        return range(len(graph.nodes))
    return graph.node_of if name == "M_out" else [k + 1 for k in graph.node_of]


def triangle(graph: Graph, name: str) -> Iterator[tuple[int, int]]:
    """Yield every (stage, node or tensor) of a relation, in order."""
    firsts = first_stages(graph, name)
    stages = range(len(graph.nodes))
    return ((t, k) for t in stages for k, first in enumerate(firsts) if first <= t)


class Relation(Mapping[tuple[int, int], Any]):
    """One relation over the triangle of stages and nodes or tensors.

    ``relation[t, k]`` is a Pyomo variable, or an expression (a constant one where the formulation
    has decided the entry); all can be used in constraints and objectives.
    """

    def __init__(self, name: str, graph: Graph, entry: Callable[[int, int], Any]) -> None:
        self._name = name
        self._graph = graph
        self._entry = entry
        self._firsts = first_stages(graph, name)

    def __getitem__(self, index: tuple[int, int]) -> Any:
        entry = self._indices(index)
        if entry is None:
            domain = {"R": "node k with 0 <= k <= t", "M_out": "tensor i with node(i) <= t"}
            raise ModelError(
                f"{self._name}[{index}]: no such entry; {self._name} is defined for stage t and "
                f"{domain.get(self._name, 'tensor i with node(i) < t')} < {len(self._graph.nodes)}"
            )
        return self._entry(*entry)

    def get(self, index: tuple[int, int], default: Any = None) -> Any:
        """Return an entry, or `default` outside the triangle."""
        return self[index] if index in self else default  # noqa: SIM401  # this is `get`

    def __contains__(self, index: object) -> bool:
        return self._indices(index) is not None

    def _indices(self, index: object) -> tuple[int, int] | None:
        """Return an index as plain integers, or None where it is not one of the triangle."""
        if not isinstance(index, tuple) or len(index) != 2:  # noqa: PLR2004
            return None
        try:
            t, k = map(operator.index, index)
        except TypeError:
            return None
        if 0 <= k < len(self._firsts) and self._firsts[k] <= t < len(self._graph.nodes):
            return t, k
        return None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return triangle(self._graph, self._name)

    def __len__(self) -> int:
        return sum(len(self._graph.nodes) - first for first in self._firsts)


def _variables(m: pyo.ConcreteModel) -> None:
    """Declare the paper's five binary relations over their triangles.

    ::

        R[t,k], k <= t         S_RAM[t,i], S_AUX[t,i], M_in[t,i], node(i) < t
        R[t,t] = 1             M_out[t,i], node(i) <= t

    Recomputations of nodes that must not be computed twice, and page-ins and page-outs where paging
    is not allowed, are fixed to 0. Tensors that lie on storage from the start have S_AUX = 1. State
    has its home in RAM (``resident[w]``) or on storage; nothing reads it once it is replaced, and
    what replaces it is in no relation but ``M_out``, where it is made.
    """
    problem = m.problem
    graph = problem.working_graph
    for name in RELATIONS:
        setattr(m, name, pyo.Var(list(triangle(graph, name)), domain=pyo.Binary))
    for t, k in m.R:
        if t == k:
            m.R[t, k].fix(1)
        elif not problem.may_recompute(k) or t > problem.graph.last_stages[k]:
            m.R[t, k].fix(0)
    for t, i in m.S_AUX:
        if i in problem.graph.on_aux:
            m.S_AUX[t, i].fix(1)
    declare_homes(m)
    _fix_state(m)
    if not problem.can_page:
        for relation in (m.M_in, m.M_out):
            for index in relation:
                relation[index].fix(0)
    m.decisions = Decisions(
        recomputations=[(k, var) for (t, k), var in m.R.items() if k < t and not var.fixed],
        page_ins=[(i, var) for (_, i), var in m.M_in.items() if not var.fixed],
        page_outs=[
            (i, var)
            for (_, i), var in m.M_out.items()
            if not var.fixed and i not in problem.graph.state_of
        ],
        storage_homes=list(m.storage_home.items()),
    )


def _fix_state(m: pyo.ConcreteModel) -> None:
    """Fix what state, and what replaces it, can never be to 0."""
    problem, node_of = m.problem, m.problem.graph.node_of
    state = frozenset(problem.graph.state_tensors)
    mapped = state if problem.reads_in_place else frozenset()
    for name in ("S_RAM", "S_AUX", "M_in", "M_out"):
        variables = getattr(m, name)
        for t, i in variables:
            if i in state:
                never = name == "M_out" or t > problem.graph.last_page_in(i)
                never = never or (i in mapped and name != "S_AUX")
            else:
                never = i in problem.graph.state_of and (name != "M_out" or t > node_of[i])
            if never:
                variables[t, i].fix(0)


TRIANGLE = Component("variables", _variables, source="POET (ICML 2022), section 5.2")


class TriangleRelations(StepView):
    """Entries of the relations as their own variables."""

    def in_ram(self, t: int, i: int) -> Any | None:
        """Return the variable of ``S_RAM[t,i]``, or None where it is zero."""
        var = entry(self.m.S_RAM, (t, i))
        return None if var is None or var.fixed else var

    def computed(self, t: int, k: int) -> Any | None:
        """Return the variable of ``R[t,k]``, ``k < t``, or None where it is fixed to zero."""
        var = self.m.R[t, k]
        return None if var.fixed else var

    def paged_in(self, t: int, i: int) -> Any | None:
        """Return the variable of ``M_in[t,i]``, or None where it is fixed to zero."""
        var = self.m.M_in[t, i]
        return None if var.fixed else var

    def chosen(self, value: Any) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that holds, given a variable's value."""
        for name in RELATIONS:
            for (t, k), var in getattr(self.m, name).items():
                if value(var):
                    yield name, t, k

    def assign(self, schedule: Schedule) -> Iterator[tuple[Any, float]]:
        """Yield (variable, value) of what a schedule says."""
        values: dict[int, float] = {}
        for name in RELATIONS:
            entries = set(getattr(schedule, name))
            for index, var in getattr(self.m, name).items():
                values[id(var)] = float(index in entries)
                yield var, values[id(var)]
        if hasattr(self.m, "stored"):
            out = {i for _, i in schedule.M_out}
            yield from ((var, float(i in out)) for i, var in self.m.stored.items())
        yield from assigned_homes(self.m, schedule, values)
        yield from assign_memory(self.m, schedule, values)
