"""From what a method did, step by step, to the five relations of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.errors import MethodNotApplicableError
from poetmodel.plan.program import Instruction, Op
from poetmodel.schedule import GraphIdentity, Schedule, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem

FITS: Final = 24
"""How often a method is run again with less RAM to fill."""


class Trace:
    """Records what an online method does, and knows what is where.

    Parameters
    ----------
    graph : Graph
        The training graph.

    Raises
    ------
    ValueError
        From its methods, if the device could not do what is recorded.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        """The training graph."""
        self.ram: set[int] = set()
        """Tensors in RAM."""
        self.aux: set[int] = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}
        """Tensors on storage; those that start there can be had from their first computation on."""
        self.events: list[Instruction] = []
        """What was done, in order."""

    def compute(self, k: int) -> None:
        """Compute node `k`: its inputs must be in RAM, its outputs are there afterwards."""
        missing = [i for i in self.graph.inputs_of[k] if i not in self.ram]
        if missing:
            msg = f"node {k} needs tensors {missing} in RAM"
            raise ValueError(msg)
        self.ram.update(self.graph.outputs_of[k])
        self.events.append(Instruction(Op.COMPUTE, k))

    def page_in(self, i: int) -> None:
        """Page tensor `i` in."""
        if i not in self.aux or i in self.ram:
            msg = f"tensor {i} is not on storage, or in RAM already"
            raise ValueError(msg)
        self.ram.add(i)
        self.events.append(Instruction(Op.PAGE_IN, i))

    def page_out(self, i: int) -> None:
        """Page tensor `i` out; it stays in RAM until it is freed."""
        if i not in self.ram:
            msg = f"tensor {i} is not in RAM"
            raise ValueError(msg)
        self.aux.add(i)
        self.events.append(Instruction(Op.PAGE_OUT, i))

    def free(self, i: int) -> None:
        """Evict tensor `i` from RAM."""
        if i not in self.ram:
            msg = f"tensor {i} is not in RAM"
            raise ValueError(msg)
        self.ram.remove(i)
        self.events.append(Instruction(Op.FREE, i))

    def schedule(self) -> Schedule:
        """Return the schedule of what was recorded; see `assemble`."""
        return assemble(self.graph, self.events)


def assemble(graph: Graph, events: Iterable[Instruction]) -> Schedule:
    """Turn computations, page-ins, page-outs and evictions, in order, into a schedule.

    Parameters
    ----------
    graph : Graph
        The training graph.
    events : iterable of Instruction
        What was done: first computations in graph order, all others where they happened. Ops are
        ``compute``, ``page_in``, ``page_out`` and ``free`` (an eviction, with or without a copy on
        storage); ``wait`` is skipped. Frees of what is not needed any more may be left out.

    Returns
    -------
    Schedule
        Valid by the rules of execution, if the device could do the events. Whether it keeps a
        budget is for the judge to say: see `fitted`.

    Notes
    -----
    A stage is everything up to the first computation of its node, and the page-outs and frees right
    after that. Within a stage the relations know no order but that of the nodes, and no second
    computation of one node. So what the events do twice in one stage is done once and stays in RAM
    between its uses there, and page-ins and page-outs move to the step of their tensor's node. A
    tensor that the stage frees before any use is not in RAM when the stage begins.
    """
    walk = _Assembly(graph)
    for stage in _stages(graph, events):
        walk.add(stage)
    return walk.schedule()


