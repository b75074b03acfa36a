"""The relations of the paper over their triangles: as mappings for users, and as columns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import ModelError
from poetmodel.model.compact import declare_homes
from poetmodel.model.decisions import Decisions
from poetmodel.model.formulation import Component
from poetmodel.model.memory import StepView, memory_values
from poetmodel.schedule import RELATIONS, Schedule

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.model.arrays import Model

ZERO: Final = -1
"""Placeholder for the column of an entry that is always 0."""
ONE: Final = -2
"""Placeholder for the column of an entry that is always 1."""


def first_stages(graph: Graph, name: str) -> Sequence[int]:
    """Return the first stage with an entry of relation `name`, for each node or tensor.

    ``R``: `k`. ``M_out``: ``node(i)``. Others: ``node(i) + 1``, maybe the number of stages.
    """
    if name == "R":
        return range(len(graph.nodes))
    return graph.node_of if name == "M_out" else [k + 1 for k in graph.node_of]


def triangle_indices(graph: Graph, name: str) -> Iterator[tuple[int, int]]:
    """Yield each index (stage, node or tensor) of relation `name`, in ascending order."""
    first_stage_of = first_stages(graph, name)
    stages = range(len(graph.nodes))
    return ((t, k) for t in stages for k, first in enumerate(first_stage_of) if first <= t)


class Relation(Mapping[tuple[int, int], Any]):
    """One relation over the triangle of stages and nodes or tensors.

    ``relation[t, k]`` is a Pyomo variable, or a constant expression if the formulation has no
    variable for the entry. All entries can be used in constraints and objectives.
    """

    def __init__(self, name: str, graph: Graph, entry: Callable[[int, int], Any]) -> None:
        self._name = name
        self._graph = graph
        self._entry = entry
        self._first_stage_of = first_stages(graph, name)

    def __getitem__(self, index: tuple[int, int]) -> Any:
        """Return the variable or constant of an entry; raise `ModelError` outside the triangle."""
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
        """Return an index (stage, node or tensor) as integers; None if not in the triangle."""
        if not isinstance(index, tuple) or len(index) != 2:  # noqa: PLR2004
            return None
        try:
            t, k = map(operator.index, index)
        except TypeError:
            return None
        if 0 <= k < len(self._first_stage_of) and self._first_stage_of[k] <= t < len(
            self._graph.nodes
        ):
            return t, k
        return None

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return triangle_indices(self._graph, self._name)

    def __len__(self) -> int:
        return sum(len(self._graph.nodes) - first for first in self._first_stage_of)


def _declare_relations(m: Model) -> None:
    """Add the variables of the paper's five relations over their triangles, and homes, all binary.

    ::

        R[t,k], k <= t         S_RAM[t,i], S_AUX[t,i], M_in[t,i], node(i) < t
        R[t,t] = 1             M_out[t,i], node(i) <= t

    Recomputations that the problem forbids or that are after a node's last stage
    (`Graph.last_stages`), and page-ins and page-outs without paging, are fixed to 0. Samples on
    storage have S_AUX = 1. The home of state tensor `w` is RAM (``resident[w]``) or storage:
    `declare_homes` adds these variables and their rows. Of state, all entries of ``M_out`` and all
    entries after the stage of its replacement are fixed to 0; on memory-mapped storage, also all
    other entries but those of ``S_AUX``. Of a replacement, all entries are fixed to 0 but that of
    ``M_out`` in the stage that makes it. Sets `Model.decisions` to the columns of recomputations,
    page-ins, page-outs and storage homes that are not fixed, without page-outs of replacements,
    which the homes count.
    """
    problem = m.problem
    graph = problem.working_graph
    for name in RELATIONS:
        m.add_variables(name, triangle_indices(graph, name))
    for (t, k), column in m.R.items():
        if t == k:
            m.fixed[column] = 1.0
        elif not problem.may_recompute(k) or t > problem.graph.last_stages[k]:
            m.fixed[column] = 0.0
    for (_, i), column in m.S_AUX.items():
        if i in problem.graph.on_aux:
            m.fixed[column] = 1.0
    declare_homes(m)
    _fix_impossible_state_entries(m)
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


def _fix_impossible_state_entries(m: Model) -> None:
    """Fix to 0, in `Model.fixed`, the entries that state and its replacements cannot have."""
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


def home_values(m: Model, schedule: Schedule) -> Iterator[tuple[int, float]]:
    """Yield (column, value) of the columns of state's homes, for a schedule."""
    resident_tensors = set(schedule.resident)
    yield from ((column, float(i in resident_tensors)) for i, column in m.resident.items())
    yield from ((column, float(i not in resident_tensors)) for i, column in m.storage_home.items())


