"""Extract the actions of a schedule in execution order; page-ins can then move to their readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op, Program
from poetmodel.plan.derivation import find_copies
from poetmodel.schedule.compilation import compile_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.schedule import Schedule
    from poetmodel.schedule.homes import Homes


def extract_actions(homes: Homes, schedule: Schedule) -> Program:
    """Return computations and transfers of a schedule in execution order, without idle page-outs.

    A page-out is idle if no page-in of the tensor follows or the tensor is on storage already.
    """
    program = homes.expand_first_reads(compile_schedule(homes, schedule).program)
    last_page_in = {i: position for position, (op, i) in enumerate(program) if op == Op.PAGE_IN}
    stored_tensors = set(homes.stored)
    actions = []
    for position, instruction in enumerate(program):
        op, i = instruction
        if op == Op.FREE:
            continue
        if op == Op.PAGE_OUT and i not in homes.written_back:
            if i in stored_tensors or last_page_in.get(i, -1) < position:
                continue
            stored_tensors.add(i)
        actions.append(instruction)
    return tuple(actions)


def find_unread_page_ins(homes: Homes, actions: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions of page-ins whose copy no computation reads; `actions` has no frees."""
    copies = find_copies(homes, actions)
    return frozenset(
        copy.begin for copy in copies if not copy.reads and actions[copy.begin].op == Op.PAGE_IN
    )


def move_page_ins_to_readers(homes: Homes, actions: Sequence[Instruction]) -> Program:
    """Return the actions with each page-in right before the first reader of its copy."""
    unread_positions = find_unread_page_ins(homes, actions)
    instructions: list[Instruction] = []
    deferred_page_ins: dict[int, Instruction] = {}
    for position, instruction in enumerate(actions):
        op, index = instruction
        if op == Op.PAGE_IN and position not in unread_positions:
            deferred_page_ins[index] = instruction
            continue
        read_tensors = homes.inputs[index] if op == Op.COMPUTE else (index,)
        instructions.extend(
            deferred_page_ins.pop(i) for i in sorted(read_tensors) if i in deferred_page_ins
        )
        instructions.append(instruction)
    return tuple(instructions)
