"""Memory rows: the bytes that are live at every step that may execute, without a recurrence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyomo.core as pyo

from poetmodel.clock import check_time_limit
from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import RESOLVED, entry, keep_limit, limit_row, never
from poetmodel.model.rows import RowConstraint
from poetmodel.problem import LinearRow
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem


class StepView:
    """Entries of the relations as memory rows need them, over the variables of ``compact``.

    Where stages are merged, at enforced rows only: there a group ends or is a single stage.
    """

    def __init__(self, m: pyo.ConcreteModel) -> None:
        self.m = m
        self.problem: Problem = m.problem
        self.graph: Graph = m.problem.working_graph

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

    def resident(self, i: int) -> Any | None:
        """Return the variable that says whether state `i` has its home in RAM, None for others."""
        return entry(self.m.resident, i)


_BELOW_FLOOR: Final = 0.999
"""Share of the minimum RAM that bounds the peak of a model from below. Rows of the largest steps
are a few bytes from the minimum itself, and presolve takes a bound that a row implies to within a
tolerance for one that it implies (`poetmodel.backends.highs`)."""
_NOT: Final = -(2**62)
"""In place of a column: nobody needs the tensor any more."""
_CONSTANT: Final = _NOT + 1
"""The stage's own step needs it."""
_SEVERAL: Final = _NOT + 2
"""Several variables need it, whose liveness column is yet to be found."""


class _Column(NamedTuple):
    """A column from 0 to 1, as large as rows over other variables, by place, need it to be."""

    needs: tuple[int, ...]
    """Variables of which each needs it to be 1 ..."""
    unless: int = _NOT
    """... unless this one is 1, ..."""
    provided: int = _NOT
    """... provided that this one is 1."""

    def value(self, values: Sequence[float]) -> float:
        """Return the least value, given those of the variables in the order of their places."""
        most = max(values[place] for place in self.needs)
        most -= values[self.unless] if self.unless >= 0 else 0.0
        return max(0.0, most - (1 - values[self.provided] if self.provided >= 0 else 0.0))


class MemoryRows:
    """Generates memory rows of a model, and the liveness columns that they need."""

    def __init__(self, view: StepView) -> None:
        self.view = view
        self.graph = view.graph
        self.limit = view.problem.usable_ram_bytes
        self.sizes = self.graph.tensor_bytes
        self.variables: list[Any] = []
        """Variables of the rows; a term has the place of one."""
        self._places: dict[int, int] = {}
        self.live: dict[_Column, int] = {}
        """For each liveness column its number."""
        state = rows_of_state(view)
        self.home_nodes = np.array([self.graph.node_of[i] for i, *_ in state], dtype=np.int64)
        """For each state tensor that may be resident, the node that holds it."""
        self.home_bytes = np.array([size for _, size, _ in state], dtype=np.int64)
        """What it takes of RAM where it is resident [B]."""
        self.home_places = np.array([self.place(var) for *_, var in state], dtype=np.int64)
        """The place of the variable that says so."""
        self.home_of = {i: self.place(var) for i, _, var in state}

    def rows(
        self, t: int, wanted: Iterable[int], *, binding: bool
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], int]]:
        """Yield (step, places, bytes, constant bytes) of those wanted steps that may execute.

        The steps ascend. A place below zero, ``-1 - number``, is that of a liveness column. With
        `binding`, steps at which all terms together keep the limit are left out.
        """
        stage = _Stage(self, t)
        for k in wanted:
            if k < t and not stage.may_execute(k):
                continue
            stage.go_to(k)
            row = stage.row(k, self.limit if binding else -1)
            if row is not None:
                yield k, *row

    def column(self, column: _Column) -> int:
        """Return the place of a liveness column, below zero."""
        return -1 - self.live.setdefault(column, len(self.live))

    def place(self, variable: Any | None) -> int:
        """Return the place of a variable, below zero for None."""
        if variable is None:
            return _NOT
        place = self._places.setdefault(id(variable), len(self.variables))
        if place == len(self.variables):
            self.variables.append(variable)
        return place


