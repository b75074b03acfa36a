"""The relations of the paper over their triangles, for users and as columns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import ModelError
from poetmodel.model.compact import declare_homes
from poetmodel.model.decisions import Decisions
from poetmodel.model.formulation import Component
from poetmodel.model.memory import StepView, assign_memory
from poetmodel.schedule import RELATIONS, Schedule

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.model.arrays import Model

ZERO: Final = -1
"""Stands for the column of an entry that is always 0."""
ONE: Final = -2
"""Stands for the column of an entry that is always 1."""


def first_stages(graph: Graph, name: str) -> Sequence[int]:
    """Return the first stage with an entry of a relation, for each node or tensor."""
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

    ``relation[t, k]`` is a Pyomo variable, or an expression (constant if the formulation fixes the
    entry). All entries can be used in constraints and objectives.
    """

    def __init__(self, name: str, graph: Graph, entry: Callable[[int, int], Any]) -> None:
        self._name = name
        self._graph = graph
        self._entry = entry
        self._firsts = first_stages(graph, name)

    def __getitem__(self, index: tuple[int, int]) -> Any:
        """Return an entry; raise `ModelError` outside the triangle."""
        entry = self._parse_index(index)
        if entry is None:
            domain = {"R": "node k with 0 <= k <= t", "M_out": "tensor i with node(i) <= t"}
            raise ModelError(
                f"{self._name}[{index}]: no such entry; {self._name} is defined for stage t and "
                f"{domain.get(self._name, 'tensor i with node(i) < t')} < {len(self._graph.nodes)}"
            )
        return self._entry(*entry)

    def get(self, index: tuple[int, int], default: Any = None) -> Any:
        """Return an entry; `default` outside the triangle."""
        return self[index] if index in self else default  # noqa: SIM401  # this is `get`

    def __contains__(self, index: object) -> bool:
        return self._parse_index(index) is not None

    def _parse_index(self, index: object) -> tuple[int, int] | None:
        """Return an index as plain integers; None if it is not in the triangle."""
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


def _declare_relations(m: Model) -> None:
    """Declare the paper's five binary relations over their triangles.

    ::

        R[t,k], k <= t         S_RAM[t,i], S_AUX[t,i], M_in[t,i], node(i) < t
        R[t,t] = 1             M_out[t,i], node(i) <= t

    Recomputations of nodes that are not recomputable, and page-ins and page-outs without paging,
    are fixed to 0. Tensors on storage from the start have S_AUX = 1. The home of state is RAM
    (``resident[w]``) or storage. No node reads state after its replacement, and a replacement is
    only in ``M_out``, in the stage that makes it.
    """
    problem = m.problem
    graph = problem.working_graph
    for name in RELATIONS:
        m.add_variables(name, triangle(graph, name))
    for (t, k), column in m.R.items():
        if t == k:
            m.fixed[column] = 1.0
        elif not problem.may_recompute(k) or t > problem.graph.last_stages[k]:
            m.fixed[column] = 0.0
    for (_, i), column in m.S_AUX.items():
        if i in problem.graph.on_aux:
            m.fixed[column] = 1.0
    declare_homes(m)
    _fix_state(m)
    if not problem.can_page:
        m.fixed |= dict.fromkeys((*m.M_in.values(), *m.M_out.values()), 0.0)
    state_of = problem.graph.state_of
    m.decisions = Decisions(
        recomputations=[
            (k, column) for (t, k), column in m.R.items() if k < t and column not in m.fixed
        ],
        page_ins=[(i, column) for (_, i), column in m.M_in.items() if column not in m.fixed],
        page_outs=[
            (i, column)
            for (_, i), column in m.M_out.items()
            if column not in m.fixed and i not in state_of
        ],
        storage_homes=list(m.storage_home.items()),
    )


def _fix_state(m: Model) -> None:
    """Fix impossible entries of state and replacements to 0."""
    problem, node_of = m.problem, m.problem.graph.node_of
    state = frozenset(problem.graph.state_tensors)
    mapped_state = state if problem.reads_in_place else frozenset()
    for name in ("S_RAM", "S_AUX", "M_in", "M_out"):
        for (t, i), column in m.families[name].items():
            if i in state:
                is_impossible = name == "M_out" or t > problem.graph.last_page_in_stage(i)
                is_impossible = is_impossible or (i in mapped_state and name != "S_AUX")
            else:
                is_impossible = i in problem.graph.state_of and (name != "M_out" or t > node_of[i])
            if is_impossible:
                m.fixed[column] = 0.0


TRIANGLE = Component("variables", _declare_relations, source="POET (ICML 2022), section 5.2")


def assign_homes(m: Model, schedule: Schedule) -> Iterator[tuple[int, float]]:
    """Yield (column, value) of the homes of state in a schedule."""
    homes = set(schedule.resident)
    yield from ((column, float(i in homes)) for i, column in m.resident.items())
    yield from ((column, float(i not in homes)) for i, column in m.storage_home.items())


