"""Interval cuts: a linear relaxation must not spread a recomputation thinly over groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.solver.lazy.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.params import LazyParams
    from poetmodel.solver.lazy.relaxation import Relaxation


@dataclass(frozen=True, slots=True)
class IntervalOrigin:
    """An interval cut in terms of the graph."""

    first_stage: int
    last_stage: int
    reader: int
    """The node that needs the first tensor of the chain."""
    again: bool
    """Whether the reader's recomputation needs it, not its first computation."""
    chain: tuple[tuple[int, bool], ...]
    """(tensor, whether its page-out stands for its page-ins): each but the last is made from the
    next one."""
    ends_in_recomputation: bool
    """Whether the recomputations of the last tensor's node stand for its inputs."""


def separator(
    relaxation: Relaxation, params: LazyParams, _: Callable[[], bool]
) -> IntervalSeparator:
    """Return the separator of this family for a relaxation."""
    return IntervalSeparator(relaxation, params.cuts_per_round)


class IntervalSeparator:
    """At most `most` interval cuts for a point of a relaxation.

    Notes
    -----
    To be in RAM in group `l2`, a tensor has crossed into `l1`, or was paged in within ``[l1, l2]``,
    or was recomputed there, for which each of its node's inputs was there in its turn. So for every
    integer point, with `F` of a tensor first made at or after `l1` equal to one::

        F(i) = kept(i into l1) + min(sum of M_in[i,l], paged_out[i])
               + min(sum of R[k,l], min of F(u) over inputs u of k),    k = node(i), l in [l1, l2]

    ``F(i) >= 1`` where the first computation of a reader lies in `l2`, ``F(i) >= R[j,l2]`` for a
    recomputed reader `j`. Each minimum is replaced by its smaller side at the point, which keeps
    the row linear and valid.

    Groups only get finer while rows are added, so an interval of stages stays one of groups, and a
    cut, whichever sides of its minima it takes, stays valid.
    """

    family: ClassVar[str] = "interval"

    def __init__(self, relaxation: Relaxation, most: int) -> None:
        self.relaxation = relaxation
        self.most = most

    def separate(self, x: NDArray[np.float64], least: float) -> list[Cut]:
        """Return cuts that a point violates by more than `least`, the most violated first."""
        point = _FractionalPoint(self.relaxation, x)
        cuts: dict[tuple[tuple[float, int], ...], Cut] = {}
        for violation in point.violations(least)[: 2 * self.most]:
            for cut in self.state(point.origin(violation)):
                cuts.setdefault(tuple(cut.terms), cut)
            if len(cuts) >= self.most:
                break
        return list(cuts.values())

    def restate(self, cut: Cut) -> Iterator[Cut]:
        """Yield a cut of a coarser relaxation in the columns of this one, if it says anything."""
        return self.state(cut.origin)

    def state(self, origin: IntervalOrigin) -> Iterator[Cut]:
        """Yield the row of an interval, if it says anything here."""
        relaxation = self.relaxation
        group_of, node_of = relaxation.events.group_of, relaxation.problem.graph.node_of
        first, last = group_of[origin.first_stage], group_of[origin.last_stage]
        terms: dict[int, float] = {}
        right = 1.0
        if origin.again:
            column = relaxation.recomputed.get((last, origin.reader))
            if column is None:
                return
            terms[column] = -1.0
            right = 0.0
        groups = range(first, last + 1)
        for i, by_page_out in origin.chain:
            if group_of[node_of[i]] >= first:
                return
            right -= self._add_entering(i, first, terms)
            out = relaxation.needed_page_out.get(i)
            if by_page_out and out is not None:
                _add(terms, out)
            else:
                for group in groups:
                    _add(terms, relaxation.paged_in.get((group, i)))
        if origin.ends_in_recomputation:
            k = node_of[origin.chain[-1][0]]
            for group in groups:
                _add(terms, relaxation.recomputed.get((group, k)))
        if right > 0 or origin.again:
            pairs = ((value, column) for column, value in sorted(terms.items()))
            yield Cut.from_terms(
                pairs, lower=right, name=self.family, origin=origin, in_bytes=False
            )

    def _add_entering(self, i: int, first: int, terms: dict[int, float]) -> float:
        """Add keeping tensor `i` into group `first`; return it where it is a constant.

        Resident state is in RAM throughout.
        """
        relaxation, events = self.relaxation, self.relaxation.events
        if i in relaxation.model.resident:
            _add(terms, relaxation.resident.get(i))
            if i not in relaxation.resident:
                return 1.0
        segment = events.segment(i, events.group_of[relaxation.problem.graph.node_of[i]], first)
        if segment is None:
            return 0.0
        if (i, segment) in relaxation.events.kept:
            return 1.0
        _add(terms, relaxation.kept.get((i, segment)))
        return 0.0


