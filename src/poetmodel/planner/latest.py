"""Just in time: page-ins moved to where they begin as late as they can."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.plan import Op
from poetmodel.planner.strategies import unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.device import CostTable
    from poetmodel.graph import Graph
    from poetmodel.plan import Instruction
    from poetmodel.planner.releases import Timing

_ROUNDING: Final = 1e-12
"""Times that differ by less, relative to the makespan, are the same."""


@dataclass(slots=True)
class _Transfer:
    """A transfer while page-ins are moved."""

    place: int
    """Its place among the steps given."""
    slot: int
    """The step given that it comes right before; its own place if it has not moved."""
    time_s: float
    end_s: float
    limit_s: float
    """By when it has to end."""
    reader: int
    """The computation that waits for a page-in, which is the last slot it may have; else its own
    place."""


def just_in_time(
    graph: Graph, table: CostTable, steps: Sequence[Instruction], timing: Timing
) -> tuple[Instruction, ...]:
    """Move page-ins to later places where nothing has to wait longer for it.

    Parameters
    ----------
    graph : Graph
        The training graph.
    table : CostTable
        Times of transfers.
    steps : sequence of Instruction
        Computations and transfers in program order.
    timing : Timing
        Of these steps, see `timed`.

    Returns
    -------
    tuple of Instruction
        The same steps. Every page-in, from the last to the first, has the last place that leaves
        the beginnings of all computations as they are; of two that contend for the bus, the one
        that is used first goes first. Less RAM is in use, and never more.
    """
    bus = _bus(graph, table, steps, timing)
    rounding = _ROUNDING * timing.makespan_s
    for transfer in [each for each in reversed(bus) if each.reader > each.place]:
        _move(bus, transfer, timing.core_s, rounding)
    moved: list[list[Instruction]] = [[] for _ in range(len(steps) + 1)]
    stays = set(range(len(steps)))
    for transfer in bus:
        if transfer.slot != transfer.place:
            stays.remove(transfer.place)
            moved[transfer.slot].append(steps[transfer.place])
    result: list[Instruction] = []
    for place, step in enumerate(steps):
        result.extend(moved[place])
        if place in stays:
            result.append(step)
    return tuple(result)


def _bus(
    graph: Graph, table: CostTable, steps: Sequence[Instruction], timing: Timing
) -> list[_Transfer]:
    """Return the transfers in order, with what has to stay as it is."""
    unread = unread_page_ins(graph, steps)
    bus = []
    for place, (op, i) in enumerate(steps):
        if op == Op.COMPUTE:
            continue
        page_in = op == Op.PAGE_IN
        time_s = table.page_in_time_s[i] if page_in else table.page_out_time_s[i]
        end_s = timing.begin_s[place] + time_s
        waits = timing.waited[place]
        limit_s = end_s if waits == len(steps) else max(end_s, timing.core_s[waits])
        reader = place
        if page_in and place not in unread:
            reader, limit_s = waits, timing.begin_s[waits]
        bus.append(_Transfer(place, place, time_s, end_s, limit_s, reader))
    return bus


def _move(
    bus: list[_Transfer], transfer: _Transfer, core_s: Sequence[float], rounding: float
) -> None:
    """Give a page-in the last place that keeps all limits."""
    old = bus.index(transfer)
    last = old
    while last + 1 < len(bus) and bus[last + 1].slot <= transfer.reader:
        if transfer.reader <= bus[last + 1].reader:
            break  # whose use comes first goes first
        last += 1
    for index in range(last, old - 1, -1):
        low = transfer.slot if index == old else bus[index].slot
        if index > old and bus[index].slot == bus[index].place:
            low += 1  # right after a transfer that has not moved is before the next step
        high = transfer.reader
        if index + 1 < len(bus):
            high = min(high, bus[index + 1].slot)
        latest_s = transfer.limit_s - transfer.time_s + rounding
        high = min(high, bisect_right(core_s, latest_s) - 1)
        best = None
        while low <= high:
            slot = (low + high) // 2
            ends = _ends(bus, old, index, slot, core_s, rounding)
            if ends is None:
                high = slot - 1
            else:
                best, low = (slot, ends), slot + 1
        if best is not None:
            transfer.slot, ends = best
            bus.insert(index, bus.pop(old))
            for each, end_s in zip(bus[old:], ends, strict=False):
                each.end_s = end_s
            return


def _ends(
    bus: list[_Transfer],
    old: int,
    index: int,
    slot: int,
    core_s: Sequence[float],
    rounding: float,
) -> list[float] | None:
    """Return when transfers from `old` on end if that one moves; None if any ends too late."""
    free_s = bus[old - 1].end_s if old else 0.0
    order = [*range(old + 1, index + 1), old, *range(index + 1, len(bus))]
    ends = []
    for x in order:
        each = bus[x]
        begin_s = max(free_s, core_s[slot if x == old else each.slot])
        free_s = begin_s + each.time_s
        if free_s > each.limit_s + rounding:
            return None
        ends.append(free_s)
        if x > index and free_s == each.end_s:
            break
    return ends
