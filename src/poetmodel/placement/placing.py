"""Assign offsets to all tensors and workspaces of a plan, in a small arena."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import PlanError
from poetmodel.placement.lifetimes import Block, list_blocks, lower_bound_bytes
from poetmodel.placement.packing import PackingProblem, search_offsets
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
    """Assign a fixed offset to each copy of each tensor in a plan, and to each workspace.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A valid plan of `graph`.
    alignment : int
        Offsets are multiples of this power of two [B].
    time_limit : float
        Maximum wall time of the search, which returns the offsets of its smallest arena [s]. A
        first, greedy placement is completed in any case.
    seed : int
        Seed of the search. Equal seeds return equal offsets unless the time limit stops the search.

    Returns
    -------
    Arena
        Offsets, the size of the arena, and a lower bound on it. The size may exceed the budget of
        the plan.

    Raises
    ------
    PlanError
        If the plan is not valid (limits are not checked) or is for another graph, or if the
        alignment is not a power of two.
    TimeLimitError
        If a time limit of the calling context passes.
    """
    check_alignment(alignment)
    check = check_plan(graph, None, plan, ram_budget_bytes=MAX_BYTES)
    if check.violations:
        raise PlanError(check.violations)
    blocks = list_blocks(graph, plan, alignment)
    offsets, size, bound = place_blocks(blocks, len(plan.program), time_limit=time_limit, seed=seed)
    placed_blocks = zip(blocks, offsets, strict=True)
    return Arena(
        bytes=size,
        lower_bound_bytes=bound,
        alignment=alignment,
        offsets=tuple(
            sorted(
                CopyOffset(*content, offset)
                for block, offset in placed_blocks
                for content in block.contents
            )
        ),
    )


class PlacedBlocks(NamedTuple):
    """The offset of each block, the size of the arena, and a lower bound on this size [B]."""

    offsets: list[int]
    bytes: int
    lower_bound_bytes: int


def place_blocks(
    blocks: Sequence[Block], length: int, *, time_limit: float, seed: int = 0
) -> PlacedBlocks:
    """Place resident blocks, in their order, below all others. `length` is that of the program."""
    bound = lower_bound_bytes(blocks, length)
    resident_indices = [k for k, block in enumerate(blocks) if block.is_resident]
    temporary_indices = [k for k, block in enumerate(blocks) if not block.is_resident]
    # Resident blocks have the lowest offsets: elsewhere they would only divide the free memory.
    sizes = (blocks[k].spans[0].bytes for k in resident_indices)
    *resident_offsets, resident_bytes = accumulate(sizes, initial=0)
    until_s = time.monotonic() + time_limit
    temporary_blocks = [blocks[k] for k in temporary_indices]
    problem = PackingProblem.from_blocks(temporary_blocks)
    temporary_offsets = search_offsets(
        temporary_blocks, problem, bound=bound - resident_bytes, until_s=until_s, seed=seed
    )
    offset_of = dict(
        zip(
            (*resident_indices, *temporary_indices),
            (*resident_offsets, *(temporary_offsets + resident_bytes).tolist()),
            strict=True,
        )
    )
    return PlacedBlocks(
        [offset_of[k] for k in range(len(blocks))],
        resident_bytes + problem.max_end(temporary_offsets),
        bound,
    )
