"""Memory rows: the bytes that are live at every possible step, without a recurrence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.model.decisions import NO_COLUMN, Liveness
from poetmodel.model.formulation import AFTER_VARIABLES, Component
from poetmodel.model.linear import LOOSENING, register_limit, scale_limit
from poetmodel.problem import LinearRow, Problem
from poetmodel.schedule import Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.model.arrays import Model


class StepView:
    """Entries of the relations as columns of ``compact``, for memory rows.

    With groups of several stages, the view is valid only for enforced rows: at these, a group ends
    or is a single stage.
    """

    def __init__(self, m: Model) -> None:
        self.m = m
        self.problem: Problem = m.problem
        self.graph: Graph = m.problem.working_graph

    def in_ram(self, t: int, i: int) -> int | None:
        """Return the column of ``S_RAM[t,i]``; None if it is zero."""
        group_of = self.m.events.group_of
        if t >= len(group_of):
            return None
        segment = self.m.events.segment(i, group_of[self.graph.node_of[i]], group_of[t])
        return None if segment is None else self.m.kept[i, segment]

    def computed(self, t: int, k: int) -> int | None:
        """Return the column of ``R[t,k]``, ``k < t``; None if it is zero."""
        return self.m.recomputed.get((self.m.events.group_of[t], k))

    def paged_in(self, t: int, i: int) -> int | None:
        """Return the column of ``M_in[t,i]``; None if it is zero."""
        return self.m.paged_in.get((self.m.events.group_of[t], i))

    def resident(self, i: int) -> int | None:
        """Return the column that is 1 if the home of state `i` is RAM; None for other tensors."""
        return self.m.resident.get(i)


_BELOW_FLOOR: Final = 0.999
"""Fraction of the minimum RAM that bounds the peak of a model from below. Rows of the largest steps
are a few bytes from the minimum, and presolve treats a bound that a row nearly implies as implied
(`poetmodel.backends.highs`)."""
_CONSTANT: Final = NO_COLUMN + 1
"""Placeholder column of a tensor that the stage's own step needs."""
_SEVERAL: Final = NO_COLUMN + 2
"""Placeholder column of a tensor that several columns need, until its liveness column is
created."""


class MemoryRows:
    """Generates memory rows of a model, and the liveness columns that they need."""

    def __init__(self, view: StepView) -> None:
        """Collect the state tensors that may be resident, and their columns."""
        self.view = view
        self.graph = view.graph
        self.limit = view.problem.usable_ram_bytes
        self.sizes = self.graph.tensor_bytes
        self.live: dict[Liveness, int] = {}
        """Number of each liveness column."""
        sizes = view.problem.graph.tensor_bytes
        state = [
            (i, sizes[i], column)
            for i in view.problem.graph.state_tensors
            if sizes[i] and (column := view.resident(i)) is not None
        ]
        self.home_nodes = np.array([self.graph.node_of[i] for i, *_ in state], dtype=np.int64)
        """Node of each state tensor that may be resident."""
        self.home_bytes = np.array([size for _, size, _ in state], dtype=np.int64)
        """RAM of each of these state tensors [B]."""
        self.home_columns = np.array([column for *_, column in state], dtype=np.int64)
        """Column of each of these that is 1 if it is resident."""
        self.home_of = {i: column for i, _, column in state}

    def rows(
        self, t: int, steps: Iterable[int], *, binding: bool
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], int]]:
        """Yield (step, columns, bytes, constant bytes) for each possible step of stage `t`.

        Steps must ascend. A negative column ``-1 - number`` stands for a liveness column. With
        `binding`, steps whose terms together meet the limit are omitted.
        """
        stage = _StageTerms(self, t)
        for k in steps:
            if k < t and not stage.may_execute(k):
                continue
            stage.advance_to(k)
            row = stage.terms_at(k, self.limit if binding else -1)
            if row is not None:
                yield k, *row

    def liveness_column(self, liveness: Liveness) -> int:
        """Return the negative placeholder of a liveness column; create it if it is new."""
        return -1 - self.live.setdefault(liveness, len(self.live))


def _column_or_none(column: int | None) -> int:
    return NO_COLUMN if column is None else column


