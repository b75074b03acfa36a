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
class PageIn:
    """A page-in; gap `g` is the place right before computation `g`."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First gap that it may begin in: no older copy is used after it, and RAM allows it alone."""
    last: int = 0
    """The computation that reads it first, and so the last gap."""
    source: int | None = None
    """Which page-out puts the tensor on storage; None where it lies there from the start."""


@dataclass(slots=True, kw_only=True)
class PageOut:
    """A page-out; its gaps are numbered as those of a page-in."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First gap that it may begin in: right after the computation that makes the tensor."""
    last: int
    """The gap before the tensor is computed again; the number of computations if it is not."""
    unused: int = 0
    """The gap from which on nothing reads this copy any more."""
    due: int = 0
    """The first gap at which something waits for it: RAM is short, or a page-in reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWindows:
    """The computations of a schedule in order, and windows of its transfers."""

    nodes: tuple[int | None, ...]
    """What is computed; None stands for the place of a page-in that nothing reads."""
    compute_s: tuple[float, ...]
    """How long each computation takes [s]."""
    rest_s: tuple[float, ...]
    """Compute time from each gap to the end [s]; one more than computations."""
    need_bytes: tuple[int, ...]
    """The least RAM of each computation [B]: page-ins begin in their last gap, page-outs take no
    time."""
    page_ins: tuple[PageIn, ...]
    """By last gap."""
    page_outs: tuple[PageOut, ...]
    """By the gap at which they are due."""
    budget_bytes: int
    """RAM limit [B]; at least what the computations need."""

    @classmethod
    def of(
        cls, graph: Graph, table: CostTable, moves: Sequence[Instruction], ram_budget_bytes: int
    ) -> TransferWindows:
        """Find the windows of the moves of a schedule, limited by RAM and the life of copies."""
        finder = _WindowFinder(graph, table, moves)
        for place, step in enumerate(moves):
            finder.step(place, step)
        return finder.windows(ram_budget_bytes)

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


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One copy of a tensor."""

    begin: int
    """First computation at which it is in RAM beside what the computation makes."""
    end: int
    """The gap from which on nothing reads it."""
    page_in: PageIn | None = None
    page_out: PageOut | None = None


class _WindowFinder:
    """Follows the copies of tensors through the moves."""

    def __init__(self, graph: Graph, table: CostTable, moves: Sequence[Instruction]) -> None:
        self.graph, self.table = graph, table
        self.sizes = graph.tensor_bytes
        self.unread = unread_page_ins(graph, moves)
        self.end = sum(op == Op.COMPUTE for op, _ in moves) + len(self.unread)
        """The gap after the last computation."""
        self.nodes: list[int | None] = []
        self.copies: dict[int, _Copy] = {}
        self.held: list[tuple[int, int, int]] = []
        """Copies as (first computation, gap after the last, bytes)."""
        self.page_ins: list[PageIn] = []
        self.page_outs: dict[int, PageOut] = {}

    def step(self, place: int, step: Instruction) -> None:
        """Follow one move."""
        op, index = step
        gap = len(self.nodes)
        if op == Op.COMPUTE:
            self.nodes.append(index)
            for i in self.graph.inputs_of[index]:
                copy = self.copies[i]
                if copy.page_in is not None and copy.end == copy.begin:
                    copy.begin = copy.page_in.last = gap
                copy.end = gap + 1
            for i in self.graph.outputs_of[index]:
                self._close(i, gap)
                self.copies[i] = _Copy(begin=gap + 1, end=gap + 1)
        elif op == Op.PAGE_OUT:
            out = PageOut(
                tensor=index,
                bytes=self.sizes[index],
                time_s=self.table.page_out_time_s[index],
                first=self.copies[index].begin,
                last=self.end,
            )
            self.copies[index].page_out = self.page_outs[index] = out
        else:
            source = self.page_outs.get(index)
            into = PageIn(
                tensor=index,
                bytes=self.sizes[index],
                time_s=self.table.page_in_time_s[index],
                first=max(self._close(index, self.end), 0 if source is None else source.first),
            )
            self.page_ins.append(into)
            self.copies[index] = _Copy(begin=gap, end=gap, page_in=into)
            if place in self.unread:
                self.nodes.append(None)
                into.first = into.last = gap
                self.copies[index].end = gap + 1

    def _close(self, i: int, gap: int) -> int:
        """End a copy, which is recomputed after `gap`; return the gap from which it is unused."""
        copy = self.copies.pop(i, None)
        if copy is None:
            return 0
        self.held.append((copy.begin, copy.end, self.sizes[i]))
        if copy.page_out is not None:
            copy.page_out.unused = copy.end
            copy.page_out.last = gap
        return copy.end

    def windows(self, ram_budget_bytes: int) -> TransferWindows:
        """End the copies that are left and return the windows."""
        for i in list(self.copies):
            self._close(i, self.end)
        nodes, computed = self.graph.nodes, self.nodes
        change = [0] * (len(computed) + 1)
        for begin, end, size in self.held:
            change[begin] += size
            change[end] -= size
        need = [
            held + (0 if k is None else nodes[k].output_bytes + nodes[k].workspace_bytes)
            for held, k in zip(accumulate(change), computed, strict=False)
        ]
        compute_s = [0.0 if k is None else self.table.compute_time_s[k] for k in computed]
        budget = max([ram_budget_bytes, *need])

        def fits(gap: int, transfer: PageIn | PageOut) -> bool:
            return need[gap] + transfer.bytes <= budget

        first_read = {into.tensor: into.last for into in reversed(self.page_ins)}
        for out in self.page_outs.values():
            end = max(out.unused, min(first_read.get(out.tensor, self.end), out.last))
            out.due = next((g for g in range(out.unused, end) if not fits(g, out)), end)
        found = self.page_outs.values()
        page_outs = sorted(found, key=lambda out: (out.due, out.first, out.tensor))
        number = {out.tensor: x for x, out in enumerate(page_outs)}
        for into in self.page_ins:
            into.source = number.get(into.tensor)
            earlier = range(into.last, into.first, -1)
            into.first = next((g for g in earlier if not fits(g - 1, into)), into.first)
        return TransferWindows(
            nodes=tuple(computed),
            compute_s=tuple(compute_s),
            rest_s=(*list(accumulate(reversed(compute_s)))[::-1], 0.0),
            need_bytes=tuple(need),
            page_ins=tuple(sorted(self.page_ins, key=lambda into: (into.last, into.tensor))),
            page_outs=tuple(page_outs),
            budget_bytes=budget,
        )
