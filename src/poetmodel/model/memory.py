"""Memory rows: limits on the live bytes at every possible step, without a recurrence."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.model.decisions import NO_COLUMN, LivenessBounds
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
    """Map from entries of the paper's relations to columns of ``compact``.

    In a relaxation, stages of a group have common columns: valid only at steps with enforced rows.
    """

    def __init__(self, m: Model) -> None:
        self.m = m
        self.problem: Problem = m.problem
        self.graph: Graph = m.problem.working_graph

    def in_ram_column(self, t: int, i: int) -> int | None:
        """Return the column of ``S_RAM[t,i]``; None without an entry, or if it is always 0."""
        group_of = self.m.events.group_of
        if t >= len(group_of):
            return None
        a = self.m.events.keep_index(i, group_of[self.graph.node_of[i]], group_of[t])
        return None if a is None else self.m.kept[i, a]

    def recompute_column(self, t: int, k: int) -> int | None:
        """Return the column of ``R[t,k]``, ``k < t``; None if the entry is always 0."""
        return self.m.recomputed.get((self.m.events.group_of[t], k))

    def page_in_column(self, t: int, i: int) -> int | None:
        """Return the column of ``M_in[t,i]``; None if the entry is always 0."""
        return self.m.paged_in.get((self.m.events.group_of[t], i))

    def resident_column(self, i: int) -> int | None:
        """Return the column that is 1 if the home of state `i` is RAM; None for other tensors."""
        return self.m.resident.get(i)


_MIN_PEAK_RATIO: Final = 0.999
"""Lower bound on the peak of a model, as a fraction of the minimum RAM. It is below 1 because rows
of the largest steps imply almost the minimum, and presolve treats a bound that a row nearly
implies as implied (`poetmodel.backends.highs`)."""
_ALWAYS_NEEDED: Final = NO_COLUMN + 1
"""Placeholder column of a tensor that the step of the stage's node reads, so that it always
counts."""
_LIVENESS_PENDING: Final = NO_COLUMN + 2
"""Placeholder column of a tensor that needs a liveness column, until its placeholder is created:
several decisions need the tensor, or a recomputation needs state that may be resident."""


class MemoryRowGenerator:
    """Generates memory rows of a model, and the liveness columns that they need."""

    def __init__(self, view: StepView) -> None:
        self.view = view
        self.graph = view.graph
        self.limit_bytes = view.problem.usable_ram_bytes
        self.sizes = self.graph.tensor_bytes
        self.index_of_bounds: dict[LivenessBounds, int] = {}
        """Index of the liveness column with these bounds, among all liveness columns."""
        original_sizes = view.problem.graph.tensor_bytes
        resident_states = [
            (i, original_sizes[i], column)
            for i in view.problem.graph.state_tensors
            if original_sizes[i] and (column := view.resident_column(i)) is not None
        ]
        self.home_nodes = np.array(
            [self.graph.node_of[i] for i, *_ in resident_states], dtype=np.int64
        )
        """Node of each state tensor that may be resident and has bytes."""
        self.home_bytes = np.array([size for _, size, _ in resident_states], dtype=np.int64)
        """RAM of each state tensor of `home_nodes` [B]."""
        self.home_columns = np.array([column for *_, column in resident_states], dtype=np.int64)
        """Column that is 1 if the state tensor is resident, for each one of `home_nodes`."""
        self.home_column_of = {i: column for i, _, column in resident_states}
        """Columns of `home_columns`, by tensor."""

    def rows(
        self, t: int, steps: Iterable[int], *, only_binding: bool
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], int]]:
        """Yield (step, columns, bytes, constant bytes) for `steps` of stage `t` that can occur.

        `steps` must ascend. A negative column ``-1 - index`` is a placeholder of a liveness column,
        whose bounds are added to `index_of_bounds`. With `only_binding`, only steps that may exceed
        the limit.
        """
        stage = _StageTerms(self, t)
        for k in steps:
            if k < t and not stage.may_execute(k):
                continue
            stage.advance_to(k)
            row = stage.terms_of_step(k, self.limit_bytes if only_binding else -1)
            if row is not None:
                yield k, *row

    def liveness_column(self, bounds: LivenessBounds) -> int:
        """Return the negative placeholder of a liveness column; register new `bounds`."""
        return -1 - self.index_of_bounds.setdefault(bounds, len(self.index_of_bounds))


def _column_or_placeholder(column: int | None) -> int:
    return NO_COLUMN if column is None else column


class _StageTerms:
    """Terms of the memory rows of one stage, updated from step to step.

    *Older* tensors are those of nodes before the stage's node, without tensors of 0 bytes; lists
    are in their order. Terms change only for tensors that a step between reads or makes.
    """

    def __init__(self, generator: MemoryRowGenerator, t: int) -> None:
        self.generator, self.t = generator, t
        graph, view = generator.graph, generator.view
        n_older_tensors = bisect_left(graph.node_of, t)
        tensors = [i for i in range(n_older_tensors) if generator.sizes[i]]
        self.nodes = [graph.node_of[i] for i in tensors]
        self.bytes = np.array([generator.sizes[i] for i in tensors], dtype=np.int64)
        self.in_ram_columns = np.array(
            [_column_or_placeholder(view.in_ram_column(t, i)) for i in tensors], dtype=np.int64
        )
        self.recompute_columns = [
            _column_or_placeholder(view.recompute_column(t, k)) for k in range(t)
        ]
        self.keep_columns: list[int] = []
        """Column that keeps each older tensor up to the next stage; `NO_COLUMN` if there is none,
        or if the stage's node reads the tensor."""
        self.need_columns: list[list[int]] = []
        """Columns of the decisions that need each older tensor from the current step on: of readers
        in order, then the keep. Only `_ALWAYS_NEEDED` if the stage's node reads the tensor."""
        self.positions_read_by: dict[int, list[int]] = {}
        """Positions of the older tensors that the recomputation of each step reads, except tensors
        that the stage's node reads."""
        for p, i in enumerate(tensors):
            self.need_columns.append(self._collect_need_columns(p, i))
        self.home_columns = [generator.home_column_of.get(i, NO_COLUMN) for i in tensors]
        """Column of the resident home of each older tensor; `NO_COLUMN` unless it is state that may
        be resident. Resident state needs no copy."""
        self.live_columns = np.array(
            [self._live_column(p) for p in range(len(tensors))], dtype=np.int64
        )
        """Column that is 1 if each older tensor counts at steps after its own, or a placeholder."""
        self.is_home_read = np.isin(
            generator.home_nodes, [graph.node_of[i] for i in graph.inputs_of[t]]
        )
        """Whether the step of the stage's node reads each state tensor of `home_nodes`."""
        self.current_step = 0

    def _collect_need_columns(self, p: int, i: int) -> list[int]:
        """Return the columns of the decisions that need `i`, the older tensor at position `p`.

        They are recomputations of its readers, then its keep. Extends `keep_columns` and, unless
        the stage's node reads `i` (only `_ALWAYS_NEEDED`), `positions_read_by`.
        """
        t, view = self.t, self.generator.view
        readers = self.generator.graph.users_of[i]
        if t in readers:
            self.keep_columns.append(NO_COLUMN)
            return [_ALWAYS_NEEDED]
        columns = []
        for j in readers:
            if j < t and self.recompute_columns[j] >= 0:
                columns.append(self.recompute_columns[j])
                self.positions_read_by.setdefault(j, []).append(p)
        keep_column = _column_or_placeholder(view.in_ram_column(t + 1, i))
        self.keep_columns.append(keep_column)
        return [*columns, keep_column] if keep_column >= 0 else columns

    def _live_column(self, p: int) -> int:
        """Return the column that is 1 if the older tensor at `p` counts, or a placeholder.

        `_LIVENESS_PENDING` stands for a liveness column: several decisions need the tensor, or a
        recomputation reads state that may be resident.
        """
        columns = self.need_columns[p]
        if not columns:
            return NO_COLUMN
        is_single = len(columns) == 1 and (
            self.home_columns[p] < 0 or columns[0] in (_ALWAYS_NEEDED, self.keep_columns[p])
        )
        return columns[0] if is_single else _LIVENESS_PENDING

    def may_execute(self, k: int) -> bool:
        """Return whether step `k < t` may recompute its node or page in one of its outputs."""
        view, t = self.generator.view, self.t
        return self.recompute_columns[k] >= 0 or any(
            view.page_in_column(t, i) is not None for i in self.generator.graph.outputs_of[k]
        )

    def advance_to(self, k: int) -> None:
        """Move to step `k`: readers before step `k` no longer need their inputs."""
        for j in range(self.current_step, min(k, self.t)):
            for p in self.positions_read_by.get(j, ()):
                self.need_columns[p] = self.need_columns[p][1:]
                self.live_columns[p] = self._live_column(p)
        self.current_step = k

    def terms_of_step(
        self, k: int, limit: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], int] | None:
        """Return columns, bytes and constant bytes of step `k`, after ``advance_to(k)``.

        None if they cannot exceed `limit` [B]. May register liveness columns, which replace
        `_LIVENESS_PENDING` in `live_columns`.
        """
        n_before, first_after = bisect_left(self.nodes, k), bisect_right(self.nodes, k)
        output_terms, constant_bytes = self._output_terms(k)
        keep_columns, live_columns = self.in_ram_columns[first_after:], self.live_columns[:n_before]
        is_kept, is_live = keep_columns >= 0, live_columns != NO_COLUMN
        output_bytes = sum(size for size, _ in output_terms)
        later_bytes, live_bytes = self.bytes[first_after:][is_kept], self.bytes[:n_before][is_live]
        is_home_counted = self._select_counted_homes(k)
        home_bytes = self.generator.home_bytes[is_home_counted]
        total_bytes = sum(
            int(sizes_of_kind.sum()) for sizes_of_kind in (later_bytes, live_bytes, home_bytes)
        )
        if total_bytes + output_bytes + constant_bytes <= limit:
            return None
        for p in np.flatnonzero(live_columns == _LIVENESS_PENDING).tolist():
            bounds = LivenessBounds(tuple(self.need_columns[p]), waiver=self.home_columns[p])
            self.live_columns[p] = self.generator.liveness_column(bounds)
        output_array = np.array(output_terms, dtype=np.int64).reshape(-1, 2)
        home_columns = self.generator.home_columns[is_home_counted]
        columns = np.concatenate(
            (keep_columns[is_kept], output_array[:, 1], live_columns[is_live], home_columns)
        )
        sizes = np.concatenate((later_bytes, output_array[:, 0], live_bytes, home_bytes))
        is_constant = columns == _ALWAYS_NEEDED
        return *_merge_columns(columns[~is_constant], sizes[~is_constant]), constant_bytes + int(
            sizes[is_constant].sum()
        )

    def _select_counted_homes(self, k: int) -> NDArray[np.bool_]:
        """Return the mask of the state tensors that count at step `k` by their resident column."""
        nodes = self.generator.home_nodes
        is_counted_as_copy = self.is_home_read & (nodes < k)
        if k == self.t and self.generator.graph.output_bytes[k]:
            is_counted_as_copy |= nodes == k
        return ~is_counted_as_copy

    def _output_terms(self, k: int) -> tuple[list[tuple[int, int]], int]:
        """Return terms (bytes, column) of outputs and workspace of step `k`, and constant bytes.

        An output counts its bytes minus those of an input that it overwrites; terms add these again
        if a decision needs the input after the step. May register liveness columns.
        """
        generator, t = self.generator, self.t
        node = generator.graph.nodes[k]
        output_bytes = node.output_bytes + node.workspace_bytes
        terms = []
        for x, size in generator.graph.shared_bytes_of[k].items():
            if k < t and t in generator.graph.users_of[x]:
                continue
            output_bytes -= size
            later_readers = [
                j
                for j in generator.graph.users_of[x]
                if k < j < t and self.recompute_columns[j] >= 0
            ]
            keep_column = _column_or_placeholder(generator.view.in_ram_column(t + 1, x))
            need_columns = [self.recompute_columns[j] for j in later_readers] + [keep_column] * (
                keep_column >= 0
            )
            if k == t:
                terms += [(size, column) for column in need_columns]
            elif need_columns and self.recompute_columns[k] >= 0:
                bounds = LivenessBounds(tuple(need_columns), condition=self.recompute_columns[k])
                terms.append((size, generator.liveness_column(bounds)))
        if k == t:
            return terms, output_bytes
        copy_terms = [(output_bytes, self.recompute_columns[k])]
        for i in generator.graph.outputs_of[k]:
            for column in (generator.view.in_ram_column(t, i), generator.view.page_in_column(t, i)):
                copy_terms.append((generator.sizes[i], _column_or_placeholder(column)))
        return terms + [(size, column) for size, column in copy_terms if size and column >= 0], 0