class TriangleRelations(StepView):
    """Entries of the relations as separate columns."""

    def in_ram(self, t: int, i: int) -> int | None:
        """Return the column of ``S_RAM[t,i]``; None if it is zero."""
        return self._unless_fixed(self.m.S_RAM.get((t, i)))

    def computed(self, t: int, k: int) -> int | None:
        """Return the column of ``R[t,k]``, ``k < t``; None if it is fixed to zero."""
        return self._unless_fixed(self.m.R[t, k])

    def paged_in(self, t: int, i: int) -> int | None:
        """Return the column of ``M_in[t,i]``; None if it is fixed to zero."""
        return self._unless_fixed(self.m.M_in[t, i])

    def _unless_fixed(self, column: int | None) -> int | None:
        return None if column in self.m.fixed else column

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of an entry of a relation."""
        return self.m.families[name][t, k]

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that is 1.

        `is_one` gives a column's value.
        """
        for name in RELATIONS:
            for (t, k), column in self.m.families[name].items():
                if is_one(column):
                    yield name, t, k

    def assign(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) of the decisions of a schedule."""
        values: dict[int, float] = {}
        for name in RELATIONS:
            entries, columns = set(getattr(schedule, name)), self.m.families[name]
            values |= {column: float(index in entries) for index, column in columns.items()}
        if "stored" in self.m.families:
            paged_out = {i for _, i in schedule.M_out}
            values |= {column: float(i in paged_out) for i, column in self.m.stored.items()}
        values |= assign_homes(self.m, schedule)
        yield from values.items()
        yield from assign_memory(self.m, schedule, values)


class CompactRelations(StepView):
    """Values of the paper's relations in terms of the columns of ``compact``."""

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of an entry of a relation, or `ZERO` or `ONE`."""
        column: int = getattr(self, name)(t, k)
        return column

    def R(self, t: int, k: int) -> int:
        """``R[t,k]``."""
        return ONE if t == k else self._or_zero(self.computed(t, k))

    def S_RAM(self, t: int, i: int) -> int:
        """``S_RAM[t,i]``."""
        return self._or_zero(self.in_ram(t, i))

    def S_AUX(self, t: int, i: int) -> int:
        """``S_AUX[t,i]``."""
        if i in self.m.resident:
            home = self.m.storage_home.get(i, ZERO)
            return home if t <= self.problem.graph.last_page_in_stage(i) else ZERO
        if i in self.graph.on_aux:
            return ONE
        return self.m.paged_out.get(i, ZERO)

    def M_in(self, t: int, i: int) -> int:
        """``M_in[t,i]``."""
        return self._or_zero(self.paged_in(t, i))

    def M_out(self, t: int, i: int) -> int:
        """``M_out[t,i]``."""
        if t != self.graph.node_of[i]:
            return ZERO
        old = self.problem.graph.state_of.get(i)
        if old is not None:
            return self.m.storage_home.get(old, ZERO)
        return self.m.paged_out.get(i, ZERO)

    def _or_zero(self, column: int | None) -> int:
        return ZERO if column is None else column

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that is 1.

        `is_one` gives a column's value.
        """
        m, graph = self.m, self.graph
        yield from (("R", t, t) for t in range(len(graph.nodes)))
        yield from (("R", t, k) for (t, k), column in m.recomputed.items() if is_one(column))
        yield from (("M_in", t, i) for (t, i), column in m.paged_in.items() if is_one(column))
        for (i, a), column in m.kept.items():
            if is_one(column):
                yield from (("S_RAM", t, i) for t in self.segment_stages(i, a))
        for i, k in enumerate(graph.node_of):
            is_paged_out = i in m.paged_out and is_one(m.paged_out[i])
            if is_paged_out:
                yield "M_out", k, i
            if is_paged_out or (i in graph.on_aux and i not in m.resident):
                yield from (("S_AUX", t, i) for t in range(k + 1, len(graph.nodes)))
        for i, column in m.storage_home.items():
            if is_one(column):
                k = graph.node_of[i]
                last_stage = self.problem.graph.last_page_in_stage(i)
                yield from (("S_AUX", t, i) for t in range(k + 1, last_stage + 1))
                replacement = self.problem.graph.replacement_of.get(i)
                if replacement is not None:
                    yield "M_out", last_stage, replacement

    def assign(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) of the decisions of a schedule.

        Decisions without a column are omitted.
        """
        m = self.m
        in_ram = set(schedule.S_RAM)
        values: dict[int, float] = {}
        for columns, entries in (
            (m.recomputed, set(schedule.R)),
            (m.paged_in, set(schedule.M_in)),
            (m.paged_out, {i for _, i in schedule.M_out}),
        ):
            values |= {column: float(index in entries) for index, column in columns.items()}
        for (i, a), column in m.kept.items():
            values[column] = float(all((t, i) in in_ram for t in self.segment_stages(i, a)))
        values |= assign_homes(m, schedule)
        yield from values.items()
        yield from assign_memory(m, schedule, values)

    def segment_stages(self, i: int, a: int) -> range:
        """Return the stages that begin with tensor `i` in RAM because of segment `a`."""
        stages = self.m.events.events[i]
        begin = self.graph.node_of[i] if a == 0 else stages[a - 1]
        return range(begin + 1, stages[a] + 1)
