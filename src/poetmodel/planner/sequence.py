"""The computations and transfers of a schedule, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op, Program
from poetmodel.plan.derivation import find_copies
from poetmodel.schedule.compilation import compile_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.schedule import Schedule
    from poetmodel.schedule.homes import Homes


def moves_of(homes: Homes, schedule: Schedule) -> Program:
    """Return computations and transfers of a schedule, in order, without idle page-outs.

    First reads of state are page-ins. A page-out is idle where no page-in of the tensor follows, or
    where the tensor lies on storage already; that of a replacement never is.
    """
    whole = homes.to_steps(compile_schedule(homes, schedule).program)
    last_page_in = {i: position for position, (op, i) in enumerate(whole) if op == Op.PAGE_IN}
    stored = set(homes.stored)
    moves = []
    for position, step in enumerate(whole):
        op, i = step
        if op == Op.FREE:
            continue
        if op == Op.PAGE_OUT and i not in homes.written_back:
            if i in stored or last_page_in.get(i, -1) < position:
                continue
            stored.add(i)
        moves.append(step)
    return tuple(moves)


def unread_page_ins(homes: Homes, moves: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions of page-ins whose tensor no computation reads before it is replaced."""
    copies = find_copies(homes, moves)
    return frozenset(c.begin for c in copies if not c.reads and moves[c.begin].op == Op.PAGE_IN)


def start_at_use(homes: Homes, moves: Sequence[Instruction]) -> Program:
    """Put each page-in of `moves_of` right before the computation that reads it first.

    Page-outs, and page-ins that nothing reads, stay where the schedule has them.
    """
    unread = unread_page_ins(homes, moves)
    steps: list[Instruction] = []
    pending: dict[int, Instruction] = {}
    for position, step in enumerate(moves):
        op, index = step
        if op == Op.PAGE_IN and position not in unread:
            pending[index] = step
            continue
        needed = homes.inputs[index] if op == Op.COMPUTE else (index,)
        steps.extend(pending.pop(i) for i in sorted(needed) if i in pending)
        steps.append(step)
    return tuple(steps)
