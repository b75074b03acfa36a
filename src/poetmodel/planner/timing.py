"""Timing of DMA programs, and a pass that delays page-ins.

The core waits for a page-out as late as RAM allows, or as soon as waiting takes no time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit, iterate_in_time
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import last_uses_by_position
from poetmodel.planner.sequence import unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes

_ROUNDING: Final = 1e-12
"""Maximum difference of equal times, relative to the makespan."""


class Timing:
    """Start times of computations and transfers, in program order, on a core and a DMA channel.

    The core waits for a page-out of a dead tensor when the budget needs its RAM, or once the
    page-out has finished. For the given order no other choice of waits is faster: transfers end in
    the order in which they begin, so if RAM is needed, the core waits for the earliest page-outs,
    and for no more than necessary. A computation in place overwrites an input whose page-out the
    core has waited for.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        steps: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        """Time all `steps`, inserting waits for page-outs where RAM or reads need them."""
        self.homes, self.table, self.given_steps = homes, table, tuple(steps)
        self.steps: list[Instruction] = []
        """Given steps with waits for page-outs inserted; input of `with_waits_and_frees`."""
        self.core_s: list[float] = []
        """Time at which the core reaches each given step, before any wait [s]."""
        self.begin_s: list[float] = []
        """Time at which each given step begins on the core, or on the bus for a transfer [s]."""
        self.waiting_position: list[int] = []
        """For each given transfer the position of the step that waits for it or finds it finished;
        the number of steps if none does. For a computation its own position."""
        self.stall_s = 0.0
        """Time that the core waits for the bus [s]."""
        self.peak_ram_bytes = 0
        """Peak RAM [B]."""
        self._budget = ram_budget_bytes
        self._sizes = homes.sizes
        self._core = self._bus = 0.0
        self._ram = homes.ram_bytes
        self._position = 0
        self._begin_position: dict[int, int] = {}
        """Positions of the pending transfers, by tensor."""
        self._arriving: dict[int, float] = {}
        """End times of the pending page-ins, by tensor [s]."""
        self._leaving: dict[int, float] = {}
        """End times of the pending page-outs, by tensor, in bus order [s]."""
        self._dead_since: dict[int, int] = {}
        """Tensors that are dead except for a pending page-out, with the number of steps at their
        death."""
        ends = last_uses_by_position(homes, steps)
        for position, step in enumerate(iterate_in_time(steps)):
            self._add_step(position, step, ends.get(position, ()))
        self.makespan_s = max(self._core, self._bus)
        """Time at which core and bus finish [s]."""
        self._position = len(steps)
        for i in list(self._dead_since):
            self._release(i)

    def _add_step(self, position: int, step: Instruction, ended_tensors: Collection[int]) -> None:
        """Execute one step after the necessary waits.

        `ended_tensors` are the tensors whose copies end with this step.
        """
        self.core_s.append(self._core)
        self.waiting_position.append(position)
        self._position = position
        for i in [i for i in self._dead_since if self._leaving[i] <= self._core]:
            self._release(i)
        op, index = step
        if op == Op.COMPUTE:
            self._compute(index, ended_tensors)
        else:
            self._transfer(op, index)
        self.steps.append(step)
        for i in ended_tensors:
            if i in self._arriving:
                self._wait(i, self._arriving)
            if self._leaving.get(i, self._core) > self._core:
                self._dead_since[i] = len(self.steps)
            else:
                if i in self._leaving:
                    self._wait(i, self._leaving)
                self._ram -= self._sizes[i]

    def _compute(self, k: int, ended_tensors: Collection[int]) -> None:
        """Execute node `k` after its inputs have arrived and RAM suffices; may overwrite inputs."""
        for i in self.homes.inputs[k]:
            if i in self._arriving:
                self._wait(i, self._arriving)
        for i in self.homes.outputs[k]:
            if i in self._dead_since:
                self._release(i)
        overwritten_bytes = self.homes.overwritten_bytes(k, ended_tensors)
        for i in [i for i in overwritten_bytes if self._leaving.get(i, math.inf) <= self._core]:
            self._wait_before_use(i)
        leaving_inputs = [i for i in self._leaving if i in overwritten_bytes]
        size = (
            self.homes.step_bytes[k]
            - sum(overwritten_bytes.values())
            + sum(overwritten_bytes[i] for i in leaving_inputs)
        )
        while self._ram + size > self._budget and (leaving_inputs or self._dead_since):
            i = min((*leaving_inputs, *self._dead_since), key=self._leaving.__getitem__)
            if i in leaving_inputs:
                leaving_inputs.remove(i)
                size -= overwritten_bytes[i]
                self._wait_before_use(i)
            else:
                self._release(i)
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram + size)
        self._ram += sum(self._sizes[i] for i in self.homes.new[k])
        self.begin_s.append(self._core)
        self._core += self.table.compute_time_s[k]

    def _transfer(self, op: Op, i: int) -> None:
        """Begin a transfer of tensor `i` on the bus, after the end of its pending transfers."""
        if i in self._dead_since:
            self._release(i)
        for transfer_ends in (self._arriving, self._leaving):
            if i in transfer_ends:
                self._wait(i, transfer_ends)
        if op == Op.PAGE_IN:
            self._wait_for_room(self._sizes[i])
            self._ram += self._sizes[i]
        begin = max(self._bus, self._core)
        self.begin_s.append(begin)
        self._begin_position[i] = self._position
        if op == Op.PAGE_IN:
            self._bus = self._arriving[i] = begin + self.table.page_in_time_s[i]
        else:
            self._bus = self._leaving[i] = begin + self.table.page_out_time_s[i]

    def _wait_for_room(self, size_bytes: int) -> None:
        """Wait for page-outs until `size_bytes` fit in RAM, and update the peak."""
        while self._ram + size_bytes > self._budget and self._dead_since:
            self._release(min(self._dead_since, key=self._leaving.__getitem__))
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram + size_bytes)

    def _release(self, i: int) -> None:
        """Wait for the page-out of a dead tensor and free the tensor.

        Inserts the wait before the page-ins at the end of `steps`, so that these begin after the
        wait.
        """
        self._wait(i, self._leaving)
        position = len(self.steps)
        while self.steps[position - 1].op == Op.PAGE_IN:
            position -= 1
        # `with_waits_and_frees` derives a wait right after the last use; only other waits are
        # written.
        if self._dead_since.pop(i) != position:
            self.steps.insert(position, Instruction(Op.WAIT, i))
        self._ram -= self._sizes[i]

    def _wait_before_use(self, i: int) -> None:
        """Wait for the page-out of a tensor that is still to be read; append the wait."""
        self._wait(i, self._leaving)
        self.steps.append(Instruction(Op.WAIT, i))

    def _wait(self, i: int, transfer_ends: dict[int, float]) -> None:
        """Stall the core until the transfer of tensor `i` ends; remove it from `transfer_ends`."""
        until_s = transfer_ends.pop(i)
        self.waiting_position[self._begin_position[i]] = self._position
        if until_s > self._core:
            self.stall_s += until_s - self._core
            self._core = until_s


