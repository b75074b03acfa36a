"""Rounding cuts: memory rows of large tensors, with limits rounded down to a sum of sizes."""

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

    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.policy import Policy


def make_separator(
    relaxation: Relaxation, policy: Policy, is_out_of_time: Callable[[], bool]
) -> RoundingSeparator:
    """Return the separator of rounding cuts for a relaxation."""
    return RoundingSeparator(relaxation, policy.max_sums, is_out_of_time)


class RoundingSeparator:
    """Finds rounded rows of one relaxation, from at most `max_sums` sums of sizes for each row.

    With more sums, the limit is only rounded down to a multiple of the sizes' common divisor. If
    `is_out_of_time` returns True, the enumeration ends: the rows of hundreds of large tensors take
    seconds.

    Notes
    -----
    In a row ``sum(bytes[i] * kept[i]) <= limit``, the tensors of `s` bytes or more meet the limit
    without the smaller ones. Each is kept or not, so their bytes are at most the largest sum of
    some of their sizes up to the limit::

        sum(bytes[i] * kept[i] for bytes[i] >= s)  <=  largest such sum
    """

    family: ClassVar[str] = "rounding"

    def __init__(
        self,
        relaxation: Relaxation,
        max_sums: int,
        is_out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self.relaxation = relaxation
        self.max_sums = max_sums
        self.is_out_of_time = is_out_of_time
        self._rows: list[Cut] | None = None

    def rows(self) -> list[Cut]:
        """Return the rounded rows of all enforced stages, by stage; cached by the first call.

        Empty if RAM is minimized, because the limit is then a column. If time ran out, the cached
        rows remain incomplete.
        """
        if self._rows is None:
            relaxation = self.relaxation
            minimizes_sum = relaxation.problem.objective.is_sum
            stages = () if not minimizes_sum else sorted(relaxation.grouping.stage_rows)
            self._rows = [cut for t in stages for cut in self._stage_cuts(t)]
        return self._rows

    def separate(self, x: NDArray[Any], min_violation: float) -> list[Cut]:
        """Return the rounded rows that the point `x` violates by more than `min_violation`."""
        return [cut for cut in self.rows() if cut.violation(x) > min_violation]

    def restate(self, _: Cut) -> tuple[()]:
        """Return (), because each separator computes the rows of its relaxation."""
        return ()

    def _stage_cuts(self, t: int) -> Iterator[Cut]:
        """Yield the rounded rows of stage `t`, for growing sets of its largest tensors.

        The limit is the usable RAM minus the bytes of the stage's last step, rounded down to a sum
        of sizes. Rows are divided by the largest size. Sets with a trivial row, or one no tighter
        than the limit, are skipped.
        """
        relaxation = self.relaxation
        graph = relaxation.problem.working_graph
        step_tensors = {*graph.inputs_of[t], *graph.outputs_of[t]}
        limit_bytes = relaxation.problem.usable_ram_bytes - graph.step_bytes[t]
        sizes_and_columns = sorted(self._crossing_columns(t, step_tensors), reverse=True)
        if limit_bytes < 0:
            return  # the stage row is infeasible by itself
        total_bytes = 0
        for end, (size, _) in enumerate(sizes_and_columns, start=1):
            check_time_limit()
            total_bytes += size
            is_last_of_size = end == len(sizes_and_columns) or sizes_and_columns[end][0] < size
            if total_bytes <= limit_bytes or not is_last_of_size:
                continue
            if self.is_out_of_time():
                return
            reachable_bytes = largest_sum(
                [size_bytes for size_bytes, _ in sizes_and_columns[:end]],
                limit_bytes,
                self.max_sums,
            )
            if reachable_bytes < limit_bytes:
                scale = sizes_and_columns[0][0]
                terms_by_column = sorted(sizes_and_columns[:end], key=itemgetter(1))
                terms = ((-size_bytes / scale, column) for size_bytes, column in terms_by_column)
                yield Cut.from_terms(terms, lower=-reachable_bytes / scale, name=self.family)

    def _crossing_columns(self, t: int, step_tensors: set[int]) -> Iterator[tuple[int, int]]:
        """Yield (bytes, column) of keeps into the group after `t`, except of `step_tensors`."""
        relaxation = self.relaxation
        graph, grouping = relaxation.problem.working_graph, relaxation.grouping
        next_group = grouping.group_of[t] + 1
        for i, k in enumerate(graph.node_of):
            if k >= t:
                return
            if i in step_tensors or not graph.tensor_bytes[i]:
                continue
            a = relaxation.events.keep_index(i, grouping.group_of[k], next_group)
            if a is not None and (i, a) in relaxation.kept:
                yield graph.tensor_bytes[i], relaxation.kept[i, a]


def largest_sum(sizes: Sequence[int], limit: int, max_sums: int) -> int:
    """Return the largest sum of some of the `sizes`, each above 0, that is at most `limit`.

    With more than `max_sums` candidates, an upper bound: the largest multiple of the sizes'
    greatest common divisor.
    """
    divisor = math.gcd(*sizes)
    max_multiple = limit // divisor
    if max_multiple > max_sums:
        return max_multiple * divisor
    mask = (1 << (max_multiple + 1)) - 1
    sum_bits = 1  # bit b is set if b divisors are the sum of some sizes
    for size, count in Counter(sizes).items():
        remaining, multiple = count, 1
        while remaining and size * multiple <= limit:  # 1, 2, 4, ... times a size, then the rest
            sum_bits |= (sum_bits << (size // divisor * multiple)) & mask
            remaining -= multiple
            multiple = min(2 * multiple, remaining)
    return (sum_bits.bit_length() - 1) * divisor
