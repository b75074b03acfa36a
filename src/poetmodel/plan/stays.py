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

    Resident state comes first. An output in place shares bytes with its input: they count for the
    input before this computation, and for the output from it on. So `ram_in_use` of all stays is
    the RAM that `check_plan` returns. A replacement has no stay of its own:
    its memory is the stay of its state tensor, or memory-mapped storage. Rules and limits are not
    checked.

    Raises
    ------
    PlanError
        If the plan is for another graph.
    TimeLimitError
        If a time limit of the calling context passes.
    """
    check_identity(graph, plan)
    machine = Machine(plan.homes(graph), plan.program, mode=plan.mode)
    machine.execute()
    return tuple(machine.copies)


def ram_in_use(stays: Iterable[Stay], n_instructions: int) -> tuple[tuple[int, int], ...]:
    """Return the RAM of `stays` as a pair (during, after) for each instruction of a program [B].

    During an instruction, the stays that begin and those that end there are in RAM together.
    """
    # One entry during, and one after, each instruction; two at the end.
    changes = [0] * (2 * n_instructions + 2)
    for stay in stays:
        changes[2 * max(stay.begin, 0)] += stay.bytes
        end_index = min(2 * stay.end + 1, 2 * n_instructions)
        changes[end_index] -= stay.bytes - stay.overwritten_bytes
        if stay.overwritten_at is not None:
            changes[2 * stay.overwritten_at] -= stay.overwritten_bytes
    levels = list(accumulate(changes))
    return tuple(zip(levels[0 : 2 * n_instructions : 2], levels[1::2], strict=False))
