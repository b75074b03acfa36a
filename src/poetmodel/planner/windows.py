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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIn:
    """A page-in; gap `g` is the place right before computation `g`."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First gap that it may begin in: no older copy is used after it, and RAM allows it alone."""
    last: int
    """The computation that reads it first, and so the last gap."""
    source: int | None
    """Which page-out puts the tensor on storage; None where it lies there from the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOut:
    """A page-out; its gaps are numbered as those of a page-in."""

    tensor: int
    bytes: int
    time_s: float
    first: int
    """First gap that it may begin in: right after the computation that makes the tensor."""
    last: int
    """The gap before the tensor is computed again; the number of computations if it is not."""
    unused: int
    """The gap from which on nothing reads this copy any more."""
    due: int
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
        cls,
        graph: Graph,
        table: CostTable,
        moves: Sequence[Instruction],
        ram_budget_bytes: int,
    ) -> TransferWindows:
        """Find the windows.

        Parameters
        ----------
        graph : Graph
            The training graph.
        table : CostTable
            Times of computations and transfers.
        moves : sequence of Instruction
            Computations and transfers in the order of a schedule, see `moves_of`.
        ram_budget_bytes : int
            RAM limit of the plan [B].

        Returns
        -------
        TransferWindows
            Limited by RAM and by the life of the copies.
        """
        finder = _WindowFinder(graph, moves)
        for place, step in enumerate(moves):
            finder.step(place, step)
        finder.close_all()
        return finder.windows(table, ram_budget_bytes)

    def steps(self, chosen: Iterable[tuple[int, Instruction]]) -> tuple[Instruction, ...]:
        """Put transfers, given with their gaps and in bus order, between the computations."""
        at: list[list[Instruction]] = [[] for _ in range(len(self.nodes) + 1)]
        for gap, transfer in chosen:
            at[gap].append(transfer)
        steps: list[Instruction] = []
        for gap, transfers in enumerate(at):
            steps.extend(transfers)
            node = self.nodes[gap] if gap < len(self.nodes) else None
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
    page_in: _Window | None = None
    page_out: _Window | None = None


@dataclass(slots=True, kw_only=True)
class _Window:
    """A transfer whose window is not complete yet."""

    tensor: int
    first: int
    last: int = 0
    unused: int = 0
    source: _Window | None = None


class _WindowFinder:
    """Follows the copies of tensors through the moves."""

    def __init__(self, graph: Graph, moves: Sequence[Instruction]) -> None:
        self.graph = graph
        self.unread = unread_page_ins(graph, moves)
        self.nodes: list[int | None] = []
        self.copies: dict[int, _Copy] = {}
        self.held: list[tuple[int, int, int]] = []
        """Copies as (first computation, gap after the last, bytes)."""
        self.page_ins: list[_Window] = []
        self.page_outs: dict[int, _Window] = {}

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
            window = _Window(tensor=index, first=self.copies[index].begin, last=-1)
            self.copies[index].page_out = self.page_outs[index] = window
        else:
            before = self._close(index, -1)
            source = self.page_outs.get(index)
            window = _Window(tensor=index, first=before, source=source)
            if source is not None:
                window.first = max(before, source.first)
            self.page_ins.append(window)
            self.copies[index] = _Copy(begin=gap, end=gap, page_in=window)
            if place in self.unread:
                self.nodes.append(None)
                window.first = window.last = gap
                self.copies[index].end = gap + 1

    def close_all(self) -> None:
        """End the copies that are left."""
        for i in list(self.copies):
            self._close(i, -1)

    def _close(self, i: int, gap: int) -> int:
        """End a copy, which is recomputed after `gap`; return the gap from which it is unused."""
        copy = self.copies.pop(i, None)
        if copy is None:
            return 0
        self.held.append((copy.begin, copy.end, self.graph.tensor_bytes[i]))
        if copy.page_out is not None:
            copy.page_out.unused = copy.end
            copy.page_out.last = gap
        return copy.end

    def windows(self, table: CostTable, budget: int) -> TransferWindows:
        """Return the windows."""
        nodes = self.graph.nodes
        sizes = self.graph.tensor_bytes
        computed = self.nodes
        change = [0] * (len(computed) + 1)
        for begin, end, size in self.held:
            change[begin] += size
            change[end] -= size
        need = [
            held + (0 if k is None else nodes[k].output_bytes + nodes[k].workspace_bytes)
            for held, k in zip(accumulate(change), computed, strict=False)
        ]
        compute_s = [0.0 if k is None else table.compute_time_s[k] for k in computed]
        budget = max([budget, *need])
        last_gap = {out.tensor: len(computed) for out in self.page_outs.values()}
        for into in reversed(self.page_ins):
            last_gap[into.tensor] = into.last
        page_outs = [
            PageOut(
                tensor=out.tensor,
                bytes=sizes[out.tensor],
                time_s=table.page_out_time_s[out.tensor],
                first=out.first,
                last=out.last if out.last >= 0 else len(computed),
                unused=out.unused,
                due=_due_gap(out, sizes[out.tensor], need, budget, last_gap[out.tensor]),
            )
            for out in self.page_outs.values()
        ]
        page_outs.sort(key=lambda out: (out.due, out.first, out.tensor))
        number = {out.tensor: x for x, out in enumerate(page_outs)}
        page_ins = [
            PageIn(
                tensor=into.tensor,
                bytes=sizes[into.tensor],
                time_s=table.page_in_time_s[into.tensor],
                first=_first_gap(into, sizes[into.tensor], need, budget),
                last=into.last,
                source=None if into.source is None else number[into.tensor],
            )
            for into in self.page_ins
        ]
        return TransferWindows(
            nodes=tuple(computed),
            compute_s=tuple(compute_s),
            rest_s=(*list(accumulate(reversed(compute_s)))[::-1], 0.0),
            need_bytes=tuple(need),
            page_ins=tuple(sorted(page_ins, key=lambda into: (into.last, into.tensor))),
            page_outs=tuple(page_outs),
            budget_bytes=budget,
        )


def _first_gap(window: _Window, size_bytes: int, need: Sequence[int], budget: int) -> int:
    """Return the first gap from which a page-in fits beside what is needed up to its use."""
    gap = window.last
    while gap > window.first and need[gap - 1] + size_bytes <= budget:
        gap -= 1
    return gap


def _due_gap(window: _Window, size_bytes: int, need: Sequence[int], budget: int, read: int) -> int:
    """Return the first gap after the copy's use at which it does not fit, or that reads it."""
    end = read if window.last < 0 else min(read, window.last)
    gap = window.unused
    while gap < end and need[gap] + size_bytes <= budget:
        gap += 1
    return gap