class _StageTerms:
    """Terms of the memory rows of one stage, updated from step to step.

    *Older* tensors are those of nodes before the stage's own node. Between two steps, only tensors
    that a step between them reads or makes change their terms.
    """

    def __init__(self, rows: MemoryRows, t: int) -> None:
        """Collect the terms of stage `t` before its first step."""
        self.generator, self.t = rows, t
        graph, view = rows.graph, rows.view
        n_older_tensors = bisect_left(graph.node_of, t)
        tensors = [i for i in range(n_older_tensors) if rows.sizes[i]]
        self.nodes = [graph.node_of[i] for i in tensors]
        self.bytes = np.array([rows.sizes[i] for i in tensors], dtype=np.int64)
        self.held = np.array([_column_or_none(view.in_ram(t, i)) for i in tensors], dtype=np.int64)
        self.computed = [_column_or_none(view.computed(t, k)) for k in range(t)]
        self.after: list[int] = []
        """Column that keeps each older tensor beyond the stage."""
        self.needed: list[list[int]] = []
        """Columns that need each older tensor, in the order of readers."""
        self.passing: dict[int, list[int]] = {}
        """Older tensors that each step's recomputation reads."""
        for p, i in enumerate(tensors):
            self.needed.append(self._needing_columns(p, i))
        self.homes = [rows.home_of.get(i, NO_COLUMN) for i in tensors]
        """Home column of each older tensor that is state, which needs no copy if it is resident."""
        self.live = np.array([self._live_column(p) for p in range(len(tensors))], dtype=np.int64)
        """Term of each older tensor after its step."""
        self.read = np.isin(rows.home_nodes, [graph.node_of[i] for i in graph.inputs_of[t]])
        """Whether the stage's own step reads each state tensor, as a copy or resident."""
        self.at = 0

    def _needing_columns(self, p: int, i: int) -> list[int]:
        """Return the columns that need older tensor `i`, at position `p`; register its readers."""
        t, view = self.t, self.generator.view
        readers = self.generator.graph.users_of[i]
        if t in readers:
            self.after.append(NO_COLUMN)
            return [_CONSTANT]
        columns = []
        for j in readers:
            if j < t and self.computed[j] >= 0:
                columns.append(self.computed[j])
                self.passing.setdefault(j, []).append(p)
        keep_column = _column_or_none(view.in_ram(t + 1, i))
        self.after.append(keep_column)
        return [*columns, keep_column] if keep_column >= 0 else columns

    def _live_column(self, p: int) -> int:
        """Return the column for which older tensor `p` counts: none, one, constant, or several."""
        columns = self.needed[p]
        if not columns:
            return NO_COLUMN
        is_single = len(columns) == 1 and (
            self.homes[p] < 0 or columns[0] in (_CONSTANT, self.after[p])
        )
        return columns[0] if is_single else _SEVERAL

    def may_execute(self, k: int) -> bool:
        """Return whether step `k`, before the stage's own, may execute an instruction."""
        view, t = self.generator.view, self.t
        return self.computed[k] >= 0 or any(
            view.paged_in(t, i) is not None for i in self.generator.graph.outputs_of[k]
        )

    def advance_to(self, k: int) -> None:
        """Update the terms for step `k`: readers before step `k` no longer need their inputs."""
        for j in range(self.at, min(k, self.t)):
            for p in self.passing.get(j, ()):
                self.needed[p] = self.needed[p][1:]
                self.live[p] = self._live_column(p)
        self.at = k

    def terms_at(
        self, k: int, limit: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int] | None:
        """Return columns, bytes and constant bytes of step `k`.

        None if all terms together meet the limit.
        """
        n_before, first_after = bisect_left(self.nodes, k), bisect_right(self.nodes, k)
        own_terms, constant = self._own_terms(k)
        keep_columns, live_columns = self.held[first_after:], self.live[:n_before]
        is_kept, is_live = keep_columns >= 0, live_columns != NO_COLUMN
        own_bytes = sum(size for size, _ in own_terms)
        later_bytes, live_bytes = self.bytes[first_after:][is_kept], self.bytes[:n_before][is_live]
        homes = self._counted_homes(k)
        home_bytes = self.generator.home_bytes[homes]
        total_bytes = sum(
            int(part_sizes.sum()) for part_sizes in (later_bytes, live_bytes, home_bytes)
        )
        if total_bytes + own_bytes + constant <= limit:
            return None
        for p in np.flatnonzero(live_columns == _SEVERAL).tolist():
            liveness = Liveness(tuple(self.needed[p]), unless=self.homes[p])
            self.live[p] = self.generator.liveness_column(liveness)
        own_array = np.array(own_terms, dtype=np.int64).reshape(-1, 2)
        home_columns = self.generator.home_columns[homes]
        columns = np.concatenate(
            (keep_columns[is_kept], own_array[:, 1], live_columns[is_live], home_columns)
        )
        sizes = np.concatenate((later_bytes, own_array[:, 0], live_bytes, home_bytes))
        is_constant = columns == _CONSTANT
        return *_merge_columns(columns[~is_constant], sizes[~is_constant]), constant + int(
            sizes[is_constant].sum()
        )

    def _counted_homes(self, k: int) -> NDArray[np.bool_]:
        """Return a mask of state that counts at step `k` only if it is resident, not as a copy."""
        nodes = self.generator.home_nodes
        as_copies = self.read & (nodes < k)
        if k == self.t and self.generator.graph.output_bytes[k]:
            as_copies |= nodes == k
        return ~as_copies

    def _own_terms(self, k: int) -> tuple[list[tuple[int, int]], int]:
        """Return the terms of outputs and workspace of step `k`, and their constant part [B].

        An output counts its bytes, minus the bytes of an input that it overwrites. These are added
        again if the input is needed after the step.
        """
        rows, t = self.generator, self.t
        node = rows.graph.nodes[k]
        own_bytes = node.output_bytes + node.workspace_bytes
        terms = []
        for x, size in rows.graph.shared_bytes_of[k].items():
            if k < t and t in rows.graph.users_of[x]:
                continue
            own_bytes -= size
            later_readers = [
                j for j in rows.graph.users_of[x] if k < j < t and self.computed[j] >= 0
            ]
            keep_column = _column_or_none(rows.view.in_ram(t + 1, x))
            need_columns = [self.computed[j] for j in later_readers] + [keep_column] * (
                keep_column >= 0
            )
            if k == t:
                terms += [(size, column) for column in need_columns]
            elif need_columns and self.computed[k] >= 0:
                liveness = Liveness(tuple(need_columns), provided=self.computed[k])
                terms.append((size, rows.liveness_column(liveness)))
        if k == t:
            return terms, own_bytes
        copies = [(own_bytes, self.computed[k])]
        for i in rows.graph.outputs_of[k]:
            for column in (rows.view.in_ram(t, i), rows.view.paged_in(t, i)):
                copies.append((rows.sizes[i], _column_or_none(column)))
        return terms + [(size, column) for size, column in copies if size and column >= 0], 0