@dataclass(slots=True)
class _BusTransfer:
    """A transfer on the bus while `delay_page_ins` moves page-ins."""

    position: int
    """Position of the transfer among the given steps."""
    slot: int
    """Position of the given step before which the transfer begins; `position` if it has not
    moved."""
    duration_s: float
    """Duration on the bus [s]."""
    end_s: float
    """End time [s]."""
    limit_s: float
    """Latest end time that delays no step [s]."""
    reader: int
    """Position of the computation that waits for a page-in, its last possible slot; else
    `position`."""


def delay_page_ins(timing: Timing) -> tuple[Instruction, ...]:
    """Return the given steps with page-ins moved later, without delaying any computation.

    Each page-in, from the last to the first, moves to the last position for which the start times
    of all computations stay the same. If two page-ins compete for the bus, the one that is used
    first runs first. RAM use never increases.
    """
    transfers, steps = _bus_transfers(timing), timing.given_steps
    rounding = _ROUNDING * timing.makespan_s
    for page_in in [
        transfer for transfer in reversed(transfers) if transfer.reader > transfer.position
    ]:
        check_time_limit()
        _delay(transfers, page_in, timing.core_s, rounding)
    order = [(position, 1) for position in range(len(steps))]
    for x, transfer in enumerate(transfers):
        if transfer.slot != transfer.position:
            order[transfer.position] = (transfer.slot, x - len(transfers))  # bus order
    return tuple(steps[position] for position in sorted(range(len(steps)), key=order.__getitem__))


