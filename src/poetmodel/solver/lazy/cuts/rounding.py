"""Rounded memory rows: sums of large tensors reach only some values up to the budget."""

from __future__ import annotations

import math
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from poetmodel.clock import check_time_limit
from poetmodel.solver.lazy.cuts import Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.params import LazyParams
    from poetmodel.solver.lazy.relaxation import Relaxation


def separator(
    relaxation: Relaxation, params: LazyParams, is_out_of_time: Callable[[], bool]
) -> RoundingSeparator:
    """Return the separator of this family for a relaxation."""
    return RoundingSeparator(relaxation, params.max_sums, is_out_of_time)


class RoundingSeparator:
    """Rounded rows of one relaxation, from at most `max_sums` distinct sums of sizes for each row.

    `is_out_of_time` ends the enumeration: the rows of hundreds of large tensors take seconds.

    Notes
    -----
    The tensors of `s` bytes or more in a row ``sum(bytes[i] * kept[i]) <= limit`` meet the limit by
    themselves. Each is kept or not, so their bytes are at most the largest sum of some of their
    sizes up to the limit::

    sum(bytes[i] * kept[i], bytes[i] >= s)  <=  largest such sum
    """

    family: ClassVar[str] = "rounding"

    def __init__(
        self,
        relaxation: Relaxation,
        max_sums: int,
        is_out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        """Store the limits of the enumeration; rows are computed on first use."""
        self.relaxation = relaxation
        self.max_sums = max_sums
        self.is_out_of_time = is_out_of_time
        self._rows: list[Cut] | None = None

    def rows(self) -> list[Cut]:
        """Return the rounded rows of the enforced stage rows, one for each minimum size.

        Stops when time runs out. Empty if RAM is minimized, because the limit is then a column.
        """
        if self._rows is None:
            relaxation = self.relaxation
            by_sum = relaxation.problem.objective.is_sum
            stages = () if not by_sum else sorted(relaxation.grouping.stage_rows)
            self._rows = [cut for q in stages for cut in self._stage_cuts(q)]
        return self._rows

    def separate(self, x: NDArray[Any], least: float) -> list[Cut]:
        """Return the rows that a point violates by more than `least`."""
        return [cut for cut in self.rows() if cut.violation(x) > least]

    def restate(self, _: Cut) -> tuple[()]:
        """Return nothing, because every relaxation computes its own rows."""
        return ()

    def _stage_cuts(self, q: int) -> Iterator[Cut]:
        """Yield the rounded rows of one stage row, for growing sets of its largest tensors."""
        relaxation = self.relaxation
        graph = relaxation.problem.working_graph
        step_tensors = {*graph.inputs_of[q], *graph.outputs_of[q]}
        limit = relaxation.problem.usable_ram_bytes - graph.step_bytes[q]
        row = sorted(self._crossing_columns(q, step_tensors), reverse=True)
        if limit < 0:
            return  # the stage row is infeasible by itself
        total = 0
        for end, (size, _) in enumerate(row, start=1):
            check_time_limit()
            total += size
            last_of_size = end == len(row) or row[end][0] < size
            if total <= limit or not last_of_size:
                continue
            if self.is_out_of_time():
                return
            upper_limit = largest_sum(
                [size_bytes for size_bytes, _ in row[:end]], limit, self.max_sums
            )
            if upper_limit < limit:
                scale = row[0][0]
                terms_by_column = sorted(row[:end], key=itemgetter(1))
                terms = ((-size_bytes / scale, column) for size_bytes, column in terms_by_column)
                yield Cut.from_terms(terms, lower=-upper_limit / scale, name=self.family)

    def _crossing_columns(self, q: int, step_tensors: set[int]) -> Iterator[tuple[int, int]]:
        """Yield (bytes, column) of tensors that may cross the end of the group of stage `q`.

        Tensors that are kept for free have no column, and no enforced row counts them.
        """
        relaxation = self.relaxation
        graph, grouping = relaxation.problem.working_graph, relaxation.grouping
        next_group = grouping.group_of[q] + 1
        for i, k in enumerate(graph.node_of):
            if k >= q:
                return
            if i in step_tensors or not graph.tensor_bytes[i]:
                continue
            segment = relaxation.events.segment(i, grouping.group_of[k], next_group)
            if segment is not None and (i, segment) in relaxation.kept:
                yield graph.tensor_bytes[i], relaxation.kept[i, segment]


def largest_sum(sizes: Sequence[int], limit: int, max_sums: int) -> int:
    """Return the largest sum of some of the sizes (above 0) that is at most a limit (0 or more).

    If the sum could be one of more than `max_sums` multiples of the greatest common divisor, return
    the largest multiple up to the limit instead, which is an upper bound.
    """
    divisor = math.gcd(*sizes)
    max_multiple = limit // divisor
    if max_multiple > max_sums:
        return max_multiple * divisor
    mask = (1 << (max_multiple + 1)) - 1
    sums = 1  # bit b: b divisors can be reached
    for size, count in Counter(sizes).items():
        remaining, multiple = count, 1
        while remaining and size * multiple <= limit:  # 1, 2, 4, ... of a size, then the rest
            sums |= (sums << (size // divisor * multiple)) & mask
            remaining -= multiple
            multiple = min(2 * multiple, remaining)
    return (sums.bit_length() - 1) * divisor