def rows_of_state(view: StepView) -> list[tuple[int, int, Any]]:
    """Return (tensor, bytes, variable that says whether it is resident) of state with bytes."""
    graph = view.problem.graph
    found = ((i, graph.tensor_bytes[i], view.resident(i)) for i in graph.state_tensors)
    return [each for each in found if each[1] and each[2] is not None]


class _Stage:
    """The terms of the rows of one stage, followed from step to step.

    Between two steps only what a step between them reads or makes counts for something else.
    """

    def __init__(self, rows: MemoryRows, t: int) -> None:
        self.generator, self.t = rows, t
        graph, view = rows.graph, rows.view
        older = bisect_left(graph.node_of, t)
        tensors = [i for i in range(older) if rows.sizes[i]]
        self.nodes = [graph.node_of[i] for i in tensors]
        self.bytes = np.array([rows.sizes[i] for i in tensors], dtype=np.int64)
        self.held = np.array([rows.place(view.in_ram(t, i)) for i in tensors], dtype=np.int64)
        self.computed = [rows.place(view.computed(t, k)) for k in range(t)]
        self.after: list[int] = []
        """For each older tensor the place of what keeps it beyond the stage."""
        self.needed: list[list[int]] = []
        """For each older tensor the places of what needs it, first readers first."""
        self.passing: dict[int, list[int]] = {}
        """For each step the older tensors of which its recomputation is a reader."""
        for p, i in enumerate(tensors):
            self.needed.append(self._needed(p, i))
        self.homes = [rows.home_of.get(i, _NOT) for i in tensors]
        """For each older tensor that is state, the place of its home; it needs no copy there."""
        self.live = np.array([self._kind(p) for p in range(len(tensors))], dtype=np.int64)
        """For each older tensor what it counts for after its step."""
        self.read = np.isin(rows.home_nodes, [graph.node_of[i] for i in graph.inputs_of[t]])
        """For each state tensor whether the stage's own step reads a copy, or the resident one."""
        self.at = 0

    def _needed(self, p: int, i: int) -> list[int]:
        t, view = self.t, self.generator.view
        readers = self.generator.graph.users_of[i]
        if t in readers:
            self.after.append(_NOT)
            return [_CONSTANT]
        needed = []
        for j in readers:
            if j < t and self.computed[j] >= 0:
                needed.append(self.computed[j])
                self.passing.setdefault(j, []).append(p)
        after = self.generator.place(view.in_ram(t + 1, i))
        self.after.append(after)
        return [*needed, after] if after >= 0 else needed

    def _kind(self, p: int) -> int:
        needed = self.needed[p]
        if not needed:
            return _NOT
        alone = len(needed) == 1 and (self.homes[p] < 0 or needed[0] in (_CONSTANT, self.after[p]))
        return needed[0] if alone else _SEVERAL

    def may_execute(self, k: int) -> bool:
        """Return whether step `k` before the stage's own may execute."""
        view, t = self.generator.view, self.t
        return self.computed[k] >= 0 or any(
            view.paged_in(t, i) is not None for i in self.generator.graph.outputs_of[k]
        )

    def go_to(self, k: int) -> None:
        """Let the steps before `k` pass."""
        for j in range(self.at, min(k, self.t)):
            for p in self.passing.get(j, ()):
                self.needed[p] = self.needed[p][1:]
                self.live[p] = self._kind(p)
        self.at = k

    def row(self, k: int, limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64], int] | None:
        """Return places, bytes and constant bytes of a step; None where all keep the limit."""
        before, after = bisect_left(self.nodes, k), bisect_right(self.nodes, k)
        own, constant = self._own(k)
        later, live = self.held[after:], self.live[:before]
        keeps, counts = later >= 0, live != _NOT
        own_bytes = sum(size for size, _ in own)
        later_bytes, live_bytes = self.bytes[after:][keeps], self.bytes[:before][counts]
        homes = self._resident(k)
        home_bytes = self.generator.home_bytes[homes]
        most = sum(int(part.sum()) for part in (later_bytes, live_bytes, home_bytes))
        if most + own_bytes + constant <= limit:
            return None
        for p in np.flatnonzero(live == _SEVERAL).tolist():
            column = _Column(tuple(self.needed[p]), unless=self.homes[p])
            self.live[p] = self.generator.column(column)
        added = np.array(own, dtype=np.int64).reshape(-1, 2)
        home_places = self.generator.home_places[homes]
        places = np.concatenate((later[keeps], added[:, 1], live[counts], home_places))
        sizes = np.concatenate((later_bytes, added[:, 0], live_bytes, home_bytes))
        fixed = places == _CONSTANT
        return *_merged(places[~fixed], sizes[~fixed]), constant + int(sizes[fixed].sum())

    def _resident(self, k: int) -> NDArray[np.bool_]:
        """Return which state counts at step `k` where it is resident, as what a copy does not."""
        nodes = self.generator.home_nodes
        counted = self.read & (nodes < k)
        if k == self.t and self.generator.graph.output_bytes[k]:
            counted |= nodes == k
        return ~counted

    def _own(self, k: int) -> tuple[list[tuple[int, int]], int]:
        """Return outputs and workspace of step `k` itself as terms, and their constant part [B].

        An output takes its own bytes, less those of an input in whose place it is written. For an
        input that somebody needs after the step they come back.
        """
        rows, t = self.generator, self.t
        node = rows.graph.nodes[k]
        made = node.output_bytes + node.workspace_bytes
        terms = []
        for x, size in rows.graph.shared_bytes_of[k].items():
            if k < t and t in rows.graph.users_of[x]:
                continue
            made -= size
            later = [j for j in rows.graph.users_of[x] if k < j < t and self.computed[j] >= 0]
            after = rows.place(rows.view.in_ram(t + 1, x))
            needs = [self.computed[j] for j in later] + [after] * (after >= 0)
            if k == t:
                terms += [(size, place) for place in needs]
            elif needs and self.computed[k] >= 0:
                column = _Column(tuple(needs), provided=self.computed[k])
                terms.append((size, rows.column(column)))
        if k == t:
            return terms, made
        copies = [(made, self.computed[k])]
        for i in rows.graph.outputs_of[k]:
            for var in (rows.view.in_ram(t, i), rows.view.paged_in(t, i)):
                copies.append((rows.sizes[i], rows.place(var)))
        return terms + [(size, place) for size, place in copies if size and place >= 0], 0