def fitted(problem: Problem, run: Callable[[int], Schedule]) -> Schedule:
    """Return what a method makes with the most RAM for which the judge finds the budget kept.

    Parameters
    ----------
    problem : Problem
        Gives the graph and the budget.
    run : callable
        The method: from the RAM that it may fill [B] to a schedule. It raises
        `MethodNotApplicableError` where that is too little for it.

    Raises
    ------
    MethodNotApplicableError
        If no try keeps the budget; with the method's own reason where its first try has one.

    Notes
    -----
    A schedule's stages are coarser than a method's own steps, so that the judge may find more RAM
    in use than the method did. Each try gives it as much less as was too much before.
    """
    usable = fill = problem.usable_ram_bytes
    peak = 0
    for _ in range(FITS):
        try:
            schedule = run(fill)
        except MethodNotApplicableError:
            if not peak:
                raise
            break
        peak = simulate(problem.graph, None, schedule).peak_ram_bytes
        if peak <= usable:
            return schedule
        fill -= peak - usable
        if fill <= 0:
            break
    tried = f"; its schedule needs {peak:,} B" if peak > usable else ""
    msg = f"it cannot keep within the {usable:,} B that tensors may use{tried}"
    raise MethodNotApplicableError(msg)


def _stages(graph: Graph, events: Iterable[Instruction]) -> Iterator[list[Instruction]]:
    """Yield the events of each stage; what follows the last stage's is of that one too."""
    stage: list[Instruction] = []
    t, done = 0, False
    for event in events:
        if done and event.op in (Op.COMPUTE, Op.PAGE_IN):
            yield stage
            stage, done, t = [], False, t + 1
        stage.append(event)
        if event.op == Op.COMPUTE and event.index == t:
            done = True
        elif event.op == Op.COMPUTE and event.index > t:
            msg = f"node {event.index} is computed before node {t}"
            raise ValueError(msg)
    if stage:
        yield stage
    if t != len(graph.nodes) - 1 or not done:
        msg = f"the events end before node {t if not done else t + 1} is computed"
        raise ValueError(msg)


class _Assembly:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.t = 0
        self.ram: set[int] = set()
        self.stored: dict[int, int] = {}
        """First stage in which a tensor is on storage when the stage begins."""
        for i, k in enumerate(graph.node_of):
            if graph.nodes[k].on_aux:
                self.stored[i] = k + 1
        self.computed: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []
        self.paged_in: list[tuple[int, int]] = []
        self.paged_out: list[tuple[int, int]] = []

    def add(self, stage: list[Instruction]) -> None:
        """Add a stage: what it begins with, and what it does."""
        t = self.t
        begun = self.ram & self._needed_from_before(stage)
        have = set(begun)
        for op, index in stage:
            if op == Op.COMPUTE:
                self.computed.append((t, index))
                have.update(self.graph.outputs_of[index])
                self.ram.update(self.graph.outputs_of[index])
            elif op == Op.PAGE_IN:
                if index not in have:
                    self.paged_in.append((t, index))
                have.add(index)
                self.ram.add(index)
            elif op == Op.PAGE_OUT:
                self.paged_out.append((t, index))
                self.stored.setdefault(index, t + 1)
            elif op == Op.FREE:
                self.ram.discard(index)
        self.kept.extend((t, i) for i in begun)
        self.t += 1

    def _needed_from_before(self, stage: list[Instruction]) -> set[int]:
        """Return the tensors that a stage reads, writes or keeps before it frees them."""
        gone: set[int] = set()
        needed: set[int] = set()
        for op, index in stage:
            if op == Op.COMPUTE:
                needed.update(i for i in self.graph.inputs_of[index] if i not in gone)
                gone.update(self.graph.outputs_of[index])
            elif op == Op.PAGE_OUT and index not in gone:
                needed.add(index)
            elif op in (Op.FREE, Op.PAGE_IN):
                gone.add(index)
        return needed | (self.ram - gone)

    def schedule(self) -> Schedule:
        """Return the relations of all stages."""
        last: dict[int, int] = dict.fromkeys(
            (i for i, k in enumerate(self.graph.node_of) if self.graph.nodes[k].on_aux),
            len(self.graph.nodes) - 1,
        )
        for t, i in self.paged_in:
            last[i] = max(t, last.get(i, 0))
        return Schedule(
            R=tuple(self.computed),
            S_RAM=tuple(self.kept),
            S_AUX=tuple((t, i) for i, end in last.items() for t in range(self.stored[i], end + 1)),
            M_in=tuple(self.paged_in),
            M_out=tuple(self.paged_out),
            identity=GraphIdentity.of(self.graph),
        )
