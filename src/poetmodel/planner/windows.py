"""Windows of transfers: the intervals between computations in which each transfer may begin."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.clock import check_time_limit
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import Copy, find_copies
from poetmodel.planner.sequence import find_unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """A transfer and its window; interval `g` precedes computation `g`."""

    tensor: int
    bytes: int
    """Size of the tensor [B]."""
    time_s: float
    """Duration on the bus [s]."""
    first_interval: int
    """First interval in which the transfer may begin."""
    last_interval: int = 0
    """Last interval in which the transfer may begin."""


@dataclass(slots=True, kw_only=True)
class PageIn(_Transfer):
    """A page-in; it may begin once the older copy of the tensor is dead and RAM suffices."""

    page_out_index: int | None = None
    """Index in `TransferWindows.page_outs` of the page-out that stores the tensor; None if the
    tensor is on storage initially."""


@dataclass(slots=True, kw_only=True)
class PageOut(_Transfer):
    """A page-out; it may begin after the tensor is computed, until the tensor is computed again."""

    first_dead_interval: int = 0
    """First interval after the last read of this copy or, without a read, after its computation."""
    due_interval: int = 0
    """First interval that waits for the page-out, because RAM is short, a page-in reads the tensor,
    or the tensor is computed again; the number of computations if none waits."""
    overwritable_bytes: int = 0
    """Bytes of this copy that its last reader, computation ``first_dead_interval - 1``, may
    overwrite once the page-out has finished [B]."""

    def held_bytes(self, interval: int) -> int:
        """Return the RAM that an unfinished page-out adds to the minimum in an interval [B]."""
        return self.bytes if interval >= self.first_dead_interval else self.overwritable_bytes

    @property
    def first_held_interval(self) -> int:
        """First interval in which the unfinished page-out may hold RAM; see `held_bytes`."""
        return self.first_dead_interval - (1 if self.overwritable_bytes else 0)


class TransferWindows:
    """Computations of a schedule in order, and the intervals in which each transfer may begin.

    Interval `g` precedes computation `g`. A RAM budget below the largest entry of `min_ram_bytes`
    is raised to it.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        actions: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        self._homes, self._table = homes, table
        unread_positions = find_unread_page_ins(homes, actions)
        intervals = []
        self.nodes: list[int | None] = []
        """Node of each computation; None marks the position of a page-in without a reader."""
        for position, (op, index) in enumerate(actions):
            intervals.append(len(self.nodes))
            if op == Op.COMPUTE or position in unread_positions:
                self.nodes.append(index if op == Op.COMPUTE else None)
        self._ram_changes = [0] * (len(self.nodes) + 1)
        """Change of the copies' RAM at each computation [B]."""
        self._latest_copy: dict[int, tuple[int, bool]] = {}
        """For each tensor the first dead interval of its latest copy, and whether this copy is
        paged out."""
        self._page_in_list: list[PageIn] = []
        self._page_out_of: dict[int, PageOut] = {}
        self._overwritable_bytes = [0] * len(self.nodes)
        """Bytes that each computation may overwrite, of copies that it reads last [B]."""
        for copy in find_copies(homes, actions):
            self._add_copy(copy, intervals, is_paged_in=actions[copy.begin].op == Op.PAGE_IN)
        self.compute_s = [0.0 if k is None else table.compute_time_s[k] for k in self.nodes]
        """Time of each computation [s]; 0 for the mark of a page-in without a reader."""
        self.remaining_s = [*list(accumulate(reversed(self.compute_s)))[::-1], 0.0]
        """Compute time from each interval to the end [s]; the last value is 0."""
        self.min_ram_bytes = self._find_min_ram()
        """RAM at each computation if page-ins begin in their last interval, and page-outs take no
        time [B]."""
        self.budget_bytes = max([ram_budget_bytes, *self.min_ram_bytes])
        """RAM budget [B], at least the maximum of `min_ram_bytes`."""
        self._limit_by_ram()
        self.page_outs = sorted(
            self._page_out_of.values(),
            key=lambda page_out: (page_out.due_interval, page_out.first_interval, page_out.tensor),
        )
        """Page-outs, sorted by due interval, first interval and tensor."""
        self.page_ins = sorted(
            self._page_in_list, key=lambda page_in: (page_in.last_interval, page_in.tensor)
        )
        """Page-ins, sorted by last interval and tensor."""
        index_of_page_out = {
            page_out.tensor: index for index, page_out in enumerate(self.page_outs)
        }
        for page_in in self.page_ins:
            page_in.page_out_index = index_of_page_out.get(page_in.tensor)

    def insert_transfers(
        self, interval_transfers: Iterable[tuple[int, Instruction]]
    ) -> tuple[Instruction, ...]:
        """Return the computations in order, each preceded by the transfers of its interval."""
        transfers_by_interval: list[list[Instruction]] = [[] for _ in range(len(self.nodes) + 1)]
        for interval, transfer in interval_transfers:
            transfers_by_interval[interval].append(transfer)
        actions: list[Instruction] = []
        for transfers, node in zip(transfers_by_interval, (*self.nodes, None), strict=True):
            actions.extend(transfers)
            if node is not None:
                actions.append(Instruction(Op.COMPUTE, node))
        return tuple(actions)

    def _add_copy(self, copy: Copy, intervals: Sequence[int], *, is_paged_in: bool) -> None:
        """Register a copy's change of RAM and, with their windows, its page-in and page-out.

        `intervals` holds the interval of each instruction, by position.
        """
        i, interval, end = copy.tensor, intervals[copy.begin], len(self.nodes)
        size, table = self._homes.sizes[i], self._table
        begin, first_dead_interval, overwritable_bytes = (
            (interval if is_paged_in else interval + 1),
            interval + 1,
            0,
        )
        if copy.reads:
            begin = intervals[copy.reads[0]] if is_paged_in else begin
            first_dead_interval = intervals[copy.reads[-1]] + 1
            node = self.nodes[first_dead_interval - 1]
            overwritable_bytes = (
                0 if node is None else self._homes.overwritten_bytes(node, (i,)).get(i, 0)
            )
            self._overwritable_bytes[first_dead_interval - 1] += overwritable_bytes
        self._ram_changes[begin] += size
        self._ram_changes[first_dead_interval] -= size
        older_first_dead, is_paged_out = self._latest_copy.get(i, (0, False))
        self._latest_copy[i] = (first_dead_interval, copy.is_paged_out)
        if is_paged_in:
            first_interval = max(
                older_first_dead,
                self._page_out_of[i].first_interval if i in self._page_out_of else 0,
            )
            self._page_in_list.append(
                PageIn(
                    tensor=i,
                    bytes=size,
                    time_s=table.page_in_time_s[i],
                    first_interval=first_interval if copy.reads else interval,
                    last_interval=begin,
                )
            )
        elif is_paged_out:
            self._page_out_of[i].last_interval = interval
        if copy.is_paged_out:
            time_s = table.page_out_time_s[i]
            self._page_out_of[i] = PageOut(
                tensor=i,
                bytes=size,
                time_s=time_s,
                first_interval=begin,
                last_interval=end,
                first_dead_interval=first_dead_interval,
                overwritable_bytes=overwritable_bytes,
            )

    def _find_min_ram(self) -> list[int]:
        """Return the RAM at each entry of `nodes` [B], if page-ins begin as late as possible."""
        step_bytes, resident_bytes = self._homes.step_bytes, self._homes.ram_bytes
        return [
            resident_bytes + copy_bytes + (0 if k is None else step_bytes[k]) - overwritable_bytes
            for copy_bytes, k, overwritable_bytes in zip(
                accumulate(self._ram_changes), self.nodes, self._overwritable_bytes, strict=False
            )
        ]

    def _limit_by_ram(self) -> None:
        """Set `due_interval` of page-outs; delay `first_interval` of page-ins until they fit."""

        def fits(interval: int, size_bytes: int) -> bool:
            """Return whether `size_bytes` fit in RAM beside the minimum in an interval."""
            return self.min_ram_bytes[interval] + size_bytes <= self.budget_bytes

        # Reversed, so that the first of several page-ins of a tensor is stored.
        last_interval_of_page_in = {
            page_in.tensor: page_in.last_interval for page_in in reversed(self._page_in_list)
        }
        for page_out in self._page_out_of.values():
            check_time_limit()
            end = max(
                page_out.first_dead_interval,
                min(
                    last_interval_of_page_in.get(page_out.tensor, len(self.nodes)),
                    page_out.last_interval,
                ),
            )
            intervals = range(page_out.first_held_interval, end)
            page_out.due_interval = next(
                (g for g in intervals if not fits(g, page_out.held_bytes(g))), end
            )
        for page_in in self._page_in_list:
            check_time_limit()
            intervals = range(page_in.last_interval, page_in.first_interval, -1)
            page_in.first_interval = next(
                (g for g in intervals if not fits(g - 1, page_in.bytes)), page_in.first_interval
            )
