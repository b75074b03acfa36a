"""Interval cuts: a linear relaxation must not spread a recomputation thinly over groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.solver.lazy.relaxation import Cut, Origin
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.solver.lazy.relaxation import Relaxation

VIOLATED: Final = 1e-3
"""Least violation of a cut that is worth adding."""
PER_ROUND: Final = 400
"""Most cuts that are added at once."""


def separate(relaxation: Relaxation, x: NDArray[np.float64]) -> list[Cut]:
    """Return interval cuts that a point violates, the most violated first.

    Parameters
    ----------
    relaxation : Relaxation
        The relaxation.
    x : ndarray, shape (n_columns,)
        A solution of its linear relaxation.

    Notes
    -----
    To be in RAM in group `l2`, a tensor has crossed into `l1`, or was paged in within ``[l1, l2]``,
    or was recomputed there, for which each of its node's inputs was there in its turn. So for every
    integer point, with `F` of a tensor first made at or after `l1` equal to one::

        F(i) = kept(i into l1) + min(sum of M_in[i,l], paged_out[i])
               + min(sum of R[k,l], min of F(u) over inputs u of k),    k = node(i), l in [l1, l2]

    ``F(i) >= 1`` where the first computation of a reader lies in `l2`, ``F(i) >= R[j,l2]`` for a
    recomputed reader `j`. Each minimum is replaced by its smaller side at `x`, which keeps the row
    linear and valid.
    """
    return _Separator(relaxation, x).run()


@dataclass(slots=True)
class _Found:
    violation: float
    tensor: int
    first: int
    last: int
    reader: int | None
    """A recomputed reader, or None for a direct use."""


class _Separator:
    def __init__(self, relaxation: Relaxation, x: NDArray[np.float64]) -> None:
        self.relaxation = relaxation
        self.x = x
        self.graph = relaxation.problem.graph
        self.events = relaxation.events
        self.group_of = self.events.group_of
        self.n_groups = len(relaxation.grouping.last_stage)
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
                sure = (i, a) in self.relaxation.model.group_events.kept
                value = self.x[column] if column is not None else float(sure)
                enter[i, begin : end + 1] = value
                begin = end + 1
        return enter

    def _cumulated(self, columns: dict[tuple[int, int], int], count: int) -> NDArray[np.float64]:
        """Return sums over the groups before each, shape (count, groups + 1)."""
        values = np.zeros((count, self.n_groups + 1))
        for (group, index), column in columns.items():
            values[index, group + 1] = self.x[column]
        return np.cumsum(values, axis=1)

    def run(self) -> list[Cut]:
        found: list[_Found] = []
        readers: dict[int, list[int]] = {}
        for j in range(len(self.graph.nodes)):
            readers.setdefault(self.group_of[j], []).append(j)
        again: dict[int, list[int]] = {}
        for (group, j), column in self.relaxation.recomputed.items():
            if self.x[column] > VIOLATED:
                again.setdefault(group, []).append(j)
        for last in range(2, self.n_groups):
            check_time_limit()
            supply = self._supply(last)
            found += self._at(last, supply, readers.get(last, []), again.get(last, []))
        found.sort(key=lambda entry: -entry.violation)
        cuts: dict[tuple[tuple[int, float], ...], Cut] = {}
        for entry in found[: 2 * PER_ROUND]:
            cut = self._state(entry)
            if cut is not None:
                cuts.setdefault(cut.terms, cut)
            if len(cuts) >= PER_ROUND:
                break
        return list(cuts.values())

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
                out = self.relaxation.paged_out.get(i)
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

    def _at(
        self,
        last: int,
        supply: dict[int, NDArray[np.float64]],
        readers: list[int],
        again: list[int],
    ) -> list[_Found]:
        found = []
        direct = {i for j in readers for i in self.graph.inputs_of[j] if i in supply}
        for i in direct:
            missing = 1.0 - supply[i]
            first = int(missing.argmax())
            if missing[first] > VIOLATED:
                found.append(_Found(float(missing[first]), i, first + 1, last, None))
        for j in again:
            value = self.x[self.relaxation.recomputed[last, j]]
            for i in self.graph.inputs_of[j]:
                if i in direct or i not in supply:
                    continue
                missing = value - supply[i]
                first = int(missing.argmax())
                if missing[first] > VIOLATED:
                    found.append(_Found(float(missing[first]), i, first + 1, last, j))
        return found

    def _state(self, entry: _Found) -> Cut | None:
        self.values.clear()
        grouping = self.relaxation.grouping
        chain, ends = self._chain(entry.tensor, entry.first, entry.last)
        direct = entry.reader is None
        reader = entry.reader if entry.reader is not None else self._first_reader(entry)
        origin = Origin(
            first_stage=grouping.first_stage[entry.first],
            last_stage=reader if direct else grouping.last_stage[entry.last],
            reader=reader,
            again=not direct,
            chain=chain,
            ends_in_recomputation=ends,
        )
        return restate(self.relaxation, origin)

    def _first_reader(self, entry: _Found) -> int:
        """Return the first reader of the tensor in the last group of the interval."""
        users = self.graph.users_of[entry.tensor]
        return next(j for j in users if self.group_of[j] == entry.last)

    def _chain(self, i: int, first: int, last: int) -> tuple[tuple[tuple[int, bool], ...], bool]:
        """Follow the smaller sides of the minima from tensor `i` on."""
        chain: list[tuple[int, bool]] = []
        while True:
            k = self.graph.node_of[i]
            pages = float(self.page_sum[i, last + 1] - self.page_sum[i, first])
            out = self.relaxation.paged_out.get(i)
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
        """Return ``F(i)`` for one interval."""
        if i not in self.values:
            self.values[i] = self._value_anew(i, first, last)
        return self.values[i]

    def _value_anew(self, i: int, first: int, last: int) -> float:
        k = self.graph.node_of[i]
        if self.group_of[k] >= first:
            return 1.0
        value = float(self.enter[i, first])
        pages = float(self.page_sum[i, last + 1] - self.page_sum[i, first])
        out = self.relaxation.paged_out.get(i)
        value += pages if out is None else min(pages, float(self.x[out]))
        if self.events.recompute[k]:
            again = float(self.again_sum[k, last + 1] - self.again_sum[k, first])
            for u in self.graph.inputs_of[k]:
                if again <= 0:
                    break
                again = min(again, self._value(u, first, last))
            value += again
        return value


def restate(relaxation: Relaxation, origin: Origin) -> Cut | None:
    """Return an interval cut in the columns of a relaxation, or None where it says nothing.

    Groups only get finer while rows are added, so an interval of stages stays one of groups, and
    the row, whichever sides of its minima it takes, stays valid.
    """
    events = relaxation.events
    group_of, node_of = events.group_of, relaxation.problem.graph.node_of
    first, last = group_of[origin.first_stage], group_of[origin.last_stage]
    terms: dict[int, float] = {}
    right = 1.0
    if origin.again:
        column = relaxation.recomputed.get((last, origin.reader))
        if column is None:
            return None
        terms[column] = -1.0
        right = 0.0
    for place, (i, by_page_out) in enumerate(origin.chain):
        k = node_of[i]
        if group_of[k] >= first:
            return None
        right -= _add_entering(relaxation, i, first, terms)
        _add_pages(relaxation, i, (first, last), terms, by_page_out=by_page_out)
        ends = place == len(origin.chain) - 1
        if ends and origin.ends_in_recomputation:
            for group in range(first, last + 1):
                _add(terms, relaxation.recomputed.get((group, k)))
    if right <= 0 and not origin.again:
        return None
    return Cut(tuple(sorted(terms.items())), right, origin)


def _add(terms: dict[int, float], column: int | None) -> None:
    if column is not None:
        terms[column] = terms.get(column, 0.0) + 1.0


def _add_entering(relaxation: Relaxation, i: int, first: int, terms: dict[int, float]) -> float:
    """Add keeping tensor `i` into group `first`; return it where it is a constant."""
    events = relaxation.events
    segment = events.segment(i, events.group_of[relaxation.problem.graph.node_of[i]], first)
    if segment is None:
        return 0.0
    if (i, segment) in relaxation.model.group_events.kept:
        return 1.0
    _add(terms, relaxation.kept.get((i, segment)))
    return 0.0


def _add_pages(
    relaxation: Relaxation,
    i: int,
    interval: tuple[int, int],
    terms: dict[int, float],
    *,
    by_page_out: bool,
) -> None:
    out = relaxation.paged_out.get(i)
    if by_page_out and out is not None:
        _add(terms, out)
        return
    for group in range(interval[0], interval[1] + 1):
        _add(terms, relaxation.paged_in.get((group, i)))