def _bus_transfers(timing: Timing) -> list[_BusTransfer]:
    """Return the transfers of a program in bus order, each with its latest end and last slot."""
    table, steps = timing.table, timing.given_steps
    unread_positions = unread_page_ins(timing.homes, steps)
    transfers = []
    for position, (op, i) in enumerate(steps):
        if op == Op.COMPUTE:
            continue
        time_s = (table.page_in_time_s if op == Op.PAGE_IN else table.page_out_time_s)[i]
        end_s = timing.begin_s[position] + time_s
        waiting_step = timing.waiting_position[position]
        limit_s = end_s if waiting_step == len(steps) else max(end_s, timing.core_s[waiting_step])
        reader = position
        if op == Op.PAGE_IN and position not in unread_positions:
            reader, limit_s = waiting_step, timing.begin_s[waiting_step]
        transfers.append(_BusTransfer(position, position, time_s, end_s, limit_s, reader))
    return transfers


def _delay(
    transfers: list[_BusTransfer], transfer: _BusTransfer, core_s: Sequence[float], rounding: float
) -> None:
    """Move a page-in to the last position in bus order and the last slot that meet all limits."""
    old_index = last_index = transfers.index(transfer)
    # If two page-ins compete for the bus, the one that is used first runs first.
    while (
        last_index + 1 < len(transfers)
        and transfers[last_index + 1].slot <= transfer.reader > transfers[last_index + 1].reader
    ):
        last_index += 1
    for index in range(last_index, old_index - 1, -1):
        min_slot = transfer.slot if index == old_index else transfers[index].slot
        if index > old_index and transfers[index].slot == transfers[index].position:
            min_slot += (
                1  # after a transfer that has not moved, the first slot is before the next step
            )
        max_slot = transfer.reader
        if index + 1 < len(transfers):
            max_slot = min(max_slot, transfers[index + 1].slot)
        latest_s = transfer.limit_s - transfer.duration_s + rounding
        max_slot = min(max_slot, bisect_right(core_s, latest_s) - 1)
        best_move = None
        while min_slot <= max_slot:
            slot = (min_slot + max_slot) // 2
            ends = _ends_after_move(transfers, old_index, index, slot, core_s, rounding)
            if ends is None:
                max_slot = slot - 1
            else:
                best_move, min_slot = (slot, ends), slot + 1
        if best_move is not None:
            transfer.slot, ends = best_move
            transfers.insert(index, transfers.pop(old_index))
            for later_transfer, end_s in zip(transfers[old_index:], ends, strict=False):
                later_transfer.end_s = end_s
            return


def _ends_after_move(
    transfers: list[_BusTransfer],
    old_index: int,
    index: int,
    slot: int,
    core_s: Sequence[float],
    rounding: float,
) -> list[float] | None:
    """Return the ends of transfers from `old_index` on after a move; None if any ends too late [s].

    The transfer at position `old_index` of the bus order moves to position `index` and to `slot`.
    The list contains no ends after the first one that the move does not change.
    """
    free_s = transfers[old_index - 1].end_s if old_index else 0.0
    order = [*range(old_index + 1, index + 1), old_index, *range(index + 1, len(transfers))]
    ends = []
    for x in order:
        transfer = transfers[x]
        begin_s = max(free_s, core_s[slot if x == old_index else transfer.slot])
        free_s = begin_s + transfer.duration_s
        if free_s > transfer.limit_s + rounding:
            return None
        ends.append(free_s)
        if x > index and free_s == transfer.end_s:
            break
    return ends
