"""When the steps of a DMA program happen, and page-ins that begin as late as they can.

Page-outs are waited for as late as RAM allows, or as soon as that costs nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit, watched
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import last_uses_by_position
from poetmodel.planner.sequence import unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes

_ROUNDING: Final = 1e-12
"""Times that differ by less, relative to the makespan, are the same."""


class Timing:
    """When computations and transfers, in program order, happen on a core and a DMA channel.

    A page-out of a tensor that nothing uses any more is waited for where the budget needs its RAM,
    or where it is done by then. For the order given, no other choice of waits is quicker: transfers
    end in the order in which they begin, so where RAM is needed, the ones begun first are waited
    for first, and no more of them than it takes. A computation operates in place over an input
    whose page-out is waited for before it.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        steps: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        self.homes, self.table, self.given = homes, table, tuple(steps)
        self.steps: list[Instruction] = []
        """The steps given with their waits for page-outs: what `with_waits_and_frees` completes."""
        self.core_s: list[float] = []
        """When the core comes to each step given, before it waits for anything [s]."""
        self.begin_s: list[float] = []
        """When each step given begins: the core, or the bus for a transfer [s]."""
        self.waited: list[int] = []
        """For each transfer given the place that waits for it, or finds it done; one past the end
        where none does. For a computation its own place."""
        self.stall_s = 0.0
        """Time that the core waits for the bus [s]."""
        self.peak_ram_bytes = 0
        """Highest RAM use [B]."""
        self._budget = ram_budget_bytes
        self._sizes = homes.sizes
        self._core = self._bus = 0.0
        self._ram = homes.ram_bytes
        self._position = 0
        self._began: dict[int, int] = {}
        """Places of the transfers under way, by tensor."""
        self._arriving: dict[int, float] = {}
        """When the page-ins under way end, by tensor."""
        self._going: dict[int, float] = {}
        """When the page-outs under way end, by tensor, in the order in which they began."""
        self._touched: dict[int, int] = {}
        """Those that nothing uses any more, and the number of steps by then."""
        ends = last_uses_by_position(homes, steps)
        for position, step in enumerate(watched(steps)):
            self._step(position, step, ends.get(position, ()))
        self.makespan_s = max(self._core, self._bus)
        """When core and bus are done [s]."""
        self._position = len(steps)
        for i in list(self._touched):
            self._release(i)

    def _step(self, position: int, step: Instruction, ends: Collection[int]) -> None:
        """Do one step, and what has to be waited for before it; it `ends` some copies."""
        self.core_s.append(self._core)
        self.waited.append(position)
        self._position = position
        for i in [i for i in self._touched if self._going[i] <= self._core]:
            self._release(i)
        op, index = step
        if op == Op.COMPUTE:
            self._compute(index, ends)
        else:
            self._transfer(op, index)
        self.steps.append(step)
        for i in ends:
            if i in self._arriving:
                self._wait(i, self._arriving)
            if self._going.get(i, self._core) > self._core:
                self._touched[i] = len(self.steps)
            else:
                if i in self._going:
                    self._wait(i, self._going)
                self._ram -= self._sizes[i]

    def _compute(self, k: int, ends: Collection[int]) -> None:
        for i in self.homes.inputs[k]:
            if i in self._arriving:
                self._wait(i, self._arriving)
        for i in self.homes.outputs[k]:
            if i in self._touched:
                self._release(i)
        shared = self.homes.overwritten_bytes(k, ends)
        for i in [i for i in shared if self._going.get(i, math.inf) <= self._core]:
            self._wait_before_use(i)
        going = [i for i in self._going if i in shared]
        size = self.homes.step_bytes[k] - sum(shared.values()) + sum(shared[i] for i in going)
        while self._ram + size > self._budget and (going or self._touched):
            i = min((*going, *self._touched), key=self._going.__getitem__)
            if i in going:
                going.remove(i)
                size -= shared[i]
                self._wait_before_use(i)
            else:
                self._release(i)
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram + size)
        self._ram += sum(self._sizes[i] for i in self.homes.new[k])
        self.begin_s.append(self._core)
        self._core += self.table.compute_time_s[k]

    def _transfer(self, op: Op, i: int) -> None:
        if i in self._touched:
            self._release(i)
        for under_way in (self._arriving, self._going):
            if i in under_way:
                self._wait(i, under_way)
        if op == Op.PAGE_IN:
            self._make_room(self._sizes[i])
            self._ram += self._sizes[i]
        begin = max(self._bus, self._core)
        self.begin_s.append(begin)
        self._began[i] = self._position
        if op == Op.PAGE_IN:
            self._bus = self._arriving[i] = begin + self.table.page_in_time_s[i]
        else:
            self._bus = self._going[i] = begin + self.table.page_out_time_s[i]

    def _make_room(self, size_bytes: int) -> None:
        """Wait for as many page-outs as it takes until so much fits."""
        while self._ram + size_bytes > self._budget and self._touched:
            self._release(min(self._touched, key=self._going.__getitem__))
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram + size_bytes)

    def _release(self, i: int) -> None:
        """Wait for a page-out, which frees its tensor; page-ins that begin after it can follow."""
        self._wait(i, self._going)
        position = len(self.steps)
        while self.steps[position - 1].op == Op.PAGE_IN:
            position -= 1
        # A wait right after the last use is derived by with_waits_and_frees, and not written.
        if self._touched.pop(i) != position:
            self.steps.insert(position, Instruction(Op.WAIT, i))
        self._ram -= self._sizes[i]

    def _wait_before_use(self, i: int) -> None:
        """Wait for the page-out of a tensor that is still to be read, so that it is at rest."""
        self._wait(i, self._going)
        self.steps.append(Instruction(Op.WAIT, i))

    def _wait(self, i: int, under_way: dict[int, float]) -> None:
        """Wait for a transfer, which ends it."""
        until_s = under_way.pop(i)
        self.waited[self._began[i]] = self._position
        if until_s > self._core:
            self.stall_s += until_s - self._core
            self._core = until_s


