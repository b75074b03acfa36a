"""Interval cuts, which prevent a linear relaxation from splitting a recomputation over groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.solver.lazy.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.policy import Policy


@dataclass(frozen=True, slots=True)
class IntervalOrigin:
    """An interval cut, stated by stages, nodes and tensors of the graph."""

    first_stage: int
    """First stage of the interval."""
    last_stage: int
    """Last stage of the interval: `reader`, if the cut is for its first computation."""
    reader: int
    """The node that reads the first tensor of the chain."""
    is_for_recomputation: bool
    """Whether a recomputation of the reader needs the tensor, instead of its first computation."""
    chain: tuple[tuple[int, bool], ...]
    """(tensor, whether the page-out replaces the page-ins) pairs. The node of each tensor reads the
    next tensor."""
    ends_in_recomputation: bool
    """Whether the row has the recomputations of the last tensor's node."""


def make_separator(
    relaxation: Relaxation, policy: Policy, _: Callable[[], bool]
) -> IntervalSeparator:
    """Return the separator of interval cuts for a relaxation."""
    return IntervalSeparator(relaxation, policy.cuts_per_round)


class IntervalSeparator:
    """Finds at most `max_cuts` interval cuts that a point of a relaxation violates.

    Notes
    -----
    A tensor in RAM in group `l2` was kept into `l1`, or paged in within ``[l1, l2]``, or recomputed
    there. A recomputation requires each input of the node in the same way. So for every integer
    point, with `F` of a tensor first made at or after `l1` equal to one::

        F(i) = kept(i into l1) + min(sum of M_in[l,i], paged_out[i])
               + min(sum of R[l,k], min of F(p) over inputs p of k),    k = node(i), l in [l1, l2]

    ``F(i) >= 1`` if the first computation of a reader is in `l2`, ``F(i) >= R[l2,j]`` for a
    recomputed reader `j`. If the tensor is on storage from the start, the first minimum omits
    ``paged_out[i]``. For state, F has ``+ resident[i]``, and ``storage_home[i]`` replaces the
    page-out. Each minimum is replaced by its smaller side at the point, so the row is
    linear and valid.

    Groups only become finer while rows are added, so an interval of stages remains an interval of
    groups. A cut remains valid for any choice of the sides of its minima.
    """

    family: ClassVar[str] = "interval"

    def __init__(self, relaxation: Relaxation, max_cuts: int) -> None:
        self.relaxation = relaxation
        self.max_cuts = max_cuts

    def separate(self, x: NDArray[np.float64], min_violation: float) -> list[Cut]:
        """Return at most `max_cuts` violated cuts, the most violated first."""
        point = _FractionalPoint(self.relaxation, x)
        cuts: dict[tuple[tuple[float, int], ...], Cut] = {}
        for violation in point.find_violations(min_violation)[: 2 * self.max_cuts]:
            for cut in self.state_cut(point.cut_origin(violation)):
                cuts.setdefault(tuple(cut.terms), cut)
            if len(cuts) >= self.max_cuts:
                break
        return list(cuts.values())

    def restate(self, cut: Cut) -> Iterator[Cut]:
        """Yield a coarser relaxation's cut over the columns of this one; see `state_cut`."""
        return self.state_cut(cut.origin)

    def state_cut(self, origin: IntervalOrigin) -> Iterator[Cut]:
        """Yield the cut of an origin over the columns of this relaxation, unless it is trivial."""
        relaxation = self.relaxation
        group_of, node_of = relaxation.events.group_of, relaxation.problem.graph.node_of
        first_group, last_group = group_of[origin.first_stage], group_of[origin.last_stage]
        terms: dict[int, float] = {}
        lower_bound = 1.0
        if origin.is_for_recomputation:
            column = relaxation.recomputed.get((last_group, origin.reader))
            if column is None:
                return
            terms[column] = -1.0
            lower_bound = 0.0
        groups = range(first_group, last_group + 1)
        for i, uses_page_out in origin.chain:
            if group_of[node_of[i]] >= first_group:
                return
            lower_bound -= self._add_keep_term(i, first_group, terms)
            page_out_column = relaxation.page_out_column_of.get(i)
            if uses_page_out and page_out_column is not None:
                _add_term(terms, page_out_column)
            else:
                for group in groups:
                    _add_term(terms, relaxation.paged_in.get((group, i)))
        if origin.ends_in_recomputation:
            k = node_of[origin.chain[-1][0]]
            for group in groups:
                _add_term(terms, relaxation.recomputed.get((group, k)))
        if lower_bound > 0 or origin.is_for_recomputation:
            pairs = ((value, column) for column, value in sorted(terms.items()))
            yield Cut.from_terms(
                pairs, lower=lower_bound, name=self.family, origin=origin, is_in_bytes=False
            )

    def _add_keep_term(self, i: int, first_group: int, terms: dict[int, float]) -> float:
        """Add the terms of having tensor `i` in RAM when `first_group` begins; return the constant.

        It is 1, not 0, for a tensor that is in RAM in every solution.
        """
        relaxation, events = self.relaxation, self.relaxation.events
        if i in relaxation.model.resident:
            _add_term(terms, relaxation.resident.get(i))
            if i not in relaxation.resident:
                return 1.0
        a = events.keep_index(i, events.group_of[relaxation.problem.graph.node_of[i]], first_group)
        if a is None:
            return 0.0
        if (i, a) in relaxation.events.free_keeps:
            return 1.0
        _add_term(terms, relaxation.kept.get((i, a)))
        return 0.0


