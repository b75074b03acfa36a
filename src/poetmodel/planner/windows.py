"""Windows of transfers: the intervals between computations in which each transfer may begin."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.clock import check_time_limit
from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import Copy, find_copies
from poetmodel.planner.sequence import unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes


@dataclass(slots=True, kw_only=True)
class _Transfer:
    """A transfer and its window; interval `g` precedes computation `g`."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First interval in which the transfer may begin."""
    last: int = 0
    """Last interval in which the transfer may begin."""


@dataclass(slots=True, kw_only=True)
class PageIn(_Transfer):
    """A page-in; it may begin once no older copy is in use and RAM suffices."""

    source: int | None = None
    """Index of the page-out that stores the tensor; None if the tensor is on storage initially."""


@dataclass(slots=True, kw_only=True)
class PageOut(_Transfer):
    """A page-out; it may begin after the tensor is computed, until the tensor is computed again."""

    dead_from: int = 0
    """First interval after the last read of this copy."""
    due: int = 0
    """First interval that waits for the page-out, because RAM is short or a page-in reads the
    tensor."""
    shared_bytes: int = 0
    """Bytes of this copy that its last reader, in interval ``dead_from - 1``, may overwrite once
    the page-out has finished [B]."""

    def held_bytes(self, interval: int) -> int:
        """Return the RAM that the copy occupies in an interval until the page-out finishes [B]."""
        return self.bytes if interval >= self.dead_from else self.shared_bytes

    @property
    def held_from(self) -> int:
        """First interval in which `held_bytes` is positive."""
        return self.dead_from - (1 if self.shared_bytes else 0)


