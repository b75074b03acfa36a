"""The gaps between computations in which each transfer of a schedule may begin."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op
from poetmodel.planner.sequence import unread_page_ins

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.device import CostTable
    from poetmodel.graph import Graph


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


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One copy of a tensor."""

    begin: int
    """First computation at which it is in RAM beside what the computation makes."""
    end: int
    """The gap from which on nothing reads it."""
    page_in: PageIn | None = None
    page_out: PageOut | None = None


class TransferWindows:
    """The computations of a schedule in order, and windows of its transfers.

    Windows of the moves of the schedule are limited by RAM and the life of copies.
    """

    def __init__(
        self, graph: Graph, table: CostTable, moves: Sequence[Instruction], ram_budget_bytes: int
    ) -> None:
        self._graph, self._table = graph, table
        self._unread = unread_page_ins(graph, moves)
        self._end = sum(op == Op.COMPUTE for op, _ in moves) + len(self._unread)
        """The gap after the last computation."""
        self._copies: dict[int, _Copy] = {}
        self._held: list[tuple[int, int, int]] = []
        """Copies as (first computation, gap after the last, bytes)."""
        self._ins: list[PageIn] = []
        self._outs: dict[int, PageOut] = {}
        self.nodes: list[int | None] = []
        """What is computed; None stands for the place of a page-in that nothing reads."""
        for place, step in enumerate(moves):
            self._follow(place, step)
        for i in list(self._copies):
            self._close(i, self._end)
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

    def _follow(self, place: int, step: Instruction) -> None:
        """Follow the copies of tensors through one move."""
        op, index = step
        gap = len(self.nodes)
        size = self._graph.tensor_bytes[index] if op != Op.COMPUTE else 0
        if op == Op.COMPUTE:
            self.nodes.append(index)
            for i in self._graph.inputs_of[index]:
                copy = self._copies[i]
                if copy.page_in is not None and copy.end == copy.begin:
                    copy.begin = copy.page_in.last = gap
                copy.end = gap + 1
            for i in self._graph.outputs_of[index]:
                self._close(i, gap)
                self._copies[i] = _Copy(begin=gap + 1, end=gap + 1)
        elif op == Op.PAGE_OUT:
            copy, time_s = self._copies[index], self._table.page_out_time_s[index]
            copy.page_out = self._outs[index] = PageOut(
                tensor=index, bytes=size, time_s=time_s, first=copy.begin, last=self._end
            )
        else:
            source, time_s = self._outs.get(index), self._table.page_in_time_s[index]
            first = max(self._close(index, self._end), 0 if source is None else source.first)
            into = PageIn(tensor=index, bytes=size, time_s=time_s, first=first)
            self._ins.append(into)
            copy = self._copies[index] = _Copy(begin=gap, end=gap, page_in=into)
            if place in self._unread:
                self.nodes.append(None)
                into.first = into.last = gap
                copy.end = gap + 1

    def _close(self, i: int, gap: int) -> int:
        """End a copy, which is recomputed after `gap`; return the gap from which it is unused."""
        copy = self._copies.pop(i, None)
        if copy is None:
            return 0
        self._held.append((copy.begin, copy.end, self._graph.tensor_bytes[i]))
        if copy.page_out is not None:
            copy.page_out.unused = copy.end
            copy.page_out.last = gap
        return copy.end

    def _need_bytes(self) -> list[int]:
        nodes = self._graph.nodes
        change = [0] * (len(self.nodes) + 1)
        for begin, end, size in self._held:
            change[begin] += size
            change[end] -= size
        return [
            held + (0 if k is None else nodes[k].output_bytes + nodes[k].workspace_bytes)
            for held, k in zip(accumulate(change), self.nodes, strict=False)
        ]

    def _limit(self) -> None:
        """Find when page-outs are due, and from where on RAM allows each page-in."""

        def fits(gap: int, transfer: _Transfer) -> bool:
            return self.need_bytes[gap] + transfer.bytes <= self.budget_bytes

        first_read = {into.tensor: into.last for into in reversed(self._ins)}
        for out in self._outs.values():
            end = max(out.unused, min(first_read.get(out.tensor, self._end), out.last))
            out.due = next((g for g in range(out.unused, end) if not fits(g, out)), end)
        for into in self._ins:
            earlier = range(into.last, into.first, -1)
            into.first = next((g for g in earlier if not fits(g - 1, into)), into.first)