class TriangleRelations(StepView):
    """Map from entries of the relations to columns, for models with a column for each entry."""

    def in_ram_column(self, t: int, i: int) -> int | None:
        """Return the column of ``S_RAM[t,i]``; None without an entry, or if it is fixed to 0."""
        return self._unfixed_column(self.m.S_RAM.get((t, i)))

    def recompute_column(self, t: int, k: int) -> int | None:
        """Return the column of ``R[t,k]``, ``k < t``; None if it is fixed to 0."""
        return self._unfixed_column(self.m.R[t, k])

    def page_in_column(self, t: int, i: int) -> int | None:
        """Return the column of ``M_in[t,i]``; None if it is fixed to 0."""
        return self._unfixed_column(self.m.M_in[t, i])

    def _unfixed_column(self, column: int | None) -> int | None:
        return None if column in self.m.fixed else column

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of entry ``name[t,k]``."""
        return self.m.families[name][t, k]

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, index) of every entry that is 1, in the order of `RELATIONS`."""
        for name in RELATIONS:
            for (t, k), column in self.m.families[name].items():
                if is_one(column):
                    yield name, t, k

    def column_values(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) of the columns of ``compact-unreduced``, for a schedule."""
        values: dict[int, float] = {}
        for name in RELATIONS:
            ones, columns = set(getattr(schedule, name)), self.m.families[name]
            values |= {column: float(index in ones) for index, column in columns.items()}
        if "stored" in self.m.families:
            paged_out = {i for _, i in schedule.M_out}
            values |= {column: float(i in paged_out) for i, column in self.m.stored.items()}
        values |= home_values(self.m, schedule)
        yield from values.items()
        yield from memory_values(self.m, schedule, values)


class CompactRelations(StepView):
    """Map from entries of the relations to the columns of ``compact`` that have their values."""

    def entry(self, name: str, t: int, k: int) -> int:
        """Return the column of entry ``name[t,k]``, or `ZERO` or `ONE`."""
        column: int = getattr(self, name)(t, k)
        return column

    def R(self, t: int, k: int) -> int:
        """Return the column of ``R[t,k]``, or `ZERO` or `ONE`."""
        return ONE if t == k else self._column_or_zero(self.recompute_column(t, k))

    def S_RAM(self, t: int, i: int) -> int:
        """Return the column of ``S_RAM[t,i]``, or `ZERO`."""
        return self._column_or_zero(self.in_ram_column(t, i))

    def S_AUX(self, t: int, i: int) -> int:
        """Return the column of ``S_AUX[t,i]``, or `ZERO` or `ONE`; for state, of `storage_home`."""
        if i in self.m.resident:
            home = self.m.storage_home.get(i, ZERO)
            return home if t <= self.problem.graph.last_page_in_stage(i) else ZERO
        if i in self.graph.on_aux:
            return ONE
        return self.m.paged_out.get(i, ZERO)

    def M_in(self, t: int, i: int) -> int:
        """Return the column of ``M_in[t,i]``, or `ZERO`."""
        return self._column_or_zero(self.page_in_column(t, i))

    def M_out(self, t: int, i: int) -> int:
        """Return the column of ``M_out[t,i]``; `ZERO` except in the stage that first makes `i`.

        For a replacement of state, the column of the state's home on storage.
        """
        if t != self.graph.node_of[i]:
            return ZERO
        old = self.problem.graph.state_of.get(i)
        if old is not None:
            return self.m.storage_home.get(old, ZERO)
        return self.m.paged_out.get(i, ZERO)

    def _column_or_zero(self, column: int | None) -> int:
        return ZERO if column is None else column

    def nonzero_entries(self, is_one: Callable[[int], bool]) -> Iterator[tuple[str, int, int]]:
        """Yield (relation, stage, node or tensor) of every entry that is 1, in no order."""
        m, graph = self.m, self.graph
        yield from (("R", t, t) for t in range(len(graph.nodes)))
        yield from (("R", t, k) for (t, k), column in m.recomputed.items() if is_one(column))
        yield from (("M_in", t, i) for (t, i), column in m.paged_in.items() if is_one(column))
        for (i, a), column in m.kept.items():
            if is_one(column):
                yield from (("S_RAM", t, i) for t in self.keep_stages(i, a))
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

    def column_values(self, schedule: Schedule) -> Iterator[tuple[int, float]]:
        """Yield (column, value) of the columns of ``compact``, for a schedule.

        A keep is 1 if the tensor is in RAM when each of its `keep_stages` begins. Entries of the
        schedule without a column are ignored.
        """
        m = self.m
        in_ram_entries = set(schedule.S_RAM)
        values: dict[int, float] = {}
        for columns, ones in (
            (m.recomputed, set(schedule.R)),
            (m.paged_in, set(schedule.M_in)),
            (m.paged_out, {i for _, i in schedule.M_out}),
        ):
            values |= {column: float(index in ones) for index, column in columns.items()}
        for (i, a), column in m.kept.items():
            values[column] = float(all((t, i) in in_ram_entries for t in self.keep_stages(i, a)))
        values |= home_values(m, schedule)
        yield from values.items()
        yield from memory_values(m, schedule, values)

    def keep_stages(self, i: int, a: int) -> range:
        """Return the stages at whose beginning tensor `i` is in RAM if ``kept[i,a]`` is 1."""
        event_stages = self.m.events.event_groups[i]
        first = self.graph.node_of[i] if a == 0 else event_stages[a - 1]
        return range(first + 1, event_stages[a] + 1)
