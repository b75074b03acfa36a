"""Instructions that follow from the others: waits before a use, and frees after the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.device import StorageMode
from poetmodel.plan.program import Instruction, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Program

_TRANSFERS: Final = (Op.PAGE_IN, Op.PAGE_OUT)


def with_waits_and_frees(graph: Graph, steps: Iterable[Instruction], mode: StorageMode) -> Program:
    """Complete a list of computations and transfers to a program.

    Parameters
    ----------
    graph : Graph
        The training graph.
    steps : iterable of Instruction
        Computations, page-ins and page-outs in program order, and for ``dma`` the ``wait i`` of a
        page-out whose tensor is to be released later than right after its last use; no other
        waits and no frees.
    mode : StorageMode
        ``blocking`` programs need no waits, and get none.

    Returns
    -------
    tuple of Instruction
        The program. A copy of a tensor lives from the instruction that makes it (a computation, a
        page-in) to the last step that touches it (a computation or page-out that reads it, a given
        ``wait``) before the next copy is made; what nothing touches is gone right after it is made.
        A transfer is waited for before the first instruction that needs it done.

    Notes
    -----
    The rules, by which the result is unique:

    - Right after a step, every tensor is freed whose copy it is the last to touch, in ascending
      order; where a transfer of that copy is still under way, its ``wait`` comes right before.
    - Before a computation there is a ``wait`` for each input that is still being paged in, in the
      order in which their transfers began. Transfers that begin after that one, right before the
      computation, follow the wait; they begin no later for it, as the bus is busy until then.
    - Right before a page-out there is a ``wait`` for a transfer of the same tensor under way.
    - A transfer is under way from its start to its ``wait``, given or derived.

    Steps that cannot be executed are completed by the same rules; `check_plan` finds them.
    """
    given = [step for step in steps if mode == StorageMode.DMA or step.op != Op.WAIT]
    ends = ends_of_copies(graph, given)
    completion = _Completion()
    for place, step in enumerate(given):
        if step.op == Op.COMPUTE:
            completion.wait_for_page_ins(graph.inputs_of[step.index])
        elif step.op == Op.PAGE_OUT:
            completion.wait(step.index)
        completion.add(step, under_way=mode == StorageMode.DMA and step.op in _TRANSFERS)
        for i in ends.get(place, ()):
            completion.wait(i)
            completion.add(Instruction(Op.FREE, i))
    return tuple(completion.program)


class _Completion:
    """A program while it is completed."""

    def __init__(self) -> None:
        self.program: list[Instruction] = []
        self.under_way: dict[int, Op] = {}
        """Transfers that nothing has waited for, in the order in which they began."""

    def add(self, step: Instruction, *, under_way: bool = False) -> None:
        """Append an instruction."""
        self.program.append(step)
        if under_way:
            self.under_way[step.index] = step.op
        elif step.op == Op.WAIT:
            self.under_way.pop(step.index, None)

    def wait(self, i: int) -> None:
        """Wait for a transfer if it is under way."""
        if i in self.under_way:
            self.add(Instruction(Op.WAIT, i))

    def wait_for_page_ins(self, inputs: Sequence[int]) -> None:
        """Wait for each page-in of these, in front of the transfers at the end that follow it."""
        due = [i for i, op in self.under_way.items() if op == Op.PAGE_IN and i in inputs]
        for i in due:
            start = len(self.program)
            while start and _is_other_transfer(self.program[start - 1], i):
                start -= 1
            later = self.program[start:]
            del self.program[start:]
            self.wait(i)
            self.program.extend(later)


def _is_other_transfer(step: Instruction, i: int) -> bool:
    return step.op in _TRANSFERS and step.index != i


def ends_of_copies(graph: Graph, steps: Sequence[Instruction]) -> dict[int, list[int]]:
    """Find where copies of tensors end.

    Parameters
    ----------
    graph : Graph
        The training graph.
    steps : sequence of Instruction
        As `with_waits_and_frees` takes them.

    Returns
    -------
    dict of int to list of int
        By place in `steps`: the tensors whose copy that step is the last to touch, ascending.
    """
    last: dict[int, int] = {}
    ends: dict[int, list[int]] = {}
    for place, (op, index) in enumerate(steps):
        made: tuple[int, ...] = ()
        read: tuple[int, ...] = (index,)
        if op == Op.COMPUTE:
            made, read = graph.outputs_of[index], graph.inputs_of[index]
        elif op == Op.PAGE_IN:
            made, read = (index,), ()
        for i in read:
            if i in last:
                last[i] = place
        for i in made:
            if i in last:
                ends.setdefault(last[i], []).append(i)
            last[i] = place
    for i, place in last.items():
        ends.setdefault(place, []).append(i)
    for tensors in ends.values():
        tensors.sort()
    return ends


def explicit_steps(
    graph: Graph, program: Iterable[Instruction], mode: StorageMode
) -> tuple[Instruction, ...] | None:
    """Take a program apart: return the steps that `with_waits_and_frees` makes it from.

    Parameters
    ----------
    graph : Graph
        The training graph.
    program : iterable of Instruction
        A whole program.
    mode : StorageMode
        How its transfers run.

    Returns
    -------
    tuple of Instruction or None
        Its computations and transfers, and the waits for page-outs that do not follow from them;
        None where the program waits or frees anywhere else than the rules do.
    """
    whole = tuple(program)
    steps = _without_derived(graph, whole)
    return steps if with_waits_and_frees(graph, steps, mode) == whole else None


def _without_derived(graph: Graph, program: Sequence[Instruction]) -> tuple[Instruction, ...]:
    """Leave out frees, waits for page-ins, and waits right after what last touched the tensor."""
    steps: list[Instruction] = []
    touched: dict[int, int] = {}
    paged_out: set[int] = set()
    for step in program:
        op, index = step
        if op == Op.FREE:
            continue
        if op == Op.WAIT and (index not in paged_out or touched.get(index) == len(steps)):
            paged_out.discard(index)
            continue
        steps.append(step)
        if op == Op.COMPUTE:
            for i in (*graph.inputs_of[index], *graph.outputs_of[index]):
                touched[i] = len(steps)
            continue
        touched[index] = len(steps)
        if op == Op.PAGE_OUT:
            paged_out.add(index)
        else:
            paged_out.discard(index)
    return tuple(steps)
