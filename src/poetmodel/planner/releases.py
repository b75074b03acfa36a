"""When page-outs are waited for: as late as RAM allows, or as soon as it costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.plan import Instruction, Op
from poetmodel.plan.derivation import ends_of_copies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.device import CostTable
    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps with their waits for page-outs, and when everything happens."""

    steps: tuple[Instruction, ...]
    """What `with_waits_and_frees` completes to the program."""
    core_s: tuple[float, ...]
    """When the core comes to each step of the list given, before it waits for anything [s]."""
    begin_s: tuple[float, ...]
    """When each step of the list given begins: the core, or the bus for a transfer [s]."""
    waited: tuple[int, ...]
    """For each transfer of the list given the place that waits for it, or finds it done; one past
    the end where none does. For a computation its own place."""
    makespan_s: float
    """When core and bus are done [s]."""
    stall_s: float
    """Time that the core waits for the bus [s]."""
    peak_ram_bytes: int
    """Highest RAM use [B]."""


def timed(
    graph: Graph, table: CostTable, steps: Sequence[Instruction], ram_budget_bytes: int
) -> Timing:
    """Run computations and transfers on a core and a DMA channel.

    Parameters
    ----------
    graph : Graph
        The training graph.
    table : CostTable
        Times of computations and transfers.
    steps : sequence of Instruction
        Computations, page-ins and page-outs in program order.
    ram_budget_bytes : int
        RAM that the waits shall keep to [B].

    Returns
    -------
    Timing
        A page-out of a tensor that nothing uses any more is waited for where its RAM is needed, or
        where it is done by then. For the order given, no other choice of waits is quicker.

    Notes
    -----
    Transfers end in the order in which they begin. So where RAM is needed, the ones begun first
    are waited for first, and no more of them than it takes.
    """
    run = _Run(graph, table, ram_budget_bytes, steps)
    for place, step in enumerate(steps):
        run.step(place, step)
    return run.finish()


class _Run:
    """Core, bus and RAM while the steps are walked."""

    def __init__(
        self, graph: Graph, table: CostTable, budget: int, steps: Sequence[Instruction]
    ) -> None:
        self.graph, self.table, self.budget = graph, table, budget
        self.sizes = graph.tensor_bytes
        self.ends = ends_of_copies(graph, steps)
        self.steps: list[Instruction] = []
        self.core_times: list[float] = []
        self.begin_times: list[float] = []
        self.core = self.bus = self.stall = 0.0
        self.ram = self.peak = 0
        self.waited: list[int] = []
        self.place = 0
        self.began: dict[int, int] = {}
        """Places of the transfers under way, by tensor."""
        self.arriving: dict[int, float] = {}
        """When the page-ins under way end, by tensor."""
        self.going: dict[int, float] = {}
        """When the page-outs under way end, by tensor, in the order in which they began."""
        self.touched: dict[int, int] = {}
        """Of those, the ones that nothing uses any more, and how many steps there were by then."""

    def step(self, place: int, step: Instruction) -> None:
        """Do one step, and what has to be waited for before it."""
        self.core_times.append(self.core)
        self.waited.append(place)
        self.place = place
        for i in [i for i in self.touched if self.going[i] <= self.core]:
            self._release(i)
        op, index = step
        if op == Op.COMPUTE:
            self._compute(index)
        else:
            self._transfer(op, index)
        self.steps.append(step)
        for i in self.ends.get(place, ()):
            if i in self.arriving:
                self._wait(i, self.arriving)
            if self.going.get(i, self.core) > self.core:
                self.touched[i] = len(self.steps)
            else:
                if i in self.going:
                    self._wait(i, self.going)
                self.ram -= self.sizes[i]

    def finish(self) -> Timing:
        """Wait for what is still going."""
        makespan = max(self.core, self.bus)
        self.place = len(self.waited)
        for i in list(self.touched):
            self._release(i)
        return Timing(
            steps=tuple(self.steps),
            core_s=tuple(self.core_times),
            begin_s=tuple(self.begin_times),
            waited=tuple(self.waited),
            makespan_s=makespan,
            stall_s=self.stall,
            peak_ram_bytes=self.peak,
        )

    def _compute(self, k: int) -> None:
        node = self.graph.nodes[k]
        for i in self.graph.inputs_of[k]:
            if i in self.arriving:
                self._wait(i, self.arriving)
        for i in self.graph.outputs_of[k]:
            if i in self.touched:
                self._release(i)
        self._make_room(node.output_bytes + node.workspace_bytes)
        self.ram += node.output_bytes
        self.begin_times.append(self.core)
        self.core += self.table.compute_time_s[k]

    def _transfer(self, op: Op, i: int) -> None:
        if i in self.touched:
            self._release(i)
        for under_way in (self.arriving, self.going):
            if i in under_way:
                self._wait(i, under_way)
        if op == Op.PAGE_IN:
            self._make_room(self.sizes[i])
            self.ram += self.sizes[i]
        begin = max(self.bus, self.core)
        self.begin_times.append(begin)
        self.began[i] = self.place
        if op == Op.PAGE_IN:
            self.bus = self.arriving[i] = begin + self.table.page_in_time_s[i]
        else:
            self.bus = self.going[i] = begin + self.table.page_out_time_s[i]

    def _make_room(self, size_bytes: int) -> None:
        """Wait for as many page-outs as it takes until so much fits."""
        while self.ram + size_bytes > self.budget and self.touched:
            self._release(min(self.touched, key=self.going.__getitem__))
        self.peak = max(self.peak, self.ram + size_bytes)

    def _release(self, i: int) -> None:
        """Wait for a page-out, which frees its tensor; page-ins that begin after it can follow."""
        self._wait(i, self.going)
        place = len(self.steps)
        while self.steps[place - 1].op == Op.PAGE_IN:
            place -= 1
        if self.touched.pop(i) != place:
            self.steps.insert(place, Instruction(Op.WAIT, i))
        self.ram -= self.sizes[i]

    def _wait(self, i: int, under_way: dict[int, float]) -> None:
        """Wait for a transfer, which ends it."""
        until_s = under_way.pop(i)
        self.waited[self.began[i]] = self.place
        if until_s > self.core:
            self.stall += until_s - self.core
            self.core = until_s