def _add_term(terms: dict[int, float], column: int | None) -> None:
    """Add 1 to the coefficient of a column, unless the column is None."""
    if column is not None:
        terms[column] = terms.get(column, 0.0) + 1.0


class _Violation(NamedTuple):
    """A violated cut: its violation, its first tensor, its interval of groups and its reader."""

    amount: float
    tensor: int
    first_group: int
    last_group: int
    reader: int | None
    """The recomputed reader of the tensor; None if the cut is for a first computation."""


class _FractionalPoint:
    """A fractional point, with cumulative sums over groups to evaluate intervals fast."""

    def __init__(self, relaxation: Relaxation, x: NDArray[np.float64]) -> None:
        self.relaxation = relaxation
        self.x = x
        self.graph = relaxation.problem.working_graph
        self.events = relaxation.events
        self.group_of = self.events.group_of
        self.n_groups = relaxation.grouping.n_groups
        self.keep_values = self._keep_values()
        self.supply_cache: dict[int, float] = {}
        """``F`` by tensor, for the interval of the current chain."""
        self.page_in_sums = self._cumulative_sums(relaxation.paged_in, len(self.graph.tensors))
        self.recompute_sums = self._cumulative_sums(relaxation.recomputed, len(self.graph.nodes))

    def _keep_values(self) -> NDArray[np.float64]:
        """Return the value of keeping each tensor into each group, shape (tensors, groups).

        Free keeps count 1, other keeps without a column 0. State adds its home in RAM.
        """
        keep_values = np.zeros((len(self.graph.tensors), self.n_groups))
        for i, event_groups in enumerate(self.events.event_groups):
            first_group = self.group_of[self.graph.node_of[i]] + 1
            for a, last_group in enumerate(event_groups):
                column = self.relaxation.kept.get((i, a))
                is_free_keep = (i, a) in self.relaxation.events.free_keeps
                value = self.x[column] if column is not None else float(is_free_keep)
                keep_values[i, first_group : last_group + 1] = value
                first_group = last_group + 1
        columns = self.relaxation.resident
        for i in self.relaxation.problem.graph.state_tensors:
            keep_values[i] += self.x[columns[i]] if i in columns else 1.0
        return keep_values

    def _cumulative_sums(
        self, columns: dict[tuple[int, int], int], count: int
    ) -> NDArray[np.float64]:
        """Return sums of `columns`, by (group, item), before each group: (count, groups + 1)."""
        values = np.zeros((count, self.n_groups + 1))
        for (group, index), column in columns.items():
            values[index, group + 1] = self.x[column]
        return np.cumsum(values, axis=1)

    def find_violations(self, min_violation: float) -> list[_Violation]:
        """Return the most violated cut per tensor, last group and reader, most violated first.

        First computations in a group count as one reader. If they read a tensor, its recomputed
        readers in the group are skipped.
        """
        violations: list[_Violation] = []
        readers: dict[int, list[int]] = {}
        for j in range(len(self.graph.nodes)):
            readers.setdefault(self.group_of[j], []).append(j)
        recomputed_readers: dict[int, list[int]] = {}
        for (group, j), column in self.relaxation.recomputed.items():
            if self.x[column] > min_violation:
                recomputed_readers.setdefault(group, []).append(j)
        for last_group in range(2, self.n_groups):
            check_time_limit()
            supply = self._supply_by_first_group(last_group)
            direct_readers = readers.get(last_group, ())
            direct_inputs = {
                i for j in direct_readers for i in self.graph.inputs_of[j] if i in supply
            }
            demands: list[tuple[int, float, int | None]] = [(i, 1.0, None) for i in direct_inputs]
            """(tensor, minimum supply, recomputed reader); None for a first computation."""
            for j in recomputed_readers.get(last_group, ()):
                value = float(self.x[self.relaxation.recomputed[last_group, j]])
                inputs = self.graph.inputs_of[j]
                demands += [(i, value, j) for i in inputs if i in supply and i not in direct_inputs]
            for i, value, reader in demands:
                shortfall = value - supply[i]
                first_index = int(shortfall.argmax())
                if shortfall[first_index] > min_violation:
                    violations.append(
                        _Violation(
                            float(shortfall[first_index]), i, first_index + 1, last_group, reader
                        )
                    )
        return sorted(violations, key=lambda entry: -entry.amount)

    def _supply_by_first_group(self, last_group: int) -> dict[int, NDArray[np.float64]]:
        """Return the supply ``F`` of each tensor in the intervals that end with `last_group`."""
        graph, x = self.graph, self.x
        supply: dict[int, NDArray[np.float64]] = {}
        first_groups = np.arange(1, last_group)
        for k in range(len(graph.nodes)):
            maker_group = self.group_of[k]
            if maker_group >= last_group:
                break
            recompute_value = None
            for i in graph.outputs_of[k]:
                values = self.keep_values[i, 1:last_group].copy()
                page_ins = self.page_in_sums[i, last_group + 1] - self.page_in_sums[i, 1:last_group]
                page_out_column = self.relaxation.page_out_column_of.get(i)
                values += (
                    page_ins
                    if page_out_column is None
                    else np.minimum(page_ins, x[page_out_column])
                )
                if self.events.recompute_groups[k]:
                    if recompute_value is None:
                        recompute_value = (
                            self.recompute_sums[k, last_group + 1]
                            - self.recompute_sums[k, 1:last_group]
                        )
                        for p in graph.inputs_of[k]:
                            recompute_value = np.minimum(recompute_value, supply[p])
                    values += recompute_value
                values[first_groups <= maker_group] = 1.0
                supply[i] = values
        return supply

    def cut_origin(self, violation: _Violation) -> IntervalOrigin:
        """Return the stages, the reader and the chain of tensors of a violated cut."""
        grouping = self.relaxation.grouping
        chain, ends_in_recomputation = self._find_chain(
            violation.tensor, violation.first_group, violation.last_group
        )
        reader = violation.reader
        if reader is None:
            users = self.graph.users_of[violation.tensor]
            reader = next(j for j in users if self.group_of[j] == violation.last_group)
        return IntervalOrigin(
            first_stage=grouping.first_stage[violation.first_group],
            last_stage=reader
            if violation.reader is None
            else grouping.last_stage[violation.last_group],
            reader=reader,
            is_for_recomputation=violation.reader is not None,
            chain=chain,
            ends_in_recomputation=ends_in_recomputation,
        )

    def _find_chain(
        self, i: int, first_group: int, last_group: int
    ) -> tuple[tuple[tuple[int, bool], ...], bool]:
        """Return `chain` and `ends_in_recomputation` of the `IntervalOrigin` of a cut from `i`.

        The next tensor is the node's input with the smallest supply ``F``. Clears `supply_cache`,
        which is valid for one interval.
        """
        self.supply_cache.clear()
        chain: list[tuple[int, bool]] = []
        while True:
            k = self.graph.node_of[i]
            page_ins = float(
                self.page_in_sums[i, last_group + 1] - self.page_in_sums[i, first_group]
            )
            page_out_column = self.relaxation.page_out_column_of.get(i)
            chain.append((i, page_out_column is not None and self.x[page_out_column] < page_ins))
            if self.group_of[k] >= first_group or not self.events.recompute_groups[k]:
                return tuple(chain), False
            min_value = float(
                self.recompute_sums[k, last_group + 1] - self.recompute_sums[k, first_group]
            )
            min_input = None
            for p in self.graph.inputs_of[k]:
                value = self._supply_value(p, first_group, last_group)
                if value < min_value:
                    min_input, min_value = p, value
            if min_input is None:
                return tuple(chain), True
            i = min_input

    def _supply_value(self, i: int, first_group: int, last_group: int) -> float:
        """Return the supply ``F`` of tensor `i` in the groups `first_group` to `last_group`.

        Cached by tensor alone, until `_find_chain` clears the cache.
        """
        if i in self.supply_cache:
            return self.supply_cache[i]
        k = self.graph.node_of[i]
        if self.group_of[k] >= first_group:
            return 1.0
        value = float(self.keep_values[i, first_group])
        page_ins = float(self.page_in_sums[i, last_group + 1] - self.page_in_sums[i, first_group])
        page_out_column = self.relaxation.page_out_column_of.get(i)
        value += (
            page_ins if page_out_column is None else min(page_ins, float(self.x[page_out_column]))
        )
        if self.events.recompute_groups[k]:
            recompute_value = float(
                self.recompute_sums[k, last_group + 1] - self.recompute_sums[k, first_group]
            )
            for p in self.graph.inputs_of[k]:
                if recompute_value <= 0:
                    break
                recompute_value = min(
                    recompute_value, self._supply_value(p, first_group, last_group)
                )
            value += recompute_value
        self.supply_cache[i] = value
        return value