@dataclass(slots=True)
class _Placed:
    """A transfer among the steps of a program, while page-ins are moved."""

    position: int
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


def just_in_time(timing: Timing) -> tuple[Instruction, ...]:
    """Move page-ins of the steps given to later places where nothing waits longer for it.

    Every page-in, from the last to the first, gets the last place that leaves the beginnings of all
    computations as they are; of two that contend for the bus, the one that is used first goes
    first. Less RAM is in use, and never more.
    """
    bus, steps = _bus(timing), timing.given
    rounding = _ROUNDING * timing.makespan_s
    for transfer in [page for page in reversed(bus) if page.reader > page.position]:
        check_time_limit()
        _move(bus, transfer, timing.core_s, rounding)
    order = [(position, 1) for position in range(len(steps))]
    for x, page in enumerate(bus):
        if page.slot != page.position:
            order[page.position] = (page.slot, x - len(bus))  # in bus order, before the step there
    return tuple(steps[position] for position in sorted(range(len(steps)), key=order.__getitem__))


def _bus(timing: Timing) -> list[_Placed]:
    """Return the transfers in order, with what has to stay as it is."""
    table, steps = timing.table, timing.given
    unread = unread_page_ins(timing.homes, steps)
    bus = []
    for position, (op, i) in enumerate(steps):
        if op == Op.COMPUTE:
            continue
        time_s = (table.page_in_time_s if op == Op.PAGE_IN else table.page_out_time_s)[i]
        end_s = timing.begin_s[position] + time_s
        waits = timing.waited[position]
        limit_s = end_s if waits == len(steps) else max(end_s, timing.core_s[waits])
        reader = position
        if op == Op.PAGE_IN and position not in unread:
            reader, limit_s = waits, timing.begin_s[waits]
        bus.append(_Placed(position, position, time_s, end_s, limit_s, reader))
    return bus


def _move(bus: list[_Placed], transfer: _Placed, core_s: Sequence[float], rounding: float) -> None:
    """Give a page-in the last place that keeps all limits."""
    old = last = bus.index(transfer)
    # Of two that contend for the bus, the one whose use comes first goes first.
    while last + 1 < len(bus) and bus[last + 1].slot <= transfer.reader > bus[last + 1].reader:
        last += 1
    for index in range(last, old - 1, -1):
        low = transfer.slot if index == old else bus[index].slot
        if index > old and bus[index].slot == bus[index].position:
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
            for moved, end_s in zip(bus[old:], ends, strict=False):
                moved.end_s = end_s
            return


def _ends(
    bus: list[_Placed],
    old: int,
    index: int,
    slot: int,
    core_s: Sequence[float],
    rounding: float,
) -> list[float] | None:
    """Return the ends of transfers from `old` on if that one moves; None if any is too late."""
    free_s = bus[old - 1].end_s if old else 0.0
    order = [*range(old + 1, index + 1), old, *range(index + 1, len(bus))]
    ends = []
    for x in order:
        transfer = bus[x]
        begin_s = max(free_s, core_s[slot if x == old else transfer.slot])
        free_s = begin_s + transfer.time_s
        if free_s > transfer.limit_s + rounding:
            return None
        ends.append(free_s)
        if x > index and free_s == transfer.end_s:
            break
    return ends
