"""Timing of DMA programs, and a pass that delays page-ins.

The core waits for a page-out as late as RAM and later uses of the tensor allow, or as soon as the
page-out has finished.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit, iterate_in_time
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import last_uses_by_position
from poetmodel.planner.sequence import find_unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes

_ROUNDING: Final = 1e-12
"""Maximum difference of equal times, relative to the makespan."""


class Timing:
    """Start times of computations and transfers, in program order, on a core and a DMA channel.

    A tensor is *dead* when its last use is over but its page-out is pending: it is still in RAM. No
    other choice of waits is faster, since transfers end in the order in which they begin: if RAM is
    short, the core waits for the earliest page-outs.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        instructions: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        self.homes, self.table, self.input_instructions = homes, table, tuple(instructions)
        self.instructions: list[Instruction] = []
        """The input with waits for page-outs inserted; argument of `add_waits_and_frees`."""
        self.core_s: list[float] = []
        """Time at which the core reaches each input instruction, before any wait [s]."""
        self.begin_s: list[float] = []
        """Time at which each input instruction begins; of a transfer, on the bus [s]."""
        self.waiting_position: list[int] = []
        """For each input transfer the position of the instruction that waits for it or finds it
        finished, else the number of instructions. For a computation its own position."""
        self.stall_s = 0.0
        """Time that the core waits for the bus [s]."""
        self.peak_ram_bytes = 0
        """Peak RAM [B]; above the budget if waits cannot free enough RAM."""
        self._budget_bytes = ram_budget_bytes
        self._sizes = homes.sizes
        self._now_s = self._bus_free_s = 0.0
        self._ram_bytes = homes.ram_bytes
        self._position = 0
        self._begin_position: dict[int, int] = {}
        """Position of the latest transfer of each tensor among the input instructions."""
        self._page_in_ends: dict[int, float] = {}
        """End times of the pending page-ins, by tensor [s]."""
        self._page_out_ends: dict[int, float] = {}
        """End times of the pending page-outs, by tensor, in bus order [s]."""
        self._dead_tensors: dict[int, int] = {}
        """Tensors that are dead except for a pending page-out, each with the length of
        `instructions` at its death."""
        tensors_by_end = last_uses_by_position(homes, instructions)
        for position, instruction in enumerate(iterate_in_time(instructions)):
            self._add_instruction(position, instruction, tensors_by_end.get(position, ()))
        self.makespan_s = max(self._now_s, self._bus_free_s)
        """Time at which core and bus finish [s]."""
        self._position = len(instructions)
        for i in list(self._dead_tensors):
            self._free_dead(i)

    def _add_instruction(
        self, position: int, instruction: Instruction, ended_tensors: Collection[int]
    ) -> None:
        """Execute an instruction, which uses `ended_tensors` last, after the necessary waits."""
        self.core_s.append(self._now_s)
        self.waiting_position.append(position)
        self._position = position
        for i in [i for i in self._dead_tensors if self._page_out_ends[i] <= self._now_s]:
            self._free_dead(i)
        op, index = instruction
        if op == Op.COMPUTE:
            self._compute(index, ended_tensors)
        else:
            self._begin_transfer(op, index)
        self.instructions.append(instruction)
        for i in ended_tensors:
            if i in self._page_in_ends:
                self._wait(i, self._page_in_ends)
            if self._page_out_ends.get(i, self._now_s) > self._now_s:
                self._dead_tensors[i] = len(self.instructions)
            else:
                if i in self._page_out_ends:
                    self._wait(i, self._page_out_ends)
                self._ram_bytes -= self._sizes[i]

    def _compute(self, k: int, ended_tensors: Collection[int]) -> None:
        """Execute node `k`, after waits for its inputs and for page-outs that must free RAM."""
        for i in self.homes.inputs[k]:
            if i in self._page_in_ends:
                self._wait(i, self._page_in_ends)
        for i in self.homes.outputs[k]:
            if i in self._dead_tensors:
                self._free_dead(i)
        overwritten_bytes = self.homes.overwritten_bytes(k, ended_tensors)
        for i in [
            i for i in overwritten_bytes if self._page_out_ends.get(i, math.inf) <= self._now_s
        ]:
            self._wait_before_use(i)
        pending_inputs = [i for i in self._page_out_ends if i in overwritten_bytes]
        size = (
            self.homes.step_bytes[k]
            - sum(overwritten_bytes.values())
            + sum(overwritten_bytes[i] for i in pending_inputs)
        )
        while self._ram_bytes + size > self._budget_bytes and (
            pending_inputs or self._dead_tensors
        ):
            i = min((*pending_inputs, *self._dead_tensors), key=self._page_out_ends.__getitem__)
            if i in pending_inputs:
                pending_inputs.remove(i)
                size -= overwritten_bytes[i]
                self._wait_before_use(i)
            else:
                self._free_dead(i)
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram_bytes + size)
        self._ram_bytes += sum(self._sizes[i] for i in self.homes.new_outputs[k])
        self.begin_s.append(self._now_s)
        self._now_s += self.table.compute_time_s[k]

    def _begin_transfer(self, op: Op, i: int) -> None:
        """Begin a transfer on the bus, after other transfers of tensor `i` have ended."""
        if i in self._dead_tensors:
            self._free_dead(i)
        for transfer_ends in (self._page_in_ends, self._page_out_ends):
            if i in transfer_ends:
                self._wait(i, transfer_ends)
        if op == Op.PAGE_IN:
            self._wait_for_ram(self._sizes[i])
            self._ram_bytes += self._sizes[i]
        begin = max(self._bus_free_s, self._now_s)
        self.begin_s.append(begin)
        self._begin_position[i] = self._position
        if op == Op.PAGE_IN:
            self._bus_free_s = self._page_in_ends[i] = begin + self.table.page_in_time_s[i]
        else:
            self._bus_free_s = self._page_out_ends[i] = begin + self.table.page_out_time_s[i]

    def _wait_for_ram(self, size_bytes: int) -> None:
        """Wait for page-outs of dead tensors until `size_bytes` fit; count these in the peak."""
        while self._ram_bytes + size_bytes > self._budget_bytes and self._dead_tensors:
            self._free_dead(min(self._dead_tensors, key=self._page_out_ends.__getitem__))
        self.peak_ram_bytes = max(self.peak_ram_bytes, self._ram_bytes + size_bytes)

    def _free_dead(self, i: int) -> None:
        """Insert a wait for the page-out of a dead tensor, and free its RAM."""
        self._wait(i, self._page_out_ends)
        position = len(self.instructions)
        while self.instructions[position - 1].op == Op.PAGE_IN:
            position -= 1
        # `add_waits_and_frees` derives a wait right after the last use.
        if self._dead_tensors.pop(i) != position:
            self.instructions.insert(position, Instruction(Op.WAIT, i))
        self._ram_bytes -= self._sizes[i]

    def _wait_before_use(self, i: int) -> None:
        """Add a wait for the page-out of an input that the next computation overwrites."""
        self._wait(i, self._page_out_ends)
        self.instructions.append(Instruction(Op.WAIT, i))

    def _wait(self, i: int, transfer_ends: dict[int, float]) -> None:
        """Stall the core until the transfer of tensor `i` ends; adds no wait to `instructions`."""
        end_s = transfer_ends.pop(i)
        self.waiting_position[self._begin_position[i]] = self._position
        if end_s > self._now_s:
            self.stall_s += end_s - self._now_s
            self._now_s = end_s


