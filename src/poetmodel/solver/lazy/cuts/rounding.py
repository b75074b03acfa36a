"""Rounded memory rows: large tensors by themselves reach only some of the sums up to the budget."""

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
    relaxation: Relaxation, params: LazyParams, done: Callable[[], bool]
) -> RoundingSeparator:
    """Return the separator of this family for a relaxation."""
    return RoundingSeparator(relaxation, params.most_sums, done)


class RoundingSeparator:
    """Rounded rows of one relaxation, with at most `most_sums` sums of sizes told apart for a row.

    `done` says when the time is over: the rows of hundreds of large tensors take seconds.

    Notes
    -----
    The tensors of `s` bytes or more in a row ``sum(bytes[i] * kept[i]) <= limit`` keep the limit by
    themselves; and as each is kept or not, they take no more than the largest sum of some of their
    sizes up to the limit::

        sum(bytes[i] * kept[i], bytes[i] >= s)  <=  largest such sum
    """

    family: ClassVar[str] = "rounding"

    def __init__(
        self, relaxation: Relaxation, most_sums: int, done: Callable[[], bool] = lambda: False
    ) -> None:
        self.relaxation = relaxation
        self.most_sums = most_sums
        self.done = done
        self._rows: list[Cut] | None = None

    def rows(self) -> list[Cut]:
        """Return the statements of the enforced stage rows about tensors from each size on.

        Those found before the time is over; none where RAM is minimized, as the limit is a column.
        """
        if self._rows is None:
            relaxation = self.relaxation
            by_sum = relaxation.problem.objective.is_sum
            stages = () if not by_sum else sorted(relaxation.grouping.stage_rows)
            self._rows = [cut for q in stages for cut in self._of_stage(q)]
        return self._rows

    def separate(self, x: NDArray[Any], least: float) -> list[Cut]:
        """Return the rows that a point violates by more than `least`."""
        return [cut for cut in self.rows() if cut.violation(x) > least]

    def restate(self, _: Cut) -> tuple[()]:
        """Return nothing: every relaxation has rows of its own."""
        return ()

    def _of_stage(self, q: int) -> Iterator[Cut]:
        relaxation = self.relaxation
        graph = relaxation.problem.working_graph
        own = {*graph.inputs_of[q], *graph.outputs_of[q]}
        limit = relaxation.problem.usable_ram_bytes - graph.step_bytes[q]
        row = sorted(self._crossing(q, own), reverse=True)
        if limit < 0:
            return  # nothing fits, as the row itself says
        total = 0
        for end, (size, _) in enumerate(row, start=1):
            check_time_limit()
            total += size
            last_of_size = end == len(row) or row[end][0] < size
            if total <= limit or not last_of_size:
                continue
            if self.done():
                return
            right = largest_sum([bytes_ for bytes_, _ in row[:end]], limit, self.most_sums)
            if right < limit:
                scale = row[0][0]
                ordered = sorted(row[:end], key=itemgetter(1))
                terms = ((-bytes_ / scale, column) for bytes_, column in ordered)
                yield Cut.from_terms(terms, lower=-right / scale, name=self.family)

    def _crossing(self, q: int, own: set[int]) -> Iterator[tuple[int, int]]:
        """Yield (bytes, column) of what may cross the end of the group of stage `q`.

        Free keeps have no column; no enforced row counts them.
        """
        relaxation = self.relaxation
        graph, grouping = relaxation.problem.working_graph, relaxation.grouping
        following = grouping.group_of[q] + 1
        for i, k in enumerate(graph.node_of):
            if k >= q:
                return
            if i in own or not graph.tensor_bytes[i]:
                continue
            segment = relaxation.events.segment(i, grouping.group_of[k], following)
            if segment is not None and (i, segment) in relaxation.kept:
                yield graph.tensor_bytes[i], relaxation.kept[i, segment]


def largest_sum(sizes: Sequence[int], limit: int, most_sums: int) -> int:
    """Return the largest sum of some of the sizes (above 0) up to a limit (0 or more).

    Where it may be one of more than `most_sums` multiples of the greatest common divisor, it is the
    largest such multiple up to the limit.
    """
    divisor = math.gcd(*sizes)
    most = limit // divisor
    if most > most_sums:
        return most * divisor
    mask = (1 << (most + 1)) - 1
    sums = 1  # bit b: b divisors can be reached
    for size, count in Counter(sizes).items():
        rest, step = count, 1
        while rest and size * step <= limit:  # 1, 2, 4, ... of a size, then the rest
            sums |= (sums << (size // divisor * step)) & mask
            rest -= step
            step = min(2 * step, rest)
    return (sums.bit_length() - 1) * divisor
