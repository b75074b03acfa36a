"""A simple rule and a bound that plans are measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op
from poetmodel.planner.windows import TransferWindows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.device import CostTable
    from poetmodel.plan import Program
    from poetmodel.schedule.homes import Homes


def prefetch_early(homes: Homes, table: CostTable, moves: Sequence[Instruction]) -> Program:
    """Put each page-in where its tensor is on storage and out of RAM, whatever RAM it takes.

    Moves are in the order of a schedule, see `moves_of`. Page-outs come right after the computation
    that makes their tensor.
    """
    # With room for everything at all times, windows end at nothing but the life of copies.
    windows = TransferWindows(homes, table, moves, sum(homes.sizes) * (len(moves) + 1))
    core = bus = 0.0
    stored: dict[int | None, float] = {None: 0.0}
    arrives: dict[int, float] = {}
    chosen: list[tuple[int, Instruction]] = []
    for gap in range(len(windows.nodes)):
        for x, out in enumerate(windows.page_outs):
            if out.first == gap:
                bus = stored[x] = max(core, bus) + out.time_s
                chosen.append((gap, Instruction(Op.PAGE_OUT, out.tensor)))
        for e, into in enumerate(windows.page_ins):
            ready = into.first <= gap and stored.get(into.source, core + 1) <= core
            if e not in arrives and (ready or into.last == gap):
                bus = arrives[e] = max(core, bus) + into.time_s
                chosen.append((gap, Instruction(Op.PAGE_IN, into.tensor)))
            if into.last == gap:
                core = max(core, arrives[e])
        core += windows.compute_s[gap]
    return windows.steps(chosen)


def lower_bound_s(table: CostTable, moves: Sequence[Instruction]) -> float:
    """Return the longer of compute and bus time: no program of the moves takes less [s]."""
    times = {
        Op.COMPUTE: table.compute_time_s,
        Op.PAGE_IN: table.page_in_time_s,
        Op.PAGE_OUT: table.page_out_time_s,
    }
    compute_s = sum(times[op][i] for op, i in moves if op == Op.COMPUTE)
    return max(compute_s, sum(times[op][i] for op, i in moves if op != Op.COMPUTE))