@dataclass(slots=True)
class _BusTransfer:
    """A transfer on the bus while `delay_page_ins` moves page-ins."""

    position: int
    """Position of the transfer among the input instructions."""
    new_position: int
    """Position of the input instruction before which the transfer begins; `position` if it has not
    moved."""
    duration_s: float
    """Duration on the bus [s]."""
    end_s: float
    """End time [s]."""
    max_end_s: float
    """Latest end time that delays no instruction [s]; the initial end if none waits for the
    transfer."""
    reader_position: int
    """For a page-in that is read, the position of the instruction that waits for it, its last
    possible `new_position`. Otherwise `position`."""


def delay_page_ins(timing: Timing) -> tuple[Instruction, ...]:
    """Return a timing's instructions with page-ins moved later, at no cost in time or RAM."""
    transfers, instructions = _list_transfers(timing), timing.input_instructions
    tolerance_s = _ROUNDING * timing.makespan_s
    for page_in in [
        transfer for transfer in reversed(transfers) if transfer.reader_position > transfer.position
    ]:
        check_time_limit()
        _delay_page_in(transfers, page_in, timing.core_s, tolerance_s)
    sort_keys = [(position, 1) for position in range(len(instructions))]
    for index, transfer in enumerate(transfers):
        if transfer.new_position != transfer.position:
            # Moved transfers precede the instruction at their new position, in bus order.
            sort_keys[transfer.position] = (transfer.new_position, index - len(transfers))
    return tuple(
        instructions[position]
        for position in sorted(range(len(instructions)), key=sort_keys.__getitem__)
    )


