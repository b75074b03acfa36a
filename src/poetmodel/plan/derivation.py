"""Instructions that follow from the others: waits before a use, and frees after the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.schedule.instructions import Instruction, Op, Program

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from poetmodel.schedule.homes import Homes

_TRANSFERS: Final = (Op.PAGE_IN, Op.PAGE_OUT)


def with_waits_and_frees(homes: Homes, steps: Iterable[Instruction], mode: StorageMode) -> Program:
    """Complete a list of computations and transfers to a program.

    `steps` are in program order, with first reads as page-ins; for ``dma`` they hold the ``wait i``
    of a page-out whose tensor is to be released later than right after its last use, or is to be at
    rest before that, but no other waits and no frees. Programs for ``blocking`` need no waits, and
    get none.

    A copy of a tensor lives from the instruction that makes it (a computation, a page-in) to the
    last step that touches it (a computation or page-out that reads it, a given ``wait``) before the
    next copy is made; what nothing touches is gone right after it is made. A transfer is waited for
    before the first instruction that needs it done. The rules, by which the result is unique:

    - Right after a step, every tensor is freed whose copy it is the last to touch, in ascending
      order; where a transfer of that copy is still under way, its ``wait`` comes right before.
      After a node that may operate in place, copies without a transfer under way go first.
    - State is not freed by the node that replaces it: the replacement is in its place.
    - Before a computation there is a ``wait`` for each input that is still being paged in, in the
      order in which their transfers began. Transfers that begin after that one, right before the
      computation, follow the wait; they begin no later for it, as the bus is busy until then.
    - Right before a page-out there is a ``wait`` for a transfer of the same tensor under way.
    - A transfer is under way from its start to its ``wait``, given or derived.

    Steps that cannot be executed are completed by the same rules; `check_plan` finds them.
    """
    given = [step for step in steps if mode == StorageMode.DMA or step.op != Op.WAIT]
    ends = ends_of_copies(homes, given)
    program: list[Instruction] = []
    under_way: dict[int, Op] = {}  # transfers that nothing has waited for, as they began

    def wait(i: int, position: int) -> None:
        if under_way.pop(i, None) is not None:
            program.insert(position, Instruction(Op.WAIT, i))

    for position, step in enumerate(given):
        op, index = step
        if op == Op.COMPUTE:
            inputs = homes.inputs[index]
            for i in [i for i, way in under_way.items() if way == Op.PAGE_IN and i in inputs]:
                wait(i, _before_later_transfers(program, i))
        elif op == Op.PAGE_OUT:
            wait(index, len(program))
        elif op == Op.WAIT:
            under_way.pop(index, None)
        program.append(step)
        if mode == StorageMode.DMA and op in _TRANSFERS:
            under_way[index] = op
        for i in _in_order(homes, step, ends.get(position, []), under_way):
            wait(i, len(program))
            program.append(Instruction(Op.FREE, i))
    return homes.from_steps(program)


def _in_order(
    homes: Homes, step: Instruction, gone: list[int], under_way: Collection[int]
) -> list[int]:
    """Return the order in which a step frees tensors, of which some are under way."""
    if step.op != Op.COMPUTE or not homes.graph.in_place_of[step.index]:
        return gone
    return sorted(gone, key=under_way.__contains__)


def _before_later_transfers(program: Sequence[Instruction], i: int) -> int:
    """Return the place before the transfers at the end that follow the last one of tensor `i`."""
    position = len(program)
    while position and program[position - 1].op in _TRANSFERS and program[position - 1].index != i:
        position -= 1
    return position


@dataclass(slots=True)
class Copy:
    """One copy of a tensor, by places in a list of steps as `with_waits_and_frees` takes it."""

    tensor: int
    begin: int
    """The computation or page-in that makes it."""
    end: int
    """The last step that touches it; that which makes it where none does."""
    reads: list[int] = field(default_factory=list)
    """The computations that read it."""
    paged_out: bool = False
    replaced: bool = False
    """Whether its end is a computation that writes another value over it."""


def copies_of(homes: Homes, steps: Iterable[Instruction]) -> list[Copy]:
    """Return all copies that some steps make, in order."""
    copies: list[Copy] = []
    latest: dict[int, Copy] = {}
    for position, (op, index) in enumerate(steps):
        written: tuple[int, ...] = (index,) if op == Op.PAGE_IN else ()
        touched: tuple[int, ...] = () if op == Op.PAGE_IN else (index,)
        if op == Op.COMPUTE:
            written, touched = tuple(homes.outputs[index]), tuple(homes.inputs[index])
        for copy in [latest[i] for i in touched if i in latest]:
            copy.end = position
            copy.paged_out |= op == Op.PAGE_OUT
            if op == Op.COMPUTE:
                copy.reads.append(position)
                copy.replaced |= copy.tensor in homes.replaced.get(index, ())
        for i in written:
            latest[i] = Copy(i, position, position)
            copies.append(latest[i])
    return copies


def ends_of_copies(homes: Homes, steps: Iterable[Instruction]) -> dict[int, list[int]]:
    """Return, by place, the tensors whose copy that step is the last to touch, ascending.

    Copies of state that are replaced do not end in a free, and are left out.
    """
    ends: dict[int, list[int]] = {}
    for copy in copies_of(homes, steps):
        if not copy.replaced:
            ends.setdefault(copy.end, []).append(copy.tensor)
    return {position: sorted(tensors) for position, tensors in ends.items()}


def explicit_steps(
    homes: Homes, program: Iterable[Instruction], mode: StorageMode
) -> tuple[Instruction, ...] | None:
    """Return the steps from which `with_waits_and_frees` makes a program, its inverse.

    The steps are computations and transfers, and the waits for page-outs that do not follow from
    these. None if the program waits or frees anywhere else than the rules do.
    """
    whole = tuple(program)
    steps = _without_derived(homes, homes.to_steps(whole))
    return steps if with_waits_and_frees(homes, steps, mode) == whole else None


def _without_derived(homes: Homes, program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Drop frees, waits for page-ins, and waits right after the last access to the tensor.

    A wait right after the last access stays if a later computation reads the tensor.
    """
    steps: list[Instruction] = []
    touched: dict[int, int] = {}
    paged_out: set[int] = set()
    for position, step in enumerate(program):
        op, index = step
        if op == Op.FREE:
            continue
        if op == Op.WAIT and (
            index not in paged_out
            or (touched.get(index) == len(steps) and _serves_next(program, position))
        ):
            paged_out.discard(index)
            continue
        steps.append(step)
        if op == Op.COMPUTE:
            both = (*homes.inputs[index], *homes.outputs[index])
            touched.update(dict.fromkeys(both, len(steps)))
            continue
        touched[index] = len(steps)
        if op == Op.PAGE_OUT:
            paged_out.add(index)
        else:
            paged_out.discard(index)
    return tuple(steps)


def _serves_next(program: Sequence[Instruction], position: int) -> bool:
    """Return whether the instruction after a wait frees or pages out the same tensor."""
    i = program[position].index
    needing = (Instruction(Op.FREE, i), Instruction(Op.PAGE_OUT, i))
    return position + 1 < len(program) and program[position + 1] in needing
