"""Derive waits before uses, and frees after last uses, from the other instructions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.schedule.instructions import Instruction, Op, Program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from poetmodel.schedule.homes import Homes

_TRANSFERS: Final = (Op.PAGE_IN, Op.PAGE_OUT)


def add_waits_and_frees(
    homes: Homes, instructions: Iterable[Instruction], mode: StorageMode
) -> Program:
    """Add waits and frees to computations and transfers, so that they form a program.

    `instructions` are in program order, with first reads of state as page-ins. For ``dma`` they
    include only those waits for page-outs that these rules do not give; for ``blocking``, waits are
    removed.

    - A tensor is freed right after the last instruction that touches its copy, in ascending order,
      after the ``wait`` for its pending transfer. After a node that may operate in place, copies
      without a pending transfer are freed first. State is not freed by the node that replaces it.
    - Before a computation there is a ``wait`` for each input that is still being paged in, in the
      order of the bus. Transfers right before the computation follow the wait if they begin after
      the page-in; the bus is busy until then.
    - Right before a page-out there is a ``wait`` for a pending transfer of the same tensor.

    `check_plan` reports instructions that cannot be executed.
    """
    given_instructions = [
        instruction
        for instruction in instructions
        if mode == StorageMode.DMA or instruction.op != Op.WAIT
    ]
    freed_after = last_uses_by_position(homes, given_instructions)
    program: list[Instruction] = []
    # Transfers without a wait, by tensor, in the order of their starts.
    pending_transfers: dict[int, Op] = {}

    def insert_wait(i: int, position: int) -> None:
        """Insert a wait for tensor `i` at a position of the program, if a transfer is pending."""
        if pending_transfers.pop(i, None) is not None:
            program.insert(position, Instruction(Op.WAIT, i))

    for position, instruction in enumerate(given_instructions):
        op, index = instruction
        if op == Op.COMPUTE:
            inputs = homes.inputs[index]
            for i in [
                i
                for i, pending_op in pending_transfers.items()
                if pending_op == Op.PAGE_IN and i in inputs
            ]:
                insert_wait(i, _wait_position(program, i))
        elif op == Op.PAGE_OUT:
            insert_wait(index, len(program))
        elif op == Op.WAIT:
            pending_transfers.pop(index, None)
        program.append(instruction)
        if mode == StorageMode.DMA and op in _TRANSFERS:
            pending_transfers[index] = op
        for i in _order_frees(homes, instruction, freed_after.get(position, []), pending_transfers):
            insert_wait(i, len(program))
            program.append(Instruction(Op.FREE, i))
    return homes.collapse_first_reads(program)


def _order_frees(
    homes: Homes,
    instruction: Instruction,
    tensors: list[int],
    transferring_tensors: Collection[int],
) -> list[int]:
    """Order frees: unchanged, but tensors in transfer last after a computation perhaps in place."""
    if instruction.op != Op.COMPUTE or not homes.graph.in_place_of[instruction.index]:
        return tensors
    return sorted(tensors, key=transferring_tensors.__contains__)


def _wait_position(program: Sequence[Instruction], i: int) -> int:
    """Return the position of a wait for `i`: before the transfers that end the program."""
    position = len(program)
    while position and program[position - 1].op in _TRANSFERS and program[position - 1].index != i:
        position -= 1
    return position


@dataclass(slots=True)
class Copy:
    """One copy of a tensor, by positions in a list of instructions for `add_waits_and_frees`."""

    tensor: int
    """Index of the tensor."""
    begin: int
    """Position of the computation or page-in that makes the copy."""
    end: int
    """Position of the last instruction that reads the copy, pages it out or waits for it, else
    `begin`."""
    reads: list[int] = field(default_factory=list)
    """Positions of the computations that read the copy."""
    is_paged_out: bool = False
    """Whether the copy is paged out."""
    is_replaced: bool = False
    """Whether a replacement is written over the copy at its end."""


def find_copies(homes: Homes, instructions: Iterable[Instruction]) -> list[Copy]:
    """Return all copies of tensors that `instructions` make, in order; none of unmoved state."""
    copies: list[Copy] = []
    latest_copy_of: dict[int, Copy] = {}
    for position, (op, index) in enumerate(instructions):
        outputs: tuple[int, ...] = (index,) if op == Op.PAGE_IN else ()
        used_tensors: tuple[int, ...] = () if op == Op.PAGE_IN else (index,)
        if op == Op.COMPUTE:
            outputs, used_tensors = tuple(homes.outputs[index]), tuple(homes.inputs[index])
        for copy in [latest_copy_of[i] for i in used_tensors if i in latest_copy_of]:
            copy.end = position
            copy.is_paged_out |= op == Op.PAGE_OUT
            if op == Op.COMPUTE:
                copy.reads.append(position)
                copy.is_replaced |= copy.tensor in homes.replaced.get(index, ())
        for i in outputs:
            latest_copy_of[i] = Copy(i, position, position)
            copies.append(latest_copy_of[i])
    return copies


def last_uses_by_position(
    homes: Homes, instructions: Iterable[Instruction]
) -> dict[int, list[int]]:
    """Return the tensors whose copy each instruction uses last, or makes unused, by position.

    Copies of state that are replaced are omitted, since they are not freed.
    """
    tensors_by_position: dict[int, list[int]] = {}
    for copy in find_copies(homes, instructions):
        if not copy.is_replaced:
            tensors_by_position.setdefault(copy.end, []).append(copy.tensor)
    return {position: sorted(tensors) for position, tensors in tensors_by_position.items()}


def strip_derived_instructions(
    homes: Homes, program: Iterable[Instruction], mode: StorageMode
) -> tuple[Instruction, ...] | None:
    """Return the instructions from which `add_waits_and_frees` derives `program`, if any."""
    original = tuple(program)
    instructions = _remove_derived_instructions(homes, homes.expand_first_reads(original))
    return instructions if add_waits_and_frees(homes, instructions, mode) == original else None


def _remove_derived_instructions(
    homes: Homes, program: Sequence[Instruction]
) -> tuple[Instruction, ...]:
    """Return a program without frees, and without waits except underivable ones for page-outs."""
    instructions: list[Instruction] = []
    length_at_last_use: dict[int, int] = {}
    paged_out: set[int] = set()
    for position, instruction in enumerate(program):
        op, index = instruction
        if op == Op.FREE:
            continue
        if op == Op.WAIT and (
            index not in paged_out
            or (
                length_at_last_use.get(index) == len(instructions)
                and _next_needs_wait(program, position)
            )
        ):
            paged_out.discard(index)
            continue
        instructions.append(instruction)
        if op == Op.COMPUTE:
            operands = (*homes.inputs[index], *homes.outputs[index])
            length_at_last_use.update(dict.fromkeys(operands, len(instructions)))
            continue
        length_at_last_use[index] = len(instructions)
        if op == Op.PAGE_OUT:
            paged_out.add(index)
        else:
            paged_out.discard(index)
    return tuple(instructions)


def _next_needs_wait(program: Sequence[Instruction], position: int) -> bool:
    """Return whether the instruction after a wait frees or pages out the same tensor."""
    i = program[position].index
    dependents = (Instruction(Op.FREE, i), Instruction(Op.PAGE_OUT, i))
    return position + 1 < len(program) and program[position + 1] in dependents
