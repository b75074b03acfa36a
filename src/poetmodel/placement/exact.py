"""The least block of a few blocks, as a mixed-integer program."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.highs import Highs, fresh_scheduler, quiet_highs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.placement.packing import Packing

MOST_PAIRS: Final = 30
"""Most pairs of blocks in RAM together that are proved; more are left to the search."""
MOST_S: Final = 2.0
"""Longest time for a proof [s]."""


def is_small(packing: Packing) -> bool:
    """Return whether there are few enough pairs for the program."""
    return sum(beside.numbers.size for beside in packing.neighbours) <= 2 * MOST_PAIRS


def _separations(packing: Packing) -> Iterator[int]:
    """Yield how far apart blocks must be [B]: of spans below the highest one, too."""
    for beside in packing.neighbours:
        yield from beside.below_bytes.tolist()
        yield from beside.above_bytes.tolist()


def exact_order(packing: Packing, *, bound: int, top: int, limit_s: float) -> list[int] | None:
    """Return an order in which placing the blocks gives the lowest top; None if none was proved.

    Of each pair in RAM together one lies below the other, so that for a binary ``b``::

        offset[i] + below[i, j] <= offset[j] + top * (1 - b)
        offset[j] + below[j, i] <= offset[i] + top * b

    and the top, from `bound` to `top`, is minimized. In the order of the offsets of a solution,
    each block fits at its offset or below.
    """
    highspy = Highs().module()
    unit = math.gcd(bound, top, *packing.height, *_separations(packing))
    solver = quiet_highs(highspy)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", max(0.0, limit_s))
    solver.setOptionValue("mip_rel_gap", 0.0)
    most = top // unit
    highest = solver.addVariable(lb=bound // unit, ub=most, obj=1.0)
    offsets: list[Any] = [
        solver.addVariable(lb=0, ub=most - height // unit) for height in packing.height
    ]
    for number, (offset, height) in enumerate(zip(offsets, packing.height, strict=True)):
        solver.addConstr(offset + height // unit <= highest)
        beside = packing.neighbours[number]
        pairs = zip(beside.numbers, beside.below_bytes, beside.above_bytes, strict=True)
        for other, below, above in pairs:
            if other > number:
                lower = solver.addBinary()
                higher = offsets[other]
                solver.addConstr(offset + int(below) // unit <= higher + most * (1 - lower))
                solver.addConstr(higher + int(above) // unit <= offset + most * lower)
    fresh_scheduler(highspy)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    return sorted(range(len(offsets)), key=lambda number: values[offsets[number].index])
