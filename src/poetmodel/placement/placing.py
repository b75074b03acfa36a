"""`place`: offsets for all that a plan has in RAM, in one block as small as can be found."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.errors import PlanError
from poetmodel.placement.lifetimes import Block, blocks_of, lower_bound_bytes
from poetmodel.placement.packing import Packing, search
from poetmodel.plan import Plan, check_plan
from poetmodel.plan.alignment import ALIGNMENT, check_alignment
from poetmodel.plan.arena import Arena, CopyOffset
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.graph import Graph


def place(
    graph: Graph,
    plan: Plan,
    *,
    alignment: int = ALIGNMENT,
    time_limit: float = 10.0,
    seed: int = 0,
) -> Arena:
    """Give every copy of every tensor in a plan, and every workspace, a fixed offset.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A valid plan of it.
    alignment : int
        Offsets are multiples of this power of two [B].
    time_limit : float
        Wall time after which the best found is returned [s].
    seed : int
        Seed of the search: the same one gives the same offsets, unless the time was too short.

    Returns
    -------
    Arena
        Offsets, the size of the block, and its lower bound. It may exceed the budget of the plan.

    Raises
    ------
    PlanError
        If the plan is not valid, or the alignment no power of two.
    """
    check_alignment(alignment)
    check = check_plan(graph, None, plan, ram_budget_bytes=MAX_BYTES)
    if check.violations:
        raise PlanError(check.violations)
    blocks = blocks_of(graph, plan, alignment)
    offsets, size, bound = place_blocks(blocks, len(plan.program), time_limit=time_limit, seed=seed)
    placed = zip(blocks, offsets, strict=True)
    return Arena(
        bytes=size,
        lower_bound_bytes=bound,
        alignment=alignment,
        offsets=tuple(sorted(CopyOffset(*of, at) for block, at in placed for of in block.contents)),
    )


def place_blocks(
    blocks: Sequence[Block], length: int, *, time_limit: float, seed: int = 0
) -> tuple[list[int], int, int]:
    """Return offsets of blocks, the size of what holds them, and a lower bound on it [B].

    They live in a program of this length; `time_limit` and `seed` are as for `place`.
    """
    bound = lower_bound_bytes(blocks, length)
    throughout = [k for k, block in enumerate(blocks) if block.is_throughout]
    others = [k for k, block in enumerate(blocks) if not block.is_throughout]
    # What is there throughout lies at the bottom: anywhere else it would only cut RAM in two.
    sizes = (blocks[k].spans[0].bytes for k in throughout)
    *offsets, base = accumulate(sizes, initial=0)
    until_s = time.monotonic() + time_limit
    moving = [blocks[k] for k in others]
    packing = Packing.of(moving)
    above = search(moving, packing, bound=bound - base, until_s=until_s, seed=seed)
    offset_of = dict(zip((*throughout, *others), (*offsets, *(above + base).tolist()), strict=True))
    return [offset_of[k] for k in range(len(blocks))], base + packing.top(above), bound