def _list_transfers(timing: Timing) -> list[_BusTransfer]:
    """Return the input transfers in bus order, each with the latest end that delays nothing."""
    table, instructions = timing.table, timing.input_instructions
    unread_positions = find_unread_page_ins(timing.homes, instructions)
    transfers = []
    for position, (op, i) in enumerate(instructions):
        if op == Op.COMPUTE:
            continue
        time_s = (table.page_in_time_s if op == Op.PAGE_IN else table.page_out_time_s)[i]
        end_s = timing.begin_s[position] + time_s
        waiting = timing.waiting_position[position]
        max_end_s = end_s if waiting == len(instructions) else max(end_s, timing.core_s[waiting])
        reader_position = position
        if op == Op.PAGE_IN and position not in unread_positions:
            reader_position, max_end_s = waiting, timing.begin_s[waiting]
        transfers.append(
            _BusTransfer(position, position, time_s, end_s, max_end_s, reader_position)
        )
    return transfers


def _delay_page_in(
    transfers: list[_BusTransfer],
    transfer: _BusTransfer,
    core_s: Sequence[float],
    tolerance_s: float,
) -> None:
    """Move a page-in as late as possible; update order, positions and ends of `transfers`."""
    old_index = last_index = transfers.index(transfer)
    # If two page-ins compete for the bus, the one that is used first begins first.
    while (
        last_index + 1 < len(transfers)
        and transfers[last_index + 1].new_position
        <= transfer.reader_position
        > transfers[last_index + 1].reader_position
    ):
        last_index += 1
    for index in range(last_index, old_index - 1, -1):
        min_position = transfers[index].new_position
        if index > old_index and transfers[index].new_position == transfers[index].position:
            min_position += 1  # behind a transfer in its input position
        max_position = transfer.reader_position
        if index + 1 < len(transfers):
            max_position = min(max_position, transfers[index + 1].new_position)
        latest_s = transfer.max_end_s - transfer.duration_s + tolerance_s
        max_position = min(max_position, bisect_right(core_s, latest_s) - 1)
        best_move = None
        while min_position <= max_position:
            new_position = (min_position + max_position) // 2
            ends = _find_ends_after_move(
                transfers, old_index, index, new_position, core_s, tolerance_s
            )
            if ends is None:
                max_position = new_position - 1
            else:
                best_move, min_position = (new_position, ends), new_position + 1
        if best_move is not None:
            transfer.new_position, ends = best_move
            transfers.insert(index, transfers.pop(old_index))
            for later_transfer, end_s in zip(transfers[old_index:], ends, strict=False):
                later_transfer.end_s = end_s
            return


def _find_ends_after_move(
    transfers: list[_BusTransfer],
    old_index: int,
    index: int,
    new_position: int,
    core_s: Sequence[float],
    tolerance_s: float,
) -> list[float] | None:
    """Return ends from `old_index` to the last that a move changes [s]; None if one is too late."""
    free_s = transfers[old_index - 1].end_s if old_index else 0.0
    order = [*range(old_index + 1, index + 1), old_index, *range(index + 1, len(transfers))]
    ends = []
    for transfer_index in order:
        transfer = transfers[transfer_index]
        begin_s = max(
            free_s, core_s[new_position if transfer_index == old_index else transfer.new_position]
        )
        free_s = begin_s + transfer.duration_s
        if free_s > transfer.max_end_s + tolerance_s:
            return None
        ends.append(free_s)
        if transfer_index > index and free_s == transfer.end_s:
            break
    return ends
