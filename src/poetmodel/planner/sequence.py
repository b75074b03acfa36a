"""The order in which a schedule computes, moves and frees: Algorithm 2 of POET, made sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.clock import check_time_limit
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import copies_of
from poetmodel.schedule import rows_of_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.plan import Program
    from poetmodel.schedule import Schedule
    from poetmodel.schedule.homes import Homes


def program_of(homes: Homes, schedule: Schedule) -> Program:
    """Write a valid schedule down as the program that a device with blocking storage runs.

    It is Algorithm 2 of Patil et al., POET (ICML 2022); ``docs/deviations.md`` lists what differs.
    It has page-ins, the computation and page-outs of every step, and frees. A stage frees what the
    next one does not begin with: after its last use there, or at its own step where nothing in the
    stage uses it. Energy, time and peak RAM are those of the schedule's simulation.
    """
    n = len(homes.graph.nodes)
    kept = rows_of_pairs(schedule.S_RAM, n + 1)
    moved = (rows_of_pairs(pairs, n) for pairs in (schedule.M_in, schedule.M_out))
    program: list[Instruction] = []
    for stage in zip(rows_of_pairs(schedule.R, n), kept, kept[1:], *moved, strict=False):
        check_time_limit()
        program.extend(_stage(homes, *stage))
    return tuple(program)


def moves_of(homes: Homes, schedule: Schedule) -> Program:
    """Return computations and transfers of a schedule, in order, without idle page-outs.

    First reads of state are page-ins. A page-out is idle where no page-in of the tensor follows, or
    where the tensor lies on storage already; that of a replacement never is.
    """
    whole = homes.steps_of(program_of(homes, schedule))
    last_page_in = {i: place for place, (op, i) in enumerate(whole) if op == Op.PAGE_IN}
    stored = set(homes.stored)
    moves = []
    for place, step in enumerate(whole):
        op, i = step
        if op == Op.FREE:
            continue
        if op == Op.PAGE_OUT and i not in homes.written_back:
            if i in stored or last_page_in.get(i, -1) < place:
                continue
            stored.add(i)
        moves.append(step)
    return tuple(moves)


def unread_page_ins(homes: Homes, moves: Sequence[Instruction]) -> frozenset[int]:
    """Return the positions of page-ins whose tensor no computation reads before it is replaced."""
    copies = copies_of(homes, moves)
    return frozenset(c.made for c in copies if not c.reads and moves[c.made].op == Op.PAGE_IN)


def start_at_use(homes: Homes, moves: Sequence[Instruction]) -> Program:
    """Put each page-in of `moves_of` right before the computation that reads it first.

    Page-outs, and page-ins that nothing reads, stay where the schedule has them.
    """
    unread = unread_page_ins(homes, moves)
    steps: list[Instruction] = []
    pending: dict[int, Instruction] = {}
    for place, step in enumerate(moves):
        op, index = step
        if op == Op.PAGE_IN and place not in unread:
            pending[index] = step
            continue
        needed = homes.inputs[index] if op == Op.COMPUTE else (index,)
        steps.extend(pending.pop(i) for i in sorted(needed) if i in pending)
        steps.append(step)
    return tuple(steps)


def _stage(
    homes: Homes,
    computed: list[int],
    kept: list[int],
    kept_next: list[int],
    paged_in: list[int],
    paged_out: list[int],
) -> Iterator[Instruction]:
    """Yield what one stage does, step by step; the next one begins with `kept_next`."""
    page_in, page_out = _by_node(homes, paged_in), _by_node(homes, paged_out)
    held = {*kept, *paged_in}
    last_use: dict[int, int] = {}
    for k in computed:
        held.update(homes.outputs[k])
        last_use.update(dict.fromkeys(homes.inputs[k], k))
    done_with: dict[int, list[int]] = {}
    for i in sorted(held.difference(kept_next)):
        done_with.setdefault(last_use.get(i, homes.graph.node_of[i]), []).append(i)
    computing = set(computed)
    for k in sorted(computing | page_in.keys() | page_out.keys() | done_with.keys()):
        written, going = page_out.get(k, []), done_with.get(k, [])
        for i in page_in.get(k, ()):
            yield Instruction(Op.PAGE_IN, i)
        if k in computing:
            yield Instruction(Op.COMPUTE, k)
            going = [i for i in going if i not in homes.replaced.get(k, ())]
            touched = {*homes.inputs[k], *homes.outputs[k]}.difference(written)
            yield from (Instruction(Op.FREE, i) for i in going if i in touched)
            going = [i for i in going if i not in touched]
        for i in written:
            yield Instruction(Op.PAGE_OUT, i)
            if i in going:
                going.remove(i)
                yield Instruction(Op.FREE, i)
        yield from (Instruction(Op.FREE, i) for i in going)


def _by_node(homes: Homes, tensors: Iterable[int]) -> dict[int, list[int]]:
    made_by: dict[int, list[int]] = {}
    for i in tensors:
        made_by.setdefault(homes.graph.node_of[i], []).append(i)
    return made_by
