"""Simple rules for when transfers start, to measure the planner against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.device import CostTable
    from poetmodel.graph import Graph
    from poetmodel.plan import Program


def start_at_use(graph: Graph, moves: Sequence[Instruction]) -> Program:
    """Put each page-in right before the computation that reads it first.

    Parameters
    ----------
    graph : Graph
        The training graph.
    moves : sequence of Instruction
        Computations and transfers in the order of a schedule, see `moves_of`.

    Returns
    -------
    tuple of Instruction
        The same ones. Page-outs, and page-ins that nothing reads, stay where the schedule has them.
    """
    unread = unread_page_ins(graph, moves)
    steps: list[Instruction] = []
    pending: dict[int, Instruction] = {}
    for place, step in enumerate(moves):
        op, index = step
        if op == Op.PAGE_IN and place not in unread:
            pending[index] = step
            continue
        needed = graph.inputs_of[index] if op == Op.COMPUTE else (index,)
        steps.extend(pending.pop(i) for i in sorted(needed) if i in pending)
        steps.append(step)
    return tuple(steps)


def prefetch_early(graph: Graph, table: CostTable, moves: Sequence[Instruction]) -> Program:
    """Put each page-in where its tensor is on storage and out of RAM, whatever RAM it takes.

    Parameters
    ----------
    graph : Graph
        The training graph.
    table : CostTable
        Times of computations and transfers.
    moves : sequence of Instruction
        Computations and transfers in the order of a schedule, see `moves_of`.

    Returns
    -------
    tuple of Instruction
        The same ones; page-outs come right after the computation that makes their tensor.
    """
    from poetmodel.planner.timeline import Timeline

    # With room for everything at all times, windows end at nothing but the life of copies.
    line = Timeline.of(graph, table, moves, sum(graph.tensor_bytes) * (len(moves) + 1))
    core = bus = 0.0
    stored: dict[int | None, float] = {None: 0.0}
    arrives: dict[int, float] = {}
    chosen: list[tuple[int, Instruction]] = []
    for gap in range(len(line.nodes)):
        for x, out in enumerate(line.page_outs):
            if out.first == gap:
                bus = stored[x] = max(core, bus) + out.time_s
                chosen.append((gap, Instruction(Op.PAGE_OUT, out.tensor)))
        for e, into in enumerate(line.page_ins):
            ready = into.first <= gap and stored.get(into.source, core + 1) <= core
            if e not in arrives and (ready or into.last == gap):
                bus = arrives[e] = max(core, bus) + into.time_s
                chosen.append((gap, Instruction(Op.PAGE_IN, into.tensor)))
            if into.last == gap:
                core = max(core, arrives[e])
        core += line.compute_s[gap]
    return line.steps(chosen)


def unread_page_ins(graph: Graph, moves: Sequence[Instruction]) -> frozenset[int]:
    """Return the places of page-ins whose tensor no computation reads before it is made again."""
    unread: set[int] = set()
    open_ones: dict[int, int] = {}
    for place, (op, index) in enumerate(moves):
        if op == Op.PAGE_IN:
            open_ones[index] = place
            unread.add(place)
        elif op == Op.COMPUTE:
            for i in graph.inputs_of[index]:
                unread.discard(open_ones.pop(i, -1))
            for i in graph.outputs_of[index]:
                open_ones.pop(i, None)
    return frozenset(unread)


def lower_bound_s(table: CostTable, moves: Sequence[Instruction]) -> float:
    """Return a time that no program of these computations and transfers can be below [s].

    Parameters
    ----------
    table : CostTable
        Times of computations and transfers.
    moves : sequence of Instruction
        Computations and transfers.

    Returns
    -------
    float
        The longer of compute time and bus time.
    """
    times = {
        Op.COMPUTE: table.compute_time_s,
        Op.PAGE_IN: table.page_in_time_s,
        Op.PAGE_OUT: table.page_out_time_s,
    }
    compute_s = sum(times[op][i] for op, i in moves if op == Op.COMPUTE)
    return max(compute_s, sum(times[op][i] for op, i in moves if op != Op.COMPUTE))
