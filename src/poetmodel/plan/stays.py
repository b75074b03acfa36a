"""What is in RAM when: each copy of a tensor and each workspace of a plan, and how it came."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from poetmodel.device import StorageMode
from poetmodel.plan.arena import BEFORE, Content
from poetmodel.plan.simulation import check_identity
from poetmodel.schedule.instructions import Op

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan


class Origin(StrEnum):
    """How something came into RAM."""

    COMPUTED = "computed"
    """By the first computation of its node."""
    RECOMPUTED = "recomputed"
    """By a later one."""
    PAGED_IN = "paged in"
    """From storage; the first read of state is a page-in."""
    RESIDENT = "resident"
    """State that was there before the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """One copy of a tensor, or one workspace, from the instruction that makes it to its end.

    It takes RAM during all instructions from `begin` to `end`, and after all of these but the last.
    """

    content: Content
    index: int
    """A tensor's number; a node's index for a workspace."""
    origin: Origin
    bytes: int
    """Its size [B]."""
    begin: int
    """The instruction that makes it; `BEFORE` for resident state."""
    end: int
    """The instruction that ends it, the length of the program where none does.

    It is a free, the computation of the next copy, or of a workspace the one that needs it.
    """
    reads: tuple[int, ...] = ()
    """The computations that read it, in order."""
    paged_out: bool = False
    """Whether it was copied to storage."""
    replaced_by: int | None = None
    """The tensor that was written over it, where it is state that was replaced."""
    given_at: int | None = None
    """The computation whose output took its memory over in place."""
    given_bytes: int = 0
    """How much of it that output took: from there on this is not its own [B]."""


def stays(graph: Graph, plan: Plan) -> tuple[Stay, ...]:
    """Return all that a valid plan has in RAM, in the order in which the program makes it.

    An output in place and its input, and state and what replaces it, share memory: no byte belongs
    to two of them, so that the sum at each instruction is the RAM that `check_plan` finds.

    Raises
    ------
    PlanError
        If the plan names another graph.
    """
    check_identity(graph, plan)
    walk = _Walk(graph, plan)
    walk.run()
    return tuple(sorted(walk.done, key=lambda one: (one.begin, one.content, one.index)))


def ram_in_use(found: Iterable[Stay], instructions: int) -> tuple[tuple[int, int], ...]:
    """Return for each instruction what is in RAM during it, and after it [B]."""
    change = [0] * (2 * instructions + 2)  # during and after each instruction, and the end
    for one in found:
        change[2 * max(one.begin, 0)] += one.bytes
        last = min(2 * one.end + 1, 2 * instructions)
        change[last] -= one.bytes - one.given_bytes
        if one.given_at is not None:
            change[2 * one.given_at] -= one.given_bytes
    levels = list(accumulate(change))
    return tuple(zip(levels[0 : 2 * instructions : 2], levels[1::2], strict=False))


@dataclass(slots=True)
class _Copy:
    """A stay that has not ended yet."""

    origin: Origin
    begin: int
    reads: list[int]
    paged_out: bool = False
    replaced_by: int | None = None
    given_at: int | None = None
    given_bytes: int = 0


class _Walk:
    """One walk through a program: which copy of each tensor is in RAM."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.homes = plan.homes(graph)
        self.sizes = self.homes.sizes
        self.live: dict[int, _Copy] = {}
        self.lies_at: dict[int, int] = {}
        """Replacements in RAM, each with the state in whose memory they are."""
        self.under_way: set[int] = set()
        self.computed: set[int] = set()
        self.done: list[Stay] = []

    def run(self) -> None:
        """Walk from what is there before the program to its end."""
        program = self.plan.program
        for i in sorted(self.homes.resident):
            self.live[i] = _Copy(Origin.RESIDENT, BEFORE, [])
        for position, (op, index) in enumerate(program):
            if not 0 <= index < len(self.graph.nodes if op == Op.COMPUTE else self.sizes):
                continue
            if op == Op.COMPUTE:
                self._compute(position, index)
            elif op == Op.PAGE_IN:
                self._page_in(position, index)
            elif op == Op.PAGE_OUT:
                self._page_out(index)
            elif op == Op.WAIT:
                self.under_way.discard(index)
            else:
                self._end(position, self.lies_at.get(index, index))
        for i in list(self.live):
            self._end(len(program), i)

    def _page_in(self, position: int, i: int) -> None:
        self.live.setdefault(i, _Copy(Origin.PAGED_IN, position, []))
        self.under_way.add(i)

    def _page_out(self, i: int) -> None:
        where = self.lies_at.get(i, i)
        if where in self.live:
            self.live[where].paged_out = True
        self.under_way.add(i)

    def _compute(self, position: int, k: int) -> None:
        if k in self.homes.first_reads:
            self._page_in(position, self.homes.first_reads[k])
            return
        for i in self.graph.inputs_of[k]:
            if i in self.live:
                self.live[i].reads.append(position)
        self._give(position, k)
        origin = Origin.RECOMPUTED if k in self.computed else Origin.COMPUTED
        self.computed.add(k)
        for i in self.homes.new[k]:
            self._end(position, i)  # an old copy is beside the new one until now
            self.live[i] = _Copy(origin, position, [])
        workspace = self.graph.nodes[k].workspace_bytes
        if workspace:
            self.done.append(
                Stay(
                    content=Content.WORKSPACE,
                    index=k,
                    origin=origin,
                    bytes=workspace,
                    begin=position,
                    end=position,
                )
            )
        for new in self.graph.outputs_of[k]:
            old = self.graph.state_of.get(new)
            if old in self.live:
                self.live[old].replaced_by = new
                self.lies_at[new] = old

    def _give(self, position: int, k: int) -> None:
        """Let outputs take over the memory of the inputs at rest that are freed right after."""
        dying = set()
        for op, i in islice(self.plan.program, position + 1, None):
            if op != Op.FREE:
                break
            dying.add(i)
        if self.plan.mode == StorageMode.DMA:
            dying -= self.under_way
        for y, x in self.graph.in_place_of[k]:
            if x in dying and x in self.live:
                self.live[x].given_at = position
                self.live[x].given_bytes = min(self.sizes[x], self.sizes[y])

    def _end(self, position: int, i: int) -> None:
        copy = self.live.pop(i, None)
        if copy is None:
            return
        self.done.append(
            Stay(
                content=Content.OUTPUT,
                index=i,
                origin=copy.origin,
                bytes=self.sizes[i],
                begin=copy.begin,
                end=position,
                reads=tuple(copy.reads),
                paged_out=copy.paged_out,
                replaced_by=copy.replaced_by,
                given_at=copy.given_at,
                given_bytes=copy.given_bytes,
            )
        )