def _merge_columns(
    columns: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each column once, with the sum of its bytes, in the order of first occurrence."""
    order = np.argsort(columns, kind="stable")
    ordered = columns[order]
    is_first = np.ones(columns.size, dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    if is_first.all():
        return columns, sizes
    first_positions = np.flatnonzero(is_first)
    sums = np.add.reduceat(sizes[order], first_positions)
    original_order = np.argsort(order[first_positions])
    return ordered[first_positions][original_order], sums[original_order]


def _add_all_memory_rows(m: Model) -> None:
    """Limit RAM at every possible step.

    At step ``(t,k)``, tensors of nodes after `k` count if they were in RAM at the beginning of the
    stage, every copy of the outputs of `k` counts, and tensors of nodes before `k` count while they
    are needed::

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

    A relaxation has only the rows that it enforces. At step ``(t,t)``, without state and in-place
    operators, the row is, with `i` over the tensors that node `t` neither reads nor makes::

        sum(bytes[i] * kept(i across the end of the stage's group))
        + sum(bytes of in(t) and out(t)) + workspace[t]  <=  budget
    """
    add_memory_rows(m, StepView(m), m.grouping.steps)


def add_memory_rows(m: Model, view: StepView, steps: Mapping[int, Collection[int]]) -> None:
    """Add the memory rows of the `steps` of each stage, and their liveness columns and rows.

    Registers the limits for cover cuts, and sets `Model.live_bounds`. Rows of steps that cannot
    occur or bind are omitted. If the objective is the peak RAM, adds `Model.peak`, a fraction of
    the useful RAM, which replaces the budget in all rows. If the minimum RAM exceeds the budget, an
    infeasible row replaces all others.
    """
    problem = m.problem
    limit_bytes = problem.usable_ram_bytes
    min_bytes = problem.floor.bytes
    if not problem.objective.is_sum:
        unit_bytes = problem.useful_ram_bytes
        max_peak = max(limit_bytes, 0) / unit_bytes * (1 + LOOSENING)
        m.peak = m.add_variable(
            "peak", lower=min(min_bytes * _MIN_PEAK_RATIO / unit_bytes, max_peak), upper=max_peak
        )
    if min_bytes > limit_bytes:
        m.begin_rows("memory")
        m.add_infeasible_row()
        return
    generator = MemoryRowGenerator(view)
    only_binding = problem.objective.is_sum
    unscaled_rows = []
    for t in sorted(steps):
        check_time_limit()
        unscaled_rows += [
            (t, *row) for row in generator.rows(t, sorted(steps[t]), only_binding=only_binding)
        ]
    m.live_bounds = tuple(generator.index_of_bounds)
    first_live = m.n_columns
    m.add_variables("live", range(len(m.live_bounds)), integer=False)
    m.begin_rows("liveness")
    _add_liveness_rows(m)
    m.begin_rows("memory")
    for t, k, columns, sizes, constant_bytes in unscaled_rows:
        columns_of_terms = np.where(columns < 0, first_live - 1 - columns, columns).astype(np.int32)
        limit_row = LinearRow(
            space=range(m.n_columns),
            index=columns_of_terms,
            values=sizes,
            upper=limit_bytes - constant_bytes,
            name="memory",
            key=(t, k),
        )
        row = _limit_or_peak_row(m, limit_row, constant_bytes)
        if row is not None and row.index is not None:
            m.add_array_row(row.key, row.index, np.asarray(row.values), upper=row.upper)


def _add_liveness_rows(m: Model) -> None:
    """Add the rows of `LivenessBounds`, which bound liveness columns from below."""
    key = 0
    for column, (needs, waiver, condition) in zip(m.live.values(), m.live_bounds, strict=True):
        signed_columns = ((waiver, -1.0), (condition, 1.0))
        other_terms = [
            (other_column, sign) for other_column, sign in signed_columns if other_column >= 0
        ]
        signs = (1.0, -1.0, *(sign for _, sign in other_terms))
        upper = 1.0 if condition >= 0 else 0.0
        for need in needs:
            key += 1
            m.add_row(
                key,
                (need, column, *(other_column for other_column, _ in other_terms)),
                signs,
                upper=upper,
            )


def memory_values(
    m: Model, schedule: Schedule, values: Mapping[int, float] | NDArray[np.float64]
) -> Iterator[tuple[int, float]]:
    """Yield (column, value) of the liveness columns and of the peak, for a start solution.

    `values` are those of the decisions' columns. The peak is simulated, as a fraction of the useful
    RAM.
    """
    for bounds, column in zip(m.live_bounds, m.live.values() if m.live_bounds else (), strict=True):
        yield column, bounds.min_value(values)
    if m.peak is not None:
        peak = simulate(m.problem.graph, m.problem.costs, schedule).peak_ram_bytes
        yield m.peak, peak / m.problem.useful_ram_bytes


def _limit_or_peak_row(m: Model, limit_row: LinearRow, constant_bytes: int) -> LinearRow | None:
    """Return the scaled row of a step; `Model.peak` replaces the budget if the model has it.

    The `upper` of `limit_row` is the budget minus `constant_bytes`. Registers `limit_row` for cover
    cuts. None if the row cannot bind.
    """
    if m.peak is None:
        row = scale_limit(limit_row)
        if row is not None:
            register_limit(m, limit_row)
        return row
    register_limit(m, limit_row)  # a later cutoff may lower the peak's bound
    unit_bytes, sizes = m.problem.useful_ram_bytes, np.asarray(limit_row.values)
    scale = max(unit_bytes, int(sizes.max(initial=0)))
    return replace(
        limit_row,
        index=np.append(np.asarray(limit_row.index), np.int32(m.peak)),
        values=np.append(sizes / scale, -unit_bytes / scale),
        upper=-constant_bytes / scale,
    )


MEMORY = Component(
    "memory",
    _add_all_memory_rows,
    "Checkmate (MLSys 2020), equations 2 and 3, stated per step without the recurrence",
    AFTER_VARIABLES,
)