def _merge_columns(
    columns: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Merge terms of the same column by adding their bytes, in the order of first occurrence."""
    order = np.argsort(columns, kind="stable")
    ordered = columns[order]
    new = np.ones(columns.size, dtype=np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    if new.all():
        return columns, sizes
    first = np.flatnonzero(new)
    sums = np.add.reduceat(sizes[order], first)
    back = np.argsort(order[first])
    return ordered[first][back], sums[back]


def _add_all_memory_rows(m: Model) -> None:
    """Keep within RAM at every possible step.

    At step ``(t,k)``, tensors whose step comes later count if they were in RAM at the beginning of
    the stage, the step's own outputs count with every copy, and older tensors count while they are
    needed::

        sum(bytes[i] * S_RAM[t,i],  node(i) > k)
        + sum(bytes[i] * (S_RAM[t,i] + M_in[t,i] + R[t,k]),  i in out(k))
        + sum(bytes[i] * live[t,i,k],  node(i) < k) + workspace[k] * R[t,k]  <=  budget

        live[t,i,k] >= S_RAM[t+1,i],  live[t,i,k] >= R[t,j] for every reader j >= k of i

    Resident state `w` counts at every step, and needs no copy::

        + sum(bytes[w] * resident[w])    unless a copy, or the resident state, counts anyway
        live[t,w,k] >= R[t,j] - resident[w]

    An output `y` that may overwrite an input `x` counts less, unless `x` is needed later::

        - min(bytes[x], bytes[y]) * (R[t,k] - apart[t,k,x])
        apart[t,k,x] >= S_RAM[t+1,x] + R[t,k] - 1,  apart[t,k,x] >= R[t,j] + R[t,k] - 1 for every
        reader j > k of x

    A relaxation states the rows that it enforces. At a stage's own step, the row is, over the
    tensors that the step neither reads nor makes::

        sum(bytes[i] * kept(i across the end of the stage's group))
        + sum(bytes of in(t) and out(t)) + workspace[t]  <=  budget
    """
    add_memory_rows(m, StepView(m), m.grouping.steps)


def add_memory_rows(m: Model, view: StepView, steps: Mapping[int, Collection[int]]) -> None:
    """Add the memory rows of the given steps of each stage, and their liveness columns.

    Adds the column of the peak if that is minimized.
    """
    problem = m.problem
    limit = problem.usable_ram_bytes
    min_bytes = problem.floor.bytes
    if not problem.objective.is_sum:
        unit = problem.useful_ram_bytes
        max_peak = max(limit, 0) / unit * (1 + LOOSENING)
        m.peak = m.add_variable(
            "peak", lower=min(min_bytes * _BELOW_FLOOR / unit, max_peak), upper=max_peak
        )
    if min_bytes > limit:
        m.begin_rows("memory")
        m.add_infeasible_row()
        return
    generator = MemoryRows(view)
    binding = problem.objective.is_sum
    rows = []
    for t in sorted(steps):
        check_time_limit()
        rows += [(t, *row) for row in generator.rows(t, sorted(steps[t]), binding=binding)]
    m.live_for = tuple(generator.live)
    begin = m.n_columns
    m.add_variables("live", range(len(m.live_for)), integer=False)
    m.begin_rows("liveness")
    _add_liveness_rows(m)
    m.begin_rows("memory")
    for t, k, columns, sizes, constant in rows:
        index = np.where(columns < 0, begin - 1 - columns, columns).astype(np.int32)
        limit_row = LinearRow(
            space=range(m.n_columns),
            index=index,
            values=sizes,
            upper=limit - constant,
            name="memory",
            key=(t, k),
        )
        row = _limit_or_peak_row(m, limit_row, constant)
        if row is not None and row.index is not None:
            m.add_array_row(row.key, row.index, np.asarray(row.values), upper=row.upper)


def _add_liveness_rows(m: Model) -> None:
    """Add the rows that bound liveness columns from below."""
    number = 0
    for column, (needs, unless, provided) in zip(m.live.values(), m.live_for, strict=True):
        signed_columns = ((unless, -1.0), (provided, 1.0))
        conditions = [
            (needed_column, sign) for needed_column, sign in signed_columns if needed_column >= 0
        ]
        signs = (1.0, -1.0, *(sign for _, sign in conditions))
        upper = 1.0 if provided >= 0 else 0.0
        for need in needs:
            number += 1
            m.add_row(
                number,
                (need, column, *(needed_column for needed_column, _ in conditions)),
                signs,
                upper=upper,
            )


def assign_memory(
    m: Model, schedule: Schedule, values: Mapping[int, float] | NDArray[np.float64]
) -> Iterator[tuple[int, float]]:
    """Yield (column, value) of the liveness columns and of the peak, for a start solution.

    `values` are those of the other columns.
    """
    for liveness, column in zip(m.live_for, m.live.values() if m.live_for else (), strict=True):
        yield column, liveness.min_value(values)
    if m.peak is not None:
        peak = simulate(m.problem.graph, m.problem.costs, schedule).peak_ram_bytes
        yield m.peak, peak / m.problem.useful_ram_bytes


def _limit_or_peak_row(m: Model, limit: LinearRow, constant: int) -> LinearRow | None:
    """Return the scaled row of a step, with the peak's column if that is minimized.

    Registers the limit of the row for covers.

    None if the row cannot bind.
    """
    if m.peak is None:
        row = scale_limit(limit)
        if row is not None:
            register_limit(m, limit)
        return row
    register_limit(m, limit)  # a later cutoff may lower the peak's bound
    unit, sizes = m.problem.useful_ram_bytes, np.asarray(limit.values)
    scale = max(unit, int(sizes.max(initial=0)))
    return replace(
        limit,
        index=np.append(np.asarray(limit.index), np.int32(m.peak)),
        values=np.append(sizes / scale, -unit / scale),
        upper=-constant / scale,
    )


MEMORY = Component(
    "memory",
    _add_all_memory_rows,
    "Checkmate (MLSys 2020), equations 2 and 3, stated per step without the recurrence",
    AFTER_VARIABLES,
)