def _add(terms: dict[int, float], column: int | None) -> None:
    if column is not None:
        terms[column] = terms.get(column, 0.0) + 1.0


class _Violation(NamedTuple):
    """An interval of groups, a tensor and its reader whose cut a point violates."""

    amount: float
    tensor: int
    first: int
    last: int
    reader: int | None
    """A recomputed reader, or None for a first computation."""


class _FractionalPoint:
    """A fractional point, with the sums that intervals are looked up in."""

    def __init__(self, relaxation: Relaxation, x: NDArray[np.float64]) -> None:
        self.relaxation = relaxation
        self.x = x
        self.graph = relaxation.problem.working_graph
        self.events = relaxation.events
        self.group_of = self.events.group_of
        self.n_groups = relaxation.grouping.n_groups
        self.enter = self._entering()
        self.values: dict[int, float] = {}
        """``F`` of the interval at hand, by tensor."""
        self.page_sum = self._cumulated(relaxation.paged_in, len(self.graph.tensors))
        self.again_sum = self._cumulated(relaxation.recomputed, len(self.graph.nodes))

    def _entering(self) -> NDArray[np.float64]:
        """Return the value of keeping each tensor into each group, shape (tensors, groups)."""
        enter = np.zeros((len(self.graph.tensors), self.n_groups))
        for i, stages in enumerate(self.events.events):
            begin = self.group_of[self.graph.node_of[i]] + 1
            for a, end in enumerate(stages):
                column = self.relaxation.kept.get((i, a))
                sure = (i, a) in self.relaxation.events.kept
                value = self.x[column] if column is not None else float(sure)
                enter[i, begin : end + 1] = value
                begin = end + 1
        columns = self.relaxation.resident
        for i in self.relaxation.problem.graph.state_tensors:
            enter[i] += self.x[columns[i]] if i in columns else 1.0
        return enter

    def _cumulated(self, columns: dict[tuple[int, int], int], count: int) -> NDArray[np.float64]:
        """Return sums over the groups before each, shape (count, groups + 1)."""
        values = np.zeros((count, self.n_groups + 1))
        for (group, index), column in columns.items():
            values[index, group + 1] = self.x[column]
        return np.cumsum(values, axis=1)

    def violations(self, least: float) -> list[_Violation]:
        """Return the cuts that the point violates by more than `least`, the worst first."""
        violations: list[_Violation] = []
        readers: dict[int, list[int]] = {}
        for j in range(len(self.graph.nodes)):
            readers.setdefault(self.group_of[j], []).append(j)
        again: dict[int, list[int]] = {}
        for (group, j), column in self.relaxation.recomputed.items():
            if self.x[column] > least:
                again.setdefault(group, []).append(j)
        for last in range(2, self.n_groups):
            check_time_limit()
            supply = self._supply(last)
            here = readers.get(last, ())
            direct = {i for j in here for i in self.graph.inputs_of[j] if i in supply}
            wanted: list[tuple[int, float, int | None]] = [(i, 1.0, None) for i in direct]
            for j in again.get(last, ()):
                value = float(self.x[self.relaxation.recomputed[last, j]])
                inputs = self.graph.inputs_of[j]
                wanted += [(i, value, j) for i in inputs if i in supply and i not in direct]
            for i, value, reader in wanted:
                missing = value - supply[i]
                first = int(missing.argmax())
                if missing[first] > least:
                    violations.append(_Violation(float(missing[first]), i, first + 1, last, reader))
        return sorted(violations, key=lambda entry: -entry.amount)

    def _supply(self, last: int) -> dict[int, NDArray[np.float64]]:
        """Return `F` of each tensor for the intervals [1..last-1, last], by first group."""
        graph, x = self.graph, self.x
        supply: dict[int, NDArray[np.float64]] = {}
        firsts = np.arange(1, last)
        for k in range(len(graph.nodes)):
            begin = self.group_of[k]
            if begin >= last:
                break
            again = None
            for i in graph.outputs_of[k]:
                value = self.enter[i, 1:last].copy()
                pages = self.page_sum[i, last + 1] - self.page_sum[i, 1:last]
                out = self.relaxation.needed_page_out.get(i)
                value += pages if out is None else np.minimum(pages, x[out])
                if self.events.recompute[k]:
                    if again is None:
                        again = self.again_sum[k, last + 1] - self.again_sum[k, 1:last]
                        for u in graph.inputs_of[k]:
                            again = np.minimum(again, supply[u])
                    value += again
                value[firsts <= begin] = 1.0
                supply[i] = value
        return supply

    def origin(self, violation: _Violation) -> IntervalOrigin:
        """Return the cut of a violation in terms of the graph."""
        grouping = self.relaxation.grouping
        chain, ends = self._chain(violation.tensor, violation.first, violation.last)
        reader = violation.reader
        if reader is None:
            users = self.graph.users_of[violation.tensor]
            reader = next(j for j in users if self.group_of[j] == violation.last)
        return IntervalOrigin(
            first_stage=grouping.first_stage[violation.first],
            last_stage=reader if violation.reader is None else grouping.last_stage[violation.last],
            reader=reader,
            again=violation.reader is not None,
            chain=chain,
            ends_in_recomputation=ends,
        )

    def _chain(self, i: int, first: int, last: int) -> tuple[tuple[tuple[int, bool], ...], bool]:
        """Follow the smaller sides of the minima from tensor `i` on."""
        self.values.clear()
        chain: list[tuple[int, bool]] = []
        while True:
            k = self.graph.node_of[i]
            pages = float(self.page_sum[i, last + 1] - self.page_sum[i, first])
            out = self.relaxation.needed_page_out.get(i)
            chain.append((i, out is not None and self.x[out] < pages))
            if self.group_of[k] >= first or not self.events.recompute[k]:
                return tuple(chain), False
            least = float(self.again_sum[k, last + 1] - self.again_sum[k, first])
            weakest = None
            for u in self.graph.inputs_of[k]:
                value = self._value(u, first, last)
                if value < least:
                    weakest, least = u, value
            if weakest is None:
                return tuple(chain), True
            i = weakest

    def _value(self, i: int, first: int, last: int) -> float:
        """Return ``F(i)`` for the interval at hand."""
        if i in self.values:
            return self.values[i]
        k = self.graph.node_of[i]
        if self.group_of[k] >= first:
            return 1.0
        value = float(self.enter[i, first])
        pages = float(self.page_sum[i, last + 1] - self.page_sum[i, first])
        out = self.relaxation.needed_page_out.get(i)
        value += pages if out is None else min(pages, float(self.x[out]))
        if self.events.recompute[k]:
            again = float(self.again_sum[k, last + 1] - self.again_sum[k, first])
            for u in self.graph.inputs_of[k]:
                if again <= 0:
                    break
                again = min(again, self._value(u, first, last))
            value += again
        self.values[i] = value
        return value