def _merged(
    places: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the terms with bytes of the same variable added, in the order of its first ones."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    new = np.ones(places.size, dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    if new.all():
        return places, sizes
    first = np.flatnonzero(new)
    sums = np.add.reduceat(sizes[order], first)
    back = np.argsort(order[first])
    return ordered[first][back], sums[back]


def _memory(m: pyo.ConcreteModel) -> None:
    """Keep within RAM at every step that may execute.

    At step ``(t,k)``, tensors whose step is still to come count if they were in RAM at the
    beginning of the stage, the step's own outputs with every copy, and older ones while somebody
    needs them::

        sum(bytes[i] * S_RAM[t,i],  node(i) > k)
        + sum(bytes[i] * (S_RAM[t,i] + M_in[t,i] + R[t,k]),  i in out(k))
        + sum(bytes[i] * live[t,i,k],  node(i) < k) + workspace[k] * R[t,k]  <=  budget

        live[t,i,k] >= S_RAM[t+1,i],  live[t,i,k] >= R[t,j] for every reader j >= k of i

    Resident state `w` counts at every step, and needs no copy::

        + sum(bytes[w] * resident[w])    but where a copy, or it, counts in any case
        live[t,w,k] >= R[t,j] - resident[w]

    An output `y` that may be written over an input `x` counts less, unless `x` lives on::

        - min(bytes[x], bytes[y]) * (R[t,k] - apart[t,k,x])
        apart[t,k,x] >= S_RAM[t+1,x] + R[t,k] - 1,  apart[t,k,x] >= R[t,j] + R[t,k] - 1 for every
        reader j > k of x
    """
    state_memory(m, StepView(m))


def state_memory(
    m: pyo.ConcreteModel, view: StepView, steps: Mapping[int, Collection[int]] | None = None
) -> None:
    """Add memory rows and liveness columns, with `steps` only for these steps of these stages."""
    problem = m.problem
    limit = problem.usable_ram_bytes
    least = problem.floor.bytes
    if not problem.objective.is_sum:
        unit = problem.useful_ram_bytes
        most = max(limit, 0) / unit * (1 + RESOLVED)
        m.peak = pyo.Var(bounds=(min(least * _BELOW_FLOOR / unit, most), most))
    if least > limit:
        m.memory = never(m)
        return
    generator = MemoryRows(view)
    if steps is None:
        steps = {t: range(t + 1) for t in range(len(problem.graph.nodes))}
    binding = problem.objective.is_sum
    rows = []
    for t in sorted(steps):
        check_time_limit()
        rows += [(t, *row) for row in generator.rows(t, sorted(steps[t]), binding=binding)]
    m.live = pyo.Var(range(len(generator.live)), bounds=(0, 1))
    variables = generator.variables
    begin = len(variables)
    m.live_for = (tuple(generator.live), variables[:begin])
    variables.extend(m.live.values())
    m.liveness = RowConstraint(_liveness(variables, begin, generator.live))
    if hasattr(m, "peak"):
        variables.append(m.peak)
    stated = {}
    for t, k, places, sizes, constant in rows:
        check_time_limit()
        index = np.where(places < 0, begin - 1 - places, places).astype(np.int32)
        room = problem.usable_ram_bytes - constant
        limit = LinearRow(
            space=variables, index=index, values=sizes, upper=room, name="memory", key=(t, k)
        )
        row = _row(m, limit, constant)
        if row is not None:
            stated[t, k] = row
    m.memory = RowConstraint(stated)


def _liveness(
    variables: list[Any], begin: int, live: Mapping[_Column, int]
) -> dict[int, LinearRow]:
    """Return the rows of liveness columns, whose places begin at `begin`."""
    rows: dict[int, LinearRow] = {}
    for column, number in live.items():
        other = [(column.unless, -1.0), (column.provided, 1.0)]
        more = [(place, sign) for place, sign in other if place >= 0]
        signs = np.array([1.0, -1.0, *(sign for _, sign in more)])
        upper = 1.0 if column.provided >= 0 else 0.0
        for place in column.needs:
            index = np.array([place, begin + number, *(p for p, _ in more)], dtype=np.int32)
            rows[len(rows) + 1] = LinearRow(space=variables, index=index, values=signs, upper=upper)
    return rows


def assign_memory(
    m: pyo.ConcreteModel, schedule: Schedule, values: Mapping[int, float]
) -> Iterator[tuple[Any, float]]:
    """Yield (variable, value) of the liveness columns and of the peak, for a start.

    `values` are those of the other variables, by `id`.
    """
    columns, variables = getattr(m, "live_for", ((), ()))
    found = [values[id(var)] for var in variables] if columns else []
    for number, column in enumerate(columns):
        yield m.live[number], column.value(found)
    if hasattr(m, "peak"):
        peak = simulate(m.problem.graph, m.problem.costs, schedule).peak_ram_bytes
        yield m.peak, peak / m.problem.useful_ram_bytes


def _row(m: pyo.ConcreteModel, limit: LinearRow, constant: int) -> LinearRow | None:
    """Return the row of a step; where the peak is minimized it has its variable, the last one."""
    if m.problem.objective.is_sum:
        row = limit_row(limit)
        if row is not None:
            keep_limit(m, limit)
        return row
    keep_limit(m, limit)  # the peak may have to be lower than it can be now
    unit, sizes = m.problem.useful_ram_bytes, np.asarray(limit.values)
    scale = max(unit, int(sizes.max(initial=0)))
    return replace(
        limit,
        index=np.append(np.asarray(limit.index), np.int32(len(limit.space) - 1)),
        values=np.append(sizes / scale, -unit / scale),
        upper=-constant / scale,
    )


MEMORY = Component(
    "memory",
    _memory,
    "Checkmate (MLSys 2020), equations 2 and 3, stated per step without the recurrence",
    AFTER_VARIABLES,
)