class TransferWindows:
    """Computations of a schedule in order, and the windows of its transfers.

    The RAM budget and the lifetimes of copies limit the windows.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        moves: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        """Find the windows of the transfers in `moves`, for a RAM budget.

        `moves` is the result of `computations_and_transfers`.
        """
        self._homes, self._table = homes, table
        unread_positions = unread_page_ins(homes, moves)
        intervals = []
        self.nodes: list[int | None] = []
        """Node of each computation; None marks the position of a page-in without a reader."""
        for position, (op, index) in enumerate(moves):
            intervals.append(len(self.nodes))
            if op == Op.COMPUTE or position in unread_positions:
                self.nodes.append(index if op == Op.COMPUTE else None)
        self._change = [0] * (len(self.nodes) + 1)
        """Change of the copies' RAM at each computation [B]."""
        self._latest_copy: dict[int, tuple[int, bool]] = {}
        """For each tensor the first interval after the last read of its latest copy, and whether
        that copy is paged out."""
        self._ins: list[PageIn] = []
        self._outs: dict[int, PageOut] = {}
        self._shared = [0] * len(self.nodes)
        """Bytes of inputs that each computation may overwrite [B]."""
        for copy in find_copies(homes, moves):
            self._add_copy(copy, intervals, paged_in=moves[copy.begin].op == Op.PAGE_IN)
        self.compute_s = [0.0 if k is None else table.compute_time_s[k] for k in self.nodes]
        """Time of each computation [s]."""
        self.rest_s = [*list(accumulate(reversed(self.compute_s)))[::-1], 0.0]
        """Compute time from each interval to the end [s], shape (computations + 1,)."""
        self.need_bytes = self._need_bytes()
        """Minimum RAM at each computation [B]: page-ins begin in their last interval, and page-outs
        take no time."""
        self.budget_bytes = max([ram_budget_bytes, *self.need_bytes])
        """RAM budget [B], raised to the maximum of `need_bytes`."""
        self._limit_by_ram()
        self.page_outs = sorted(self._outs.values(), key=lambda x: (x.due, x.first, x.tensor))
        """Page-outs, sorted by due interval."""
        self.page_ins = sorted(self._ins, key=lambda x: (x.last, x.tensor))
        """Page-ins, sorted by last interval."""
        index_of_page_out = {page_out.tensor: x for x, page_out in enumerate(self.page_outs)}
        for page_in in self.page_ins:
            page_in.source = index_of_page_out.get(page_in.tensor)

    def steps(
        self, interval_transfers: Iterable[tuple[int, Instruction]]
    ) -> tuple[Instruction, ...]:
        """Insert transfers, given as (interval, transfer) in bus order, between computations."""
        at: list[list[Instruction]] = [[] for _ in range(len(self.nodes) + 1)]
        for interval, transfer in interval_transfers:
            at[interval].append(transfer)
        steps: list[Instruction] = []
        for transfers, node in zip(at, (*self.nodes, None), strict=True):
            steps.extend(transfers)
            if node is not None:
                steps.append(Instruction(Op.COMPUTE, node))
        return tuple(steps)

    def _add_copy(self, copy: Copy, intervals: Sequence[int], *, paged_in: bool) -> None:
        """Record RAM and transfers of a copy; `intervals` has the interval of each move."""
        i, interval, end = copy.tensor, intervals[copy.begin], len(self.nodes)
        size, table = self._homes.sizes[i], self._table
        begin, dead_from, shared_bytes = (interval if paged_in else interval + 1), interval + 1, 0
        if copy.reads:
            begin = intervals[copy.reads[0]] if paged_in else begin
            dead_from = intervals[copy.reads[-1]] + 1
            node = self.nodes[dead_from - 1]
            shared_bytes = (
                0 if node is None else self._homes.overwritten_bytes(node, (i,)).get(i, 0)
            )
            self._shared[dead_from - 1] += shared_bytes
        self._change[begin] += size
        self._change[dead_from] -= size
        older_dead_from, paged_out = self._latest_copy.get(i, (0, False))
        self._latest_copy[i] = (dead_from, copy.paged_out)
        if paged_in:
            first = max(older_dead_from, self._outs[i].first if i in self._outs else 0)
            self._ins.append(
                PageIn(
                    tensor=i,
                    bytes=size,
                    time_s=table.page_in_time_s[i],
                    first=first if copy.reads else interval,
                    last=begin,
                )
            )
        elif paged_out:
            self._outs[i].last = interval
        if copy.paged_out:
            time_s = table.page_out_time_s[i]
            self._outs[i] = PageOut(
                tensor=i,
                bytes=size,
                time_s=time_s,
                first=begin,
                last=end,
                dead_from=dead_from,
                shared_bytes=shared_bytes,
            )

    def _need_bytes(self) -> list[int]:
        """Return the minimum RAM at each computation [B]."""
        step_bytes, resident_bytes = self._homes.step_bytes, self._homes.ram_bytes
        return [
            resident_bytes + copy_bytes + (0 if k is None else step_bytes[k]) - shared_bytes
            for copy_bytes, k, shared_bytes in zip(
                accumulate(self._change), self.nodes, self._shared, strict=False
            )
        ]

    def _limit_by_ram(self) -> None:
        """Set the due interval of page-outs, and the first interval with enough RAM of page-ins."""

        def fits(interval: int, size_bytes: int) -> bool:
            """Return whether RAM has further `size_bytes` in an interval."""
            return self.need_bytes[interval] + size_bytes <= self.budget_bytes

        # Reversed, so that the first of several page-ins of a tensor is stored.
        first_read = {page_in.tensor: page_in.last for page_in in reversed(self._ins)}
        for page_out in self._outs.values():
            check_time_limit()
            end = max(
                page_out.dead_from,
                min(first_read.get(page_out.tensor, len(self.nodes)), page_out.last),
            )
            intervals = range(page_out.held_from, end)
            page_out.due = next((g for g in intervals if not fits(g, page_out.held_bytes(g))), end)
        for page_in in self._ins:
            check_time_limit()
            earlier = range(page_in.last, page_in.first, -1)
            page_in.first = next(
                (g for g in earlier if not fits(g - 1, page_in.bytes)), page_in.first
            )
