"""Rounded memory rows: large tensors by themselves reach only some of the sums up to the budget."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from poetmodel.solver.lazy.relaxation import Cut
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.relaxation import Relaxation

MOST_SUMS: Final = 1 << 20
"""Most sums that are told apart, in greatest common divisors; beyond them only those count."""


def rounded_rows(relaxation: Relaxation, done: Callable[[], bool] = lambda: False) -> list[Cut]:
    """Return what the enforced stage rows say of their tensors from each size on.

    Parameters
    ----------
    relaxation : Relaxation
        The relaxation.
    done : callable
        Says when the time is over: the rows of hundreds of large tensors take seconds.

    Returns
    -------
    list of Cut
        Those found before `done`, without an origin: a finer relaxation has its own.

    Notes
    -----
    The tensors of `s` bytes or more in a row ``sum(bytes[i] * kept[i]) <= limit`` keep the limit by
    themselves; and as each is kept or not, they take no more than the largest sum of some of their
    sizes up to the limit::

        sum(bytes[i] * kept[i], bytes[i] >= s)  <=  largest such sum
    """
    if not relaxation.problem.objective.is_sum:
        return []
    stages = sorted(relaxation.grouping.stage_rows)
    return [cut for q in stages for cut in _of_stage(relaxation, q, done)]


def _of_stage(relaxation: Relaxation, q: int, done: Callable[[], bool]) -> Iterator[Cut]:
    graph = relaxation.problem.graph
    own = {*graph.inputs_of[q], *graph.outputs_of[q]}
    limit = relaxation.problem.usable_ram_bytes - graph.nodes[q].workspace_bytes
    limit -= sum(graph.tensor_bytes[i] for i in own)
    row = sorted(_crossing(relaxation, q, own), reverse=True)
    if limit < 0:
        return  # nothing fits, as the row itself says
    total = 0
    for end, (size, _) in enumerate(row, start=1):
        check_time_limit()
        total += size
        last_of_size = end == len(row) or row[end][0] < size
        if total <= limit or not last_of_size:
            continue
        if done():
            return
        right = largest_sum([bytes_ for bytes_, _ in row[:end]], limit)
        if right < limit:
            scale = row[0][0]
            terms = sorted((column, -bytes_ / scale) for bytes_, column in row[:end])
            yield Cut(tuple(terms), -right / scale)


def _crossing(relaxation: Relaxation, q: int, own: set[int]) -> Iterator[tuple[int, int]]:
    """Yield (bytes, column) of what may cross the end of the group of stage `q`.

    Free keeps have no column; no enforced row counts them.
    """
    graph, grouping = relaxation.problem.graph, relaxation.grouping
    following = grouping.group_of[q] + 1
    for i, k in enumerate(graph.node_of):
        if k >= q:
            return
        if i in own or not graph.tensor_bytes[i]:
            continue
        segment = relaxation.events.segment(i, grouping.group_of[k], following)
        if segment is not None and (i, segment) in relaxation.kept:
            yield graph.tensor_bytes[i], relaxation.kept[i, segment]


def largest_sum(sizes: Sequence[int], limit: int) -> int:
    """Return the largest sum of some of the sizes up to a limit.

    Parameters
    ----------
    sizes : sequence of int
        Above 0.
    limit : int
        0 or more.

    Returns
    -------
    int
        That sum, or, where there may be more than `MOST_SUMS`, the largest multiple of the greatest
        common divisor up to the limit.
    """
    divisor = math.gcd(*sizes)
    most = limit // divisor
    if most > MOST_SUMS:
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


def separate_rounded(cuts: Sequence[Cut], x: NDArray, least: float) -> list[Cut]:  # type: ignore[type-arg]
    """Return the rows that a point violates by more than `least`."""
    return [
        cut
        for cut in cuts
        if cut.right - sum(value * x[column] for column, value in cut.terms) > least
    ]
