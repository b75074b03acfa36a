"""The gaps between computations in which each transfer of a schedule may begin."""

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
    """A transfer; gap `g` is the place right before computation `g`."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First gap that it may begin in."""
    last: int = 0
    """Last gap that it may begin in."""


@dataclass(slots=True, kw_only=True)
class PageIn(_Transfer):
    """A page-in: from where no older copy is used, and RAM allows it alone, to its first reader."""

    source: int | None = None
    """Which page-out puts the tensor on storage; None where it lies there from the start."""


@dataclass(slots=True, kw_only=True)
class PageOut(_Transfer):
    """A page-out: from right after what makes the tensor to where that is computed again."""

    unused: int = 0
    """The gap from which on nothing reads this copy any more."""
    due: int = 0
    """The first gap at which something waits for it: RAM is short, or a page-in reads it."""
    shared_bytes: int = 0
    """Bytes that its last reader, in gap `unused` less 1, overwrites once it is done [B]."""

    def held_bytes(self, gap: int) -> int:
        """Return the RAM that it keeps at a computation unless it is done before [B]."""
        return self.bytes if gap >= self.unused else self.shared_bytes

    @property
    def held_from(self) -> int:
        """The first gap at which it keeps any."""
        return self.unused - (1 if self.shared_bytes else 0)


class TransferWindows:
    """The computations of a schedule in order, and windows of its transfers.

    Windows of the moves of the schedule are limited by RAM and the life of copies.
    """

    def __init__(
        self,
        homes: Homes,
        table: CostTable,
        moves: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> None:
        self._homes, self._table = homes, table
        unread = unread_page_ins(homes, moves)
        gaps = []
        self.nodes: list[int | None] = []
        """Computed node; None stands for the place of a page-in that nothing reads."""
        for position, (op, index) in enumerate(moves):
            gaps.append(len(self.nodes))
            if op == Op.COMPUTE or position in unread:
                self.nodes.append(index if op == Op.COMPUTE else None)
        self._change = [0] * (len(self.nodes) + 1)
        """By how much the copies in RAM change from each computation on [B]."""
        self._before: dict[int, tuple[int, bool]] = {}
        """From where the latest copy of a tensor is unused, and whether it is paged out."""
        self._ins: list[PageIn] = []
        self._outs: dict[int, PageOut] = {}
        self._shared = [0] * len(self.nodes)
        """By how much each computation can write over its inputs [B]."""
        for copy in find_copies(homes, moves):
            self._enter(copy, gaps, paged_in=moves[copy.begin].op == Op.PAGE_IN)
        self.compute_s = [0.0 if k is None else table.compute_time_s[k] for k in self.nodes]
        """How long each computation takes [s]."""
        self.rest_s = [*list(accumulate(reversed(self.compute_s)))[::-1], 0.0]
        """Compute time from each gap to the end [s]; one more than computations."""
        self.need_bytes = self._need_bytes()
        """The least RAM of each computation [B]: page-ins begin in their last gap, page-outs take
        no time."""
        self.budget_bytes = max([ram_budget_bytes, *self.need_bytes])
        """RAM limit [B]; at least what the computations need."""
        self._limit()
        self.page_outs = sorted(self._outs.values(), key=lambda x: (x.due, x.first, x.tensor))
        """By the gap at which they are due."""
        self.page_ins = sorted(self._ins, key=lambda x: (x.last, x.tensor))
        """By last gap."""
        number = {out.tensor: x for x, out in enumerate(self.page_outs)}
        for into in self.page_ins:
            into.source = number.get(into.tensor)

    def steps(self, chosen: Iterable[tuple[int, Instruction]]) -> tuple[Instruction, ...]:
        """Put transfers, given with their gaps and in bus order, between the computations."""
        at: list[list[Instruction]] = [[] for _ in range(len(self.nodes) + 1)]
        for gap, transfer in chosen:
            at[gap].append(transfer)
        steps: list[Instruction] = []
        for transfers, node in zip(at, (*self.nodes, None), strict=True):
            steps.extend(transfers)
            if node is not None:
                steps.append(Instruction(Op.COMPUTE, node))
        return tuple(steps)

    def _enter(self, copy: Copy, gaps: Sequence[int], *, paged_in: bool) -> None:
        """Enter a copy, with its page-in and page-out; `gaps` are those of the moves."""
        i, gap, end = copy.tensor, gaps[copy.begin], len(self.nodes)
        size, table = self._homes.sizes[i], self._table
        begin, unused, shared = (gap if paged_in else gap + 1), gap + 1, 0
        if copy.reads:
            begin = gaps[copy.reads[0]] if paged_in else begin
            unused = gaps[copy.reads[-1]] + 1
            node = self.nodes[unused - 1]
            shared = 0 if node is None else self._homes.overwritten_bytes(node, (i,)).get(i, 0)
            self._shared[unused - 1] += shared
        self._change[begin] += size
        self._change[unused] -= size
        older, paged_out = self._before.get(i, (0, False))
        self._before[i] = (unused, copy.paged_out)
        if paged_in:
            first = max(older, self._outs[i].first if i in self._outs else 0)
            self._ins.append(
                PageIn(
                    tensor=i,
                    bytes=size,
                    time_s=table.page_in_time_s[i],
                    first=first if copy.reads else gap,
                    last=begin,
                )
            )
        elif paged_out:
            self._outs[i].last = gap
        if copy.paged_out:
            time_s = table.page_out_time_s[i]
            self._outs[i] = PageOut(
                tensor=i,
                bytes=size,
                time_s=time_s,
                first=begin,
                last=end,
                unused=unused,
                shared_bytes=shared,
            )

    def _need_bytes(self) -> list[int]:
        step_bytes, resident = self._homes.step_bytes, self._homes.ram_bytes
        return [
            resident + held + (0 if k is None else step_bytes[k]) - shared
            for held, k, shared in zip(
                accumulate(self._change), self.nodes, self._shared, strict=False
            )
        ]

    def _limit(self) -> None:
        """Find when page-outs are due, and from where on RAM allows each page-in."""

        def fits(gap: int, size_bytes: int) -> bool:
            return self.need_bytes[gap] + size_bytes <= self.budget_bytes

        # Reversed, so that of several page-ins of a tensor the first one stays.
        first_read = {into.tensor: into.last for into in reversed(self._ins)}
        for out in self._outs.values():
            check_time_limit()
            end = max(out.unused, min(first_read.get(out.tensor, len(self.nodes)), out.last))
            held = range(out.held_from, end)
            out.due = next((g for g in held if not fits(g, out.held_bytes(g))), end)
        for into in self._ins:
            check_time_limit()
            earlier = range(into.last, into.first, -1)
            into.first = next((g for g in earlier if not fits(g - 1, into.bytes)), into.first)
