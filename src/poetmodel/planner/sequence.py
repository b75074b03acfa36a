"""Extract computations and transfers of a schedule, in execution order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op, Program
from poetmodel.plan.derivation import find_copies
from poetmodel.schedule.compilation import compile_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.schedule import Schedule
    from poetmodel.schedule.homes import Homes


def computations_and_transfers(homes: Homes, schedule: Schedule) -> Program:
    """Return computations and transfers of a schedule in order, without frees and idle page-outs.

    First reads of state are page-ins. A page-out is idle if no page-in of the tensor follows, or if
    the tensor is already on storage. The page-out of a state replacement is never idle.
    """
    program = homes.to_steps(compile_schedule(homes, schedule).program)
    last_page_in = {i: position for position, (op, i) in enumerate(program) if op == Op.PAGE_IN}
    on_storage = set(homes.stored)
    moves = []
    for position, step in enumerate(program):
        op, i = step
        if op == Op.FREE:
            continue
        if op == Op.PAGE_OUT and i not in homes.written_back:
            if i in on_storage or last_page_in.get(i, -1) < position:
                continue
            on_storage.add(i)
        moves.append(step)
    return tuple(moves)


def unread_page_ins(homes: Homes, moves: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions of page-ins whose tensor no computation reads before its replacement."""
    copies = find_copies(homes, moves)
    return frozenset(c.begin for c in copies if not c.reads and moves[c.begin].op == Op.PAGE_IN)


def page_in_at_use(homes: Homes, moves: Sequence[Instruction]) -> Program:
    """Move each page-in right before the computation that first reads it.

    `moves` is the result of `computations_and_transfers`. Page-outs and page-ins without a reader
    stay in place.
    """
    unread_positions = unread_page_ins(homes, moves)
    steps: list[Instruction] = []
    waiting_page_ins: dict[int, Instruction] = {}
    for position, step in enumerate(moves):
        op, index = step
        if op == Op.PAGE_IN and position not in unread_positions:
            waiting_page_ins[index] = step
            continue
        tensors = homes.inputs[index] if op == Op.COMPUTE else (index,)
        steps.extend(waiting_page_ins.pop(i) for i in sorted(tensors) if i in waiting_page_ins)
        steps.append(step)
    return tuple(steps)
