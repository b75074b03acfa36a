"""Content of RAM over time: all copies of tensors and workspaces of a plan."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.plan.simulation import check_identity
from poetmodel.schedule.machine import Machine, Origin, Stay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan

__all__ = ["Origin", "Stay", "list_stays", "ram_in_use"]


def list_stays(graph: Graph, plan: Plan) -> tuple[Stay, ...]:
    """Return all copies and workspaces of a valid plan, in the order in which they are made.

    An output in place shares memory with its input, as does a replacement with its state. Each byte
    counts for only one of them, so that the sum at each instruction is the RAM that `check_plan`
    finds.

    Raises
    ------
    PlanError
        If the plan is for another graph.
    """
    check_identity(graph, plan)
    machine = Machine(plan.homes(graph), plan.program, mode=plan.mode)
    machine.execute()
    return tuple(machine.copies)


def ram_in_use(intervals: Iterable[Stay], instructions: int) -> tuple[tuple[int, int], ...]:
    """Return the RAM in use during and after each instruction [B]."""
    change = [0] * (2 * instructions + 2)  # during and after each instruction, and the end
    for stay in intervals:
        change[2 * max(stay.begin, 0)] += stay.bytes
        last = min(2 * stay.end + 1, 2 * instructions)
        change[last] -= stay.bytes - stay.given_bytes
        if stay.given_at is not None:
            change[2 * stay.given_at] -= stay.given_bytes
    levels = list(accumulate(change))
    return tuple(zip(levels[0 : 2 * instructions : 2], levels[1::2], strict=False))
